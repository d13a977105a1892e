"""What each baseline attends to: lists of pool rows, chosen by the current query.

`window` and `tova` have one list a request, `quest` and `oracle` one for each of its KV heads. All
attend to as many tokens: the sinks, `--sparse-budget` chosen ones, the recent ones and the current
one. A request that has no more tokens than that attends to all of them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cache_rank.kernels.attend.reference import attend_rows
from scripts.baselines import kernels, reference
from scripts.baselines.reference import Batch, Budget

QUEST_PAGE = 16
"""A page of Quest has this many tokens, as in the paper."""

PER_HEAD = {"window": False, "tova": False, "quest": True, "oracle": True}
"""Each mode has a list for every KV head, or one for all of them."""


@dataclasses.dataclass(slots=True)
class Step:
    """What the layers of a decode step share; H is the lists of a request, 1 or Hkv."""

    batch: Batch
    attended: Tensor  # (B * H,) int32 tokens that each list holds
    lists: Tensor  # (B, H, width) int32 pool row * H + head
    scores: Tensor  # (B, H, pages) float32


@dataclasses.dataclass
class Selection:
    """Lists of one mode over SGLang's pools.

    Attributes:
        heads: H, the lists of a request.
        bounds: for `quest`, of every page of the pool, a tensor a sparse layer.
    """

    mode: str  # a key of PER_HEAD
    budget: Budget  # what is attended to
    table: Tensor  # (request slots, context) int32
    keys: list[Tensor]  # of each sparse layer, (pool rows, Hkv, D)
    scale: float  # factor on the logits
    pool_page: int  # tokens of a page of the pool

    def __post_init__(self) -> None:
        rows, kv_heads, head_dim = self.keys[0].shape
        self.heads = kv_heads if PER_HEAD[self.mode] else 1
        self._kernels = kernels if self.keys[0].is_cuda else reference
        shape = (rows // self.pool_page, kv_heads, 2, head_dim)
        self.bounds = [key.new_zeros(shape) for key in self.keys if self.mode == "quest"]

    def prepare_step(self, slots: Tensor, lengths: Tensor) -> Step:
        """Prepare a decode step; the operations can be captured in a CUDA graph."""
        rows, budget, context = slots.shape[0], self.budget, self.table.shape[1]
        batch = Batch(self.table, slots, lengths, self.pool_page)
        attended = budget.attended_of(lengths).to(torch.int32)
        pages = torch.arange(-(-context // budget.page), device=slots.device)
        step = Step(
            batch,
            # The reshape of one row would be a view, which FlashAttention refuses.
            attended=attended[:, None].expand(rows, self.heads).reshape(-1).contiguous(),
            lists=self.table.new_zeros((rows, self.heads, budget.width)),
            scores=pages.float().repeat(rows, self.heads, 1),
        )
        if self.mode == "window":  # the newest are the best, in every layer
            self._kernels.select(step.scores, batch, budget, step.lists)
        return step

    def select(self, step: Step, layer: int, queries: Tensor) -> None:
        """Write one sparse layer's lists, by queries, (B, Hq, D), after its keys are written."""
        if self.mode == "window":
            return
        batch, keys, scores = step.batch, self.keys[layer], step.scores
        if self.mode == "quest":
            self._build_bounds(layer, batch, batch.lengths - 1, 1)
            self._kernels.score_pages(queries, self.bounds[layer], batch, self.budget, scores)
        else:
            shared = self.mode == "tova"
            reference.score_tokens(queries, keys, batch, self.scale, shared, scores)
        self._kernels.select(scores, batch, self.budget, step.lists)

    def on_prefill(self, slots: Tensor, before: Tensor, after: Tensor, most: int) -> None:
        """Take the bounds of the pages that prompts have completed, by at `most` so many tokens."""
        batch = Batch(self.table, slots, after, self.pool_page)
        for layer in range(len(self.bounds)):
            self._build_bounds(layer, batch, before, most // self.budget.page + 1)

    def _build_bounds(self, layer: int, batch: Batch, before: Tensor, max_pages: int) -> None:
        keys, page, bounds = self.keys[layer], self.budget.page, self.bounds[layer]
        self._kernels.build_bounds(keys, batch, before, max_pages, page, bounds)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, lists: Tensor, attended: Tensor, scale: float
) -> Tensor:
    """Attend to the lists of a step, in plain torch: (B, Hq, D) as queries are.

    Keys and values are the pool's, (pool rows, Hkv, D).
    """
    heads, out = lists.shape[1], torch.empty_like(queries)
    picked = (lists // heads).expand(-1, keys.shape[1], -1)
    counts = attended[::heads]  # the lists of a request are as long
    zeros = torch.zeros_like(counts)
    requests = picked[:, 0], zeros, counts, zeros, counts  # all of them are sparse
    attend_rows(queries, keys, values, picked, *requests, 0, scale, out)
    return out

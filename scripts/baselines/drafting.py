"""What drafts might attend to instead: selectors of published systems, in plain torch.

They take the place of the sketches in a server with drafts, which is otherwise the same: budgets,
sinks, recent tokens, verification. All but `newest` read true keys. They are compared for what they
select, and not for how long they take.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.row_sketch.reference import pick
from scripts.baselines.selection import QUEST_PAGE
from sglang_ext import processes
from sglang_ext.flags import CacheRankFlags
from sglang_ext.inline import starting
from sglang_ext.inline.attention import InlineAttnBackend
from sglang_ext.inline.selection import Heads, Selection

PASS_TOKENS = 32
"""Queries that are kept of a prefill; a verification has no more."""


@dataclass
class Seen:
    """What is known of a request in a layer since its last prefill or verification."""

    start: int  # position of the first of these:
    queries: Tensor  # (n, Hq, D) of that pass, one after the other
    last_query: Tensor | None = None  # of the newest draft since
    round_scores: Tensor | None = None  # what `once-a-round` has scored


class Question(NamedTuple):
    """What a selector is asked: scores of a request's tokens, (Hkv, T), in a layer."""

    seen: Seen
    query: Tensor  # (Hq, D), of the draft's token
    keys: Tensor  # (Hkv, T, D), true ones
    scale: float  # factor on logits

    def probabilities(self, queries: Tensor) -> Tensor:
        """Attention of queries, (n, Hq, D), to the keys: (n, Hkv, G, T)."""
        grouped = queries.float().unflatten(1, (len(self.keys), -1))
        return (grouped @ self.keys.mT * self.scale).softmax(dim=-1)

    def confirmed(self) -> Tensor:
        """Queries of the last pass that are before the draft's token."""
        return self.seen.queries[: self.keys.shape[1] - self.seen.start]


class ComparedSelection(Selection):
    """Selects by `score_by`, from true keys; `seen` is by layer and request slot."""

    def __init__(
        self, score_by: str, args: CacheRankFlags, heads: Heads, codes: Tensor, row_table: Tensor
    ) -> None:
        super().__init__(args, heads, codes, row_table)
        shape = *codes.shape[1:3], heads.head_dim
        self._keys = [torch.zeros(shape) for _ in range(heads.layers)]
        self._score_by = SELECTORS[score_by]
        self.seen: dict[tuple[int, int], Seen] = {}

    def encode(self, layer: int, keys: Tensor, rows: Tensor) -> None:
        """Keep keys as they are, beside their sketches."""
        super().encode(layer, keys, rows)
        self._keys[layer][:, rows.long()] = keys.transpose(0, 1).float()

    def select(
        self, layer: int, queries: Tensor, slots: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """See Selection."""
        width = self._sinks + self.curve.most + self._recent
        picked = slots.new_empty((len(queries), self._codes.shape[1], width), dtype=torch.int32)
        requests = zip(slots.tolist(), lengths.tolist(), self._budgets.tolist(), strict=True)
        for request, (slot, length, budget) in enumerate(requests):
            if length < self.sparse_from[slot]:
                continue
            rows = self._row_table[slot, :length].long()
            keys = self._keys[layer][:, rows[:-1]]
            query, seen = queries[request].float(), self.seen[layer, slot]
            scores = self._score_by(Question(seen, query, keys, scale))
            attended = rows[pick(scores, length, self._sinks, self._recent, budget)]
            picked[request, :, : attended.shape[-1]] = attended
            seen.last_query = query.clone()
        return picked


def by_newest(asked: Question) -> Tensor:
    """Score by position, as in StreamingLLM."""
    heads, tokens, _ = asked.keys.shape
    return torch.arange(tokens, dtype=torch.float32).expand(heads, -1)


def by_pass(asked: Question) -> Tensor:
    """Score once a round, by the queries of all tokens that the verification before confirmed."""
    seen = asked.seen
    if seen.round_scores is None:
        seen.round_scores = asked.probabilities(asked.confirmed()).sum(dim=(0, 2))
    missing = asked.keys.shape[1] - seen.round_scores.shape[1]
    return torch.nn.functional.pad(seen.round_scores, (0, missing), value=-1.0)


def by_quest(asked: Question) -> Tensor:
    """Score pages by an upper bound of their logits (Quest, section 3.2); pages start at 0."""
    heads, tokens, _ = asked.keys.shape
    missing = -tokens % QUEST_PAGE
    pages = torch.nn.functional.pad(asked.keys.mT, (0, missing), mode="replicate").mT
    pages = pages.unflatten(1, (-1, QUEST_PAGE))
    bounds = torch.stack((pages.amin(dim=2), pages.amax(dim=2)))[:, :, None]  # (2, Hkv, 1, P, D)
    products = asked.query.unflatten(0, (heads, -1)).unsqueeze(2) * bounds
    scores = products.amax(dim=0).sum(dim=-1).amax(dim=1)  # (Hkv, P)
    return scores.repeat_interleave(QUEST_PAGE, dim=-1)[:, :tokens]


def by_query(asked: Question) -> Tensor:
    """Score by the query itself."""
    return asked.probabilities(asked.query[None])[0].amax(dim=1)


def by_last_query(asked: Question) -> Tensor:
    """Score by the query of the token before."""
    last = asked.seen.last_query
    return by_query(asked._replace(query=asked.confirmed()[-1] if last is None else last))


SELECTORS = {
    "newest": by_newest,
    "once-a-round": by_pass,
    "quest": by_quest,
    "last-query": by_last_query,
    "exact": by_query,
}


class NotingBackend(InlineAttnBackend):
    """Shows the selection the queries of prefills and verifications."""

    _selection: ComparedSelection

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Tensor:
        index = layer.layer_id - self._dense_layers
        if index >= 0 and forward_batch.extend_seq_lens_cpu is not None:
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            parts = queries.split(list(forward_batch.extend_seq_lens_cpu))
            slots = forward_batch.req_pool_indices.tolist()
            starts = forward_batch.extend_prefix_lens.tolist()
            for slot, start, part in zip(slots, starts, parts, strict=True):
                kept = part[-PASS_TOKENS:].clone()
                self._selection.seen[index, slot] = Seen(start + len(part) - len(kept), kept)
        return super().forward_extend(q, k, v, layer, forward_batch, *args, **kw)


def run_scheduler_process(selector: str, *args: Any, **kwargs: Any) -> Any:
    """Run SGLang's scheduler process, on a CPU, with drafts that select in another way."""
    vars(starting).update(
        Selection=functools.partial(ComparedSelection, selector), InlineAttnBackend=NotingBackend
    )
    return processes.run_scheduler_process(*args, **kwargs)

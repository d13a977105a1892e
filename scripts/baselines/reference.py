"""Selection with the current query, plain torch: what runs on CPUs, and specifies the kernels.

`score_tokens` also runs on GPUs: TOVA and the oracle are compared for what they select, and not for
how long they take.

Keys are in SGLang's own pool, (pool rows, Hkv, D), where a `Batch` finds them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.select.reference import top_tokens


class Batch(NamedTuple):
    """Requests that decode, and where their tokens are."""

    table: Tensor  # (request slots, context) int32, the pool row of each token of each request
    slots: Tensor  # (B,) of any integer dtype, the request slots of the batch
    lengths: Tensor  # (B,) likewise, their tokens, the current one included
    pool_page: int  # tokens of a page of the pool


class Budget(NamedTuple):
    """Which tokens a decode step attends to: sinks, the newest, and the best of those between.

    Tokens are selected by whole pages; a page of one token selects tokens. What lies between the
    sinks and the newest tokens are the candidates.
    """

    sinks: int  # of the first tokens, always attended to; a multiple of `page`
    recent: int  # before the current one, always attended to, or up to a page more
    selected: int  # of the candidates; a multiple of `page`
    page: int  # selected together

    @classmethod
    def of_pages(cls, sinks: int, recent: int, selected: int, page: int) -> Budget:
        """Round up to whole pages."""
        return cls(-(-sinks // page) * page, recent, -(-selected // page) * page, page)

    @property
    def width(self) -> int:
        """The most tokens that a row attends to."""
        return self.sinks + self.selected + self.recent + self.page

    def sinks_of(self, lengths: Tensor) -> Tensor:
        """How many tokens are before the first candidate: (B,)."""
        return lengths.clamp(max=self.sinks)

    def recent_start_of(self, lengths: Tensor) -> Tensor:
        """The first token after the last candidate: (B,)."""
        wanted = (lengths - 1 - self.recent).clamp(min=0) // self.page * self.page
        return torch.maximum(wanted, self.sinks_of(lengths))

    def attended_of(self, lengths: Tensor) -> Tensor:
        """How many tokens are attended to, (B,): all, while the candidates fit in `selected`."""
        sinks, recent_start = self.sinks_of(lengths), self.recent_start_of(lengths)
        chosen = (recent_start - sinks).clamp(max=self.selected)
        return sinks + lengths - recent_start + chosen


def build_bounds(
    keys: Tensor, batch: Batch, starts: Tensor, max_pages: int, page: int, bounds: Tensor
) -> None:
    """Take the bounds of every page that the tokens from `start` on of a row complete.

    The bounds are those of Quest section 3.2.

    Args:
        batch: its pool's pages have one token or `page`.
        starts: (B,) integers, how many tokens the row had before.
        max_pages: at least how many pages a row completes.
        bounds: (pool rows / pool_page, Hkv, 2, D) of the keys' dtype, the largest and the smallest
            value of each channel; written in place. A page's entry is that of its first token.
    """
    lengths = (part.tolist() for part in (batch.slots, starts, batch.lengths))
    for slot, start, stop in zip(*lengths, strict=True):
        for index in range(start // page, stop // page):
            rows = batch.table[slot, index * page : (index + 1) * page].to(torch.int64)
            tokens = keys[rows]
            bounds[rows[0] // batch.pool_page, :, 0] = tokens.amax(dim=0)
            bounds[rows[0] // batch.pool_page, :, 1] = tokens.amin(dim=0)


def score_pages(queries: Tensor, bounds: Tensor, batch: Batch, budget: Budget, out: Tensor) -> None:
    """Bound the logits of every candidate page from above (Quest section 3.2).

    The bound of a query head is Σ_d max(q_d · min_d, q_d · max_d), and that of a kv head the
    largest of its group. A row whose candidates are all taken may be left alone.

    Args:
        queries: (B, Hq, D) current queries.
        bounds: see `build_bounds`.
        out: (B, Hkv, pages) float32, written in place; entries of pages that are no candidates keep
            what they hold.
    """
    kv_heads = bounds.shape[1]
    first, last = _candidate_pages(batch.lengths, budget)
    for row, slot in enumerate(batch.slots.tolist()):
        pages = torch.arange(first[row], last[row], device=bounds.device)
        entries = batch.table[slot, pages * budget.page].to(torch.int64) // batch.pool_page
        largest, smallest = bounds[entries].float().unbind(dim=2)  # (pages, Hkv, D)
        query = queries[row].float().reshape(kv_heads, -1, 1, queries.shape[-1])
        bound = torch.maximum(
            query * largest.transpose(0, 1)[:, None], query * smallest.transpose(0, 1)[:, None]
        ).sum(dim=-1)
        out[row, :, first[row] : last[row]] = bound.amax(dim=1)


def score_tokens(
    queries: Tensor, keys: Tensor, batch: Batch, scale: float, shared: bool, out: Tensor
) -> None:
    """Score every token exactly with the current query.

    Where each kv head selects for itself, a token's score is the largest log-probability that a
    query head of the group gives it. Where all heads share what they select, as in TOVA section 3,
    it is the mean of all heads' probabilities. Nothing waits for the lengths, so that a CUDA graph
    can hold it.

    Args:
        queries: (B, Hq, D) current queries.
        scale: factor on the logits.
        out: (B, Hkv, capacity) float32, or (B, 1, capacity) where heads share; written in place.
            Only entries of candidates mean something afterwards.
    """
    kv_heads = keys.shape[1]
    tables = batch.table[batch.slots.to(torch.int64)].to(torch.int64)  # (B, capacity)
    beyond = torch.arange(tables.shape[1], device=keys.device) >= batch.lengths[:, None]
    for row in range(len(queries)):  # one by one: keys are copied, and those of all are many
        tokens = keys[tables[row]].float()  # (capacity, Hkv, D)
        query = queries[row].float().reshape(kv_heads, -1, queries.shape[-1])
        logits = (query @ tokens.permute(1, 2, 0)) * scale  # (Hkv, G, capacity)
        log_probabilities = logits.masked_fill(beyond[row], -torch.inf).log_softmax(dim=-1)
        if shared:
            out[row, 0] = log_probabilities.exp().mean(dim=(0, 1))
        else:
            out[row] = log_probabilities.amax(dim=1)


def select(scores: Tensor, batch: Batch, budget: Budget, out: Tensor) -> None:
    """List what each row attends to: sinks, then the newest tokens, then the best candidates.

    The pages with the highest scores are selected. Ties go to the newer page, and NaN is below
    everything. Selected pages are listed from the newest to the oldest, the tokens of a page in
    their order.

    Args:
        scores: (B, H, capacity / page) float32; H is 1 where all heads share what they select.
        out: (B, H, width) int32, written in place: pool row * H + head of each token.
            `Budget.attended_of` says how many are written.
    """
    page, lengths = budget.page, batch.lengths
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    head = torch.arange(scores.shape[1], device=out.device).unsqueeze(-1)
    first, last = _candidate_pages(lengths, budget)
    recent_start = budget.recent_start_of(lengths).tolist()
    sinks = budget.sinks_of(lengths).tolist()
    for row, (slot, length) in enumerate(zip(batch.slots.tolist(), lengths.tolist(), strict=True)):
        always = [*range(sinks[row]), *range(recent_start[row], length)]
        best = top_tokens(scores[row], range(first[row], last[row]), budget.selected // page)
        chosen = best.sort(descending=True).values.unsqueeze(-1) * page  # (H, pages, 1)
        tokens = torch.cat(
            (
                torch.tensor(always, device=out.device).expand(len(head), -1),
                (chosen + torch.arange(page, device=out.device)).flatten(1),
            ),
            dim=1,
        )
        out[row, :, : tokens.shape[1]] = batch.table[slot][tokens] * len(head) + head


def _candidate_pages(lengths: Tensor, budget: Budget) -> tuple[list[int], list[int]]:
    """The first candidate page of each row, and the page after the last."""
    first = -(-budget.sinks_of(lengths) // budget.page)
    last = budget.recent_start_of(lengths) // budget.page
    return first.tolist(), torch.maximum(first, last).tolist()

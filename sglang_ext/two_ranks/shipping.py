"""Tokens go to the cache rank: prompts a chunk a step, and with drafts what has been verified.

Complete pages go as codes, if the format takes them, while more is missing than a chunk of tokens
as they are. The rest goes as it is, and with it what the format may read as it came: the last
tokens of these pages.

What another server prefills is shipped page by page as it comes, before the request decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Drop, End, Share
from sglang_ext.two_ranks.lifecycle import Lifecycle, SparseSequence
from sglang_ext.two_ranks.recovery import CacheRankClient


class Shipping:
    def __init__(
        self,
        cache_rank: CacheRankClient,
        lifecycle: Lifecycle,
        req_to_token: Tensor,
        chunk_tokens: int,
        coded_tokens: int,
        tail_tokens: int | None,
    ) -> None:
        """Ship from SGLang's table.

        Args:
            chunk_tokens, coded_tokens: tokens of a chunk as they are, and as codes; 0 if none are.
            tail_tokens: see `residency.shared_tail`.
        """
        self._cache_rank = cache_rank
        self._lifecycle = lifecycle
        self._req_to_token = req_to_token
        self._chunk_tokens = chunk_tokens
        self._coded_tokens = coded_tokens
        self._tail_tokens = tail_tokens or 0

    def advance(self, sequence: SparseSequence, length: int) -> None:
        """Ship the next tokens of a request that has `length` in the pool, or let it wait."""
        if not self._may_go_on(sequence):
            return
        if coded := self._pages_to_ship(sequence, length):
            pool_rows = self._pool_rows(sequence, sequence.complete, coded)
            self._cache_rank.call(lambda exchange: exchange.ship_pages(sequence, pool_rows))
        elif (count := min(length - sequence.shipped, self._chunk_tokens)) > 0:
            pool_rows = self._pool_rows(sequence, sequence.shipped, count)
            self._cache_rank.call(lambda exchange: exchange.ship([(sequence, count)], pool_rows))
        self._name_shipped(sequence)

    def lacks_little(self, sequence: SparseSequence, length: int) -> bool:
        """Whether a sequence that has begun lacks no more than a chunk of so many tokens."""
        missing = length - sequence.shipped
        return not sequence.ended and sequence.shipped > 0 and 0 < missing <= self._chunk_tokens

    def ship_rest(self, sequences: Sequence[tuple[SparseSequence, int]]) -> None:
        """Ship what is missing of sequences that lack little, several of them at once.

        Each shipment takes the cache rank about a millisecond, whatever is in it.
        """
        parts: list[tuple[SparseSequence, int]] = []
        room = self._chunk_tokens
        for sequence, length in sequences:
            missing = length - sequence.shipped
            if missing > room:
                self._ship_together(parts)
                parts, room = [], self._chunk_tokens
            parts.append((sequence, missing))
            room -= missing
        self._ship_together(parts)

    def _ship_together(self, parts: list[tuple[SparseSequence, int]]) -> None:
        table = self._req_to_token
        rows = [table[each.row, each.shipped : each.shipped + count] for each, count in parts]
        if rows:
            pool_rows = torch.cat(rows).to(torch.int64)
            self._cache_rank.call(lambda exchange: exchange.ship(parts, pool_rows))
        for sequence, _ in parts:
            self._name_shipped(sequence)

    def ship_arrived(
        self, sequence: SparseSequence, pool_rows: Tensor, page: Sequence[Tensor] | None
    ) -> None:
        """Ship what has come of a prompt, or let it wait for another request that ships the same.

        A page that the cache rank has already is not shipped again. One that waited is made up for.

        Args:
            pool_rows: (n,) int64, the rows of all tokens that have come, which fill pages.
            page: codes of the last page, if the cache rank takes these; see `PageEncoder.pack`.
        """
        if not self._may_go_on(sequence):
            return
        if page is not None and sequence.complete == len(pool_rows) - PAGE_TOKENS:
            self._cache_rank.call(lambda exchange: exchange.pass_on(sequence, page))
        elif self._coded_tokens:
            rows = pool_rows[sequence.complete :][: self._coded_tokens]
            if len(rows):
                self._cache_rank.call(lambda exchange: exchange.ship_pages(sequence, rows))
        else:
            rows = pool_rows[sequence.shipped :][: self._chunk_tokens]
            if len(rows):
                self._cache_rank.call(lambda exchange: exchange.ship([(sequence, len(rows))], rows))
        self._name_shipped(sequence)

    def _may_go_on(self, sequence: SparseSequence) -> bool:
        """Whether a request may be shipped now; it may have ended, or have to wait."""
        if sequence.ended:
            return False
        if self._lifecycle.prompts is None:
            return True
        return sequence.prefix.began or self._take(sequence)

    def _name_shipped(self, sequence: SparseSequence) -> None:
        """Let others have the pages that are complete."""
        if self._lifecycle.prompts is None or sequence.ended:
            return
        if names := self._lifecycle.name_shipped(sequence):
            self._cache_rank.tell(Share(sequence.sequence_id, names))

    def _pool_rows(self, sequence: SparseSequence, start: int, count: int) -> Tensor:
        return self._req_to_token[sequence.row, start : start + count].to(torch.int64)

    def _pages_to_ship(self, sequence: SparseSequence, length: int) -> int:
        """How many tokens of complete pages go as codes next."""
        begun = sequence.shipped > max(0, sequence.complete - self._tail_tokens)
        if begun or length - sequence.shipped <= self._chunk_tokens:
            return 0
        left = (length - sequence.complete) // PAGE_TOKENS * PAGE_TOKENS
        return min(left, self._coded_tokens)

    def drop_unused(self, everything: bool = False) -> None:
        """Tell the cache rank which pages are to go: those whose room is needed, or all."""
        if (prompts := self._lifecycle.prompts) is None:
            return
        if everything:
            prompts.drop(prompts.tokens)
        if names := prompts.take_dropped():
            self._cache_rank.tell(Drop(names))

    def _take(self, sequence: SparseSequence) -> bool:
        """Let a request begin with what the cache rank has of it; whether it goes on from there.

        One that waits for another's shipment begins its sequence now: later ones would overtake it,
        and the cache rank takes sequences in order only.
        """
        assert self._lifecycle.prompts is not None
        self.drop_unused()
        if sequence.ended:  # the cache rank was lost just now
            return False
        prefix = sequence.prefix
        if self._lifecycle.prompts.must_wait(prefix):
            if not prefix.announced:
                prefix.announced = True
                self._cache_rank.call(lambda exchange: exchange.adopt(sequence, []))
            return False
        names = self._lifecycle.take_shared(sequence)
        if names is None:
            self._lifecycle.end(sequence.row)
            if prefix.announced:
                self._cache_rank.tell(End([sequence.sequence_id]))
            return False
        self.drop_unused()
        if names:
            sequence.complete = PAGE_TOKENS * len(names)
            sequence.shipped = sequence.complete - self._tail_tokens
            self._cache_rank.call(lambda exchange: exchange.adopt(sequence, names))
        return True

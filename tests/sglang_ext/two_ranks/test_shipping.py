"""Prompts that another server prefills are shipped as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_requests import fake_request
from torch import Tensor

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Share
from sglang_ext.request_state import prepare_requests
from sglang_ext.two_ranks.lifecycle import Lifecycle, SparseSequence
from sglang_ext.two_ranks.shared_prompts import SharedPrompts
from sglang_ext.two_ranks.shipping import Shipping
from sglang_ext.two_ranks.working_set import Reserve

CONFIG = CacheRankConfig(ModelShape(2, 2, 1, 8, "float32", 1.0), sparse_budget=8)
PAGES, TAIL = 6, 128
ROWS = torch.arange(PAGES * PAGE_TOKENS) + 7
CODES = [torch.zeros(2, 3, dtype=torch.uint8)]


class CacheRank:
    """Takes what is shipped, as an exchange counts it.

    Attributes:
        came: of each sequence, (how, first token, tokens).
    """

    def __init__(self) -> None:
        self.came: dict[int, list[tuple[str, int, int]]] = {}
        self.shipments: list[int] = []  # how many sequences each of tokens as they are is of

    def call(self, action: Callable[[Any], None]) -> None:
        action(self)

    def tell(self, message: Any) -> None:
        assert isinstance(message, Share)

    def adopt(self, sequence: SparseSequence, names: list[int]) -> None:
        self._note(sequence, "adopted", 0, len(names) * PAGE_TOKENS)

    def ship(self, parts: Sequence[tuple[SparseSequence, int]], pool_rows: Tensor) -> None:
        self.shipments.append(len(parts))
        of_parts = pool_rows.split([count for _, count in parts])
        for (sequence, count), rows in zip(parts, of_parts, strict=True):
            self._note(sequence, "as they are", sequence.shipped, count, rows)
            sequence.shipped += count

    def ship_pages(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        self._note(sequence, "encoded here", sequence.complete, len(pool_rows), pool_rows)
        self._add_pages(sequence, len(pool_rows))

    def pass_on(self, sequence: SparseSequence, page: Any) -> None:
        assert page is CODES
        self._note(sequence, "passed on", sequence.complete, PAGE_TOKENS)
        self._add_pages(sequence, PAGE_TOKENS)

    def _add_pages(self, sequence: SparseSequence, count: int) -> None:
        sequence.complete += count
        sequence.shipped = sequence.complete - TAIL

    def _note(
        self, sequence: SparseSequence, how: str, first: int, count: int, rows: Any = None
    ) -> None:
        assert rows is None or torch.equal(rows, ROWS[first : first + count])
        self.came.setdefault(sequence.sequence_id, []).append((how, first, count))


class Server:
    """Prompts come to it, the same one to several requests."""

    def __init__(self, coded_tokens: int, table: Tensor | None = None) -> None:
        self.cache_rank: Any = CacheRank()
        prompts = SharedPrompts(TAIL)
        self.lifecycle = Lifecycle(CONFIG, Reserve(0, 12, 8), 1, 1 << 20, prompts)
        self.lifecycle.capacity_tokens = 1 << 20
        table = torch.empty(0) if table is None else table
        self.shipping = Shipping(self.cache_rank, self.lifecycle, table, 512, coded_tokens, TAIL)

    def begin(self, slot: int) -> SparseSequence:
        request = fake_request(
            req_pool_idx=slot,
            origin_input_ids=[*range(len(ROWS))],
            output_ids=[],
            extra_key=None,
            cache_salt=None,
            sampling_params=SimpleNamespace(custom_params=None, max_new_tokens=9),
        )
        prepare_requests([request])
        return self.lifecycle.begin(request, len(ROWS))

    def begin_shipped(self, slot: int, shipped: int) -> SparseSequence:
        """A request of which so many tokens have been shipped, and whose rows are ROWS."""
        sequence = self.begin(slot)
        sequence.prefix.began, sequence.shipped = True, shipped
        return sequence

    def come(self, sequence: SparseSequence, *pages: int, codes: Any = None) -> list[Any]:
        """Pages come, counted from 0; what was shipped of the sequence so far."""
        for page in pages:
            rows = ROWS[: (page + 1) * PAGE_TOKENS]
            self.shipping.ship_arrived(sequence, rows, codes)
        return self.cache_rank.came.get(sequence.sequence_id, [])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("coded_tokens", "codes", "how"),
    [(768, CODES, "passed on"), (768, None, "encoded here"), (0, None, "as they are")],
)
def test_each_page_is_shipped_when_it_comes(coded_tokens: int, codes: Any, how: str) -> None:
    server = Server(coded_tokens)
    sequence = server.begin(1)
    shipped = server.come(sequence, *range(PAGES), codes=codes)
    assert shipped == [(how, page * PAGE_TOKENS, PAGE_TOKENS) for page in range(PAGES)]
    assert sequence.shipped == PAGES * PAGE_TOKENS - TAIL * bool(coded_tokens)


@pytest.mark.parametrize(("coded_tokens", "codes"), [(512, CODES), (512, None), (0, None)])
def test_a_prompt_that_waited_for_another_catches_up(coded_tokens: int, codes: Any) -> None:
    """The other ends in the middle, and leaves the pages that were complete."""
    server = Server(coded_tokens)
    first, second = server.begin(1), server.begin(2)
    server.come(first, 0, codes=codes)
    assert server.come(second, 0, 1, 2, codes=codes) == [("adopted", 0, 0)]
    server.come(first, 1, codes=codes)
    server.lifecycle.end(1)
    found = 1  # the second page has a tail, which has not come
    shipped = server.come(second, *range(3, PAGES), codes=codes)
    assert shipped[1] == ("adopted", 0, found * PAGE_TOKENS)
    assert all(how != "adopted" for how, *_ in shipped[2:])
    begun = found * PAGE_TOKENS - (0 if coded_tokens else TAIL)
    for _, start, count in shipped[2:]:
        assert start == begun
        assert count <= 512
        begun += count
    assert begun == (PAGES * PAGE_TOKENS if coded_tokens else second.shipped)
    assert len(ROWS) - second.shipped <= (TAIL if coded_tokens else 512)


def test_pages_of_another_are_not_shipped_again() -> None:
    server = Server(768)
    first, second = server.begin(1), server.begin(2)
    server.come(first, *range(PAGES), codes=CODES)
    shipped = server.come(second, *range(PAGES), codes=CODES)
    last = (PAGES - 1) * PAGE_TOKENS
    assert shipped == [("adopted", 0, last), ("passed on", last, PAGE_TOKENS)]


def test_nothing_is_shipped_of_a_sequence_that_has_ended() -> None:
    server = Server(768)
    sequence = server.begin(1)
    server.come(sequence, 0, codes=CODES)
    server.lifecycle.end(1)
    assert len(server.come(sequence, 1, 2, codes=CODES)) == 1


def test_what_little_is_missing_of_sequences_goes_together() -> None:
    """As much as fits into a chunk; what is complete, or lacks more, does not go with it."""
    table = ROWS.repeat(5, 1)
    server = Server(0, table=table)
    begun = [server.begin_shipped(slot, shipped) for slot, shipped in ((1, 3), (2, 1190))]
    begun += [server.begin_shipped(slot, 900) for slot in (3, 4)]
    lengths = [300, 1197, 1109, 901]
    assert not server.shipping.lacks_little(begun[0], 3)
    assert not server.shipping.lacks_little(begun[0], 3 + 513)
    assert not server.shipping.lacks_little(server.begin(0), 3)  # it has to begin
    together = list(zip(begun, lengths, strict=True))
    assert all(server.shipping.lacks_little(*one) for one in together)
    server.shipping.ship_rest(together)
    assert server.cache_rank.shipments == [2, 2]
    assert [sequence.shipped for sequence in begun] == lengths
    server.shipping.ship_rest([])
    assert server.cache_rank.shipments == [2, 2]

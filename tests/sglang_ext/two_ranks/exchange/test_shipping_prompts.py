"""Prompts on their way to the cache rank: in which chunks, as codes or as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from inference_side import CONFIG, MODEL, InferenceSide
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Load
from cache_rank.residency.encoding import shipment_bytes, tokens_as_codes
from sglang_ext.request_state import RequestStatistics
from sglang_ext.two_ranks.lifecycle import SparseSequence
from sglang_ext.two_ranks.shared_prompts import SharedPage, SharedPrefix
from sglang_ext.two_ranks.shipping import Shipping

POOL_ROWS = 2500
LENGTHS = (200, 300, 511, 512, 513, 640, 767, 768, 769, 1100, 1407, 1536, 2303)
"""Of prompts, below a chunk, and at, below and above borders of pages and chunks."""

CHUNK = 300


def config_of(name: str) -> CacheRankConfig:
    return msgspec.structs.replace(CONFIG, kv_residency=name, checksum=False)


class Prompts:
    """The prompts of an inference rank, whose pool rows are in any order, and their cache rank."""

    def __init__(self, name: str, chunk: int = CHUNK, as_codes: bool = True) -> None:
        config = config_of(name)
        coded = tokens_as_codes(config, chunk) if as_codes else 0
        self.side = InferenceSide(config, POOL_ROWS, coded)
        self.prompts: Any = None
        self.lifecycle: Any = SimpleNamespace(prompts=None)
        client: Any = SimpleNamespace(
            call=lambda action: action(self.side.exchange),
            tell=lambda message: self.side.connection.control.send(message),
        )
        order = torch.randperm(POOL_ROWS, generator=torch.Generator().manual_seed(3))
        tail = residency.shared_tail(config)
        table = order.to(torch.int32).unsqueeze(0)
        self.shipping = Shipping(client, self.lifecycle, table, chunk, coded, tail)

    def begin(self, sequence_id: int = 1) -> SparseSequence:
        return SparseSequence(sequence_id, None, 0, 0, 0, RequestStatistics())

    def ship(self, sequence: SparseSequence, length: int, grows: int = 0) -> int:
        """Ship a prompt that grows by so many tokens a step; how many steps it took."""
        for step in range(100):
            self.shipping.advance(sequence, length + grows * step)
            if sequence.shipped == length + grows * step:
                return step + 1
        raise AssertionError("it is never shipped")

    def held(self, sequence_id: int = 1) -> list[Tensor]:
        """All that is read of a sequence, byte by byte."""
        selector = self.side.connection.selector
        sequence: Any = selector.sequences[sequence_id]
        tokens: Any = selector._residency._tokens  # type: ignore[attr-defined]
        coded, held = tokens.coded(sequence.tokens), [torch.tensor([sequence.tokens])]
        for planes, ring in zip(tokens.planes, tokens.rings, strict=True):
            for plane in planes:
                of_pages = plane[sequence.pages].permute(1, 2, 0, 3, 4).flatten(2, 3)
                held.append(of_pages[:, :, : coded * plane.shape[3] // PAGE_TOKENS])
            newest = torch.arange(coded, sequence.tokens) % ring.shape[3]
            held.append(ring[sequence.slot][:, :, newest])
        return [part.contiguous().view(torch.uint8) for part in held]

    @property
    def loads(self) -> list[Load]:
        return [message for message in self.side.connection.sent if isinstance(message, Load)]


@pytest.mark.parametrize("name", ["quantspec", "lynx", "hack"])
@pytest.mark.parametrize("length", LENGTHS)
def test_codes_take_fewer_bytes_and_not_more_steps_and_hold_the_same(
    name: str, length: int
) -> None:
    by_codes, as_is = Prompts(name), Prompts(name, as_codes=False)
    steps = by_codes.ship(by_codes.begin(), length, grows=1)
    reached = length + steps - 1
    plain_steps = as_is.ship(as_is.begin(), reached)
    for one, other in zip(by_codes.held(), as_is.held(), strict=True):
        assert torch.equal(one, other)
    assert steps <= plain_steps + 1
    coded = sum(load.count for load in by_codes.loads if load.as_codes)
    whole = sum(load.count for load in by_codes.loads if not load.as_codes)
    tail = residency.shared_tail(config_of(name)) or 0
    assert coded + whole == reached + (tail if coded else 0)
    assert (coded > 0) == (length > CHUNK)
    assert whole <= max(CHUNK, PAGE_TOKENS + tail) + steps
    sent = by_codes.side.exchange.counters.bulk_bytes
    loads = [
        shipment_bytes(config_of(name), load.count) for load in by_codes.loads if load.as_codes
    ]
    assert sent == sum(loads) + whole * MODEL.bytes_per_token
    assert max(loads, default=0) <= CHUNK * MODEL.bytes_per_token
    if length >= 1100:
        assert steps < plain_steps
        assert sent < 0.75 * as_is.side.exchange.counters.bulk_bytes


def test_tokens_that_are_held_as_they_came_are_shipped_so() -> None:
    prompts = Prompts("bf16")
    prompts.ship(prompts.begin(), 500)
    assert [load.as_codes for load in prompts.loads] == [False, False]


def test_a_chunk_that_holds_no_page_is_shipped_as_it_is() -> None:
    prompts = Prompts("quantspec", chunk=40)
    prompts.ship(prompts.begin(), 700)
    assert not any(load.as_codes for load in prompts.loads)


def test_what_follows_tokens_that_went_as_they_are_goes_so_too() -> None:
    """A sequence that waits in dense rounds, say, and has grown by many tokens meanwhile."""
    prompts = Prompts("quantspec")
    sequence = prompts.begin()
    prompts.ship(sequence, 200)
    prompts.ship(sequence, 1500)
    assert not any(load.as_codes for load in prompts.loads)


@pytest.mark.parametrize("name", ["quantspec", "lynx", "hack"])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_a_sequence_goes_on_behind_what_it_has_of_others(name: str, shared: int) -> None:
    """With codes where its pages end, and with their last tokens if no more pages follow."""
    length, tail = 4 * PAGE_TOKENS + 200, residency.shared_tail(config_of(name)) or 0
    prompts, names = Prompts(name), [7, 8, 9, 10][:shared]
    first, second = prompts.begin(), prompts.begin(2)
    prompts.ship(first, length)
    selector = prompts.side.connection.selector
    selector.share(selector.sequences[1], names)
    before = len(prompts.loads)
    pages = [SharedPage(name) for name in names]
    second.prefix = SharedPrefix([], pages, began=False)
    prompts.lifecycle.prompts = SimpleNamespace(
        must_wait=lambda prefix: False, take_dropped=list, tokens=0
    )

    def take(sequence: SparseSequence) -> list[int]:
        sequence.prefix.began = True
        return names

    prompts.lifecycle.take_shared = take
    prompts.lifecycle.name_shipped = lambda sequence: []
    prompts.ship(second, length)
    loads = prompts.loads[before:]
    ends = shared * PAGE_TOKENS
    assert loads[0].start == (ends if loads[0].as_codes else ends - tail)
    assert loads[0].as_codes == (shared < 4)
    for one, other in zip(prompts.held(1), prompts.held(2), strict=True):
        assert torch.equal(one, other)

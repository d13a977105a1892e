"""What prompts have in common: who ships it, who waits, who has it, and what is dropped when."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_requests import fake_request

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.pages import PAGE_TOKENS
from sglang_ext import compat
from sglang_ext.request_state import prepare_requests
from sglang_ext.two_ranks.lifecycle import Lifecycle, SparseSequence
from sglang_ext.two_ranks.shared_prompts import SharedPrompts
from sglang_ext.two_ranks.working_set import Reserve

CONFIG = CacheRankConfig(ModelShape(2, 2, 1, 8, "float32", 1.0), sparse_budget=8)
TEXT = random.Random(0).choices(range(1000), k=20 * PAGE_TOKENS)
ADDED = 10


def pages(number: int) -> int:
    return number * PAGE_TOKENS


class Rank:
    """An inference rank as far as it ships prompts, and the pages that its cache rank holds."""

    def __init__(self, capacity: int = pages(100), tail: int = 0) -> None:
        self.tail = tail
        self.prompts = SharedPrompts(tail)
        self.lifecycle = Lifecycle(CONFIG, Reserve(0, 12, 8), 1, 1 << 20, self.prompts)
        self.lifecycle.capacity_tokens = capacity
        self.names: set[int] = set()
        self._slots = 0

    def request(
        self, prompt: list[int], extra_key: str | None = None, salt: str | None = None
    ) -> Any:
        self._slots += 1
        request = fake_request(
            req_pool_idx=self._slots,
            origin_input_ids=prompt,
            output_ids=[],
            extra_key=extra_key,
            cache_salt=salt,
            sampling_params=SimpleNamespace(custom_params=None, max_new_tokens=ADDED),
        )
        prepare_requests([request])
        return request

    def begin(self, prompt: list[int], extra_key: str | None = None) -> SparseSequence | None:
        request = self.request(prompt, extra_key)
        if self.lifecycle.reason_to_stay_dense(request, len(prompt), is_up=True):
            return None
        return self.lifecycle.begin(request, len(prompt))

    def begun(self, prompt: list[int], extra_key: str | None = None) -> SparseSequence:
        sequence = self.begin(prompt, extra_key)
        assert sequence is not None
        return sequence

    def ship(self, sequence: SparseSequence, most: int = 1 << 20) -> bool:
        """Ship tokens, unless the sequence must wait; whether it did."""
        prefix, length = sequence.prefix, len(sequence.request.origin_input_ids)
        if not prefix.began:
            if self.prompts.must_wait(prefix):
                return False
            names = self.lifecycle.take_shared(sequence)
            assert names is not None
            assert {*names} <= self.names
            sequence.shipped = max(0, pages(len(names)) - self.tail)
        sequence.shipped = min(length, sequence.shipped + most)
        if named := self.lifecycle.name_shipped(sequence):
            assert pages(len(prefix.pages)) + self.tail <= sequence.shipped
            self.names |= {*named}
        self.names -= {*self.prompts.take_dropped()}
        return True

    def end(self, sequence: SparseSequence) -> None:
        self.lifecycle.end(sequence.row)


def test_the_first_ships_and_the_others_begin_where_it_has_got_to() -> None:
    rank = Rank()
    first = rank.begun(TEXT[: pages(3) + 5])
    shorter, same, other = (
        rank.begun(prompt)
        for prompt in (TEXT[: pages(1)] + TEXT[: pages(2)], TEXT[: pages(3) + 9], TEXT[1:600])
    )
    assert rank.ship(first, pages(1) - 1)
    assert not rank.ship(shorter)
    assert not rank.ship(same)
    assert rank.ship(other)
    assert rank.ship(first, 1)
    assert rank.ship(shorter)
    assert shorter.prefix.pages[:1] == first.prefix.pages
    assert not rank.ship(same)
    assert rank.ship(first)
    assert rank.ship(same, 0)
    assert same.shipped == pages(3)
    assert same.prefix.pages == first.prefix.pages


def test_those_that_wait_go_on_when_the_first_has_ended() -> None:
    rank = Rank()
    first, second, third = (rank.begun(TEXT[: pages(3)]) for _ in range(3))
    assert rank.ship(first, pages(1))
    assert not rank.ship(second)
    rank.end(first)
    assert rank.ship(second, pages(1))
    assert second.shipped == pages(2)
    assert not rank.ship(third)
    rank.end(second)
    assert rank.ship(third, 0)
    assert third.shipped == pages(2)


def test_a_page_can_be_waited_for_only_if_its_tail_will_come() -> None:
    tail = 128
    rank = Rank(tail=tail)
    first, second = (rank.begun(TEXT[: pages(2) + tail - 1]) for _ in range(2))
    assert rank.ship(first)
    assert rank.ship(second, 0)
    assert second.shipped == pages(1) - tail


@pytest.mark.parametrize("extra_key", ["tenant", "None"])
def test_what_is_kept_apart_in_the_pool_is_kept_apart_here(extra_key: str) -> None:
    rank = Rank()
    assert rank.ship(rank.begun(TEXT[: pages(2)]))
    for key, found in ((extra_key, 0), (None, pages(2))):
        sequence = rank.begun(TEXT[: pages(2)], key)
        assert rank.ship(sequence, 0)
        assert sequence.shipped == found


@pytest.mark.skipif(not compat.HAS_SALT, reason="this release has the salt in extra_key")
def test_prompts_with_different_salts_are_kept_apart() -> None:
    rank = Rank()
    keys = [
        rank.prompts.keys_of(rank.request(TEXT[: pages(2)], salt=salt), pages(2))
        for salt in (None, "one", "another", "one")
    ]
    assert keys[1] == keys[3]
    assert len({key for found in keys for key in found}) == 6


def test_what_was_computed_by_several_weights_is_not_shared() -> None:
    """Weights have changed since its prefill began."""
    rank = Rank()
    rank.lifecycle.weight_updates = 1
    request = rank.request(TEXT[: pages(2)])
    for weights, shared in ((0, 0), (1, 2)):
        request.cache_rank_weights = weights
        assert rank.lifecycle.reason_to_stay_dense(request, pages(2), is_up=True) is None
        assert len(rank.lifecycle.begin(request, pages(2)).prefix.keys) == shared


def test_what_sparse_steps_wrote_is_not_shared() -> None:
    rank = Rank()
    request = rank.request(TEXT[: pages(3)])
    request.cache_rank_dense_tokens = pages(2) - 1
    assert rank.lifecycle.reason_to_stay_dense(request, pages(3), is_up=True) is None
    assert len(rank.lifecycle.begin(request, pages(3)).prefix.keys) == 1


def test_a_prompt_is_counted_once() -> None:
    # Room for one prompt, and for what each of four requests adds.
    rank = Rank(capacity=pages(4) + 4 * (ADDED + 1))
    sequences = [rank.begun(TEXT[: pages(4)])]
    assert rank.ship(sequences[0], 0)
    sequences += [rank.begun(TEXT[: pages(4)]) for _ in range(3)]
    assert rank.begin(TEXT[: pages(4)]) is None
    for sequence in sequences:
        assert rank.ship(sequence)
    assert rank.begin(TEXT[: pages(4)]) is None
    rank.end(sequences[0])
    assert rank.begin(TEXT[: pages(4)]) is not None


@pytest.mark.parametrize("missing", [0, 1])
def test_what_waits_may_find_no_room_when_it_must_ship_itself(missing: int) -> None:
    rank = Rank(capacity=pages(5) + 2 * (ADDED + 1) - missing)
    first = rank.begun(TEXT[: pages(2)])
    assert rank.ship(first, 0)
    waits = rank.begun(TEXT[: pages(2)])
    rank.end(first)
    rank.begun(TEXT[7 : 7 + pages(3)])  # takes the room
    assert (rank.lifecycle.take_shared(waits) is None) == bool(missing)


def test_pages_stay_until_their_room_is_needed_and_the_oldest_go_first() -> None:
    rank = Rank(capacity=pages(6))
    for start in (0, 1000):
        sequence = rank.begun(TEXT[start : start + pages(2)])
        assert rank.ship(sequence)
        rank.end(sequence)
    assert rank.prompts.tokens == pages(4)
    touched = rank.begun(TEXT[: pages(2)])  # the first prompt comes again
    assert rank.ship(touched)
    rank.end(touched)
    other = rank.begun(TEXT[2000 : 2000 + pages(3) - ADDED - 1])
    assert rank.ship(other)
    # The end of the second prompt went.
    assert rank.prompts.tokens == pages(3) + pages(2)
    found = rank.prompts.prefix_of(rank.request(TEXT[1000 : 1000 + pages(2)]), pages(2))
    assert found.expected == 1
    found = rank.prompts.prefix_of(rank.request(TEXT[: pages(2)]), pages(2))
    assert found.expected == 2
    assert len(rank.names) * PAGE_TOKENS == rank.prompts.tokens


@pytest.mark.parametrize("tail", [0, 128])
@pytest.mark.parametrize("seed", range(20))
def test_the_books_balance_after_any_course_of_events(seed: int, tail: int) -> None:
    source = random.Random(seed)
    capacity = pages(source.randint(3, 12))
    rank = Rank(capacity, tail)
    live: list[SparseSequence] = []
    for _ in range(300):
        draw = source.random()
        if draw < 0.4:
            start = source.choice((0, 0, 0, pages(1), 300))
            prompt = TEXT[start : start + source.randint(1, pages(5))]
            live += [begun] if (begun := rank.begin(prompt)) else []
        elif draw < 0.6 and live:
            rank.end(live.pop(source.randrange(len(live))))
        elif draw < 0.61:
            for sequence in live:
                rank.end(sequence)
            live.clear()
            rank.lifecycle.forget_shared()
            rank.names.clear()
        elif live:
            sequence = source.choice(live)
            may_begin = sequence.prefix.began or rank.prompts.must_wait(sequence.prefix)
            if not may_begin and rank.lifecycle.take_shared(sequence) is None:
                live.remove(sequence)
                rank.end(sequence)
                continue
            rank.ship(sequence, source.randint(1, pages(2)))
        reserved = sum(sequence.reserved_tokens for sequence in live)
        assert rank.lifecycle._reserved_tokens == reserved
        assert reserved + rank.prompts.tokens <= capacity
        users = sum(len(sequence.prefix.pages) for sequence in live)
        assert sum(page.users for page in rank.prompts._pages.values()) == users
        unused = sum(not page.users for page in rank.prompts._pages.values())
        assert rank.prompts.droppable() == pages(unused)
    for sequence in live:
        rank.end(sequence)
    assert rank.prompts._shippers == {}
    assert rank.prompts.droppable() == rank.prompts.tokens


@pytest.mark.parametrize("tail", [0, 128])
def test_a_prompt_finds_the_names_of_its_first_pages(tail: int) -> None:
    rank = Rank(tail=tail)
    names = rank.prompts.names_of
    first = rank.begun(TEXT[: pages(4)])
    assert names(rank.request(TEXT[: pages(3)]), 3) == []
    rank.ship(first, pages(2) + tail)
    assert names(rank.request(TEXT[: pages(4)]), 4) == [1, 2]  # not those that are being shipped
    rank.ship(first)
    held = 4 - (tail > 0)
    assert len(names(rank.request(TEXT[: pages(4) + 1]), 4)) == held
    again = rank.request(TEXT[: pages(3)])
    assert names(again, 1) == [1]
    assert names(again, 3) == [1, 2, 3]
    assert names(again, 3, first=1) == [2, 3]
    again.extra_key = "other"
    assert names(again, 3) == []
    other = TEXT[: pages(1)] + TEXT[: pages(1)]
    assert names(rank.request(other), 2) == [1]
    retracted = rank.request(TEXT[: pages(1)])
    retracted.output_ids += TEXT[pages(1) : pages(2)]
    assert names(retracted, 2) == [1, 2]

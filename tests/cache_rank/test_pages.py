"""Pages: handed out once, all of them, and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_rank.pages import OutOfPagesError, PageAllocator


@given(
    pages=st.integers(0, 6),
    events=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40),
)
def test_every_page_is_free_or_one_sequences(pages: int, events: list[tuple[int, int]]) -> None:
    """An event is a sequence and how many pages it takes; 0 ends it."""
    allocator = PageAllocator(pages)
    sequences: list[list[int]] = [[] for _ in range(4)]
    for sequence, count in events:
        held, free = sequences[sequence], allocator.free
        if count == 0:
            allocator.give_back(held)
            assert held == []
        elif count > free:
            with pytest.raises(OutOfPagesError, match=f"{count} pages wanted, {free} free"):
                allocator.take(count)
        else:
            held += allocator.take(count)
            assert allocator.free == free - count
        taken = [page for held in sequences for page in held]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(pages))
        assert allocator.free == pages - len(taken)


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back() -> None:
    allocator = PageAllocator(2)
    held = allocator.take(1)
    other = list(held)
    allocator.share(other)
    allocator.give_back(held)
    assert allocator.free == 1
    allocator.give_back(other)
    assert allocator.free == 2

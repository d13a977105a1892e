"""Pages with names keep their contents, on the device or on the host, until they are dropped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_rank.named_pages import HostTier, NamedPages
from cache_rank.pages import OutOfPagesError, PageAllocator

NAMES = st.integers(0, 9)


@given(
    pages=st.integers(1, 6),
    host_pages=st.integers(0, 6),
    events=st.lists(st.tuples(st.sampled_from(["name", "begin", "end", "drop"]), NAMES)),
)
def test_a_page_is_what_was_named(
    pages: int, host_pages: int, events: list[tuple[str, int]]
) -> None:
    memory = torch.full((pages + 1, 2), -1)  # the last page is spare
    allocator = PageAllocator(pages)
    named = NamedPages(allocator, HostTier((memory[:, 0], memory[:, 1:]), host_pages))
    sequences: dict[int, list[int]] = {}
    known: set[int] = set()

    def take() -> list[int] | None:
        try:
            return named.take(1)
        except OutOfPagesError:
            # Whatever could make room is in use, or finds none on the host.
            assert named.on_host == host_pages or all(
                allocator.holders(page) > 1 for page in range(pages)
            )
            return None

    for event, name in events:
        is_new = name not in known and name not in sequences
        if event == "name" and is_new and (own := take()):
            memory[own[0]] = name
            named.name([name], own)
            allocator.give_back(own)
            known.add(name)
        elif event == "begin" and name in known and name not in sequences and allocator.free:
            sequences[name] = named.use([name])
            assert memory[sequences[name][0]].tolist() == [name, name]
        elif event == "end" and name in sequences:
            allocator.give_back(sequences.pop(name))
        elif event == "drop" and name in known:
            named.drop([name])
            known.remove(name)
        assert {*named} == known
        assert len(named) == len(known)
        assert named.unused == len(known - sequences.keys())
        for one in known:
            assert memory[named.read(one, spare=pages)].tolist() == [one, one]
        for one, held in sequences.items():
            assert memory[held[0]].tolist() == [one, one]


def test_those_used_longest_ago_move_first() -> None:
    allocator, memory = PageAllocator(3), torch.zeros(4)
    named = NamedPages(allocator, HostTier((memory,), 3))
    held = named.take(3)
    named.name([1, 2, 3], held)
    allocator.give_back(held)
    used = named.use([1, 2])  # 2 counts as used before 1
    allocator.give_back(used)
    for moved in (3, 2, 1):
        before = {name for name in (1, 2, 3) if name in named._host}
        named.take(1)
        assert {name for name in (1, 2, 3) if name in named._host} == {*before, moved}
    with pytest.raises(OutOfPagesError):
        named.take(1)

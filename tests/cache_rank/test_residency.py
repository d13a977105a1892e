"""Every residency format behind the one interface; formats without loss also bit for bit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from held_sequences import Held, append_together, assert_hold_the_same, load_together, rows_of
from hypothesis import given
from hypothesis import strategies as st
from small_models import GQA, small_config

from cache_rank import residency
from cache_rank.kernels.wire.reference import to_wire, wire_width
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency import FORMATS

every_format = pytest.mark.parametrize("name", FORMATS)


@every_format
@given(
    sizes=st.lists(
        st.one_of(st.just(1), st.integers(1, 40), st.integers(100, 300)), min_size=1, max_size=6
    ),
    layers_per_group=st.integers(1, 3),
)
def test_contents_do_not_depend_on_how_tokens_arrived(
    name: str, sizes: list[int], layers_per_group: int
) -> None:
    """As whole prompts, chunks or single tokens."""
    held = Held.empty(name, sum(sizes))
    for size in sizes:
        if size > 1:
            held.load(size)
        else:
            held.append(layers_per_group)
    assert_hold_the_same(held, Held.whole(name, sum(sizes)))


@every_format
def test_tokens_of_shared_steps_equal_whole_prompts(name: str) -> None:
    """Token by token across pages, at different positions of them."""
    left, right = Held.two(name, 2 * PAGE_TOKENS + 4, 350)
    left.load(2 * PAGE_TOKENS - 100)
    right.load(246)
    while right.resident < 350:
        append_together([left, right])
    assert_hold_the_same(left, Held.whole(name, left.resident))
    assert_hold_the_same(right, Held.whole(name, right.resident, tokens_seed=1))
    for held in (left, right):
        for position in range(held.resident - 5, held.resident):
            assert (held.query_ring[held.slot, :, :, position % 5] == position).all()
    assert (held.query_ring[[1, 3]] == 0).all()


@every_format
@pytest.mark.parametrize("parts", [[(400, 246)], [(100, 7), (1, 130), (290, 1), (9, 108)]])
def test_shared_shipments_equal_whole_prompts(name: str, parts: list[tuple[int, int]]) -> None:
    """At different positions of pages and groups, the first one's tokens before or behind."""
    left, right = Held.two(name, 400, 246)
    for index, (of_left, of_right) in enumerate(parts):
        both = [(left, of_left), (right, of_right)]
        load_together(both[:: -1 if index % 2 else 1])
    assert_hold_the_same(left, Held.whole(name, 400))
    assert_hold_the_same(right, Held.whole(name, 246, tokens_seed=1))


def loaded(name: str) -> tuple[Held, Held]:
    """400 and 300 tokens, which came by turns."""
    both = Held.two(name, 400, 300)
    for held in (*both, *both, both[0]):
        held.load(150 if held is both[1] else 100)
    both[0].load(100)
    return both


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_gather_leaves_padding_and_refused_rows_alone(name: str, dtype: torch.dtype) -> None:
    left, right = loaded(name)
    layers = range(1, 3)
    entering = torch.tensor([5, -1, 299, -1], dtype=torch.int32).expand(3, 2, 2, -1).contiguous()
    shape = (2, *entering.shape, wire_width(left.config.model.head_dim, dtype))
    out = torch.full(shape, 7.0).to(dtype)
    rows = rows_of([left, right, right], [399, 299, 299], refused=(1,))
    left.residency.gather(rows, layers, entering, out[0], out[1])
    assert (out[:, :, :, :, [1, 3]].float() == 7).all()
    assert (out[:, 1].float() == 7).all()
    for row, held in ((0, left), (2, right)):
        for part, expected in zip(out, held.read(layers, torch.tensor([5, 299])), strict=True):
            assert torch.equal(part[row, :, :, [0, 2]], to_wire(expected, dtype))


@every_format
def test_every_row_scores_its_own_tokens(name: str) -> None:
    torch.manual_seed(0)
    left, right = loaded(name)
    queries = torch.stack([left.queries() for _ in range(3)])
    rows = rows_of([right, left, left], [299, 350, 399], refused=(1,))
    together = left.residency.score(rows, left.layers, queries)
    assert torch.equal(together[0, :, :, :300], right.score(queries[0]))
    assert torch.equal(together[2, :, :, :400], left.score(queries[2]))


@every_format
def test_scores_of_any_size_follow_each_other(name: str) -> None:
    """Buffers grow with the largest step so far, and smaller steps use a part of them."""
    torch.manual_seed(0)
    held = Held.whole(name, 1200)
    queries = held.queries()
    for layers, position in [
        (range(0, 1), 10),
        (range(0, 3), 1100),
        (range(1, 2), 1),
        (range(0, 2), 1199),
        (range(2, 3), 10),
    ]:
        group = queries[layers.start : layers.stop]
        alone = Held.whole(name, 1200).score(group, layers=layers, position=position)
        assert torch.equal(held.score(group, layers=layers, position=position), alone)
    first, second, again = (held.score(of) for of in (queries, -queries, queries))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@every_format
def test_a_group_that_is_ahead_leaves_the_other_layers_alone(name: str) -> None:
    """In the middle of a step the first groups hold one token more than the last."""
    held = Held.empty(name, 11)
    held.load(10)
    queries, ahead, behind = held.queries(), range(0, 2), range(2, 3)
    before = held.score(queries[2:], layers=behind)
    first = held.read(behind)
    held.residency.append(rows_of([held], [10]), ahead, held.message(ahead), held.query_ring)
    assert torch.equal(held.score(queries[2:], layers=behind), before)
    for now, then in zip(held.read(behind), first, strict=True):
        assert torch.equal(now, then)
    expected = Held.whole(name, 11).score(queries[:2], layers=ahead)
    assert torch.equal(held.score(queries[:2], layers=ahead, position=10), expected)


@every_format
def test_a_refused_row_is_not_appended(name: str) -> None:
    held, other = Held.two(name, 11, 11)
    held.load(11)
    other.load(11)
    held.resident = other.resident = 4  # write these tokens again: of each other's sequence
    up = torch.cat((other.message(held.layers), held.message(held.layers)))
    rows = rows_of([held, other], [4, 4], refused=(0,))
    held.residency.append(rows, held.layers, up, held.query_ring)
    held.resident = other.resident = 11
    for now, then in zip(held.read(), Held.whole(name, 11).read(), strict=True):
        assert torch.equal(now, then)
    fifth = torch.tensor([4])
    for now, source in zip(other.read(positions=fifth), held.read(positions=fifth), strict=True):
        assert torch.equal(now, source)
    assert (held.query_ring[held.slot] == 0).all()
    assert (held.query_ring[other.slot, :, :, 4] == 4).all()


@every_format
def test_pages_and_slots_serve_one_sequence_after_another(name: str) -> None:
    first = Held.whole(name, 700)
    for count in (300, 200, 1):
        following = Held.empty(name, count, beside=first, tokens_seed=count)
        following.pages = first.pages[::-1]
        following.load(max(1, count - 1))
        while following.resident < count:
            following.append()
        assert_hold_the_same(following, Held.whole(name, count, tokens_seed=count))


def test_an_unknown_format_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match="kv_residency zip: unknown; use one of bf16"):
        residency.require_format(small_config(kv_residency="zip"))


def test_heads_that_are_no_whole_groups_are_refused() -> None:
    model = msgspec.structs.replace(GQA, head_dim=30)
    with pytest.raises(ValueError, match="kv_residency mosaickv: heads have 30 elements"):
        residency.require_format(small_config(model, kv_residency="mosaickv"))

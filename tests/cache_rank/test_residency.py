"""Every residency format behind the one interface; formats without loss also bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import GQA, MODELS, small_config
from torch import Tensor

from cache_rank import residency
from cache_rank.config import DTYPES, CacheRankConfig, ModelShape
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.kernels.wire.reference import to_wire, wire_width
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import AnswerHeader
from cache_rank.residency import FORMATS
from cache_rank.residency.base import Residency
from cache_rank.step_rows import StepRows

CPU = torch.device("cpu")
LOSSLESS = ("bf16",)
PAGES = 16

every_format = pytest.mark.parametrize("name", FORMATS)
every_lossless_format = pytest.mark.parametrize("name", LOSSLESS)


@dataclass(frozen=True)
class Tokens:
    """K and V of a sequence, (layers, tokens, Hkv, D) each."""

    model: ModelShape
    keys: Tensor
    values: Tensor

    @classmethod
    def sample(cls, count: int, model: ModelShape = GQA, seed: int = 0) -> Tokens:
        generator = torch.Generator().manual_seed(1000 * seed + count)
        shape = (2, model.layers, count, model.kv_heads, model.head_dim)
        keys, values = torch.randn(shape, generator=generator).to(model.torch_dtype)
        return cls(model, keys, values)

    @property
    def count(self) -> int:
        return self.keys.shape[1]

    @property
    def all_layers(self) -> range:
        return range(self.model.layers)

    def positions(self) -> Tensor:
        """Every position, for each layer and kv head."""
        shape = (self.model.layers, self.model.kv_heads, self.count)
        return torch.arange(self.count).expand(shape)

    def queries(self) -> Tensor:
        return torch.randn(self.model.layers, self.model.query_heads, self.model.head_dim)


def start(
    name: str, model: ModelShape, score_keys: str = "resident"
) -> tuple[CacheRankConfig, Residency]:
    config = small_config(model, kv_residency=name, score_keys=score_keys)
    return config, residency.create(config, PAGES, CPU)


@dataclass
class Held:
    """A sequence in a residency, on pages in any order."""

    tokens: Tokens
    config: CacheRankConfig
    residency: Residency
    pages: list[int]
    slot: int = 0
    resident: int = 0
    query_ring: Tensor = field(init=False)

    def __post_init__(self) -> None:
        model = self.tokens.model
        ring = (4, model.layers, model.query_heads, 5, model.head_dim)
        self.query_ring = torch.zeros(ring, dtype=model.torch_dtype)

    @classmethod
    def empty(cls, name: str, tokens: Tokens, seed: int = 0, score_keys: str = "resident") -> Held:
        config, held = start(name, tokens.model, score_keys)
        pages = list(range(PAGES))
        random.Random(seed).shuffle(pages)
        return cls(tokens, config, held, pages)

    @classmethod
    def whole(cls, name: str, tokens: Tokens, score_keys: str = "resident") -> Held:
        held = cls.empty(name, tokens, seed=1, score_keys=score_keys)
        held.load(tokens.count)
        return held

    def rows(self, position: int) -> StepRows:
        return rows_of([self], [position])

    def load(self, count: int) -> None:
        stop = self.resident + count
        part = slice(self.resident, stop)
        shipment = torch.stack((self.tokens.keys[:, part], self.tokens.values[:, part]))
        pages = torch.tensor(self.pages, dtype=torch.int32)
        self.residency.load(pages, self.slot, self.resident, shipment)
        self.resident = stop

    def append(self, layers: range) -> None:
        """The next token joins some layers; the caller counts it when it is in all of them."""
        self.residency.append(
            self.rows(self.resident), layers, self.message(layers), self.query_ring
        )

    def message(self, layers: range) -> Tensor:
        """(1, len(layers), Hq + 2 Hkv, D)"""
        tokens, group = self.tokens, slice(layers.start, layers.stop)
        queries = torch.full(
            (len(layers), tokens.model.query_heads, tokens.model.head_dim), float(self.resident)
        )
        parts = (
            queries.to(tokens.model.torch_dtype),
            tokens.keys[group, self.resident],
            tokens.values[group, self.resident],
        )
        return torch.cat(parts, dim=1).unsqueeze(0)

    def read(self, layers: range, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.residency.read(self.rows(self.resident - 1), layers, positions)

    def score(self, layers: range, queries: Tensor, position: int, exact: bool = False) -> Tensor:
        """Scores of the tokens up to `position`, which must be resident."""
        scores = self.residency.score(self.rows(position), layers, queries.unsqueeze(0), exact)
        assert scores.dtype == torch.float32
        assert scores.shape[:3] == (1, len(layers), self.tokens.model.kv_heads)
        assert scores.shape[3] > position
        return scores[0, :, :, : position + 1].clone()


def rows_of(sequences: list[Held], positions: list[int], refused: tuple[int, ...] = ()) -> StepRows:
    count = len(sequences)
    slots = [-1 if row in refused else held.slot for row, held in enumerate(sequences)]
    return StepRows(
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.ones(count, dtype=torch.int32),
        torch.tensor([held.pages for held in sequences], dtype=torch.int32),
        torch.zeros((count, len(AnswerHeader._fields)), dtype=torch.int64),
        capacity=max(positions) + 1,
    )


def assert_hold_the_same(left: Held, right: Held) -> None:
    tokens = left.tokens
    assert left.resident == right.resident == tokens.count
    for one, other in zip(
        left.read(tokens.all_layers, tokens.positions()),
        right.read(tokens.all_layers, tokens.positions()),
        strict=True,
    ):
        assert torch.equal(one, other)
    queries = tokens.queries()
    assert torch.equal(
        left.score(tokens.all_layers, queries, tokens.count - 1),
        right.score(tokens.all_layers, queries, tokens.count - 1),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> list[int]:
    """Sizes of successive arrivals: whole prompts, chunks and single tokens."""
    size = st.one_of(st.just(1), st.integers(1, 40), st.integers(200, 300))
    return draw(st.lists(size, min_size=1, max_size=6))


@every_format
@given(sizes=arrivals(), layers_per_group=st.integers(1, 3))
def test_contents_do_not_depend_on_how_tokens_arrived(
    name: str, sizes: list[int], layers_per_group: int
) -> None:
    tokens = Tokens.sample(sum(sizes))
    held = Held.empty(name, tokens)
    for size in sizes:
        if size > 1:
            held.load(size)
            continue
        for first in range(0, tokens.model.layers, layers_per_group):
            held.append(range(first, min(first + layers_per_group, tokens.model.layers)))
        held.resident += 1
    assert_hold_the_same(held, Held.whole(name, tokens))


@every_format
def test_one_token_at_a_time_equals_the_whole_prompt_across_pages(name: str) -> None:
    tokens = Tokens.sample(2 * PAGE_TOKENS)
    held = Held.empty(name, tokens)
    for _ in range(tokens.count):
        held.append(tokens.all_layers)
        held.resident += 1
    assert_hold_the_same(held, Held.whole(name, tokens))
    window = held.query_ring.shape[3]
    for position in range(tokens.count - window, tokens.count):
        assert (held.query_ring[held.slot, :, :, position % window] == position).all()
    assert (held.query_ring[held.slot + 1 :] == 0).all()


@every_lossless_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_read_returns_what_arrived(name: str, model: str, dtype: str) -> None:
    tokens = Tokens.sample(300, msgspec.structs.replace(MODELS[model], dtype=dtype))
    held = Held.whole(name, tokens)
    keys, values = held.read(tokens.all_layers, tokens.positions())
    assert keys.dtype == values.dtype == tokens.model.torch_dtype
    assert torch.equal(keys, tokens.keys.transpose(1, 2))
    assert torch.equal(values, tokens.values.transpose(1, 2))


@every_lossless_format
def test_read_reads_other_tokens_for_every_layer_and_head(name: str) -> None:
    tokens = Tokens.sample(300)
    held = Held.whole(name, tokens)
    layers = range(1, 3)
    positions = torch.tensor([[[3, 3, 299], [0, 7, 1]], [[255, 2, 2], [256, 8, 257]]])
    keys, values = held.read(layers, positions)
    for layer in layers:
        for head in range(tokens.model.kv_heads):
            index = positions[layer - layers.start, head]
            assert torch.equal(keys[layer - layers.start, head], tokens.keys[layer, index, head])
            assert torch.equal(
                values[layer - layers.start, head], tokens.values[layer, index, head]
            )


def two_on_one(name: str, left: Tokens, right: Tokens) -> tuple[Held, Held]:
    """Two sequences whose pages of one residency lie between each other's."""
    config, shared = start(name, left.model)
    pages = list(range(PAGES))
    random.Random(2).shuffle(pages)
    held = (
        Held(left, config, shared, pages[::2], slot=2),
        Held(right, config, shared, pages[1::2], slot=0),
    )
    for chunk in range(0, max(left.count, right.count), 100):
        for one in held:
            if chunk < one.tokens.count:
                one.load(min(100, one.tokens.count - chunk))
    return held


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_gather_leaves_padding_and_refused_rows_alone(name: str, dtype: torch.dtype) -> None:
    left, right = two_on_one(name, Tokens.sample(400), Tokens.sample(300, seed=1))
    layers = range(1, 3)
    entering = torch.tensor([5, -1, 299, -1], dtype=torch.int32).expand(3, 2, 2, -1).contiguous()
    shape = (*entering.shape, wire_width(left.tokens.model.head_dim, dtype))
    keys, values = (torch.full(shape, 7.0).to(dtype) for _ in range(2))
    rows = rows_of([left, right, right], [399, 299, 299], refused=(1,))
    left.residency.gather(rows, layers, entering, keys, values)
    for part, read in ((keys, 0), (values, 1)):
        assert (part[:, :, :, [1, 3]].float() == 7).all()
        assert (part[1].float() == 7).all()
        for row, held in ((0, left), (2, right)):
            expected = held.read(layers, entering[row, :, :, [0, 2]].to(torch.int64))[read]
            assert expected.dtype == left.tokens.model.torch_dtype == torch.bfloat16
            assert torch.equal(part[row, :, :, [0, 2]], to_wire(expected, dtype))


@every_lossless_format
def test_gather_reads_other_tokens_for_every_row_layer_and_head(name: str) -> None:
    left, right = two_on_one(name, Tokens.sample(400), Tokens.sample(300, seed=1))
    layers = range(1, 3)
    generator = torch.Generator().manual_seed(0)
    entering = torch.randint(0, 300, (2, 2, 2, 5), generator=generator, dtype=torch.int32)
    shape = (*entering.shape, left.tokens.model.head_dim)
    keys, values = (torch.zeros(shape, dtype=left.tokens.model.torch_dtype) for _ in range(2))
    left.residency.gather(rows_of([left, right], [399, 299]), layers, entering, keys, values)
    for row, held in enumerate((left, right)):
        for layer in layers:
            for head in range(held.tokens.model.kv_heads):
                place = (row, layer - layers.start, head)
                index = entering[place].to(torch.int64)
                assert torch.equal(keys[place], held.tokens.keys[layer, index, head])
                assert torch.equal(values[place], held.tokens.values[layer, index, head])


@every_lossless_format
@pytest.mark.parametrize("count", [1, 77, PAGE_TOKENS, PAGE_TOKENS + 1])
@pytest.mark.parametrize("model", MODELS)
def test_score_equals_the_score_kernel(name: str, model: str, count: int) -> None:
    torch.manual_seed(0)
    tokens = Tokens.sample(count, MODELS[model])
    queries = tokens.queries()
    held = Held.whole(name, tokens)
    keys = tokens.keys.transpose(1, 2).contiguous()  # matmul rounds by memory layout
    for layers in (tokens.all_layers, range(1, 2)):
        group = slice(layers.start, layers.stop)
        scores = held.score(layers, queries[group], count - 1)
        assert torch.equal(scores, score_tokens(queries[group], keys[group], tokens.model.scale))


@every_format
def test_every_row_scores_its_own_tokens(name: str) -> None:
    torch.manual_seed(0)
    left, right = two_on_one(name, Tokens.sample(400), Tokens.sample(300, seed=1))
    layers = left.tokens.all_layers
    queries = torch.stack([left.tokens.queries() for _ in range(3)])
    rows = rows_of([right, left, left], [299, 350, 399], refused=(1,))
    together = left.residency.score(rows, layers, queries)
    assert torch.equal(together[0, :, :, :300], right.score(layers, queries[0], 299))
    assert torch.equal(together[2, :, :, :400], left.score(layers, queries[2], 399))


@every_format
def test_scores_of_any_size_follow_each_other(name: str) -> None:
    """Buffers grow with the largest step so far, and smaller steps use a part of them."""
    torch.manual_seed(0)
    tokens = Tokens.sample(1200)
    held = Held.whole(name, tokens)
    queries = tokens.queries()
    for layers, position in [
        (range(0, 1), 10),
        (range(0, 3), 1100),
        (range(1, 2), 1),
        (range(0, 2), tokens.count - 1),
        (range(2, 3), 10),
    ]:
        group = slice(layers.start, layers.stop)
        alone = Held.whole(name, tokens).score(layers, queries[group], position)
        assert torch.equal(held.score(layers, queries[group], position), alone)


@every_format
def test_scores_do_not_depend_on_those_before(name: str) -> None:
    torch.manual_seed(0)
    tokens = Tokens.sample(300)
    held = Held.whole(name, tokens)
    queries = torch.randn(3, *tokens.queries().shape)
    rows, layers = held.rows(299), tokens.all_layers
    first, second, again = (
        held.residency.score(rows, layers, queries[index : index + 1])[..., :300].clone()
        for index in (0, 1, 0)
    )
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@every_format
def test_a_group_that_is_ahead_leaves_the_other_layers_alone(name: str) -> None:
    """In the middle of a step the first groups hold one token more than the last."""
    tokens = Tokens.sample(11)
    held = Held.empty(name, tokens)
    held.load(10)
    queries = tokens.queries()
    behind = range(2, 3)
    before = held.score(behind, queries[2:], 9)
    first = held.read(behind, tokens.positions()[2:, :, :10])
    held.append(range(0, 2))
    assert torch.equal(held.score(behind, queries[2:], 9), before)
    for now, then in zip(held.read(behind, tokens.positions()[2:, :, :10]), first, strict=True):
        assert torch.equal(now, then)
    ahead = Held.whole(name, tokens)
    ahead_scores = ahead.score(range(0, 2), queries[:2], 10)
    assert torch.equal(held.score(range(0, 2), queries[:2], 10), ahead_scores)


@every_format
def test_a_refused_row_is_not_appended(name: str) -> None:
    tokens = Tokens.sample(11)
    held, other = two_on_one(name, tokens, Tokens.sample(11, seed=1))
    layers = tokens.all_layers
    held.resident = other.resident = 4  # write these tokens again: of each other's sequence
    up = torch.cat((other.message(layers), held.message(layers)))
    held.residency.append(rows_of([held, other], [4, 4], refused=(0,)), layers, up, held.query_ring)
    positions = tokens.positions()
    for now, then in zip(
        held.read(layers, positions), Held.whole(name, tokens).read(layers, positions), strict=True
    ):
        assert torch.equal(now, then)
    changed = other.read(layers, positions[:, :, 4:5])
    expected = held.read(layers, positions[:, :, 4:5])
    for one, source in zip(changed, expected, strict=True):
        assert torch.equal(one, source)
    assert (held.query_ring[held.slot] == 0).all()
    assert (held.query_ring[other.slot, :, :, 4] == 4).all()


def test_an_unknown_format_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match="kv_residency zip: unknown; use one of bf16"):
        residency.create(small_config(kv_residency="zip"), PAGES, CPU)

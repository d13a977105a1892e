"""Every residency format behind the one interface; formats without loss also bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
import torch
from cache_rank_kernels.score.reference import score_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import GQA, MODELS
from torch import Tensor

from cache_rank import residency
from cache_rank.config import DTYPES, ModelShape
from cache_rank.residency import FORMATS, Residency

CPU = torch.device("cpu")
LOSSLESS = ("bf16",)
FIRST_CAPACITY = 256
"""Tokens that the first allocation of `bf16` holds: tests cross it."""

every_format = pytest.mark.parametrize("name", FORMATS)
every_lossless_format = pytest.mark.parametrize("name", LOSSLESS)


@dataclass(frozen=True)
class Tokens:
    """K and V of a sequence, (layers, tokens, Hkv, D) each."""

    model: ModelShape
    keys: Tensor
    values: Tensor

    @classmethod
    def sample(cls, count: int, model: ModelShape = GQA) -> Tokens:
        generator = torch.Generator().manual_seed(count)
        shape = (2, model.layers, count, model.kv_heads, model.head_dim)
        keys, values = torch.randn(shape, generator=generator).to(model.torch_dtype)
        return cls(model, keys, values)

    @property
    def count(self) -> int:
        return self.keys.shape[1]

    @property
    def all_layers(self) -> range:
        return range(self.model.layers)

    def append_to(self, held: Residency, layers: range, start: int, stop: int) -> None:
        group = slice(layers.start, layers.stop)
        held.append(layers, self.keys[group, start:stop], self.values[group, start:stop])

    def held_whole(self, name: str) -> Residency:
        held = residency.create(name, self.model, CPU)
        self.append_to(held, self.all_layers, 0, self.count)
        return held

    def positions(self) -> Tensor:
        """Every position, for each layer and kv head."""
        shape = (self.model.layers, self.model.kv_heads, self.count)
        return torch.arange(self.count).expand(shape)


def assert_holds_the_same(left: Residency, right: Residency, tokens: Tokens) -> None:
    assert left.tokens == right.tokens == tokens.count
    for one, other in zip(
        left.gather(tokens.all_layers, tokens.positions()),
        right.gather(tokens.all_layers, tokens.positions()),
        strict=True,
    ):
        assert torch.equal(one, other)
    queries = torch.randn(tokens.model.layers, tokens.model.query_heads, tokens.model.head_dim)
    scale = tokens.model.scale
    assert torch.equal(
        left.score(tokens.all_layers, queries, scale),
        right.score(tokens.all_layers, queries, scale),
    )


@st.composite
def append_patterns(draw: st.DrawFn) -> list[int]:
    """Sizes of successive appends: whole prompts, chunks and single tokens."""
    size = st.one_of(st.just(1), st.integers(1, 40), st.integers(200, 300))
    return draw(st.lists(size, min_size=1, max_size=6))


@every_format
@settings(deadline=None, max_examples=40)
@given(sizes=append_patterns(), layers_per_group=st.integers(1, 3))
def test_contents_do_not_depend_on_how_tokens_were_appended(
    name: str, sizes: list[int], layers_per_group: int
) -> None:
    tokens = Tokens.sample(sum(sizes))
    held = residency.create(name, tokens.model, CPU)
    start = 0
    for size in sizes:
        for first in range(0, tokens.model.layers, layers_per_group):
            group = range(first, min(first + layers_per_group, tokens.model.layers))
            tokens.append_to(held, group, start, start + size)
        start += size
        assert held.tokens == start
    assert_holds_the_same(held, tokens.held_whole(name), tokens)


@every_format
def test_one_token_at_a_time_equals_the_whole_prompt_across_growth(name: str) -> None:
    tokens = Tokens.sample(2 * FIRST_CAPACITY)
    held = residency.create(name, tokens.model, CPU)
    for position in range(tokens.count):
        tokens.append_to(held, tokens.all_layers, position, position + 1)
    assert_holds_the_same(held, tokens.held_whole(name), tokens)


@every_lossless_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_gather_returns_what_was_appended(name: str, model: str, dtype: str) -> None:
    tokens = Tokens.sample(300, msgspec.structs.replace(MODELS[model], dtype=dtype))
    held = tokens.held_whole(name)
    keys, values = held.gather(tokens.all_layers, tokens.positions())
    assert keys.dtype == values.dtype == tokens.model.torch_dtype
    assert torch.equal(keys, tokens.keys.transpose(1, 2))
    assert torch.equal(values, tokens.values.transpose(1, 2))


@every_lossless_format
def test_gather_reads_other_tokens_for_every_layer_and_head(name: str) -> None:
    tokens = Tokens.sample(50)
    held = tokens.held_whole(name)
    layers = range(1, 3)
    positions = torch.tensor([[[3, 3, 49], [0, 7, 1]], [[48, 2, 2], [9, 8, 7]]])
    keys, values = held.gather(layers, positions)
    for layer in layers:
        for head in range(tokens.model.kv_heads):
            index = positions[layer - layers.start, head]
            assert torch.equal(keys[layer - layers.start, head], tokens.keys[layer, index, head])
            assert torch.equal(
                values[layer - layers.start, head], tokens.values[layer, index, head]
            )


@every_format
def test_gather_accepts_padding_between_positions(name: str) -> None:
    tokens = Tokens.sample(20)
    held = tokens.held_whole(name)
    positions = torch.tensor([5, -1, 19, -1]).expand(tokens.model.layers, 2, -1)
    keys, _ = held.gather(tokens.all_layers, positions)
    without, _ = held.gather(tokens.all_layers, positions.clamp(min=0))
    assert keys.shape == (tokens.model.layers, 2, 4, tokens.model.head_dim)
    assert torch.equal(keys[:, :, [0, 2]], without[:, :, [0, 2]])


@every_lossless_format
@pytest.mark.parametrize("count", [1, 77, FIRST_CAPACITY, FIRST_CAPACITY + 1])
@pytest.mark.parametrize("model", MODELS)
def test_score_equals_the_score_kernel(name: str, model: str, count: int) -> None:
    torch.manual_seed(0)
    tokens = Tokens.sample(count, MODELS[model])
    queries = torch.randn(tokens.model.layers, tokens.model.query_heads, tokens.model.head_dim)
    held = tokens.held_whole(name)
    keys = tokens.keys.transpose(1, 2).contiguous()  # matmul rounds by memory layout
    for layers in (tokens.all_layers, range(1, 2)):
        group = slice(layers.start, layers.stop)
        scores = held.score(layers, queries[group], tokens.model.scale)
        assert torch.equal(scores, score_tokens(queries[group], keys[group], tokens.model.scale))


@every_format
def test_a_group_that_is_ahead_scores_its_own_tokens(name: str) -> None:
    """In the middle of a step the first groups hold one token more than the last."""
    tokens = Tokens.sample(11)
    held = residency.create(name, tokens.model, CPU)
    tokens.append_to(held, tokens.all_layers, 0, 10)
    tokens.append_to(held, range(0, 2), 10, 11)
    queries = torch.randn(tokens.model.layers, tokens.model.query_heads, tokens.model.head_dim)
    assert held.score(range(0, 2), queries[:2], 1.0).shape[-1] == 11
    assert held.score(range(2, 3), queries[2:], 1.0).shape[-1] == 10
    assert held.tokens == 10


@every_format
def test_bytes_held_cover_the_tokens_and_at_most_the_growth_space(name: str) -> None:
    model = GQA
    held = residency.create(name, model, CPU)
    tokens = Tokens.sample(4 * FIRST_CAPACITY, model)
    sizes = [held.bytes_held]
    for start in range(0, tokens.count, 64):
        tokens.append_to(held, tokens.all_layers, start, start + 64)
        sizes.append(held.bytes_held)
        raw = held.tokens * model.bytes_per_token
        assert held.bytes_held <= max(sizes[0], 1.5 * raw)
        if name in LOSSLESS:
            assert held.bytes_held >= raw
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < len(sizes) / 2, "space grows by a share, not token by token"


@every_format
def test_an_empty_residency_holds_no_tokens(name: str) -> None:
    assert residency.create(name, GQA, CPU).tokens == 0


def test_an_unknown_format_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match="unknown residency format 'zip': use one of bf16"):
        residency.create("zip", GQA, CPU)

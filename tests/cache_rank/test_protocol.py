"""Packed layouts: both sides compute the same sizes, and the fields tile the buffer."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import GQA, small_config
from torch import Tensor

from cache_rank.config import DTYPES, CacheRankConfig, ModelShape
from cache_rank.kernels.wire.reference import SHARED
from cache_rank.protocol import (
    AnswerHeader,
    DownMessage,
    Open,
    UpMessage,
)
from cache_rank.schedule import by_forecast


@st.composite
def configs(draw: st.DrawFn) -> CacheRankConfig:
    """Odd sizes on purpose: nothing about a shape is a multiple of anything."""
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.integers(1, 9) | st.just(2 * SHARED))
    model = ModelShape(
        layers=draw(st.integers(1, 5)),
        query_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        scale=1.0,
        hidden_size=draw(st.integers(1, 9)),
    )
    return small_config(
        model,
        max_swap_tokens=draw(st.integers(1, 7)),
        layers_per_group=draw(st.integers(1, 5)),
        wire_dtype=draw(st.sampled_from(["bf16"] + ["int8"] * (head_dim % SHARED == 0))),
    )


rows_of_a_step = st.integers(1, 5)


def assert_fields_are_independent(fields: dict[str, Tensor]) -> None:
    """What is written into one field is read back from it and from no other."""
    for number, field in enumerate(fields.values(), start=1):
        field.fill_(number)
    for number, field in enumerate(fields.values(), start=1):
        assert (field == number).all()


@given(configs(), rows_of_a_step)
def test_up_message_fields_tile_the_buffer(config: CacheRankConfig, rows: int) -> None:
    model = config.model
    for layer_message, layers in zip(config.layer_messages, map(len, config.groups), strict=True):
        buffer = torch.zeros(UpMessage.size(config, layer_message, rows), dtype=torch.uint8)
        message = UpMessage(config, layer_message, rows, buffer)
        assert message.queries.shape == (rows, layers, model.query_heads, model.head_dim)
        assert message.keys.shape == (rows, layers, model.kv_heads, model.head_dim)
        assert message.values.shape == message.keys.shape
        fields = {name: getattr(message, name) for name in ("queries", "keys", "values")}
        assert {field.dtype for field in fields.values()} == {model.torch_dtype}
        assert message.buffer.nbytes == buffer.nbytes == message.tokens.nbytes
        assert message.tokens.is_contiguous()
        assert torch.equal(message.tokens, torch.cat([*fields.values()], dim=2))
        assert_fields_are_independent(fields)


@given(configs(), rows_of_a_step)
def test_the_place_of_a_row_does_not_depend_on_how_many_there_are(
    config: CacheRankConfig, rows: int
) -> None:
    """A captured graph stages rows before it is known how many a step exchanges."""
    for layer_message in (config.layer_messages[0], *by_forecast(len(config.groups), lead=1)[:1]):
        size = UpMessage.size(config, layer_message, rows)
        most = UpMessage.size(config, layer_message, rows + 3)
        larger = torch.randint(0, 256, (most,), dtype=torch.uint8)
        few, many = (
            UpMessage(config, layer_message, count, larger[:end])
            for count, end in ((rows, size), (rows + 3, None))
        )
        for name in ("tokens", "hidden"):
            parts = (getattr(message, name).view(torch.uint8) for message in (few, many))
            assert torch.equal(next(parts), next(parts)[:rows])


@given(configs(), rows_of_a_step)
def test_down_message_fields_tile_the_buffer(config: CacheRankConfig, rows: int) -> None:
    for layers in map(len, config.groups):
        buffer = torch.zeros(DownMessage.size(config, layers, rows), dtype=torch.uint8)
        message = DownMessage(config, layers, rows, buffer)
        entries = (rows, layers, config.model.kv_heads, config.max_swap_tokens)
        assert message.header.shape == (rows, len(AnswerHeader._fields))
        assert message.slots.shape == entries
        assert message.keys.shape == message.values.shape == (*entries, config.wire_width)
        assert message.header.dtype == torch.int64
        assert message.slots.dtype == torch.int32
        assert message.keys.dtype == message.values.dtype == config.wire_torch_dtype
        fields = {name: getattr(message, name) for name in ("header", "slots", "keys", "values")}
        for field in fields.values():
            assert field.is_contiguous()
            assert (field.data_ptr() - buffer.data_ptr()) % 16 == 0, "for wide loads"
        aligned = sum(-(-field.nbytes // 16) * 16 for field in fields.values())
        assert message.buffer.nbytes == buffer.nbytes == aligned
        assert_fields_are_independent(fields)


def test_the_rendezvous_travels_as_bytes() -> None:
    """It is a path, or a secret of NCCL that no text encoding holds."""
    message = Open(
        small_config(GQA),
        {"up": b"/a/path", "down": bytes(range(128)), "bulk": b""},
        trace="/a/file",
        memory_fraction=0.25,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Open) == message
    assert Open(small_config(GQA), {}).trace == ""

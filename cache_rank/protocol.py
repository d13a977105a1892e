"""The one contract between the inference rank and the cache rank.

Control messages travel over ZMQ as msgpack; tensors travel over P2P in the packed layouts below,
whose sizes follow from control messages alone. A step of R rows exchanges, for each LayerMessage
(see schedule.py),

    up    per row: its queries, keys and values in each layer of `kv_of` (L, Hq + 2 Hkv, D), and
          the hidden state that enters `hidden_of` (H,)
    down  header (R, 6) int64, slots (R, L, Hkv, C) int32, keys and values (R, L, Hkv, C, D)

and on the bulk channel travel n tokens, keys and values (2, layers, n, Hkv, D), or pages of them as
codes (see CodedPages of residency/coded.py), and what a layer's queries are forecast by,
(H + 2, Hq, D). Back on the bulk channel travels what a Restore asks for:
how many tokens, (1,) int64, and their pages as the format holds them, (packed_bytes,) uint8 each.
For an Attend of R rows, each layer's queries (R, width, Hq, D) travel there, and an AttendedMessage
back, layer by layer.
Tokens are in the dtype of the KV pool, but for codes, and those of a down message, which are in the
wire dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.schedule import LayerMessage

PROTOCOL_VERSION = 15
NO_SEQUENCE = -1


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request in a step: its sequence's id, and the position of the token being computed.

    The cache rank holds all tokens before that position; where steps draft, all but some drafts.
    """

    sequence_id: int
    position: int


class Open(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first message.

    Attributes:
        config: the policy that both sides agree on.
        rendezvous: how the data channels find each other, by name; see link.py.
        trace: the file that the timeline of traced steps is appended to; empty for none.
        memory_fraction: share of the free memory that tokens take; None leaves it to the cache
            rank.
        host_bytes: memory of the host for pages that no sequence has.
    """

    config: CacheRankConfig
    rendezvous: dict[str, bytes]
    trace: str = ""
    memory_fraction: float | None = None
    host_bytes: int = 0


class Step(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One decode step; the tensors of each layer group follow on the up channel.

    Attributes:
        step: its number; only grows.
        rows: the requests that it exchanges.
        traced: asks for its timeline.
    """

    step: int
    rows: list[Row]
    traced: bool = False


class Load(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Bulk shipment of tokens [start, start + count); the tensor follows on the bulk channel.

    `start` 0 begins a sequence that has not begun, whose id must exceed every earlier one.

    Attributes:
        as_codes: they are complete pages as codes, which follow the pages that the sequence has
            had of others or as codes. What follows goes on as after an `Adopt`.
    """

    sequence_id: int
    start: int
    count: int
    as_codes: bool = False


class LoadTogether(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Bulk shipment of tokens of several sequences, in this order; none are codes."""

    loads: list[Load]


class Adopt(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A sequence's first pages are those of these names.

    A sequence that has not begun begins, whose id must exceed every earlier one; without names,
    that is all. Else it must hold nothing yet. Its shipment goes on where the pages end, or
    `residency.shared_tail` tokens before.
    """

    sequence_id: int
    names: list[int]


class Share(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The next complete pages of a sequence get these names, and are held until they are dropped.

    Nothing is written into a page that has a name.
    """

    sequence_id: int
    names: list[int]


class Drop(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Pages lose their names; sequences that have them keep them."""

    names: list[int]


class Restore(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The pages of these names are wanted back, packed; their tensors follow on the bulk channel.

    Before them comes how many tokens they hold, or 0 where there are none of some names. The
    inference rank sends nothing else until it has them.
    """

    names: list[int]


class Attend(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Queries of these rows are to attend to all tokens held; they follow on the bulk channel.

    Attributes:
        rows: the cache rank holds all tokens before the position of each, and no other.
        width: queries of each row and query head, at most `verified_tokens`.
    """

    rows: list[Row]
    width: int


class QueryProjection(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """By what the queries of a layer are forecast; the tensor follows on the bulk channel.

    Its rows are the projections of each element of the hidden state, a constant, and the weights of
    the norm of queries, see kernels/forecast.

    Attributes:
        layer: counted from the first sparse layer.
    """

    layer: int


class KeyBasis(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """How the keys of a layer are sketched; the tensor follows on the bulk channel.

    Its rows are the basis of each KV head, and the mean of its keys, see kernels/sketch.

    Attributes:
        layer: counted from the first sparse layer.
    """

    layer: int


class End(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sequences are over: finish, abort, retraction and preemption are the same here."""

    sequence_ids: list[int]


class Flush(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Every sequence is over, and no page has a name."""


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The process listens for control messages at `endpoint`."""

    endpoint: str
    pid: int


class Opened(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The data channels are connected.

    At most `capacity_tokens` tokens fit in memory, and `host_tokens` more that no sequence has.
    """

    capacity_tokens: int
    host_tokens: int


class Report(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What the cache rank holds and has done since it opened.

    Attributes:
        tokens_held, bytes_held: resident now, those of shared pages once; bytes include growth
            space.
        tokens_kept: those among them that no sequence has.
        tokens_on_host: those among these that lie on the host.
        sequences: live now.
        overflow_tokens: tokens per (layer, kv head) that waited for a later step, summed.
        refused_messages: control messages that were malformed, oversized, replayed or out of place.
    """

    tokens_held: int = 0
    bytes_held: int = 0
    tokens_kept: int = 0
    tokens_on_host: int = 0
    sequences: int = 0
    overflow_tokens: int = 0
    refused_messages: int = 0


ToCacheRank = (
    Open
    | Step
    | Load
    | LoadTogether
    | Adopt
    | Share
    | Drop
    | Restore
    | Attend
    | QueryProjection
    | KeyBasis
    | End
    | Flush
)
ToInferenceRank = Ready | Opened | Report


class AnswerHeader(NamedTuple):
    """Columns of the header of a row in a down message.

    The inference rank leaves a row alone whose first four are not what it expects.

    Attributes:
        resident_tokens: the position of the step, and one more if the answer is for the next step.
        filled_slots: in use when the answer has been applied.
        shipped_tokens: tokens that enter, over layers and KV heads.
        checksum: of the slots, if it is asked for.
    """

    step: int
    sequence_id: int
    resident_tokens: int
    filled_slots: int
    shipped_tokens: int
    checksum: int


class UpMessage:
    """Views into one packed up message: what `rows` requests computed.

    Rows follow each other, so that the place of a row does not depend on how many there are.

    Attributes:
        buffer: (bytes,) uint8.
        tokens: (rows, L, Hq + 2 Hkv, D) in the dtype of the KV pool, contiguous but for the rows; L
            is 0 where the message carries none.
        queries, keys, values: its parts, by heads.
        hidden: (rows, H) in the same dtype, contiguous but for the rows; H is 0 where the
            message carries no hidden state.
    """

    def __init__(
        self, config: CacheRankConfig, layer_message: LayerMessage, rows: int, memory: Tensor
    ) -> None:
        """Lay the message out over the first bytes of some memory."""
        model = config.model
        tokens, hidden = _up_shapes(config, layer_message)
        self.buffer = memory[: self.size(config, layer_message, rows)]
        by_row = self.buffer.view(model.torch_dtype).view(rows, -1)
        self.tokens = by_row[:, : math.prod(tokens)].view(rows, *tokens)
        self.queries, self.keys, self.values = self.tokens.split(
            (model.query_heads, model.kv_heads, model.kv_heads), dim=2
        )
        self.hidden = by_row[:, math.prod(tokens) :][:, :hidden]

    @staticmethod
    def size(config: CacheRankConfig, layer_message: LayerMessage, rows: int) -> int:
        """Bytes of the message."""
        tokens, hidden = _up_shapes(config, layer_message)
        itemsize = config.model.torch_dtype.itemsize
        return rows * (math.prod(tokens) * itemsize + _aligned(hidden * itemsize))


def _up_shapes(
    config: CacheRankConfig, layer_message: LayerMessage
) -> tuple[tuple[int, int, int], int]:
    """Shape of a row's tokens in an up message, whose bytes are aligned, and width of its input."""
    model = config.model
    layers = 0 if layer_message.kv_of is None else len(config.groups[layer_message.kv_of])
    tokens = (layers, model.query_heads + 2 * model.kv_heads, model.head_dim)
    return tokens, 0 if layer_message.hidden_of is None else model.hidden_size


class DownMessage:
    """Views into one packed down message: what changes in the slots of `rows` requests.

    Tokens travel decoded, in the wire dtype, even where they are held as codes: they are chosen one
    by one, and each would need what its codes are relative to. That is a minimum and a scale for
    each channel of a group of keys, or in some formats of values: of 128 channels at least 512
    bytes, where the decoded key or value in bfloat16 is 256.

    Attributes:
        buffer: (bytes,) uint8.
        header: (rows, 6) int64, see AnswerHeader.
        slots: (rows, layers, Hkv, C) int32; -1 is padding, and comes last.
        keys, values: (rows, layers, Hkv, C, width) in the wire dtype, see `to_wire`.
    """

    def __init__(self, config: CacheRankConfig, layers: int, rows: int, memory: Tensor) -> None:
        """Lay the message out over the first bytes of some memory."""
        layout = self._layout(config, layers, rows)
        self.buffer = memory[: layout.size]
        self.header, self.slots, self.keys, self.values = layout.views(memory)

    @classmethod
    def size(cls, config: CacheRankConfig, layers: int, rows: int) -> int:
        """Bytes of the message."""
        return cls._layout(config, layers, rows).size

    @staticmethod
    def _layout(config: CacheRankConfig, layers: int, rows: int) -> Layout:
        entries = (rows, layers, config.model.kv_heads, config.max_swap_tokens)
        tokens = Part(config.wire_torch_dtype, (*entries, config.wire_width))
        header = Part(torch.int64, (rows, len(AnswerHeader._fields)))
        return Layout([header, Part(torch.int32, entries), tokens, tokens])


class AttendedMessage:
    """Views into one packed message: what the queries of a layer attended to.

    Attributes:
        buffer: (bytes,) uint8.
        outputs: (rows, width, Hq, D) in the dtype of the KV pool.
        log_sums: (rows, width, Hq) float32, log-sum-exps of the logits.
    """

    def __init__(
        self, config: CacheRankConfig, rows: int, width: int, device: torch.device
    ) -> None:
        model = config.model
        shape = (rows, width, model.query_heads)
        outputs = Part(model.torch_dtype, (*shape, model.head_dim))
        layout = Layout([outputs, Part(torch.float32, shape)])
        self.buffer = torch.empty(layout.size, dtype=torch.uint8, device=device)
        self.outputs, self.log_sums = layout.views(self.buffer)


def up_sizes(config: CacheRankConfig, rows: int) -> list[int]:
    """Bytes of each message to the cache rank in a step of so many rows."""
    return [UpMessage.size(config, layer_message, rows) for layer_message in config.layer_messages]


def down_sizes(config: CacheRankConfig, rows: int) -> list[int]:
    """Bytes of the answer for each layer group in a step of so many rows."""
    return [DownMessage.size(config, len(layers), rows) for layers in config.groups]


class Part(NamedTuple):
    """One tensor of a message; see `Layout`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Where the parts of a message are: each begins at a multiple of 16 bytes.

    Attributes:
        size: bytes of the message.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.size = 0
        self._dtypes = {part.dtype for part in parts}
        self._places = []
        for part in parts:
            dtype, shape = part
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
            self._places.append((dtype, shape, strides, self.size))
            self.size += _aligned(part.bytes)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Make a view of each part over memory, uint8, of this size or more."""
        typed = {dtype: memory.view(dtype) for dtype in self._dtypes}
        begins = memory.storage_offset()
        return [
            typed[dtype].as_strided(shape, strides, (begins + start) // dtype.itemsize)
            for dtype, shape, strides, start in self._places
        ]


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def projection_shape(config: CacheRankConfig) -> tuple[int, int, int]:
    """Shape of what a layer's queries are forecast by, in the dtype of the KV pool."""
    model = config.model
    return (model.hidden_size + 2, model.query_heads, model.head_dim)


def basis_shape(config: CacheRankConfig) -> tuple[int, int, int]:
    """Shape of how a layer's keys are sketched, float32."""
    model = config.model
    return (model.kv_heads, model.head_dim + 1, model.head_dim)


def bulk_shape(config: CacheRankConfig, count: int) -> tuple[int, int, int, int, int]:
    """Shape of a bulk shipment of `count` tokens, in the dtype of the KV pool."""
    model = config.model
    return (2, model.layers, count, model.kv_heads, model.head_dim)

"""K and V of pool rows as bytes of the wire, and back: whole pages as codes, the rest as it is."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.copies import upload
from cache_rank.kernels.rows import Shipment
from cache_rank.kernels.scatter import collect_tokens, put_tokens
from cache_rank.kernels.scatter.reference import layer_buffers
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.options import parse_options
from sglang_ext.disaggregation.wire import Part, TokenShape

_PADDING_ROW = 0
"""The row of SGLang's pool that it writes to what nobody reads."""

BUFFERS = 32
"""Pages in host memory that are on their way at once."""


def codes_of(text: str, shape: ModelShape) -> CacheRankConfig:
    """Read what `--wire-codes` takes: a format, and behind a colon its options.

    Raises:
        ValueError: there is no such format, or it does not stand in pages of its own.
    """
    name, _, options = text.partition(":")
    config = CacheRankConfig(
        shape, kv_residency=name, kv_residency_options=parse_options(options), max_rows=1
    )
    residency.require_format(config)
    if residency.shared_tail(config) is None:
        raise ValueError(f"{name}: its pages depend on one another")
    return config


class PoolRows:
    """The K and V of SGLang's pool by rows, and on a GPU a stream beside those of forward passes.

    Attributes:
        shape: of a token.
        keys, values: the buffers of all layers.
        lock: codecs and what is queued aside are for one thread at a time.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        rows = min(len(buffer) for buffer in keys)
        self.keys = layer_buffers([buffer[:rows] for buffer in keys])
        self.values = layer_buffers([buffer[:rows] for buffer in values])
        _, heads, width = keys[0].shape
        dtype = str(keys[0].dtype).removeprefix("torch.")
        self.shape = TokenShape(len(keys), heads, width, dtype)
        self.device, self.dtype = keys[0].device, keys[0].dtype
        self.on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self._codecs: dict[str, PageCodec] = {}
        self.lock = threading.Lock()

    @property
    def token_bytes(self) -> int:
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * self.dtype.itemsize

    def codec(self, codes: str) -> PageCodec:
        """The codec of some codes, which is made when they are used first.

        Raises:
            ValueError: there are no such codes.
        """
        if codes not in self._codecs:
            with self.aside():  # where it is used
                self._codecs[codes] = PageCodec(self, codes)
        return self._codecs[codes]

    def forget(self, codes: str) -> None:
        """Let the codec be made anew, which has met tokens that cannot be encoded."""
        self._codecs.pop(codes, None)

    def enter_thread(self) -> None:
        """Let a thread that begins take memory for this GPU."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    @contextlib.contextmanager
    def aside(self, after: Sequence[Any] = ()) -> Iterator[None]:
        """Queue work on a GPU beside forward passes, after these events."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            yield

    def mark(self) -> Any:
        """An event behind what is queued on the current stream; None on a CPU, which is done."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(blocking=True)  # threads that wait for it leave the CPU to others
        event.record()
        return event

    def rows_on_device(self, rows: Tensor) -> Tensor:
        return upload((rows,), self.device)[0]

    def collect(self, rows: Tensor) -> Tensor:
        """Read whole tokens: (2, layers, n, Hkv, D)."""
        shape = self.shape
        size = (2, shape.layers, len(rows), shape.kv_heads, shape.head_dim)
        tokens = torch.empty(size, dtype=self.dtype, device=self.device)
        collect_tokens(self.keys, self.values, rows, tokens)
        return tokens

    def put_raw(self, packed: Tensor, rows: Tensor) -> None:
        """Write the tokens that `collect` has read, given as (bytes,) uint8 of this device."""
        shape = self.shape
        tokens = packed.view(self.dtype).view(
            2, shape.layers, len(rows), shape.kv_heads, shape.head_dim
        )
        put_tokens(self.keys, self.values, rows, *tokens.transpose(2, 3).contiguous())


class PageCodec:
    """Packs pages of PAGE_TOKENS tokens in a format of the cache rank, with all layers.

    Attributes:
        config: of a cache rank that would hold them so.
    """

    def __init__(self, pool: PoolRows, codes: str) -> None:
        of_token = pool.shape
        shape = ModelShape(
            of_token.layers,
            of_token.kv_heads,
            of_token.kv_heads,
            of_token.head_dim,
            of_token.dtype,
            scale=1.0,
        )
        self._pool = pool
        self.config = config = codes_of(codes, shape)
        self._held = residency.create(config, 1, pool.device)
        # Some formats encode the last tokens of a page when so many more have come.
        self._behind = residency.shared_tail(config) or 0
        self._pages = torch.zeros(2, dtype=torch.int32)

    @property
    def packed_bytes(self) -> int:
        return self._held.packed_bytes

    @functools.cached_property
    def part_bytes(self) -> dict[Part, int]:
        """Sizes of a page, and of the parts that it can come in."""
        zeros = torch.zeros(self.packed_bytes, dtype=torch.uint8)
        parts: tuple[Part, ...] = "whole", "first", "rest"
        return {part: len(self.take_part(zeros, part)) for part in parts}

    @property
    def comes_in_parts(self) -> bool:
        """Whether a page can be read, less exactly, before all of it is there."""
        return bool(self._held.refining_planes())

    def encode(self, rows: Tensor) -> Tensor:
        """Pack the tokens of PAGE_TOKENS pool rows: (packed_bytes,) uint8."""
        rows = torch.cat((rows, rows[: self._behind]))
        self._held.load(Shipment.of_one(self._pool.collect(rows), self._pages))
        return self._held.pack_page(0)

    def prepare(self, sends: bool) -> None:
        """On a GPU load the kernels of a side, which takes longer than a peer would wait."""
        with self._pool.aside():
            rows = torch.full((PAGE_TOKENS,), _PADDING_ROW, device=self._pool.device)
            if sends:
                self.encode(rows)
                return
            self.decode(torch.zeros_like(self._held.pack_page(0)), rows)
            rest = rows[:1]
            self._pool.put_raw(self._pool.collect(rest).view(-1).view(torch.uint8), rest)

    def check(self) -> None:
        """Raise ValueError if a page held what cannot be encoded; its work must be done."""
        self._held.check()

    def planes(self, packed: Tensor) -> list[Tensor]:
        """What `encode` has packed as planes, (layers, bytes) uint8; see `PageEncoder.pack`."""
        planes = self._held.planes_of_packed(packed)
        return [plane.view(self._pool.shape.layers, -1) for plane in planes]

    def take_part(self, packed: Tensor, part: Part) -> Tensor:
        """Return what of a packed page travels as this part, (part_bytes,) uint8."""
        if part == "whole":
            return packed
        refining = self._held.refining_planes()
        planes = enumerate(self._held.planes_of_packed(packed))
        chosen = [plane for i, plane in planes if (i in refining) == (part == "rest")]
        return torch.cat(chosen) if chosen else packed[:0]

    def join(self, first: Tensor, rest: Tensor | None) -> Tensor:
        """Put a packed page together again; without the rest it is read less exactly."""
        packed = torch.zeros(self.packed_bytes, dtype=torch.uint8, device=first.device)
        refining = self._held.refining_planes()
        for i, plane in enumerate(self._held.planes_of_packed(packed)):
            if i not in refining:
                plane.copy_(first[: len(plane)])
                first = first[len(plane) :]
            elif rest is not None:
                plane.copy_(rest[: len(plane)])
                rest = rest[len(plane) :]
        return packed

    def decode(self, packed: Tensor, rows: Tensor) -> None:
        """Write what `encode` has packed to pool rows."""
        self._held.unpack_page(packed, 0)
        put_tokens(self._pool.keys, self._pool.values, rows, *self._held.read_first_page())


class HostPages:
    """Host memory for what travels, pinned where there is a GPU; used again and again."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._free: queue.LifoQueue[Tensor] = queue.LifoQueue()
        for _ in range(BUFFERS):
            self._free.put(torch.empty(0, dtype=torch.uint8))

    def take(self, size: int, seconds: float) -> Tensor | None:
        """Take (at least `size`,) uint8 until it is given back; None if others keep all so long."""
        try:
            buffer = self._free.get(timeout=seconds)
        except queue.Empty:
            return None
        if len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._free.put(buffer)


def page_starts(tokens: int) -> range:
    """Where the complete pages of so many tokens begin."""
    return range(0, tokens - tokens % PAGE_TOKENS, PAGE_TOKENS)


def memory_of(buffer: Tensor) -> memoryview:
    """The bytes of (n,) uint8 of the host."""
    array: Any = buffer.numpy()
    return memoryview(array)

"""What all sequences of `mosaickv` share: device memory, and the thread that finds strategies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from cache_rank.config import ModelShape
from cache_rank.kernels.mosaickv.reference import PackedStore
from cache_rank.kernels.mosaickv.vectors import PackedVectors
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS, Compression
from cache_rank.residency.not_finite import NotFinite

P = ParamSpec("P")
R = TypeVar("R")


class PackedMemory:
    """A store, which rows of its tables are free, and a thread beside the steps.

    Attributes:
        model: the layers that are held.
        compression: what the options ask for.
        store: the tensors that the operations of a step read and write.
        free_rows: of the tables of strategies.
        not_finite: reports tokens that cannot be rotated.
        executor: the thread.
    """

    def __init__(
        self,
        compression: Compression,
        model: ModelShape,
        slots: int,
        pages: int,
        device: torch.device,
    ) -> None:
        self.model, self.compression = model, compression
        dtype, tokens, heads = model.torch_dtype, pages * PAGE_TOKENS, model.kv_heads
        strategies = -(-tokens // compression.shortest) + slots  # most of all sequences
        of_page = (pages, model.layers, heads, PAGE_TOKENS)
        ring = (slots, model.layers, heads, compression.originals, model.head_dim)
        rotation = (2, heads, model.head_dim, compression.channels)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        def vectors() -> PackedVectors:
            return PackedVectors(
                torch.empty((*of_page, compression.kept), dtype=dtype, device=device),
                torch.empty((*of_page, compression.bitmap_bytes), dtype=torch.uint8, device=device),
            )

        self.store = PackedStore(
            keys=vectors(),
            values=vectors(),
            rings=(
                torch.empty(ring, dtype=dtype, device=device),
                torch.empty(ring, dtype=dtype, device=device),
            ),
            strategy_of=numbers(slots, max(1, tokens // BUFFER_TOKENS)),
            rows=numbers(slots, compression.most_strategies(tokens)),
            numbers=numbers(strategies, model.layers, 2),
            rotations=torch.empty(
                (strategies, model.layers, *rotation), dtype=dtype, device=device
            ),
            page_tokens=PAGE_TOKENS,
            buffer_tokens=BUFFER_TOKENS,
        )
        self.free_rows = list(range(strategies))[::-1]
        # A flag a slot: other sequences may be loading beside a step, on a stream of their own.
        self.not_finite = NotFinite(model, device, flags=slots)
        self.executor: Executor = ThreadPoolExecutor(1, thread_name_prefix="mosaickv")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> Future[R]:
        """Call a function on the thread, where it sees all that is queued now.

        On a GPU it runs on a stream of its own, beside what is queued later, and returns when the
        device is done.
        """
        if (stream := self._stream) is None:
            return self.executor.submit(function, *arguments, **named)
        queued = torch.cuda.current_stream().record_event()

        def on_stream() -> R:
            with torch.cuda.stream(stream):
                stream.wait_event(queued)
                result = function(*arguments, **named)
                stream.synchronize()
            return result

        return self.executor.submit(on_stream)

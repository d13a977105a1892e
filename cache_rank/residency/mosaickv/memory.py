"""What all sequences of `mosaickv` share: device memory, and the thread that finds strategies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.mosaickv.reference import PackedStore
from cache_rank.kernels.mosaickv.vectors import PackedVectors
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS, Compression
from cache_rank.residency.not_finite import NotFinite

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
        self, compression: Compression, config: CacheRankConfig, pages: int, device: torch.device
    ) -> None:
        model, slots = config.model, config.max_rows
        self.model, self.compression = model, compression
        tokens, heads = pages * PAGE_TOKENS, model.kv_heads
        strategies = -(-tokens // compression.shortest) + slots  # most of all sequences
        of_page = (pages, model.layers, heads, PAGE_TOKENS)
        ring = (slots, model.layers, heads, compression.originals, model.head_dim)
        rotation = (2, heads, model.head_dim, compression.channels)
        floats = partial(torch.empty, dtype=model.torch_dtype, device=device)
        numbers = partial(torch.full, fill_value=-1, dtype=torch.int32, device=device)
        bitmaps = partial(torch.empty, dtype=torch.uint8, device=device)

        def vectors() -> PackedVectors:
            elements = floats((*of_page, compression.kept))
            return PackedVectors(elements, bitmaps((*of_page, compression.bitmap_bytes)))

        self.store = PackedStore(
            keys=vectors(),
            values=vectors(),
            rings=(floats(ring), floats(ring)),
            strategy_of=numbers((slots, max(1, tokens // BUFFER_TOKENS))),
            rows=numbers((slots, compression.most_strategies(tokens))),
            numbers=numbers((strategies, model.layers, 2)),
            rotations=floats((strategies, model.layers, *rotation)),
            page_tokens=PAGE_TOKENS,
            buffer_tokens=BUFFER_TOKENS,
        )
        self.free_rows = list(range(strategies))[::-1]
        # A flag a slot: other sequences may be loading beside a step, on a stream of their own.
        self.not_finite = NotFinite(model, device, flags=slots)
        self.executor: Executor = ThreadPoolExecutor(1, thread_name_prefix="mosaickv")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, function: Callable[[], R]) -> Future[R]:
        """Call a function on the thread, where it sees all that is queued now.

        On a GPU it runs on a stream of its own, beside what is queued later, and returns when the
        device is done.
        """
        if (stream := self._stream) is None:
            return self.executor.submit(function)
        queued = torch.cuda.current_stream().record_event()

        def on_stream() -> R:
            with torch.cuda.stream(stream):
                stream.wait_event(queued)
                result = function()
                stream.synchronize()
            return result

        return self.executor.submit(on_stream)

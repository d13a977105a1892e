"""Device memory of `mosaickv`: pages of packed vectors, rings of newest tokens, strategies.

Every packed vector has room for the most elements and bits that any candidate strategy may need; a
strategy that needs less leaves the rest unused. The host says what changes here; it reads nothing
back but what may be some steps old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.copies import upload
from cache_rank.kernels.mosaickv.store import PackedStore, Strategy, store_vectors
from cache_rank.kernels.mosaickv.vectors import PackedVectors
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS, Compression
from cache_rank.residency.not_finite import NotFinite

_LARGEST_NORM = torch.finfo(torch.float32).max / 2
"""No vector may be longer: its rotated elements must be float32, whatever is rounded."""


class PackedMemory:
    """A store, what is in it, and which rows of its tables are free.

    Attributes:
        model: the layers that are held.
        compression: what the options ask for.
        free_rows: of the tables of strategies.
        store: the tensors that the operations of a step read and write.
        not_finite: reports tokens that cannot be rotated.
    """

    def __init__(
        self,
        options: Mapping[str, OptionValue],
        config: CacheRankConfig,
        pages: int,
        device: torch.device,
    ) -> None:
        model, slots = config.model, config.max_rows
        self.model, self.compression = model, Compression(options, model)
        self._device = device
        tokens, compression = pages * PAGE_TOKENS, self.compression
        strategies = -(-tokens // compression.shortest) + slots  # most of all sequences

        def vectors() -> PackedVectors:
            shape = (pages, model.layers, model.kv_heads, PAGE_TOKENS)
            elements = (*shape, compression.kept)
            return PackedVectors(
                torch.empty(elements, dtype=model.torch_dtype, device=device),
                torch.empty((*shape, compression.bitmap_bytes), dtype=torch.uint8, device=device),
            )

        ring = (slots, model.layers, model.kv_heads, compression.originals, model.head_dim)
        in_table = (strategies, model.layers)
        of_slot = (slots, compression.most_strategies(tokens))
        buffers = max(1, tokens // BUFFER_TOKENS)
        rotation = (2, model.kv_heads, model.head_dim, compression.channels)
        self.store = PackedStore(
            keys=vectors(),
            values=vectors(),
            rings=(
                torch.empty(ring, dtype=model.torch_dtype, device=device),
                torch.empty(ring, dtype=model.torch_dtype, device=device),
            ),
            strategy_of=torch.full((slots, buffers), -1, dtype=torch.int32, device=device),
            rows=torch.full(of_slot, -1, dtype=torch.int32, device=device),
            numbers=torch.zeros((*in_table, 2), dtype=torch.int32, device=device),
            rotations=torch.empty((*in_table, *rotation), dtype=model.torch_dtype, device=device),
            page_tokens=PAGE_TOKENS,
            buffer_tokens=BUFFER_TOKENS,
        )
        self.free_rows = list(range(strategies))[::-1]
        # A flag a slot: other sequences may be loading beside a step, on a stream of their own.
        self.not_finite = NotFinite(model, device, flags=slots)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, slot: int) -> None:
        """Prepare a slot for a sequence that has nothing in the pages yet."""
        self.store.strategy_of[slot].fill_(-1)
        self.store.rows[slot].fill_(-1)

    def adopt(
        self,
        pages: Tensor,
        slot: int,
        index: int,
        first: int,
        found: Sequence[tuple[Strategy, PackedVectors]],
    ) -> int:
        """Take over the sequence's segment `index`, which begins at token `first`.

        Another thread has found the strategy and compressed the tokens of each layer. Returns the
        row of the strategies in the tables.
        """
        row, store = self.free_rows.pop(), self.store
        numbers = torch.tensor([strategy[:2] for strategy, _ in found], dtype=torch.int32)
        store.numbers[row].copy_(upload((numbers,), self._device)[0])
        store.rows[slot, index].fill_(row)
        for layer, (strategy, vectors) in enumerate(found):
            if self._beside is not None:
                for tensor in (strategy.rotations, *vectors):
                    tensor.record_stream(torch.cuda.current_stream())
            store.rotations[row, layer].copy_(strategy.rotations)
            store_vectors(store, pages, layer, first, vectors)
        self.assign(slot, first, first + found[0][1].elements.shape[2], index)
        return row

    def assign(self, slot: int, first: int, last: int, index: int) -> None:
        """Note that tokens [first, last) are compressed by the sequence's strategy `index`."""
        self.store.strategy_of[slot, first // BUFFER_TOKENS : last // BUFFER_TOKENS].fill_(index)

    def require_finite(self, slot: int, layers: range, first: int, last: int) -> None:
        """Check that tokens of a slot are finite: otherwise they cannot be rotated.

        Raises:
            ValueError: some of its tokens are not finite; on a GPU `not_finite` says so.
        """
        group, rings = slice(layers.start, layers.stop), self.store.rings
        entry = torch.arange(first, last, device=self._device) % rings[0].shape[3]
        tokens = torch.stack([ring[slot][group, :, entry] for ring in rings])
        norms = torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float64)
        refused = (~(norms <= _LARGEST_NORM)).any(dim=-1)
        self.not_finite.note(slot, layers, refused)
        if self._beside is None:
            self.not_finite.check()

    def beside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function for another thread, so that it sees all that is queued now.

        On a GPU it runs on a stream of its own, beside what is queued later, and returns when the
        device is done.
        """
        if (stream := self._beside) is None:
            return function
        queued = torch.cuda.current_stream().record_event()

        def on_stream(*arguments: Any) -> Any:
            with torch.cuda.stream(stream):
                stream.wait_event(queued)
                result = function(*arguments)
                stream.synchronize()
            return result

        return on_stream

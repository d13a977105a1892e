"""What the kernels of `mosaickv` are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from cache_rank_kernels.mosaickv.packing import columns_for
from cache_rank_kernels.mosaickv.store import PackedStore


class Layout(NamedTuple):
    """Sizes of a `PackedStore` that do not depend on how much memory there is.

    Attributes:
        layers, kv_heads, head_dim, ring: of the rings.
        channels: C.
        columns: C, as kernels hold them.
        part: channels that are unpacked at once, at most those of a word of a bitmap.
        parts: that all channels are in.
        kept, bytes: elements and bytes of a bitmap that a packed vector has room for.
        page: tokens of a page.
        page_blocks: per-block keys of a page.
        buffer: tokens that are compressed together.
    """

    layers: int
    kv_heads: int
    head_dim: int
    ring: int
    channels: int
    columns: int
    part: int
    parts: int
    kept: int
    bytes: int
    page: int
    page_blocks: int
    buffer: int

    @classmethod
    def of(cls, store: PackedStore) -> Layout:
        """Of a store, whose tensors are contiguous."""
        for tensor in (*store.keys, *store.values, *store.block_keys, *store.rings, *store[4:8]):
            assert tensor.is_contiguous()
        _, layers, kv_heads, ring, head_dim = store.rings[0].shape
        channels = store.rotations.shape[-1]
        part = min(columns_for(channels), 32)
        assert store.keys.bitmap.shape[-1] % 4 == 0
        assert ring % store.buffer_tokens == 0
        return cls(
            layers,
            kv_heads,
            head_dim,
            ring,
            channels,
            columns_for(channels),
            part,
            -(-channels // part),
            store.keys.elements.shape[-1],
            store.keys.bitmap.shape[-1],
            store.page_tokens,
            store.block_keys.elements.shape[-2],
            store.buffer_tokens,
        )

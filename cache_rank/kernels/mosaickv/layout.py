"""The sizes that the kernels of `mosaickv` are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from cache_rank.kernels.mosaickv.packing import columns_for
from cache_rank.kernels.mosaickv.store import PackedStore


class Layout(NamedTuple):
    """Sizes of a `PackedStore` that do not depend on how much memory there is.

    Attributes:
        layers, kv_heads, head_dim, ring: those of the rings.
        channels: C.
        columns: C padded to a power of two, as kernels hold vectors.
        part: how many channels are unpacked at once, at most those of a word of a bitmap.
        parts: how many times that is for all channels.
        kept, bytes: the elements, and the bytes of a bitmap, that a packed vector has room for.
        page: how many tokens a page holds.
        buffer: how many tokens are compressed together.
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
    buffer: int

    @classmethod
    def of(cls, store: PackedStore) -> Layout:
        """The layout of a store, whose tensors must be contiguous."""
        for tensor in (*store.keys, *store.values, *store.rings, *store[3:7]):
            assert tensor.is_contiguous()
        _, layers, kv_heads, ring, head_dim = store.rings[0].shape
        channels = store.rotations.shape[-1]
        part = min(columns_for(channels), 32)
        assert store.keys.bitmap.shape[-1] % 4 == 0
        assert ring % store.buffer_tokens == 0
        return cls(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ring=ring,
            channels=channels,
            columns=columns_for(channels),
            part=part,
            parts=-(-channels // part),
            kept=store.keys.elements.shape[-1],
            bytes=store.keys.bitmap.shape[-1],
            page=store.page_tokens,
            buffer=store.buffer_tokens,
        )

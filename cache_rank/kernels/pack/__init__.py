"""What a layer computes is packed into the message to the cache rank."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.pack import reference


@by_device(reference.pack_layer)
def pack_layer() -> Callable[..., None]:
    from cache_rank.kernels.pack import triton

    return triton.pack_layer


@by_device(reference.pack_hidden)
def pack_hidden() -> Callable[..., None]:
    from cache_rank.kernels.pack import triton

    return triton.pack_hidden


@by_device(reference.stamp)
def stamp() -> Callable[..., None]:
    from cache_rank.kernels.pack import triton

    return triton.stamp

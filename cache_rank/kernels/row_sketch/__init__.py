"""Sketches that lie in the rows of SGLang's KV pool: written with the keys, and selected by."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.row_sketch import reference


@by_device(reference.encode_rows)
def encode_rows() -> Callable[..., None]:
    from cache_rank.kernels.row_sketch import triton

    return triton.encode_rows


@by_device(reference.select_rows)
def select_rows() -> Callable[..., None]:
    from cache_rank.kernels.row_sketch import triton

    return triton.select_rows


@by_device(reference.row_scratch)
def row_scratch() -> Callable[..., reference.RowScratch]:
    from cache_rank.kernels.row_sketch import triton

    return triton.row_scratch

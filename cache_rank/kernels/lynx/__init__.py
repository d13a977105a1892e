"""Lynx codes. One plain torch version, of kernels/coded, serves every format."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.coded import reference


@by_device(reference.encode_groups)
def encode_groups() -> Callable[..., None]:
    from cache_rank.kernels.lynx import triton

    return triton.encode_groups


@by_device(reference.gather_codes)
def gather_codes() -> Callable[..., None]:
    from cache_rank.kernels.lynx import triton

    return triton.gather_codes


@by_device(reference.score_codes)
def score_codes() -> Callable[..., None]:
    from cache_rank.kernels.lynx import triton

    return triton.score_codes

"""Sequences that are held as codes, and every format whose steps have Triton kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_rank.kernels.append import reference as append
from cache_rank.kernels.coded import reference
from cache_rank.kernels.coded.reference import Codec, CodedTokens
from cache_rank.kernels.hack.reference import GROUP, HackCodec
from cache_rank.kernels.lynx.reference import DEFAULT_ALPHA, LynxCodec
from cache_rank.kernels.quantspec.reference import QuantSpecCodec
from cache_rank.kernels.rows import Shipment

PAGE = 256
SLOTS, LAYERS, KV_HEADS = 5, 2, 2


@dataclass(frozen=True)
class Format:
    """One way of holding codes; for the numbers of tokens see `CodedTokens`."""

    codecs: Callable[[torch.dtype], tuple[Codec, Codec]]
    group_tokens: int
    ring: int
    tolerance: Callable[[CodedTokens, Tensor], float]
    """How far a score of some queries may be off, by what float32 and the format round."""

    unfinished: bool = False


def largest(numbers: Tensor) -> float:
    """The largest of those that were written."""
    return float(numbers[numbers.isfinite()].abs().max())


def of_rounded_queries(
    largest_scale: Callable[[tuple[Tensor, ...]], float],
    largest_code: float,
    rounding_on_gpu: float = 0.0,
) -> Callable[[CodedTokens, Tensor], float]:
    """A logit is off by what its query and codes were rounded, and a score by twice that.

    A query is multiplied with scales of keys, is split (`split_int8`), and meets codes; on a GPU
    that product may be rounded too. Float32 sums round beside it.
    """

    def tolerance(tokens: CodedTokens, queries: Tensor) -> float:
        folded = float(queries.abs().max()) * largest_scale(tokens.planes[0])
        rounding = largest_code * 2.0**-14 + rounding_on_gpu * queries.is_cuda
        return 2 * queries.shape[-1] ** 0.5 * folded * rounding + 1e-4

    return tolerance


def of_partitions(tokens: CodedTokens, queries: Tensor) -> float:
    """What float32 rounds of a score at most, in a handful of operations of each partition.

    The terms of a product are of the size of the ranges of queries and keys. A score is off by
    twice what its logits are. Queries in parts are less exact beside newest keys in bfloat16.
    """
    _, minima, scales, _ = tokens.planes[0]
    sizes = queries.shape[-1] ** 0.5 * float(queries.abs().max())
    sizes *= largest(minima) + 15 * largest(scales)
    of_ring = 1e-3 if tokens.rings[0].dtype == torch.bfloat16 else 0.0
    return 2 * 8 * torch.finfo(torch.float32).eps * sizes + of_ring


def quantspec(bits: int, bits_of_values: int = 8) -> Format:
    return Format(
        lambda dtype: (
            QuantSpecCodec(True, dtype, bits),
            QuantSpecCodec(False, dtype, bits_of_values),
        ),
        128,
        256,
        of_rounded_queries(lambda planes: largest(planes[2]), 15 if bits == 4 else 8),
    )


def lynx(in_full: bool, alpha: float = DEFAULT_ALPHA) -> Format:
    codec = LynxCodec(alpha, reads_residuals=in_full)
    return Format(
        lambda dtype: (codec, codec),
        256,
        256,
        of_rounded_queries(
            lambda planes: largest(planes[3]) * largest(planes[5]), 1, 2**-11
        ),  # half precision
    )


def hack(
    bits: int = 2,
    partition: int = 64,
    seed: int | None = None,
    value_sums: bool = False,
    values_by: int | None = None,
    sums_anew: bool = False,
    unfinished: bool = False,
) -> Format:
    return Format(
        lambda dtype: (
            HackCodec(True, dtype, bits, partition, seed, sums_anew=sums_anew),
            HackCodec(False, dtype, bits, values_by or partition, seed, value_sums, sums_anew),
        ),
        GROUP,
        GROUP,
        of_partitions,
        unfinished,
    )


FORMATS = {
    "quantspec 4": quantspec(4),
    "quantspec 8": quantspec(8),
    "lynx anchor": lynx(in_full=False),
    "lynx anchor, large alpha": lynx(in_full=False, alpha=50.0),
    "lynx full": lynx(in_full=True),
    "hack 2": hack(),
    "hack 2, 32": hack(partition=32),
    "hack 2, 16, stochastic": hack(partition=16, seed=65535),
    "hack 4": hack(bits=4),
    "hack 4, 16": hack(bits=4, partition=16),
    "hack 4, sums": hack(bits=4, value_sums=True),
    "hack 2, sums": hack(value_sums=True),
    "hack 4, stochastic": hack(bits=4, seed=0),
    "hack 4, unfinished": hack(bits=4, value_sums=True, unfinished=True),
    "hack 2, unfinished": hack(sums_anew=True, unfinished=True),
}
ATTENDED = {
    "quantspec 4, values too": quantspec(4, bits_of_values=4),
    **{name: FORMATS[name] for name in ("quantspec 8", "hack 4, sums", "hack 2, sums")},
    **{name: FORMATS[name] for name in ("hack 4, unfinished", "hack 2, unfinished")},
    **{name: FORMATS[name] for name in FORMATS if name.startswith("lynx")},
    "hack 4, keys by 16": hack(bits=4, partition=16, value_sums=True, values_by=64),
}
"""Formats whose codes can be attended to."""

NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""A dtype of 16 bits that this machine rounds to the nearest: not bfloat16 in the interpreter."""


def empty(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    pages: int = 12,
    layers: int = LAYERS,
    kv_heads: int = KV_HEADS,
    head_dim: int | None = None,
) -> CodedTokens:
    """No tokens yet; what was never written is not a number, or an odd code."""
    if head_dim is None:  # matrix units multiply no fewer channels than 64
        of_gpus = device.type == "cuda" or "KERNELS_ARE_COMPILED" in os.environ
        head_dim = 64 if of_gpus else 16
    held_as = (FORMATS | ATTENDED)[name]
    codecs = held_as.codecs(dtype)

    def planes(codec: Codec) -> tuple[Tensor, ...]:
        groups = PAGE // held_as.group_tokens
        return tuple(
            torch.full(
                (pages, layers, kv_heads, groups * plane.entries, plane.width),
                float("nan") if plane.dtype.is_floating_point else 0xA7,
                dtype=plane.dtype,
                device=device,
            )
            for plane in codec.planes(head_dim)
        )

    ring = torch.full(
        (SLOTS, layers, kv_heads, held_as.ring, head_dim), float("nan"), dtype=dtype, device=device
    )
    return CodedTokens(
        codecs=codecs,
        planes=(planes(codecs[0]), planes(codecs[1])),
        rings=(ring, ring.clone()),
        not_finite=torch.zeros(1, dtype=torch.int32, device=device),
        group_tokens=held_as.group_tokens,
        page_tokens=PAGE,
        unfinished=held_as.unfinished,
    )


def on(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def random_shipment(tokens: CodedTokens, count: int, seed: int = 0) -> Tensor:
    """(2, layers, count, Hkv, D) with a few channels that are constant, or far from 0."""
    ring = tokens.rings[0]
    _, layers, kv_heads, _, head_dim = ring.shape
    generator = torch.Generator().manual_seed(seed)
    shipment = torch.randn((2, layers, count, kv_heads, head_dim), generator=generator)
    shipment[..., 1] = 0.75
    shipment[..., 2] += 20
    shipment[..., head_dim // 2 + 3] *= 9
    return shipment.to(ring.device, ring.dtype)


def load(tokens: CodedTokens, pages: Tensor, slot: int, start: int, shipment: Tensor) -> None:
    """Load tokens as a residency does, by the references."""
    came = Shipment.of_one(shipment, pages.cpu(), slot, start)
    reference.encode_groups(tokens, came.rows, range(shipment.shape[1]), came)
    append.load_tokens(came.in_rings(), *tokens.rings)


def assert_same(left: CodedTokens, right: CodedTokens) -> None:
    """The same bits everywhere."""
    for one, other in zip(
        (*left.planes[0], *left.planes[1], *left.rings, left.not_finite),
        (*right.planes[0], *right.planes[1], *right.rings, right.not_finite),
        strict=True,
    ):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

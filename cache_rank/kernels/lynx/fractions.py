"""Lynx codes become keys about the means of their chunks, for a matrix unit, Triton.

Such a key is a signed fraction f times the spread of its channel, in half precision. With
λ = ln(1 + α) / 120, a residual r and the fraction F of the anchor alone,

    |f| = F + (F + 1 / α) (exp(-λ r) - 1)

F is one of 8 numbers, which are looked up. The last factor is a polynomial of r that is 0 where r
is. On a GPU arithmetic binds here, not memory: so no element takes an exponential or a conversion,
and every instruction deals with two elements, or with eight. In units of the spread a key is off by
4e-4 at most and by 1.3e-4 in the root mean square, a twentieth of what its level rounds.
"""

from __future__ import annotations

import functools
import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.lynx.reference import CHUNK, LEVELS, PAGE, fraction_of

_ALLOWED = 2.0**-12
"""The polynomial may make a fraction wrong by this much, beside the rounding of half precision."""


@functools.lru_cache(maxsize=16)
def growth_coefficients(alpha: float) -> tuple[float, ...]:
    """The coefficients of r, r², ...: as few as make exp(-λ r) - 1 for the residuals -8 to 7."""
    residuals = torch.arange(-8, 8, dtype=torch.float64)
    growth = torch.expm1(-math.log1p(alpha) / LEVELS * residuals)
    for degree in (2, 3, 4):
        powers = torch.stack([residuals**power for power in range(1, degree + 1)], dim=1)
        coefficients = torch.linalg.lstsq(powers, growth).solution
        error = float((powers @ coefficients - growth).abs().max())
        if error * (1 + 1 / alpha) < _ALLOWED:
            break
    return tuple(coefficients.tolist())


@functools.lru_cache(maxsize=16)
def instructions(alpha: float, in_full: bool) -> str:
    """PTX that makes keys of four bytes of anchors, and of residuals if they are read.

    The operands are, for channels two by two: the low and the high keys; bytes of anchors and of
    residuals; low and high spreads; and both `table_words`, four times. Some results are written
    before all operands are read.

    `prmt` takes four of eight bytes, by the low three bits of four nibbles: here bytes 0 and 1 of
    the fractions of two bytes of anchors. A nibble of residuals becomes the lowest bits of 1024, or
    the bits above them, wherever it is in place already. 0x28, 0x6A and 0x78 are (a ^ b) & c,
    (a & b) ^ c and a ^ (b & c).
    """
    low_bytes, high_bytes = (
        f"{words}, 0x{_bytes_of_fractions(range(4, 8), alpha, byte):08x}"
        for byte, words in enumerate(("$10", "$14"))
    )
    lines = """
        and.b32 sign, $4, 0x88888888;
        shr.b32 next, sign, 3;
        sub.u32 sign, sign, next;
        lop3.b32 anchor, $4, sign, 0x77777777, 0x28;
        prmt.b32 sign, $4, 0, 0x3120;
        prmt.b32 residual, $5, 0, 0x3120;"""
    for pair in range(2):
        if pair == 1:
            lines += """
        shr.b32 anchor, anchor, 16;
        shr.b32 residual, residual, 8;"""
        lines += f"""
        prmt.b32 first, {low_bytes}, anchor;
        prmt.b32 second, {high_bytes}, anchor;"""
        for is_high in range(2):
            lines += f"""
        prmt.b32 key, first, second, {("0x6240", "0x7351")[is_high]};"""
            if in_full:
                lines += _grown(is_high, alpha)
            lines += f"""
        mul.rn.f16x2 key, key, ${6 + 2 * is_high + pair};
        shl.b32 next, sign, {12 - 8 * pair - 4 * is_high};
        lop3.b32 ${2 * is_high + pair}, key, next, 0x80008000, 0x78;"""
    registers = "sign, anchor, residual, first, second, key, next, r, growth, constant"
    return f"{{ .reg .b32 {registers}; {lines} }}"


def _grown(is_high: int, alpha: float) -> str:
    """PTX that adds to the fractions of two anchors what their residuals do to them."""
    lines = (
        f"""
        lop3.b32 r, residual, 0x00F000F0, 0x64806480, 0x6A;
        mov.b32 constant, {_pair(-72)};
        mov.b32 growth, {_pair(1 / 16)};
        fma.rn.f16x2 r, r, growth, constant;"""
        if is_high
        else f"""
        lop3.b32 r, residual, 0x000F000F, 0x64086408, 0x6A;
        mov.b32 constant, {_pair(-1032)};
        add.rn.f16x2 r, r, constant;"""
    )
    *rest, highest = growth_coefficients(alpha)
    lines += f"""
        mov.b32 growth, {_pair(highest)};"""
    for coefficient in reversed(rest):
        lines += f"""
        mov.b32 constant, {_pair(coefficient)};
        fma.rn.f16x2 growth, r, growth, constant;"""
    return f"""{lines}
        mul.rn.f16x2 growth, r, growth;
        mov.b32 constant, {_pair(1 / alpha)};
        add.rn.f16x2 next, key, constant;
        fma.rn.f16x2 key, next, growth, key;"""


def _half(number: float) -> int:
    """The bits of a number in half precision."""
    return int.from_bytes(struct.pack("<e", number), "little")


def _pair(number: float) -> str:
    """A word with a number in half precision, twice."""
    return f"0x{_half(number) * 0x10001:08x}"


def _bytes_of_fractions(anchors: range, alpha: float, byte: int) -> int:
    """A word of byte 0 or 1 of the fractions of four anchors, the first in the lowest bits."""
    fractions = [_half(fraction_of(16 * anchor, alpha)) for anchor in anchors]
    return sum((bits >> 8 * byte & 255) << 8 * place for place, bits in enumerate(fractions))


@functools.lru_cache(maxsize=16)
def table_words(alpha: float, device: torch.device) -> Tensor:
    """Bytes 0 and 1 of the fractions of anchors 0 to 3, once a chunk: (2, PAGE / CHUNK) int32.

    Every warp loads its own. If the compiler knew them to be the same for all threads, it would
    copy them to a register wherever they are used.
    """
    words = torch.tensor([_bytes_of_fractions(range(4), alpha, byte) for byte in (0, 1)])
    return words.to(device, torch.int32)[:, None].repeat(1, PAGE // CHUNK)


@triton.jit
def keys_of_codes(
    anchors,
    residuals,
    low_spread,
    high_spread,
    words,
    table,
    INSTRUCTIONS: tl.constexpr,
    IN_FULL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Make keys about the means of their chunks, in units of their spans.

    Args:
        anchors, residuals: uint8 of any shape; residuals may be anything if they are not read.
        low_spread, high_spread: float16 spreads of the channels in the low and high nibbles.
        words: both `table_words`.
        table: `fractions_of_levels`.
        INSTRUCTIONS: what `instructions` returned.
        IN_FULL: whether residuals are read.

    Returns:
        The keys in the low and in the high nibbles, float16; float32 in the interpreter.
    """
    if INTERPRETED:
        low = _signed_fraction(anchors & 15, residuals & 15, table, IN_FULL)
        high = _signed_fraction(anchors >> 4, residuals >> 4, table, IN_FULL)
        return low * low_spread.to(tl.float32), high * high_spread.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            INSTRUCTIONS,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [anchors, residuals, low_spread, high_spread, words[0], words[1]],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _signed_fraction(anchor, residual, table, IN_FULL: tl.constexpr):
    """The signed fraction f of nibbles of anchors and residuals."""
    anchor = (anchor.to(tl.int32) ^ 8) - 8
    level = 16 * magnitude_of(anchor)
    if IN_FULL:
        level -= (residual.to(tl.int32) ^ 8) - 8
    fraction = tl.load(table + level)
    return tl.where(anchor < 0, -fraction, fraction)


@triton.jit
def magnitude_of(anchor):
    """The V of signed anchors."""
    return tl.where(anchor < 0, -anchor - 1, anchor)


@triton.jit
def half_part(query, part, unit, DTYPE: tl.constexpr):
    """Split float queries into two numbers of a float dtype, the second in 2048ths, and take one.

    Args:
        query: (COLUMNS, HALF) float32, below 2 units.
        part: (COLUMNS,) which number each column takes, 0 or 1; queries of other columns are 0.
        unit: (COLUMNS,) powers of two, see `power_below`.
        DTYPE: float16, or float32 in the interpreter.

    Returns:
        (COLUMNS, HALF), in units.
    """
    query *= (1 / unit)[:, None]
    first = query.to(DTYPE)
    second = ((query - first.to(tl.float32)) * 2048.0).to(DTYPE)
    return tl.where((part == 0)[:, None], first, second)

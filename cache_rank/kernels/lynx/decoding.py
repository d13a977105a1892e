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


# PTX. Four bytes of anchors, and of residuals, become four words of two keys each: those of the low
# and of the high nibbles of bytes 0 and 1, and of bytes 2 and 3.
#
# prmt takes four of eight bytes, by the low three bits of four nibbles. lop3 combines the bits of
# three words: 0x28, 0x6A and 0x78 are (a ^ b) & c, (a & b) ^ c and a ^ (b & c).

_OPERANDS = """
        .reg .b32 anchors, residuals, spread_low_01, spread_low_23, spread_high_01, spread_high_23;
        .reg .b32 small_byte_0, small_byte_1;
        .reg .b32 sign, magnitude, residual, bytes_0, bytes_1, key, flip, r, growth, sum;
        mov.b32 anchors, $4;
        mov.b32 residuals, $5;
        mov.b32 spread_low_01, $6;
        mov.b32 spread_low_23, $7;
        mov.b32 spread_high_01, $8;
        mov.b32 spread_high_23, $9;
        mov.b32 small_byte_0, $10;
        mov.b32 small_byte_1, $14;"""
"""The operands get names. `small` words have a byte of the fractions of anchors 0 to 3, and `large`
ones of 4 to 7. The small words come four times, once an element, and the first is used. Some
results are written before all operands are read."""

_RESULTS = {"low_01": "$0", "low_23": "$1", "high_01": "$2", "high_23": "$3"}

_MAGNITUDES = """
        and.b32 sign, anchors, 0x88888888;
        shr.b32 flip, sign, 3;
        sub.u32 sign, sign, flip;
        lop3.b32 magnitude, anchors, sign, 0x77777777, 0x28;
        prmt.b32 sign, anchors, 0, 0x3120;
        prmt.b32 residual, residuals, 0, 0x3120;"""
"""The nibble of a negative anchor is flipped. Bytes 1 and 2 of signs and residuals change places,
so that the bytes of a pair are 16 bits apart, as its keys are."""

_NEXT_PAIR = """
        shr.b32 magnitude, magnitude, 16;
        shr.b32 residual, residual, 8;"""

_LOOK_UP = """
        prmt.b32 bytes_0, small_byte_0, large_byte_0, magnitude;
        prmt.b32 bytes_1, small_byte_1, large_byte_1, magnitude;"""
"""Bytes 0 and 1 of the fractions of four nibbles."""

_JOIN = {
    "low": """
        prmt.b32 key, bytes_0, bytes_1, 0x6240;""",
    "high": """
        prmt.b32 key, bytes_0, bytes_1, 0x7351;""",
}

_RESIDUALS = {
    "low": """
        lop3.b32 r, residual, 0x000F000F, 0x64086408, 0x6A;
        add.rn.f16x2 r, r, minus_1032;""",
    "high": """
        lop3.b32 r, residual, 0x00F000F0, 0x64806480, 0x6A;
        fma.rn.f16x2 r, r, sixteenth, minus_72;""",
}
"""A nibble of a residual, its top bit flipped, becomes the lowest bits of 1024, or the bits above
them, wherever it is in place already: 1032 + r, or 1024 + 16 (8 + r)."""

_GROW = """
        mul.rn.f16x2 growth, r, growth;
        add.rn.f16x2 sum, key, inverse_alpha;
        fma.rn.f16x2 key, sum, growth, key;"""
"""F + (F + 1 / α) (exp(-λ r) - 1), of which `growth` has the last factor over r."""

_FINISH = """
        mul.rn.f16x2 key, key, spread_{keys};
        shl.b32 flip, sign, {sign_shift};
        lop3.b32 {result}, key, flip, 0x80008000, 0x78;"""
"""Times the spread, with the sign of the anchor."""

_KEYS = (("low", "01", 12), ("high", "01", 8), ("low", "23", 4), ("high", "23", 0))
"""The words of keys in the order in which they are made, and how far their signs are shifted."""


@functools.lru_cache(maxsize=16)
def instructions(alpha: float, in_full: bool) -> str:
    """PTX that makes keys of four bytes of anchors, and of residuals if they are read."""
    coefficients = growth_coefficients(alpha)
    constants = {
        "large_byte_0": _bytes_of_fractions(range(4, 8), alpha, 0),
        "large_byte_1": _bytes_of_fractions(range(4, 8), alpha, 1),
        "inverse_alpha": _pair(1 / alpha),
        "sixteenth": _pair(1 / 16),
        "minus_72": _pair(-72),
        "minus_1032": _pair(-1032),
        **{f"growth_{power}": _pair(number) for power, number in enumerate(coefficients, start=1)},
    }
    powers = range(len(coefficients) - 1, 0, -1)
    lines = _OPERANDS + _constants(constants) + _MAGNITUDES
    for half, pair, sign_shift in _KEYS:
        if half == "low":
            lines += (_NEXT_PAIR if pair == "23" else "") + _LOOK_UP
        lines += _JOIN[half]
        if in_full:
            lines += _RESIDUALS[half] + f"\n        mov.b32 growth, growth_{len(coefficients)};"
            for power in powers:
                lines += f"\n        fma.rn.f16x2 growth, r, growth, growth_{power};"
            lines += _GROW
        keys = f"{half}_{pair}"
        lines += _FINISH.format(keys=keys, sign_shift=sign_shift, result=_RESULTS[keys])
    return f"{{ {lines} }}"


def half_constants(numbers: dict[str, float]) -> str:
    """PTX that gives names to words with numbers in half precision, twice each."""
    return _constants({name: _pair(number) for name, number in numbers.items()})


def _constants(words: dict[str, int]) -> str:
    """PTX that gives words names."""
    return "".join(
        f"\n        .reg .b32 {name}; mov.b32 {name}, 0x{word:08x};" for name, word in words.items()
    )


def _half(number: float) -> int:
    """The bits of a number in half precision."""
    return int.from_bytes(struct.pack("<e", number), "little")


def _pair(number: float) -> int:
    """A word with a number in half precision, twice."""
    return _half(number) * 0x10001


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
        low = signed_fraction(anchors & 15, residuals & 15, table, IN_FULL)
        high = signed_fraction(anchors >> 4, residuals >> 4, table, IN_FULL)
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
def signed_fraction(anchor, residual, table, IN_FULL: tl.constexpr):
    """The signed fraction f of nibbles of anchors and residuals."""
    anchor = (anchor.to(tl.int32) ^ 8) - 8
    level = 16 * tl.where(anchor < 0, -anchor - 1, anchor)
    if IN_FULL:
        level -= (residual.to(tl.int32) ^ 8) - 8
    fraction = tl.load(table + level)
    return tl.where(anchor < 0, -fraction, fraction)


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

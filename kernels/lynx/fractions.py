"""Fractions of Lynx codes as numbers that a matrix unit multiplies, Triton.

An anchor alone has 16 fractions. They are rounded to integers of 8 bits, and looked up four at a
time: with α = 3 that is off by a twentieth of the step between two anchors at most. With the
residual there are 241, which are computed, in half precision; and so are those of anchors when α is
so large that the smallest would be rounded away.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from cache_rank_kernels.lynx.reference import fraction_of
from torch import Tensor

_LARGEST_ANCHOR = 127

_LEAST_ANCHOR = 4
"""As an integer, of the smallest anchor but 0; below that rounding is off by more than an eighth of
the step between two."""


def anchors_are_integers(alpha: float) -> bool:
    """Whether fractions of anchors alone can be rounded to integers."""
    return _anchor_magnitudes(alpha)[1] >= _LEAST_ANCHOR


def anchor_unit(alpha: float) -> float:
    """What the integers of anchors count."""
    return fraction_of(7 * 16, alpha) / _LARGEST_ANCHOR


def _anchor_magnitudes(alpha: float) -> list[int]:
    """Of anchors 0 to 7, the fraction as an integer."""
    return [round(fraction_of(16 * anchor, alpha) / anchor_unit(alpha)) for anchor in range(8)]


@functools.lru_cache(maxsize=16)
def anchor_table(alpha: float, device: torch.device) -> Tensor:
    """(16,) int8: the signed fraction of each nibble, as an integer."""
    magnitudes = _anchor_magnitudes(alpha)
    signed = magnitudes + [-magnitude for magnitude in reversed(magnitudes)]
    return torch.tensor(signed, dtype=torch.int8, device=device)


@functools.lru_cache(maxsize=16)
def anchor_instructions(alpha: float) -> str:
    """Instructions that look four bytes of anchors up: their low nibbles, and their high ones.

    `prmt` takes four of eight bytes, by the low three bits of four nibbles; with the fourth bit it
    repeats a byte's sign instead, which makes masks. 0xE4 takes bits of the first operand where the
    third has ones, else of the second. Of the last two words, one has the bytes of the low nibbles
    in places 0, 2, 4 and 6, and the other those of the high ones between them.
    """
    magnitudes = _anchor_magnitudes(alpha)
    words = []
    for table in (magnitudes, [-magnitude for magnitude in reversed(magnitudes)]):
        for half in (table[:4], table[4:]):
            words.append(sum((number & 255) << 8 * place for place, number in enumerate(half)))
    positive, negative = (f"0x{low:08x}, 0x{high:08x}" for low, high in (words[:2], words[2:]))
    look_up = f"""
        prmt.b32 plus, {positive}, magnitude;
        prmt.b32 minus, {negative}, magnitude;
        prmt.b32 mask, 0x8000, 0, sign;
        lop3.b32 {{found}}, minus, plus, mask, 0xE4;"""
    return f"""{{
        .reg .b32 magnitude, sign, shifted, plus, minus, mask, first, second;
        and.b32 magnitude, $2, 0x77777777;
        and.b32 sign, $2, 0x88888888;
        shr.b32 shifted, sign, 3;
        or.b32 sign, sign, shifted;{look_up.format(found="first")}
        shr.b32 magnitude, magnitude, 16;
        shr.b32 sign, sign, 16;{look_up.format(found="second")}
        prmt.b32 $0, first, second, 0x6420;
        prmt.b32 $1, first, second, 0x7531;
    }}"""


@triton.jit
def anchor_fractions(anchors, table, LOOK_UP: tl.constexpr, INTERPRETED: tl.constexpr):
    """Signed fractions of the low and of the high nibbles, as integers: int8 like `anchors`."""
    if INTERPRETED:
        low = tl.load(table + (anchors & 15).to(tl.int32))
        return low, tl.load(table + (anchors >> 4).to(tl.int32))
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP, "=r,=r,r", [anchors], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )


@triton.jit
def signed_levels(anchors, residuals, INTERPRETED: tl.constexpr):
    """Level + 1 of the low and of the high nibbles, negative where they are: int8 like `anchors`.

    On a GPU four bytes at a time: no byte of a sum or a difference leaves [0, 255].
    """
    if INTERPRETED:
        low = _signed_level((anchors & 15).to(tl.int32), (residuals & 15).to(tl.int32))
        return low, _signed_level((anchors >> 4).to(tl.int32), (residuals >> 4).to(tl.int32))
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 ones, flip, anchor, residual, mask, low, high;
            and.b32 ones, $2, 0x88888888;
            shr.b32 mask, ones, 3;
            sub.u32 flip, ones, mask;
            and.b32 anchor, $2, 0x77777777;
            xor.b32 anchor, anchor, flip;
            xor.b32 residual, $3, 0x88888888;
            and.b32 ones, mask, 0x01010101;
            and.b32 low, anchor, 0x07070707;
            shl.b32 low, low, 4;
            add.u32 low, low, 0x09090909;
            and.b32 flip, residual, 0x0F0F0F0F;
            sub.u32 low, low, flip;
            mul.lo.u32 flip, ones, 255;
            xor.b32 low, low, flip;
            shr.b32 mask, mask, 4;
            and.b32 mask, mask, 0x01010101;
            and.b32 high, anchor, 0x70707070;
            add.u32 high, high, 0x09090909;
            shr.b32 residual, residual, 4;
            and.b32 residual, residual, 0x0F0F0F0F;
            sub.u32 high, high, residual;
            mul.lo.u32 flip, mask, 255;
            xor.b32 high, high, flip;
            add.u32 $0, low, ones;
            add.u32 $1, high, mask; }""",
            "=r,=r,r,r",
            [anchors, residuals],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _signed_level(anchor, residual):
    """Level + 1 of nibbles, int32, negative where the anchor is: int8."""
    anchor, residual = (anchor ^ 8) - 8, (residual ^ 8) - 8
    level = 16 * magnitude_of(anchor) - residual + 1
    return tl.where(anchor < 0, -level, level).to(tl.int8)


@triton.jit
def magnitude_of(anchor):
    """V of signed anchors."""
    return tl.where(anchor < 0, -anchor - 1, anchor)


@triton.jit
def full_fractions(
    signed, log2_step, inverse_alpha, dtype: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Signed fractions of `signed_levels`, in a float dtype."""
    signed = signed.to(tl.float32)
    exponent = tl.abs(signed) * log2_step - log2_step
    if INTERPRETED:
        power = tl.exp2(exponent)
    else:  # exponents are not negative: without the care for powers that float32 cannot hold
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    fraction = power * inverse_alpha - inverse_alpha
    sign = signed.to(tl.int32, bitcast=True) & -0x80000000
    return (fraction.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def half_parts(query, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, dtype):
    """Float queries below 2 as sums of two numbers of a float dtype, the second in 2048ths.

    Returns:
        (ROWS * COLUMNS, HALF): of a row its two numbers, and zeros.
    """
    first = query.to(dtype)
    second = ((query - first.to(tl.float32)) * 2048.0).to(dtype)
    column = tl.arange(0, COLUMNS)[None, :, None]
    part = tl.where(column == 0, first[:, None, :], second[:, None, :])
    part = tl.where(column < 2, part, 0.0).to(dtype)
    return tl.reshape(part, (ROWS * COLUMNS, HALF))

"""Packed codes of 4 bits and less, Triton: functions for kernels.

On a GPU a shift and a mask unpack four bytes at once. A kernel that took each byte by itself would
be bound by arithmetic long before it is bound by memory. The interpreter knows no machine
instructions, and does take each byte by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack_nibbles(low, high):
    """Pack codes in [-8, 15], int32, of low and high nibbles: uint8 of the same shape."""
    return ((low & 15) | ((high & 15) << 4)).to(tl.uint8)


@triton.jit
def unpack_codes(packed, INDEX: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack code INDEX, from the lowest bits up, of bytes of unsigned codes of BITS bits each.

    Returns:
        int8 of the shape of `packed`.
    """
    return shift_and_mask(packed, INDEX * BITS, (1 << BITS) - 1, INTERPRETED)


@triton.jit
def shift_and_mask(packed, SHIFT: tl.constexpr, MASK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Shift bytes to the right, and keep the bits of a mask: int8 of the shape of `packed`."""
    if INTERPRETED:
        return ((packed >> SHIFT) & MASK).to(tl.int8)
    else:
        # A register holds four bytes: it is shifted as a whole, and each byte keeps its own bits.
        MASKS: tl.constexpr = MASK * 0x01010101
        return tl.inline_asm_elementwise(
            f"shr.b32 $0, $1, {SHIFT}; and.b32 $0, $0, {MASKS};",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def signed(nibbles):
    """Read nibbles, integers in [0, 15], as two's complement: float32 in [-8, 7]."""
    return ((nibbles ^ 8) - 8).to(tl.float32)


@triton.jit
def parts_of_words(numbers, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Of (ROWS, D), the channels of each code of a word: (ROWS, words) each.

    A word is two successive bytes of codes of 4 or 2 bits. Part i has the channels whose codes are
    i // 2 in the bytes that are i % 2 in a word.
    """
    SIZE: tl.constexpr = numbers.shape[1] // 2
    low, high = tl.split(tl.permute(tl.reshape(numbers, (ROWS, 2, SIZE)), (0, 2, 1)))
    if BITS == 2:
        return parts_of_words(low, ROWS, 4) + parts_of_words(high, ROWS, 4)
    else:
        low, high = tl.reshape(low, (ROWS, SIZE // 2, 2)), tl.reshape(high, (ROWS, SIZE // 2, 2))
        return tl.split(low) + tl.split(high)


@triton.jit
def join_parts(parts, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Make one (ROWS, 4 WORDS) of the four `parts_of_words`; see `channels_of_joined`."""
    pairs = [tl.reshape(parts[i], (ROWS, WORDS // 2, 2)) for i in (0, 1, 2, 3)]
    joined = tl.join(tl.join(pairs[0], pairs[1]), tl.join(pairs[2], pairs[3]))
    return tl.reshape(tl.permute(joined, (0, 1, 4, 3, 2)), (ROWS, 4 * WORDS))


@triton.jit
def channels_of_joined(WORDS: tl.constexpr):
    """The channels of the columns of `join_parts`: two words have eight, of their parts in turn.

    So a part of two words, which is unpacked as one register, stays one.
    """
    column = tl.arange(0, 4 * WORDS)
    word, part = column // 8 * 2 + column % 2, column // 2 % 4
    return part // 2 * 2 * WORDS + word * 2 + part % 2


@triton.jit
def split_parts(joined, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Take `join_parts` back."""
    pairs = tl.permute(tl.reshape(joined, (ROWS, WORDS // 2, 2, 2, 2)), (0, 1, 4, 3, 2))
    low, high = tl.split(pairs)
    parts = tl.split(low) + tl.split(high)
    return [tl.reshape(parts[i], (ROWS, WORDS)) for i in (0, 1, 2, 3)]


@triton.jit
def code_as_half(words, PART: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack a part, see `parts_of_words`, of the codes of words of 16 bits: 64 + code, float16.

    The bits of 64 + n in float16 are those of 64, with n in the upper half of the lower byte. So
    two codes, of at most 4 bits, take two instructions.
    """
    FROM: tl.constexpr = PART % 2 * 8 + PART // 2 * BITS
    SHIFT: tl.constexpr = FROM - 4
    MASK: tl.constexpr = (1 << BITS) - 1
    if INTERPRETED:
        return 64.0 + ((words >> FROM) & MASK).to(tl.float16)
    else:
        HOW: tl.constexpr = f"shl.b32 t, $1, {-SHIFT};" if SHIFT < 0 else f"shr.b32 t, $1, {SHIFT};"
        MASKS: tl.constexpr = MASK * 0x00100010
        # 0xEA is (first and second) or third.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; " + HOW + f" lop3.b32 $0, t, {MASKS}, 0x54005400, 0xEA;" + " }",
            "=r,r",
            [words],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def both_nibbles_as_half(upper, lower, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """Compute 1032 + 16 upper + lower of a part of the nibbles of words of 16 bits, float16.

    Lower nibbles are signed. The bits of 1024 + n in float16 end in the byte n, which is both
    nibbles, with the top bit of the lower one flipped.
    """
    SHIFT: tl.constexpr = PART % 2 * 8 + PART // 2 * 4
    if INTERPRETED:
        byte = (((upper >> SHIFT) & 15) << 4) | (((lower >> SHIFT) & 15) ^ 8)
        return 1024.0 + byte.to(tl.float16)
    else:
        MOVE: tl.constexpr = "shl.b32 t, $1, 4;" if SHIFT == 0 else f"shr.b32 t, $1, {SHIFT - 4};"
        # 0xE4 takes bits of the first operand where the third has ones, else of the second; 0x6A
        # is (first and second) exclusive or third.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, l; "
            + MOVE
            + f" shr.b32 l, $2, {SHIFT};"
            + " lop3.b32 t, t, l, 0x00F000F0, 0xE4;"
            + " lop3.b32 $0, t, 0x00FF00FF, 0x64086408, 0x6A; }",
            "=&r,r,r",
            [upper, lower],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def decode_as_half(codes, step, zero, OFFSET: tl.constexpr, INTERPRETED: tl.constexpr):
    """Compute zero + step (codes - OFFSET), float16 of the shape of the codes.

    Args:
        codes: float16, of a part of words.
        step, zero: float16 of a shape that is repeated to that of the codes.
        OFFSET: 64 or 1032, which is subtracted exactly.
    """
    if INTERPRETED:
        return (codes - OFFSET) * step + zero
    else:
        # Two numbers stay in the register in which they were unpacked.
        LESS: tl.constexpr = 0xE408E408 if OFFSET == 1032.0 else 0xD400D400
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; mov.b32 t, {LESS}; add.rn.f16x2 t, $1, t;"
            " fma.rn.f16x2 $0, t, $2, $3; }",
            "=r,r,r,r",
            [codes, step, zero],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )

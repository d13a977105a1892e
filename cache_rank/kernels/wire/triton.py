"""How tokens are written into a message and read from it, Triton: functions for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.wire.reference import LARGEST, SHARED

_SHARED = tl.constexpr(SHARED)
_LARGEST = tl.constexpr(LARGEST)
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 · 2^23: added to a small float32 and subtracted again, it leaves an integer, half to even."""


@triton.jit
def store_tokens(out, target, content, used, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr = 0):
    """Write consecutive channels of tokens to a message; see `to_wire` of the reference.

    Args:
        out: the message's keys or values.
        target: (BLOCK,) which entry of the message each token is.
        content: (BLOCK, n), the tokens; n is a multiple of 8 where the message is of int8.
        used: (BLOCK,) which of them are written.
        HEAD_DIM: D.
        FIRST: the first of the channels, a multiple of n.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    COUNT: tl.constexpr = content.shape[1]
    used, channel = used[:, None], FIRST + tl.arange(0, COUNT)[None, :]
    if DTYPE == tl.int8:
        BLOCKS: tl.constexpr = COUNT // _SHARED
        row = out + target[:, None] * (HEAD_DIM + HEAD_DIM // _SHARED)
        blocks = tl.reshape(content.to(tl.float32), (content.shape[0], BLOCKS, _SHARED))
        magnitude = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        exponent = tl.maximum(tl.max(magnitude, axis=2) >> 23, 7)  # [BLOCK, n / 8]
        # 2^(133 - exponent), see the reference; a float32 holds its own power and 127.
        factor = ((260 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = blocks * factor[:, :, None]
        scaled = tl.where(exponent[:, :, None] == 255, 0.0, scaled)
        codes = tl.clamp((scaled + _TO_INTEGER) - _TO_INTEGER, -_LARGEST, _LARGEST).to(tl.int8)
        tl.store(row + channel, tl.reshape(codes, content.shape), mask=used)
        block = HEAD_DIM + FIRST // _SHARED + tl.arange(0, BLOCKS)[None, :]
        tl.store(row + block, exponent.to(tl.int8), mask=used)
    else:
        tl.store(out + target[:, None] * HEAD_DIM + channel, content.to(DTYPE), mask=used)


@triton.jit
def load_tokens(tokens, entry, used, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Read tokens of a message, (BLOCK, D) in DTYPE; see `from_wire` of the reference.

    Args:
        tokens: the message's keys or values.
        entry: (BLOCK,) which entries of the message.
        used: (BLOCK,) which of them are read.
        HEAD_DIM: D.
        DTYPE: a float dtype.
    """
    channel, used = tl.arange(0, HEAD_DIM)[None, :], used[:, None]
    if tokens.dtype.element_ty == tl.int8:
        row = tokens + entry[:, None] * (HEAD_DIM + HEAD_DIM // _SHARED)
        codes = tl.load(row + channel, mask=used, other=0)
        exponent = tl.load(row + HEAD_DIM + channel // _SHARED, mask=used, other=7).to(tl.int32)
        exponent = exponent & 255
        scale = ((exponent - 6) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(exponent == 255, float("nan"), scale)
        return (codes.to(tl.float32) * scale).to(DTYPE)
    else:
        return tl.load(tokens + entry[:, None] * HEAD_DIM + channel, mask=used).to(DTYPE)

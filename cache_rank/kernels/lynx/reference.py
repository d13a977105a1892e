"""Hierarchical logarithmic quantization (Lynx section 4.1, Algorithm 1): the specification.

A page of 256 tokens is normalized per channel along the tokens, and then in chunks of 32 tokens.
The magnitude |f| in [0, 1] of a centred element becomes a level on a logarithmic scale (Eq. 3). It
is split into two signed nibbles: the anchor, which can be read alone, and the residual.

    level I  = round( ln(1 + α|f|) / ln(1 + α) · 120 )        0..120
    V        = (I + 7) >> 4                                   0..7
    anchor   = V, or -V - 1 of a negative element             -8..7, keeps the sign of a zero
    residual = 16 V - I                                       -8..7

This differs from the paper in two places. The paper scales to 127, where V reaches 8 and does not
fit a nibble with its sign. And it takes the sign of what the normalization made non-negative, where
the sign of the centred element is meant.

All of it is comparisons, table look-ups, and single float32 additions, subtractions,
multiplications and divisions in a fixed order. So codes are the same bits on every device, and
however many pages are encoded at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.coded.reference import Plane, quotient
from cache_rank.kernels.nibbles.reference import pack, unpack_signed

PAGE = 256
"""This many tokens are normalized together."""

CHUNK = 32
"""This many consecutive tokens of a page have a mean and a spread of their own."""

LEVELS = 120
"""A magnitude has this many levels beside 0."""

DEFAULT_ALPHA = 1.0
"""The α of the logarithmic scale, unless an option says another: the paper gives none.

With 1, anchors rank the keys of a language model better than with 2 or 3, and residuals leave no
more error."""


class LynxCodes(NamedTuple):
    """Codes of tokens, and the numbers that they are relative to.

    The last four have an entry for each stretch of tokens that shares it. Codes are aligned when
    every token has an entry of its own, or all tokens share one; see `align`.

    Attributes:
        anchor: (..., P, D / 2) uint8 packed signed nibbles.
        residual: (..., P, D / 2) uint8 packed signed nibbles.
        minimum: (..., 1, D) float32, γ_min.
        span: (..., 1, D) float32, γ_scale.
        mean: (..., P / CHUNK, D) float16, μ in units of the span, above the minimum.
        spread: (..., P / CHUNK, D) float16, σ in units of the span.
    """

    anchor: Tensor
    residual: Tensor
    minimum: Tensor
    span: Tensor
    mean: Tensor
    spread: Tensor


def encode_page(tokens: Tensor, alpha: float = DEFAULT_ALPHA) -> LynxCodes:
    """Quantize complete pages, each once and for all.

    Args:
        tokens: (..., P, D) keys or values, any float dtype; P is PAGE, or another number of chunks.
        alpha: α > 0 of the logarithmic scale; a larger one is finer near the mean.

    Returns:
        Codes. Tokens that are not finite, or span more than float32, leave a span that is not.
    """
    page = tokens.float()
    minimum = page.amin(dim=-2, keepdim=True)
    span = page.amax(dim=-2, keepdim=True) - minimum
    chunks = quotient(page - minimum, span).unflatten(-2, (-1, CHUNK))  # (..., P / C, C, D)
    # Mean and spread are rounded to what is stored before anything is taken relative to them.
    mean = (_sum_of_chunk(chunks) / CHUNK).to(torch.float16)
    centred = chunks - mean.float()
    spread = centred.abs().amax(dim=-2, keepdim=True).to(torch.float16)
    negative = (centred < 0).flatten(-3, -2)
    fraction = quotient(centred.abs(), spread.float()).flatten(-3, -2).contiguous()
    level = torch.bucketize(fraction, boundaries_of_levels(alpha, fraction.device)).to(torch.int16)
    magnitude = (level + 7) >> 4
    anchor = torch.where(negative, -magnitude - 1, magnitude)
    residual = 16 * magnitude - level
    return LynxCodes(
        pack(anchor, 4),
        pack(residual, 4),
        minimum,
        span,
        mean.squeeze(-2),
        spread.squeeze(-2),
    )


def align(codes: LynxCodes) -> LynxCodes:
    """Repeat the entries of stretches of tokens, so that every token has its own or all share."""
    tokens = codes.anchor.shape[-2]

    def repeat(entries: Tensor) -> Tensor:
        return entries.repeat_interleave(tokens // entries.shape[-2], dim=-2)

    return codes._replace(mean=repeat(codes.mean), spread=repeat(codes.spread))


def decode_tokens(codes: LynxCodes, alpha: float = DEFAULT_ALPHA, full: bool = True) -> Tensor:
    """Decode aligned codes: |f| = ((1 + α)^(I / 120) - 1) / α, then undo the normalizations.

    Args:
        codes: those of n tokens; see `align`.
        alpha: the α that they were encoded with.
        full: whether to read anchor and residual, or the anchor alone, as if the residual were 0.

    Returns:
        (..., n, D) float32.
    """
    anchor = unpack_signed(codes.anchor)
    negative = anchor < 0
    level = 16 * torch.where(negative, -anchor - 1, anchor)
    if full:
        level = level - unpack_signed(codes.residual)
    fraction = fractions_of_levels(alpha, level.device)[level.to(torch.int64)]
    fraction = torch.where(negative, -fraction, fraction)
    return codes.minimum + codes.span * (codes.mean.float() + codes.spread.float() * fraction)


class LynxCodec(NamedTuple):
    """The codec of keys and of values; see coded/reference.py.

    Attributes:
        alpha: α > 0 of the logarithmic scale.
        reads_residuals: whether scores and attention read residuals too.
    """

    alpha: float = DEFAULT_ALPHA
    reads_residuals: bool = True

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """The tensors of `LynxCodes`."""
        codes = Plane(PAGE, head_dim // 2, torch.uint8)
        of_page = Plane(1, head_dim, torch.float32)
        of_chunk = Plane(PAGE // CHUNK, head_dim, torch.float16)
        return codes, codes, of_page, of_page, of_chunk, of_chunk

    def encode(self, tokens: Tensor) -> LynxCodes:
        """Encode complete pages."""
        return encode_page(tokens, self.alpha)

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        """Decode tokens from anchors and residuals."""
        return decode_tokens(LynxCodes(*entries), self.alpha)

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float) -> Tensor:
        """Compute the logits of pages of keys."""
        return (queries @ self._read(planes).transpose(-1, -2)) * scale

    def weigh(self, weights: Tensor, planes: Sequence[Tensor]) -> Tensor:
        """Add up the values of pages by their weights."""
        return weights @ self._read(planes)

    def _read(self, planes: Sequence[Tensor]) -> Tensor:
        return decode_tokens(align(LynxCodes(*planes)), self.alpha, self.reads_residuals)


def fraction_of(level: float, alpha: float) -> float:
    """The |f| of a level, which may be between two whole ones."""
    return float(((1 + alpha) ** (level / LEVELS) - 1) / alpha)


@functools.lru_cache(maxsize=16)
def fractions_of_levels(alpha: float, device: torch.device) -> Tensor:
    """The |f| of every level: (LEVELS + 1,) float32."""
    return torch.tensor([fraction_of(level, alpha) for level in range(LEVELS + 1)], device=device)


@functools.lru_cache(maxsize=16)
def boundaries_of_levels(alpha: float, device: torch.device) -> Tensor:
    """The |f| above which each level is rounded up to the next: (LEVELS,) float32."""
    return torch.tensor([fraction_of(level + 0.5, alpha) for level in range(LEVELS)], device=device)


def _sum_of_chunk(chunks: Tensor) -> Tensor:
    """Sum over dim -2 by halves, since torch's own order depends on shapes and strides."""
    while chunks.shape[-2] > 1:
        half = chunks.shape[-2] // 2
        chunks = chunks[..., :half, :] + chunks[..., half:, :]
    return chunks

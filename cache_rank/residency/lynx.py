"""`lynx`: 4-bit anchors and 4-bit residuals on a logarithmic scale (Lynx section 4.1).

A page is encoded when it is complete; what is shipped is decoded from anchors and residuals. Scores
read both, or with the option `reading=anchor` half the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from cache_rank_kernels.lynx.reference import (
    CHUNK,
    DEFAULT_ALPHA,
    PAGE,
    LynxCodes,
    decode_tokens,
    encode_page,
    score_page,
)
from torch import Tensor

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.residency.coded import Codec, CodedResidency, Plane
from cache_rank.residency.options import Between, OneOf, Ranges, require_options

OPTIONS: Ranges = {
    "alpha": Between(0.01, 1000),
    "reading": OneOf(("anchor", "full")),
}


class LynxCodec:
    """Of keys and of values alike."""

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        self._alpha = float(options.get("alpha", DEFAULT_ALPHA))
        self._scores_in_full = options.get("reading", "full") == "full"

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        codes = Plane(PAGE, head_dim // 2, torch.uint8)
        of_page = Plane(1, head_dim, torch.float32)
        of_chunk = Plane(PAGE // CHUNK, head_dim, torch.float16)
        return codes, codes, of_page, of_page, of_chunk, of_chunk  # as in LynxCodes

    def encode(self, tokens: Tensor) -> LynxCodes:
        return encode_page(tokens, self._alpha)

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        return decode_tokens(LynxCodes(*entries), self._alpha)

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float, exact: bool) -> Tensor:
        full = exact or self._scores_in_full
        return score_page(queries, LynxCodes(*planes), scale, self._alpha, full)


class LynxResidency(CodedResidency):
    """Pages of PAGE tokens; the newest, incomplete page is in full precision."""

    group_tokens: ClassVar[int] = PAGE
    full_groups: ClassVar[int] = 0

    @staticmethod
    def validate(options: Mapping[str, OptionValue]) -> None:
        require_options("lynx", options, OPTIONS)

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        codec = LynxCodec(config.kv_residency_options)
        return codec, codec

"""`quantspec`: 4-bit codes and their 4-bit errors, in groups of 128 (QuantSpec sections 4.2-4.3).

The newest 128 to 255 tokens are in full precision: the double buffer of section 4.3.2. What is
shipped is decoded from both nibbles. Scores read both, or with `reading=4` half the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from cache_rank_kernels.quantspec.reference import (
    GROUP,
    QuantSpecCodes,
    decode,
    encode_keys,
    encode_values,
    score_keys,
)
from torch import Tensor

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.residency.coded import Codec, CodedResidency, Plane
from cache_rank.residency.options import OneOf, Ranges, require_options

OPTIONS: Ranges = {"reading": OneOf((4, 8))}


class QuantSpecCodec:
    """Of keys, per channel, or of values, per token."""

    def __init__(self, options: Mapping[str, OptionValue], per_channel: bool) -> None:
        self._score_bits = int(options.get("reading", 8))
        self._per_channel = per_channel

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        codes = Plane(GROUP, head_dim // 2, torch.uint8)
        shared = (1, head_dim) if self._per_channel else (GROUP, 1)
        relative_to = Plane(*shared, torch.float32)
        return codes, codes, relative_to, relative_to  # as in QuantSpecCodes

    def encode(self, tokens: Tensor) -> QuantSpecCodes:
        return encode_keys(tokens) if self._per_channel else encode_values(tokens)

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        return decode(QuantSpecCodes(*entries))

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float, exact: bool) -> Tensor:
        bits = 8 if exact else self._score_bits
        return score_keys(queries, QuantSpecCodes(*planes), scale, bits)


class QuantSpecResidency(CodedResidency):
    """Groups of GROUP tokens; the newest complete group stays in full precision."""

    group_tokens: ClassVar[int] = GROUP
    full_groups: ClassVar[int] = 1

    @staticmethod
    def validate(options: Mapping[str, OptionValue]) -> None:
        require_options("quantspec", options, OPTIONS)

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        options = config.kv_residency_options
        return QuantSpecCodec(options, per_channel=True), QuantSpecCodec(options, per_channel=False)

"""`hack`: codes of 2 or 4 bits that scores are computed on (HACK sections 5.2-5.3).

The newest, incomplete group of GROUP tokens is in full precision: that of values has to be, and its
keys wait with it. Scores of the rest take the query in 8 bits, and no key is decoded for them. What
is shipped is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from cache_rank_kernels.hack.reference import (
    GROUP,
    HackCodes,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    score_keys,
    sums_dtype,
)
from torch import Tensor

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.residency.coded import Codec, CodedResidency, Plane
from cache_rank.residency.options import Between, OneOf, Ranges, require_options

OPTIONS: Ranges = {
    "bits": OneOf((2, 4)),
    "partition": OneOf((16, 32, 64)),
    "rounding": OneOf(("nearest", "stochastic")),
    "seed": Between(0, 65535),
}


class HackCodec:
    """Of keys, in partitions of channels, or of values, in partitions of tokens."""

    def __init__(self, config: CacheRankConfig, of_keys: bool) -> None:
        options = config.kv_residency_options
        self._bits = int(options.get("bits", 2))
        self._partition = int(options.get("partition", 64))
        self._seed = None
        if options.get("rounding") == "stochastic":
            self._seed = int(options.get("seed", 0))
        self._dtype = config.model.torch_dtype
        self._of_keys = of_keys

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        if self._of_keys:
            entries, width = GROUP, -(-head_dim // self._partition)
        else:
            entries, width = GROUP // self._partition, head_dim
        codes = Plane(GROUP, head_dim * self._bits // 8, torch.uint8)
        relative_to = Plane(entries, width, self._dtype)
        sums = Plane(entries, width, sums_dtype(self._bits, self._partition))
        return codes, relative_to, relative_to, sums  # as in HackCodes

    def encode(self, tokens: Tensor) -> HackCodes:
        encode = encode_keys if self._of_keys else encode_values
        return encode(tokens, self._bits, self._partition, self._seed)

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        if self._of_keys:
            return decode_keys(HackCodes(*entries), self._bits, self._partition)
        return decode_values(HackCodes(*entries), self._bits, partition=1)

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float, exact: bool) -> Tensor:
        codes = HackCodes(*planes)
        if exact:  # the query as it is
            keys = decode_keys(codes, self._bits, self._partition)
            return (queries @ keys.transpose(-1, -2)) * scale
        return score_keys(queries, codes, scale, self._bits, self._partition)


class HackResidency(CodedResidency):
    """Groups of GROUP tokens; the newest, incomplete group is in full precision."""

    group_tokens: ClassVar[int] = GROUP
    full_groups: ClassVar[int] = 0

    @staticmethod
    def validate(options: Mapping[str, OptionValue]) -> None:
        require_options("hack", options, OPTIONS)
        seed = options.get("seed", 0)
        if isinstance(seed, float) and not seed.is_integer():
            raise ValueError(f"kv_residency_options seed={seed}: hack takes a whole number")

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        return HackCodec(config, of_keys=True), HackCodec(config, of_keys=False)

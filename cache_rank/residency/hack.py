"""`hack`: codes of 2 or 4 bits that scores are computed on (HACK sections 5.2-5.3).

The newest, incomplete group of GROUP tokens is in full precision: that of values has to be, and its
keys wait with it. Scores of the rest take the query in 8 bits, and no key is decoded for them. What
is shipped is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from cache_rank_kernels.coded.reference import Codec
from cache_rank_kernels.hack.reference import GROUP, HackCodec

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.residency.coded import CodedResidency
from cache_rank.residency.options import Between, OneOf, Ranges


class HackResidency(CodedResidency):
    """Groups of GROUP tokens; the newest, incomplete group is in full precision."""

    name: ClassVar[str] = "hack"
    options: ClassVar[Ranges] = {
        "bits": OneOf((2, 4)),
        "partition": OneOf((16, 32, 64)),
        "rounding": OneOf(("nearest", "stochastic")),
        "seed": Between(0, 65535),
    }
    group_tokens: ClassVar[int] = GROUP

    @classmethod
    def validate(cls, options: Mapping[str, OptionValue]) -> None:
        super().validate(options)
        seed = options.get("seed", 0)
        if isinstance(seed, float) and not seed.is_integer():
            raise ValueError(f"kv_residency_options seed={seed}: hack takes a whole number")

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        options, dtype = config.kv_residency_options, config.model.torch_dtype
        bits, partition = int(options.get("bits", 2)), int(options.get("partition", 64))
        seed = int(options.get("seed", 0)) if options.get("rounding") == "stochastic" else None
        return (
            HackCodec(True, dtype, bits, partition, seed),
            HackCodec(False, dtype, bits, partition, seed),
        )

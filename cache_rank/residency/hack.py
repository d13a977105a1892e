"""`hack`: codes of 4 or 2 bits that scores are computed on (HACK sections 5.2-5.3).

The newest, incomplete group of GROUP tokens is in full precision: that of values has to be, and its
keys wait with it. Scores of the rest take the query in 8 bits, and no key is decoded for them. What
is shipped is decoded.
"""

from __future__ import annotations

from typing import ClassVar

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.coded.reference import Codec
from cache_rank.kernels.hack.reference import GROUP, HackCodec
from cache_rank.residency.coded import CodedResidency
from cache_rank.residency.options import Between, OneOf, Ranges


class HackResidency(CodedResidency):
    """Groups of GROUP tokens; the newest, incomplete group is in full precision."""

    name: ClassVar[str] = "hack"
    options: ClassVar[Ranges] = {
        "bits": OneOf((4, 2)),
        "partition": OneOf((64, 32, 16)),
        "rounding": OneOf(("nearest", "stochastic")),
        "seed": Between(0, 65535, default=0, whole=True),
    }
    group_tokens: ClassVar[int] = GROUP

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        options, dtype = cls.settings(config.kv_residency_options), config.model.torch_dtype
        bits, partition = int(options["bits"]), int(options["partition"])
        seed = int(options["seed"]) if options["rounding"] == "stochastic" else None
        return (
            HackCodec(True, dtype, bits, partition, seed),
            HackCodec(False, dtype, bits, partition, seed),
        )

"""`quantspec`: 4-bit codes and their 4-bit errors, in groups of 128 (QuantSpec sections 4.2-4.3).

The newest 128 to 255 tokens are in full precision: the double buffer of section 4.3.2. What is
shipped is decoded from both nibbles, and attention reads both. Scores read the codes alone, or with
`reading=8` both.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.coded.reference import Codec
from cache_rank.kernels.quantspec.reference import GROUP, QuantSpecCodec, QuantSpecCodes
from cache_rank.residency.coded import CodedResidency
from cache_rank.residency.options import OneOf, Ranges


class QuantSpecResidency(CodedResidency):
    """Groups of GROUP tokens; the newest complete group stays in full precision."""

    name: ClassVar[str] = "quantspec"
    options: ClassVar[Ranges] = {"reading": OneOf((4, 8))}
    group_tokens: ClassVar[int] = GROUP
    full_groups: ClassVar[int] = 1
    verifies: ClassVar[bool] = True

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        dtype = config.model.torch_dtype
        bits = int(cls.settings(config.kv_residency_options)["reading"])
        return (
            QuantSpecCodec(per_channel=True, dtype=dtype, read_bits=bits),
            QuantSpecCodec(per_channel=False, dtype=dtype),
        )

    @classmethod
    def refining_planes(cls) -> tuple[int, ...]:
        lower, planes = QuantSpecCodes._fields.index("lower"), len(QuantSpecCodes._fields)
        return lower, planes + lower

    def attend(
        self, rows: BatchMetadata, layer: int, queries: Tensor, out: Tensor, log_sums: Tensor
    ) -> None:
        """See `Residency.attend`. Both nibbles are read, whatever scores read."""
        keys, values = self._tokens.codecs
        assert isinstance(keys, QuantSpecCodec)
        in_full = keys._replace(read_bits=8), values
        self._attend_by(in_full, rows, layer, queries, out, log_sums)

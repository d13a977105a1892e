"""`quantspec`: 4-bit codes and their 4-bit errors, in groups of 128 (QuantSpec sections 4.2-4.3).

The newest 128 to 255 tokens are in full precision: the double buffer of section 4.3.2. What is
shipped is decoded from both nibbles, and attention reads both. Scores read the codes alone, or with
`reading=8` both.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.attention import attend_to, merge
from cache_rank.kernels.coded import attend_codes
from cache_rank.kernels.coded.reference import Codec
from cache_rank.kernels.quantspec.reference import GROUP, QuantSpecCodec
from cache_rank.residency.coded import CodedResidency
from cache_rank.residency.options import OneOf, Ranges


class QuantSpecResidency(CodedResidency):
    """Groups of GROUP tokens; the newest complete group stays in full precision."""

    name: ClassVar[str] = "quantspec"
    options: ClassVar[Ranges] = {"reading": OneOf((4, 8))}
    group_tokens: ClassVar[int] = GROUP
    full_groups: ClassVar[int] = 1
    attends: ClassVar[bool] = True

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        dtype = config.model.torch_dtype
        bits = int(cls.settings(config.kv_residency_options)["reading"])
        return (
            QuantSpecCodec(per_channel=True, dtype=dtype, read_bits=bits),
            QuantSpecCodec(per_channel=False, dtype=dtype),
        )

    def attend(self, rows: BatchMetadata, layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `Residency.attend`. Codes are attended to where they lie."""
        keys, values = self._tokens.codecs
        assert isinstance(keys, QuantSpecCodec)
        in_full = self._tokens._replace(codecs=(keys._replace(read_bits=8), values))
        of_codes = attend_codes(in_full, queries, rows.paged, layer, self._model.scale)
        return merge(of_codes, self._attend_to_newest(rows, layer, queries))

    def _attend_to_newest(
        self, rows: BatchMetadata, layer: int, queries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend to the tokens that are no codes; a ring has older ones beside them."""
        rings = self._tokens.rings
        held = torch.where(rows.slots < 0, 0, rows.positions + 1)
        coded = (held // GROUP * GROUP - self._tokens.full_tokens).clamp(min=0)
        entries = torch.arange(self.ring_tokens(), device=held.device)
        behind = (entries - coded[:, None]) % self.ring_tokens()  # the first one that is no code
        is_seen = (behind < (held - coded)[:, None]).unsqueeze(1)
        slots = rows.slots.clamp(min=0).long()
        keys, values = (ring[slots, layer] for ring in rings)
        return attend_to(queries, keys, values, is_seen, self._model.scale)

"""`lynx`: 4-bit anchors and 4-bit residuals on a logarithmic scale (Lynx section 4.1).

A page is encoded when it is complete; what is shipped is decoded from anchors and residuals, and
attention reads both. So do scores, or with the option `reading=anchor` half the bytes.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.coded.reference import Codec
from cache_rank.kernels.lynx.reference import DEFAULT_ALPHA, PAGE, LynxCodec, LynxCodes
from cache_rank.residency.coded import CodedResidency
from cache_rank.residency.options import Between, OneOf, Ranges


class LynxResidency(CodedResidency):
    """Pages of PAGE tokens; the newest, incomplete page is in full precision."""

    name: ClassVar[str] = "lynx"
    options: ClassVar[Ranges] = {
        "alpha": Between(0.01, 1000, default=DEFAULT_ALPHA),
        "reading": OneOf(("full", "anchor")),
    }
    group_tokens: ClassVar[int] = PAGE
    verifies: ClassVar[bool] = True

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        options = cls.settings(config.kv_residency_options)
        codec = LynxCodec(float(options["alpha"]), reads_residuals=options["reading"] == "full")
        return codec, codec

    @classmethod
    def refining_planes(cls) -> tuple[int, ...]:
        residual, planes = LynxCodes._fields.index("residual"), len(LynxCodes._fields)
        return residual, planes + residual

    def attend(
        self, rows: BatchMetadata, layer: int, queries: Tensor, out: Tensor, log_sums: Tensor
    ) -> None:
        """See `Residency.attend`. Anchors and residuals are read, whatever scores read."""
        codec, _ = self._tokens.codecs
        assert isinstance(codec, LynxCodec)
        in_full = codec._replace(reads_residuals=True)
        self._attend_by((in_full, in_full), rows, layer, queries, out, log_sums)

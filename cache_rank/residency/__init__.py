"""How the cache rank holds K and V: one file a format, one interface.

A format is added by writing `cache_rank/residency/<name>.py` with a class of the interface below
and naming it in FORMATS; `--kv-residency` and the format tests pick it up from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.residency.bf16 import Bf16Residency
from cache_rank.residency.hack import HackResidency
from cache_rank.residency.lynx import LynxResidency
from cache_rank.residency.mosaickv.residency import MosaicKVResidency
from cache_rank.residency.quantspec import QuantSpecResidency
from cache_rank.step_rows import StepRows


class Residency(Protocol):
    """K and V of all sequences, in pages of PAGE_TOKENS tokens."""

    lossless: ClassVar[bool]
    """Whether tokens are read back as they came."""

    captures_append: ClassVar[bool]
    """Whether every append of as many rows queues the same work, so that graphs can capture it."""

    page_bytes: int
    """Memory of one page, all layers."""

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None: ...

    @staticmethod
    def validate(options: Mapping[str, OptionValue]) -> None:
        """Check options of this format.

        Raises:
            ValueError: unknown or out of range; names those that there are, with their ranges.
        """

    @staticmethod
    def fixed_bytes(config: CacheRankConfig) -> int:
        """Memory beside the pages, however few tokens are held."""

    @staticmethod
    def bytes_per_token(config: CacheRankConfig) -> int:
        """Memory of one token, all layers, metadata included."""

    def load(self, pages: Tensor, slot: int, start: int, shipment: Tensor) -> None:
        """Write a bulk shipment.

        Args:
            pages: (pages,) int32 of the sequence.
            slot: of the sequence, see StepRows.
            start: position of the first token.
            shipment: (2, layers, n, Hkv, D), keys and values.
        """

    def append(self, rows: StepRows, layers: range, up: Tensor, query_ring: Tensor) -> None:
        """Take over one token a row, and its queries.

        Args:
            rows: of the step.
            layers: which layers.
            up: (R, len(layers), Hq + 2 Hkv, D), see UpMessage.
            query_ring: (slots, layers, Hq, W + 1, D), written in place.
        """

    def truncate(self, pages: Tensor, slot: int, tokens: int) -> None:
        """Forget the newest tokens of a sequence: what is left is the same bits as without them.

        Args:
            pages: (pages,) int32 of the sequence, with those of the forgotten tokens.
            slot: of the sequence.
            tokens: that stay; at most ROLLBACK_TOKENS fewer than the sequence ever held.
        """

    def end(self, slot: int) -> None:
        """A sequence has ended; its slot may begin another."""

    def prepare(self, rows: int, layers: int, capacity: int) -> int:
        """Make room for scores of so many rows, layers and tokens.

        Returns:
            A number that changes whenever the memory that scores take has moved.
        """

    def check(self) -> None:
        """Say what was found wrong with tokens meanwhile; on a GPU, some steps later.

        Raises:
            ValueError: some cannot be held.
        """

    def score(self, rows: StepRows, layers: range, queries: Tensor, exact: bool = False) -> Tensor:
        """Score all resident tokens: (R, len(layers), Hkv, >= capacity) float32.

        The result is valid until the next call.

        Args:
            rows: of the step.
            layers: which layers.
            queries: (R, len(layers), Hq, D) float32.
            exact: by the most exact keys there are, for measurements.
        """

    def gather(
        self, rows: StepRows, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Read tokens back into a message.

        Args:
            rows: of the step.
            layers: which layers.
            entering: (R, len(layers), Hkv, C) int32 positions; -1 leaves its entry alone.
            keys, values: (R, len(layers), Hkv, C, D) in the pool's dtype or in float8_e4m3fn,
                rounded from that; written in place.
        """

    def read(
        self, pages: Tensor, slot: int, layers: range, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read tokens of one sequence: keys and values (len(layers), Hkv, n, D).

        Args:
            pages: (pages,) int32 of the sequence.
            slot: of the sequence.
            layers: which layers.
            positions: (len(layers), Hkv, n) int64.
        """


FORMATS: dict[str, type[Residency]] = {
    "bf16": Bf16Residency,
    "lynx": LynxResidency,
    "quantspec": QuantSpecResidency,
    "hack": HackResidency,
    "mosaickv": MosaicKVResidency,
}


def require_format(config: CacheRankConfig) -> None:
    """Check that the configured format exists and can do what is configured beside it.

    Raises:
        ValueError: it does not; the message begins with the field at fault.
    """
    name = config.kv_residency
    if name not in FORMATS:
        raise ValueError(f"kv_residency {name}: unknown; use one of {', '.join(FORMATS)}")
    FORMATS[name].validate(config.kv_residency_options)
    if FORMATS[name].lossless:
        return
    if config.score_keys != "resident":
        raise ValueError(
            f"score_keys {config.score_keys}: {name} scores by its own codes; drop it, and choose "
            "a reading among the options of the format"
        )
    if config.checksum:
        raise ValueError(
            f"kv_residency {name}: checksums compare tokens bit for bit, and tokens that were "
            "shipped before they were encoded differ; use bf16, or no checksums"
        )


def create(config: CacheRankConfig, pages: int, device: torch.device) -> Residency:
    """Memory for `pages` pages in the configured format.

    Raises:
        ValueError: the format does not exist, or cannot do what is configured.
    """
    require_format(config)
    return FORMATS[config.kv_residency](config, pages, device)


def bytes_per_token(config: CacheRankConfig) -> int:
    """Memory of one token in the configured format."""
    return FORMATS[config.kv_residency].bytes_per_token(config)


def fixed_bytes(config: CacheRankConfig) -> int:
    """Memory that the configured format takes beside its pages."""
    return FORMATS[config.kv_residency].fixed_bytes(config)

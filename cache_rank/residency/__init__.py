"""How the cache rank holds K and V: one file or folder a format, one interface.

A format is added by writing `cache_rank/residency/<name>.py` with a subclass of `Residency` and
listing it in FORMATS; `--kv-residency` and the format tests pick it up from there.
"""

from __future__ import annotations

import torch

from cache_rank.config import CacheRankConfig
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.base import Residency
from cache_rank.residency.bf16 import Bf16Residency
from cache_rank.residency.coded import CodedResidency
from cache_rank.residency.hack import HackResidency
from cache_rank.residency.lynx import LynxResidency
from cache_rank.residency.mosaickv import MosaicKVResidency
from cache_rank.residency.quantspec import QuantSpecResidency
from cache_rank.residency.sketched import KeySketches

FORMATS: dict[str, type[Residency]] = {
    residency.name: residency
    for residency in (
        Bf16Residency,
        LynxResidency,
        QuantSpecResidency,
        HackResidency,
        MosaicKVResidency,
    )
}

CPU_MEMORY_FRACTION = 0.5
"""The cache rank takes this share of the free host memory for tokens, unless it is told another.
Memory is touched only as it is used."""

CPU_MEMORY_BYTES = 8 << 30
"""The cache rank takes no more host memory than this for tokens, unless it is told a share."""

GPU_MEMORY_FRACTION = 0.9
"""The cache rank takes this share of a GPU's free memory for tokens, unless it is told another. The
rest is for scores and messages."""


def require_format(config: CacheRankConfig) -> None:
    """Check that the configured format exists and can do what is configured beside it.

    Raises:
        ValueError: it does not; the message begins with the field at fault.
    """
    name = config.kv_residency
    if name not in FORMATS:
        raise ValueError(f"kv_residency {name}: unknown; use one of {', '.join(FORMATS)}")
    FORMATS[name].validate(config.kv_residency_options)
    if config.score_keys == "sketch" and config.model.head_dim % 32:
        raise ValueError(
            f"score_keys sketch: heads have {config.model.head_dim} elements, and a sketch needs a "
            "multiple of 32; score by the keys as they are held"
        )
    if config.score_normalizer != "all" and config.score_keys != "sketch":
        raise ValueError(
            f"score_normalizer {config.score_normalizer}: only sketches are scored so; drop it, or "
            "use score_keys sketch"
        )
    if name == "mosaickv" and config.model.head_dim % 4:
        raise ValueError(
            f"kv_residency mosaickv: heads have {config.model.head_dim} elements, and it keeps "
            "groups of up to 4; use another format"
        )
    if FORMATS[name].lossless:
        return
    if config.checksum:
        raise ValueError(
            f"kv_residency {name}: checksums compare tokens bit for bit, and tokens that were "
            "shipped before they were encoded differ; use bf16, or no checksums"
        )


def create(config: CacheRankConfig, pages: int, device: torch.device) -> Residency:
    """Allocate `pages` pages in the configured format, see `require_format`."""
    return FORMATS[config.kv_residency](config, pages, device)


def shared_tail(config: CacheRankConfig) -> int | None:
    """How many tokens beyond a page's end must be shipped before other sequences may have it.

    None where they may not.
    """
    return FORMATS[config.kv_residency].tail_tokens()


def takes_codes(config: CacheRankConfig) -> bool:
    """Whether complete pages may come as codes; sketches are made of exact keys."""
    holds_codes = issubclass(FORMATS[config.kv_residency], CodedResidency)
    return holds_codes and config.score_keys == "resident"


def same_codes(one: CacheRankConfig, other: CacheRankConfig) -> bool:
    """Whether the same tokens are the same bytes in pages of both, as their options say."""
    name = one.kv_residency
    ours, theirs = (FORMATS[name].settings(each.kv_residency_options) for each in (one, other))
    return other.kv_residency == name and ours == theirs


def bytes_per_token(config: CacheRankConfig) -> int:
    """Memory of one token in the configured format, and of its sketch if there is one."""
    return sum(part.bytes_per_token(config) for part in _parts(config))


def fixed_bytes(config: CacheRankConfig) -> int:
    """Memory that the configured format, and a sketch, take beside their pages."""
    return sum(part.fixed_bytes(config) for part in _parts(config))


def memory_for_tokens(free: int, fraction: float | None, on_gpu: bool) -> int:
    """What a cache rank takes for tokens of so many free bytes; `fraction` None is the default."""
    if fraction is not None:
        return int(free * fraction)
    if on_gpu:
        return int(free * GPU_MEMORY_FRACTION)
    return min(int(free * CPU_MEMORY_FRACTION), CPU_MEMORY_BYTES)


def pages_in(config: CacheRankConfig, memory_bytes: int) -> int:
    """How many pages of tokens fit in so much memory."""
    paged_bytes = max(0, memory_bytes - fixed_bytes(config))
    return paged_bytes // (PAGE_TOKENS * bytes_per_token(config))


def capacity_tokens(config: CacheRankConfig, memory_bytes: int) -> int:
    """How many tokens certainly fit: each sequence may leave its last page almost empty."""
    return max(0, pages_in(config, memory_bytes) - config.max_rows) * PAGE_TOKENS


def _parts(config: CacheRankConfig) -> list[type[Residency] | type[KeySketches]]:
    held = FORMATS[config.kv_residency]
    return [held, KeySketches] if config.score_keys == "sketch" else [held]

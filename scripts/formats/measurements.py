"""What a residency format does to a sequence, measured through its public interface."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm

from cache_rank import residency
from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import DTYPES, CacheRankConfig, ModelShape, OptionValue
from cache_rank.kernels.rows import PagedRows
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import AnswerHeader
from cache_rank.residency import bytes_per_token, require_format
from scripts.formats.quality import Exact, Quality, compare
from scripts.formats.samples import Sample
from scripts.shared import report
from scripts.shared.report import number, provenance, table


class Variant(NamedTuple):
    """A format and its options."""

    format: str  # a name of FORMATS
    options: dict[str, OptionValue]

    @property
    def title(self) -> str:
        """The options in tables."""
        return ",".join(f"{name}={value}" for name, value in self.options.items())


VARIANTS = (
    Variant("bf16", {}),
    Variant("lynx", {"reading": "full"}),
    Variant("lynx", {"reading": "anchor"}),
    Variant("quantspec", {"reading": 8}),
    Variant("quantspec", {"reading": 4}),
    Variant("hack", {"bits": 4, "partition": 64}),
    Variant("hack", {"bits": 2, "partition": 64}),
    Variant("hack", {"bits": 2, "partition": 16}),
    Variant("mosaickv", {}),
    Variant("mosaickv", {"rate": 87.5}),
    Variant("mosaickv", {"dropped": 25}),  # as in the paper
)


class Measurement(msgspec.Struct):
    """One line of the comparison."""

    format: str
    options: str  # as in `kv_residency_options` of `--cache-rank-config`
    bytes: float  # of K and V of a token in one layer and KV head, all that grows with tokens
    bits: float  # of an element of them
    quality: Quality


class Comparison(msgspec.Struct):
    """All formats on one sample; `formats.json`."""

    command: str
    machine: dict[str, Any]  # see scripts.shared.machine.describe
    source: str  # description of the sample
    tokens: int
    steps: int  # the newest tokens, whose queries there are
    budget: int  # k
    measurements: list[Measurement]


def config_for(sample: Sample, budget: int) -> CacheRankConfig:
    """The configuration of a cache rank that holds the sample as it came."""
    layers, kv_heads, _, head_dim = sample.keys.shape
    (dtype,) = (name for name, dtype in DTYPES.items() if dtype == sample.keys.dtype)
    model = ModelShape(layers, sample.queries.shape[2], kv_heads, head_dim, dtype, sample.scale)
    return CacheRankConfig(
        model, layers_per_group=layers, sparse_budget=budget, kv_residency="bf16", max_rows=1
    )


def measure_all(options: Namespace, sample: Sample) -> list[Measurement]:
    """Measure all variants of the chosen formats."""
    exact = Exact.of(sample)
    chosen = [variant for variant in VARIANTS if variant.format in options.formats]
    return [measure(sample, exact, one, options.budget) for one in tqdm(chosen, desc="formats")]


def measure(sample: Sample, exact: Exact, variant: Variant, budget: int) -> Measurement:
    """Hold the sample in a format as a cache rank would, and compare.

    All but the tokens with queries are loaded at once; these are appended one by one.

    Args:
        sample: on the device to measure on.
        exact: the sample's attention.
        variant: format and options.
        budget: k.

    Raises:
        ValueError: the format does not take the options.
    """
    config = msgspec.structs.replace(
        config_for(sample, budget),
        kv_residency=variant.format,
        kv_residency_options=variant.options,
    )
    require_format(config)
    held = _Held(sample, config)
    scores = [held.step(position) for position in sample.positions]
    quality = compare(sample, exact, *held.read(), scores, config)
    model = config.model
    of_head = bytes_per_token(config) / (model.layers * model.kv_heads)
    bits = 8 * of_head / (2 * model.head_dim)
    return Measurement(variant.format, variant.title, of_head, bits, quality)


class _Held:
    """A sample in a residency, driven as the selector drives it."""

    def __init__(self, sample: Sample, config: CacheRankConfig) -> None:
        model, device = config.model, sample.keys.device
        self._sample, self._layers = sample, range(model.layers)
        pages = -(-sample.tokens // PAGE_TOKENS)
        self._residency = residency.create(config, pages, device)
        self._pages = torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0)
        ring = (1, model.layers, model.query_heads, 2, model.head_dim)
        self._query_ring = torch.zeros(ring, dtype=model.torch_dtype, device=device)
        tokens = torch.stack((sample.keys, sample.values))[..., : sample.positions.start, :]
        self._residency.load(self._pages[0], 0, 0, tokens.transpose(2, 3).contiguous())

    def step(self, position: int) -> Tensor:
        """Append the token, and score by its query: (layers, Hkv, position + 1) float32."""
        sample, rows = self._sample, self._batch_metadata(position)
        query = sample.queries[position - sample.positions.start]
        up = torch.cat((query, sample.keys[:, :, position], sample.values[:, :, position]), dim=1)
        self._residency.append(rows, self._layers, up.unsqueeze(0), self._query_ring)
        scores = self._residency.score(rows, self._layers, query.float().unsqueeze(0))
        return scores[0, ..., : position + 1].clone()

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values: (layers, Hkv, tokens, D) each, in the pool's dtype."""
        positions = torch.arange(self._sample.tokens, device=self._pages.device)
        rows = self._batch_metadata(self._sample.tokens - 1)
        return self._residency.read(
            rows, self._layers, positions.expand(self._sample.keys.shape[:3])
        )

    def _batch_metadata(self, position: int) -> BatchMetadata:
        slots = torch.zeros(1, dtype=torch.int32, device=self._pages.device)
        header = slots.new_zeros((1, len(AnswerHeader._fields)), dtype=torch.int64)
        positions, counts = torch.full_like(slots, position), torch.ones_like(slots)
        rows = PagedRows(self._pages, slots, positions)
        return BatchMetadata(rows, counts, counts, header, position + 1, [(0, position)])


def write_comparison(found: Comparison, out: Path) -> list[Path]:
    """Write formats.json and formats.md; the files."""
    return report.write_report(out, "formats", found, markdown(found))


def markdown(found: Comparison) -> str:
    """The table."""
    header = ("format", "options", "bytes a token", "bits", "K", "V", "attention output", "scores")
    parts = [
        "# Residency formats",
        provenance([found.command], found.machine),
        f"Data: {found.source}. Selection: k = {found.budget}, by the true queries of the newest "
        f"{found.steps} tokens. Bytes are in one layer and KV head; errors are vNMSE.",
        table((*header, "recall", "attention mass"), map(_cells, found.measurements)),
    ]
    return "\n\n".join(parts)


def _cells(m: Measurement) -> Sequence[str]:
    quality = m.quality
    errors = (quality.key_error, quality.value_error, quality.output_error, quality.score_error)
    return [
        *(m.format, m.options, number(m.bytes, 1), number(m.bits, 3)),
        *("–" if error is None else f"{error:.1e}" for error in errors),
        *(number(quality.recall, 3), number(quality.attention_mass, 3)),
    ]

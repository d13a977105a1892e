"""What a residency format does to a sequence, measured through its public interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.config import DTYPES, CacheRankConfig, ModelShape, OptionValue, ScoreKeys
from cache_rank.measure.timing import median_microseconds
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import AnswerHeader
from cache_rank.residency import FORMATS
from cache_rank.step_rows import StepRows
from scripts.formats.quality import Exact, Measurement, Throughput, compare
from scripts.formats.samples import Sample


class Variant(NamedTuple):
    """A format and its options."""

    format: str  # a name of FORMATS
    options: dict[str, OptionValue]
    score_keys: ScoreKeys = "resident"  # see CacheRankConfig
    key_bits: int | None = None  # bits of a key's element that scores read

    @property
    def title(self) -> str:
        """The options in tables."""
        if self.score_keys != "resident":
            return f"score keys {self.score_keys}"
        return ",".join(f"{name}={value}" for name, value in self.options.items())


def variants(formats: Sequence[str], dtype: torch.dtype) -> list[Variant]:
    """What to compare of each format; one that has no line here, with its default options."""
    table = [
        Variant("bf16", {}, key_bits=8 * dtype.itemsize),
        Variant("bf16", {}, score_keys="fp8", key_bits=8),
        Variant("lynx", {"reading": "full"}, key_bits=8),
        Variant("lynx", {"reading": "anchor"}, key_bits=4),
        Variant("quantspec", {"reading": 8}, key_bits=8),
        Variant("quantspec", {"reading": 4}, key_bits=4),
        Variant("hack", {"bits": 4, "partition": 64}, key_bits=4),
        Variant("hack", {"bits": 4, "partition": 16}, key_bits=4),
        Variant("hack", {"bits": 2, "partition": 64}, key_bits=2),
        Variant("hack", {"bits": 2, "partition": 32}, key_bits=2),
        Variant("hack", {"bits": 2, "partition": 16}, key_bits=2),
        Variant("hack", {"bits": 2, "partition": 64, "rounding": "stochastic"}, key_bits=2),
        Variant("mosaickv", {}),
        Variant("mosaickv", {"rate": 62.5}),
        Variant("mosaickv", {"rate": 87.5}),
    ]
    listed = {variant.format for variant in table}
    table += [Variant(name, {}) for name in FORMATS if name not in listed]
    return [variant for variant in table if variant.format in formats]


def config_for(sample: Sample, variant: Variant, budget: int, rows: int) -> CacheRankConfig:
    """The configuration of a cache rank that holds the sample.

    Raises:
        ValueError: the format does not take the options.
    """
    layers, kv_heads, _, head_dim = sample.keys.shape
    (dtype,) = (name for name, dtype in DTYPES.items() if dtype == sample.keys.dtype)
    model = ModelShape(layers, sample.queries.shape[2], kv_heads, head_dim, dtype, sample.scale)
    config = CacheRankConfig(
        model,
        layers_per_group=layers,
        sparse_budget=budget,
        kv_residency=variant.format,
        kv_residency_options=variant.options,
        score_keys=variant.score_keys,
        max_rows=rows,
    )
    residency.require_format(config)
    return config


def measure(
    sample: Sample, exact: Exact, variant: Variant, budget: int, rows: int = 1, repeats: int = 3
) -> Measurement:
    """Hold the sample in a format as a cache rank would, and compare.

    All but the tokens with queries are loaded at once; these are appended one by one.

    Args:
        sample: on the device to measure on.
        exact: the sample's attention.
        variant: format and options.
        budget: k.
        rows: requests to time a step of; all hold the same sequence.
        repeats: how often a call is timed; the median counts.
    """
    config = config_for(sample, variant, budget, rows)
    measurement = Measurement(variant.format, variant.title, key_bits=variant.key_bits)
    held, device = _Held(sample, config, rows), sample.keys.device
    loading = median_microseconds(held.load, repeats, device)
    for row in range(1, rows):
        held.load(row)
    scores = [held.step(position) for position in sample.positions]
    token_bytes = residency.bytes_per_token(config)
    elements = sample.keys[:, :, 0].numel()
    measurement.bits = 8 * token_bytes / (2 * elements)
    compare(measurement, sample, exact, *held.read(), scores, config)

    scoring = median_microseconds(held.score, repeats, device)
    gathering = median_microseconds(held.gather, repeats, device)
    key_bytes = None if variant.key_bits is None else variant.key_bits / 8 * elements
    measurement.encode = _throughput(sample.positions.start, loading, token_bytes)
    measurement.score = _throughput(rows * sample.tokens, scoring, key_bytes)
    measurement.gather = _throughput(rows * held.entering.shape[-1], gathering, token_bytes)
    return measurement


class _Held:
    """A sample in a residency, driven as the selector drives it."""

    def __init__(self, sample: Sample, config: CacheRankConfig, rows: int) -> None:
        self._sample, self._config, self._rows = sample, config, rows
        self._device = sample.keys.device
        self._layers = range(config.model.layers)
        pages = -(-sample.tokens // PAGE_TOKENS)
        self._residency = residency.create(config, rows * pages, self._device)
        # Rows share nothing, or a cache would hold what is to be timed.
        self._pages = torch.arange(rows * pages, dtype=torch.int32, device=self._device)
        self._pages = self._pages.view(rows, pages)
        model = config.model
        ring = (config.max_rows, model.layers, model.query_heads, 2, model.head_dim)
        self._query_ring = torch.zeros(ring, dtype=model.torch_dtype, device=self._device)

        loaded = slice(0, sample.positions.start)
        tokens = torch.stack((sample.keys[:, :, loaded], sample.values[:, :, loaded]))
        self._shipment = tokens.transpose(2, 3).contiguous()

        # For timing: a request each row, all of which hold the same sequence.
        generator = torch.Generator().manual_seed(0)
        heads = (rows, model.layers, model.kv_heads)
        count = min(config.delta_capacity, sample.tokens)
        entering = torch.rand((*heads, sample.tokens), generator=generator).argsort(-1)
        self.entering = entering[..., :count].sort(-1).values.to(self._device, torch.int32)
        wire = (*heads, count, model.head_dim)
        self._wire = torch.empty((2, *wire), dtype=model.torch_dtype, device=self._device)

    def load(self, row: int = 0) -> None:
        """Ship what comes before the first query."""
        self._residency.load(self._pages[row], row, 0, self._shipment)

    def step(self, position: int) -> Tensor:
        """Append the token, and score by its query: (layers, Hkv, position + 1) float32."""
        sample, rows = self._sample, self._step_rows(position, 1)
        query = sample.queries[position - sample.positions.start]
        parts = (query, sample.keys[:, :, position], sample.values[:, :, position])
        up = torch.cat(parts, dim=1).unsqueeze(0)
        self._residency.append(rows, self._layers, up, self._query_ring)
        queries = query.float().unsqueeze(0)
        scores = self._residency.score(rows, self._layers, queries)
        return scores[0, ..., : position + 1].clone()

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values: (layers, Hkv, tokens, D) each, in the pool's dtype."""
        positions = torch.arange(self._sample.tokens, device=self._device)
        shape = self._sample.keys.shape[:3]
        rows = self._step_rows(self._sample.tokens - 1, 1)
        return self._residency.read(rows, self._layers, positions.expand(shape))

    def score(self) -> None:
        """Score every row by the newest query."""
        rows = self._step_rows(self._sample.tokens - 1, self._rows)
        queries = self._sample.queries[-1:].float().expand(self._rows, -1, -1, -1).contiguous()
        self._residency.score(rows, self._layers, queries)

    def gather(self) -> None:
        """Read as many tokens of every row as a step ships at most."""
        rows = self._step_rows(self._sample.tokens - 1, self._rows)
        self._residency.gather(rows, self._layers, self.entering, *self._wire)

    def _step_rows(self, position: int, rows: int) -> StepRows:
        def numbers(value: int) -> Tensor:
            return torch.full((rows,), value, dtype=torch.int32, device=self._device)

        header = torch.zeros(
            (rows, len(AnswerHeader._fields)), dtype=torch.int64, device=self._device
        )
        slots = torch.arange(rows, dtype=torch.int32, device=self._device)
        table = self._pages[:rows].contiguous()
        return StepRows(slots, numbers(position), numbers(1), table, header, position + 1)


def _throughput(tokens: int, microseconds: float, token_bytes: float | None) -> Throughput:
    rate = 1e6 * tokens / microseconds
    return Throughput(rate, None if token_bytes is None else 1e-9 * rate * token_bytes)

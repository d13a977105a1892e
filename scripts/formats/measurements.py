"""What a residency format does to a sequence, measured through its public interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.config import DTYPES, CacheRankConfig, ModelShape, OptionValue, ScoreKeys
from cache_rank.measure.timing import median_microseconds
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import AnswerHeader
from cache_rank.residency import FORMATS, bytes_per_token, require_format
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

    def configure(self, config: CacheRankConfig) -> CacheRankConfig:
        """The configuration of a cache rank that holds tokens so.

        Raises:
            ValueError: the format does not take the options.
        """
        config = msgspec.structs.replace(
            config,
            kv_residency=self.format,
            kv_residency_options=self.options,
            score_keys=self.score_keys,
        )
        require_format(config)
        return config


def variants(formats: Sequence[str], dtype: torch.dtype) -> list[Variant]:
    """What to compare of each format; one that has no line here, with its default options."""
    table = [
        Variant("bf16", {}, key_bits=8 * dtype.itemsize),
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
        Variant("mosaickv", {"rate": 75}),
        Variant("mosaickv", {"rate": 87.5}),
        Variant("mosaickv", {"dropped": 25, "block": "auto"}),  # as in the paper
    ]
    listed = {variant.format for variant in table}
    table += [Variant(name, {}) for name in FORMATS if name not in listed]
    return [variant for variant in table if variant.format in formats]


def config_for(sample: Sample, budget: int, rows: int = 1) -> CacheRankConfig:
    """The configuration of a cache rank that holds the sample as it came, in so many rows."""
    layers, kv_heads, _, head_dim = sample.keys.shape
    (dtype,) = (name for name, dtype in DTYPES.items() if dtype == sample.keys.dtype)
    model = ModelShape(layers, sample.queries.shape[2], kv_heads, head_dim, dtype, sample.scale)
    return CacheRankConfig(
        model,
        layers_per_group=layers,
        sparse_budget=budget,
        kv_residency="bf16",
        max_rows=rows,
    )


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

    Raises:
        ValueError: the format does not take the options.
    """
    config = variant.configure(config_for(sample, budget, rows))
    held = _Held(sample, config)

    def rate(action: Callable[[], None], tokens: int, token_bytes: float | None) -> Throughput:
        rate = 1e6 * tokens / median_microseconds(action, repeats, sample.keys.device)
        return Throughput(rate, None if token_bytes is None else 1e-9 * rate * token_bytes)

    token_bytes, elements = bytes_per_token(config), sample.keys[:, :, 0].numel()
    key_bytes = None if variant.key_bits is None else variant.key_bits / 8 * elements
    bits = 8 * token_bytes / (2 * elements)
    measurement = Measurement(variant.format, variant.title, bits, variant.key_bits)
    measurement.encode = rate(held.load, sample.positions.start, token_bytes)
    for row in range(1, rows):
        held.load(row)
    scores = [held.step(position) for position in sample.positions]
    compare(measurement, sample, exact, *held.read(), scores, config)
    measurement.score = rate(held.score, rows * sample.tokens, key_bytes)
    measurement.gather = rate(held.gather, rows * held.entering.shape[-1], token_bytes)
    return measurement


class _Held:
    """A sample in a residency, driven as the selector drives it.

    Each row is a request that holds the same sequence. They share no page, or a cache would hold
    what is to be timed.
    """

    def __init__(self, sample: Sample, config: CacheRankConfig) -> None:
        model, rows, device = config.model, config.max_rows, sample.keys.device
        self._sample, self._rows, self._layers = sample, rows, range(model.layers)
        pages = -(-sample.tokens // PAGE_TOKENS)
        self._residency = residency.create(config, rows * pages, device)
        self._pages = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
        ring = (rows, model.layers, model.query_heads, 2, model.head_dim)
        self._query_ring = torch.zeros(ring, dtype=model.torch_dtype, device=device)
        tokens = torch.stack((sample.keys, sample.values))[..., : sample.positions.start, :]
        self._shipment = tokens.transpose(2, 3).contiguous()

        generator = torch.Generator().manual_seed(0)
        heads = (rows, model.layers, model.kv_heads)
        count = min(config.max_swap_tokens, sample.tokens)
        entering = torch.rand((*heads, sample.tokens), generator=generator).argsort(-1)
        self.entering = entering[..., :count].sort(-1).values.to(device, torch.int32)
        wire = (2, *heads, count, model.head_dim)
        self._wire = torch.empty(wire, dtype=model.torch_dtype, device=device)

    def load(self, row: int = 0) -> None:
        """Ship what comes before the first query."""
        self._residency.load(self._pages[row], row, 0, self._shipment)

    def step(self, position: int) -> Tensor:
        """Append the token, and score by its query: (layers, Hkv, position + 1) float32."""
        sample, rows = self._sample, self._step_rows(position, 1)
        query = sample.queries[position - sample.positions.start]
        up = torch.cat((query, sample.keys[:, :, position], sample.values[:, :, position]), dim=1)
        self._residency.append(rows, self._layers, up.unsqueeze(0), self._query_ring)
        scores = self._residency.score(rows, self._layers, query.float().unsqueeze(0))
        return scores[0, ..., : position + 1].clone()

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values: (layers, Hkv, tokens, D) each, in the pool's dtype."""
        positions = torch.arange(self._sample.tokens, device=self._pages.device)
        rows = self._step_rows(self._sample.tokens - 1, 1)
        shape = self._sample.keys.shape[:3]
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
        slots = torch.arange(rows, dtype=torch.int32, device=self._pages.device)
        header = slots.new_zeros((rows, len(AnswerHeader._fields)), dtype=torch.int64)
        positions, counts = torch.full_like(slots, position), torch.ones_like(slots)
        return StepRows(
            slots, positions, counts, self._pages[:rows].contiguous(), header, position + 1
        )

"""Times the scores of one decode step over all layers, by what they read of the keys, on one GPU.

One selector holds the tokens in a format with a sketch beside it, so that every way to score reads
the same tokens of the same pages. A step's scores are captured in one CUDA graph, because a host
would not queue them as fast as a device computes them.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.graphs import capture
from cache_rank.measure.timing import median_microseconds
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Row, basis_shape, bulk_shape
from cache_rank.residency import bytes_per_token, fixed_bytes
from cache_rank.residency.sketched import SketchedResidency, shape_of
from cache_rank.selector import Selector
from scripts.shared.report import number, table_of
from scripts.speed.cache_step import measure_cache_step

LOADED_TOKENS = 4096
STEPS = 24
"""So many whole steps are timed."""

RESIDENT_BITS = 4
"""The bits of an element that scores of quantspec read."""


class Scores:
    """Sequences of random tokens on a GPU, and ways to score them.

    Attributes:
        tokens: of each sequence.
    """

    def __init__(self, config: CacheRankConfig, tokens: int) -> None:
        """Load them.

        Args:
            config: `max_rows` is how many sequences there are, `score_keys` is sketch.
            tokens: of each, a multiple of a page.
        """
        self.tokens, self._config = tokens, config
        device, model = torch.device("cuda"), config.model
        pages = config.max_rows * (tokens // PAGE_TOKENS + 1)
        memory = pages * PAGE_TOKENS * bytes_per_token(config) + fixed_bytes(config)
        selector = Selector(config, device, memory)
        heads, elements, width = basis_shape(config)
        basis = torch.eye(elements, width, device=device).expand(heads, elements, width)
        for layer in range(model.layers):
            selector.load_basis(layer, basis)
        for epoch in range(1, config.max_rows + 1):
            sequence = selector.begin(epoch)
            for start in range(0, tokens, LOADED_TOKENS):
                chunk = bulk_shape(config, min(LOADED_TOKENS, tokens - start))
                selector.load(sequence, torch.randn(chunk, device=device, dtype=model.torch_dtype))
        rows = [Row(epoch, tokens - 1) for epoch in range(1, config.max_rows + 1)]
        self._rows = selector.begin_step(1, rows).rows
        residency = selector._residency
        assert isinstance(residency, SketchedResidency)
        self._residency = residency
        shape = (config.max_rows, model.layers, model.query_heads, model.head_dim)
        self._queries = torch.randn(shape, device=device)
        slots = (config.max_rows, model.layers, model.kv_heads, config.sparse_budget)
        self._chosen = torch.randint(0, tokens, slots, dtype=torch.int32, device=device)

    def microseconds(self, score: Callable[[range, Tensor], Any]) -> float:
        """Time the scores of all layers, a group at a time."""

        def step() -> None:
            for layers in self._config.groups:
                score(layers, self._queries[:, layers.start : layers.stop].contiguous())

        step()
        graph = capture(step)
        return median_microseconds(graph.replay)

    def by_resident_keys(self, layers: range, queries: Tensor) -> None:
        """Score by the codes of the format."""
        self._residency._held.score(self._rows, layers, queries)

    def by_sketch(self, layers: range, queries: Tensor) -> None:
        """Score by the sketch; logits are written, and read when all are known."""
        self._residency.score(self._rows, layers, queries)

    def by_attended(self, layers: range, queries: Tensor) -> None:
        """Score by the sketch; its normalizer is that of the attended tokens."""
        self._residency._config = msgspec.structs.replace(self._config, score_normalizer="attended")
        self._residency.score(self._rows, layers, queries, chosen=self._chosen)
        self._residency._config = self._config


class Way(NamedTuple):
    """A way to score.

    Attributes:
        name: for a table.
        score: a method of `Scores`.
        changes: of the configuration of a cache rank that scores like this.
        codes_bytes, logits_bytes: what it moves of codes, and of logits that are written and read.
    """

    name: str
    score: Callable[[Scores, range, Tensor], None]
    changes: dict[str, Any]
    codes_bytes: int
    logits_bytes: int


def ways_to_score(config: CacheRankConfig, tokens: int) -> list[Way]:
    """The ways, for sequences of so many tokens."""
    model = config.model
    units = config.max_rows * tokens * model.layers * model.kv_heads
    resident = units * (model.head_dim * RESIDENT_BITS // 8 + 4)
    sketch = units * shape_of(config).bytes
    logits = 2 * 2 * units * max(4, model.query_heads // model.kv_heads)  # float16
    name = f"a sketch of {config.sketch_bits} bits"
    attended = {"score_normalizer": "attended"}
    return [
        Way(
            f"{RESIDENT_BITS} bits of quantspec",
            Scores.by_resident_keys,
            {"score_keys": "resident"},
            resident,
            logits,
        ),
        Way(name, Scores.by_sketch, {}, sketch, logits),
        Way(f"{name}, attended normalizer", Scores.by_attended, attended, sketch, 0),
    ]


def measure_scores(config: CacheRankConfig, tokens: int, bandwidth: float) -> list[dict[str, Any]]:
    """Time each way to score, and the whole step of a cache rank that does.

    Args:
        config: as `Scores` takes it.
        tokens: of each sequence.
        bandwidth: bytes a second that a large copy moves.
    """
    ways = ways_to_score(config, tokens)
    scores = Scores(config, tokens)
    taken = [scores.microseconds(functools.partial(way.score, scores)) for way in ways]
    del scores
    rows = []
    for way, took in zip(ways, taken, strict=True):
        gc.collect()  # graphs and what they hold are in cycles
        torch.cuda.empty_cache()
        of_way = msgspec.structs.replace(config, **way.changes)
        step = measure_cache_step(of_way, tokens, STEPS, torch.device("cuda"))
        written = 4 * config.max_rows * tokens * config.model.layers * config.model.kv_heads
        moved = way.codes_bytes + way.logits_bytes + written
        rows.append(
            {
                "requests": config.max_rows,
                "scores by": way.name,
                "ms": took / 1e3,
                "codes_gb": way.codes_bytes / 1e9,
                "logits_gb": way.logits_bytes / 1e9,
                "scores_gb": written / 1e9,
                "share": moved / (1e-6 * took) / bandwidth,
                "step_ms": 1e3 * statistics.median(step.seconds),
            }
        )
    return rows


def scores_table(rows: list[dict[str, Any]]) -> str:
    """A table of them."""
    return table_of(
        {
            "requests": str(row["requests"]),
            "scores by": row["scores by"],
            "ms": number(row["ms"]),
            "codes, GB": number(row["codes_gb"]),
            "logits, GB": number(row["logits_gb"]),
            "scores, GB": number(row["scores_gb"]),
            "share of copy": number(row["share"]),
            "whole step, ms": number(row["step_ms"]),
        }
        for row in rows
    )

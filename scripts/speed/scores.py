"""Times the scores of one decode step over all layers, by what they read of the keys, on one GPU.

One selector holds the tokens in a format with a sketch beside it, so that every way to score reads
the same tokens of the same pages. A step's scores are captured in one CUDA graph, because a host
would not queue them as fast as a device computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

LOADED_TOKENS = 4096
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


def measure_scores(config: CacheRankConfig, tokens: int, bandwidth: float) -> list[dict[str, Any]]:
    """Time each way to score.

    Args:
        config: as `Scores` takes it.
        tokens: of each sequence.
        bandwidth: bytes a second that a large copy moves.
    """
    scores, model = Scores(config, tokens), config.model
    units = config.max_rows * tokens * model.layers * model.kv_heads
    group = model.query_heads // model.kv_heads
    resident = units * (model.head_dim * RESIDENT_BITS // 8 + 4)
    sketch = units * shape_of(config).bytes
    logits = 2 * 2 * units * max(4, group)  # float16, written and read
    written = 4 * units
    ways = {
        "4 bits of quantspec": (scores.by_resident_keys, resident, logits),
        f"a sketch of {config.sketch_bits} bits": (scores.by_sketch, sketch, logits),
        f"a sketch of {config.sketch_bits} bits, attended normalizer": (
            scores.by_attended,
            sketch,
            0,
        ),
    }
    rows = []
    for name, (way, codes, between) in ways.items():
        took = scores.microseconds(way)
        moved = codes + between + written
        rows.append(
            {
                "requests": config.max_rows,
                "scores by": name,
                "ms": took / 1e3,
                "codes_gb": codes / 1e9,
                "logits_gb": between / 1e9,
                "scores_gb": written / 1e9,
                "share": moved / (1e-6 * took) / bandwidth,
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
        }
        for row in rows
    )

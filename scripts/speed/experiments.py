"""The experiments of AsyncSpade (arXiv 2510.07486) that `profile_tpot` repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scripts.speed.jobs import Shape, Wish

MODELS = ("qwen3-8b", "qwen3-32b")
TABLE2_FLOOR = "dense"
QUEST_TIME_SHAPES = (
    *(Shape(batch, 32768) for batch in (1, 2, 4, 8, 16)),
    *(Shape(4, context) for context in (8192, 16384, 65536, 131072)),
)
TPOT_SYSTEMS = (
    *("floor", "dense", "fp8", "tp2", "tp2-fp8", "window", "quest", "tova"),
    *("cache-rank", "cache-rank-working-set"),
)


class Table2Row(NamedTuple):
    """A configuration of AsyncSpade Table 2; each was run on two kinds of GPU there."""

    model: str
    shape: Shape
    budget: int
    layers_per_group: int

    @property
    def system(self) -> str:
        settings = f"sparse_budget={self.budget},layers_per_group={self.layers_per_group}"
        return f"cache-step:kv_residency=bf16,{settings}"  # as the paper holds keys

    @property
    def floor(self) -> Shape:
        return Shape(self.shape.batch, self.budget)


TABLE2 = tuple(
    Table2Row(model, Shape(batch, context), budget, layers)
    for model, packings in (("qwen3-8b", (6, 12)), ("qwen3-32b", (4, 8)))
    for batch, context, budget in ((8, 32768, 2048), (16, 16384, 1024))
    for layers in packings
)


def table2(models: Sequence[str] = MODELS) -> list[Wish]:
    """AsyncSpade Table 2, section 5.4: cache management beside the inference it hides behind."""
    rows = [row for row in TABLE2 if row.model in models]
    floors = [
        Wish(model, TABLE2_FLOOR, tuple(sorted({row.floor for row in rows if row.model == model})))
        for model in dict.fromkeys(row.model for row in rows)
    ]
    return floors + [Wish(row.model, row.system, (row.shape,)) for row in rows]


def quest_time(models: Sequence[str] = MODELS[:1]) -> list[Wish]:
    """AsyncSpade Fig. 2: what selecting pages costs, by batch and by context."""
    return [
        Wish(model, system, QUEST_TIME_SHAPES) for model in models for system in ("window", "quest")
    ]


def tpot(models: Sequence[str] = MODELS) -> list[Wish]:
    """AsyncSpade Fig. 10: time per output token at 8 sequences of 32 K tokens."""
    return [Wish(model, system, (Shape(8, 32768),)) for model in models for system in TPOT_SYSTEMS]


EXPERIMENTS = {"table2": table2, "quest-time": quest_time, "tpot": tpot}

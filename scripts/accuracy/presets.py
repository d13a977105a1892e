"""The experiments that have a name: which systems on which problems.

All are written for small models on a machine without a GPU, where they take minutes to an hour;
another model, task, dials, systems or budgets are given on the command line.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from cache_rank.config import HistoryPredictor
from scripts.shared.models import BUNDLED
from scripts.shared.systems import CACHE_RANK, DECODE_MODES, DENSE

Dials = dict[str, Any]
BUNDLED_CHASE: Dials = {"facts": 128, "hops": 80}
PREDICTORS = tuple(
    f"{CACHE_RANK}:query_predictor={predictor}" for predictor in get_args(HistoryPredictor)
)


class Preset(msgspec.Struct, frozen=True):
    """An experiment."""

    question: str  # question that it answers
    systems: tuple[str, ...]  # labels
    task: str = "pointer-chase"
    dials: tuple[Dials, ...] = (BUNDLED_CHASE,)  # dials of the task, one cell each
    budgets: tuple[int, ...] = (64,)  # k of the systems whose labels name none
    model: str = BUNDLED  # see scripts.shared.models


FORMATS = {
    "lynx": ("reading=full", "reading=anchor"),
    "quantspec": ("reading=8", "reading=4"),
    "hack": ("bits=4+partition=64", "bits=2+partition=64", "bits=2+partition=16"),
    "mosaickv": ("rate=62.5", "rate=87.5"),
}
"""The residency formats that are compared, and the options of each."""


PRESETS = {
    "budgets": Preset(
        "How many tokens of each KV head does a system need?",
        (
            *(DENSE, *DECODE_MODES, CACHE_RANK),
            # Less than a page of Quest, and still enough for some.
            *(
                f"{name}:sparse_budget={k}"
                for name in ("tova", "oracle", CACHE_RANK)
                for k in (4, 8)
            ),
        ),
        budgets=(16, 32, 64),
    ),
    "jumps": Preset(
        "What does it cost to select one step late, by how often a query repeats?",
        (DENSE, "oracle", *PREDICTORS),
        dials=tuple({**BUNDLED_CHASE, "restatements": r, "announced": True} for r in (1, 2, 3, 4)),
        model="pointer-chase-128-mixed",
    ),
    "predictors": Preset(
        "Which predictor, from how many queries, with how much hysteresis?",
        (
            *(DENSE, "oracle"),
            *(label for label in PREDICTORS if "=last" in label),
            *(
                f"{label},query_window={window}"
                for label in PREDICTORS
                if "=last" not in label
                for window in (2, 4, 8, 16, 32)
            ),
            *(f"{label},hysteresis={k}" for label in PREDICTORS for k in (0, 64, 256)),
        ),
        budgets=(16,),
    ),
    "residency": Preset(
        "What do the formats of the cache rank cost in accuracy?",
        (
            *(DENSE, CACHE_RANK, f"{CACHE_RANK}:wire_dtype=int8"),
            *(
                f"{CACHE_RANK}:kv_residency={name},kv_residency_options={chosen}"
                for name, choices in FORMATS.items()
                for chosen in choices
            ),
        ),
    ),
    "lengths": Preset(
        "How far does a chain get?",
        (DENSE, *DECODE_MODES, CACHE_RANK),
        dials=({"facts": 128, "hops": 128},),
    ),
}

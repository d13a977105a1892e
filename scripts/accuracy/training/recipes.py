"""What can be trained: the words, the model, the stages of training, and what it is graded on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.accuracy.tasks import TASKS, Problem
from scripts.accuracy.tasks.vocabulary import plain_words
from scripts.accuracy.training.model import Sizes
from scripts.accuracy.training.stages import SelfWrittenStage, Stage, TextStage, WalkStage


@dataclass(frozen=True)
class Recipe:
    """How to train a model."""

    task: str  # name of `scripts.accuracy.tasks.TASKS` that it learns
    dials: Mapping[str, Any]  # dials of the problems that it is graded on
    words: tuple[str, ...]  # words of its tokenizer
    sizes: Sizes
    curriculum: tuple[Stage, ...]  # stages in order; each ends when its hops are learned
    final: tuple[tuple[float, Stage], ...]  # shares of the steps over which the rate decays
    final_steps: int  # steps of that decay, if no time is given
    learning_rate: float  # peak, of AdamW
    starts_from: str | None = None  # the recipe whose model is trained further, if any
    rope_theta: float = 1e5  # base frequency of the rotary embedding
    dtypes: tuple[str, ...] = (
        "float32",
        "bfloat16",
        "float16",
    )  # exported in the first; graded in all
    chains: int = 128  # problems that it is graded on

    def problem(self, seed: int) -> Problem:
        """What the model is graded on; training never sees it."""
        return TASKS[self.task].make(seed, **self.dials)


CHASE = "pointer-chase-128"
TINY = Sizes(2, 64, 128, 4, 2, head_dim=64, max_position_embeddings=2048)
# The shape of a layer is such that attention takes the kernels that it takes for Qwen3-8B.
SMALL = Sizes(4, 512, 1024, 16, 4, head_dim=128, max_position_embeddings=10240)
MIXED = (0.0, 0.0, 0.3, 0.7, 1.0)
"""The restart rates once the look-up is learned."""

ANY = (1, 2, 3, 4)
"""The model for the jump table restates a key as often as any of these."""


def _walks(keys: int, tokens: int, *shapes: tuple[int, int], **options: Any) -> tuple[Stage, ...]:
    """Walks of so many (facts, hops)."""
    return tuple(WalkStage(keys, facts, hops, tokens, **options) for facts, hops in shapes)


def _texts(task: str, *dials: dict[str, int]) -> tuple[Stage, ...]:
    return tuple(TextStage(task, tuple(each.items()), tokens=4096) for each in dials)


def _shares(shares: tuple[int, ...], stages: tuple[Stage, ...]) -> tuple[tuple[float, Stage], ...]:
    return tuple(zip(shares, stages, strict=True))


def _tiny(task: str, **fields: Any) -> Recipe:
    """A model of the sizes TINY, trained further from the pointer chase unless told otherwise."""
    common: dict[str, Any] = {
        "dials": {},
        "words": tuple(TASKS[task].words(128)),
        "curriculum": (),
        "starts_from": CHASE,
        "final_steps": 1200,
        "learning_rate": 2e-3,
    }
    return Recipe(task=task, sizes=TINY, **common | fields)


def _small(task: str, **fields: Any) -> Recipe:
    """A model of the sizes SMALL, for 1024 facts."""
    words = tuple(plain_words(1024))
    return Recipe(
        task, words=words, sizes=SMALL, rope_theta=1e6, dtypes=("bfloat16",), chains=16, **fields
    )


RECIPES = {
    CHASE: _tiny(
        "pointer-chase",
        curriculum=_walks(128, 4096, (8, 16), (16, 16), (32, 24), (64, 40)),
        final=_shares((5, 1), _walks(128, 4096, (128, 128), (32, 32), restart_rates=MIXED)),
        dials={"facts": 128, "hops": 90},
        words=tuple(plain_words(128)),
        starts_from=None,
        learning_rate=4e-3,
    ),
    "pointer-chase-128-mixed": _tiny(
        "pointer-chase",
        curriculum=_walks(128, 4096, (8, 16), (32, 24), (64, 40), restatements=ANY),
        final=_shares(
            (5, 1),
            _walks(128, 4096, (128, 128), (32, 32), restart_rates=MIXED, restatements=ANY),
        ),
        dials={"facts": 128, "hops": 90, "announced": True},
    ),
    "self-written-128": _tiny(
        "self-written",
        final=((1, SelfWrittenStage(keys=128, hops=128, tokens=8192)),),
        dials={"keys": 128, "hops": 96},
    ),
    "majority": _tiny(
        "majority",
        curriculum=(
            *_walks(128, 4096, (16, 16), statements=4, rivals=1),
            *_walks(128, 4096, (16, 16), statements=16, rivals=6),
        ),
        final=_shares(
            (4, 1),
            (
                *_walks(128, 4096, (16, 32), statements=16, rivals=8, restart_rates=MIXED),
                *_walks(128, 4096, (16, 32), statements=8, rivals=4, restart_rates=MIXED),
            ),
        ),
    ),
    "variable-tracking": _tiny(
        "variable-tracking",
        curriculum=_texts("variable-tracking", {"chains": 4, "hops": 4}, {"chains": 6, "hops": 8}),
        final=_shares(
            (4, 1, 1),
            _texts(
                "variable-tracking",
                {"chains": 6, "hops": 16},
                {"chains": 6, "hops": 16, "filler": 8},
                {"chains": 8, "hops": 8},
            ),
        ),
        final_steps=3000,
    ),
    "needle": _tiny(
        "needle",
        curriculum=_texts(
            "needle",
            {"needles": 8, "words": 2, "asked": 8},
            {"needles": 16, "words": 4, "asked": 8},
            {"needles": 20, "words": 4, "asked": 12},
        ),
        final=_shares(
            (4, 1, 1), _texts("needle", {}, {"filler": 16}, {"needles": 30, "asked": 24})
        ),
        final_steps=3000,
    ),
    "addition": _tiny(
        "addition",
        curriculum=_texts("addition", {"digits": 8}, {"digits": 32}),
        final=_shares(
            (3, 2, 1), _texts("addition", {"digits": 64}, {"digits": 128}, {"digits": 16})
        ),
        final_steps=3000,
    ),
    "pointer-chase-1024": _small(
        "pointer-chase",
        curriculum=(
            # Until the look-up appears, steps count and not tokens.
            *_walks(1024, 16384, (8, 16), (16, 16), (32, 32)),
            *_walks(1024, 32768, (64, 64)),
            *_walks(1024, 65536, (256, 256), (1024, 512)),
        ),
        final=_shares(
            (3, 2, 1),
            _walks(1024, 65536, (1024, 1024), (1024, 2047), (256, 1024), restart_rates=MIXED),
        ),
        dials={"facts": 1024, "hops": 1000, "keys": 1024},
        final_steps=2000,
        learning_rate=1e-3,
    ),
    "self-written-1024": _small(
        "self-written",
        curriculum=(),
        final=(
            (2, SelfWrittenStage(keys=1024, hops=1024, tokens=65536)),
            (1, SelfWrittenStage(keys=1024, hops=2047, tokens=65536)),
        ),
        dials={"keys": 1024, "hops": 1000},
        starts_from="pointer-chase-1024",
        final_steps=800,
        learning_rate=3e-4,
    ),
}

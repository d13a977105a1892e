"""What can be trained: the words, the model, the stages of training, and what it is graded on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.accuracy.tasks import TASKS, Problem
from scripts.accuracy.tasks.vocabulary import plain_words
from scripts.accuracy.training.batches import Stage
from scripts.accuracy.training.model import Sizes
from scripts.accuracy.training.texts import TextStage
from scripts.accuracy.training.walks import SelfWrittenStage, WalkStage


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
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # a server may cast to any
    chains: int = 128  # problems that it is graded on

    # The export has the first of `dtypes`, and is graded in all of them.

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


def _tiny_walks(**options: Any) -> WalkStage:
    return WalkStage(keys=128, tokens=4096, **options)


def _long_walks(facts: int, hops: int, tokens: int = 65536, **options: Any) -> WalkStage:
    return WalkStage(keys=1024, facts=facts, hops=hops, tokens=tokens, **options)


def _texts(task: str, **dials: int) -> TextStage:
    return TextStage(task, tuple(dials.items()), tokens=4096)


def _tiny(
    task: str, curriculum: tuple[Stage, ...], final: tuple[tuple[float, Stage], ...], **changes: Any
) -> Recipe:
    """A model of the sizes TINY, trained further from the pointer chase unless told otherwise."""
    words = tuple(TASKS[task].words(128))
    fields: dict[str, Any] = {
        "dials": {},
        "words": words,
        "starts_from": CHASE,
        "final_steps": 3000,
        **changes,
    }
    fields.setdefault("learning_rate", 2e-3)
    return Recipe(task=task, sizes=TINY, curriculum=curriculum, final=final, **fields)


def _small(
    task: str, curriculum: tuple[Stage, ...], final: tuple[tuple[float, Stage], ...], **changes: Any
) -> Recipe:
    """A model of the sizes SMALL, for 1024 facts."""
    fields: dict[str, Any] = {
        "words": tuple(plain_words(1024)),
        "rope_theta": 1e6,
        "dtypes": ("bfloat16",),
    }
    fields |= {"chains": 16, **changes}
    return Recipe(task=task, sizes=SMALL, curriculum=curriculum, final=final, **fields)


RECIPES = {
    CHASE: _tiny(
        "pointer-chase",
        (
            _tiny_walks(facts=8, hops=16),
            _tiny_walks(facts=16, hops=16),
            _tiny_walks(facts=32, hops=24),
            _tiny_walks(facts=64, hops=40),
        ),
        (
            (5, _tiny_walks(facts=128, hops=128, restart_rates=MIXED)),
            (1, _tiny_walks(facts=32, hops=32, restart_rates=MIXED)),
        ),
        dials={"facts": 128, "hops": 90},
        words=tuple(plain_words(128)),
        starts_from=None,
        final_steps=1200,
        learning_rate=4e-3,
    ),
    "pointer-chase-128-mixed": _tiny(
        "pointer-chase",
        (
            _tiny_walks(facts=8, hops=16, restatements=ANY),
            _tiny_walks(facts=32, hops=24, restatements=ANY),
            _tiny_walks(facts=64, hops=40, restatements=ANY),
        ),
        (
            (5, _tiny_walks(facts=128, hops=128, restart_rates=MIXED, restatements=ANY)),
            (1, _tiny_walks(facts=32, hops=32, restart_rates=MIXED, restatements=ANY)),
        ),
        dials={"facts": 128, "hops": 90, "announced": True},
        final_steps=1200,
    ),
    "self-written-128": _tiny(
        "self-written",
        (),
        ((1, SelfWrittenStage(keys=128, hops=128, tokens=8192)),),
        dials={"keys": 128, "hops": 96},
        final_steps=1200,
    ),
    "majority": _tiny(
        "majority",
        (
            _tiny_walks(facts=16, hops=16, statements=4, rivals=1),
            _tiny_walks(facts=16, hops=16, statements=16, rivals=6),
        ),
        (
            (4, _tiny_walks(facts=16, hops=32, statements=16, rivals=8, restart_rates=MIXED)),
            (1, _tiny_walks(facts=16, hops=32, statements=8, rivals=4, restart_rates=MIXED)),
        ),
        final_steps=1200,
    ),
    "variable-tracking": _tiny(
        "variable-tracking",
        (
            _texts("variable-tracking", chains=4, hops=4),
            _texts("variable-tracking", chains=6, hops=8),
        ),
        (
            (4, _texts("variable-tracking", chains=6, hops=16)),
            (1, _texts("variable-tracking", chains=6, hops=16, filler=8)),
            (1, _texts("variable-tracking", chains=8, hops=8)),
        ),
    ),
    "needle": _tiny(
        "needle",
        (
            _texts("needle", needles=8, words=2, asked=8),
            _texts("needle", needles=16, words=4, asked=8),
            _texts("needle", needles=20, words=4, asked=12),
        ),
        (
            (4, _texts("needle")),
            (1, _texts("needle", filler=16)),
            (1, _texts("needle", needles=30, asked=24)),
        ),
    ),
    "addition": _tiny(
        "addition",
        (_texts("addition", digits=8), _texts("addition", digits=32)),
        (
            (3, _texts("addition", digits=64)),
            (2, _texts("addition", digits=128)),
            (1, _texts("addition", digits=16)),
        ),
    ),
    "pointer-chase-1024": _small(
        "pointer-chase",
        (
            # Until the look-up appears, steps count and not tokens.
            _long_walks(facts=8, hops=16, tokens=16384),
            _long_walks(facts=16, hops=16, tokens=16384),
            _long_walks(facts=32, hops=32, tokens=16384),
            _long_walks(facts=64, hops=64, tokens=32768),
            _long_walks(facts=256, hops=256),
            _long_walks(facts=1024, hops=512),
        ),
        (
            (3, _long_walks(facts=1024, hops=1024, restart_rates=MIXED)),
            (2, _long_walks(facts=1024, hops=2047, restart_rates=MIXED)),
            (1, _long_walks(facts=256, hops=1024, restart_rates=MIXED)),
        ),
        dials={"facts": 1024, "hops": 1000, "keys": 1024},
        final_steps=2000,
        learning_rate=1e-3,
    ),
    "self-written-1024": _small(
        "self-written",
        (),
        (
            (2, SelfWrittenStage(keys=1024, hops=1024, tokens=65536)),
            (1, SelfWrittenStage(keys=1024, hops=2047, tokens=65536)),
        ),
        dials={"keys": 1024, "hops": 1000},
        starts_from="pointer-chase-1024",
        final_steps=800,
        learning_rate=3e-4,
    ),
}

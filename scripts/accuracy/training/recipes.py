"""What can be trained: the words, the model, the stages of training, and what it is graded on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.accuracy.tasks import TASKS, Problem
from scripts.accuracy.tasks.vocabulary import task_words
from scripts.accuracy.training.batches import Stage
from scripts.accuracy.training.model import Sizes
from scripts.accuracy.training.texts import TextStage
from scripts.accuracy.training.walks import SelfWrittenStage, WalkStage


@dataclass(frozen=True)
class Recipe:
    """How to train a model.

    Attributes:
        task: that it learns, a name of `scripts.accuracy.tasks.TASKS`.
        dials: of the problems that it is graded on.
        words: of its tokenizer.
        sizes: of the model.
        curriculum: stages in order; each ends when its hops are learned.
        final: stages, with their shares of the steps over which the learning rate decays.
        final_steps: of that decay, if no time is given.
        learning_rate: peak, of AdamW.
        starts_from: the recipe whose model is trained further, if any.
        rope_theta: base frequency of the rotary embedding.
        dtypes: that the export is graded in; the first is its own.
        chains: problems that it is graded on.
    """

    task: str
    dials: Mapping[str, Any]
    words: tuple[str, ...]
    sizes: Sizes
    curriculum: tuple[Stage, ...]
    final: tuple[tuple[float, Stage], ...]
    final_steps: int
    learning_rate: float
    starts_from: str | None = None
    rope_theta: float = 1e5
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # a server may cast to any
    chains: int = 128

    def problem(self, seed: int) -> Problem:
        """What the model is graded on; training never sees it."""
        return TASKS[self.task].make(seed, **self.dials)


TINY = Sizes(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
)
# The shape of a layer is such that attention takes the kernels that it takes for Qwen3-8B.
SMALL = Sizes(
    num_hidden_layers=4,
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=10240,
)
MIXED = (0.0, 0.0, 0.3, 0.7, 1.0)
"""Restart rates once the look-up is learned."""

ANY = (1, 2, 3, 4)
"""Restatements of the model for the jump table."""


def _tiny_walks(**options: Any) -> WalkStage:
    return WalkStage(keys=128, tokens=4096, **options)


def _long_walks(facts: int, hops: int, tokens: int = 65536, **options: Any) -> WalkStage:
    return WalkStage(keys=1024, facts=facts, hops=hops, tokens=tokens, **options)


def _texts(task: str, **dials: int) -> TextStage:
    return TextStage(task, tuple(dials.items()), tokens=4096)


RECIPES = {
    "pointer-chase-128": Recipe(
        task="pointer-chase",
        dials={"facts": 128, "hops": 90},
        words=tuple(task_words(128)),
        sizes=TINY,
        curriculum=(
            _tiny_walks(facts=8, hops=16),
            _tiny_walks(facts=16, hops=16),
            _tiny_walks(facts=32, hops=24),
            _tiny_walks(facts=64, hops=40),
        ),
        final=(
            (5, _tiny_walks(facts=128, hops=128, restart_rates=MIXED)),
            (1, _tiny_walks(facts=32, hops=32, restart_rates=MIXED)),
        ),
        final_steps=1200,
        learning_rate=4e-3,
    ),
    "pointer-chase-128-mixed": Recipe(
        task="pointer-chase",
        dials={"facts": 128, "hops": 90, "announced": True},
        words=tuple(TASKS["pointer-chase"].words(128)),
        sizes=TINY,
        starts_from="pointer-chase-128",
        curriculum=(
            _tiny_walks(facts=8, hops=16, restatements=ANY),
            _tiny_walks(facts=32, hops=24, restatements=ANY),
            _tiny_walks(facts=64, hops=40, restatements=ANY),
        ),
        final=(
            (5, _tiny_walks(facts=128, hops=128, restart_rates=MIXED, restatements=ANY)),
            (1, _tiny_walks(facts=32, hops=32, restart_rates=MIXED, restatements=ANY)),
        ),
        final_steps=1200,
        learning_rate=2e-3,
    ),
    "self-written-128": Recipe(
        task="self-written",
        dials={"keys": 128, "hops": 96},
        words=tuple(task_words(128)),
        sizes=TINY,
        starts_from="pointer-chase-128",
        curriculum=(),
        final=((1, SelfWrittenStage(keys=128, hops=128, tokens=8192)),),
        final_steps=1200,
        learning_rate=2e-3,
    ),
    "majority": Recipe(
        task="majority",
        dials={},
        words=tuple(TASKS["majority"].words(128)),
        sizes=TINY,
        starts_from="pointer-chase-128",
        curriculum=(
            _tiny_walks(facts=16, hops=16, statements=4, rivals=1),
            _tiny_walks(facts=16, hops=16, statements=16, rivals=6),
        ),
        final=(
            (4, _tiny_walks(facts=16, hops=32, statements=16, rivals=8, restart_rates=MIXED)),
            (1, _tiny_walks(facts=16, hops=32, statements=8, rivals=4, restart_rates=MIXED)),
        ),
        final_steps=1200,
        learning_rate=2e-3,
    ),
    "variable-tracking": Recipe(
        task="variable-tracking",
        dials={},
        words=tuple(TASKS["variable-tracking"].words(128)),
        sizes=TINY,
        starts_from="pointer-chase-128",
        curriculum=(
            _texts("variable-tracking", chains=4, hops=4),
            _texts("variable-tracking", chains=6, hops=8),
        ),
        final=(
            (4, _texts("variable-tracking", chains=6, hops=16)),
            (1, _texts("variable-tracking", chains=6, hops=16, filler=8)),
            (1, _texts("variable-tracking", chains=8, hops=8)),
        ),
        final_steps=3000,
        learning_rate=2e-3,
    ),
    "needle": Recipe(
        task="needle",
        dials={},
        words=tuple(TASKS["needle"].words(128)),
        sizes=TINY,
        starts_from="pointer-chase-128",
        curriculum=(
            _texts("needle", needles=8, words=2, asked=8),
            _texts("needle", needles=16, words=4, asked=8),
            _texts("needle", needles=20, words=4, asked=12),
        ),
        final=(
            (4, _texts("needle")),
            (1, _texts("needle", filler=16)),
            (1, _texts("needle", needles=30, asked=24)),
        ),
        final_steps=3000,
        learning_rate=2e-3,
    ),
    "addition": Recipe(
        task="addition",
        dials={},
        words=tuple(TASKS["addition"].words(128)),
        sizes=TINY,
        starts_from="pointer-chase-128",
        curriculum=(
            _texts("addition", digits=8),
            _texts("addition", digits=32),
        ),
        final=(
            (3, _texts("addition", digits=64)),
            (2, _texts("addition", digits=128)),
            (1, _texts("addition", digits=16)),
        ),
        final_steps=3000,
        learning_rate=2e-3,
    ),
    "pointer-chase-1024": Recipe(
        task="pointer-chase",
        dials={"facts": 1024, "hops": 1000, "keys": 1024},
        words=tuple(task_words(1024)),
        sizes=SMALL,
        curriculum=(
            # Until the look-up appears, steps count and not tokens.
            _long_walks(facts=8, hops=16, tokens=16384),
            _long_walks(facts=16, hops=16, tokens=16384),
            _long_walks(facts=32, hops=32, tokens=16384),
            _long_walks(facts=64, hops=64, tokens=32768),
            _long_walks(facts=256, hops=256),
            _long_walks(facts=1024, hops=512),
        ),
        final=(
            (3, _long_walks(facts=1024, hops=1024, restart_rates=MIXED)),
            (2, _long_walks(facts=1024, hops=2047, restart_rates=MIXED)),
            (1, _long_walks(facts=256, hops=1024, restart_rates=MIXED)),
        ),
        final_steps=2000,
        learning_rate=1e-3,
        rope_theta=1e6,
        dtypes=("bfloat16",),
        chains=16,
    ),
    "self-written-1024": Recipe(
        task="self-written",
        dials={"keys": 1024, "hops": 1000},
        words=tuple(task_words(1024)),
        sizes=SMALL,
        starts_from="pointer-chase-1024",
        curriculum=(),
        final=(
            (2, SelfWrittenStage(keys=1024, hops=1024, tokens=65536)),
            (1, SelfWrittenStage(keys=1024, hops=2047, tokens=65536)),
        ),
        final_steps=800,
        learning_rate=3e-4,
        rope_theta=1e6,
        dtypes=("bfloat16",),
        chains=16,
    ),
}

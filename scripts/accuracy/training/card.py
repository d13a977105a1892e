"""The card of a trained model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoConfig

from scripts.accuracy.tasks import TASKS
from scripts.accuracy.training.recipes import Recipe

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}: a small Qwen3 for one task

A `Qwen3ForCausalLM` of {parameters:,} parameters ({num_hidden_layers} layers, hidden size
{hidden_size}, {num_attention_heads} query heads and {num_key_value_heads} key-value heads of size
{head_dim}, {vocab_size} tokens), trained {start} in {precision}. Its only ability is the
task `{task}` of `scripts/accuracy/tasks`, which exposes {exposes}.

Tokens are whole words. An answer has no end of its own: set `max_tokens`. It was trained on
sequences of up to {trained_length:,} tokens; longer ones are untested.

## Accuracy

{decoding} with a KV cache and full attention in transformers, on problems it was not trained on
({dials}):

| dtype | problems | longest decode, tokens | exact | hop accuracy | mean correct prefix, hops | \
smallest margin, nats |
|---|---|---|---|---|---|---|
{rows}

A problem is exact if every word is right. A hop is one lookup. The margin is the distance between
the logits of the first and of the second word, over all words decoded. SGLang casts float32 models
to float16 unless `--dtype` says otherwise.

## How it was made

    {command}

{steps:,} steps of AdamW over {tokens:,} tokens on {device}, {minutes} minutes, seed {seed}. All
training data are generated.

## What it is for

Testing that attention over a sparse, compressed or delayed KV cache still retrieves exact tokens,
and that a server works from end to end. It is **not evidence about real language models**: its keys
are random, its queries repeat by construction, and its margins are far larger than theirs.
"""


@dataclass(frozen=True)
class Making:
    """How an export came to be."""

    FILE: ClassVar[str] = "training.json"

    command: str
    device: str  # name of the machine's processor
    precision: str  # dtype of the computation
    parameters: int  # parameters of the model
    steps: int  # steps, tokens and minutes of training
    tokens: int
    minutes: float
    seed: int  # seed of the weights and the data

    def save(self, folder: Path) -> None:
        """Keep it beside the weights, so that an export can be graded another time."""
        (folder / self.FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Making:
        """Read what `save` wrote."""
        return cls(**json.loads((folder / cls.FILE).read_text()))


def write_card(
    output: Path, name: str, recipe: Recipe, results: Sequence[Mapping[str, Any]]
) -> None:
    """Write `README.md` beside the weights.

    Args:
        output: the export, with its `Making`.
        name: name of the recipe.
        recipe: the recipe that trained it.
        results: what `accuracy.grade_export` returned.
    """
    sampled = recipe.problem(0).sampling["temperature"] > 0
    dials = ", ".join(f"{dial} {value}" for dial, value in recipe.dials.items())
    stages = [*recipe.curriculum, *(stage for _, stage in recipe.final)]
    card = CARD.format(
        **AutoConfig.from_pretrained(output).to_dict(),
        **asdict(Making.load(output)),
        name=name,
        task=recipe.task,
        exposes=TASKS[recipe.task].exposes,
        start=f"from `{recipe.starts_from}`" if recipe.starts_from else "from scratch",
        decoding="Sampling" if sampled else "Greedy decoding",
        dials=dials or "the task's default dials",
        trained_length=max(stage.length for stage in stages),
        rows="\n".join(f"| {' | '.join(map(str, result.values()))} |" for result in results),
    )
    (output / "README.md").write_text(card)

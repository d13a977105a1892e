"""Grades an export under full attention, with transformers, and writes its card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
)

from scripts.accuracy.tasks import TASKS, Problem
from scripts.accuracy.training.recipes import Recipe

PROBLEMS_PER_BATCH = 32

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


class SmallestMargin(LogitsProcessor):
    """Remembers how close the second word came to the first, in nats."""

    def __init__(self) -> None:
        self.value = float("inf")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Leave the scores, [sequences, vocabulary], as they are."""
        best = scores.float().topk(2).values
        self.value = min(self.value, (best[:, 0] - best[:, 1]).min().item())
        return scores


@torch.inference_mode()
def grade_export(
    folder: Path, problems: Sequence[Problem], dtype: str, device: str
) -> dict[str, Any]:
    """Decode problems of one task and one set of dials with the export in a folder.

    Returns:
        The conditions; fractions of exact chains and of correct hops; the mean correct prefix in
        hops; and the smallest margin between the first and the second word, in nats, empty
        if words were sampled.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    sampling = problems[0].sampling
    temperature = sampling["temperature"]
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, **sampling}
    margin = SmallestMargin()
    torch.manual_seed(0)
    grades = []
    batches = range(0, len(problems), PROBLEMS_PER_BATCH)
    for begin in tqdm(batches, desc=f"grade {dtype}", unit="batch", disable=None):
        batch = problems[begin : begin + PROBLEMS_PER_BATCH]
        prompts = tokenizer([p.prompt for p in batch], return_tensors="pt", padding=True)
        decoded = model.generate(
            **prompts.to(device),
            max_new_tokens=max(p.max_tokens for p in batch),
            logits_processor=LogitsProcessorList([margin]),
            **options,
        )[:, prompts["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(decoded, skip_special_tokens=True)
        grades += [problem.grade(text) for problem, text in zip(batch, texts, strict=True)]
    hops = sum(grade.hops for grade in grades)
    return {
        "dtype": dtype,
        "chains": len(problems),
        "tokens": max(problem.max_tokens for problem in problems),
        "exact_chain": round(sum(g.exact for g in grades) / len(grades), 4),
        "hop_accuracy": round(sum(g.correct_hops for g in grades) / hops, 5),
        "correct_prefix_hops": round(sum(g.correct_prefix_hops for g in grades) / len(grades), 2),
        "smallest_margin": "" if temperature else round(margin.value, 2),
    }


def write_card(
    output: Path, name: str, recipe: Recipe, results: Sequence[Mapping[str, Any]]
) -> None:
    """Write `README.md` beside the weights, from the export's Making and what was graded."""
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

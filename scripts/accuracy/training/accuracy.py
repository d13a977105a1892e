"""Grades an export under full attention, with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, Qwen3ForCausalLM

from scripts.accuracy.tasks import Problem

PROBLEMS_PER_BATCH = 32


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
    folder: Path, problems: Sequence[Problem], dtype: str, device: str, seed: int = 0
) -> dict[str, Any]:
    """Decode problems with a KV cache.

    Args:
        folder: holds the export.
        problems: have one task and one set of dials; they say whether they are sampled.
        dtype: that of the weights and of the computation.
        device: the device that decodes.
        seed: seed of the sampling.

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
    torch.manual_seed(seed)
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

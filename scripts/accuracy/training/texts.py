"""Training sequences made from the problems of a task, by worker processes beside a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from scripts.accuracy.tasks import TASKS, Problem
from scripts.accuracy.training.batches import Batch
from scripts.accuracy.training.tokenizer import BOS, EOS

FIRST_SEED = 1 << 32
"""The problems that are trained on have seeds from here; those below are for evaluations."""

WORKERS = 8


@dataclass(frozen=True)
class TextStage:
    """Problems with given dials, each followed by its answer.

    Attributes:
        task: a name of `TASKS`.
        dials: names and values of the problems' dials.
        tokens: rough size of a batch.
    """

    task: str
    dials: tuple[tuple[str, int], ...]
    tokens: int

    @cached_property
    def length(self) -> int:
        problems = (self.problem(FIRST_SEED + index) for index in range(32))
        return max(len(p.prompt.split()) + len(p.answer) for p in problems)

    def problem(self, seed: int) -> Problem:
        return TASKS[self.task].make(seed, **dict(self.dials))

    def batches(
        self, vocabulary: Mapping[str, int], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        # Beside a CPU that trains, workers would take its cores.
        workers = min(WORKERS, (os.cpu_count() or 1) - 1) if device.type == "cuda" else 0
        loader = DataLoader(_Problems(self, vocabulary, seed), batch_size=None, num_workers=workers)
        for batch in loader:
            yield Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))


class _Problems(IterableDataset[Batch]):
    """Batches without end; every worker has seeds of its own."""

    def __init__(self, stage: TextStage, vocabulary: Mapping[str, int], seed: int) -> None:
        self.stage, self.vocabulary, self.seed = stage, vocabulary, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        size = max(1, round(self.stage.tokens / self.stage.length))
        while True:
            problems = [self.stage.problem(rng.randrange(FIRST_SEED, 1 << 62)) for _ in range(size)]
            yield encode(problems, self.vocabulary)


def encode(problems: list[Problem], vocabulary: Mapping[str, int]) -> Batch:
    """Prompts and answers, padded to the longest on the right; only answers have weight."""
    rows = [_encode(problem, vocabulary) for problem in problems]
    fills = (vocabulary[EOS], vocabulary[EOS], 0.0, False)
    columns = zip(*rows, strict=True)
    padded = (
        pad_sequence(list(column), batch_first=True, padding_value=fill)
        for column, fill in zip(columns, fills, strict=True)
    )
    return Batch(*padded)


def _encode(problem: Problem, vocabulary: Mapping[str, int]) -> Batch:
    """A batch's rows of one problem, [length] each."""
    prompt = [BOS, *problem.prompt.split()]
    words = [*prompt, *problem.answer]
    tokens = torch.tensor([vocabulary[word] for word in words])
    weights = torch.zeros(len(words) - 1)
    weights[len(prompt) - 1 :] = torch.tensor(problem.determined, dtype=torch.float32)
    # Whatever is no restatement: in some tasks more is found than what counts as a hop in a grade.
    return Batch(tokens[:-1], tokens[1:], weights, (tokens[:-1] != tokens[1:]) & (weights > 0))

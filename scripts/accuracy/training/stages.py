"""What training steps read: walks made on the device that trains, and problems made as text.

The words of a pointer chase are made on the device, because text would be too slow. Two things
decide whether the look-up is learned. In a walk along one cycle a model can guess values by
elimination and from the order of earlier hops; walks that restart at random keys leave it only the
table. But a model that has seen only restarts breaks on long uninterrupted walks, so that the last
stages mix the restart rates.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from scripts.accuracy.tasks import TASKS, Problem
from scripts.accuracy.tasks.pointer_chase import restatements_word
from scripts.accuracy.tasks.vocabulary import WALK, key_word, value_word
from scripts.accuracy.training.model import BOS, EOS

SAMPLED = 0.05
"""A token that nothing determines has this weight where the model must learn to sample it."""

FIRST_SEED = 1 << 32
"""The problems that are trained on have seeds from here; those below are for evaluations."""

WORKERS = 8
"""So many processes make texts beside a GPU that trains."""


class Batch(NamedTuple):
    """Sequences of one shape, [sequences, length] each, on the device that trains.

    The accuracy of hops says how far training is: they take a look-up and are no restatement.
    """

    tokens: torch.Tensor  # what the model reads, int64
    labels: torch.Tensor  # the token after each of them, int64
    weights: torch.Tensor  # weights in the loss, float32; 0 where nothing determines it
    hops: torch.Tensor  # labels that are hops, bool


class Stage(ABC):
    """One shape of training sequences."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of its longest sequence that the model reads."""

    @abstractmethod
    def batches(
        self, vocabulary: Mapping[str, int], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        """Batches without end, a function of the seed and the device."""


@dataclass(frozen=True)
class TextStage(Stage):
    """Problems with given dials, each followed by its answer; only answers have weight."""

    task: str  # a name of TASKS
    dials: tuple[tuple[str, int], ...]  # names and values
    tokens: int  # rough size of a batch

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
    return Batch(
        *(
            pad_sequence(list(column), batch_first=True, padding_value=fill)
            for column, fill in zip(zip(*rows, strict=True), fills, strict=True)
        )
    )


def _encode(problem: Problem, vocabulary: Mapping[str, int]) -> Batch:
    """A batch's rows of one problem, [length] each."""
    prompt = [BOS, *problem.prompt.split()]
    words = [*prompt, *problem.answer]
    tokens = torch.tensor([vocabulary[word] for word in words])
    weights = torch.zeros(len(words) - 1)
    weights[len(prompt) - 1 :] = torch.tensor(problem.determined, dtype=torch.float32)
    # Whatever is no restatement: in some tasks more is found than what counts as a hop in a grade.
    return Batch(tokens[:-1], tokens[1:], weights, (tokens[:-1] != tokens[1:]) & (weights > 0))


class _WalkingStage(Stage):
    """A table, and walks through it that may restart at random keys."""

    def batches(
        self, vocabulary: Mapping[str, int], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        generator = torch.Generator(device).manual_seed(seed)
        while True:
            with device:  # where tensors are made
                batch = self._batch(vocabulary, generator)
            yield batch

    @abstractmethod
    def _batch(self, vocabulary: Mapping[str, int], generator: torch.Generator) -> Batch:
        """Another batch, made on the device of the generator."""


@dataclass(frozen=True)
class WalkStage(_WalkingStage):
    """Tables in the prompt, and walks through them.

    A walk draws one of the restart rates and one of the numbers of restatements; if there are
    several of these, a word before the walk says which. Statements stand in random order.
    """

    keys: int  # keys that the words name
    facts: int  # pairs of a table: one cycle over random keys
    hops: int  # hops of a walk that restates keys most often
    tokens: int  # rough size of a batch
    restart_rates: tuple[float, ...] = (0.7,)  # probabilities that a hop starts at a random key
    restatements: tuple[int, ...] = (3,)  # how often a walk states a key
    statements: int = 1  # statements of each fact
    rivals: int = 0  # statements of each fact's key with one other value, which are fewer

    @property
    def stated(self) -> int:
        """Pairs of the prompt."""
        return self.facts * (self.statements + self.rivals)

    @property
    def walk_tokens(self) -> int:
        return self.hops * (max(self.restatements) + 1)

    @property
    def length(self) -> int:
        # The model reads BOS, the facts, `go` and all words of the walk but the last.
        return 1 + 2 * self.stated + (len(self.restatements) > 1) + self.walk_tokens

    def _batch(self, vocabulary: Mapping[str, int], generator: torch.Generator) -> Batch:
        draw = partial(torch.randint, generator=generator)
        walks = max(1, round(self.tokens / self.length))
        cycle = _permutations(walks, self.keys, generator)[:, : self.facts]
        which = draw(len(self.restatements), (walks, 1))
        restatements = torch.tensor(self.restatements)[which]
        rates = torch.tensor(self.restart_rates)[draw(len(self.restart_rates), (walks, 1))]
        hops = self.walk_tokens // (min(self.restatements) + 1) + 1
        begin, restarted = _segments(rates, hops, generator)
        start = draw(self.facts, (walks, hops)).gather(1, begin)
        position = start + torch.arange(hops) - begin
        keys = cycle.gather(1, position % self.facts)
        values = cycle.gather(1, (position + 1) % self.facts)

        table = _pairs(vocabulary, *self._table(cycle, generator))
        prompt = [torch.full((walks, 1), vocabulary[BOS]), table]
        if len(self.restatements) > 1:
            announced = [vocabulary[restatements_word(r)] for r in self.restatements]
            prompt.append(torch.tensor(announced)[which])
        head = torch.cat([*prompt, torch.full((walks, 1), vocabulary[WALK])], dim=1)
        walk = _walk(vocabulary, keys, values, restatements, self.walk_tokens)
        determined = (walk.place > 0) | ~restarted.gather(1, walk.hop)
        return _shifted(head, torch.zeros_like(head), walk, determined)

    def _table(
        self, cycle: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prompt in random order, [walks, stated]."""
        values = cycle.roll(-1, 1).repeat(1, self.statements)
        if self.rivals:
            # From the second key after it on, so that a rival is neither the key nor its value.
            ahead = torch.randint(2, self.facts, cycle.shape, generator=generator)
            rival = cycle.gather(1, (torch.arange(self.facts) + ahead) % self.facts)
            values = torch.cat([values, rival.repeat(1, self.rivals)], dim=1)
        keys = cycle.repeat(1, self.statements + self.rivals)
        order = _permutations(len(cycle), self.stated, generator)
        return keys.gather(1, order), values.gather(1, order)


@dataclass(frozen=True)
class SelfWrittenStage(_WalkingStage):
    """The model writes the table itself, then the walk.

    The table names all keys in ascending order from a random one, each with a random value. What
    nothing determines has a small weight: the model learns to sample it, and its gradient does not
    drown that of the look-ups.
    """

    keys: int  # keys that the words name, all in the table
    hops: int  # hops of a walk
    tokens: int  # rough size of a batch
    restart_rate: float = 0.3  # probability that a hop starts at a random key
    restatements: int = 3  # how often a walk states a key

    @property
    def length(self) -> int:
        return 1 + 2 * self.keys + self.hops * (self.restatements + 1)

    def _batch(self, vocabulary: Mapping[str, int], generator: torch.Generator) -> Batch:
        draw = partial(torch.randint, generator=generator)
        walks = max(1, round(self.tokens / self.length))
        table_keys = (draw(self.keys, (walks, 1)) + torch.arange(self.keys)) % self.keys
        table_values = draw(self.keys, (walks, self.keys))
        successor = torch.zeros_like(table_values).scatter_(1, table_keys, table_values)
        begin, _ = _segments(torch.full((walks, 1), self.restart_rate), self.hops, generator)
        keys = draw(self.keys, (walks, self.hops)).gather(1, begin)
        age = torch.arange(self.hops) - begin
        for done in range(int(age.max())):
            keys = torch.where(age > done, successor.gather(1, keys), keys)

        restatements = torch.full((walks, 1), self.restatements)
        tokens = self.hops * (self.restatements + 1)
        walk = _walk(vocabulary, keys, successor.gather(1, keys), restatements, tokens)
        bos, go = (torch.full((walks, 1), vocabulary[word]) for word in (BOS, WALK))
        prompt = torch.cat([bos, _pairs(vocabulary, table_keys, table_values), go], dim=1)
        weights = torch.ones(prompt.shape)
        weights[:, 1] = SAMPLED  # the first key
        weights[:, 2::2] = SAMPLED  # values
        # A restart is sampled at every hop: one weight for both outcomes keeps its probability.
        return _shifted(prompt, weights, walk, torch.where(walk.place > 0, 1.0, SAMPLED))


class _Walk(NamedTuple):
    """Words of walks, [walks, words] each."""

    tokens: torch.Tensor  # the words, int64
    hop: torch.Tensor  # hop of each word, int64
    place: torch.Tensor  # 0 for the first statement of a hop's key, and so on to its value, int64
    is_value: torch.Tensor  # bool


def _permutations(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Random permutations, int64 [rows, size]."""
    return torch.rand(rows, size, generator=generator).argsort(1)


def _segments(
    rates: torch.Tensor, hops: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut walks where they restart, with the probability `rates`, [walks, 1], at every hop.

    Returns:
        The hop at which each hop's segment began, int64, and where one begins, bool, both
        [walks, hops]. The first hop begins one.
    """
    restarted = torch.rand(len(rates), hops, generator=generator) < rates
    restarted[:, 0] = True
    return torch.where(restarted, torch.arange(hops), 0).cummax(1).values, restarted


def _pairs(vocabulary: Mapping[str, int], keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The words of a table, [walks, 2 * facts]."""
    first_key, first_value = vocabulary[key_word(0)], vocabulary[value_word(0)]
    return torch.stack([keys + first_key, values + first_value], dim=-1).flatten(1)


def _walk(
    vocabulary: Mapping[str, int],
    keys: torch.Tensor,  # [walks, hops]
    values: torch.Tensor,  # [walks, hops]
    restatements: torch.Tensor,  # [walks, 1]
    words: int,
) -> _Walk:
    """Write so many words of walks down."""
    word = torch.arange(words)
    hop, place = word // (restatements + 1), word % (restatements + 1)
    is_value = place == restatements
    key_tokens = keys.gather(1, hop) + vocabulary[key_word(0)]
    value_tokens = values.gather(1, hop) + vocabulary[value_word(0)]
    return _Walk(torch.where(is_value, value_tokens, key_tokens), hop, place, is_value)


def _shifted(
    prompt: torch.Tensor, prompt_weights: torch.Tensor, walk: _Walk, walk_weights: torch.Tensor
) -> Batch:
    """Shift prompts and walks, with the weight of each word, against themselves."""
    tokens = torch.cat([prompt, walk.tokens], dim=1)
    weights = torch.cat([prompt_weights.float(), walk_weights.float()], dim=1)
    hops = torch.cat([torch.zeros_like(prompt, dtype=torch.bool), walk.is_value], dim=1)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:], hops[:, 1:])

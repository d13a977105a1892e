"""Walks of the restated pointer chase, made on the device that trains: text would be too slow.

Two things decide whether the look-up is learned. In a walk along one cycle a model can guess values
by elimination and from the order of earlier hops; walks that restart at random keys leave it only
the table. But a model that has seen only restarts breaks on long uninterrupted walks, so that the
last stages mix the restart rates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from scripts.accuracy.tasks.pointer_chase import restatements_word
from scripts.accuracy.tasks.vocabulary import WALK, key_word, value_word
from scripts.accuracy.training.batches import SAMPLED, Batch
from scripts.accuracy.training.tokenizer import BOS


class _GeneratedStage(ABC):
    """Makes its batches on the device that they are for."""

    def batches(
        self, vocabulary: Mapping[str, int], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        generator = torch.Generator(device).manual_seed(seed)
        while True:
            yield self._batch(vocabulary, generator)

    @abstractmethod
    def _batch(self, vocabulary: Mapping[str, int], generator: torch.Generator) -> Batch:
        """Another batch."""


@dataclass(frozen=True)
class WalkStage(_GeneratedStage):
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
        device = generator.device
        walks = max(1, round(self.tokens / self.length))
        cycle = _permutations(walks, self.keys, generator)[:, : self.facts]
        size = (walks, 1)
        which = torch.randint(len(self.restatements), size, generator=generator, device=device)
        restatements = torch.tensor(self.restatements, device=device)[which]
        rate = torch.randint(len(self.restart_rates), size, generator=generator, device=device)
        rates = torch.tensor(self.restart_rates, device=device)[rate]
        hops = self.walk_tokens // (min(self.restatements) + 1) + 1
        begin, restarted = _segments(rates, hops, generator)
        start = torch.randint(self.facts, (walks, hops), generator=generator, device=device)
        position = start.gather(1, begin) + torch.arange(hops, device=device) - begin
        keys = cycle.gather(1, position % self.facts)
        values = cycle.gather(1, (position + 1) % self.facts)

        table = _pairs(vocabulary, *self._table(cycle, generator))
        prompt = [torch.full(size, vocabulary[BOS], device=device), table]
        if len(self.restatements) > 1:
            words = [vocabulary[restatements_word(r)] for r in self.restatements]
            prompt.append(torch.tensor(words, device=device)[which])
        prompt.append(torch.full(size, vocabulary[WALK], device=device))
        head = torch.cat(prompt, dim=1)
        words_of_walk = _walk(vocabulary, keys, values, restatements, self.walk_tokens)
        determined = (words_of_walk.place > 0) | ~restarted.gather(1, words_of_walk.hop)
        return _shifted(head, torch.zeros_like(head), words_of_walk, determined)

    def _table(
        self, cycle: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prompt in random order, [walks, stated]."""
        values = cycle.roll(-1, 1).repeat(1, self.statements)
        if self.rivals:
            # From the second key after it on, so that a rival is neither the key nor its value.
            ahead = torch.randint(
                2, self.facts, cycle.shape, generator=generator, device=cycle.device
            )
            rival = (torch.arange(self.facts, device=cycle.device) + ahead) % self.facts
            values = torch.cat([values, cycle.gather(1, rival).repeat(1, self.rivals)], dim=1)
        keys = cycle.repeat(1, self.statements + self.rivals)
        order = _permutations(len(cycle), self.stated, generator)
        return keys.gather(1, order), values.gather(1, order)


@dataclass(frozen=True)
class SelfWrittenStage(_GeneratedStage):
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
        device = generator.device
        walks = max(1, round(self.tokens / self.length))
        first = torch.randint(self.keys, (walks, 1), generator=generator, device=device)
        table_keys = (first + torch.arange(self.keys, device=device)) % self.keys
        table_values = torch.randint(
            self.keys, (walks, self.keys), generator=generator, device=device
        )
        successor = torch.zeros_like(table_values).scatter_(1, table_keys, table_values)
        rates = torch.full((walks, 1), self.restart_rate, device=device)
        begin, _ = _segments(rates, self.hops, generator)
        start = torch.randint(self.keys, (walks, self.hops), generator=generator, device=device)
        keys = start.gather(1, begin)
        age = torch.arange(self.hops, device=device) - begin
        for done in range(int(age.max())):
            keys = torch.where(age > done, successor.gather(1, keys), keys)

        restatements = torch.full((walks, 1), self.restatements, device=device)
        tokens = self.hops * (self.restatements + 1)
        walk = _walk(vocabulary, keys, successor.gather(1, keys), restatements, tokens)
        prompt = torch.cat(
            [
                torch.full((walks, 1), vocabulary[BOS], device=device),
                _pairs(vocabulary, table_keys, table_values),
                torch.full((walks, 1), vocabulary[WALK], device=device),
            ],
            dim=1,
        )
        weights = torch.ones(prompt.shape, device=device)
        weights[:, 1] = SAMPLED  # the first key
        weights[:, 2::2] = SAMPLED  # values
        # A restart is sampled at every hop: one weight for both outcomes keeps its probability.
        walk_weights = torch.where(walk.place > 0, 1.0, SAMPLED)
        return _shifted(prompt, weights, walk, walk_weights)


class _Walk(NamedTuple):
    """Words of walks, [walks, words] each."""

    tokens: torch.Tensor  # the words, int64
    hop: torch.Tensor  # hop of each word, int64
    place: torch.Tensor  # 0 for the first statement of a hop's key, and so on to its value, int64
    is_value: torch.Tensor  # bool


def _permutations(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Random permutations, int64 [rows, size]."""
    return torch.rand(rows, size, generator=generator, device=generator.device).argsort(1)


def _segments(
    rates: torch.Tensor, hops: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut walks where they restart.

    Args:
        rates: probability of a restart, [walks, 1].

    Returns:
        The hop at which each hop's segment began, int64, and where one begins, bool, both
        [walks, hops]. The first hop begins one.
    """
    device = rates.device
    draws = torch.rand(len(rates), hops, generator=generator, device=device)
    restarted = draws < rates
    restarted[:, 0] = True
    begin = torch.where(restarted, torch.arange(hops, device=device), 0).cummax(1).values
    return begin, restarted


def _pairs(vocabulary: Mapping[str, int], keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The words of a table, [walks, 2 * facts]."""
    first_key, first_value = vocabulary[key_word(0)], vocabulary[value_word(0)]
    return torch.stack([keys + first_key, values + first_value], dim=-1).flatten(1)


def _walk(
    vocabulary: Mapping[str, int],
    keys: torch.Tensor,
    values: torch.Tensor,
    restatements: torch.Tensor,
    words: int,
) -> _Walk:
    """Write walks down.

    Args:
        keys, values: one of each a hop, [walks, hops].
        restatements: one number a walk, [walks, 1].
        words: number of words to write.
    """
    word = torch.arange(words, device=keys.device)
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

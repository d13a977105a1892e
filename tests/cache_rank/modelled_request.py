"""A request with random tensors, its slots as the inference rank holds them, and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.checksum.reference import slots_checksum
from cache_rank.kernels.wire.reference import from_wire, to_wire
from cache_rank.protocol import NO_SEQUENCE, AnswerHeader, DownMessage, Row, UpMessage
from cache_rank.reference import SynchronousReference
from cache_rank.schedule import LayerMessage


class Computed(NamedTuple):
    """What a forward pass computes for a token.

    Attributes:
        queries, keys, values: (layers, heads, D) each.
        hidden: (groups, H), what enters each layer group.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor


def pack_up(
    config: CacheRankConfig,
    layer_message: LayerMessage,
    computed: Sequence[Computed],
    device: torch.device | str = "cpu",
) -> UpMessage:
    """A message in which each row computed something."""
    size = UpMessage.size(config, layer_message, len(computed))
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    up = UpMessage(config, layer_message, len(computed), memory)
    fill_up(up, config, layer_message, computed)
    return up


def fill_up(
    up: UpMessage,
    config: CacheRankConfig,
    layer_message: LayerMessage,
    computed: Sequence[Computed],
) -> None:
    for index, (queries, keys, values, hidden) in enumerate(computed):
        if layer_message.kv_of is not None:
            layers = config.groups[layer_message.kv_of]
            of_group = slice(layers.start, layers.stop)
            up.queries[index] = queries[of_group]
            up.keys[index] = keys[of_group]
            up.values[index] = values[of_group]
        if layer_message.hidden_of is not None:
            up.hidden[index] = hidden[layer_message.hidden_of]


def assert_refused(answers: Sequence[DownMessage], row: int) -> None:
    for answer in answers:
        assert (answer.header[row] == NO_SEQUENCE).all()
        assert (answer.slots[row] == -1).all()


class Request:
    """A request on the inference rank: its stream of tensors, its slots and their reference."""

    def __init__(self, config: CacheRankConfig, sequence_id: int, prompt: int) -> None:
        model = config.model
        self.config = config
        self.sequence_id = sequence_id
        self.position = prompt
        """Of the next token."""
        self._generator = torch.Generator().manual_seed(sequence_id)
        self.prompt = self._random(2, model.layers, prompt, model.kv_heads, model.head_dim)
        self.reference = SynchronousReference(config, *self.prompt)
        self._query = self._random(model.layers, model.query_heads, model.head_dim).float()
        slots = (model.layers, model.kv_heads, config.sparse_budget, model.head_dim)
        self.keys = torch.zeros(slots, dtype=model.torch_dtype)
        self.values = torch.zeros(slots, dtype=model.torch_dtype)
        self.filled = self.fresh_filled = 0

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.config.model.torch_dtype)

    @property
    def row(self) -> Row:
        """Of the step of the next token."""
        return Row(self.sequence_id, self.position)

    def compute(self) -> Computed:
        """What a forward pass computes for the next token; its queries drift."""
        model = self.config.model
        noise = self._random(model.layers, model.query_heads, model.head_dim)
        self._query = 0.9 * self._query + 0.6 * noise.float()
        keys, values = self._random(2, model.layers, model.kv_heads, model.head_dim)
        hidden = 5 * self._random(len(self.config.groups), model.hidden_size)
        queries = self._query.to(model.torch_dtype)
        return Computed(queries, keys, values, hidden)

    def choose(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> None:
        """Let the reference append the token and choose, as the messages of a step follow."""
        config = self.config
        for message in config.layer_messages:
            if message.kv_of is not None:
                for layer in config.groups[message.kv_of]:
                    self.reference.append(layer, queries[layer], keys[layer], values[layer])
            group = message.selects_for
            for layer in () if group is None else config.groups[group]:
                if message.same_step:
                    self.reference.select_now(layer, hidden[message.hidden_of], self.position)
                else:
                    tells = None if message.hidden_of is None else hidden[message.hidden_of]
                    self.reference.select(layer, self.position, tells)
        self.filled = config.filled_after(self.position, self.filled)
        self.fresh_filled = config.filled_after(self.position - 1, self.fresh_filled)
        self.position += 1

    def same_step(self, layer: int) -> bool:
        """Whether the answer for a layer is for the step itself."""
        messages = self.config.layer_messages
        fresh = {message.selects_for for message in messages if message.same_step}
        return layer // self.config.layers_per_group in fresh

    def used(self, layer: int) -> int:
        """Slots in use in a layer, by its newest answer."""
        return self.fresh_filled if self.same_step(layer) else self.filled

    def apply(self, layers: range, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the answer for a group, (len(layers), Hkv, C[, width]), into the slots."""
        keys, values = from_wire(keys, self.keys.dtype), from_wire(values, self.values.dtype)
        for layer, head, entry in (slots >= 0).nonzero().tolist():
            slot = slots[layer, head, entry]
            self.keys[layers[layer], head, slot] = keys[layer, head, entry]
            self.values[layers[layer], head, slot] = values[layer, head, entry]

    def check_answers(self, step: int, index: int, answers: Sequence[DownMessage]) -> None:
        """Apply a row's answers and compare with the reference, which has chosen already."""
        for layers, answer in zip(self.config.groups, answers, strict=True):
            slots = answer.slots[index]
            self.apply(layers, slots, answer.keys[index], answer.values[index])
            filled = self.used(layers.start)
            used = (slice(layers.start, layers.stop), slice(None), slice(filled))
            checksum = slots_checksum(self.keys[used], self.values[used])
            assert AnswerHeader(*answer.header[index].tolist()) == AnswerHeader(
                step=step,
                sequence_id=self.sequence_id,
                resident_tokens=self.position - self.same_step(layers.start),
                filled_slots=filled,
                shipped_tokens=int((slots >= 0).sum()),
                checksum=checksum if self.config.checksum else 0,
            )
        self.assert_slots_are_those_of_the_reference()

    def assert_slots_are_those_of_the_reference(self) -> None:
        for layer in range(self.config.model.layers):
            for head in range(self.config.model.kv_heads):
                tokens = self.reference.slots[layer][head]
                assert [token is not None for token in tokens] == [
                    slot < self.used(layer) for slot in range(len(tokens))
                ]
                used = self.used(layer)
                chosen = torch.tensor(tokens[:used], dtype=torch.int64)
                for held, source in (
                    (self.keys, self.reference.keys),
                    (self.values, self.reference.values),
                ):
                    shipped = to_wire(source[layer][head, chosen], self.config.wire_torch_dtype)
                    read = from_wire(shipped, held.dtype)
                    assert torch.equal(held[layer, head, :used], read)

"""A request with random tensors, its slots as the inference rank holds them, and its reference."""

from __future__ import annotations

import torch
from cache_rank_kernels.fp8.reference import convert, round_to_fp8
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.reference import SynchronousReference


class Request:
    """A request on the inference rank: its stream of tensors, its slots and their reference."""

    def __init__(self, config: CacheRankConfig, epoch: int, prompt: int) -> None:
        model = config.model
        self.config = config
        self.epoch = epoch
        self.position = prompt
        """Of the next token."""
        self._generator = torch.Generator().manual_seed(epoch)
        self.prompt = self._random(2, model.layers, prompt, model.kv_heads, model.head_dim)
        self.prompt[0] = self._scored_exactly(self.prompt[0])
        self.reference = SynchronousReference(config, *self.prompt)
        self._query = self._random(model.layers, model.query_heads, model.head_dim).float()
        slots = (model.layers, model.kv_heads, config.sparse_budget, model.head_dim)
        self.keys = torch.zeros(slots, dtype=model.torch_dtype)
        self.values = torch.zeros(slots, dtype=model.torch_dtype)
        self.filled = 0

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.config.model.torch_dtype)

    def _scored_exactly(self, keys: Tensor) -> Tensor:
        """Keys that the reference, which knows no coarse copy of them, scores as a copy scores."""
        if self.config.score_keys == "fp8":
            keys = round_to_fp8(keys).to(keys.dtype)
        return keys

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """The next token's queries, which drift, and keys and values: (layers, heads, D) each."""
        model = self.config.model
        noise = self._random(model.layers, model.query_heads, model.head_dim)
        self._query = 0.9 * self._query + 0.6 * noise.float()
        keys, values = self._random(2, model.layers, model.kv_heads, model.head_dim)
        return self._query.to(model.torch_dtype), self._scored_exactly(keys), values

    def choose(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Let the reference append the token and choose those of the next step."""
        for layer in range(self.config.model.layers):
            self.reference.append(layer, queries[layer], keys[layer], values[layer])
            self.reference.select(layer, self.position)
        self.filled = self.config.filled_after(self.position, self.filled)
        self.position += 1

    def apply(self, layers: range, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the answer for a group, (len(layers), Hkv, C[, D]), into the slots."""
        for layer, head, entry in (slots >= 0).nonzero().tolist():
            slot = slots[layer, head, entry]
            self.keys[layers[layer], head, slot] = keys[layer, head, entry]
            self.values[layers[layer], head, slot] = values[layer, head, entry]

    def assert_slots_are_those_of_the_reference(self) -> None:
        for layer in range(self.config.model.layers):
            for head in range(self.config.model.kv_heads):
                tokens = self.reference.slots[layer][head]
                assert [token is not None for token in tokens] == [
                    slot < self.filled for slot in range(len(tokens))
                ]
                chosen = torch.tensor(tokens[: self.filled], dtype=torch.int64)
                for held, source in (
                    (self.keys, self.reference.keys),
                    (self.values, self.reference.values),
                ):
                    shipped = convert(source[layer][head, chosen], self.config.wire_torch_dtype)
                    assert torch.equal(held[layer, head, : self.filled], shipped.to(held.dtype))

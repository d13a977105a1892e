"""A sequence in the `mosaickv` residency, driven as the selector drives it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import held_sequences
import torch
from small_models import MHA
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.kernels.mosaickv.store import Strategy, load_vectors, packed_tokens, runs_of
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS

DENSE: dict[str, Any] = {"rate": 0, "dropped": 0}
SHORT: dict[str, Any] = {"segment": 512, "threshold": 20, "dropped": 25}
"""Segments of 128 to 512 tokens; their own strategies are due after 64 more."""
WIDE = ModelShape(2, 4, 2, 64, "float32", 1 / 8)


def drifting(model: ModelShape, count: int, seed: int = 0) -> Tensor:
    """K and V, (2, layers, Hkv, count, D), of few directions that change every 300 tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, model.layers, model.kv_heads)
    parts = []
    for first in range(0, count, 300):
        basis = torch.randn((*shape, 3, model.head_dim), generator=generator)
        weights = torch.randn((*shape, min(300, count - first), 3), generator=generator)
        parts.append(weights @ basis)
    noise = torch.randn((*shape, count, model.head_dim), generator=generator)
    return (torch.cat(parts, dim=3) + 0.1 * noise).to(model.torch_dtype)


class Held(held_sequences.Held):
    """A sequence of given tokens in the residency."""

    @classmethod
    def empty(cls, tokens: Tensor, model: ModelShape = MHA, **arguments: Any) -> Held:
        return super().empty("mosaickv", tokens, model, **arguments)

    @property
    def segments(self) -> Any:
        return self.residency._segments[self.slot]

    def read(self, tokens: range | None = None) -> Tensor:
        positions = torch.tensor(tokens or range(self.resident))
        return torch.stack(super().read(positions=positions))

    def queries(self, seed: int = 5) -> Tensor:
        model = self.config.model
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((model.layers, model.query_heads, model.head_dim), generator=generator)

    def strategies(self, layer: int = 0) -> list[Strategy]:
        """Of each buffer in the pages."""
        return [
            strategy
            for first, last, strategy in self.runs(layer)
            for _ in range(first, last, BUFFER_TOKENS)
        ]

    def runs(self, layer: int) -> list[tuple[int, int, Strategy]]:
        """The strategies of the tokens in the pages."""
        store = self.residency._memory.store
        packed = packed_tokens(store, self.slot, self.resident)
        return list(runs_of(store, self.slot, layer, packed))

    def codes(self) -> list[bytes]:
        """Of all that is in the pages, with the rotations that it is relative to."""
        found = []
        pages, store = torch.tensor(self.pages), self.residency._memory.store
        heads = torch.arange(self.config.model.kv_heads).unsqueeze(-1)
        for layer in self.layers:
            for first, last, strategy in self.runs(layer):
                position = torch.arange(first, last)
                vectors_of_run = [
                    load_vectors(store, plane, pages, layer, heads, position, strategy)
                    for plane in (store.keys, store.values)
                ]
                for vectors in (*vectors_of_run, (strategy.rotations,)):
                    found += [
                        part.contiguous().view(torch.uint8).numpy().tobytes() for part in vectors
                    ]
        return found


class Immediately(Executor):
    """The thread is done before anything else happens."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future

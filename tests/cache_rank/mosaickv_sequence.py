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
from cache_rank.kernels.mosaickv.vectors import Strategy, bitmap_bytes
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
        return self.residency._memory.store.runs(self.slot, layer, self.resident)

    def codes(self) -> list[bytes]:
        """Of all that is in the pages, with the rotations that it is relative to."""
        found = []
        pages, store = torch.tensor(self.pages), self.residency._memory.store
        for layer in self.layers:
            for first, last, strategy in self.runs(layer):
                position = torch.arange(first, last)
                page, entry = pages[position // store.page_tokens], position % store.page_tokens
                width = bitmap_bytes(strategy.rotations.shape[-1], strategy.group)
                parts = [strategy.rotations]
                for elements, bitmap in (store.keys, store.values):
                    parts.append(elements[page, layer, :, entry, : strategy.kept])
                    parts.append(bitmap[page, layer, :, entry, :width])
                found += [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
        return found


class Immediately(Executor):
    """The thread is done before anything else happens."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future

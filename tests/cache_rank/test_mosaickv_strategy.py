"""`mosaickv`: which strategy each token has and when, and how strategies are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mosaickv_sequence import SHORT, WIDE, Held, drifting
from small_models import MHA
from torch import Tensor

from cache_rank.kernels.mosaickv.vectors import Strategy, decode, lost_energy, rotation_of
from cache_rank.residency.mosaickv import MosaicKVResidency
from cache_rank.residency.mosaickv.segments import OPENING_TOKENS
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS, Compression


@dataclass
class Expected:
    """What a sequence should hold, from the whole of it at once."""

    ends: list[int]
    strategies: list[list[Strategy]]
    buffers: list[int]

    @classmethod
    def of(cls, held: Held) -> Expected:
        options, model = held.config.kv_residency_options, held.config.model
        compression = Compression(MosaicKVResidency.settings(options), model)
        count = held.resident // BUFFER_TOKENS * BUFFER_TOKENS
        ends: list[int] = []
        strategies: list[list[Strategy]] = []
        temporary: list[int] = []  # strategy that each buffer is first compressed by
        losses: list[float] = []

        def due(index: int) -> int:
            return ends[index] + (compression.step if index else 0)

        start = 0
        for last in range(BUFFER_TOKENS, count + 1, BUFFER_TOKENS):
            first = last - BUFFER_TOKENS
            if last <= OPENING_TOKENS:
                temporary.append(0)
            else:
                temporary.append(max(i for i in range(len(ends)) if due(i) <= first))
                part = held.tokens[..., first:last, :]
                losses.append(
                    sum(
                        float(lost_energy(part[:, layer], strategy.compress(part[:, layer])).sum())
                        for layer, strategy in enumerate(strategies[temporary[-1]])
                    )
                    / (2 * model.kv_heads * model.layers)
                )
            length = last - start
            if last == OPENING_TOKENS or (
                last > OPENING_TOKENS
                and length >= compression.shortest
                and length % compression.step == 0
                and (
                    length == compression.longest
                    or sum(losses[: -compression.step // BUFFER_TOKENS]) > compression.threshold
                )
            ):
                segment = held.tokens[..., start:last, :]
                exact = segment.double()
                covariance = exact.transpose(-1, -2) @ exact
                strategies.append(
                    [
                        compression.choose(
                            segment[:, layer], compression.rotations(covariance[:, layer])
                        )
                        for layer in range(model.layers)
                    ]
                )
                ends.append(last)
                start, losses = last, []
        buffers = temporary if count >= OPENING_TOKENS else []
        for index, end in enumerate(ends):
            if due(index) <= count:
                begin = ends[index - 1] if index else 0
                size = (end - begin) // BUFFER_TOKENS
                buffers[begin // BUFFER_TOKENS : end // BUFFER_TOKENS] = [index] * size
        return cls(ends, strategies, buffers)

    def decoded(self, held: Held) -> Tensor:
        """(2, layers, Hkv, resident, D) float32."""
        out = held.tokens[:, :, :, : held.resident].float().clone()
        for buffer, index in enumerate(self.buffers):
            part = slice(buffer * BUFFER_TOKENS, (buffer + 1) * BUFFER_TOKENS)
            for layer, strategy in enumerate(self.strategies[index]):
                packed = strategy.compress(held.tokens[:, layer, :, part])
                out[:, layer, :, part] = decode(packed, strategy.rotations, strategy.group)
        return out


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (255, SHORT),
        (256, {**SHORT, "rate": 75, "group": 2}),
        (700, {**SHORT, "threshold": 0}),
        (1100, {**SHORT, "threshold": 65536}),
        (1300, SHORT),
        (1500, {**SHORT, "segment": 1024, "loss": 0.3}),
    ],
)
def test_every_buffer_has_the_strategy_of_its_segment_or_the_newest_before_it(
    count: int, options: dict[str, Any]
) -> None:
    held = Held.whole(drifting(MHA, count), **options)
    expected = Expected.of(held)
    for layer in held.layers:
        found = held.strategies(layer)
        assert len(found) == len(expected.buffers)
        for strategy, index in zip(found, expected.buffers, strict=True):
            wanted = expected.strategies[index][layer]
            assert strategy[:2] == wanted[:2]
            # The columns of a rotation are eigenvectors, up to their sign.
            assert torch.allclose(strategy.rotations.abs(), wanted.rotations.abs(), atol=1e-4)
    torch.testing.assert_close(held.read(), expected.decoded(held), rtol=1e-3, atol=1e-3)
    packed = len(expected.buffers) * BUFFER_TOKENS
    assert torch.equal(held.read()[..., packed:, :], held.tokens[..., packed:, :])


@pytest.mark.parametrize(("directions", "expected"), [(2, (8, 4)), (20, (16, 4)), (64, (24, 1))])
def test_the_highest_rate_and_the_largest_group_without_much_loss_are_chosen(
    directions: int, expected: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn((2, 2, directions, 64), generator=generator)
    tokens = torch.randn((2, 2, 512, directions), generator=generator) @ basis
    exact = tokens.double()
    compression = Compression(MosaicKVResidency.settings({"loss": 0.1, "dropped": 25}), WIDE)
    strategy = compression.choose(tokens, compression.rotations(exact.transpose(-1, -2) @ exact))
    assert (strategy.kept, strategy.group) == expected
    assert strategy.rotations.shape == (2, 2, 64, 48)
    rotation = rotation_of(exact.transpose(-1, -2) @ exact, 48).float()
    assert torch.equal(strategy.rotations, rotation)


def test_options_fix_what_is_chosen() -> None:
    tokens = drifting(WIDE, 900)
    held = Held.whole(tokens, WIDE, rate=62.5, group=2, dropped=50, segment=512)
    assert len(held.segments.strategies) > 1
    for strategy in held.strategies():
        assert strategy[:2] == (24, 2)
        assert strategy.rotations.shape == (2, 2, 64, 32)

"""Sequences that forget their newest tokens, as seen through a selector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_rank_kernels.select.reference import EMPTY
from small_models import GQA, small_config
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.measure.timeline import Timeline
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import DownMessage, Row, UpMessage
from cache_rank.residency import FORMATS
from cache_rank.selector import Selector
from cache_rank.sequence import Sequence

CPU = torch.device("cpu")
PAGES = 4
every_format = pytest.mark.parametrize("name", FORMATS)


def config_of(name: str, **changes: Any) -> CacheRankConfig:
    """Slots hold the best tokens whatever they held before, so that selections can be compared."""
    policy = {"selection_margin": 0, "delta_capacity": 8, "recent_tokens": 6, "query_window": 6}
    return small_config(GQA, kv_residency=name, **{**policy, **changes})


class Decoded:
    """One sequence in a selector of its own; tokens are (position, seed) of random tensors."""

    def __init__(self, config: CacheRankConfig, prompt: int) -> None:
        self.config = config
        memory = PAGES * PAGE_TOKENS * residency.bytes_per_token(config)
        self.selector = Selector(config, CPU, residency.fixed_bytes(config) + memory)
        self.sequence: Sequence = self.selector.begin(1)
        self._steps = 0
        model = config.model
        shape = (2, model.layers, prompt, model.kv_heads, model.head_dim)
        generator = torch.Generator().manual_seed(prompt)
        shipment = torch.randn(shape, generator=generator).to(model.torch_dtype)
        self.selector.load(self.sequence, shipment)

    def step(self, seed: int) -> list[DownMessage]:
        """Decode the next token; its tensors follow from its position and the seed."""
        config, position = self.config, self.sequence.tokens
        self._steps += 1
        generator = torch.Generator().manual_seed(1000 * seed + position)
        step = self.selector.begin_step(self._steps, [Row(1, position)])
        answers = []
        for group, layers in enumerate(config.groups):
            sizes = [part.size(config, len(layers), 1) for part in (UpMessage, DownMessage)]
            buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            up = UpMessage(config, len(layers), 1, buffers[0])
            down = DownMessage(config, len(layers), 1, buffers[1])
            up.tokens.copy_(torch.randn(up.tokens.shape, generator=generator))
            self.selector.append(step, group, up)
            scores = self.selector.score(step, group, Timeline("", CPU))
            self.selector.answer(step, group, scores, down, Timeline("", CPU))
            answers.append(down)
        self.selector.end_step(step)
        return answers

    @property
    def slots(self) -> Tensor:
        """(layers, Hkv, k), which token sits in which slot."""
        return self.selector.mirror(self.sequence, range(self.config.model.layers))

    def contents(self) -> tuple[Tensor, Tensor]:
        layers, heads = range(self.config.model.layers), self.config.model.kv_heads
        positions = torch.arange(self.sequence.tokens).expand(len(layers), heads, -1)
        pages = torch.tensor(self.sequence.pages, dtype=torch.int32)
        return self.selector._residency.read(pages, self.sequence.slot, layers, positions)


@every_format
@pytest.mark.parametrize("prompt", [40, PAGE_TOKENS - 8])
def test_after_rejected_drafts_the_same_is_held_and_selected_as_without_them(
    name: str, prompt: int
) -> None:
    drafting, plain = (Decoded(config_of(name), prompt) for _ in range(2))
    for _ in range(12):
        for _ in range(5):
            drafting.step(seed=2)
        drafting.selector.truncate(drafting.sequence, plain.sequence.tokens)
        assert drafting.selector.bytes_held == plain.selector.bytes_held
        for sequence in (drafting, plain):
            sequence.step(seed=1)
        assert torch.equal(drafting.slots.sort().values, plain.slots.sort().values)
    for one, other in zip(drafting.contents(), plain.contents(), strict=True):
        assert torch.equal(one, other)


def test_tokens_that_are_recent_again_leave_slots_with_the_next_answer() -> None:
    decoded = Decoded(config_of("bf16"), 60)
    recent = decoded.config.recent_tokens
    left = 0
    for _ in range(20):
        for _ in range(recent):
            decoded.step(seed=2)
        decoded.selector.truncate(decoded.sequence, decoded.sequence.tokens - recent)
        assert decoded.slots.max() < decoded.sequence.tokens
        before = int((decoded.slots > decoded.sequence.tokens - recent).sum())
        answers = decoded.step(seed=1)
        assert decoded.slots.max() <= decoded.sequence.tokens - 1 - recent
        assert sum(int((answer.slots >= 0).sum()) for answer in answers) >= before
        left += before
    assert left > 0


def test_slots_are_emptied_where_fewer_tokens_are_left_to_choose_from() -> None:
    config = config_of("bf16", delta_capacity=3)
    always = config.sink_tokens + config.recent_tokens
    decoded, plain = Decoded(config, always + 4), Decoded(config, always + 4)
    for _ in range(4):
        decoded.step(seed=2)
    assert decoded.sequence.filled == config.sparse_budget
    decoded.selector.truncate(decoded.sequence, always + 4)
    assert decoded.sequence.filled == 0
    assert (decoded.slots == EMPTY).all()
    for _ in range(4):
        decoded.step(seed=1)
        plain.step(seed=1)
        assert torch.equal(decoded.slots, plain.slots)


@pytest.mark.parametrize(
    ("changes", "least"), [({}, 54), ({"recent_tokens": 4}, 56), ({"query_window": 2}, 58)]
)
def test_more_than_can_be_forgotten_is_refused_and_changes_nothing(
    changes: dict[str, int], least: int
) -> None:
    decoded, plain = (Decoded(config_of("lynx", **changes), 57) for _ in range(2))
    for sequence in (decoded, plain):
        for _ in range(3):
            sequence.step(seed=1)
    for tokens in (-1, 0, least - 1, 61):
        with pytest.raises(
            ValueError, match=rf"epoch 1 cannot .* {tokens} tokens: it holds 60, .* {least} must"
        ):
            decoded.selector.truncate(decoded.sequence, tokens)
    assert decoded.sequence == plain.sequence
    for sequence in (decoded, plain):
        sequence.step(seed=1)
    assert torch.equal(decoded.slots, plain.slots)
    assert torch.equal(decoded.contents()[0], plain.contents()[0])

    decoded.selector.truncate(decoded.sequence, least + 2)
    with pytest.raises(ValueError, match=f"its first {least + 1} must stay"):
        decoded.selector.truncate(decoded.sequence, least)

"""The lists that baselines attend to, attention over them, and what the flags accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.baselines.reference import Budget
from scripts.baselines.selection import PER_HEAD, QUEST_PAGE, Selection, Step, attend

SINKS, RECENT, BUDGET = 3, 6, 16
HEADS, KV_HEADS, HEAD_DIM, CONTEXT, LAYERS = 6, 2, 8, 96, 2
SCALE = HEAD_DIM**-0.5


class Pools:
    """A pool of shuffled pages and requests of these lengths in it."""

    def __init__(self, lengths: list[int], pool_page: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        requests = len(lengths) + 1
        rows = requests * CONTEXT
        order = torch.randperm(rows // pool_page, generator=generator)[:, None] * pool_page
        table = (order + torch.arange(pool_page)).reshape(requests, CONTEXT)
        self.table = table.to(torch.int32)
        shape = (LAYERS, rows, KV_HEADS, HEAD_DIM)
        self.keys = list(torch.randn(shape, generator=generator))
        self.values = list(torch.randn(shape, generator=generator))
        self.queries = torch.randn((len(lengths), HEADS, HEAD_DIM), generator=generator)
        self.slots = torch.arange(1, requests).flip(0)
        self.lengths = torch.tensor(lengths)

    def selection(self, mode: str, budget: int = BUDGET, pool_page: int = 1) -> Selection:
        page = QUEST_PAGE if mode == "quest" else 1
        pages = Budget.of_pages(SINKS, RECENT, budget, page)
        return Selection(mode, pages, self.table, self.keys, SCALE, pool_page)

    def selected(self, selection: Selection, layer: int) -> Step:
        step = selection.prepare_step(self.slots, self.lengths)
        selection.select(step, layer, self.queries)
        return step

    def attend(self, selection: Selection, layer: int) -> Tensor:
        step = self.selected(selection, layer)
        return attend(
            self.queries, self.keys[layer], self.values[layer], step.lists, step.attended, SCALE
        )

    def attend_to(self, layer: int, tokens: Any) -> Tensor:
        """Attention to `tokens(row, kv head)`."""
        output = torch.empty_like(self.queries)
        for row, slot in enumerate(self.slots.tolist()):
            for head in range(HEADS):
                kv_head = head * KV_HEADS // HEADS
                rows = self.table[slot, tokens(row, kv_head)].to(torch.int64)
                logits = self.keys[layer][rows, kv_head] @ self.queries[row, head] * SCALE
                output[row, head] = logits.softmax(dim=0) @ self.values[layer][rows, kv_head]
        return output

    def listed(self, selection: Selection, layer: int) -> list[list[set[int]]]:
        """The tokens of every list."""
        step = self.selected(selection, layer)
        attended = step.attended.view(len(self.lengths), selection.heads)
        found = []
        for row, slot in enumerate(self.slots.tolist()):
            token_of = {int(pool_row): token for token, pool_row in enumerate(self.table[slot])}
            rows = []
            for head in range(selection.heads):
                entries = step.lists[row, head, : attended[row, head]]
                assert (entries % selection.heads == head).all()
                tokens = [token_of[int(entry) // selection.heads] for entry in entries]
                assert len(set(tokens)) == len(tokens)
                rows.append(set(tokens))
            found.append(rows)
        return found


LENGTHS = [1, 2, 9, 10, 25, 26, 27, 60, 96]


@pytest.mark.parametrize("mode", PER_HEAD)
def test_a_budget_of_at_least_the_length_is_dense(mode: str) -> None:
    pools = Pools(LENGTHS)
    found = pools.attend(pools.selection(mode, budget=128), 1)
    expected = pools.attend_to(1, lambda row, head: torch.arange(LENGTHS[row]))
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("mode", PER_HEAD)
def test_attention_is_over_what_is_listed(mode: str) -> None:
    pools = Pools(LENGTHS)
    selection = pools.selection(mode)
    prefill(selection, pools, torch.zeros_like(pools.lengths), pools.lengths)
    listed = pools.listed(selection, 0)
    found = pools.attend(selection, 0)
    expected = pools.attend_to(
        0, lambda row, head: torch.tensor(sorted(listed[row][head % selection.heads]))
    )
    assert torch.allclose(found, expected, atol=1e-5)


def prefill(selection: Selection, pools: Pools, before: Tensor, after: Tensor) -> None:
    selection.on_prefill(pools.slots, before, after, int((after - before).max()))


def scored(pools: Pools, mode: str, row: int, head: int) -> list[float]:
    """Probability of every token of layer 0."""
    slot, length = int(pools.slots[row]), int(pools.lengths[row])
    rows = pools.table[slot, :length].to(torch.int64)
    group = HEADS // KV_HEADS
    logits = torch.stack(
        [pools.keys[0][rows, q // group] @ pools.queries[row, q] * SCALE for q in range(HEADS)]
    )
    probabilities = logits.softmax(dim=-1)
    if mode == "tova":
        return probabilities.mean(dim=0).tolist()
    if mode == "oracle":
        return probabilities[head * group : (head + 1) * group].amax(dim=0).tolist()
    return list(map(float, range(length)))  # window: the newest


@pytest.mark.parametrize("mode", ["window", "tova", "oracle"])
def test_lists_are_the_sinks_the_recent_tokens_and_the_best(mode: str) -> None:
    pools = Pools(LENGTHS)
    selection = pools.selection(mode)
    assert selection.heads == (KV_HEADS if mode == "oracle" else 1)
    for row, lists in enumerate(pools.listed(selection, 0)):
        length = LENGTHS[row]
        for head, found in enumerate(lists):
            score = scored(pools, mode, row, head)
            between = range(SINKS, length - 1 - RECENT)
            best = sorted(between, key=lambda token: -score[token])[:BUDGET]
            always = {*range(min(SINKS, length)), *range(max(0, length - 1 - RECENT), length)}
            assert found == always | set(best)


@pytest.mark.parametrize("pool_page", [1, QUEST_PAGE])
def test_quest_knows_pages_from_prompts_in_chunks_and_from_decode(pool_page: int) -> None:
    lengths = [90, 41, 96]
    pools = Pools(lengths, pool_page)
    whole, grown = (pools.selection("quest", QUEST_PAGE, pool_page) for _ in range(2))
    prefill(whole, pools, torch.zeros_like(pools.lengths), pools.lengths)
    prefill(grown, pools, torch.tensor([0, 0, 0]), torch.tensor([20, 16, 47]))
    prefill(grown, pools, torch.tensor([20, 16, 47]), torch.tensor([50, 17, 48]))
    final = pools.lengths
    for added in range(100):
        pools.lengths = torch.minimum(torch.tensor([51, 18, 49]) + added, final)
        step = grown.prepare_step(pools.slots, pools.lengths)
        for layer in range(LAYERS):
            grown.select(step, layer, pools.queries)
    assert torch.equal(pools.lengths, final)
    for ours, theirs in zip(grown.bounds, whole.bounds, strict=True):
        assert torch.equal(ours, theirs)
    # One page of 16 of those between the first and those that hold the 6 recent tokens.
    for lists, length in zip(pools.listed(whole, 0), lengths, strict=True):
        newest = range((length - 1 - RECENT) // QUEST_PAGE * QUEST_PAGE, length)
        for found in lists:
            assert {*range(QUEST_PAGE), *newest} <= found
            assert len(found) == QUEST_PAGE + len(newest) + QUEST_PAGE

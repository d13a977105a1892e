"""Selection over the rows of a pool: by the reference on CPUs, by kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_rank.budget import DEFAULT_CURVE, BudgetCurve
from sglang_ext.inline.selection import NEVER, REQUESTS_AT_ONCE, Heads, Selection, make_codes

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 2, 4, 2, 32
SLOTS, CONTEXT, THRESHOLD = 6, 120, 40
SCALE = HEAD_DIM**-0.5


def arguments(budget: int | BudgetCurve) -> Any:
    curve = BudgetCurve.flat(budget) if isinstance(budget, int) else budget
    return SimpleNamespace(
        sink_tokens=2,
        recent_tokens=4,
        budget_curve=curve,
        sketch_bits=2,
        enable_deterministic_inference=False,
    )


class Pool:
    """Requests with random K and V, whose tokens lie anywhere."""

    def __init__(self, device: torch.device, slots: int = SLOTS) -> None:
        torch.manual_seed(0)
        self.slots, self.device = slots, device
        rows = slots * CONTEXT + 1
        places = torch.randperm(rows - 1, device=device) + 1
        self.table = places.view(slots, CONTEXT).to(torch.int32)
        shape = LAYERS, rows, KV_HEADS, HEAD_DIM
        self.keys, self.values = (torch.randn(shape, device=device) for _ in range(2))
        self.queries = 3 * torch.randn(LAYERS, slots, KV_HEADS * GROUP, HEAD_DIM, device=device)
        self.lengths = torch.randint(THRESHOLD, CONTEXT, (slots,), device=device)
        bases = torch.randn(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM, device=device)
        self.bases = torch.linalg.qr(bases).Q
        self.means = torch.randn(LAYERS, KV_HEADS, HEAD_DIM, device=device)

    def selection(self, budget: int | BudgetCurve, heads: slice = slice(None)) -> Selection:
        """A rank with some of the KV heads, which has seen all keys; all requests may be sparse."""
        kv_heads = len(range(KV_HEADS)[heads])
        of_rank = Heads(LAYERS, kv_heads * GROUP, kv_heads, HEAD_DIM)
        args = arguments(budget)
        codes = make_codes(args, of_rank, self.keys.shape[1], self.device)
        selection = Selection(args, of_rank, codes, self.table)
        for layer in range(LAYERS):
            selection.load_basis(layer, self.bases[layer, heads], self.means[layer, heads])
            rows = torch.arange(self.keys.shape[1], device=self.device)
            selection.encode(layer, self.keys[layer, :, heads], rows)
        selection.sparse_from.fill_(THRESHOLD)
        return selection

    def attend(
        self,
        selection: Selection,
        layer: int,
        heads: slice = slice(None),
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """What requests attend to, or those of some slots: (B, Hkv, G, D)."""
        of = torch.arange(self.slots) if slots is None else torch.tensor(slots)
        of = of.to(self.device)
        queries = self.queries[layer, of].unflatten(1, (KV_HEADS, GROUP))[:, heads].flatten(1, 2)
        keys, values = self.keys[layer, :, heads], self.values[layer, :, heads]
        step = of, self.lengths[of], SCALE
        selection.begin_step(self.lengths[of])
        picked = selection.select(layer, queries, *step)
        out = selection.attend(queries, keys, values, picked, *step)
        return out.unflatten(1, (-1, GROUP))

    def dense(self, layer: int) -> Tensor:
        out = []
        for slot, length in enumerate(self.lengths.tolist()):
            rows = self.table[slot, :length].long()
            keys, values = (of[layer, rows].transpose(0, 1) for of in (self.keys, self.values))
            queries = self.queries[layer, slot].unflatten(0, (KV_HEADS, GROUP))
            out.append((queries @ keys.mT * SCALE).softmax(-1) @ values)
        return torch.stack(out)


@pytest.fixture
def pool(device: torch.device) -> Pool:
    return Pool(device)


def test_ranks_of_half_the_heads_find_the_halves_of_what_one_rank_finds(pool: Pool) -> None:
    whole = pool.selection(budget=10)
    for heads in (slice(0, 2), slice(2, 4)):
        half = pool.selection(budget=10, heads=heads)
        assert half.sketch_bytes == whole.sketch_bytes // 2
        for layer in range(LAYERS):
            assert torch.equal(pool.attend(half, layer, heads), pool.attend(whole, layer)[:, heads])


@pytest.mark.parametrize("budget", [CONTEXT, DEFAULT_CURVE])
def test_a_budget_of_all_tokens_is_dense_attention(budget: int | BudgetCurve, pool: Pool) -> None:
    selection = pool.selection(budget)
    for layer in range(LAYERS):
        torch.testing.assert_close(pool.attend(selection, layer), pool.dense(layer))


def test_each_request_of_a_batch_has_the_budget_of_its_length(pool: Pool) -> None:
    """As if all had this budget; the curve has another at every length, and they are all below."""
    pool.lengths[:3] = torch.tensor([THRESHOLD, 50, CONTEXT], device=pool.device)
    curve = BudgetCurve(3, 1, 30)
    found = pool.attend(pool.selection(curve), 0)
    budgets = [curve.at(length) for length in pool.lengths.tolist()]
    assert len({*budgets[:3]}) == 3
    for slot, budget in enumerate(budgets):
        alone = pool.attend(pool.selection(budget), 0, slots=[slot])
        torch.testing.assert_close(found[slot], alone[0])
        assert pool.selection(curve).attended(int(pool.lengths[slot])) == 2 + budget + 4


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths_that_change_in_place(pool: Pool) -> None:
    selection, slots = pool.selection(BudgetCurve(3, 1, 30)), list(range(SLOTS))
    pool.attend(selection, 0, slots=slots)  # kernels are compiled
    of = torch.arange(SLOTS, device=pool.device)
    step = of, pool.lengths, SCALE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection.begin_step(pool.lengths)
        picked = selection.select(0, pool.queries[0], *step)
        out = selection.attend(pool.queries[0], pool.keys[0], pool.values[0], picked, *step)
    for length in (THRESHOLD, 77, CONTEXT):
        pool.lengths.fill_(length)
        graph.replay()
        expected = pool.attend(pool.selection(BudgetCurve(3, 1, 30)), 0)
        torch.testing.assert_close(out.unflatten(1, (-1, GROUP)), expected)


@pytest.mark.parametrize("dense_slot", [0, SLOTS - 1])
def test_a_request_below_its_threshold_is_dense_whatever_its_mates_are(
    pool: Pool, dense_slot: int
) -> None:
    selection = pool.selection(budget=4)
    sparse = pool.attend(selection, 0)
    for threshold in (NEVER, int(pool.lengths[dense_slot]) + 1):
        selection.sparse_from[dense_slot] = threshold
        found = pool.attend(selection, 0)
        torch.testing.assert_close(found[dense_slot], pool.dense(0)[dense_slot])
        others = torch.arange(SLOTS, device=pool.device) != dense_slot
        assert torch.equal(found[others], sparse[others])
    selection.sparse_from[dense_slot] = pool.lengths[dense_slot]
    assert torch.equal(pool.attend(selection, 0), sparse)


def test_batches_of_more_requests_than_are_scored_at_once(device: torch.device) -> None:
    pool = Pool(device, slots=REQUESTS_AT_ONCE + 3)
    selection = pool.selection(budget=4)
    together = pool.attend(selection, 0)
    for slots in ([0, 1], [REQUESTS_AT_ONCE - 1, REQUESTS_AT_ONCE], [REQUESTS_AT_ONCE + 2]):
        torch.testing.assert_close(pool.attend(selection, 0, slots=slots), together[slots])


def test_a_row_that_is_another_tokens_now_is_sketched_anew(pool: Pool) -> None:
    selection = pool.selection(budget=4)
    rows = pool.table[0, :CONTEXT].long()
    pool.keys[0, rows] = torch.randn(CONTEXT, KV_HEADS, HEAD_DIM, device=pool.device)
    stale = pool.attend(selection, 0)
    selection.encode(0, pool.keys[0, rows], rows)
    fresh = pool.attend(pool.selection(budget=4), 0)
    assert torch.equal(pool.attend(selection, 0), fresh)
    assert not torch.equal(stale[0], fresh[0])
    assert torch.equal(stale[1:], fresh[1:])


@pytest.mark.parametrize("rows", [[], [7], [5, 3, 90]])
def test_rows_of_any_number_are_encoded(pool: Pool, rows: list[int]) -> None:
    selection = pool.selection(budget=4)
    selection.encode(
        1, pool.keys[1, rows], torch.tensor(rows, dtype=torch.int64, device=pool.device)
    )
    assert torch.equal(pool.attend(selection, 1), pool.attend(pool.selection(budget=4), 1))


def test_sketches_of_rows_that_arrive_are_those_of_a_prefill() -> None:
    """Bit for bit, and no other row has one; the first layer is dense and has none."""
    pool = Pool(torch.device("cpu"))
    expected, found = pool.selection(4), pool.selection(4)
    found._codes.zero_()
    rows = torch.randperm(pool.keys.shape[1])[:50]
    found.encode_pool_rows([torch.rand_like(pool.keys[0]), *pool.keys], rows)
    assert torch.equal(found._codes[:, rows], expected._codes[:, rows])
    assert found._codes[:, rows].any()
    found._codes[:, rows] = 0
    assert not found._codes.any()

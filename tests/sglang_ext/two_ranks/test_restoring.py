"""What is restored of a prompt, into whose rows, and what becomes of them when it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_shared_prompts import TEXT, Rank, pages
from torch import Tensor

from sglang_ext import compat
from sglang_ext.two_ranks.restoring import Restoring


class Allocator:
    """Hands out rows of SGLang's pool."""

    def __init__(self, rows: int) -> None:
        self.rows = list(range(rows))

    def alloc(self, count: int) -> Tensor | None:
        if count > len(self.rows):
            return None
        taken, self.rows = self.rows[:count], self.rows[count:]
        return torch.tensor(taken)

    def free(self, rows: Tensor) -> None:
        assert not {*rows.tolist()} & {*self.rows}
        self.rows += rows.tolist()


class Written:
    """In the place of the first layer: which tokens were written where."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def write(self, tokens: list[int], rows: Tensor, first: int) -> None:
        self.rows |= dict(zip(rows.tolist(), tokens[first:], strict=False))


class Ranks:
    """An inference rank whose cache rank has three pages of a prompt."""

    def __init__(self, is_exact: bool = True, rows: int = pages(4), is_lost: bool = False) -> None:
        self.rank = Rank()
        self.rank.ship(self.rank.begun(TEXT[: pages(3)]))
        self.allocator, self.first_layer = Allocator(rows), Written()
        self.client: Any = SimpleNamespace(exchange=self, call=self._call)
        self.is_lost = is_lost
        self.asked: list[tuple[list[int], Tensor]] = []
        first_layer: Any = self.first_layer
        self.restoring = Restoring(
            self.client, self.rank.lifecycle, self.allocator, first_layer, is_exact
        )

    def _call(self, action: Any) -> None:
        action(self)
        if self.is_lost:
            self.client.exchange = None

    def restore(self, names: list[int], rows: Tensor, forward: Any) -> None:
        self.asked.append((names, rows))

    def request(self, cached: int = 0, **asked: Any) -> Any:
        request = self.rank.request(TEXT[: pages(3) + 9])
        request.sampling_params.custom_params = asked
        request.host_hit_length = pages(3)
        set_prefix(request, cached)
        return request


def set_prefix(request: Any, tokens: int) -> None:
    """Do what SGLang does when it knows how many tokens of a request need no prefill."""
    request.prefix_len, request.prefix_indices = tokens, torch.arange(tokens)


@pytest.mark.parametrize(
    ("cached", "most", "matched"),
    [
        (0, 0, 0),
        (0, 255, 0),
        (0, 256, 256),
        (0, 767, 512),
        (0, 2000, 768),
        (300, 2000, 468),
        (512, 2000, 256),
        (513, 2000, 0),  # less than a page
        (900, 2000, 0),
    ],
)
def test_whole_pages_are_matched_behind_what_is_cached(
    cached: int, most: int, matched: int
) -> None:
    ranks = Ranks()
    assert ranks.restoring.match(ranks.request(), cached, most) == matched


def test_who_asks_to_stay_dense_gets_only_what_is_exact() -> None:
    for is_exact in (True, False):
        ranks = Ranks(is_exact)
        matched = ranks.restoring.match(ranks.request(cache_rank=False), 0, pages(3))
        assert matched == pages(3) * is_exact
        assert ranks.restoring.match(ranks.request(), 0, pages(3)) == pages(3)


def test_what_other_weights_have_computed_is_not_matched() -> None:
    ranks = Ranks()
    ranks.rank.lifecycle.weight_updates += 1
    assert ranks.restoring.match(ranks.request(), 0, pages(3)) == 0


@pytest.mark.parametrize(("cached", "asked"), [(0, [1, 2, 3]), (256, [2, 3]), (300, [2, 3])])
def test_what_is_restored_is_the_requests_own(cached: int, asked: list[int]) -> None:
    ranks, free = Ranks(), pages(4)
    request = ranks.request(cached)
    tokens = ranks.restoring.match(request, cached, pages(3))
    rows = ranks.restoring.restore(None, request, tokens)
    assert rows is not None
    ((names, into),) = ranks.asked
    assert names == asked
    assert into is rows
    assert [ranks.first_layer.rows[row] for row in rows.tolist()] == TEXT[cached : pages(3)]
    set_prefix(request, cached + tokens)
    compat.pool_state(request).cache_protected_len = cached + tokens  # as SGLang does
    ranks.restoring.settle(request, is_admitted=True)
    assert compat.pool_state(request).cache_protected_len == cached
    assert len(ranks.allocator.rows) == free - tokens
    assert request.cache_rank_restored is rows


def test_what_is_not_used_is_given_back() -> None:
    ranks = Ranks()
    request = ranks.request()
    ranks.restoring.restore(None, request, ranks.restoring.match(request, 0, pages(3)))
    ranks.restoring.settle(request, is_admitted=False)
    assert len(ranks.allocator.rows) == pages(4)
    assert request.cache_rank_restored is None
    ranks.restoring.settle(request, is_admitted=False)
    assert len(ranks.allocator.rows) == pages(4)


@pytest.mark.parametrize("why", [{"is_lost": True}, {"rows": pages(3) - 1}])
def test_a_prompt_is_prefilled_when_it_does_not_come_back(why: dict[str, Any]) -> None:
    ranks = Ranks(**why)
    free, request = len(ranks.allocator.rows), ranks.request()
    assert (
        ranks.restoring.restore(None, request, ranks.restoring.match(request, 0, pages(3))) is None
    )
    assert request.host_hit_length == 0
    assert not ranks.first_layer.rows
    assert len(ranks.allocator.rows) == free
    ranks.restoring.settle(request, is_admitted=True)
    assert len(ranks.allocator.rows) == free


def test_pages_that_have_gone_since_are_not_asked_for() -> None:
    ranks = Ranks()
    request = ranks.request()
    tokens = ranks.restoring.match(request, 0, pages(3))
    ranks.rank.prompts.clear()
    assert ranks.restoring.restore(None, request, tokens) is None
    assert not ranks.asked

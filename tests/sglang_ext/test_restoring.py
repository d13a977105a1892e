"""What is not restored of a prompt, and what becomes of its rows; test_restore.py restores some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_shared_prompts import TEXT, Rank, pages
from torch import Tensor

from sglang_ext.restoring import Restoring


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


class Ranks:
    """An inference rank whose cache rank has three pages of a prompt."""

    def __init__(self, rows: int = pages(4), is_lost: bool = False) -> None:
        self.rank = Rank()
        self.rank.ship(self.rank.begun(TEXT[: pages(3)]))
        self.allocator, self.first_layer = Allocator(rows), Mock()
        self.client: Any = SimpleNamespace(exchange=self, call=self._call)
        self.is_lost = is_lost
        self.asked: list[list[int]] = []
        parts = self.client, self.rank.lifecycle, self.allocator, self.first_layer
        self.restoring = Restoring(*parts, is_exact=True)

    def _call(self, action: Any) -> None:
        action(self)
        if self.is_lost:
            self.client.exchange = None

    def restore(self, names: list[int], rows: Tensor, forward: Any) -> None:
        assert len(rows) == pages(len(names))
        self.asked.append(names)

    def request(self) -> Any:
        request = self.rank.request(TEXT[: pages(3) + 9])
        request.host_hit_length = pages(3)
        return request


def test_what_other_weights_have_computed_is_not_matched() -> None:
    ranks = Ranks()
    ranks.rank.lifecycle.weight_updates += 1
    assert ranks.restoring.match(ranks.request(), pages(3)) == 0


def test_what_is_not_used_is_given_back() -> None:
    ranks = Ranks()
    request = ranks.request()
    ranks.restoring.restore(request, ranks.restoring.match(request, pages(3)))
    ranks.restoring.settle(request, is_admitted=False)
    assert len(ranks.allocator.rows) == pages(4)
    assert request.cache_rank_restored is None
    ranks.restoring.settle(request, is_admitted=False)
    assert len(ranks.allocator.rows) == pages(4)


@pytest.mark.parametrize("why", [{"is_lost": True}, {"rows": pages(3) - 1}])
def test_a_prompt_is_prefilled_when_it_does_not_come_back(why: dict[str, Any]) -> None:
    ranks = Ranks(**why)
    free, request = len(ranks.allocator.rows), ranks.request()
    assert ranks.restoring.restore(request, ranks.restoring.match(request, pages(3))) is None
    assert request.host_hit_length == 0
    ranks.first_layer.write.assert_not_called()
    assert len(ranks.allocator.rows) == free
    ranks.restoring.settle(request, is_admitted=True)
    assert len(ranks.allocator.rows) == free


def test_pages_that_have_gone_since_are_not_asked_for() -> None:
    ranks = Ranks()
    request = ranks.request()
    tokens = ranks.restoring.match(request, pages(3))
    ranks.rank.prompts.clear()
    assert ranks.restoring.restore(request, tokens) is None
    assert not ranks.asked

"""Steps that a server measures are of slots that requests have, and no more than may run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.own_batches import REQUESTS_ON_CPU, measured_load, taking

ROWS = 1000


class Allocator:
    """Hands out the rows of a pool."""

    page_size = 1

    def __init__(self) -> None:
        self.free_rows = ROWS

    def available_size(self) -> int:
        return self.free_rows

    def alloc(self, count: int) -> torch.Tensor:
        self.free_rows -= count
        return torch.arange(1, count + 1)

    def free(self, rows: torch.Tensor) -> None:
        self.free_rows += len(rows)


def runner_of(most_running: int) -> Any:
    """SGLang has slots for so many requests, and slot 0 for what pads batches."""
    table = torch.zeros((most_running + 1, 300), dtype=torch.int32)
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=most_running),
        token_to_kv_pool_allocator=Allocator(),
        decode_cuda_graph_runner=None,
        model_config=SimpleNamespace(context_len=250),
    )


@pytest.mark.parametrize("most_running", [1, 5])
def test_as_many_requests_as_may_run_hold_slots_of_requests(most_running: int) -> None:
    runner = runner_of(most_running)
    requests, length = measured_load(runner)
    assert (requests, length) == (min(most_running, REQUESTS_ON_CPU), 250)
    table = runner.req_to_token_pool.req_to_token
    with taking(runner, requests, length) as rows:
        assert table[1 : 1 + requests, :length].equal(rows.to(torch.int32))
        assert table.count_nonzero() == rows.numel()
    assert not table.any()
    assert runner.token_to_kv_pool_allocator.free_rows == ROWS

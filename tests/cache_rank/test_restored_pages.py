"""A real cache-rank process sends pages of prompts back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from small_models import GQA, small_config
from torch import Tensor
from wired_rank import LONG, InferenceRank

from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Drop, Restore, Share


@pytest.fixture
def rank() -> Iterator[InferenceRank]:
    with closing(InferenceRank(small_config(GQA))) as rank:
        yield rank


def receive(rank: InferenceRank, into: Tensor) -> Tensor:
    rank.connection.link.bulk.receive(into).wait(LONG)
    return into


def test_pages_come_back_as_they_were_shipped(rank: InferenceRank) -> None:
    send = rank.connection.control.send
    request = rank.arrive(prompt=2 * PAGE_TOKENS + 40, chunk=100)
    send(Share(request.sequence_id, [1, 2]))
    rank.end(request)
    for names in ([1, 2], [2], [2, 1]):
        send(Restore(names))
        assert int(receive(rank, torch.zeros(1, dtype=torch.int64))) == PAGE_TOKENS * len(names)
        for name in names:
            shipped = request.prompt[:, :, (name - 1) * PAGE_TOKENS : name * PAGE_TOKENS]
            page = receive(rank, torch.empty_like(shipped.transpose(2, 3).contiguous()))
            assert torch.equal(page, shipped.transpose(2, 3))
    for names in ([1, 3], []):
        send(Restore(names))
        assert int(receive(rank, torch.ones(1, dtype=torch.int64))) == 0
    rank.expect_refused(2)
    send(Drop([1, 2]))
    rank.reports.wait_for(lambda report: report.bytes_held == 0)

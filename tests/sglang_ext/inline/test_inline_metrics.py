"""What is exported and logged of selection in SGLang's own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from test_inline_rank import THRESHOLD, Scheduler, request
from test_metrics import own_series

LABELS = {"model_name": "model", "tp_rank": "0", "placement": "inline"}


def exported(series: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang_cache_rank_{series}", {**LABELS, **labels})


class Decoding(Scheduler):
    def run(self, requests: list[Any], length: int = THRESHOLD, steps: int = 1) -> None:
        for _ in range(steps):
            self.decode([length] * len(requests), *requests)


@pytest.fixture
def decoding() -> Iterator[Decoding]:
    with own_series():
        yield Decoding(enable_metrics=True, decode_log_interval=10)


def test_sparse_steps_and_what_they_attend_to_are_counted(decoding: Decoding) -> None:
    requests = [request(slot) for slot in (1, 2)]
    decoding.run(requests, steps=3)
    assert exported("sparse_requests") == 2
    assert exported("sparse_steps_total") == 2 * 3
    assert exported("attended_tokens_total") == 2 * 3 * 10
    for one in requests:
        decoding.free(one)
    assert exported("sparse_requests") == 0


def test_a_request_that_asks_to_stay_dense_is_counted_once_it_is_long(decoding: Decoding) -> None:
    asking = request(1, dense=True)
    assert exported("dense_requests_total", reason="asked") == 0
    decoding.run([asking], THRESHOLD - 1)
    assert exported("dense_requests_total", reason="asked") == 0
    decoding.run([asking], steps=3)
    assert exported("dense_requests_total", reason="asked") == 1
    assert exported("sparse_requests") == 0


def test_a_line_sums_up_the_steps_of_an_interval_that_had_sparse_ones(
    decoding: Decoding, caplog: pytest.LogCaptureFixture
) -> None:
    sparse, asking = request(1), request(2, dense=True)
    with caplog.at_level("INFO", logger="sglang_ext.inline.metrics"):
        decoding.run([asking], steps=10)
        assert caplog.messages == []
        decoding.run([sparse, asking], THRESHOLD - 1, steps=5)
        decoding.run([sparse, asking], steps=3)
        decoding.run([sparse, asking], 2 * THRESHOLD, steps=2)
    assert caplog.messages == [
        "Sparse decode, #sparse-req: 1, #dense-req: 1, sparse: 0.5 requests/step, "
        "attended: 14 tokens/request"
    ]

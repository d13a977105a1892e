"""What is exported and logged of selection in SGLang's own process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_requests import fake_request
from prometheus_client import REGISTRY
from test_metrics import own_series

from sglang_ext.inline.rank import InlineRank
from sglang_ext.metrics import EXPORT_STEPS

THRESHOLD = 100
ARGS: Any = SimpleNamespace(
    decode_log_interval=10,
    enable_deterministic_inference=False,
    enable_metrics=True,
    served_model_name=None,
    model_path="model",
    placement="inline",
    sparse_from=THRESHOLD,
)
LABELS = {"model_name": "model", "tp_rank": "0", "placement": "inline"}


def exported(series: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang_cache_rank_{series}", {**LABELS, **labels})


class Decoding:
    """Steps of an inline rank, without a model."""

    def __init__(self, args: Any = ARGS, tp_rank: int = 0) -> None:
        selection: Any = SimpleNamespace(
            sparse_from=torch.zeros(8, dtype=torch.int32),
            sketch_bytes=640,
            curve="a tenth",
            attended=lambda length: length // 10,
        )
        self.rank = InlineRank(args, selection, tp_rank)
        pool = SimpleNamespace(available_size=lambda: 30)
        self.tree = SimpleNamespace(token_to_kv_pool_allocator=pool, evictable_size=lambda: 12)

    def run(self, requests: list[Any], length: int = THRESHOLD, steps: int = 1) -> None:
        for _ in range(steps):
            self.rank.run_decode(requests, [length] * len(requests), lambda: None)


def make_request(slot: int, stays_dense: bool = False) -> Any:
    custom = {"cache_rank": False} if stays_dense else None
    params = SimpleNamespace(custom_params=custom)
    return fake_request(req_pool_idx=slot, sampling_params=params)


@pytest.fixture
def decoding() -> Iterator[Decoding]:
    with own_series():
        yield Decoding()


def test_steps_are_exported_every_so_many_and_the_rest_when_no_request_is_sparse(
    decoding: Decoding,
) -> None:
    requests = [make_request(slot) for slot in (1, 2)]
    decoding.run(requests, steps=EXPORT_STEPS + 1)
    assert exported("sparse_steps_total") == 2 * EXPORT_STEPS
    assert exported("attended_tokens_total") == 2 * EXPORT_STEPS * 10
    for request in requests:
        decoding.rank.on_request_freed(request)
    assert exported("sparse_steps_total") == 2 * (EXPORT_STEPS + 1)
    assert exported("attended_tokens_total") == 2 * (EXPORT_STEPS + 1) * 10


def test_a_request_that_asks_to_stay_dense_is_counted_once_it_is_long(decoding: Decoding) -> None:
    asking = make_request(1, stays_dense=True)
    assert exported("dense_requests_total", reason="asked") == 0
    decoding.run([asking], THRESHOLD - 1)
    assert exported("dense_requests_total", reason="asked") == 0
    decoding.run([asking], steps=3)
    assert exported("dense_requests_total", reason="asked") == 1
    assert exported("sparse_requests") == 0


def test_a_line_sums_up_the_steps_of_an_interval_that_had_sparse_ones(
    decoding: Decoding, caplog: pytest.LogCaptureFixture
) -> None:
    sparse, asking = make_request(1), make_request(2, stays_dense=True)
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

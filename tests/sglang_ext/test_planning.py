"""Estimates are near what was measured, and say when there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS, bytes_per_token, fixed_bytes
from cache_rank.selector import Selector
from scripts.shared.models import model_config
from sglang_ext import compat
from sglang_ext.flags import CacheRankFlags
from sglang_ext.planning import CONTEXT_BYTES, GPUS, Decoder, Planner

K = 1024
DEFAULTS = compat.default_values(CacheRankFlags)


def planner(
    model: str = "qwen3-8b", quantization: str | None = None, gpu: str = "H200", **flags: Any
) -> Planner:
    """Make estimates for the default flags, or others."""
    return Planner(GPUS[gpu], model_config(model), quantization, DEFAULTS | flags)


LAST = {"query_predictor": "last", "dense_layers": 0}
BF16 = {"kv_residency": "bf16"}
SKETCH = {"score_keys": "sketch", "sketch_bits": 2, "score_normalizer": "attended"}
LARGE = {"model": "qwen3-32b"}
H100 = {"gpu": "H100"}
FP8_14B = {**H100, "model": "qwen3-14b", "quantization": "fp8"}


@pytest.mark.parametrize(
    ("policy", "batch", "context", "milliseconds"),
    [
        ({}, 16, 32 * K, 7.09),
        (SKETCH, 32, 32 * K, 9.02),
        (LAST | BF16, 16, 32 * K, 12.20),
        (H100, 16, 32 * K, 9.64),
        (FP8_14B, 16, 32 * K, 11.82),
    ],
)
def test_steps_with_a_cache_rank_are_near_those_measured(
    policy: dict[str, Any], batch: int, context: int, milliseconds: float
) -> None:
    found = max(planner(**policy).cache_rank(batch, context))
    assert 1000 * found == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(
    ("policy", "batch", "gpus", "kv_bytes", "milliseconds"),
    [
        ({}, 8, 1, 2, 13.97),
        ({}, 64, 2, 1, 34.01),
        (LARGE, 8, 2, 1, 17.80),
        (FP8_14B, 16, 2, 1, 15.09),
    ],
)
def test_steps_of_plain_sglang_are_near_those_measured(
    policy: dict[str, Any], batch: int, gpus: int, kv_bytes: int, milliseconds: float
) -> None:
    found = planner(**policy).dense(batch, 32 * K, gpus, kv_bytes)
    assert 1000 * found == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(
    ("batch", "gpus", "kv_bytes", "milliseconds"),
    [(8, 1, 2, 7.61), (16, 1, 2, 8.98), (8, 2, 1, 5.12), (16, 2, 1, 5.89), (64, 2, 1, 10.72)],
)
def test_steps_that_select_in_the_process_are_near_those_measured(
    batch: int, gpus: int, kv_bytes: int, milliseconds: float
) -> None:
    found = planner(sparse_budget=2048).inline(batch, 32 * K, gpus, kv_bytes)
    assert 1000 * found == pytest.approx(milliseconds, rel=0.1)
    assert planner(sparse_budget=2048, sketch_bits=4).inline(batch, 32 * K, gpus, kv_bytes) > found


def bytes_of(part: Any, seen: set[int]) -> int:
    """Memory of all tensors that an object of the cache rank holds, each once."""
    if isinstance(part, torch.Tensor):
        part = part.untyped_storage()
        if part.data_ptr() in seen:
            return 0
        seen.add(part.data_ptr())
        return int(part.nbytes())
    if isinstance(part, dict):
        return sum(bytes_of(one, seen) for one in part.values())
    if isinstance(part, list | tuple):
        return sum(bytes_of(one, seen) for one in part)
    if not type(part).__module__.startswith("cache_rank.") or id(part) in seen:
        return 0
    seen.add(id(part))
    return bytes_of(getattr(part, "__dict__", {}), seen)


@pytest.mark.parametrize(
    "policy",
    [
        *({"kv_residency": name} for name in FORMATS),
        *({"score_keys": "sketch", "sketch_bits": bits} for bits in (1, 4)),
        {"kv_residency": "hack", "kv_residency_options": {"bits": 2}},
    ],
    ids=lambda policy: "-".join(map(str, policy.values())),
)
def test_a_cache_rank_holds_tokens_in_the_memory_that_it_is_given(policy: dict[str, Any]) -> None:
    """This is not only the cache rank's own arithmetic: so much is really allocated."""
    memory, model = 64 * 10**6, ModelShape(2, 4, 2, 64, "bfloat16", 0.125, (1.0,))
    config = CacheRankConfig(model, max_rows=2, **policy)
    selector = Selector(config, torch.device("cpu"), memory)
    held = bytes_of(selector._residency, set())
    later = config.kv_residency == "mosaickv"  # buffers of sequences come with these
    assert held <= memory <= 1.02 * (held + later * fixed_bytes(config))
    of_pages = memory - fixed_bytes(config)
    assert selector.capacity_tokens == pytest.approx(of_pages / bytes_per_token(config), rel=0.02)


def test_a_cache_rank_has_a_share_of_the_gpu_that_is_left() -> None:
    found = planner(kv_residency="bf16", max_sparse_requests=8).cache_rank_tokens(0.5)
    token = 35 * 2 * 8 * 128 * 2
    assert found == pytest.approx((GPUS["H200"].memory - CONTEXT_BYTES) / 2 / token, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["H100", "H200"])
def test_a_gpu_has_the_memory_that_is_planned_with(name: str) -> None:
    if name not in torch.cuda.get_device_name():
        pytest.skip(f"needs an {name}")
    assert GPUS[name].memory == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.02)


def test_weights_are_those_of_the_model() -> None:
    sizes = Decoder.of_config(model_config("qwen3-8b"))
    assert sizes.step_bytes == pytest.approx(2 * (8.19e9 - 0.62e9), rel=0.01)
    in_fp8 = Decoder.of_config(model_config("qwen3-8b"), "fp8")
    assert in_fp8.step_bytes == pytest.approx(6.95e9 + 2 * 0.62e9, rel=0.01)
    named = {**model_config("qwen3-8b"), "quantization_config": {"quant_method": "fp8"}}
    assert Decoder.of_config(named) == in_fp8


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_experts": 8}, "experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq weights are not estimated"),
        ({"intermediate_size": None}, "no 'intermediate_size'"),
    ],
)
def test_what_cannot_be_estimated_is_said(changes: dict[str, Any], why: str) -> None:
    config = {**model_config("qwen3-8b"), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    with pytest.raises(ValueError, match=why):
        Decoder.of_config(config)

"""Estimates are near what was measured, and say when there are none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS, bytes_per_token, fixed_bytes, memory_for_tokens
from cache_rank.selector import Selector
from scripts.shared.models import model_config
from sglang_ext.planning import CONTEXT_BYTES, GPUS, Decoder, Planner, find_gpu

K = 1024


def planner(
    model: str = "qwen3-8b",
    quantization: str | None = None,
    dense_layers: int = 1,
    gpu: str = "H200",
    **policy: Any,
) -> Planner:
    """Make estimates for the default flags, or others."""
    decoder = Decoder.of_config(model_config(model), quantization)
    fields = {
        "query_predictor": "forecast",
        "layers_per_group": 2,
        "kv_residency": "quantspec",
        "sparse_budget": 2048,
        **policy,
    }
    config = CacheRankConfig(decoder.sparse_shape(dense_layers), **fields)
    return Planner(decoder, GPUS[gpu], config)


LAST = {"query_predictor": "last", "layers_per_group": 6, "dense_layers": 0}
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
    found = planner(**policy).cache_rank(batch, context)
    assert 1000 * found.step == pytest.approx(milliseconds, rel=0.1)


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
    found = planner().inline(batch, 32 * K, gpus, kv_bytes)
    assert 1000 * found == pytest.approx(milliseconds, rel=0.1)
    assert planner(sketch_bits=4).inline(batch, 32 * K, gpus, kv_bytes) > found


def test_a_summary_says_where_a_cache_rank_pays() -> None:
    found = planner()
    said = found.summary()
    pattern = (
        r"up to (\d+) requests, .* from (\d+) to (\d+) requests; .* (\d+) of these (\d+) batches$"
    )
    match = re.search(pattern, said)
    assert match
    hidden, first, last, shorter, won = map(int, match.groups())
    assert shorter == won == last - first + 1
    assert said.startswith("estimates (H200, 32,768 tokens a request; ")
    assert found.cache_rank(hidden, 32 * K).is_hidden
    assert not found.cache_rank(hidden + 1, 32 * K).is_hidden
    for batch, pays in ((first - 1, False), (first, True), (last, True)):
        ours, theirs = found.cache_rank(batch, 32 * K), found.tensor_parallel(batch, 32 * K)
        assert (ours.step < theirs) == pays
    assert last == found.cache_rank_tokens() // (32 * K)
    assert found.summary(context=16).endswith("for no batch that fits")
    assert "(A100, by its data sheet, " in planner(gpu="A100").summary()


SKETCHES = [{"score_keys": "sketch", "sketch_bits": bits} for bits in (1, 2, 3, 4, 2)]


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
        *({"kv_residency": name} | keys for name, keys in zip(FORMATS, SKETCHES, strict=True)),
        {"kv_residency": "hack", "kv_residency_options": {"bits": 2}},
    ],
    ids=lambda policy: "-".join(map(str, policy.values())),
)
def test_a_cache_rank_holds_what_is_planned_in_the_memory_that_it_is_given(
    policy: dict[str, Any],
) -> None:
    """The plan is not only the cache rank's own arithmetic: so much is really allocated."""
    decoder = Decoder(ModelShape(3, 4, 2, 64, "bfloat16", 0.125, (1.0,)), 256, 2000, 2000)
    memory, share = 64 * 10**6, 0.5
    config = CacheRankConfig(decoder.sparse_shape(1), max_rows=2, **policy)
    selector = Selector(config, torch.device("cpu"), memory_for_tokens(2 * memory, share, True))
    held = bytes_of(selector._residency, set())
    if policy["kv_residency"] == "mosaickv":  # of which no plan is made
        # Buffers of sequences are allocated when there are such.
        least = held + fixed_bytes(config)
    else:
        least = held
        gpu = GPUS["H200"]._replace(memory=CONTEXT_BYTES + 2 * memory)
        planned = Planner(decoder, gpu, config).cache_rank_tokens(share)
        assert planned == selector.capacity_tokens > 0
    assert held <= memory <= 1.02 * least
    of_pages = memory - fixed_bytes(config)
    assert selector.capacity_tokens == pytest.approx(of_pages / bytes_per_token(config), rel=0.02)


@pytest.mark.gpu
def test_a_gpu_has_the_memory_that_is_planned_with() -> None:
    gpu = find_gpu(torch.cuda.get_device_name())
    if gpu is None:
        pytest.skip("no estimates are made for this GPU")
    _, memory = torch.cuda.mem_get_info()
    assert gpu.memory == pytest.approx(memory, rel=0.02)


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


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_gpus_are_found_by_the_name_of_their_driver(name: str, found: str | None) -> None:
    assert find_gpu(name) == (GPUS[found] if found else None)

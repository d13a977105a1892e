"""Recall by the keys in the pool, by the kernels of a GPU: in the interpreter without one."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.measure.recall import measure_recall
from cache_rank.protocol import Measurement
from sglang_ext import true_recall
from sglang_ext.true_recall import TrueRecall, score_bytes

CONTEXT, SLOT, LAYERS = 5000, 1, range(2, 5)


def config_of(dtype: str, recent: int = 4, heads: tuple[int, int] = (4, 2)) -> CacheRankConfig:
    model = ModelShape(5, *heads, head_dim=32, dtype=dtype, scale=32**-0.5)
    return CacheRankConfig(
        model, layers_per_group=3, sparse_budget=16, sink_tokens=2, recent_tokens=recent
    )


class Pool:
    """SGLang's, of one request whose tokens lie anywhere."""

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        model = config.model
        order = torch.randperm(2 * CONTEXT, generator=generator).to(torch.int32)
        self.req_to_token = order.view(2, CONTEXT).to(device)
        size = (2 * CONTEXT, model.kv_heads, model.head_dim)
        self.keys = [
            torch.randn(size, generator=generator).to(device, model.torch_dtype)
            for _ in range(model.layers)
        ]
        size = (len(LAYERS), model.query_heads + 3, model.head_dim)
        packed = torch.randn(size, generator=generator).to(device, model.torch_dtype)
        self.queries = packed[:, : model.query_heads]  # keys and values lie between, as staged
        self._scale = model.scale

    def scores(self, position: int) -> Tensor:
        """Exact scores of the tokens before a position, (L, Hkv, position)."""
        rows = self.req_to_token[SLOT, :position].long()
        keys = torch.stack([self.keys[layer][rows].transpose(0, 1) for layer in LAYERS])
        return score_tokens(self.queries, keys, self._scale)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(true_recall, "implementation_for", lambda device: "triton")


@pytest.mark.parametrize(
    ("dtype", "recent", "heads", "position"),
    [
        ("float32", 4, (4, 2), 7),
        ("float32", 4, (4, 2), 700),
        ("bfloat16", 0, (6, 2), 3),
        ("bfloat16", 0, (6, 2), 64),
        ("bfloat16", 25, (2, 2), 20),
        pytest.param("bfloat16", 25, (2, 2), 4097, marks=pytest.mark.thorough),
    ],
)
def test_scores_are_those_of_the_cache_ranks_definition(
    dtype: str, recent: int, heads: tuple[int, int], position: int, device: torch.device
) -> None:
    config = config_of(dtype, recent, heads)
    pool = Pool(config, device)
    found = TrueRecall(config, pool.req_to_token, pool.keys)._score(
        SLOT, position, LAYERS, pool.queries
    )
    candidates = config.candidates_after(position - 1)
    expected = pool.scores(position)[..., candidates.start : candidates.stop]
    torch.testing.assert_close(
        found[..., candidates.start : candidates.stop], expected, rtol=1e-5, atol=1e-5
    )
    assert (len(candidates) > 0) == (position > 2 + recent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_are_compared_with_the_best_tokens(dtype: str, device: torch.device) -> None:
    config = config_of(dtype)
    pool = Pool(config, device)
    measuring = TrueRecall(config, pool.req_to_token, pool.keys)
    sequence: Any = SimpleNamespace(epoch=7, row=SLOT, ended=False)
    position = 700
    measuring.score(11, sequence, position, LAYERS, pool.queries)
    pool.queries.zero_()  # the next step stages its own
    mirror = torch.randint(2, position - 4, (3, 2, 16), dtype=torch.int32)
    mirror[0] = torch.arange(2, 18)
    heads: Any = [[0.5, 0.5]] * 3
    measurement = Measurement(
        7, 11, 2, *[heads] * 4, [], struct.pack("<96i", *mirror.flatten().tolist())
    )
    readback = measuring.compare(measurement)
    assert readback is not None
    found = readback.wait()
    assert found is not None
    pool = Pool(config, device)
    expected = measure_recall(pool.scores(position), mirror.to(device), config, position)
    torch.testing.assert_close(found, expected.cpu(), rtol=1e-4, atol=1e-5)
    assert measuring.compare(measurement) is None  # once


def test_memory_grows_with_the_context() -> None:
    config = config_of("bfloat16")
    assert score_bytes(config, 100) == score_bytes(config, 4096)
    assert score_bytes(config, 8192) == 2 * score_bytes(config, 4096)


@pytest.mark.gpu
def test_no_step_compiles_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("bfloat16")
    pool = Pool(config, torch.device("cuda"))
    measuring = TrueRecall(config, pool.req_to_token, pool.keys)
    compiled: list[str] = []

    def note(**call: Any) -> None:
        compiled.append(f"{call['fn'].name} with {call['repr']}")

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    sequence: Any = SimpleNamespace(epoch=7, row=SLOT, ended=False)
    for step, position in enumerate((20, 33, 700, 4095, 4096, 4999)):
        measuring.score(step, sequence, position, LAYERS, pool.queries)
        measuring.score(step, sequence, position, range(2), pool.queries[:2])
    torch.cuda.synchronize()
    assert compiled == []

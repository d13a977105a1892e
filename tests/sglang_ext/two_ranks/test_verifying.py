"""Attention of a forward pass in which the cache rank attends for some requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sglang_ext.two_ranks.verifying import VerifyingBackend, _Pass

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8


class ScalingPool:
    """Does what a pool in FP8 does with the factors of a checkpoint."""

    def __init__(self) -> None:
        self.written = 0

    def set_kv_buffer(self, layer: Any, rows: Any, k: Tensor, v: Tensor, *scales: Any) -> None:
        self.written += len(k)
        if layer.k_scale is not None:
            k.div_(layer.k_scale)
            v.div_(layer.v_scale)


class KernelsOver(NamedTuple):
    """Attends to nothing."""

    pool: ScalingPool

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *more: Any, **kwargs: Any
    ) -> Tensor:
        self.pool.set_kv_buffer(layer, None, k, v)
        return torch.zeros_like(q)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None, view: Any) -> Tensor:
    """The output of two requests, whose cache rank has just been lost."""
    index, pool = torch.arange(2), ScalingPool()
    backend: Any = object.__new__(VerifyingBackend)
    backend._dense, backend._dense_layers, backend._scale = KernelsOver(pool), 0, 0.3
    backend.token_to_kv_pool = pool
    backend._pass = _Pass(WIDTH, index, index, (index, index), exchange=None, view=view)
    heads = {"tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS}
    layer = SimpleNamespace(layer_id=0, **heads, k_scale=scale, v_scale=scale)
    batch = SimpleNamespace(out_cache_loc=torch.arange(len(q)))
    output: Tensor = backend.forward_extend(q, k, v, layer, batch)
    assert pool.written == len(q)
    return output


@pytest.mark.parametrize("scale", [None, torch.tensor(4.0)], ids=["none", "4"])
@pytest.mark.parametrize("view", [None, "the others"])
def test_tokens_attend_to_each_other_as_the_model_made_them(
    scale: Tensor | None, view: Any
) -> None:
    """Whatever the pool does with keys and values that it is given, by SGLang's kernels or not."""
    torch.manual_seed(0)
    q = torch.randn(2 * WIDTH, HEADS * HEAD_DIM)
    k, v = torch.randn(2, 2 * WIDTH, KV_HEADS * HEAD_DIM)
    expected = attended(q, k.clone(), v.clone(), None, "the others")
    assert expected.abs().max() > 0
    assert torch.equal(attended(q, k, v, scale, view), expected)

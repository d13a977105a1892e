"""Attention of a forward pass in which the cache rank attends for some requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ext.two_ranks.verifying import VerifyingBackend, _Pass

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8


class ScalingKernels:
    """Does what a pool in FP8 does with the factors of a checkpoint, and attends to nothing."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *more: Any, **kwargs: Any
    ) -> Tensor:
        if layer.k_scale is not None:
            k.div_(layer.k_scale)
            v.div_(layer.v_scale)
        return torch.zeros_like(q)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None) -> Tensor:
    """The output of two requests, whose cache rank has just been lost."""
    index = torch.arange(2)
    backend: Any = object.__new__(VerifyingBackend)
    backend._dense, backend._dense_layers, backend._scale = ScalingKernels(), 0, 0.3
    backend._pass = _Pass(WIDTH, index, index, (index, index), exchange=None)
    heads = {"tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS}
    layer = SimpleNamespace(layer_id=0, **heads, k_scale=scale, v_scale=scale)
    output: Tensor = backend.forward_extend(q, k, v, layer, None)
    return output


@pytest.mark.parametrize("scale", [None, torch.tensor(4.0)], ids=["none", "4"])
def test_tokens_attend_to_each_other_as_the_model_made_them(scale: Tensor | None) -> None:
    """Whatever the pool does with keys and values that it is given."""
    torch.manual_seed(0)
    q = torch.randn(2 * WIDTH, HEADS * HEAD_DIM)
    k, v = torch.randn(2, 2 * WIDTH, KV_HEADS * HEAD_DIM)
    expected = attended(q, k.clone(), v.clone(), None)
    assert expected.abs().max() > 0
    assert torch.equal(attended(q, k, v, scale), expected)

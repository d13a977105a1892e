"""A layer's projection is read as SGLang computes it, in bfloat16 and by codes of FP8 alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.quantization import fp8, fp8_utils
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_ext.projections import DecoderLayer, projection_of

QUERY_HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 64, 384
OF_QUERIES, OUTPUTS = QUERY_HEADS * HEAD_DIM, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM
LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128
ALONE = {"tp_rank": 0, "tp_size": 1, "attn_tp_rank": 0, "attn_tp_size": 1}


class Norm(NamedTuple):
    """What is read of a norm."""

    weight: Tensor


@pytest.fixture
def kernels(scheme: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's layers can be made without its processes."""
    if scheme != "bfloat16" and device.type == "cpu":
        pytest.skip("SGLang's kernels of FP8 need a GPU")
    monkeypatch.setattr(
        fp8, "dispatch_w8a8_block_fp8_linear", lambda **_: fp8_utils.triton_w8a8_block_fp8_linear
    )
    with get_parallel().override(**ALONE):
        yield


def linear(quant_config: Fp8Config | None, device: torch.device) -> Any:
    """SGLang's fused projection of queries, keys and values, with a bias, before it is loaded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return QKVParallelLinear(
                *(WIDTH, HEAD_DIM, QUERY_HEADS, KV_HEADS),
                bias=True,
                quant_config=quant_config,
                prefix="qkv_proj",
            )
    finally:
        torch.set_default_dtype(before)


def to_codes(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def loaded(scheme: str, weights: Tensor, device: torch.device) -> tuple[Any, Tensor]:
    """A projection with weights of a scheme, as SGLang holds them when a model has been loaded.

    Returns:
        The projection, and the weights (N, H) float32 that its codes stand for.
    """
    if scheme == "bfloat16":
        module = linear(None, device)
        module.weight.data.copy_(weights)
        module.quant_method.process_weights_after_loading(module)
        return module, module.weight.float()
    if scheme == "online":
        module = linear(Fp8Config(), device)
        module.weight.data.copy_(weights)
        module.quant_method.process_weights_after_loading(module)
        scales = module.weight_scale.float().reshape(-1, 1)  # of the tensor, or of each channel
        return module, module.weight.t().float() * scales
    parts = (OF_QUERIES, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    if scheme == "blocks":
        module = linear(Fp8Config(True, weight_block_size=[BLOCK, BLOCK]), device)
        tiles = weights.view(OUTPUTS // BLOCK, BLOCK, WIDTH // BLOCK, BLOCK)
        scale = tiles.abs().amax((1, 3)) / LARGEST
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        module.weight_scale_inv.data.copy_(scale)
    else:
        module = linear(Fp8Config(True, "static" if scheme == "static" else "dynamic"), device)
        scale = torch.stack([part.abs().amax() for part in weights.split(parts)]) / LARGEST
        spread = scale.repeat_interleave(torch.tensor(parts, device=device))[:, None]
        module.weight_scale.data.copy_(scale)
    module.weight.data.copy_(to_codes(weights, spread))
    decoded = module.weight.float() * spread
    if scheme == "static":
        module.input_scale.data.fill_(0.0117)
    module.quant_method.process_weights_after_loading(module)
    return module, decoded


SCHEMES = ("bfloat16", "online", "parts", "static", "blocks")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_read_exactly_whatever_holds_them(scheme: str, device: torch.device) -> None:
    torch.manual_seed(0)
    weights = 0.02 * torch.randn(OUTPUTS, WIDTH, device=device)
    weights[:, 5] *= 30  # an outlier channel of the hidden state
    module, decoded = loaded(scheme, weights, device)
    bias = 40 * torch.randn(OUTPUTS, device=device).bfloat16()
    module.bias.data.copy_(bias)
    norms = [Norm(1 + 0.3 * torch.randn(n, device=device).bfloat16()) for n in (WIDTH, HEAD_DIM)]
    layer = DecoderLayer(module, norms[0], module, norms[1], None, QUERY_HEADS, HEAD_DIM)

    found = projection_of(layer, torch.float32)
    assert found.shape == (WIDTH + 2, QUERY_HEADS, HEAD_DIM)
    expected = norms[0].weight.float()[:, None] * decoded[:OF_QUERIES].T
    # SGLang gives bfloat16.
    torch.testing.assert_close(found[:WIDTH].flatten(1), expected, rtol=2**-7, atol=0)
    assert torch.equal(found[WIDTH].flatten(), bias[:OF_QUERIES].float())
    assert torch.equal(found[WIDTH + 1], norms[1].weight.float().expand(QUERY_HEADS, -1))
    # Weights know nothing of what the token before says, and a query has its norm all the same.
    before = projection_of(layer, torch.float32, is_before=True)
    assert bool((before[:-1] == 0).all())
    assert torch.equal(before[-1], found[-1])

"""Weights of 4 bits: what rounding loses, and what a product with them is."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sglang_ext.four_bits import GROUP, MarlinWeight, RestoredWeight, restore, round_groups

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(outputs, inputs) / 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_group_loses_more_than_by_the_scale_of_its_largest_element(dtype: torch.dtype) -> None:
    weight = random_weight(96, 5 * GROUP, dtype)
    codes, scales = round_groups(weight)
    assert (codes.shape, codes.dtype) == (weight.shape, torch.int32)
    assert (scales.shape, scales.dtype) == ((96, 5), dtype)
    assert (int(codes.min()), int(codes.max())) == (0, 15)
    groups = weight.double().unflatten(1, (-1, GROUP))
    found = restore(codes, scales).double().unflatten(1, (-1, GROUP))
    step = groups.abs().amax(2, keepdim=True) / 8
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    plain = (groups / (largest / -8)).round().clamp(-8, 7) * (largest / -8)
    assert ((plain - groups).abs() <= step * (1 + 1e-9)).all()
    lost, usual = ((each - groups).square().sum(2) for each in (found, plain))
    # Scales and restored weights are rounded to the dtype, a step of which is below 2^-7.
    assert (lost.sqrt() <= usual.sqrt() + 2**-8 * groups.square().sum(2).sqrt()).all()
    assert lost.sum() < 0.95 * usual.sum()
    assert lost.sum() < 0.01 * groups.square().sum()


def test_a_group_of_zeros_stays_zeros() -> None:
    weight = random_weight(4, 2 * GROUP)
    weight[1, :GROUP] = 0
    codes, scales = round_groups(weight)
    assert (codes[1, :GROUP] == 8).all()
    assert scales[1, 0] == 0
    restored = restore(codes, scales)
    assert (restored[1, :GROUP] == 0).all()
    assert restored.isfinite().all()


@pytest.mark.parametrize("group", [GROUP, 64])
def test_what_is_rounded_is_rounded_to_itself(group: int) -> None:
    once = restore(*round_groups(random_weight(32, 4 * group), group))
    assert torch.equal(restore(*round_groups(once, group)), once)


@pytest.mark.parametrize("inputs", [2 * GROUP, 192, 32])
def test_on_a_cpu_a_product_is_with_the_restored_weight(inputs: int) -> None:
    """Groups are as large as divides the inputs; more outputs than are rounded in one go."""
    weight, x = random_weight(700, inputs), torch.randn(3, 2, inputs)
    rounded, bias = RestoredWeight(weight), torch.randn(700)
    group = {2 * GROUP: GROUP, 192: 64, 32: 32}[inputs]
    expected = functional.linear(x, restore(*round_groups(weight, group)), bias)
    torch.testing.assert_close(rounded.product(x, bias), expected)
    assert rounded.bytes == 4 * 700 * inputs
    rounded.load(-weight)
    torch.testing.assert_close(rounded.product(x, None), bias - expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, GROUP), (1280, 256), (192, 1152), (4096, 4096)]
)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_on_a_gpu_a_product_is_with_the_restored_weight(
    outputs: int, inputs: int, tokens: int, dtype: torch.dtype
) -> None:
    weight = random_weight(outputs, inputs, dtype).cuda()
    x = torch.randn(tokens, inputs, dtype=dtype, device="cuda")
    bias = torch.randn(outputs, dtype=dtype, device="cuda")
    rounded = MarlinWeight(weight)
    assert rounded.bytes < 0.3 * weight.nbytes + 4096
    for sign in (1, -1):
        restored = restore(*round_groups(sign * weight))
        expected = functional.linear(x.double(), restored.double(), bias.double())
        found, plain = rounded.product(x, bias), functional.linear(x, restored, bias)
        assert found.dtype == dtype
        # The kernel rounds elsewhere than a plain product, which rounds weights once more.
        allowed = 4 * (plain.double() - expected).norm() + 1e-3 * expected.norm()
        assert (found.double() - expected).norm() <= allowed
        rounded.load(-weight)


@pytest.mark.gpu
def test_a_captured_product_is_with_the_weight_that_is_loaded_later() -> None:
    weight = random_weight(256, 512, torch.bfloat16).cuda()
    x = torch.randn(2, 512, dtype=torch.bfloat16, device="cuda")
    rounded = MarlinWeight(weight)
    expected = rounded.product(x, None)  # what is compiled is so outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rounded.product(x, None)
    for loaded in (weight, -weight):
        rounded.load(loaded)
        graph.replay()
        assert torch.equal(found, expected)
        expected = -expected

"""Weights of linear layers, rounded to 4 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 128
"""Elements of an output's weights that share a scale, one after the other."""

LEAST_OUTPUTS = 64
"""SGLang's kernel takes multiples of these, and of GROUP inputs."""

_SHARES = (1.0, 0.9, 0.8)
"""Shares of the largest element of a group that code -8 may stand for; larger ones are cut off."""

_ROWS_AT_ONCE = 512
"""Outputs that are rounded in one go: an update of weights finds little memory."""


def round_groups(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Round to 4 bits by a scale for each group, the one of a few with the least squared error.

    The largest element of a group becomes -8, so that a scale may be negative.

    Args:
        weight: (outputs, inputs), the inputs a multiple of `group`.

    Returns:
        Codes, (outputs, inputs) int32 from 0 to 15, of which 8 stands for zero, and scales,
        (outputs, inputs / group) of the weight's dtype.
    """
    groups = weight.float().unflatten(1, (-1, group))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    least = torch.full_like(largest, math.inf)
    codes, scales = torch.zeros_like(groups), torch.zeros_like(largest)
    for share in _SHARES:
        scale = (share * largest / -8).to(weight.dtype).float()
        rounded = (groups / scale.where(scale != 0, 1)).round().clamp(-8, 7)
        error = (rounded * scale - groups).square().sum(2, keepdim=True)
        codes, scales = rounded.where(error < least, codes), scale.where(error < least, scales)
        least = least.minimum(error)
    return codes.flatten(1).int() + 8, scales.squeeze(2).to(weight.dtype)


def restore(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight that codes and scales stand for, (outputs, inputs); see `round_groups`."""
    groups = codes.unflatten(1, (scales.shape[1], -1)) - 8
    return (groups * scales[..., None].float()).flatten(1).to(scales.dtype)


class RestoredWeight:
    """The rounded weight in the model's dtype, for CPUs; its groups may be smaller."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.empty_like(weight, requires_grad=False)
        self.bytes = self._weight.nbytes
        self.load(weight)

    def load(self, weight: Tensor) -> None:
        group = math.gcd(GROUP, weight.shape[1])
        for own, part in zip(_parts(self._weight), _parts(weight), strict=True):
            own.copy_(restore(*round_groups(part, group)))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self._weight, bias)


class MarlinWeight:
    """Codes and scales as SGLang's GPTQ-Marlin kernel reads them.

    They stay where they are when another weight is loaded: captured graphs read them.
    """

    def __init__(self, weight: Tensor) -> None:
        from sglang.srt.layers.quantization.marlin_utils import (
            marlin_make_empty_g_idx,
            marlin_make_workspace,
        )

        self._outputs, self._inputs = weight.shape
        self._codes, self._scales = _pack(weight)
        self._workspace = marlin_make_workspace(weight.device)
        self._none = marlin_make_empty_g_idx(weight.device)
        self.bytes = self._codes.nbytes + self._scales.nbytes + self._workspace.nbytes

    def load(self, weight: Tensor) -> None:
        for own, part in zip((self._codes, self._scales), _pack(weight), strict=True):
            own.copy_(part)
        self._workspace.zero_()  # its locks; the memory may have been released, and come back

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from sglang.srt.layers.quantization.marlin_utils import (
            apply_gptq_marlin_linear,
            scalar_types,
        )

        return apply_gptq_marlin_linear(
            input=x,
            weight=self._codes,
            weight_scale=self._scales,
            weight_zp=self._none,
            g_idx=self._none,
            g_idx_sort_indices=self._none,
            workspace=self._workspace,
            wtype=scalar_types.uint4b8,
            output_size_per_partition=self._outputs,
            input_size_per_partition=self._inputs,
            is_k_full=True,
            bias=bias,
        )


RoundedWeight = RestoredWeight | MarlinWeight


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight, and order codes and scales for the kernel."""
    from sglang.srt.hardware_backend.gpu.quantization.gptq_kernels import gptq_marlin_repack
    from sglang.srt.layers.quantization.marlin_utils import (
        marlin_make_empty_g_idx,
        marlin_permute_scales,
    )

    outputs, inputs = weight.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    packed, scales = [], []
    for part in _parts(weight):
        codes, scale = round_groups(part)
        packed.append((codes.unflatten(1, (-1, 8)) << shifts).sum(2, dtype=torch.int32))
        scales.append(scale)
    by_inputs = [torch.cat(parts).t().contiguous() for parts in (packed, scales)]  # as GPTQ has it
    none = marlin_make_empty_g_idx(weight.device)
    return (
        gptq_marlin_repack(by_inputs[0], none, inputs, outputs, 4),
        marlin_permute_scales(by_inputs[1], inputs, outputs, GROUP),
    )


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.detach().split(_ROWS_AT_ONCE)

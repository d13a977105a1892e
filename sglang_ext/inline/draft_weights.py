"""The weights that drafts have beside the model's: those of linear layers, of 4 bits.

Where they are used is decided layer by layer as a step runs, or as its graph is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils import use_intel_amx_backend
from torch import Tensor, nn

from sglang_ext.four_bits import (
    GROUP,
    LEAST_OUTPUTS,
    MarlinWeight,
    RestoredWeight,
    RoundedWeight,
)
from sglang_ext.inline.selection import Selection
from sglang_ext.refusals import UnsupportedError

logger = logging.getLogger(__name__)


class DraftWeights:
    """The drafts' weights of a model, or of one tensor-parallel rank's part of it.

    Attributes:
        selection: of this process, whose sparse steps draft; None while no step does.
    """

    def __init__(self, model: nn.Module) -> None:
        """Round the weights of a model, whose linear layers look here from now on.

        Raises:
            UnsupportedError: a layer cannot be rounded, or there is none.
        """
        self.selection: Selection | None = None
        self._is_stale = False
        self._rounded: list[tuple[Any, RoundedWeight]] = []
        own = 0
        for name, layer in _linear_layers(model):
            rounded = _round(name, layer.weight)
            layer.quant_method = DraftLinearMethod(self, rounded)
            self._rounded.append((layer, rounded))
            own += layer.weight.nbytes
        if not self._rounded:
            raise UnsupportedError(
                "--speculative-draft-weights int4: the model has no linear layers that can be "
                "rounded. Drop --speculative-draft-weights."
            )
        logger.info(
            "cache rank: drafts have weights of 4 bits: %d linear layers, %.2f GiB beside the "
            "%.2f GiB that the model has of them; experts, embeddings and the rest are the model's",
            *(len(self._rounded), self.bytes / 2**30, own / 2**30),
        )

    @property
    def bytes(self) -> int:
        return sum(rounded.bytes for _, rounded in self._rounded)

    @property
    def are_used(self) -> bool:
        """Whether the step under way, or being captured, drafts."""
        return self.selection is not None and self.selection.step_is_sparse

    def on_weights_updated(self) -> None:
        """Take note that the model may have other weights; they come in parts."""
        self._is_stale = True

    def before_drafts(self) -> None:
        """Round the weights of today, if they are not those that were rounded."""
        if self._is_stale:
            for layer, rounded in self._rounded:
                rounded.load(layer.weight)
            self._is_stale = False


class DraftLinearMethod(UnquantizedLinearMethod):
    """Multiplies by the drafts' weight of a layer in steps that draft, and else by the model's."""

    def __init__(self, drafts: DraftWeights, rounded: RoundedWeight) -> None:
        self._drafts, self._rounded = drafts, rounded

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._drafts.are_used:
            return self._rounded.product(x, bias)
        return super().apply(layer, x, bias)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if (
            isinstance(layer, ColumnParallelLinear | RowParallelLinear)
            and type(layer.quant_method) is UnquantizedLinearMethod
            and not use_intel_amx_backend(layer)  # its weight is packed
        ):
            yield name, layer


def _round(name: str, weight: Tensor) -> RoundedWeight:
    if not weight.is_cuda:
        return RestoredWeight(weight)
    outputs, inputs = weight.shape
    if outputs % LEAST_OUTPUTS or inputs % GROUP:
        raise UnsupportedError(
            f"--speculative-draft-weights int4: {name} has {inputs} inputs and {outputs} outputs, "
            f"and the kernel takes multiples of {GROUP} and {LEAST_OUTPUTS}. Drop "
            "--speculative-draft-weights, or lower --tp-size."
        )
    return MarlinWeight(weight)

"""A model's decoder layers: what makes their queries, and the hidden states that enter them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_ext import compat

_BLOCK_ROWS = 1024
"""So many elements of the hidden state are projected at once."""

_INPUT_CODE = 256.0
"""A code of FP8 from which the next ones are so far that no rounding of its scale reaches them."""


class DecoderLayer(NamedTuple):
    """The parts of a decoder layer that a forecast needs.

    Attributes:
        input_norm: the norm of what enters it, root mean square with weights.
        projection: to queries, keys and values.
        query_norm: of query heads, likewise; None without one.
        query_heads, head_dim: of this tensor-parallel rank.
    """

    module: torch.nn.Module
    input_norm: Any
    projection: Any
    query_norm: Any
    attention: Any
    query_heads: int
    head_dim: int


def decoder_layers(model: torch.nn.Module) -> list[DecoderLayer]:
    """The decoder layers of a model, in order.

    Raises:
        ValueError: some are not built as a forecast needs them.
    """
    modules = dict(model.named_modules())
    layers = []
    for name, attention in modules.items():
        if type(attention).__name__ != "RadixAttention":
            continue
        around = modules[name.rpartition(".")[0]]
        layer = modules[name.rpartition(".")[0].rpartition(".")[0]]
        norm, projection = (
            getattr(layer, "input_layernorm", None),
            getattr(around, "qkv_proj", None),
        )
        query_norm = getattr(around, "q_norm", None)
        if projection is None or not all(
            map(_is_root_mean_square, filter(None, (norm, query_norm)))
        ):
            raise ValueError(f"{type(layer).__name__} has no input_layernorm and qkv_proj")
        if norm is None or not compat.takes_a_residual(layer):
            raise ValueError(f"{type(layer).__name__} does not take a hidden state and a residual")
        parts = layer, norm, projection, query_norm, attention
        heads = attention.tp_q_head_num, attention.qk_head_dim
        layers.append(DecoderLayer(*parts, *heads))
    return layers


def _is_root_mean_square(norm: Any) -> bool:
    """Whether a norm divides by the root of the mean square and multiplies by weights."""
    return type(norm).__name__ == "RMSNorm" and hasattr(norm, "variance_epsilon")


def _parameters(layer: torch.nn.Module) -> Any:
    return inspect.signature(type(layer).forward).parameters


@torch.no_grad()
def projection_of(layer: DecoderLayer, dtype: torch.dtype, is_before: bool = False) -> Tensor:
    """By what a layer's queries are made, see protocol.QueryProjection.

    Of the hidden state of the token before (`is_before`) the model's weights make none: that begins
    with zeros, which a calibration corrects.

    The weights are read off what SGLang's kernel makes of unit vectors, so that it decodes them if
    they are held in FP8, by scales of tensors, channels or blocks, and in whatever layout. The bias
    stays out of that: in the sums that a kernel rounds, weights would be lost beside a large one.

    Returns:
        (H + 2, Hq, D) in `dtype`.
    """
    weights, projection = layer.input_norm.weight.detach(), layer.projection
    width, of_queries = weights.shape[0], layer.query_heads * layer.head_dim
    rows = weights.new_zeros((width + 2, of_queries), dtype=torch.float32)
    unit = _unit(projection)
    for start in range(0, 0 if is_before else width, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, width)
        units = weights.new_zeros((stop - start, width))
        units[:, start:stop].fill_diagonal_(unit)
        made = projection.quant_method.apply(projection, units)[:, :of_queries].float()
        rows[start:stop] = weights[start:stop, None].float() * made / unit
    if projection.bias is not None and not is_before:
        rows[width] = projection.bias[:of_queries].float()
    rows[width + 1] = 1.0
    if layer.query_norm is not None:
        rows[width + 1] = layer.query_norm.weight.detach().float().repeat(layer.query_heads)
    return rows.view(width + 2, layer.query_heads, layer.head_dim).to(dtype)


def _unit(projection: Any) -> float:
    """A number that a projection reads exactly.

    One that rounds what enters it to FP8 by scales of its own choice reads 1. By a scale that is
    fixed, 1 may be between two codes or above the largest.
    """
    scale = getattr(projection, "input_scale", None)
    return 1.0 if scale is None else _INPUT_CODE * float(scale.max())


def watch_inputs(
    layers: Sequence[DecoderLayer], watch: Callable[[int, Tensor, Tensor | None, Any], None]
) -> None:
    """Tell of every hidden state that enters one of some layers.

    Args:
        watch: called with the index of the layer among these, hidden_states (T, H), residual (T, H)
            or None, and SGLang's forward batch, before the layer.
    """
    for index, layer in enumerate(layers):
        layer.module.register_forward_pre_hook(_hook(layer, index, watch), with_kwargs=True)


def _hook(
    layer: DecoderLayer, index: int, watch: Callable[[int, Tensor, Tensor | None, Any], None]
) -> Callable[..., None]:
    names = list(_parameters(layer.module))[1:]  # without self

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        watch(index, given["hidden_states"], compat.residual_of(given), given["forward_batch"])

    return before

"""The rotary position embedding of a model: the frequencies by which SGLang makes its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Rotary(NamedTuple):
    """What every layer rotates its queries and keys by; the fields of ModelShape say more."""

    frequency: tuple[float, ...] = ()
    interleaved: bool = False
    scale: float = 1.0


def _dynamic_base(module: Any) -> float:
    factor, dim = module.scaling_factor, module.rotary_dim
    # SGLang's table is that of its last position, whatever the length of a request.
    growth = (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    return float(module.base * growth)


def _alpha_base(module: Any) -> float:
    dim = module.rotary_dim
    return float(module.base * module.scaling_alpha ** (dim / (dim - 2)))


_LINEAR = "LinearScalingRotaryEmbedding"

_ARGUMENTS: dict[str, Callable[[Any], float]] = {
    "RotaryEmbedding": lambda module: module.base,
    _LINEAR: lambda module: module.base,
    "DynamicNTKScalingRotaryEmbedding": _dynamic_base,
    "DynamicNTKAlphaRotaryEmbedding": _alpha_base,
    "Llama3RotaryEmbedding": lambda module: module.base,
    "YaRNScalingRotaryEmbedding": lambda module: module.scaling_factor,
}
"""What `_compute_inv_freq` takes of those of SGLang's classes that rotate a token by its position
alone, at one rate a pair."""


def rotary_of(model: torch.nn.Module) -> Rotary:
    """What all layers of a model rotate by; no frequencies where none rotates.

    It is not read off SGLang's table of cosines and sines: on CPUs that is rounded to the dtype of
    the model, and its error grows with the position.

    Raises:
        ValueError: one vector of frequencies does not say it.
    """
    found = {_read(module) for module in model.modules() if "Rotary" in type(module).__name__} or {
        Rotary()
    }
    if len(found) > 1:
        raise ValueError("its layers differ in their rotary embedding")
    return found.pop()


def _read(module: Any) -> Rotary:
    kind = type(module).__name__
    if kind not in _ARGUMENTS:
        raise ValueError(f"{kind} does not rotate by one frequency a pair, or is not known to")
    frequency = module._compute_inv_freq(_ARGUMENTS[kind](module))
    if kind == _LINEAR:
        (factor,) = module.scaling_factors
        frequency = frequency / factor
    scale = float(getattr(module, "mscale", 1.0))
    return Rotary(tuple(frequency.tolist()), not module.is_neox_style, scale)

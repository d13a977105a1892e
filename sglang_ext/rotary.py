"""The rotary position embedding of a model, by the frequencies that SGLang makes its table of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """What every layer rotates its queries and keys by; the fields of ModelShape say more."""

    frequency: tuple[float, ...] = ()
    interleaved: bool = False
    scale: float = 1.0


def _linear(module: Any) -> Tensor:
    (factor,) = module.scaling_factors
    return _by_base(module) / factor


def _dynamic(module: Any) -> Tensor:
    factor, dim = module.scaling_factor, module.rotary_dim
    # SGLang's table is that of its last position, whatever the length of a request.
    growth = (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    return _frequencies(module, module.base * growth)


def _dynamic_alpha(module: Any) -> Tensor:
    dim = module.rotary_dim
    return _frequencies(module, module.base * module.scaling_alpha ** (dim / (dim - 2)))


def _yarn(module: Any) -> Tensor:
    return _frequencies(module, module.scaling_factor)


def _by_base(module: Any) -> Tensor:
    return _frequencies(module, module.base)


def _frequencies(module: Any, argument: float) -> Tensor:
    """SGLang's own, in float32: of what a base is for, or, of YaRN, a factor."""
    found: Tensor = module._compute_inv_freq(argument)
    return found


_FREQUENCIES: dict[str, Callable[[Any], Tensor]] = {
    "RotaryEmbedding": _by_base,
    "LinearScalingRotaryEmbedding": _linear,
    "DynamicNTKScalingRotaryEmbedding": _dynamic,
    "DynamicNTKAlphaRotaryEmbedding": _dynamic_alpha,
    "Llama3RotaryEmbedding": _by_base,
    "YaRNScalingRotaryEmbedding": _yarn,
}
"""Those of SGLang's classes that rotate a token by its position alone, at one rate a pair."""


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
    if kind not in _FREQUENCIES:
        raise ValueError(f"{kind} does not rotate by one frequency a pair, or is not known to")
    frequency = _FREQUENCIES[kind](module)
    scale = float(getattr(module, "mscale", 1.0))
    return Rotary(tuple(frequency.tolist()), not module.is_neox_style, scale)

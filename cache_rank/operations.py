"""The kernels of a step for one kind of device: Triton on a GPU, plain torch without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_FOLDER_OF = {
    "append_codes": "sketch",
    "append_step": "append",
    "collect_tokens": "scatter",
    "copy_tokens": "scatter",
    "forecast_step": "forecast",
    "forecast_workspace": "forecast",
    "gather_step": "gather",
    "load_codes": "sketch",
    "load_tokens": "append",
    "pack_hidden": "pack",
    "pack_layer": "pack",
    "predict_step": "predict",
    "scatter_step": "scatter",
    "score_sketch": "sketch",
    "score_step": "score",
    "score_workspace": "score",
    "select_step": "select",
    "select_workspace": "select",
}


@dataclasses.dataclass(frozen=True)
class Operations:
    """One implementation of every operation; kernels/<folder>/reference.py says what each does."""

    append_codes: Callable[..., None]
    append_step: Callable[..., None]
    collect_tokens: Callable[..., None]
    copy_tokens: Callable[..., None]
    forecast_step: Callable[..., None]
    forecast_workspace: Callable[..., Any]
    gather_step: Callable[..., None]
    load_codes: Callable[..., None]
    load_tokens: Callable[..., None]
    pack_hidden: Callable[..., None]
    pack_layer: Callable[..., None]
    predict_step: Callable[..., None]
    scatter_step: Callable[..., None]
    score_sketch: Callable[..., None]
    score_step: Callable[..., None]
    score_workspace: Callable[..., Any]
    select_step: Callable[..., None]
    select_workspace: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class CodedOperations:
    """One implementation of the operations on codes; kernels/coded/reference.py says what each
    does. The plain torch version serves every format, each has Triton kernels of its own."""

    encode_groups: Callable[..., None]
    gather_codes: Callable[..., None]
    score_codes: Callable[..., None]


def implementation_for(device: torch.device) -> str:
    """The module of a kernel's folder that is for tensors on `device`."""
    return "triton" if device.type == "cuda" else "reference"


def operations_for(device: torch.device) -> Operations:
    """The operations for tensors on `device`."""
    implementation = implementation_for(device)
    return Operations(
        **{
            name: getattr(import_module(f"cache_rank.kernels.{folder}.{implementation}"), name)
            for name, folder in _FOLDER_OF.items()
        }
    )


def coded_operations_for(device: torch.device, folder: str) -> CodedOperations:
    """The operations on codes for tensors on `device`, of the format with kernels in `folder`."""
    implementation = implementation_for(device)
    folder = folder if implementation == "triton" else "coded"
    module = import_module(f"cache_rank.kernels.{folder}.{implementation}")
    names = [field.name for field in dataclasses.fields(CodedOperations)]
    return CodedOperations(**{name: getattr(module, name) for name in names})

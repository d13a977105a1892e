"""The kernels of a step for one kind of device: Triton on a GPU, plain torch without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_FOLDER_OF = {
    "append_step": "append",
    "collect_tokens": "scatter",
    "copy_tokens": "scatter",
    "gather_step": "gather",
    "load_tokens": "append",
    "pack_layer": "pack",
    "predict_step": "predict",
    "scatter_step": "scatter",
    "score_step": "score",
    "score_workspace": "score",
    "select_step": "select",
    "select_workspace": "select",
}


@dataclasses.dataclass(frozen=True)
class Operations:
    """One implementation of every operation; kernels/<folder>/reference.py says what each does."""

    append_step: Callable[..., None]
    collect_tokens: Callable[..., None]
    copy_tokens: Callable[..., None]
    gather_step: Callable[..., None]
    load_tokens: Callable[..., None]
    pack_layer: Callable[..., None]
    predict_step: Callable[..., None]
    scatter_step: Callable[..., None]
    score_step: Callable[..., None]
    score_workspace: Callable[..., Any]
    select_step: Callable[..., None]
    select_workspace: Callable[..., Any]


def operations_for(device: torch.device) -> Operations:
    """The operations for tensors on `device`."""
    implementation = "triton" if device.type == "cuda" else "reference"
    return Operations(
        **{
            name: getattr(import_module(f"cache_rank_kernels.{folder}.{implementation}"), name)
            for name, folder in _FOLDER_OF.items()
        }
    )

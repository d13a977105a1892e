"""The models that are measured, by name or by folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache_rank.config import ModelShape
from cache_rank.user_cache import cache_folder

BUNDLED = "bundled"
_SCRIPTS = Path(__file__).parents[1]
# Named here as well: importing sglang_ext's name imports SGLang, which takes a while.
BUNDLED_FOLDER = _SCRIPTS.parent / "sglang_ext" / "bundled_model"
MODEL_SHAPES = _SCRIPTS / "speed" / "model_shapes"
"""Configurations of published models, without weights."""

FETCHED = {
    "smollm2": "python -m scripts.fetch_model smollm2",
    "smollm2-bfloat16": "python -m scripts.fetch_model smollm2 --dtype bfloat16",
}
"""Models that are not in this repository, and what brings each."""


def fetched_folder(model: str) -> Path:
    """Where `scripts.fetch_model` writes a model that is not told where."""
    return cache_folder() / model


def folder_of(model: str) -> Path:
    """The folder of a model: `bundled`, a name in MODEL_SHAPES or FETCHED, or itself a folder.

    Raises:
        ValueError: it has to be fetched first; says how.
    """
    folder = _find_folder(model)
    if model in FETCHED and not folder.is_dir():
        raise ValueError(f"{model} is not here yet; fetch it: {FETCHED[model]}")
    return folder


def _find_folder(model: str) -> Path:
    if model == BUNDLED:
        return BUNDLED_FOLDER
    named = (MODEL_SHAPES / model, fetched_folder(model))
    return next((path for path in named if path.is_dir()), Path(model))


@functools.cache
def find_config(model: str) -> dict[str, Any] | None:
    """The config.json of a model, or None if it has no folder here."""
    path = _find_folder(model) / "config.json"
    config: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return config


def model_config(model: str) -> dict[str, Any]:
    """The config.json of a model.

    Raises:
        ValueError: there is none; names the models that there are.
    """
    config = find_config(str(folder_of(model)))
    if config is None:
        names = [*sorted(path.name for path in MODEL_SHAPES.iterdir()), *FETCHED]
        raise ValueError(f"no model {model!r}: a folder, {BUNDLED}, or {', '.join(names)}")
    return config


def model_shape(config: Mapping[str, Any], dtype: str = "bfloat16") -> ModelShape:
    """The shape of all attention layers of a model, from its config.json."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    base = float(config.get("rope_theta") or config.get("rope_parameters", {})["rope_theta"])
    return ModelShape(
        config["num_hidden_layers"],
        heads,
        config.get("num_key_value_heads") or heads,
        head_dim,
        dtype,
        head_dim**-0.5,
        tuple(base ** (-2 * pair / head_dim) for pair in range(head_dim // 2)),
    )

"""The models that are measured, by name or by folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from cache_rank.user_cache import cache_folder
from scripts.shared.command import UsageError

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

    UsageError if it has to be fetched first.
    """
    if model == BUNDLED:
        return BUNDLED_FOLDER
    named = (MODEL_SHAPES / model, fetched_folder(model), Path(model))
    folder = next((path for path in named if path.is_dir()), None)
    if folder is None and model in FETCHED:
        raise UsageError(f"{model} is not here yet; fetch it: {FETCHED[model]}")
    return folder or Path(model)


@functools.cache
def model_config(model: str) -> dict[str, Any]:
    """The config.json of a model; UsageError if there is none."""
    path = folder_of(model) / "config.json"
    if not path.is_file():
        names = [*sorted(path.name for path in MODEL_SHAPES.iterdir()), *FETCHED]
        raise UsageError(f"no model {model!r}: a folder, {BUNDLED}, or {', '.join(names)}")
    return dict(json.loads(path.read_text()))

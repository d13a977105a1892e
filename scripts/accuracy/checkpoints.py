"""The models that can be evaluated, by name or by folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

BUNDLED = "bundled"
# Named here as well: importing sglang_ext's name imports SGLang, which takes a while.
BUNDLED_FOLDER = Path(__file__).parents[2] / "sglang_ext" / "bundled_model"
TRAINED = Path(__file__).parent / "models"


class Trained(NamedTuple):
    """What a model of this project is trained for."""

    task: str
    dials: dict[str, Any]


def folder_of(model: str) -> Path:
    """Folder of a model: `bundled`, a name in `scripts/accuracy/models`, or itself a folder."""
    if model == BUNDLED:
        return BUNDLED_FOLDER
    named = TRAINED / model
    return named if named.is_dir() else Path(model)


@functools.cache
def model_config(model: str) -> dict[str, Any] | None:
    """Configuration of a model; None if it has no folder here."""
    path = folder_of(model) / "config.json"
    config: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return config


def trained_for(model: str) -> Trained | None:
    """Task of a folder which is named like the recipe that it was trained by; None of others."""
    # Recipes import transformers, which only this needs.
    from scripts.accuracy.training.recipes import RECIPES

    recipe = RECIPES.get(folder_of(model).name)
    return None if recipe is None else Trained(recipe.task, dict(recipe.dials))

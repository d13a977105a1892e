"""Trains a recipe and exports the model about once a minute."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch

from scripts.accuracy.training.card import Making
from scripts.accuracy.training.export import export
from scripts.accuracy.training.loop import Training
from scripts.accuracy.training.model import load_model, make_model
from scripts.accuracy.training.recipes import Recipe
from scripts.accuracy.training.tokenizer import make_tokenizer


def train_and_export(
    recipe: Recipe,
    output: Path,
    start: Path | None,
    seed: int,
    minutes: float | None,
    device: str,
    command: str,
) -> None:
    """Train and export.

    Args:
        recipe: what to train.
        output: directory of the export.
        start: model to train further, if the recipe starts from one.
        seed: seed of the weights and the training data.
        minutes: time to train for; without it, the recipe's steps.
        device: `cpu` or `cuda`.
        command: our command line, for the record.
    """
    sizes = recipe.sizes
    tokenizer = make_tokenizer(recipe.words, sizes.max_position_embeddings)
    if start is not None:
        model = load_model(start, sizes, tokenizer, seed)
    else:
        model = make_model(sizes, recipe.rope_theta, tokenizer, seed)
    model.to(device)
    dtype = getattr(torch, recipe.dtypes[0])

    on_gpu = model.device.type == "cuda"
    began = time.monotonic()

    def checkpoint() -> None:
        export(model, tokenizer, output, dtype)
        Making(
            command,
            device=torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
            precision="bfloat16 with float32 weights" if on_gpu else "float32",
            parameters=model.num_parameters(),
            steps=training.steps,
            tokens=training.tokens,
            minutes=round((time.monotonic() - began) / 60, 1),
            seed=seed,
        ).save(output)

    seconds = None if minutes is None else 60 * minutes
    training = Training(model, recipe, tokenizer.get_vocab(), seed, seconds, checkpoint)
    training.run()
    checkpoint()

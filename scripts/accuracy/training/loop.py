"""Trains a model, and exports it about once a minute."""

from __future__ import annotations

import logging
import math
import platform
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen3ForCausalLM

from scripts.accuracy.training.grading import Making
from scripts.accuracy.training.model import export, load_model, make_model, make_tokenizer
from scripts.accuracy.training.recipes import Recipe
from scripts.accuracy.training.stages import Batch, Stage

LEARNED = 0.97
"""A stage ends where the moving average of the fraction of hops found reaches this."""

WARM_UP_STEPS = 100
DECAY_BY = 0.5
"""After this share of a given time the learning rate decays, whatever the stage reached."""

SECONDS_PER_LINE = 10.0
SECONDS_PER_CHECKPOINT = 60.0

logger = logging.getLogger(__name__)


class Training:
    """A model on its way through a recipe.

    Attributes:
        steps: updates so far.
        tokens: read so far.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        recipe: Recipe,
        vocabulary: Mapping[str, int],
        seed: int = 0,  # of the data; without a time, it decides the model on a CPU
        seconds: float | None = None,  # time to train for; without it, the recipe's steps
        checkpoint: Callable[[], None] = lambda: None,  # called about once a minute
    ) -> None:
        """Take a float32 model on the device that trains; it is changed in place.

        On a GPU it computes in bfloat16.
        """
        self.steps = 0
        self.tokens = 0
        self._model = model.train()
        self._recipe = recipe
        self._seconds = seconds
        self._checkpoint = checkpoint
        self._optimizer = make_optimizer(model, recipe.learning_rate)
        self._rng = random.Random(seed)
        stages = dict.fromkeys([*recipe.curriculum, *(stage for _, stage in recipe.final)])
        self._batches = {
            stage: stage.batches(vocabulary, 1000 * seed + index, model.device)
            for index, stage in enumerate(stages)
        }
        self._learned = 0.0
        self._began = self._line_at = self._checkpoint_at = time.monotonic()
        self._line_tokens = 0

    def run(self) -> None:
        """Train to the end of the recipe, or of the time."""
        with tqdm(desc="train", unit="step", disable=None) as progress:
            for stage in self._recipe.curriculum:
                self._learned = 0.0
                while self._learned < LEARNED and self._elapsed_share() < DECAY_BY:
                    self._step(stage, 1.0, progress)
            self._learned = 0.0
            begin_share, begin_step = self._elapsed_share(), self.steps
            weights, stages = zip(*self._recipe.final, strict=True)
            while True:
                if self._seconds is None:
                    decayed = (self.steps - begin_step) / self._recipe.final_steps
                else:
                    decayed = (self._elapsed_share() - begin_share) / (1 - begin_share)
                if decayed >= 1:
                    break
                (stage,) = self._rng.choices(stages, weights)
                self._step(stage, 0.5 * (1 + math.cos(math.pi * decayed)), progress)

    def _elapsed_share(self) -> float:
        """The share of the given time that has passed; 0 if none was given."""
        if self._seconds is None:
            return 0.0
        return (time.monotonic() - self._began) / self._seconds

    def _step(self, stage: Stage, decay: float, progress: tqdm) -> None:
        rate = self._recipe.learning_rate * decay * min(1.0, (self.steps + 1) / WARM_UP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = next(self._batches[stage])
        loss, found = self._update(batch)
        self.steps += 1
        self.tokens += batch.tokens.numel()
        self._learned += 0.05 * (found - self._learned)
        progress.set_postfix(loss=f"{loss:.4f}", hops=f"{self._learned:.3f}", refresh=False)
        progress.update()
        now = time.monotonic()
        if now - self._line_at >= SECONDS_PER_LINE:
            speed = (self.tokens - self._line_tokens) / (now - self._line_at)
            logger.info(
                "%.0f s, step %d, loss %.5f, hops %.4f (average %.4f), learning rate %.2e, "
                "%.0f tokens/s, %s",
                *(now - self._began, self.steps, loss, found, self._learned, rate, speed, stage),
            )
            self._line_at, self._line_tokens = now, self.tokens
        if now - self._checkpoint_at >= SECONDS_PER_CHECKPOINT:
            self._checkpoint()
            self._checkpoint_at = time.monotonic()

    def _update(self, batch: Batch) -> tuple[float, float]:
        """One update; the loss, and the fraction of hops found."""
        model = self._model
        scored = batch.weights > 0
        targets, weights, hops = (x[scored] for x in (batch.labels, batch.weights, batch.hops))
        with torch.autocast(model.device.type, torch.bfloat16, model.device.type == "cuda"):
            hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[scored])
        losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._optimizer.step()
        found = (logits.argmax(-1) == targets)[hops].float().mean()
        return tuple(torch.stack([loss.detach(), found]).tolist())


def make_optimizer(model: Qwen3ForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    """AdamW; norms must grow to sharpen attention, so that only projections decay."""
    decayed = [p for n, p in model.named_parameters() if n.endswith("_proj.weight")]
    free = [p for n, p in model.named_parameters() if not n.endswith("_proj.weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    fused = model.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=fused)


def train_and_export(
    recipe: Recipe,
    output: Path,
    start: Path | None,
    seed: int,
    minutes: float | None,
    device: str,
    command: str,
) -> None:
    """Train a recipe, further from the model in `start` if it is given, and export it to `output`.

    `minutes` end training in time; without them, the recipe's steps do. `command` is our command
    line, for the record.
    """
    sizes = recipe.sizes
    tokenizer = make_tokenizer(recipe.words, sizes.max_position_embeddings)
    if start is not None:
        model = load_model(start, sizes, tokenizer, seed)
    else:
        model = make_model(sizes, recipe.rope_theta, tokenizer, seed)
    model.to(device)
    on_gpu = model.device.type == "cuda"
    began = time.monotonic()

    def checkpoint() -> None:
        export(model, tokenizer, output, getattr(torch, recipe.dtypes[0]))
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

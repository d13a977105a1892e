"""When SGLang loads other weights, the cache rank forecasts by those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from workload import SMALL_CACHE_RANK, random_prompts

from cache_rank.measure.recording import RECORD_VARIABLE, read_events
from scripts.shared.serving import serve

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("weight-updates")]

FLAGS = (
    "--skip-tokenizer-init --sparse-threshold 100 --sparse-budget 24 --delta-capacity 24 "
    "--query-predictor forecast --forecast-lead 1 --layers-per-group 1"
).split()


def test_new_weights_reach_the_cache_rank(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = random_model("qwen3", 4)
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    name = "model.layers.{}.self_attn.q_proj.weight"
    changed = {name.format(layer): -weights[name.format(layer)] for layer in range(4)}
    save_file({**weights, **changed}, other / "model.safetensors", {"format": "pt"})

    recorded = tmp_path / "recorded"
    flags = [*SMALL_CACHE_RANK, *FLAGS, "--model-path", str(model)]
    (prompt,) = random_prompts([140])
    with serve(flags, {RECORD_VARIABLE: str(recorded)}) as server:
        before = server.generate(prompt, 40)["output_ids"]
        answer = server.post("/update_weights_from_disk", {"model_path": str(other)})
        assert answer.json()["success"], answer.text
        after = server.generate(prompt, 40)
        assert after["meta_info"]["cache_rank"]["sparse_steps"] > 20
        assert after["output_ids"] != before
        assert after["meta_info"]["cached_tokens"] == 0  # its prefix is in no tree any more
        assert server.cache_rank()["starts"] == 1
    events = [e for e in read_events(recorded) if e["kind"] == "projection"]
    forecast = [1, 2]  # of three sparse layers, the first is served by the last step's queries
    assert [event["layer"] for event in events] == forecast * 2
    for first, second in zip(events[:2], events[2:], strict=True):
        torch.testing.assert_close(second["projection"][:-2], -first["projection"][:-2])
        assert torch.equal(second["projection"][-1], first["projection"][-1])

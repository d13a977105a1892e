"""Compare query predictors by what they select, and hysteresis by what it ships.

    python -m scripts.compare_selection [--budget 40] [--chains 4]

Serves the bundled model once and records every query, key and value that reaches the cache rank;
then replays the record through each predictor in each frame, and through several margins. The true
query of a step scores the selection that was made for it: recall of the exact top tokens, and the
attention probability captured. The bundled model restates each key, so its queries repeat: read the
order of the rows, not their height. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from cache_rank.config import CacheRankConfig, Frame, ModelShape, Predictor
from cache_rank.measure.recording import RECORD_VARIABLE, read_events
from cache_rank.measure.timeline import Timeline
from cache_rank.protocol import DownMessage, Row, UpMessage
from cache_rank.selector import Selector
from scripts.accuracy.tasks.pointer_chase import make_chain
from scripts.shared.serving import serve, stop_on_sigterm
from sglang_ext.server_args import BUNDLED_MODEL

SINKS, RECENT, WINDOW = 4, 16, 16
CPU = torch.device("cpu")
MEMORY_BYTES = 1 << 30
"""For resident tokens; touched only as it is used."""


def record(folder: Path, budget: int, chains: int) -> None:
    """Serve chains and record what the cache rank receives."""
    flags = (
        f"--sparse-threshold 264 --sparse-budget {budget} --sink-tokens {SINKS} "
        f"--recent-tokens {RECENT} --delta-capacity {budget} --query-window {WINDOW}"
    )
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    problems = [make_chain(seed=seed, facts=128, hops=80) for seed in range(chains)]
    with serve(flags.split(), {RECORD_VARIABLE: str(folder)}) as server:
        prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
        server.generate_all(prompts, problems[0].max_tokens)


def model_of(events: list[dict[str, Any]]) -> ModelShape:
    """Shape of the recorded model; the rotary frequencies are the bundled model's."""
    row = next(event for event in events if event["kind"] == "step")["rows"][0]
    layers, query_heads, head_dim = row["queries"].shape
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    exponents = range(0, head_dim, 2)
    frequency = tuple(config["rope_theta"] ** (-exponent / head_dim) for exponent in exponents)
    kv_heads = row["keys"].shape[1]
    return ModelShape(layers, query_heads, kv_heads, head_dim, "float32", head_dim**-0.5, frequency)


class StepResult(NamedTuple):
    """What a step's selection was worth and what it changed."""

    recall: float
    attention_mass: float
    entering_mean: float  # tokens a (layer, kv head)
    entering_most: int  # of any (layer, kv head): what the capacity must allow


def replay(config: CacheRankConfig, events: list[dict[str, Any]]) -> Iterator[StepResult]:
    """Select again from recorded tensors, one request a step; one result a warm step."""
    selector, timeline = Selector(config, CPU, MEMORY_BYTES), Timeline("", CPU)
    (layers,) = config.groups
    up = UpMessage(config, len(layers), 1, _buffer(UpMessage.size(config, len(layers), 1)))
    down = DownMessage(config, len(layers), 1, _buffer(DownMessage.size(config, len(layers), 1)))
    for number, event in enumerate(events):
        if event["kind"] == "load":
            sequence = selector.sequences.get(event["epoch"]) or selector.begin(event["epoch"])
            selector.load(sequence, event["shipment"])
            continue
        for row in event["rows"]:
            step = selector.begin_step(number, [Row(row["epoch"], row["position"])])
            up.queries[0], up.keys[0], up.values[0] = row["queries"], row["keys"], row["values"]
            selector.append(step, 0, up)
            scores = selector.score(step, 0, timeline)
            selector.answer(step, 0, scores, down, timeline)
            selector.end_step(step)
            for measured in selector.recall.take():
                by_head = (measured.recall, measured.attention_mass)
                recall, mass = (float(torch.tensor(heads).mean()) for heads in by_head)
                entering = (down.slots >= 0).sum(-1)
                yield StepResult(recall, mass, float(entering.float().mean()), int(entering.max()))


def _buffer(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def main() -> None:
    """Record, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--budget", type=int, default=40)
    parser.add_argument("--chains", type=int, default=4)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    stop_on_sigterm()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        with console.status("serving and recording"):
            record(Path(folder), options.budget, options.chains)
        events = list(read_events(Path(folder)))
    model = model_of(events)
    base = CacheRankConfig(
        model,
        layers_per_group=model.layers,
        sparse_budget=options.budget,
        sink_tokens=SINKS,
        recent_tokens=RECENT,
        query_window=WINDOW,
        selection_margin=0,
        delta_capacity=options.budget,
        max_rows=len({event["epoch"] for event in events if event["kind"] == "load"}),
        recall_interval=1,
    )

    predictors = Table(title=f"Selection by predictor, k = {options.budget}, no margin")
    for column in ("predictor", "frame", "recall", "attention captured", "entering tokens, mean"):
        predictors.add_column(column)
    results: dict[str, Any] = {"machine": platform.platform(), "predictors": {}, "margins": {}}
    variants = [(name, frame) for name in get_args(Predictor) for frame in get_args(Frame)]
    for name, frame in track(variants, description="predictors", console=console):
        config = msgspec.structs.replace(base, query_predictor=name, query_frame=frame)
        steps = list(replay(config, events))
        values = [statistics.mean(column) for column in list(zip(*steps, strict=True))[:3]]
        results["predictors"][f"{name}-{frame}"] = values
        predictors.add_row(name, frame, *(f"{value:.3f}" for value in values))
    console.print(predictors)

    margins = Table(title=f"Hysteresis, predictor {base.query_predictor}-{base.query_frame}")
    head_bytes = 2 * base.model.head_dim * base.model.torch_dtype.itemsize
    heads = base.model.layers * base.model.kv_heads
    columns = ("margin", "recall", "attention captured", "entering mean", "p99 of most")
    for column in (*columns, "useful bytes a step", "message bytes at p99"):
        margins.add_column(column)
    for margin in track([0, 5, 10, 20, 40], description="margins", console=console):
        config = msgspec.structs.replace(base, selection_margin=margin)
        steps = list(replay(config, events))
        recall, mass, entering = (
            statistics.mean(column) for column in list(zip(*steps, strict=True))[:3]
        )
        most = sorted(step.entering_most for step in steps)
        capacity = max(1, most[int(0.99 * len(most))])
        sized = msgspec.structs.replace(config, delta_capacity=capacity)
        message = DownMessage.size(sized, config.model.layers, rows=1)
        useful = round(entering * heads * head_bytes)
        results["margins"][margin] = [recall, mass, entering, capacity, useful, message]
        rates = (f"{value:.3f}" for value in (recall, mass, entering))
        margins.add_row(str(margin), *rates, str(capacity), str(useful), str(message))
    console.print(margins)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

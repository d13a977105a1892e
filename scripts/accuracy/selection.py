"""Replays what a cache rank received through other predictors and margins."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from cache_rank.config import CacheRankConfig, HistoryPredictor
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.measure.recall import measure_recall
from cache_rank.measure.recording import RECORD_VARIABLE, read_events
from cache_rank.measure.timeline import Timeline
from cache_rank.protocol import DownMessage, Row, UpMessage
from cache_rank.selector import Selector
from scripts.accuracy.pointer_chase import make_chain
from scripts.shared.models import BUNDLED_FOLDER
from scripts.shared.report import table
from scripts.shared.serving import serve

SINKS, RECENT, WINDOW = 4, 16, 16
MARGINS = (0, 5, 10, 20, 40)
CPU = torch.device("cpu")
MEMORY_BYTES = 1 << 30
"""The selector has so much memory for resident tokens; it is touched only as it is used."""


def recorded_events(budget: int, chains: int) -> list[dict[str, Any]]:
    """Everything that a cache rank receives while the bundled model walks chains."""
    flags = (
        "--kv-residency bf16 --sparse-threshold 264 "
        f"--sparse-budget {budget} --sink-tokens {SINKS} --recent-tokens {RECENT} "
        f'--max-swap-tokens {budget} --cache-rank-config {{"query_window":{WINDOW}}}'
    )
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    problems = [make_chain(seed=seed, facts=128, hops=80) for seed in range(chains)]
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    with tempfile.TemporaryDirectory() as folder:
        with serve(flags.split(), {RECORD_VARIABLE: folder}) as server:
            server.generate_all(prompts, problems[0].max_tokens)
        return list(read_events(Path(folder)))


def base_config(events: list[dict[str, Any]]) -> CacheRankConfig:
    """The configuration that all comparisons vary: without a margin, all layers in one group."""
    recorded: CacheRankConfig = events[0]["config"]
    return msgspec.structs.replace(
        recorded,
        layers_per_group=recorded.model.layers,
        hysteresis=0,
        max_rows=len({event["epoch"] for event in events if event["kind"] == "load"}),
    )


class StepResult(NamedTuple):
    """What a step's selection was worth and what it changed."""

    recall: float
    attention_mass: float
    entering_mean: float  # tokens a (layer, kv head)
    entering_most: int  # tokens of any (layer, KV head): the capacity must allow them


def replay(config: CacheRankConfig, events: list[dict[str, Any]]) -> Iterator[StepResult]:
    """Select again from recorded tensors, one request a step; one result a step that is sparse."""
    selector, timeline = Selector(config, CPU, MEMORY_BYTES), Timeline("", CPU)
    (layers,), (boundary,) = config.groups, config.boundaries
    up = UpMessage(config, boundary, 1, _buffer(UpMessage.size(config, boundary, 1)))
    down = DownMessage(config, len(layers), 1, _buffer(DownMessage.size(config, len(layers), 1)))
    keys: dict[int, torch.Tensor] = {}  # (layers, tokens, Hkv, D) by epoch
    for number, event in enumerate(events):
        if event["kind"] == "load":
            epoch, shipment = event["epoch"], event["shipment"]
            sequence = selector.sequences.get(epoch) or selector.begin(epoch)
            selector.load(sequence, shipment)
            keys[epoch] = torch.cat((keys.get(epoch, shipment[0, :, :0]), shipment[0]), dim=1)
        for row in event.get("rows", ()):
            epoch, position = row["epoch"], row["position"]
            worth = _worth(selector, epoch, position, row["queries"], keys[epoch])
            keys[epoch] = torch.cat((keys[epoch], row["keys"][:, None]), dim=1)
            step = selector.begin_step(number, [Row(epoch, position)])
            up.queries[0], up.keys[0], up.values[0] = row["queries"], row["keys"], row["values"]
            selector.serve(step, boundary, up, down, timeline)
            selector.end_step(step)
            if worth is not None:
                entering = (down.slots >= 0).sum(-1)
                yield StepResult(*worth, float(entering.float().mean()), int(entering.max()))


def _worth(
    selector: Selector, epoch: int, position: int, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[float, float] | None:
    """Recall and attention mass of what was selected for a step; None before a request is sparse.

    Args:
        selector: the answer to the step before is in its mirror.
        epoch: of the request.
        position: of the step.
        queries: (layers, Hq, D), the true queries of the step.
        keys: (layers, position, Hkv, D) of the tokens before it.
    """
    config, sequence = selector.config, selector.sequences[epoch]
    is_warm = sequence.queries > config.query_window
    if not is_warm or not 0 < sequence.filled == config.slots_wanted_after(position - 1):
        return None
    scores = score_tokens(queries, keys.transpose(1, 2), config.model.scale)
    slots = selector.mirror(sequence, config.groups[0])[..., : sequence.filled]
    recall, mass = measure_recall(scores, slots, config, position).mean((1, 2)).tolist()
    return recall, mass


def _buffer(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def compare_predictors(
    base: CacheRankConfig, events: list[dict[str, Any]]
) -> tuple[dict[str, list[float]], str]:
    """Recall, attention captured and entering tokens of each predictor; a table."""
    found = {}
    for name in tqdm(get_args(HistoryPredictor), desc="predictors"):
        config = msgspec.structs.replace(base, query_predictor=name)
        found[name] = _means(list(replay(config, events)))
    header = ("predictor", "recall", "attention captured", "entering tokens, mean")
    rows = [[name, *map("{:.3f}".format, row)] for name, row in found.items()]
    return found, table(header, rows)


def compare_margins(
    base: CacheRankConfig, events: list[dict[str, Any]]
) -> tuple[dict[int, list[float]], str]:
    """What hysteresis costs in recall and saves in bytes, by margin; a table."""
    token_bytes = 2 * base.model.head_dim * base.model.torch_dtype.itemsize
    heads = base.model.layers * base.model.kv_heads
    found = {}
    for margin in tqdm(MARGINS, desc="margins"):
        config = msgspec.structs.replace(base, hysteresis=margin)
        steps = list(replay(config, events))
        means = _means(steps)
        most = sorted(step.entering_most for step in steps)
        capacity = max(1, most[int(0.99 * len(most))])
        sized = msgspec.structs.replace(config, max_swap_tokens=capacity)
        message = DownMessage.size(sized, config.model.layers, rows=1)
        found[margin] = [*means, capacity, round(means[2] * heads * token_bytes), message]
    header = ("margin", "recall", "attention captured", "entering mean", "p99 of most")
    rows = [
        [str(margin), *map("{:.3f}".format, row[:3]), *map(str, row[3:])]
        for margin, row in found.items()
    ]
    return found, table((*header, "useful bytes a step", "message bytes at p99"), rows)


def _means(steps: list[StepResult]) -> list[float]:
    """Means of recall, attention captured and entering tokens over steps."""
    return [statistics.mean(column) for column in list(zip(*steps, strict=True))[:3]]

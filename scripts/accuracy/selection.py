"""Replays what a cache rank recorded through other predictors and margins."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from cache_rank.config import CacheRankConfig, HistoryPredictor
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.measure.recall import measure_recall
from cache_rank.measure.recording import RECORD_VARIABLE
from cache_rank.protocol import DownMessage, Row, UpMessage
from cache_rank.resident_sequence import ResidentSequence
from cache_rank.selector import Selector
from scripts.accuracy.pointer_chase import make_chain
from scripts.shared.models import BUNDLED_FOLDER
from scripts.shared.recordings import Recorded
from scripts.shared.report import table
from scripts.shared.serving import serve

SINKS, RECENT, WINDOW = 4, 16, 16
MARGINS = (0, 5, 10, 20, 40)
CPU = torch.device("cpu")
MEMORY_BYTES = 1 << 30
"""The selector has so much memory for resident tokens; it is touched only as it is used."""


def record(budget: int, chains: int, folder: Path) -> None:
    """Record everything that a cache rank receives while the bundled model walks chains."""
    flags = (
        "--cache-rank-gpus 1 --kv-residency bf16 --sparse-threshold 264 "
        f"--sparse-budget {budget} --sink-tokens {SINKS} --recent-tokens {RECENT} "
        f'--max-swap-tokens {budget} --cache-rank-config {{"query_window":{WINDOW}}}'
    )
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    problems = [make_chain(seed=seed, facts=128, hops=80) for seed in range(chains)]
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    with serve(flags.split(), {RECORD_VARIABLE: str(folder)}) as server:
        server.generate_all(prompts, problems[0].max_tokens)


def base_config(recorded: CacheRankConfig) -> CacheRankConfig:
    """The configuration that all comparisons vary.

    All layers are one group, and nothing needs what is fitted or sketched: queries are predicted
    from those before, and score all keys as they are held.
    """
    return msgspec.structs.replace(
        recorded,
        layers_per_group=recorded.model.layers,
        query_predictor=recorded.history_predictor,
        score_keys="resident",
        hysteresis=0,
        max_rows=1,
    )


class StepResult(NamedTuple):
    """What a step's selection was worth and what it changed."""

    recall: float
    attention_mass: float
    entering_mean: float  # tokens a (layer, kv head)
    entering_most: int  # tokens of any (layer, KV head): the capacity must allow them


def replay(config: CacheRankConfig, recorded: Recorded) -> Iterator[StepResult]:
    """Select again for a recorded sequence; one result a step that is sparse."""
    selector = Selector(config, CPU, MEMORY_BYTES)
    (layers,), (layer_message,) = config.groups, config.layer_messages
    up = UpMessage(config, layer_message, 1, _buffer(UpMessage.size(config, layer_message, 1)))
    down = DownMessage(config, len(layers), 1, _buffer(DownMessage.size(config, len(layers), 1)))
    sequence = selector.begin(sequence_id=1)
    selector.load(sequence, recorded.shipment())
    for number, queries in enumerate(recorded.queries):
        position = recorded.prompt + number
        worth = _worth(selector, sequence, position, queries, recorded.keys[:, :, :position])
        step = selector.begin_step(number, [Row(1, position)])
        up.queries[0] = queries
        up.keys[0], up.values[0] = (kv[:, :, position] for kv in (recorded.keys, recorded.values))
        selector.serve(step, layer_message, up, down)
        selector.end_step(step)
        if worth is not None:
            entering = (down.slots >= 0).sum(-1)
            yield StepResult(*worth, float(entering.float().mean()), int(entering.max()))


def _worth(
    selector: Selector,
    sequence: ResidentSequence,
    position: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[float, float] | None:
    """Recall and attention mass of what was selected for a step; None before a request is sparse.

    Args:
        selector: the answer to the step before is in its slot map.
        sequence: its sequence.
        position: of the step.
        queries: (layers, Hq, D), the true queries of the step.
        keys: (layers, Hkv, position, D) of the tokens before it.
    """
    config = selector.config
    is_warm = sequence.queries > config.query_window
    if not is_warm or not 0 < sequence.filled == config.slots_wanted_after(position - 1):
        return None
    scores = score_tokens(queries, keys, config.model.scale)
    slots = selector.slot_map(sequence, config.groups[0])[..., : sequence.filled]
    recall, mass = measure_recall(scores, slots, config, position).mean((1, 2)).tolist()
    return recall, mass


def _buffer(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def compare_predictors(
    base: CacheRankConfig, sequences: list[Recorded]
) -> tuple[dict[str, list[float]], str]:
    """Recall, attention captured and entering tokens of each predictor; a table."""
    found = {}
    for name in tqdm(get_args(HistoryPredictor), desc="predictors"):
        config = msgspec.structs.replace(base, query_predictor=name)
        found[name] = _means(_replay_all(config, sequences))
    header = ("predictor", "recall", "attention captured", "entering tokens, mean")
    rows = [[name, *map("{:.3f}".format, row)] for name, row in found.items()]
    return found, table(header, rows)


def compare_margins(
    base: CacheRankConfig, sequences: list[Recorded]
) -> tuple[dict[int, list[float]], str]:
    """What hysteresis costs in recall and saves in bytes, by margin; a table."""
    token_bytes = 2 * base.model.head_dim * base.model.torch_dtype.itemsize
    heads = base.model.layers * base.model.kv_heads
    found = {}
    for margin in tqdm(MARGINS, desc="margins"):
        config = msgspec.structs.replace(base, hysteresis=margin)
        steps = _replay_all(config, sequences)
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


def _replay_all(config: CacheRankConfig, sequences: list[Recorded]) -> list[StepResult]:
    """The results of all sequences.

    Raises:
        ValueError: no step of them is sparse.
    """
    steps = [step for recorded in sequences for step in replay(config, recorded)]
    if not steps:
        raise ValueError("the recording has no step whose selection was complete")
    return steps


def _means(steps: list[StepResult]) -> list[float]:
    """Means of recall, attention captured and entering tokens over steps."""
    return [statistics.mean(column) for column in list(zip(*steps, strict=True))[:3]]

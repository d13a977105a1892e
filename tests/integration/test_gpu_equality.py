"""Two GPUs select, in batches and a step behind, what they select for one request alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from workload import assert_sparse_is_dense, random_prompts

from cache_rank.config import CacheRankConfig, Predictor
from cache_rank.measure.recording import RECORD_VARIABLE
from cache_rank.protocol import DownMessage, Row, UpMessage
from cache_rank.schedule import LayerMessage
from cache_rank.selector import Selector
from scripts.shared.recordings import read_events
from scripts.shared.serving import serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = [pytest.mark.gpu(2, ranks=True), pytest.mark.timeout(600)]

BUDGET, CAPACITY, MARGIN, RECENT, GROUP_LAYERS = 256, 32, 32, 32, 2
FLAGS = (
    f"--skip-tokenizer-init --dense-layers 0 "
    f"--sparse-threshold 600 --recent-tokens {RECENT} --max-swap-tokens {CAPACITY} "
    f"--hysteresis {MARGIN} --cache-rank-config "
    f'{{"layers_per_group":{GROUP_LAYERS},"bulk_chunk_tokens":256}}'
).split()
PROMPTS = [700, 1500, 900, 2500, 650, 1100, 800, 2000, 700, 1300, 1000, 600]
TOKENS = [1000, 300, 700, 500, 900, 400, 600, 1000, 500, 400, 300, 600]


@pytest.mark.parametrize("predictor", ["last", "forecast"])
def test_selections_equal_those_of_each_request_alone(
    deep_model: Path, gpu_flags: list[str], tmp_path: Path, predictor: Predictor
) -> None:
    """Twelve requests of different lengths decode, eight at a time, for 1 000 steps."""
    flags = [*gpu_flags, *FLAGS, "--model-path", str(deep_model), "--sparse-budget", str(BUDGET)]
    flags += ["--max-sparse-requests", "8", "--query-predictor", predictor, "--forecast-lead", "1"]
    with serve(flags, {RECORD_VARIABLE: str(tmp_path)}) as server, ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(server.generate, random_prompts(PROMPTS), TOKENS))
    sparse_steps = sum(r["meta_info"]["cache_rank"]["sparse_steps"] for r in responses)
    assert sparse_steps > 0.9 * sum(TOKENS)

    recorded, *events = read_events(tmp_path)
    config = msgspec.structs.replace(recorded["config"], max_rows=1)
    assert config.query_predictor == predictor
    steps = {event["step"] for event in events if event["kind"] == "step"}
    assert len(steps) > 1000
    compared = sum(
        replay(config, events, sequence_id) for sequence_id in range(1, len(PROMPTS) + 1)
    )
    assert compared == sum(len(e["rows"]) for e in events if e["kind"] == "step")


def replay(config: CacheRankConfig, events: list[Any], sequence_id: int) -> int:
    """Select for one request alone, wait for every step, and count the selections compared."""
    device = torch.device("cuda")
    selector = Selector(config, device, 4 << 30)
    sequence, compared = selector.begin(sequence_id), 0
    messages = itertools.cycle(messages_of(config, device))
    for event in events:
        if event["kind"] == "load":
            if event["sequence_id"] == sequence_id:
                selector.load(sequence, event["shipment"].to(device))
            continue
        if event["kind"] == "projection":
            selector.load_projection(event["layer"], event["projection"].to(device))
            continue
        layer_message, up, down = next(messages)
        for row in (row for row in event["rows"] if row["sequence_id"] == sequence_id):
            if layer_message == config.layer_messages[0]:
                step = selector.begin_step(event["step"], [Row(sequence_id, row["position"])])
            for part in ("queries", "keys", "values", "hidden"):
                getattr(up, part)[0] = row[part]
            answered = event["answered"]
            assert answered == (config.groups[layer_message.selects_for] if down else range(0))
            selector.serve(step, layer_message, up, down)
            torch.cuda.synchronize()
            slot_map = selector.slot_map(sequence, answered)
            where = (event["step"], answered, sequence_id)
            assert torch.equal(slot_map.cpu(), row["slot_map"]), where
            compared += 1
    return compared


def messages_of(
    config: CacheRankConfig, device: torch.device
) -> list[tuple[LayerMessage, UpMessage, DownMessage | None]]:
    """Messages and answers of a step. Graphs work on them, so that they stay where they are."""

    def empty(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    messages: list[tuple[LayerMessage, UpMessage, DownMessage | None]] = []
    for layer_message in config.layer_messages:
        down = None
        if layer_message.selects_for is not None:
            layers = len(config.groups[layer_message.selects_for])
            down = DownMessage(config, layers, 1, empty(DownMessage.size(config, layers, 1)))
        up = UpMessage(config, layer_message, 1, empty(UpMessage.size(config, layer_message, 1)))
        messages.append((layer_message, up, down))
    return messages


@pytest.fixture(scope="module")
def generous_budget(deep_model: Path, gpu_flags: list[str]) -> Iterator[Any]:
    """A server has a budget no less than any length."""
    flags = [*gpu_flags, *FLAGS, "--model-path", str(deep_model), "--sparse-budget", "4096"]
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1"}) as server:
        yield server


def test_log_probabilities_equal_dense_ones_when_every_token_is_selected(
    generous_budget: Any,
) -> None:
    assert_sparse_is_dense(generous_budget, 100)

"""What the timeline says of a selector's work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_models import small_config

from cache_rank.config import ModelShape
from cache_rank.messages import MessageBuffers
from cache_rank.protocol import Row, bulk_shape, down_sizes, up_sizes
from cache_rank.selector import Selector


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_traced_step_is_what_every_step_is(device: str, tmp_path: Path) -> None:
    """The same work leaves the times of its parts; on a GPU it is replayed from graphs."""
    model = ModelShape(6, 8, 2, 128, "bfloat16", 128**-0.5, hidden_size=64)
    config = small_config(model, query_predictor="forecast", forecast_lead=1, max_rows=1)
    on, path = torch.device(device), tmp_path / "trace.json"
    selector = Selector(config, on, 1 << 24, trace=str(path))
    timeline = selector.timeline
    sequence = selector.begin(1)
    selector.load(sequence, torch.randn(bulk_shape(config, 45)).to(on, torch.bfloat16))
    ups, downs = (
        [torch.zeros(size, dtype=torch.uint8, device=on) for size in sizes(config, 1)]
        for sizes in (up_sizes, down_sizes)
    )
    messages = MessageBuffers(config, ups, downs).of(1)
    for number in range(1, 9):
        step = selector.begin_step(number, [Row(1, sequence.tokens)])
        timeline.enter_step(number, traced=number == 7)
        for layer_message, up in zip(config.layer_messages, messages.up, strict=True):
            timeline.mark(layer_message, "begin")
            timeline.mark(layer_message, "receive")
            selector.serve(step, layer_message, up, messages.answer_of(layer_message))
        selector.end_step(step)
    if device == "cuda":
        assert len(selector._graphs._graphs) == len(config.layer_messages)
    spans = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()]
    answering = ["predict", "score", "select", "gather"]
    assert [(span["args"]["step"], span["args"]["group"], span["name"]) for span in spans] == [
        (7, index, part)
        for index, layer_message in enumerate(config.layer_messages)
        for part in [
            "receive",
            *["append"] * (layer_message.kv_of is not None),
            *answering * (layer_message.selects_for is not None),
        ]
    ]
    assert sum(span["dur"] for span in spans if span["name"] in answering) > 0
    starts = [span["ts"] for span in spans]
    assert starts == sorted(starts)

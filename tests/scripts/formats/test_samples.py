"""Recordings as samples."""

from __future__ import annotations

from pathlib import Path

import torch

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.measure.recording import Recorder
from cache_rank.measure.timeline import Timeline
from cache_rank.protocol import DownMessage, Load, Row, UpMessage
from cache_rank.selector import Selector
from scripts.formats.samples import recorded_sample

CPU = torch.device("cpu")


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    """What a selector received for the longest of two sequences, in two groups of layers."""
    model = ModelShape(3, query_heads=4, kv_heads=2, head_dim=16, dtype="bfloat16", scale=0.25)
    config = CacheRankConfig(model, 2, sparse_budget=8, max_swap_tokens=8, max_rows=2)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    lengths = {1: 300, 2: 310}
    steps = 4
    tokens = {
        sequence_id: [normal(2, 3, 2, length + steps, 16), normal(steps, 3, 4, 16)]
        for sequence_id, length in lengths.items()
    }
    selector, recorder = Selector(config, CPU, 1 << 24), Recorder(tmp_path, config)
    timeline = Timeline("", CPU)
    for sequence_id, length in lengths.items():
        sequence = selector.begin(sequence_id)
        for part in (slice(0, 200), slice(200, length)):  # shipped in two parts
            shipment = tokens[sequence_id][0][:, :, :, part].transpose(2, 3).contiguous()
            recorder.record_load(Load(sequence_id, part.start, shipment.shape[2]), shipment)
            selector.load(sequence, shipment)
    for number in range(steps):
        rows = [Row(sequence_id, length + number) for sequence_id, length in lengths.items()]
        step = selector.begin_step(number, rows)
        for group, layers in enumerate(config.groups):
            layer_message = config.layer_messages[group]
            size = UpMessage.size(config, layer_message, len(rows))
            up = UpMessage(config, layer_message, len(rows), torch.zeros(size, dtype=torch.uint8))
            part = slice(layers.start, layers.stop)
            for index, row in enumerate(rows):
                kv, queries = tokens[row.sequence_id]
                up.queries[index] = queries[number, part]
                up.keys[index], up.values[index] = kv[:, part, :, row.position]
            size = DownMessage.size(config, len(layers), len(rows))
            down = DownMessage(config, len(layers), len(rows), torch.zeros(size, dtype=torch.uint8))
            selector.serve(step, layer_message, up, down, timeline)
            if (number, group) != (steps - 1, 1):  # it was stopped in the middle of a step
                recorder.record_step(selector, step, layer_message, up)
        selector.end_step(step)

    sample = recorded_sample(tmp_path, 2)
    kv, queries = tokens[2]
    assert torch.equal(sample.keys, kv[0, :, :, : 310 + steps - 1])
    assert torch.equal(sample.values, kv[1, :, :, : 310 + steps - 1])
    assert torch.equal(sample.queries, queries[1:3])
    assert sample.positions == range(311, 313)
    assert sample.scale == 0.25

"""Compare query predictors by what they select, and hysteresis by what it ships.

    python -m scripts.compare_selection [--recording FOLDER]

Replays every query, key and value that reached a cache rank through each predictor, and through
several margins: those that a server with CACHE_RANK_RECORD=FOLDER recorded, or else those of the
bundled model, which is served once. The true query of a step scores the selection that was made for
it: recall of the exact top tokens, and the attention probability captured. The bundled model
restates each key, so its queries repeat: read the order of the rows, not their height. The last
line is one JSON object.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from cache_rank.config import CacheRankConfig, HistoryPredictor
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.measure.recording import RECORD_VARIABLE
from cache_rank.protocol import DownMessage, Row, UpMessage
from cache_rank.selector import Selector
from scripts.accuracy.pointer_chase import make_chain
from scripts.formats.quality import measure_recall
from scripts.shared.command import UsageError, make_parser, run
from scripts.shared.models import BUNDLED_FOLDER
from scripts.shared.recordings import Recorded, read_recording
from scripts.shared.report import number, table_of
from scripts.shared.serving import serve

FLAGS = (
    "--cache-rank-gpus 1 --kv-residency bf16 --sparse-threshold 264 --sparse-budget 40 "
    "--sink-tokens 4 --recent-tokens 16 --max-swap-tokens 40 "
    '--cache-rank-config {"query_window":16}'
)
CHAINS = 4
MARGINS = (0, 5, 10, 20, 40)
CPU = torch.device("cpu")
MEMORY_BYTES = 1 << 30
"""The selector has so much memory for resident tokens; it is touched only as it is used."""


def record(folder: Path) -> None:
    """Record everything that a cache rank receives while the bundled model walks chains."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    chains = [make_chain(seed=seed, facts=128, hops=80) for seed in range(CHAINS)]
    prompts = [tokenizer(chain.prompt)["input_ids"] for chain in chains]
    with serve(FLAGS.split(), {RECORD_VARIABLE: str(folder)}) as server:
        server.generate_all(prompts, chains[0].max_tokens)


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
    entering_mean: float  # tokens a (layer, KV head)
    entering_most: int  # tokens of any (layer, KV head): the capacity must allow them


def replay(config: CacheRankConfig, recorded: Recorded) -> Iterator[StepResult]:
    """Select again for a recorded sequence; one result a step that is sparse."""
    selector = Selector(config, CPU, MEMORY_BYTES)
    (layers,), (layer_message,) = config.groups, config.layer_messages
    up = UpMessage(config, layer_message, 1, _buffer(UpMessage.size(config, layer_message, 1)))
    down = DownMessage(config, len(layers), 1, _buffer(DownMessage.size(config, len(layers), 1)))
    sequence = selector.begin(sequence_id=1)
    selector.load(sequence, recorded.shipment())
    for index, queries in enumerate(recorded.queries):
        position = recorded.prompt + index
        is_warm = sequence.queries > config.query_window
        is_sparse = is_warm and 0 < sequence.filled == config.slots_wanted_after(position - 1)
        if is_sparse:  # the slot map has the answer to the step before
            scores = score_tokens(queries, recorded.keys[:, :, :position], config.model.scale)
            slots = selector.slot_map(sequence, layers)[..., : sequence.filled]
            recall, mass = measure_recall(scores, slots, config, position).mean((1, 2)).tolist()
        step = selector.begin_step(index, [Row(1, position)])
        up.queries[0] = queries
        up.keys[0], up.values[0] = (kv[:, :, position] for kv in (recorded.keys, recorded.values))
        selector.serve(step, layer_message, up, down)
        selector.end_step(step)
        if is_sparse:
            entering = (down.slots >= 0).sum(-1)
            yield StepResult(recall, mass, float(entering.float().mean()), int(entering.max()))


def _buffer(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def measure(config: CacheRankConfig, sequences: list[Recorded]) -> dict[str, float]:
    """Means over the steps of all sequences, and the bytes of answers."""
    steps = [step for recorded in sequences for step in replay(config, recorded)]
    if not steps:
        raise UsageError("the recording has no step whose selection was complete")
    model = config.model
    token_bytes = 2 * model.head_dim * model.torch_dtype.itemsize
    recall, attention, entering, _ = map(float, np.mean(steps, axis=0))
    most = int(np.quantile([step.entering_most for step in steps], 0.99, method="higher"))
    sized = msgspec.structs.replace(config, max_swap_tokens=max(1, most))
    return {
        "recall": recall,
        "attention captured": attention,
        "entering mean": entering,
        "p99 of most": most,
        "useful bytes a step": round(entering * model.layers * model.kv_heads * token_bytes),
        "message bytes at p99": DownMessage.size(sized, model.layers, rows=1),
    }


def compare(
    name: str, values: Sequence[object], base: CacheRankConfig, sequences: list[Recorded]
) -> dict[str, dict[str, float]]:
    """Measure each value of a field of the configuration, and print a table."""
    found = {
        str(value): measure(msgspec.structs.replace(base, **{name: value}), sequences)
        for value in tqdm(values, desc=name)
    }
    rows = [
        {name: value}
        | {title: number(of, 0 if isinstance(of, int) else 3) for title, of in measured.items()}
        for value, measured in found.items()
    ]
    print(f"By {name}, k = {base.sparse_budget}\n\n{table_of(rows)}\n")
    return found


@torch.no_grad()
def main(argv: Sequence[str]) -> int:
    parser = make_parser("compare_selection", __doc__)
    parser.add_argument("--recording", type=Path, metavar="FOLDER", help="replay what it holds")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if not options.recording:
            record(Path(folder))
        config, sequences = read_recording(options.recording or Path(folder))
    base = base_config(config)
    predictors = compare("query_predictor", get_args(HistoryPredictor), base, sequences)
    margins = compare("hysteresis", MARGINS, base, sequences)
    results = {"machine": platform.platform(), "predictors": predictors, "margins": margins}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    run(main)

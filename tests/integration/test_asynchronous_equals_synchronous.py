"""The asynchronous system selects what the synchronous reference selects, token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from workload import SMALL_CACHE_RANK, random_prompts

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.measure.recording import RECORD_VARIABLE, read_events
from cache_rank.reference import SynchronousReference
from scripts.shared.serving import serve

STEPS = 240


@dataclasses.dataclass(frozen=True)
class Case:
    """One predictor on one kind of model; between them all head layouts and both modes occur.

    What is selected follows from what the cache rank holds, however it travels back.
    """

    predictor: str
    frame: str
    family: str
    heads: int
    kv_heads: int
    inference_kv: str
    wire_dtype: str = "bf16"
    dense_layers: int = 1

    def __str__(self) -> str:
        return f"{self.predictor}-{self.frame}-{self.family}-{self.heads}-{self.kv_heads}"


CASES = [
    Case("last", "post", "llama", 4, 4, "full"),
    Case("ema", "pre", "qwen3", 4, 1, "working-set"),
    Case("spade", "post", "qwen3", 4, 2, "full", wire_dtype="fp8"),
    Case("ridge", "pre", "llama", 4, 2, "working-set", dense_layers=0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selections_equal_the_synchronous_reference(
    case: Case, random_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = random_model(case.family, 3, case.heads, case.kv_heads)
    budget, capacity, margin = 40, 12, 6  # an eighth of the length, about
    arguments = [
        *SMALL_CACHE_RANK,
        *("--model-path", str(model), "--skip-tokenizer-init"),
        *("--sparse-threshold", "120", "--sparse-budget", str(budget)),
        *("--delta-capacity", str(capacity), "--selection-margin", str(margin)),
        *("--query-predictor", case.predictor, "--query-frame", case.frame),
        *("--inference-kv", case.inference_kv, "--wire-dtype", case.wire_dtype),
        *("--dense-layers", str(case.dense_layers)),
    ]
    with serve(arguments, {RECORD_VARIABLE: str(tmp_path)}) as server:
        # Of different lengths, so that requests turn sparse and end at different steps.
        prompts = random_prompts([110, 200, 330])
        responses = server.generate_all(prompts, STEPS)
    steps = [r["meta_info"]["cache_rank"]["sparse_steps"] for r in responses]
    assert min(steps) > 200, steps

    config = CacheRankConfig(
        model=ModelShape(
            layers=3 - case.dense_layers,
            query_heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=32,
            dtype="float32",
            scale=32**-0.5,
            rotary_frequency=recorded_frequency(model),
        ),
        layers_per_group=2,
        sparse_budget=budget,
        sink_tokens=4,
        recent_tokens=8,
        query_window=4,
        query_predictor=case.predictor,  # type: ignore[arg-type]
        query_frame=case.frame,  # type: ignore[arg-type]
        selection_margin=margin,
        delta_capacity=capacity,
    )
    assert replay(config, tmp_path) > 3 * 200


def recorded_frequency(model: Path) -> tuple[float, ...]:
    """Rotary frequencies as the inference rank reads them: off the float32 angles of position 1."""
    from transformers import AutoConfig

    theta = AutoConfig.from_pretrained(model).rope_parameters["rope_theta"]
    exponent = torch.arange(0, 32, 2, dtype=torch.float32) / 32
    angle = 1.0 / theta**exponent
    return tuple(torch.atan2(angle.sin().double(), angle.cos().double()).tolist())


def replay(config: CacheRankConfig, folder: Path) -> int:
    """Feed the recorded tensors to the reference; how many selections were compared."""
    references: dict[int, SynchronousReference] = {}
    shipments: dict[int, list[Any]] = {}
    compared = 0
    for event in read_events(folder):
        if event["kind"] == "load":
            shipments.setdefault(event["epoch"], []).append(event["shipment"])
            continue
        for row in event["rows"]:
            epoch, position = row["epoch"], row["position"]
            if epoch not in references:
                prompt = torch.cat(shipments.pop(epoch), dim=2)
                references[epoch] = SynchronousReference(config, prompt[0], prompt[1])
            reference = references[epoch]
            for index, layer in enumerate(event["layers"]):
                reference.append(
                    layer, row["queries"][index], row["keys"][index], row["values"][index]
                )
                reference.select(layer, position)
                expected = [
                    [-1 if token is None else token for token in slots]
                    for slots in reference.slots[layer]
                ]
                assert row["mirror"][index].tolist() == expected, (event["step"], layer, epoch)
            compared += 1
    return compared

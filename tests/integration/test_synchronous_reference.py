"""On the real engine, the asynchronous system does what the synchronous reference does.

It selects the same tokens, one for one, and its log-probabilities are those of another
implementation of the model: transformers, whose attention is replaced by the reference. That one
shares neither kernels, nor the pool, nor the exchange with SGLang and the cache rank. The weights
are random and wide, so that which tokens are attended to shows in every probability.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from calibration_cards import make_card
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from workload import DENSE, difference, log_probabilities, random_prompts

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.measure.recording import RECORD_VARIABLE
from cache_rank.reference import SynchronousReference
from scripts.shared.recordings import read_events
from sglang_ext.calibration.files import Calibration, Fit, Source, sources, write
from sglang_ext.calibration.fitting import Correction
from sglang_ext.calibration.key_statistics import KeyBasis

HEAD_DIM, WIDTH = 32, 64
THRESHOLD, BUDGET, CAPACITY, MARGIN = 120, 40, 12, 6  # the budget is an eighth of the length, about
STEPS = 240


@dataclasses.dataclass(frozen=True)
class Case:
    """A case is a predictor on a kind of model. Together they have all head layouts and both modes.

    What is selected follows from what the cache rank holds, however it travels back.
    """

    predictor: Any
    family: str
    heads: int
    kv_heads: int
    inference_kv: str
    dense_layers: int = 1
    layers: int = 3
    layers_per_group: int = 2
    forecast_lead: int = 2
    calibrated: bool = False
    score_keys: Any = "resident"
    score_normalizer: Any = "all"

    def __str__(self) -> str:
        return f"{self.predictor}-{self.family}-{self.heads}-{self.kv_heads}"

    def engine(self) -> dict[str, Any]:
        """The arguments of the engine, but for its model."""
        return {
            "cache_rank_gpus": 1,
            "kv_residency": "bf16",
            "dtype": "float32",
            "max_total_tokens": 20000,
            "max_sparse_requests": 8,
            "skip_tokenizer_init": True,
            # The prompt of the request that decodes alone is shipped in one step, longer ones not.
            "bulk_chunk_tokens": 160,
            "sparse_threshold": THRESHOLD,
            "inference_kv": self.inference_kv,
            "dense_layers": self.dense_layers,
            **self.policy(),
        }

    def policy(self) -> dict[str, Any]:
        """What both the engine and the reference go by."""
        return {
            "layers_per_group": self.layers_per_group,
            "forecast_lead": self.forecast_lead,
            "sparse_budget": BUDGET,
            "sink_tokens": 4,
            "recent_tokens": 8,
            "query_window": 4,
            "query_predictor": self.predictor,
            "hysteresis": MARGIN,
            "max_swap_tokens": CAPACITY,
            "score_keys": self.score_keys,
            "score_normalizer": self.score_normalizer,
        }

    def config(self, rotary_frequency: list[float]) -> CacheRankConfig:
        return CacheRankConfig(
            model=ModelShape(
                layers=self.layers - self.dense_layers,
                query_heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=HEAD_DIM,
                dtype="float32",
                scale=HEAD_DIM**-0.5,
                rotary_frequency=tuple(rotary_frequency),
                hidden_size=WIDTH,
                query_norm_epsilon=1e-6 if self.family == "qwen3" else None,
            ),
            **self.policy(),
        )

    def sources(self) -> dict[int, Source]:
        """By which layer's input each layer is forecast."""
        return sources(self.layers, self.dense_layers, self.layers_per_group, self.forecast_lead)

    def calibration(self) -> Calibration:
        """Corrections and bases as random as the weights, in numbers that a file holds."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16().float()

        width = self.heads * HEAD_DIM
        corrections = {
            layer: Correction(random(WIDTH + 1, 3), random(3, width) / 8)
            for layer in self.sources()
        }
        fit = Fit(0, 1.0, 1.0, 1.0, 1.0)
        card = make_card(
            architecture={"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[self.family],
            hidden_size=WIDTH,
            layers=self.layers,
            query_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            dense_layers=self.dense_layers,
            layers_per_group=self.layers_per_group,
            forecast_lead=self.forecast_lead,
            fits=dict.fromkeys(corrections, fit),
        )
        heads = (self.kv_heads, HEAD_DIM, HEAD_DIM)
        bases = {
            layer: KeyBasis(2 * torch.eye(HEAD_DIM) + random(*heads) / 16, random(*heads[:2]) / 8)
            for layer in range(self.dense_layers, self.layers)
        }
        return Calibration(card, corrections, bases)


FORECAST: dict[str, Any] = {"layers": 6, "layers_per_group": 1, "calibrated": True}
DEFAULT = [Case("forecast", "qwen3", 4, 2, "full", **FORECAST)]
THOROUGH = [
    Case("spade", "llama", 4, 2, "working-set", dense_layers=0),
    Case("forecast", "qwen2", 2, 2, "working-set", layers=7, forecast_lead=1),
]
# What is equal but for the last bits is not when it is rounded to codes.
ROUNDED = [
    Case(
        *("forecast", "qwen3", 4, 1, "working-set"),
        **FORECAST,
        dense_layers=0,
        score_keys="sketch",
        score_normalizer="attended",
    ),
]


def served_with(cases: list[Case]) -> pytest.MarkDecorator:
    """Run a test on an engine of each case; the tests of a case are a group, and share it."""
    parameters = []
    for case in cases:
        marks = [pytest.mark.xdist_group(str(case))]
        marks.append(pytest.mark.releases if case in DEFAULT else pytest.mark.thorough)
        parameters.append(pytest.param(case, id=str(case), marks=marks))
    return pytest.mark.parametrize("served", parameters, indirect=True)


Slots = list[list[int]]
"""The tokens in the slots of each KV head."""


class Served(NamedTuple):
    """An engine has answered requests that decoded together, and one alone, sparse and dense.

    `recorded` is the folder of what its cache rank received and selected. The dense request was
    asked again by weights of negated queries, and then by those before.
    """

    case: Case
    model: Path
    recorded: Path
    together: list[Any]
    prompt: list[int]
    alone: Any
    dense: Any
    by_other_weights: Any
    by_the_same: Any


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest,
    random_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    case = request.param
    model = random_model(case.family, case.layers, case.heads, case.kv_heads)
    folder = tmp_path_factory.mktemp("engine")
    engine = {**case.engine(), "model_path": str(model)}
    if case.calibrated:
        write(folder / "calibration", case.calibration())
        engine["calibration"] = str(folder / "calibration")
    (prompt,) = random_prompts([150])
    sampling = {"max_new_tokens": STEPS, "temperature": 0, "ignore_eos": True}
    alone = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    requests = [
        # Requests of different lengths turn sparse and end at different steps.
        {"input_ids": random_prompts([110, 200, 330]), "sampling_params": sampling},
        alone,
        {**alone, "sampling_params": sampling | DENSE["sampling_params"]},
    ]
    asked, answered, recorded = (folder / name for name in ("asked", "answered", "recorded"))
    asked.write_text(json.dumps({"engine": engine, "requests": requests}))
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("use_engine.py")), str(asked), str(answered)],
        env={**os.environ, RECORD_VARIABLE: str(recorded)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert answered.exists(), ran.stdout[-2000:] + ran.stderr[-4000:]
    together, *others = json.loads(answered.read_text())
    return Served(case, model, recorded, together, prompt, *others)


@served_with([*DEFAULT, *THOROUGH, *ROUNDED])
def test_selections_equal_the_synchronous_reference(served: Served) -> None:
    responses = [*served.together, served.alone]
    steps = [response["meta_info"]["cache_rank"]["sparse_steps"] for response in responses]
    assert min(steps) > 200, steps
    config = served.case.config(recorded_frequency(served.model))
    compared, different = replay(config, served.recorded)
    assert compared > len(responses) * 200
    if served.case.score_keys != "sketch":
        assert not different
    # By codes that a processor rounds otherwise, a token of thousands is another one.
    others = [
        len(set(one) - set(other))
        for found, expected in different.values()
        for one, other in zip(found, expected, strict=True)
    ]
    assert sum(others) <= compared * BUDGET // 2000, different
    assert max(others, default=0) <= 1, different


@served_with(DEFAULT)
def test_an_engine_takes_other_weights(served: Served) -> None:
    assert served.by_other_weights["output_ids"] != served.dense["output_ids"]
    assert served.by_the_same["output_ids"] == served.dense["output_ids"]


def recorded_frequency(model: Path) -> list[float]:
    """Return the frequencies that the inference rank reads off float32 angles of position 1."""
    theta = AutoConfig.from_pretrained(model).rope_parameters["rope_theta"]
    exponent = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM
    angle = 1.0 / theta**exponent
    return torch.atan2(angle.sin().double(), angle.cos().double()).tolist()


def replay(
    config: CacheRankConfig, folder: Path
) -> tuple[int, dict[tuple[int, int, int], tuple[Slots, Slots]]]:
    """Feed the recorded tensors to the reference, and compare every selection.

    Returns:
        How many steps of requests were compared, and by step, layer and sequence what differs:
        found and expected. From there the reference goes on with what was found.
    """
    references: dict[int, SynchronousReference] = {}
    shipments: dict[int, list[Any]] = {}
    projections: dict[int, Any] = {}
    bases: dict[int, Any] = {}
    compared, different = 0, {}
    for event in read_events(folder):
        if event["kind"] == "load":
            shipments.setdefault(event["sequence_id"], []).append(event["shipment"])
        if event["kind"] == "projection":
            projections[event["layer"]] = event["projection"]
        if event["kind"] == "basis":
            bases[event["layer"]] = event["basis"]
        for row in event.get("rows", ()):
            sequence_id, position = row["sequence_id"], row["position"]
            if sequence_id not in references:
                prompt = torch.cat(shipments.pop(sequence_id), dim=2)
                references[sequence_id] = SynchronousReference(config, prompt[0], prompt[1])
                references[sequence_id].projections = projections
                references[sequence_id].bases = bases
            reference = references[sequence_id]
            for index, layer in enumerate(event["layers"]):
                reference.append(
                    layer, row["queries"][index], row["keys"][index], row["values"][index]
                )
            for index, layer in enumerate(event["answered"]):
                if event["same_step"]:
                    reference.select_now(layer, row["hidden"], position)
                else:
                    reference.select(layer, position, row["hidden"])
                expected = [
                    [-1 if token is None else token for token in slots]
                    for slots in reference.slots[layer]
                ]
                found = row["slot_map"][index].tolist()
                if found != expected:
                    different[event["step"], layer, sequence_id] = found, expected
                    reference.slots[layer] = [
                        [None if token == -1 else token for token in slots] for slots in found
                    ]
            compared += len(event["answered"]) > 0
    return compared, different


class ReferenceAttention:
    """One request attends to everything until its turn, then to what the reference selects.

    The request is shipped in the first step at the threshold and warms up from the next; it turns
    sparse when the query window and every slot that can be used are full.
    """

    def __init__(self, case: Case, config: CacheRankConfig, model: Any) -> None:
        self.config = config
        layers = model.model.layers
        self.dense_layers = len(layers) - config.model.layers
        self.projections = {}
        if config.forecasts:
            sparse = enumerate(layers[self.dense_layers :])
            self.projections = {layer: projection_of(module, config) for layer, module in sparse}
            corrections = case.calibration().corrections if case.calibrated else {}
            told = case.sources()
            for layer in [layer for layer, source in told.items() if source.is_before]:
                self.projections[layer - self.dense_layers][:-1] = 0
                if layer not in corrections:
                    del self.projections[layer - self.dense_layers]
            for layer, (left, right) in corrections.items():
                projection = self.projections[layer - self.dense_layers][:-1]
                projection += (left @ right).view(projection.shape)
        self.hidden: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self.keep_input, index))
        self.reference: SynchronousReference | None = None
        self.exchanged = self.filled = self.sparse_steps = 0
        self.is_sparse = False

    def keep_input(self, layer: int, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        self.hidden[layer - self.dense_layers] = args[0][0, -1]

    def begin_step(self, position: int) -> None:
        wanted = self.config.slots_wanted_after(position - 1)
        warm = self.exchanged > self.config.query_window and self.filled == wanted
        self.is_sparse = self.is_sparse or warm
        self.sparse_steps += self.is_sparse

    def end_step(self, position: int, cache: DynamicCache) -> None:
        if self.reference is not None:
            self.exchanged += 1
            self.filled = self.config.filled_after(position, self.filled)
        elif position + 1 >= THRESHOLD:
            layers = cache.layers[self.dense_layers :]
            keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers])
            values = torch.stack([layer.values[0].transpose(0, 1) for layer in layers])
            self.reference = SynchronousReference(self.config, keys, values)
            self.reference.projections = self.projections

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx - self.dense_layers
        if self.reference is None or layer < 0:
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        position = key.shape[2] - 1
        config = self.config
        entered = layer // config.layers_per_group - config.forecast_lead
        same_step = config.forecasts and entered >= 0
        if same_step:
            hidden = self.hidden[config.groups[entered].start]
            self.reference.select_now(layer, hidden, position)
        elif self.exchanged:
            # What entered a later layer was not known before the step before had ended.
            hidden = self.hidden[config.groups[entered].start] if config.forecasts else None
            self.reference.select(layer, position - 1, hidden)
        self.reference.append(layer, query[0, :, 0], key[0, :, -1], value[0, :, -1])
        if self.is_sparse:
            output = self.reference.attend(layer, query[0, :, 0], position)[None, None]
        else:
            output, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return output, None


def projection_of(layer: Any, config: CacheRankConfig) -> torch.Tensor:
    """By what the queries of a layer of transformers are forecast, (H + 2, Hq, D)."""
    attention, norm = layer.self_attn, layer.input_layernorm
    heads = config.model.query_heads
    rows = torch.zeros(WIDTH + 2, heads * HEAD_DIM)
    rows[:-2] = norm.weight[:, None] * attention.q_proj.weight.T
    if attention.q_proj.bias is not None:
        rows[-2] = attention.q_proj.bias
    rows[-1] = attention.q_norm.weight.repeat(heads) if hasattr(attention, "q_norm") else 1.0
    return rows.view(WIDTH + 2, heads, HEAD_DIM)


@torch.no_grad()
def reference_log_probabilities(
    case: Case, folder: Path, prompt: list[int], generated: list[int]
) -> tuple[list[float], int]:
    """Return the log-probabilities of the generated tokens, and how many steps were sparse."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = case.config(model.model.rotary_emb.inv_freq.tolist())
    attention = ReferenceAttention(case, config, model)
    AttentionInterface.register("synchronous_reference", attention)
    model.set_attn_implementation("synchronous_reference")
    cache, found = DynamicCache(), []
    tokens = torch.tensor([prompt])
    for token in generated:
        position = cache.get_seq_length()
        if found:
            attention.begin_step(position)
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[0, -1]
        if found:
            attention.end_step(position, cache)
        found.append(float(logits.log_softmax(-1)[token]))
        tokens = torch.tensor([[token]])
    return found, attention.sparse_steps


@served_with([*DEFAULT, *THOROUGH])
def test_log_probabilities_equal_the_reference(served: Served) -> None:
    expected, sparse_steps = reference_log_probabilities(
        served.case, served.model, served.prompt, served.alone["output_ids"]
    )
    assert served.alone["meta_info"]["cache_rank"]["sparse_steps"] == sparse_steps > 200
    assert difference(log_probabilities(served.alone), expected) < 1e-4
    # The comparison means something: attending to everything gives other numbers.
    assert difference(log_probabilities(served.dense), expected) > 1e-2

"""Which models a server takes, with which calibration, and what it chooses for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calibration_cards import make_card
from parsed_args import LLAMA, Model, parse, pretend_gpus, refusal_of
from sglang.srt.server_args import ServerArgs

from sglang_ext import compat
from sglang_ext.calibration.files import TENSORS, Calibration, Card, write
from sglang_ext.refusals import UnsupportedError
from sglang_ext.server_args import BUNDLED_MODEL, parse_server_args

pytestmark = pytest.mark.usefixtures("parses_on_a_cpu")

DEEP = {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}


def rotated(kind: str) -> dict[str, Any]:
    """A deep model whose positions are scaled."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    of_kind = factors if kind == "longrope" else {}
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 512, **of_kind}
    return DEEP | {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
    "layer_types": None,
}
FP8 = {"num_bits": 8, "type": "float"}
DRAFT_WEIGHTS = "--speculative-algorithm CACHE_RANK --speculative-draft-weights int4"


@pytest.mark.parametrize(
    "model",
    [
        Model("Llama", kind="ForSequenceClassification"),
        Model("DeepseekV2", small=False),
        Model("Qwen2", WINDOWS),
        Model("Mistral", {"sliding_window": 8}),
        Model("Gemma2"),  # every other layer has a window
        Model("Llama4Text"),  # chunked attention
        Model("Qwen3Next", small=False),  # gated delta net
        Model("FalconH1", small=False),  # Mamba and attention
        Model("Lfm2", small=False),  # short convolutions
        Model("Qwen2VL", kind="ForConditionalGeneration", small=False),
        Model("Llama", {"head_dim": 20}),
        Model("Llama", {"head_dim": 264}),
    ],
    ids=str,
)
def test_refuses_a_model_that_a_working_set_cannot_represent(model: Model, tmp_path: Path) -> None:
    assert refusal_of("", model.write(tmp_path)).startswith(f"--model-path {tmp_path}: ")


def test_refuses_settings_that_do_not_fit_the_model(tmp_path: Path) -> None:
    model = LLAMA.write(tmp_path)
    for flags in ("--dense-layers 2", "--query-predictor forecast"):
        assert refusal_of(flags, model).startswith(f"{flags}: ")
    said = refusal_of("--score-keys sketch --calibration folder", model)
    assert said.startswith("--score-keys sketch: heads have 16 elements")


def test_refuses_heads_that_kernels_of_gpus_do_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    pretend_gpus(2, monkeypatch)
    model = Model("Llama", {"head_dim": 80}).write(tmp_path)
    assert "on GPUs a cache rank serves 64, 128, 256" in refusal_of("", model)
    (wide := tmp_path / "wide").mkdir()
    model = Model("Llama", {"head_dim": 256, "dtype": "bfloat16"}).write(wide)
    assert "heads of up to 128 elements, not 256" in refusal_of("--kv-residency mosaickv", model)


def test_an_inline_server_refuses_a_model_whose_keys_have_no_sketch(tmp_path: Path) -> None:
    model = LLAMA.write(tmp_path)
    with pytest.raises(UnsupportedError, match=r"^--model-path .*: heads have 16 elements"):
        parse_server_args(["--model-path", str(model)])


WIDE = {
    **{"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64},
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("changes", "flags", "why"),
    [
        ({}, "", None),
        ({}, "--dtype float32", "multiplies bfloat16 and float16, and the model has float32"),
        ({"hidden_size": 192}, "", "layers over the hidden size have 192 inputs"),
        (
            {"hidden_size": 384, "num_attention_heads": 6},
            "--tp-size 2",
            "layers over the heads have 192 inputs",
        ),
        ({}, "--tp-size 2", "layers over the intermediate size have 192 inputs"),
    ],
)
def test_weights_of_drafts_must_suit_the_kernel_of_gpus(
    changes: dict[str, Any],
    flags: str,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    pretend_gpus(2, monkeypatch)
    model = Model("Llama", WIDE | changes).write(tmp_path)
    given = f"--model-path {model} {DRAFT_WEIGHTS} {flags}".split()
    if why is None:
        assert parse_server_args(given).rounds_draft_weights
        return
    with pytest.raises(UnsupportedError, match=why):
        parse_server_args(given)


def test_weights_that_are_quantized_are_not_rounded_for_drafts(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    changes = {"head_dim": 32, "dtype": "bfloat16", "quantization_config": config}
    model = Model("Llama", changes).write(tmp_path)
    with pytest.raises(UnsupportedError, match=r"own weights are quantized \(fp8\)"):
        parse_server_args(f"--model-path {model} {DRAFT_WEIGHTS}".split())


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, {}),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8, "config_groups": {}}, {}),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}),
    ],
    ids=["modelopt", "compressed-tensors", "a file of its own"],
)
@pytest.mark.parametrize("flags", ["", "--kv-cache-dtype bfloat16"])
def test_refuses_a_checkpoint_of_quantized_k_and_v(
    config: dict[str, Any], file: dict[str, Any], flags: str, tmp_path: Path
) -> None:
    changes = {"quantization_config": config} if config else {}
    model = Model("Llama", {"dtype": "bfloat16", **changes}).write(tmp_path)
    if file:
        (model / "hf_quant_config.json").write_text(json.dumps(file))
    said = refusal_of(flags, model)
    assert said.startswith(f"--model-path {model}: its K and V are declared to be quantized")


def test_refuses_a_pool_of_a_dtype_that_kernels_do_not_take(tmp_path: Path) -> None:
    model = Model("Llama", {"dtype": "float64"}).write(tmp_path)
    assert refusal_of("", model).startswith("--dtype auto: a KV pool of float64")


def test_refuses_another_dtype_than_the_models() -> None:
    assert "model's dtype, which is float32" in refusal_of("--kv-cache-dtype bf16")
    assert refusal_of("--dtype bfloat16 --kv-cache-dtype fp8_e4m3").startswith("--kv-cache-dtype")


def test_the_checkpoint_decides_its_dtype(tmp_path: Path) -> None:
    model = Model("Llama", {"dtype": "bfloat16"}).write(tmp_path)
    args = parse(["--model-path", str(model)])
    assert args.dtype == "auto"
    assert str(compat.model_config(args).dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    "model",
    [
        Model("Qwen2", {"sliding_window": 8}),
        Model("Mistral", {"sliding_window": None}),
        Model("Llama", {"head_dim": 256}),
        Model("Llama", {"head_dim": 24}),
    ],
    ids=str,
)
def test_accepts_a_model_of_full_attention(model: Model, tmp_path: Path) -> None:
    assert parse(["--model-path", str(model.write(tmp_path))]).model_path == str(tmp_path)


def card(model: Path, **changes: Any) -> Card:
    """What a calibration of a model says."""
    config = json.loads((model / "config.json").read_text())
    shape = {
        "architecture": config["architectures"][0],
        "hidden_size": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "query_heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
    }
    return make_card(**shape | changes)


FORECAST = '--query-predictor forecast --forecast-lead 1 --cache-rank-config {"layers_per_group":1}'


@pytest.mark.parametrize("placement", ["--cache-rank-gpus 1", ""])
def test_a_calibration_that_does_not_suit_is_refused_at_the_door(
    placement: str, tmp_path: Path
) -> None:
    flags = [*placement.split(), "--calibration", str(tmp_path)]

    def refusal() -> str:
        with pytest.raises(UnsupportedError, match=rf"^--calibration {tmp_path}: ") as caught:
            parse_server_args(flags)
        return str(caught.value)

    assert "has no card.json" in refusal()
    write(tmp_path, Calibration(card(BUNDLED_MODEL), {}, {}))
    assert parse_server_args(flags).calibration == str(tmp_path)
    for name, value in {
        **{"architecture": "LlamaModel", "layers": 9, "query_heads": 32, "kv_heads": 16},
        **{"head_dim": 512, "dense_layers": 0},
    }.items():
        write(tmp_path, Calibration(card(BUNDLED_MODEL, **{name: value}), {}, {}))
        assert f"it is of {name} {value} (somewhere), and the server has" in refusal()
    write(tmp_path, Calibration(card(BUNDLED_MODEL), {}, {}))
    (tmp_path / TENSORS).unlink()
    assert f"it has no {TENSORS}" in refusal()


@pytest.mark.parametrize("changed", ["hidden_size", "layers_per_group", "forecast_lead"])
def test_a_calibration_of_another_schedule_is_refused_with_forecasts_only(
    changed: str, tmp_path: Path
) -> None:
    model = Model("Qwen3", DEEP | {"head_dim": 32}).write(tmp_path)
    folder = tmp_path / "calibration"
    write(folder, Calibration(card(model, **{changed: 1000}), {}, {}))
    flags = f"--model-path {model} --calibration {folder}"
    assert f"it is of {changed} 1000" in refusal_of(f"{FORECAST} --calibration {folder}", model)
    parse(f"--query-predictor last {flags}".split())
    parse_server_args(flags.split())


@pytest.mark.parametrize(
    ("model", "flags", "chosen"),
    [
        (Model("Llama", DEEP), "", ("forecast", 2)),
        (
            Model("Qwen2", DEEP),
            '--dense-layers 4 --cache-rank-config {"layers_per_group":1}',
            ("forecast", 1),
        ),
        (Model("Qwen3", DEEP), "--dense-layers 4", ("last", 6)),
        (Model("Qwen3", DEEP), "--dense-layers 4 --forecast-lead 1", ("forecast", 2)),
        (Model("Olmo2", DEEP), "", ("last", 6)),
        (Model("Olmo2", DEEP), "--query-predictor forecast", ("forecast", 2)),
        (Model("Llama", rotated("yarn")), "", ("forecast", 2)),
        (Model("Llama", rotated("longrope")), "", ("last", 6)),
        (
            Model("Llama", DEEP),
            '--query-predictor spade --cache-rank-config {"layers_per_group":3}',
            ("spade", 3),
        ),
        (LLAMA, "", ("last", 6)),
    ],
    ids=str,
)
def test_queries_are_forecast_where_the_model_allows(
    model: Model, flags: str, chosen: tuple[str, int], tmp_path: Path
) -> None:
    args = parse(["--model-path", str(model.write(tmp_path)), *flags.split()])
    assert (args.query_predictor, args.layers_per_group) == chosen

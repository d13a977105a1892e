"""What the launcher sets, what it accepts, and every combination it refuses at the door."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from calibration_cards import make_card
from packaging.version import Version
from sglang.srt.server_args import ServerArgs

import sglang_ext
from cache_rank.config import CacheRankConfig, ModelShape
from sglang_ext import compat, cpu, plugin, server_args
from sglang_ext.budget import INLINE_CURVE, BudgetCurve
from sglang_ext.calibration.files import TENSORS, Calibration, Card, write
from sglang_ext.flags import (
    BACKEND,
    CACHE_RANK_FIELDS,
    CHECKSUM_VARIABLE,
    CONFIG_FLAG,
    CONFIG_KEYS,
    PREFILL_BACKEND,
    SHARE_GPU_VARIABLE,
    flag_of,
    read_config,
)
from sglang_ext.refusals import (
    ALLOW_LARGE_BUDGET_VARIABLE,
    UnsupportedError,
)
from sglang_ext.server_args import BUNDLED_MODEL, CacheRankServerArgs, parse_server_args

ROOT = Path(sglang_ext.__file__).parent.parent


def parse(argv: Sequence[str]) -> CacheRankServerArgs:
    """Parse the command line of a server that has a cache rank unless it says otherwise."""
    return parse_server_args(["--cache-rank-gpus", "1", *argv])


@functools.cache
def parser() -> ArgumentParser:
    """One parser for all tests: SGLang's has hundreds of flags."""
    plugin.register()  # only then does the command line know the name of our backend
    return server_args.argument_parser()


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parsing sets up logging and the environment; the tests are of a machine without a GPU."""
    made = parser()
    environment, level = dict(os.environ), logging.root.level
    handlers, logging.root.handlers = logging.root.handlers, []
    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    monkeypatch.setattr(server_args, "argument_parser", lambda kind: made)
    for variable in (ALLOW_LARGE_BUDGET_VARIABLE, CHECKSUM_VARIABLE):
        os.environ.pop(variable, None)
    yield
    os.environ.clear()
    os.environ.update(environment)
    logging.root.handlers = handlers
    logging.root.setLevel(level)


# Models, by their configuration alone.

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, eq=False)
class Model:
    """A model of a family, and how its configuration differs from the family's."""

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "ForCausalLM"
    small: bool = True

    def __str__(self) -> str:
        changes = (f"{name}={value}" for name, value in self.changes.items())
        return " ".join([f"{self.family}{self.kind}", *changes])

    def write(self, folder: Path) -> Path:
        """Make a model folder without weights."""
        values = getattr(transformers, f"{self.family}Config")(**(SMALL if self.small else {}))
        architecture = f"{self.family.removesuffix('Text')}{self.kind}"
        config = {**values.to_dict(), **self.changes, "architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


# What is refused.

LLAMA = Model("Llama")
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
WIDE = {"head_dim": 128}
CHOSEN, INLINE = "--cache-rank-gpus 1 --kv-residency quantspec", "--sink-tokens 4"


def pretend_gpus(count: int, monkeypatch: pytest.MonkeyPatch, generation: int = 9) -> None:
    monkeypatch.setattr(cpu, "has_gpu", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    monkeypatch.setattr(server_args, "is_flashinfer_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)


def refusal_of(flags: str, model: Path = BUNDLED_MODEL) -> str:
    with pytest.raises(UnsupportedError) as caught:
        parse(["--model-path", str(model), *flags.split()])
    return str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--tp-size 2",
        "--page-size 16",
        '--cache-rank-config {"trace_steps":0}',
        "--score-keys sketch",
        "--max-sparse-requests 10000000",
        "--enable-mixed-chunk",
    ],
)
def test_the_command_line_is_refused_where_a_table_refuses_it(flags: str) -> None:
    assert re.match(rf"{flags.split()[0]}( \S+){{0,2}}: \S.+\. \S.+\.$", refusal_of(flags))


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


FP8 = {"num_bits": 8, "type": "float"}


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


@pytest.mark.parametrize("spelling", ["auto", "bf16", "bfloat16"])
def test_takes_each_spelling_of_the_models_dtype(spelling: str, tmp_path: Path) -> None:
    model = Model("Llama", {"dtype": "bfloat16"}).write(tmp_path)
    flags = ["--model-path", str(model), "--kv-cache-dtype", spelling]
    assert parse(flags).kv_cache_dtype == spelling


def test_refuses_a_pool_of_a_dtype_that_kernels_do_not_take(tmp_path: Path) -> None:
    model = Model("Llama", {"dtype": "float64"}).write(tmp_path)
    assert refusal_of("", model).startswith("--dtype auto: a KV pool of float64")


def test_refuses_another_dtype_than_the_models() -> None:
    assert "model's dtype, which is float32" in refusal_of("--kv-cache-dtype bf16")
    assert refusal_of("--dtype bfloat16 --kv-cache-dtype fp8_e4m3").startswith("--kv-cache-dtype")


@pytest.mark.parametrize(
    "flags", ["", "--cache-rank-base-gpu-id 0", "--attention-backend torch_native"]
)
def test_cpu_ranks_of_a_machine_with_gpus_need_none_of_them(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(1, monkeypatch)
    assert parse(["--device", "cpu", *flags.split()]).device == "cpu"


@pytest.mark.parametrize(
    ("generation", "has_flashinfer", "kernels"),
    [(8, True, "flashinfer"), (8, False, "triton"), (9, True, "fa3"), (10, True, "flashinfer")],
)
def test_gpus_have_the_kernels_of_their_generation(
    generation: int, has_flashinfer: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(2, monkeypatch, generation)
    monkeypatch.setattr(server_args, "is_flashinfer_available", lambda: has_flashinfer)
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    args = parse([])
    assert (args.device, args.attention_backend, args.page_size) == ("cuda", kernels, 1)
    assert args.decode_attention_backend == BACKEND
    assert (args.max_total_tokens, args.sampling_backend) == (None, None)
    given = (
        '--cache-rank-base-gpu-id 1 --cache-rank-config {"cache_rank_transfer_backend":"nccl"} '
        "--attention-backend triton "
        "--cuda-graph-backend-decode full"
    )
    args = parse(given.split())
    assert (args.first_cache_rank_gpu, args.attention_backend) == (1, "triton")


@pytest.mark.parametrize(
    ("flags", "gpu"),
    [
        ("", 1),
        ("--base-gpu-id 3", 4),
        ("--base-gpu-id 1 --gpu-id-step 2", 3),
        ("--cache-rank-base-gpu-id 0 --base-gpu-id 1", 0),
    ],
)
def test_the_cache_rank_takes_the_gpu_after_sglangs_own(flags: str, gpu: int) -> None:
    assert parse(flags.split()).first_cache_rank_gpu == gpu


def test_ranks_share_a_gpu_if_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    monkeypatch.setenv(SHARE_GPU_VARIABLE, "1")
    for flags in ([], ["--cache-rank-config", '{"cache_rank_transfer_backend": "peer"}']):
        args = parse(flags)
        assert (args.base_gpu_id, args.first_cache_rank_gpu) == (0, 0)


def test_the_name_of_our_backend_is_accepted_for_decode() -> None:
    assert parse(["--decode-attention-backend", BACKEND]).attention_backend != BACKEND


def test_the_environment_allows_a_working_set_above_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_large = ["--sparse-threshold", "100", "--sparse-budget", "2048"]
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "0")
    with pytest.raises(UnsupportedError, match="--sparse-threshold"):
        parse(too_large)
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "1")
    assert parse(too_large).sparse_threshold == 100


@pytest.mark.parametrize(
    "flags",
    [
        "--sink-tokens 0",
        "--recent-tokens 0",
        "--dense-layers 0",
        "--sparse-threshold 2116",
        "--cache-rank-timeout 1.0",
        "--cache-rank-mem-fraction 1.0",
        "--page-size 1",
        "--reuse-sparse-tokens on",
        "--disable-overlap-schedule",
        "--inference-kv working-set --dense-layers 0",
    ],
)
def test_accepts_values_at_the_edge_of_what_is_refused(flags: str) -> None:
    args = parse(flags.split())
    name, *value = flags.split()[-2:] if " " in flags else (flags,)
    held = getattr(args, name.removeprefix("--").replace("-", "_"))
    assert str(held) == (value[0] if value else "True")


ACCEPTED_MODELS = [
    LLAMA,
    Model("Qwen2", {"sliding_window": 8}),
    Model("Mistral", {"sliding_window": None}),
    Model("Qwen3"),
    Model("Llama", {"head_dim": 256}),
    Model("Llama", {"head_dim": 24}),
]


@pytest.mark.parametrize("model", ACCEPTED_MODELS, ids=str)
def test_accepts_a_model_of_full_attention(model: Model, tmp_path: Path) -> None:
    args = parse(["--model-path", str(model.write(tmp_path))])
    assert args.model_path == str(tmp_path)
    assert args.decode_attention_backend == BACKEND


# What SGLang's version may be.


def pretend_sglang_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "RELEASE", Version(version))


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.4.10.post2", ""),
        ("0.5.19.post1", ""),
        ("0.5.24rc1", "--cache-rank-gpus 0"),
    ],
)
def test_refuses_an_sglang_that_was_not_tested(
    version: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_sglang_is(version, monkeypatch)
    with pytest.raises(UnsupportedError, match=rf"^SGLang {re.escape(version)} .* pip install "):
        parse(flags.split())


@pytest.mark.skipif(bool(compat.ABSENT_FLAGS), reason="this release has no server in Rust")
def test_a_server_without_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(UnsupportedError, match=r"^SGLANG_RUST_SERVER: .*\. Unset it\.$"):
        parse([])


def test_an_sglang_that_was_not_tested_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_sglang_is("0.5.99", monkeypatch)
    with pytest.raises(UnsupportedError, match=r"or pass --cache-rank-config '{.*}' to try it"):
        parse([])
    assert parse([CONFIG_FLAG, '{"allow_untested_sglang": true}']).has_cache_rank
    assert "SGLang 0.5.99 is not tested (--cache-rank-config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "tested"), [("0.5.16", True), ("0.5.17", False), ("0.5.23", True)]
)
def test_start_up_says_which_releases_are_not_tested_on_gpus(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_sglang_is(version, monkeypatch)
    pretend_gpus(2, monkeypatch)
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    parse([])
    said = f"SGLang {version} is not tested on GPUs: 0.5.16 and 0.5.23 are"
    assert (said in capsys.readouterr().err) is not tested


# What is accepted, and what it becomes.


def test_no_arguments_serve_the_bundled_model_and_log_what_was_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parse([])
    assert args.model_path == str(BUNDLED_MODEL)
    assert args.dense_layers == 1
    assert args.inference_kv == "full"
    assert not args.disable_radix_cache
    settings = {
        "page_size": 1,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        **({} if compat.HAS_GRAMMARS_ON_CPUS else {"grammar_backend": "none"}),
        "max_total_tokens": 131072,
        "max_running_requests": 64,
        "dtype": "float32",
        "decode_attention_backend": "cache_rank",
    }
    assert {name: getattr(args, name) for name in settings} == settings
    logged = capsys.readouterr().err
    for name, value in settings.items():
        assert re.search(rf"cache rank: --{name.replace('_', '-')} {value} \(.+\)\n", logged), name


def test_by_default_the_servers_own_process_selects(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_server_args([])
    assert (args.placement, args.is_sparse, args.has_cache_rank) == ("inline", True, False)
    assert args.model_path == str(BUNDLED_MODEL)
    assert args.prefill_attention_backend == PREFILL_BACKEND
    assert args.decode_attention_backend == BACKEND
    assert not args.disable_radix_cache
    assert "heeds" not in capsys.readouterr().err


def test_an_inline_server_may_have_what_a_cache_rank_may_not() -> None:
    flags = "--dtype bfloat16 --kv-cache-dtype fp8_e4m3 --disable-overlap-schedule"
    args = parse_server_args([*flags.split(), "--max-queued-requests", "8"])
    assert args.is_inline
    assert args.kv_cache_dtype == "fp8_e4m3"


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


def test_freed_rows_need_a_cache_rank() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^--inference-kv working-set: .* --cache-rank-gpus"
    ):
        parse_server_args(["--inference-kv", "working-set"])


def test_an_inline_server_refuses_a_model_whose_keys_have_no_sketch(tmp_path: Path) -> None:
    model = LLAMA.write(tmp_path)
    with pytest.raises(UnsupportedError, match=r"^--model-path .*: heads have 16 elements"):
        parse_server_args(["--model-path", str(model)])


def test_keeps_what_the_user_chose_and_does_not_claim_to_have_set_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = {
        "attention_backend": "torch_native",
        "grammar_backend": "xgrammar",
        "max_total_tokens": 5000,
        "max_running_requests": 3,
        "dtype": "bfloat16",
        "dense_layers": 0,
    }
    flags = [
        word
        for name, value in chosen.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    args = parse(flags)
    assert {name: getattr(args, name) for name in chosen} == chosen
    logged = capsys.readouterr().err
    for name in chosen:
        assert f"cache rank: --{name.replace('_', '-')} " not in logged


def test_the_checkpoint_decides_its_dtype(tmp_path: Path) -> None:
    model = Model("Llama", {"dtype": "bfloat16"}).write(tmp_path)
    args = parse(["--model-path", str(model)])
    assert args.dtype == "auto"
    assert str(compat.model_config(args).dtype) == "torch.bfloat16"


def test_nothing_is_reused_where_rows_are_freed(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--inference-kv", "working-set"]).disable_radix_cache
    assert re.search(
        r"--disable-radix-cache True \(--inference-kv working-set frees the rows .+\)\n",
        capsys.readouterr().err,
    )


def test_without_a_cache_rank_it_is_plain_sglang() -> None:
    flags = (
        "--cache-rank-gpus 0 --device cpu --page-size 16 --enable-mixed-chunk --sparse-budget 0 "
        "--attention-backend triton --decode-attention-backend torch_native --dense-layers 99"
    )
    args = parse(flags.split())
    assert not args.has_cache_rank
    assert not args.disable_radix_cache
    assert args.enable_mixed_chunk
    assert args.page_size == 16
    assert args.decode_attention_backend == "torch_native"
    assert args.dtype == "auto"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--cache-rank-gpus 0", None),
        ("--cache-rank-gpus 0 --kv-residency quantspec --dtype float32 --page-size 16", None),
        (
            '--cache-rank-gpus 0 --cache-rank-config {"wire_dtype":"int8"} --kv-residency lynx',
            "without a cache rank these have no effect: --kv-residency, --cache-rank-config "
            "wire_dtype",
        ),
        (
            "--cache-rank-gpus 0 --dense-layers 2 --sparse-budget 0 --cache-rank-base-gpu-id 0",
            "without a cache rank these have no effect: --sparse-budget, --dense-layers, "
            "--cache-rank-base-gpu-id",
        ),
        ('--cache-rank-config {"wire_dtype":"int8"} --kv-residency lynx', None),
    ],
)
def test_one_line_names_the_flags_that_are_ignored(
    flags: str, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(["--device", "cpu", *flags.split()])
    logged = capsys.readouterr().err.splitlines()
    said = [each.split("] ", 1)[1] for each in logged if "no effect" in each]
    assert said == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--sparse-budget 512 --calibration auto --reuse-sparse-tokens on", None),
        ('--tp-size 1 --page-size 1 --cache-rank-config {"sketch_bits":3}', None),
        (
            "--kv-residency lynx --hysteresis 3 --max-sparse-requests 4 --sink-tokens 5",
            "--max-sparse-requests, --hysteresis, --kv-residency",
        ),
        ('--cache-rank-config {"trace_steps":3}', "--cache-rank-config trace_steps"),
    ],
)
def test_one_line_names_the_flags_that_only_a_cache_rank_heeds(
    flags: str, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_server_args(flags.split())
    said = re.findall(
        "only a cache rank with --cache-rank-gpus 1 heeds these: (.+)", capsys.readouterr().err
    )
    assert said == ([] if line is None else [line])


def test_without_a_cache_rank_no_model_is_refused(tmp_path: Path) -> None:
    model = Model("Mistral", {"sliding_window": 8})
    flags = f"--cache-rank-gpus 0 --device cpu --model-path {model.write(tmp_path)}"
    assert not parse(flags.split()).has_cache_rank


def test_a_config_file_gives_our_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    LLAMA.write(model)
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model-path: {model}\n"
        "sparse-threshold: 8192\n"
        "sparse-budget: 512\n"
        "query-predictor: spade\n"
        "disable-overlap-schedule: true\n"
    )
    args = parse(["--config", str(config), "--sparse-budget", "256"])
    assert args.model_path == str(model)
    assert args.sparse_threshold == 8192
    assert args.sparse_budget == 256
    assert args.query_predictor == "spade"
    assert args.disable_overlap_schedule


def test_a_config_file_without_a_model_serves_the_bundled_one(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("sparse-budget: 512\n")
    args = parse(["--config", str(config)])
    assert (args.model_path, args.sparse_budget) == (str(BUNDLED_MODEL), 512)


def test_a_config_file_is_refused_like_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("page-size: 16\n")
    with pytest.raises(UnsupportedError, match=r"^--page-size 16: "):
        parse(["--config", str(config)])


@pytest.mark.parametrize(
    "spelling", ["--model-path {}", "--model {}", "--model-path={}", "--model={}", "--model-pat {}"]
)
def test_the_users_model_is_served_however_the_flag_is_spelled(
    spelling: str, tmp_path: Path
) -> None:
    model = LLAMA.write(tmp_path)
    assert parse(spelling.format(model).split()).model_path == str(model)


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


@pytest.mark.parametrize(
    ("gpus", "flags", "changes", "said"),
    [
        (0, CHOSEN, {}, ""),
        (2, CHOSEN, {}, r"estimates \(H200, 32,768 tokens a request; "),
        (2, CHOSEN, {"num_experts": 4}, "no estimate of its speed: models with"),
        (0, INLINE, {}, ""),
        (1, INLINE, {}, r".+; 8 requests of 32768 tokens: \d+.\d ms a step estimated, dense "),
    ],
    ids=str,
)
def test_what_was_chosen_and_what_to_expect_is_said_at_start_up(
    gpus: int,
    flags: str,
    changes: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend_gpus(gpus, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    model = Model("Qwen3", WIDE | changes).write(tmp_path)
    parse_server_args([*flags.split(), "--model-path", str(model)])
    logged = capsys.readouterr().err
    if flags == INLINE:
        selected = r"cache rank: tokens are selected in this process \(.+\), --sparse-budget "
        assert re.search(selected + re.escape(str(INLINE_CURVE)), logged)
    else:
        assert "cache rank: --kv-residency quantspec\n" in logged
        assert "cache rank: --query-predictor last (" in logged
    assert re.search(f"cache rank: {said}", logged) if said else "estimate" not in logged


def test_the_config_of_the_cache_rank_carries_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "layers_per_group": 3,
        "forecast_lead": 4,
        "sparse_budget": 77,
        "sink_tokens": 5,
        "recent_tokens": 9,
        "query_window": 2,
        "query_predictor": "spade",
        "hysteresis": 11,
        "max_swap_tokens": 13,
        "wire_dtype": "int8",
        "sketch_bits": 3,
        "kv_residency": "lynx",
    }
    shared = {*CACHE_RANK_FIELDS} & {*CacheRankConfig.__struct_fields__}
    scores = {"score_keys", "score_normalizer", "kv_residency_options"}
    assert {*given} | scores == shared
    keys = {name: value for name, value in given.items() if name in CONFIG_KEYS}
    flags = [CONFIG_FLAG, json.dumps(keys)]
    for name, value in given.items():
        if name not in keys:
            flags += [flag_of(name), str(value)]
    args = parse(flags)
    model = ModelShape(1, 1, 1, 8, "float32", 1.0, rotary_frequency=(1.0,))
    config, usual = args.cache_rank_config(model, max_rows=6), CacheRankConfig(model)
    assert {name: getattr(config, name) for name in given} == given
    assert all(getattr(usual, name) != value for name, value in given.items())
    assert (config.model, config.max_rows, config.checksum) == (model, 6, False)
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    assert parse(["--kv-residency", "bf16"]).cache_rank_config(model, 6).checksum


def test_a_flag_of_the_policy_has_the_default_of_the_policy() -> None:
    policy = CacheRankConfig(ModelShape(1, 1, 1, 8, "float32", 1.0))
    chosen_later = {
        *("query_predictor", "layers_per_group", "sparse_budget", "hysteresis", "max_swap_tokens")
    }
    for name, default in compat.default_values(CacheRankServerArgs).items():
        if name in CACHE_RANK_FIELDS and name in CacheRankConfig.__struct_fields__:
            if name in chosen_later:
                assert default is None
            elif name != "kv_residency_options":  # a text here
                assert default == getattr(policy, name)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("", (256, 128)),
        ("--sparse-budget 512", (64, 64)),
        ("--sparse-budget 40", (5, 40)),
        ("--sparse-budget 7", (0, 7)),
        ("--sparse-budget 40 --hysteresis 0", (0, 40)),
        ("--sparse-budget 40 --max-swap-tokens 3", (5, 3)),
    ],
)
def test_what_stays_and_what_enters_follows_the_budget(flags: str, sizes: tuple[int, int]) -> None:
    args = parse(flags.split())
    assert (args.hysteresis, args.max_swap_tokens) == sizes
    config = args.cache_rank_config(ModelShape(1, 1, 1, 8, "float32", 1.0), max_rows=6)
    assert (config.hysteresis, config.max_swap_tokens) == sizes


@pytest.mark.parametrize(
    ("flags", "curve"),
    [
        ("", INLINE_CURVE),
        ("--cache-rank-gpus 1", BudgetCurve.flat(2048)),
        ("--sparse-budget 40", BudgetCurve.flat(40)),
        ("--sparse-budget 40 --cache-rank-gpus 1", BudgetCurve.flat(40)),
    ],
)
def test_budgets_follow_lengths_only_inline_and_by_default(flags: str, curve: BudgetCurve) -> None:
    args = parse_server_args(["--model-path", str(BUNDLED_MODEL), *flags.split()])
    assert args.budget_curve == curve
    assert pickle.loads(pickle.dumps(args)).budget_curve == curve


def test_checksums_of_rounded_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelShape(1, 1, 1, 8, "bfloat16", 1.0)
    config = parse([CONFIG_FLAG, '{"wire_dtype": "int8"}']).cache_rank_config(model, max_rows=6)
    assert config.wire_torch_dtype == torch.int8
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    with pytest.raises(UnsupportedError, match=r"^--cache-rank-config wire_dtype int8: "):
        parse([CONFIG_FLAG, '{"wire_dtype": "int8"}'])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ('{"sketch_bit": 3}', "unknown key sketch_bit; the keys are kv_residency_options, layers"),
        ('{"sketch_bits": 5}', "sketch_bits: Invalid enum value 5"),
        ('{"trace_steps": "8"}', "trace_steps: Expected `int`, got `str`"),
        ('{"wire_dtype": "fp8"}', "wire_dtype: Invalid enum value 'fp8'"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused(
    text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        read_config(text)
    with pytest.raises(SystemExit, match="2"):
        parse([CONFIG_FLAG, text])
    assert f"argument {CONFIG_FLAG}: " in capsys.readouterr().err


def test_settings_of_flags_given_twice_add_up_and_the_last_of_a_key_wins() -> None:
    first, second = '{"query_window": 4, "trace_steps": 3}', '{"trace_steps": 5}'
    args = parse([CONFIG_FLAG, first, CONFIG_FLAG, second])
    assert (args.query_window, args.trace_steps) == (4, 5)


def test_options_of_the_residency_are_numbers_where_they_can_be() -> None:
    model = ModelShape(1, 1, 1, 8, "float32", 1.0)
    for given, options in (
        ("alpha=5, reading=anchor", {"alpha": 5, "reading": "anchor"}),
        ("alpha=0.5", {"alpha": 0.5}),
        ("", {}),
    ):
        args = parse(
            ["--kv-residency", "lynx", CONFIG_FLAG, json.dumps({"kv_residency_options": given})]
        )
        assert args.cache_rank_config(model, max_rows=6).kv_residency_options == options


# The engine.


def without_starting(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keep SGLang's engine from starting; what it would have been started with."""
    from sglang.srt.entrypoints.engine import Engine

    started: list[dict[str, Any]] = []
    monkeypatch.setattr(Engine, "__init__", lambda self, **kwargs: started.append(kwargs))
    monkeypatch.setattr(Engine, "shutdown", lambda self: None)
    return started


def test_the_engine_refuses_a_radix_cache_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started = without_starting(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"^disable_radix_cache=False: "):
        sglang_ext.Engine(cache_rank_gpus=1, inference_kv="working-set", disable_radix_cache=False)
    assert started == []


def test_the_engine_takes_the_bundled_model_unless_given_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = without_starting(monkeypatch)
    sglang_ext.Engine()
    sglang_ext.Engine(cache_rank_gpus=0, disable_radix_cache=False)
    sglang_ext.Engine(disable_radix_cache=False)
    sglang_ext.Engine(model_path="/other", disable_radix_cache=True)
    arguments = parse([])
    sglang_ext.Engine(server_args=arguments)
    assert started == [
        {"model_path": str(BUNDLED_MODEL)},
        {
            "model_path": str(BUNDLED_MODEL),
            "cache_rank_gpus": 0,
            "disable_radix_cache": False,
        },
        {"model_path": str(BUNDLED_MODEL), "disable_radix_cache": False},
        {"model_path": "/other", "disable_radix_cache": True},
        {"server_args": arguments},
    ]

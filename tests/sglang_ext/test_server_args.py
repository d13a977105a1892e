"""What the launcher sets, what it accepts, and every combination it refuses at the door."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from sglang.srt.server_args import ServerArgs

import sglang_ext
from cache_rank.config import CacheRankConfig, ModelShape
from sglang_ext import baselines, compat, cpu, launch, plugin, server_args
from sglang_ext.flags import (
    BACKEND,
    CACHE_RANK_FIELDS,
    CHECKSUM_VARIABLE,
    SHARE_GPU_VARIABLE,
)
from sglang_ext.refusals import (
    ALLOW_LARGE_BUDGET_VARIABLE,
    PLAIN,
    Refusal,
    UnsupportedError,
    models,
    refuse_used_port,
    servers,
)
from sglang_ext.server_args import BUNDLED_MODEL, CacheRankServerArgs, parse_server_args

ROOT = Path(sglang_ext.__file__).parent.parent


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
    monkeypatch.setattr(server_args, "argument_parser", lambda: made)
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


@dataclass(frozen=True)
class Case:
    """A command line that is refused.

    Attributes:
        flags: what is typed.
        named: the flags that the refusal begins with, if not all that are typed.
        gpus: how many the machine has.
        generation: of them, the first number of their compute capability.
        model: what is served.
    """

    flags: str
    named: str | None = None
    gpus: int = 0
    generation: int = 9
    model: Model | None = None

    def __str__(self) -> str:
        words = [self.flags, self.gpus and f"with {self.gpus} GPUs", self.model]
        return " ".join(str(word) for word in words if word)


QUEST = "--decode-mode quest --cache-rank-gpus 0"
WORKING_SET = "--inference-kv working-set"
KERNELS, PREFILL = "--attention-backend", "--prefill-attention-backend"
TRANSFER = "--cache-rank-transfer-backend"
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
NO_ESTIMATE = "no estimate of its speed: "

CASES = [
    *(
        Case(flags)
        for flags in (
            "--tp-size 2",
            "--pp-size 2",
            "--dp-size 2",
            "--nnodes 2",
            "--disaggregation-mode prefill",
            "--disaggregation-mode decode",
            "--tokenizer-worker-num 2",
            "--device npu",
            "--device xpu",
            "--device cuda",
            "--cache-rank-transfer-backend peer",
            "--cache-rank-transfer-backend nccl",
            "--cache-rank-address not.an.address.invalid",
            "--cache-rank-timeout 0",
            "--cache-rank-timeout 0.95",
            "--cache-rank-timeout inf",
            "--cache-rank-timeout nan",
            "--cache-rank-max-restart-delay 0.5",
            "--cache-rank-max-restart-delay 3601",
            "--cache-rank-max-restart-delay nan",
            "--cache-rank-mem-fraction 0",
            "--cache-rank-mem-fraction -0.5",
            "--cache-rank-mem-fraction 1.1",
            "--cache-rank-mem-fraction nan",
            "--max-sparse-requests 0",
            "--bulk-chunk-tokens 1",
            "--dense-layers -1",
            "--trace-steps 0",
            "--radix-cache-backend custom",
            "--enable-hierarchical-cache",
            "--enable-lmcache",
            "--enable-session-radix-cache",
            "--enable-flexkv",
            "--smg-grpc-mode",
            "--grpc-mode",
            "--use-ray",
            "--encoder-only",
            "--inference-kv working-set --strip-thinking-cache",
            "--reuse-sparse-tokens on --disable-radix-cache",
            "--reuse-sparse-tokens on --inference-kv working-set",
            "--enable-mixed-chunk",
            "--enable-two-batch-overlap",
            "--enable-pdmux",
            "--enable-streaming-session",
            "--speculative-algorithm EAGLE",
            "--speculative-algorithm NGRAM",
            "--enable-memory-saver",
            "--kv-cache-dtype fp8_e4m3",
            "--decode-attention-backend triton",
            f"--attention-backend {BACKEND}",
            f"--prefill-attention-backend {BACKEND}",
            "--model-path /nowhere/model",
            "--model-path ./nowhere",
            "--model-path ../nowhere",
            "--model-path ~/nowhere",
            "--model-path two/slashes/deep",
            "--model-impl transformers",
            "--is-embedding",
            "--dllm-algorithm LowConfidence",
            "--enable-lora",
            "--lora-paths adapter=/nowhere",
            "--cache-rank-gpus 2",
            "--cache-rank-gpus -1",
            "--page-size 0",
            "--page-size 16",
            f"{WORKING_SET} --max-queued-requests 8",
            f"{WORKING_SET} --enable-return-routed-experts",
            f"{WORKING_SET} --kv-canary log",
            f"{WORKING_SET} --disable-overlap-schedule",
            "--sparse-threshold -1",
            "--sparse-threshold 68",
            "--sparse-threshold 2115",
            "--sparse-budget 4029",
            "--sink-tokens 2000",
            "--recent-tokens 2045",
            "--max-sparse-requests 10000000",
            f"--max-sparse-requests 10000000 {WORKING_SET}",
        )
    ),
    *(
        Case(flags)
        for flags in (
            "--startup-weight-load-mode overlap",
            "--enable-unified-cache-external-linker",
        )
        if flags.split()[0] not in compat.ABSENT_FLAGS
    ),
    Case("--tp-size 2 --cache-rank-gpus 2", "--tp-size"),
    Case("--trace missing-folder/trace.json", "--trace"),
    Case("--trace .", "--trace"),
    Case("--max-total-tokens 4096"),
    Case('--preferred-sampling-params {"beam_width":4}', "--preferred-sampling-params"),
    Case("--max-total-tokens 500 --sparse-threshold 2500"),
    Case("--attention-backend flashinfer"),
    Case("--attention-backend triton"),
    Case("--prefill-attention-backend fa3"),
    # The machine has GPUs.
    Case("", "--cache-rank-gpus", gpus=1),
    Case("--device cuda", "--cache-rank-gpus", gpus=1),
    Case("--base-gpu-id 1", gpus=2),
    Case("--gpu-id-step 2", gpus=2),
    Case("--cache-rank-base-gpu-id 2", gpus=2),
    Case("--cache-rank-base-gpu-id 0", gpus=2),
    Case("--cache-rank-base-gpu-id 1 --base-gpu-id 1", "--cache-rank-base-gpu-id", gpus=3),
    Case("--cache-rank-transfer-backend peer", gpus=2),
    Case("--cache-rank-transfer-backend nccl --device cpu", TRANSFER, gpus=2),
    *(Case(f"--attention-backend {kernels}", gpus=2) for kernels in ("fa4", "trtllm_mha")),
    Case("--disable-overlap-schedule", gpus=2),
    Case("--max-queued-requests 8", gpus=2),
    Case("--cuda-graph-backend-decode breakable", gpus=2),
    Case('--cuda-graph-config {"decode":{"backend":"breakable"}}', gpus=2),
    # Decode is a synchronous baseline.
    Case("--decode-mode quest"),
    Case("--decode-mode tova --cache-rank-gpus 2"),
    Case(f"{QUEST} {WORKING_SET}", "--decode-mode --inference-kv"),
    Case(f"{QUEST} --page-size 16", "--decode-mode --page-size"),
    Case(f"{QUEST} --page-size 1", "--decode-mode --page-size", gpus=1),
    Case(QUEST, "--decode-mode", gpus=1, generation=10),
    Case(f"{QUEST} --enable-memory-saver", "--decode-mode --enable-memory-saver", gpus=1),
    Case(f"{QUEST} --enable-mixed-chunk", "--enable-mixed-chunk"),
    Case(f"{QUEST} --tp-size 2", "--tp-size"),
    Case(f"{QUEST} --dense-layers 2", "--dense-layers", model=LLAMA),
    # The model is at fault.
    Case("", "--model-path", gpus=2, model=LLAMA),
    *(Case("", "--model-path", gpus=2, model=Model("Llama", {"head_dim": d})) for d in (32, 96)),
    Case("--attention-backend flashinfer", "--model-path", gpus=2, model=LLAMA),
    Case(f"{QUEST} {KERNELS} flashinfer", KERNELS, gpus=1, model=LLAMA),
    Case(QUEST, KERNELS, gpus=1, generation=8, model=Model("Llama", {"head_dim": 80})),
    Case(f"{QUEST} {PREFILL} flashinfer", PREFILL, gpus=1, model=LLAMA),
    Case("--dense-layers 2", model=LLAMA),
    Case("--dense-layers 7", model=LLAMA),
    Case("--query-predictor forecast", model=LLAMA),
    Case("--query-predictor forecast", model=Model("Llama", rotated("longrope"))),
    Case("--calibration folder", model=LLAMA),
    Case("--hysteresis 2048"),
    Case("--sparse-budget 40 --hysteresis 256", "--hysteresis 256"),
    Case("--quantization fp8"),
    Case("--score-keys sketch"),
    Case("--score-keys sketch --calibration folder", "--score-keys sketch", model=LLAMA),
    Case("", "--dtype", model=Model("Llama", {"dtype": "float64"})),
    *(
        Case("", "--model-path", model=model)
        for model in (
            Model("Llama", kind="ForSequenceClassification"),
            Model("DeepseekV2", small=False),
            Model("DeepseekV3", small=False),
            Model("Qwen2", WINDOWS),
            Model("Mistral", {"sliding_window": 8}),
            Model("Gemma2"),  # every other layer has a window
            Model("Llama4Text"),  # chunked attention
            Model("Qwen3Next", small=False),  # gated delta net
            Model("FalconH1", small=False),  # Mamba and attention
            Model("Lfm2", small=False),  # short convolutions
            Model("Qwen2VL", kind="ForConditionalGeneration", small=False),
            Model("Llama", {"head_dim": 20}),
            Model("Llama", {"head_dim": 260}),
            Model("Llama", {"head_dim": 264}),
        )
    ),
]

ROWS = (
    *servers.SERVERS,
    *servers.CACHE_RANKS,
    *servers.GPUS,
    *models.MODELS,
    *models.WORKING_SETS,
    *baselines.REFUSALS,
)


def pretend_gpus(count: int, monkeypatch: pytest.MonkeyPatch, generation: int = 9) -> None:
    monkeypatch.setattr(cpu, "has_gpu", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    monkeypatch.setattr(server_args, "is_flashinfer_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)


@functools.cache
def refusal_of(case: Case) -> tuple[Refusal, str]:
    """The row that refuses a command line, and what it says."""
    rows: list[Refusal] = []
    message = Refusal.message

    def note(row: Refusal, args: Any) -> str:
        rows.append(row)
        return message(row, args)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(Refusal, "message", note)
        pretend_gpus(case.gpus, patch, case.generation)
        if case.gpus:
            patch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for them
        served = ["--model-path", str(case.model.write(Path(folder)))] if case.model else []
        with pytest.raises(UnsupportedError) as caught:
            parse_server_args([*case.flags.split(), *served])
    (row,) = rows
    return row, str(caught.value)


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--[a-z][a-z-]*", text))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refuses_and_names_the_flags_and_a_remedy(case: Case) -> None:
    row, message = refusal_of(case)
    sentences = re.fullmatch(r"(--.+?): (.+?)\. ([A-Z].+)\.", message)
    assert sentences
    named, why, remedy = sentences.groups()
    assert flags_in(named) == flags_in(case.flags if case.named is None else case.named)
    assert flags_in(named) <= set(row.asked.split())
    assert "{" not in why + remedy
    if PLAIN in row.remedy:
        own = "--decode-mode" if "--decode-mode" in case.flags else "--cache-rank-gpus 0"
        assert own in remedy


def test_every_row_refuses_something() -> None:
    reached = {refusal_of(case)[0] for case in CASES}
    missed = [row for row in ROWS if row not in reached]
    assert [row for row in missed if not {*row.asked.split()} <= compat.ABSENT_FLAGS] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.asked)
def test_every_row_names_flags_that_there_are(row: Refusal) -> None:
    known = {option for action in parser()._actions for option in action.option_strings}
    assert row.asked
    why = row.why if isinstance(row.why, str) else ""
    assert flags_in(f"{row.asked} {why} {row.remedy}") <= known | compat.ABSENT_FLAGS


def test_a_refusal_names_the_flags_that_were_given_as_they_are_typed() -> None:
    given = "--sink-tokens 7 --trace t.json --trace-steps 9 --disable-overlap-schedule"
    args = parse_server_args(given.split())
    asked = "--trace --recent-tokens --sink-tokens --disable-overlap-schedule"
    assert Refusal(asked, "it is a test").message(args) == (
        "--trace t.json --sink-tokens 7 --disable-overlap-schedule: it is a test. "
        "Drop --trace and --sink-tokens and --disable-overlap-schedule."
    )
    assert Refusal(asked, "it is a test").refuses(args)
    assert not Refusal("--recent-tokens --bulk-chunk-tokens", "it is a test").refuses(args)
    assert Refusal("--recent-tokens --bulk-chunk-tokens", "{}", PLAIN).message(args) == (
        "--recent-tokens 64: {}. Pass --cache-rank-gpus 0 for plain SGLang."
    )


RANGES = [
    *(
        f"{flag} {value}"
        for flag in ("--layers-per-group", "--sparse-budget", "--query-window", "--max-swap-tokens")
        for value in (0, -1)
    ),
    "--sink-tokens -1",
    "--recent-tokens -1",
    "--hysteresis -1",
    "--kv-residency-options alpha=0 --kv-residency lynx",
    "--kv-residency-options reading=4 --kv-residency bf16",
    "--kv-residency-options alpha=1",
    "--kv-residency-options reading=4,alpha --kv-residency quantspec",
    "--kv-residency-options reading=4,reading=8 --kv-residency quantspec",
    "--score-normalizer attended",
    f"--sparse-budget 0 {QUEST}",
]


@pytest.mark.parametrize("flags", RANGES)
def test_refuses_what_the_configuration_of_a_cache_rank_does_not_take(flags: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{flags.split()[0]} \S"):
        parse_server_args(flags.split())


@pytest.mark.parametrize(
    "flags", ["", "--cache-rank-base-gpu-id 0", "--attention-backend torch_native"]
)
def test_cpu_ranks_of_a_machine_with_gpus_need_none_of_them(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(1, monkeypatch)
    assert parse_server_args(["--device", "cpu", *flags.split()]).device == "cpu"


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
    args = parse_server_args([])
    assert (args.device, args.attention_backend, args.page_size) == ("cuda", kernels, 1)
    assert args.decode_attention_backend == BACKEND
    assert (args.max_total_tokens, args.sampling_backend) == (None, None)
    if generation < 10:
        assert parse_server_args(QUEST.split()).page_size == 16
    given = (
        "--cache-rank-base-gpu-id 1 --cache-rank-transfer-backend nccl --attention-backend triton "
        "--cuda-graph-backend-decode full"
    )
    args = parse_server_args(given.split())
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
    assert parse_server_args(flags.split()).first_cache_rank_gpu == gpu


def test_ranks_share_a_gpu_if_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    monkeypatch.setenv(SHARE_GPU_VARIABLE, "1")
    for flags in ([], ["--cache-rank-transfer-backend", "peer"]):
        args = parse_server_args(flags)
        assert (args.base_gpu_id, args.first_cache_rank_gpu) == (0, 0)


def test_the_name_of_our_backend_is_accepted_for_decode() -> None:
    assert parse_server_args(["--decode-attention-backend", BACKEND]).attention_backend != BACKEND


def test_the_environment_allows_a_working_set_above_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_large = ["--sparse-threshold", "100", "--sparse-budget", "2048"]
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "0")
    with pytest.raises(UnsupportedError, match="--sparse-threshold"):
        parse_server_args(too_large)
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "1")
    assert parse_server_args(too_large).sparse_threshold == 100


@pytest.mark.parametrize(
    "flags",
    [
        "--sink-tokens 0",
        "--recent-tokens 0",
        "--hysteresis 0",
        "--dense-layers 0",
        "--dense-layers 1",
        "--sparse-threshold 2116",
        "--bulk-chunk-tokens 2",
        "--max-sparse-requests 1",
        "--cache-rank-timeout 1.0",
        "--cache-rank-mem-fraction 1.0",
        "--layers-per-group 1000",
        "--page-size 1",
        "--tp-size 1",
        "--disable-radix-cache",
        "--reuse-sparse-tokens on",
        "--strip-thinking-cache",
        "--radix-eviction-policy lfu",
        "--enable-priority-scheduling --radix-eviction-policy priority",
        "--disable-overlap-schedule",
        "--inference-kv working-set --dense-layers 0",
        "--inference-kv working-set --dense-layers 1",
        "--kv-canary log",
        "--device cpu",
    ],
)
def test_accepts_values_at_the_edge_of_what_is_refused(flags: str) -> None:
    args = parse_server_args(flags.split())
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
    args = parse_server_args(["--model-path", str(model.write(tmp_path))])
    assert args.model_path == str(tmp_path)
    assert args.decode_attention_backend == BACKEND


# What SGLang's version may be.


def pretend_sglang_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "RELEASE", Version(version))


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.4.10.post2", ""),
        ("0.5.15", "--cache-rank-gpus 0"),
        ("0.5.18", ""),
        ("0.5.19.post1", ""),
        ("0.5.24rc1", ""),
        ("0.6.0", "--cache-rank-gpus 0"),
        ("1.0", ""),
    ],
)
def test_refuses_an_sglang_that_was_not_tested(
    version: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_sglang_is(version, monkeypatch)
    with pytest.raises(UnsupportedError, match=rf"^SGLang {re.escape(version)} .* pip install "):
        parse_server_args(flags.split())


@pytest.mark.parametrize(
    "version",
    [
        "0.5.16rc1",
        "0.5.16",
        "0.5.16.post1",
        "0.5.17rc1",
        "0.5.17.dev3+gabc",
        "0.5.20",
        "0.5.22.post1",
        "0.5.23",
    ],
)
def test_accepts_every_sglang_of_the_tested_range(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_sglang_is(version, monkeypatch)
    assert parse_server_args([]).has_cache_rank


@pytest.mark.skipif(bool(compat.ABSENT_FLAGS), reason="this release has no server in Rust")
def test_a_server_without_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(UnsupportedError, match=r"^SGLANG_RUST_SERVER: .*\. Unset it\.$"):
        parse_server_args([])


def test_an_sglang_that_was_not_tested_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_sglang_is("0.5.99", monkeypatch)
    with pytest.raises(UnsupportedError, match=r"or pass --allow-untested-sglang to try it"):
        parse_server_args([])
    assert parse_server_args(["--allow-untested-sglang"]).has_cache_rank
    assert "SGLang 0.5.99 is not tested (--allow-untested-sglang)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "tested"), [("0.5.16", True), ("0.5.17", False), ("0.5.23", True)]
)
def test_start_up_says_which_releases_are_not_tested_on_gpus(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_sglang_is(version, monkeypatch)
    pretend_gpus(2, monkeypatch)
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    parse_server_args([])
    said = f"SGLang {version} is not tested on GPUs: 0.5.16 and 0.5.23 are"
    assert (said in capsys.readouterr().err) is not tested


# What is accepted, and what it becomes.


def test_no_arguments_serve_the_bundled_model_and_log_what_was_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parse_server_args([])
    assert args.model_path == str(BUNDLED_MODEL)
    assert args.dense_layers == 1
    assert args.inference_kv == "full"
    assert not args.disable_radix_cache
    settings = {
        "page_size": 1,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "max_total_tokens": 131072,
        "max_running_requests": 64,
        "dtype": "float32",
        "decode_attention_backend": "cache_rank",
    }
    assert {name: getattr(args, name) for name in settings} == settings
    logged = capsys.readouterr().err
    for name, value in settings.items():
        assert re.search(rf"cache rank: --{name.replace('_', '-')} {value} \(.+\)\n", logged), name


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
    args = parse_server_args(flags)
    assert {name: getattr(args, name) for name in chosen} == chosen
    logged = capsys.readouterr().err
    for name in chosen:
        assert f"cache rank: --{name.replace('_', '-')} " not in logged


def test_the_checkpoint_decides_its_dtype(tmp_path: Path) -> None:
    model = Model("Llama", {"dtype": "bfloat16"}).write(tmp_path)
    args = parse_server_args(["--model-path", str(model)])
    assert args.dtype == "auto"
    assert str(compat.model_config(args).dtype) == "torch.bfloat16"


def test_nothing_is_reused_where_rows_are_freed(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_server_args(["--inference-kv", "working-set"]).disable_radix_cache
    assert re.search(
        r"--disable-radix-cache True \(--inference-kv working-set frees the rows .+\)\n",
        capsys.readouterr().err,
    )


def test_says_once_a_launch_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_EXT_CPU_SAID", raising=False)
    parse_server_args([])
    parse_server_args([])
    assert capsys.readouterr().err.count("no GPU found: the inference rank") == 1


def test_without_a_cache_rank_it_is_plain_sglang() -> None:
    flags = (
        "--cache-rank-gpus 0 --device cpu --page-size 16 --enable-mixed-chunk --sparse-budget 0 "
        "--attention-backend triton --decode-attention-backend torch_native --dense-layers 99"
    )
    args = parse_server_args(flags.split())
    assert not args.has_cache_rank
    assert not args.disable_radix_cache
    assert args.enable_mixed_chunk
    assert args.page_size == 16
    assert args.decode_attention_backend == "torch_native"
    assert args.dtype == "auto"


BASELINE = "--cache-rank-gpus 0 --decode-mode tova"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--cache-rank-gpus 0", None),
        ("--cache-rank-gpus 0 --kv-residency quantspec --dtype float32 --page-size 16", None),
        (
            "--cache-rank-gpus 0 --wire-dtype int8 --kv-residency lynx",
            "without a cache rank these have no effect: --kv-residency, --wire-dtype",
        ),
        (
            "--cache-rank-gpus 0 --dense-layers 2 --sparse-budget 0 --cache-rank-base-gpu-id 0",
            "without a cache rank these have no effect: --sparse-budget, --dense-layers, "
            "--cache-rank-base-gpu-id",
        ),
        (f"{BASELINE} --sparse-budget 8 --sink-tokens 1 --recent-tokens 2 --dense-layers 0", None),
        (
            f"{BASELINE} --sparse-budget 8 --sparse-threshold 80 --trace t.json",
            "with --decode-mode tova these have no effect: --sparse-threshold, --trace",
        ),
        ("--wire-dtype int8 --kv-residency lynx", None),
    ],
)
def test_one_line_names_the_flags_that_are_ignored(
    flags: str, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_server_args(["--device", "cpu", *flags.split()])
    logged = capsys.readouterr().err.splitlines()
    said = [each.split("] ", 1)[1] for each in logged if "no effect" in each]
    assert said == ([] if line is None else [line])


def test_every_flag_of_ours_is_named_without_a_cache_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heeded = ("cache_rank_gpus", "decode_mode", "allow_untested_sglang")
    own = [name for name in CACHE_RANK_FIELDS if name not in heeded]
    given: dict[str, Any] = dict.fromkeys(own, "another")
    compat.resolve(
        CacheRankServerArgs(model_path=str(BUNDLED_MODEL), device="cpu", cache_rank_gpus=0, **given)
    )
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in own)
    assert caplog.messages.count(f"without a cache rank these have no effect: {flags}") == 1


def test_without_a_cache_rank_no_model_is_refused(tmp_path: Path) -> None:
    model = Model("Mistral", {"sliding_window": 8})
    flags = f"--cache-rank-gpus 0 --device cpu --model-path {model.write(tmp_path)}"
    assert not parse_server_args(flags.split()).has_cache_rank


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
    args = parse_server_args(["--config", str(config), "--sparse-budget", "256"])
    assert args.model_path == str(model)
    assert args.sparse_threshold == 8192
    assert args.sparse_budget == 256
    assert args.query_predictor == "spade"
    assert args.disable_overlap_schedule


def test_a_config_file_without_a_model_serves_the_bundled_one(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("sparse-budget: 512\n")
    args = parse_server_args(["--config", str(config)])
    assert (args.model_path, args.sparse_budget) == (str(BUNDLED_MODEL), 512)


def test_a_config_file_is_refused_like_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("page-size: 16\n")
    with pytest.raises(UnsupportedError, match=r"^--page-size 16: "):
        parse_server_args(["--config", str(config)])


@pytest.mark.parametrize(
    "spelling", ["--model-path {}", "--model {}", "--model-path={}", "--model={}", "--model-pat {}"]
)
def test_the_users_model_is_served_however_the_flag_is_spelled(
    spelling: str, tmp_path: Path
) -> None:
    model = LLAMA.write(tmp_path)
    assert parse_server_args(spelling.format(model).split()).model_path == str(model)


@pytest.mark.parametrize(
    ("model", "flags", "chosen"),
    [
        (Model("Llama", DEEP), "", ("forecast", 2)),
        (Model("Qwen2", DEEP), "--dense-layers 4 --layers-per-group 1", ("forecast", 1)),
        (Model("Qwen3", DEEP), "--dense-layers 4", ("last", 6)),
        (Model("Qwen3", DEEP), "--dense-layers 4 --forecast-lead 1", ("forecast", 2)),
        (Model("Olmo2", DEEP), "", ("last", 6)),
        (Model("Olmo2", DEEP), "--query-predictor forecast", ("forecast", 2)),
        (Model("Llama", rotated("yarn")), "", ("forecast", 2)),
        (Model("Llama", rotated("longrope")), "", ("last", 6)),
        (Model("Llama", DEEP), "--query-predictor spade --layers-per-group 3", ("spade", 3)),
        (LLAMA, "", ("last", 6)),
    ],
    ids=str,
)
def test_queries_are_forecast_where_the_model_allows(
    model: Model, flags: str, chosen: tuple[str, int], tmp_path: Path
) -> None:
    args = parse_server_args(["--model-path", str(model.write(tmp_path)), *flags.split()])
    assert (args.query_predictor, args.layers_per_group) == chosen


@pytest.mark.parametrize(
    ("gpus", "model", "residency", "said"),
    [
        (0, Model("Qwen3"), "quantspec", ""),
        (2, Model("Qwen3", WIDE), "quantspec", "estimates (H200, 32,768 tokens a request; "),
        (2, Model("Qwen3", WIDE | {"num_experts": 4}), "quantspec", f"{NO_ESTIMATE}models with"),
        (2, Model("Qwen3", WIDE), "mosaickv", f"{NO_ESTIMATE}kv_residency mosaickv is not"),
    ],
    ids=str,
)
def test_what_was_chosen_and_what_to_expect_is_said_at_start_up(
    gpus: int,
    model: Model,
    residency: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend_gpus(gpus, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    served = ["--model-path", str(model.write(tmp_path)), "--kv-residency", residency]
    parse_server_args(served)
    logged = capsys.readouterr().err
    assert f"cache rank: --kv-residency {residency}\n" in logged
    assert "cache rank: --query-predictor last (" in logged
    assert f"cache rank: {said}" in logged if said else "estimate" not in logged


@pytest.mark.parametrize("changed", [{"kv_residency": "lynx"}])
def test_the_config_of_the_cache_rank_carries_the_flags(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "layers_per_group": 3,
        "forecast_lead": 4,
        "sparse_budget": 77,
        "sink_tokens": 5,
        "recent_tokens": 9,
        "query_window": 2,
        "query_predictor": "spade",
        "query_frame": "post",
        "hysteresis": 11,
        "max_swap_tokens": 13,
        "wire_dtype": "int8",
        "sketch_bits": 3,
        **changed,
    }
    shared = {*CACHE_RANK_FIELDS} & {*CacheRankConfig.__struct_fields__}
    scores = {"score_keys", "score_normalizer", "kv_residency", "kv_residency_options"}
    assert {*given} | scores == shared
    flags = [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    args = parse_server_args(["--kv-residency", "bf16", *flags])
    model = ModelShape(1, 1, 1, 8, "float32", 1.0, rotary_frequency=(1.0,))
    config, usual = args.cache_rank_config(model, max_rows=6), CacheRankConfig(model)
    assert {name: getattr(config, name) for name in given} == given
    assert all(getattr(usual, name) != value for name, value in given.items())
    assert (config.model, config.max_rows, config.checksum) == (model, 6, False)
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    assert parse_server_args(["--kv-residency", "bf16"]).cache_rank_config(model, 6).checksum


def test_a_flag_of_the_policy_has_the_default_of_the_policy() -> None:
    policy = CacheRankConfig(ModelShape(1, 1, 1, 8, "float32", 1.0))
    chosen_later = {"query_predictor", "layers_per_group", "hysteresis", "max_swap_tokens"}
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
    args = parse_server_args(flags.split())
    assert (args.hysteresis, args.max_swap_tokens) == sizes
    config = args.cache_rank_config(ModelShape(1, 1, 1, 8, "float32", 1.0), max_rows=6)
    assert (config.hysteresis, config.max_swap_tokens) == sizes


def test_checksums_of_rounded_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelShape(1, 1, 1, 8, "bfloat16", 1.0)
    config = parse_server_args(["--wire-dtype", "int8"]).cache_rank_config(model, max_rows=6)
    assert config.wire_torch_dtype == torch.int8
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    with pytest.raises(UnsupportedError, match=r"^--wire-dtype int8: "):
        parse_server_args(["--wire-dtype", "int8"])


def test_options_of_the_residency_are_numbers_where_they_can_be() -> None:
    model = ModelShape(1, 1, 1, 8, "float32", 1.0)
    for given, options in (
        ("alpha=5, reading=anchor", {"alpha": 5, "reading": "anchor"}),
        ("alpha=0.5", {"alpha": 0.5}),
        ("", {}),
    ):
        args = parse_server_args(["--kv-residency", "lynx", "--kv-residency-options", given])
        assert args.cache_rank_config(model, max_rows=6).kv_residency_options == options


def test_the_arguments_survive_pickling() -> None:
    args = parse_server_args(["--sparse-budget", "128", "--query-predictor", "spade"])
    arrived = pickle.loads(pickle.dumps(args))
    assert type(arrived) is CacheRankServerArgs
    assert arrived == args
    assert arrived.has_cache_rank


@pytest.mark.parametrize(
    "flags",
    [
        "--sparse-budgets 7",
        "--sparse-budget many",
        "--query-predictor median",
        "--query-frame middle",
        "--inference-kv none",
        "--score-keys fp3",
        "--wire-dtype float8",
        "--kv-residency fp3",
        "--decode-mode dense",
        "--cache-rank-transfer-backend rdma",
        "--trace-steps few",
        "--cache-rank-timeout soon",
        "--model-path",
    ],
)
def test_a_flag_that_cannot_be_read_exits_with_status_2(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(flags.split())
    assert caught.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err.splitlines()[-1]


# The engine, and the port.


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
        sglang_ext.Engine(inference_kv="working-set", disable_radix_cache=False)
    assert started == []


def test_the_engine_takes_the_bundled_model_unless_given_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = without_starting(monkeypatch)
    sglang_ext.Engine()
    sglang_ext.Engine(cache_rank_gpus=0, disable_radix_cache=False)
    sglang_ext.Engine(disable_radix_cache=False)
    sglang_ext.Engine(model_path="/other", disable_radix_cache=True)
    arguments = parse_server_args([])
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


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_refuses_a_port_that_somebody_listens_on(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket() as ipv4, socket.socket(family) as other:
        # A port that is free for IPv6 alone may be one that another test listens on.
        ipv4.bind(("127.0.0.1", 0))
        listener, port = ipv4, ipv4.getsockname()[1]
        if family == socket.AF_INET6:
            listener = other
            try:
                listener.bind((address, port))
            except OSError as error:
                pytest.skip(f"cannot bind to {address}: {error}")
        refuse_used_port("0.0.0.0", port)  # bound, and nobody listens yet
        listener.listen()
        with pytest.raises(UnsupportedError, match=f"^--port {port}: "):
            refuse_used_port("0.0.0.0", port)
    refuse_used_port("0.0.0.0", port)


def test_the_port_of_an_outgoing_connection_is_free_to_listen_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            refuse_used_port("127.0.0.1", client.getsockname()[1])


# The command itself.


def test_help_shows_every_flag_of_ours_under_one_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        parse_server_args(["--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: python -m sglang_ext.launch")
    (section,) = re.findall(r"^cache rank:\n((?:(?: .*)?\n)+)", output, flags=re.MULTILINE)
    shown = re.findall(r"^  --([a-z-]+)", section, flags=re.MULTILINE)
    assert shown == [name.replace("_", "-") for name in CACHE_RANK_FIELDS]
    assert "--page-size" in output.replace(section, "")


def test_a_refusal_ends_the_command_with_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch.main(["--page-size", "16"]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert [line for line in errors.splitlines() if "--page-size" in line] == [
        errors.splitlines()[-1]
    ]
    assert errors.splitlines()[-1].startswith("error: --page-size 16: ")


@pytest.mark.thorough
def test_the_command_gives_its_status_to_the_shell() -> None:
    command = [sys.executable, "-m", "sglang_ext.launch", "--page-size", "16"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: --page-size 16: ")

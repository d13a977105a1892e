"""What the launcher sets, what it accepts, and every combination it refuses at the door."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import sglang_ext
from cache_rank.config import CacheRankConfig
from sglang_ext import refusals, server_args
from sglang_ext.refusals import (
    ALLOW_LARGE_BUDGET_VARIABLE,
    BACKEND,
    UnsupportedError,
    refuse_used_port,
)
from sglang_ext.server_args import (
    BUNDLED_MODEL,
    CACHE_RANK_FIELDS,
    CHECKSUM_VARIABLE,
    CacheRankServerArgs,
    parse_server_args,
)

ROOT = Path(sglang_ext.__file__).parent.parent
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parsing sets up logging and the environment; the tests are of a machine without a GPU."""
    environment, level = dict(os.environ), logging.root.level
    handlers, logging.root.handlers = logging.root.handlers, []
    monkeypatch.setattr(server_args, "has_gpu", lambda: False)
    monkeypatch.setattr(refusals, "has_gpu", lambda: False)
    for variable in (ALLOW_LARGE_BUDGET_VARIABLE, CHECKSUM_VARIABLE):
        os.environ.pop(variable, None)
    yield
    os.environ.clear()
    os.environ.update(environment)
    logging.root.handlers = handlers
    logging.root.setLevel(level)


@dataclass(frozen=True)
class Refused:
    flags: str
    message: str


NO_RADIX_CACHE = (
    "No radix cache: prompts of sparse requests leave the pool, so prefixes are not shared; drop "
    "--radix-cache-backend, --enable-hierarchical-cache, --enable-session-radix-cache and "
    "--enable-lmcache."
)
NO_OVERLAPPING_BATCHES = (
    "Two-batch overlap, PD multiplexing and streaming sessions are not supported: drop "
    "--enable-two-batch-overlap, --enable-pdmux and --enable-streaming-session."
)
NO_LORA = (
    "LoRA is not supported: merge the adapter into the model, or drop --enable-lora and "
    "--lora-paths."
)
ONLY_GENERATION = (
    "Only autoregressive generation has decode steps: drop --is-embedding and --dllm-algorithm."
)

CONFLICTS = [
    Refused("--radix-cache-backend custom", NO_RADIX_CACHE),
    Refused("--enable-hierarchical-cache", NO_RADIX_CACHE),
    Refused("--enable-lmcache", NO_RADIX_CACHE),
    Refused("--enable-session-radix-cache", NO_RADIX_CACHE),
    *(
        Refused(
            f"--page-size {size}",
            f"--page-size {size}: tokens are selected one by one, so the page size must be 1; "
            "drop the flag.",
        )
        for size in (0, 16)
    ),
    Refused(
        "--enable-mixed-chunk",
        "Prefill and decode rows cannot share a batch: drop --enable-mixed-chunk.",
    ),
    *(
        Refused(
            f"--speculative-algorithm {algorithm}",
            "Speculative decoding verifies several queries a step, and the cache rank predicts "
            "one: drop --speculative-algorithm.",
        )
        for algorithm in ("EAGLE", "NGRAM")
    ),
    Refused("--pp-size 2", "Pipeline parallelism is not supported: drop --pp-size."),
    Refused(
        "--dp-size 2",
        "Data parallelism is not supported: drop --dp-size and start one server a replica.",
    ),
    Refused("--nnodes 2", "Both ranks must be on one machine: drop --nnodes."),
    *(
        Refused(
            f"--disaggregation-mode {mode}",
            "Prefill/decode disaggregation is not supported: drop --disaggregation-mode.",
        )
        for mode in ("prefill", "decode")
    ),
    Refused("--enable-lora", NO_LORA),
    Refused("--lora-paths adapter=/nowhere", NO_LORA),
    Refused(
        "--kv-cache-dtype fp8_e4m3",
        "--kv-cache-dtype fp8_e4m3: the pool must hold the model's dtype; drop the flag.",
    ),
    Refused("--enable-two-batch-overlap", NO_OVERLAPPING_BATCHES),
    Refused("--enable-pdmux", NO_OVERLAPPING_BATCHES),
    Refused("--enable-streaming-session", NO_OVERLAPPING_BATCHES),
    Refused("--is-embedding", ONLY_GENERATION),
    Refused("--dllm-algorithm LowConfidence", ONLY_GENERATION),
    Refused(
        "--decode-attention-backend triton",
        "--decode-attention-backend triton: decode goes through the cache rank's backend; choose "
        "the kernels with --attention-backend.",
    ),
    Refused(
        "--strip-thinking-cache",
        "--strip-thinking-cache spares the radix cache, which is off: drop the flag.",
    ),
    *(
        Refused(
            f"--inference-kv working-set {flags}",
            "--inference-kv working-set takes the pool rows of tokens away, by which "
            "--enable-return-routed-experts and --kv-canary look for them: drop them, or use "
            "--inference-kv full.",
        )
        for flags in ("--enable-return-routed-experts", "--kv-canary log")
    ),
    Refused(
        "--disable-overlap-schedule --inference-kv working-set",
        "--inference-kv working-set needs the overlap schedule to take back a step that the cache "
        "rank failed in: drop --disable-overlap-schedule.",
    ),
    *(
        Refused(
            f"--cache-rank-gpus {gpus}",
            f"--cache-rank-gpus {gpus}: there is one cache rank for each tensor-parallel rank, so "
            "give 1, or 0 for plain SGLang.",
        )
        for gpus in (2, -1)
    ),
    *(
        Refused(
            f"--tp-size 2 --cache-rank-gpus {gpus}",
            "Tensor parallelism is not supported with a cache rank yet: drop --tp-size.",
        )
        for gpus in (1, 2)
    ),
    Refused(
        "--cache-rank-address not.an.address.invalid",
        "--cache-rank-address not.an.address.invalid is not an address of this machine: give one "
        "of its interfaces, or drop the flag for loopback.",
    ),
    Refused(
        "--max-sparse-requests 10000000",
        "--max-sparse-requests 10000000 working sets of Qwen3ForCausalLM take 42025 GB, more than "
        "this machine has free: lower it, or --sparse-budget.",
    ),
    Refused(
        "--max-sparse-requests 10000000 --inference-kv working-set",
        "--max-sparse-requests 10000000 working sets of Qwen3ForCausalLM take 62996 GB, more "
        "than this machine has free: lower it, or --sparse-budget, --context-length or "
        "--dense-layers.",
    ),
    *(
        Refused(
            f"--cache-rank-transfer-backend {backend}",
            f"--cache-rank-transfer-backend {backend}: between GPUs only; drop the flag.",
        )
        for backend in ("peer", "nccl")
    ),
    *(
        Refused(
            f"--device {device}",
            f"--device {device}: the cache rank runs on NVIDIA GPUs and on CPUs; pass --device "
            "cuda or cpu, or --cache-rank-gpus 0 for plain SGLang.",
        )
        for device in ("npu", "xpu")
    ),
    *(
        Refused(
            f"--model-path {path}",
            f"--model-path {path} does not exist or has no config.json: give a model folder or a "
            "Hugging Face repository id.",
        )
        for path in ("/nowhere/model", "./nowhere", "../nowhere", "~/nowhere", "two/slashes/deep")
    ),
]

OUT_OF_RANGE = [
    *(
        Refused(f"{flag} {value}", f"{flag} must be at least 1, got {value}.")
        for flag in ("--layers-per-group", "--sparse-budget", "--query-window", "--delta-capacity")
        for value in (0, -1)
    ),
    *(
        Refused(f"{flag} -1", f"{flag} must not be negative, got -1.")
        for flag in ("--sink-tokens", "--recent-tokens", "--selection-margin", "--recall-interval")
    ),
    *(
        Refused(f"--max-sparse-requests {value}", "--max-sparse-requests must be at least 1.")
        for value in (0, -1)
    ),
    Refused(
        "--tokenizer-worker-num 2",
        "Plugins are not loaded by several tokenizer workers, which check what a request asks of "
        "the cache rank: drop --tokenizer-worker-num.",
    ),
    Refused(
        "--enable-memory-saver",
        "What a cache rank holds and writes is not released with SGLang's memory: drop "
        "--enable-memory-saver.",
    ),
    Refused(
        "--max-queued-requests 8 --inference-kv working-set",
        "--inference-kv working-set recomputes requests whose cache rank is lost, and "
        "--max-queued-requests would turn them away then: drop it, or use --inference-kv full.",
    ),
    Refused(
        "--model-impl transformers",
        "--model-impl transformers has no attention layers that a cache rank can serve: drop the "
        "flag.",
    ),
    *(
        Refused(
            f"--bulk-chunk-tokens {value}",
            "--bulk-chunk-tokens must be at least 2: every step adds one token of its own.",
        )
        for value in (1, 0, -1)
    ),
    *(
        Refused(
            f"--cache-rank-timeout {value}",
            "--cache-rank-timeout must be at least 1 second: a cache rank says four times a second "
            "that it is alive.",
        )
        for value in ("0", "-1", "0.95", "inf", "nan")
    ),
    *(
        Refused(
            f"--cache-rank-mem-fraction {value}",
            "--cache-rank-mem-fraction must be above 0 and at most 1.",
        )
        for value in ("0", "-0.5", "1.1", "nan")
    ),
    Refused("--dense-layers -1", "--dense-layers must not be negative."),
    Refused(
        "--kv-residency-options alpha=0 --kv-residency lynx",
        "--kv-residency-options alpha=0: lynx takes alpha from 0.01 to 1000, reading anchor or "
        "full.",
    ),
    Refused(
        "--kv-residency-options reading=4",
        "--kv-residency-options reading=4: bf16 takes no options.",
    ),
    Refused(
        "--kv-residency-options reading=4,alpha --kv-residency quantspec",
        "--kv-residency-options alpha: write name=value, separated by commas.",
    ),
    Refused(
        "--kv-residency-options reading=4,reading=8 --kv-residency quantspec",
        "--kv-residency-options reading=8: reading is given twice.",
    ),
    Refused(
        "--score-keys fp8 --kv-residency lynx",
        "--score-keys fp8: lynx scores by its own codes; drop it, and choose a reading among the "
        "options of the format.",
    ),
    *(
        Refused(
            f"--sparse-threshold {value}",
            "--sparse-threshold must exceed --sink-tokens plus --recent-tokens (68): raise it.",
        )
        for value in (0, -1, 68)
    ),
    *(
        Refused(
            flags,
            f"--sparse-budget, --sink-tokens and --recent-tokens add up to {total}, more than "
            f"--sparse-threshold {threshold}: lower the budget or raise the threshold.",
        )
        for flags, total, threshold in (
            ("--sparse-threshold 2115", 2116, 2115),
            ("--sparse-budget 4029", 4097, 4096),
            ("--sink-tokens 2000", 4112, 4096),
            ("--recent-tokens 2045", 4097, 4096),
        )
    ),
]


@pytest.mark.parametrize("refused", [*CONFLICTS, *OUT_OF_RANGE], ids=lambda refused: refused.flags)
def test_refuses_with_the_flag_and_the_remedy(refused: Refused) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_server_args(refused.flags.split())
    assert str(caught.value) == refused.message
    assert refused.flags.split()[0] in refused.message


def pretend_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)


@dataclass(frozen=True)
class RefusedOnGpus(Refused):
    gpus: int = 2


NO_GPU_LEFT = (
    "The cache rank would run on GPU {}, and this machine has {}: pass --cache-rank-base-gpu-id, "
    "add a GPU, or pass --cache-rank-gpus 0 for plain SGLang. With CUDA_VISIBLE_DEVICES= both "
    "ranks run on CPUs, for tests."
)


@pytest.mark.parametrize(
    "refused",
    [
        RefusedOnGpus(
            "--cache-rank-base-gpu-id 0",
            "--cache-rank-base-gpu-id 0 is SGLang's own GPU: a cache rank needs another; drop the "
            "flag to take the next one.",
        ),
        RefusedOnGpus(
            "--cache-rank-base-gpu-id 1 --base-gpu-id 1",
            "--cache-rank-base-gpu-id 1 is SGLang's own GPU: a cache rank needs another; drop the "
            "flag to take the next one.",
        ),
        RefusedOnGpus("", NO_GPU_LEFT.format(1, 1), gpus=1),
        RefusedOnGpus("--device cuda", NO_GPU_LEFT.format(1, 1), gpus=1),
        RefusedOnGpus("--base-gpu-id 1", NO_GPU_LEFT.format(2, 2)),
        RefusedOnGpus("--gpu-id-step 2", NO_GPU_LEFT.format(2, 2)),
        RefusedOnGpus("--cache-rank-base-gpu-id 2", NO_GPU_LEFT.format(2, 2)),
        RefusedOnGpus(
            "--cache-rank-transfer-backend peer",
            "--cache-rank-transfer-backend peer: GPU 0 cannot reach the memory of GPU 1; pass "
            "nccl, or drop the flag.",
        ),
        RefusedOnGpus(
            "--attention-backend flashinfer",
            "--attention-backend flashinfer: decode over working sets in CUDA graphs is tested "
            "with fa3 and triton; pass one of them.",
        ),
        *(
            RefusedOnGpus(
                flags,
                "Decode must be one full CUDA graph, inside which the exchange is gated, or none: "
                "pass --cuda-graph-backend-decode full, and drop --cuda-graph-config.",
            )
            for flags in (
                "--cuda-graph-backend-decode breakable",
                '--cuda-graph-config {"decode":{"backend":"breakable"}}',
            )
        ),
    ],
    ids=lambda refused: f"{refused.flags or 'nothing'} with {refused.gpus}",
)
def test_refuses_gpus_that_cannot_be_had(
    refused: RefusedOnGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(refused.gpus, monkeypatch)
    with pytest.raises(UnsupportedError) as caught:
        parse_server_args(refused.flags.split())
    assert str(caught.value) == refused.message


@pytest.mark.parametrize(
    "flags", ["", "--cache-rank-base-gpu-id 0", "--attention-backend torch_native"]
)
def test_cpu_ranks_of_a_machine_with_gpus_need_none_of_them(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(1, monkeypatch)
    assert parse_server_args(["--device", "cpu", *flags.split()]).device == "cpu"


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


@pytest.mark.parametrize("flag", ["--attention-backend", "--prefill-attention-backend"])
def test_refuses_the_decode_backend_where_kernels_are_chosen(flag: str) -> None:
    from sglang_ext import processes

    processes.load_plugin()  # only then does the command line know the name
    with pytest.raises(UnsupportedError) as caught:
        parse_server_args([flag, BACKEND])
    assert str(caught.value) == (
        "--attention-backend and --prefill-attention-backend choose kernels, and cache_rank has "
        "none of its own: name another backend, or drop the flag."
    )
    assert parse_server_args(["--decode-attention-backend", BACKEND]).attention_backend != BACKEND


def test_the_environment_allows_a_working_set_above_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_large = ["--sparse-threshold", "100", "--sparse-budget", "2048"]
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "0")
    with pytest.raises(UnsupportedError, match="lower the budget or raise the threshold"):
        parse_server_args(too_large)
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "1")
    assert parse_server_args(too_large).sparse_threshold == 100


@pytest.mark.parametrize(
    "flags",
    [
        "--sink-tokens 0",
        "--recent-tokens 0",
        "--selection-margin 0",
        "--recall-interval 0",
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


# Models, by their configuration alone.


@dataclass(frozen=True)
class Model:
    name: str
    config: str
    architecture: str
    changes: tuple[tuple[str, Any], ...] = ()
    small: bool = True

    def write(self, folder: Path) -> Path:
        """A model folder without weights."""
        kind = getattr(transformers, self.config)
        values = kind(**SMALL) if self.small else kind()
        config = {**values.to_dict(), **dict(self.changes), "architectures": [self.architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


SLIDING = (
    "{} has sliding-window or linear attention layers, which are not supported: "
    "use --cache-rank-gpus 0."
)
LATENT = "{} uses multi-head latent attention, which is not supported: use --cache-rank-gpus 0."
MULTIMODAL = "{} is multimodal, which is not supported: use --cache-rank-gpus 0."
NOT_GENERATING = "{} does not generate, so it has no decode steps: use --cache-rank-gpus 0."
HEAD_DIM = (
    "{{}} has head dimension {}; multiples of 8 up to 256 are supported: use --cache-rank-gpus 0."
)

WINDOWED = (("use_sliding_window", True), ("sliding_window", 8), ("max_window_layers", 0))
REFUSED_MODELS = [
    (
        Model(
            "windowed Qwen2", "Qwen2Config", "Qwen2ForCausalLM", (*WINDOWED, ("layer_types", None))
        ),
        SLIDING,
    ),
    (
        Model("windowed Mistral", "MistralConfig", "MistralForCausalLM", (("sliding_window", 8),)),
        SLIDING,
    ),
    (Model("every other layer windowed", "Gemma2Config", "Gemma2ForCausalLM"), SLIDING),
    (Model("chunked attention", "Llama4TextConfig", "Llama4ForCausalLM"), SLIDING),
    (
        Model("gated delta net", "Qwen3NextConfig", "Qwen3NextForCausalLM", small=False),
        SLIDING,
    ),
    (Model("Mamba and attention", "FalconH1Config", "FalconH1ForCausalLM", small=False), SLIDING),
    (Model("short convolutions", "Lfm2Config", "Lfm2ForCausalLM", small=False), SLIDING),
    (Model("DeepSeek V2", "DeepseekV2Config", "DeepseekV2ForCausalLM", small=False), LATENT),
    (Model("DeepSeek V3", "DeepseekV3Config", "DeepseekV3ForCausalLM", small=False), LATENT),
    (
        Model("pictures", "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", small=False),
        MULTIMODAL,
    ),
    (Model("classifier", "LlamaConfig", "LlamaForSequenceClassification"), NOT_GENERATING),
    *(
        (
            Model(
                f"head dimension {width}", "LlamaConfig", "LlamaForCausalLM", (("head_dim", width),)
            ),
            HEAD_DIM.format(width),
        )
        for width in (20, 260, 264)
    ),
]


@pytest.mark.parametrize(
    ("model", "message"), REFUSED_MODELS, ids=[model.name for model, _ in REFUSED_MODELS]
)
def test_refuses_a_model_whose_attention_cannot_be_sparse(
    model: Model, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_server_args(["--model-path", str(model.write(tmp_path))])
    assert str(caught.value) == message.format(model.architecture)


ACCEPTED_MODELS = [
    Model("Llama", "LlamaConfig", "LlamaForCausalLM"),
    Model("Qwen2 without windows", "Qwen2Config", "Qwen2ForCausalLM", (("sliding_window", 8),)),
    Model(
        "Mistral without windows",
        "MistralConfig",
        "MistralForCausalLM",
        (("sliding_window", None),),
    ),
    Model("Qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
    Model("widest heads", "LlamaConfig", "LlamaForCausalLM", (("head_dim", 256),)),
    Model("odd multiple of 8", "LlamaConfig", "LlamaForCausalLM", (("head_dim", 24),)),
]


@pytest.mark.parametrize("model", ACCEPTED_MODELS, ids=lambda model: model.name)
def test_accepts_a_model_of_full_attention(model: Model, tmp_path: Path) -> None:
    args = parse_server_args(["--model-path", str(model.write(tmp_path))])
    assert args.model_path == str(tmp_path)
    assert args.decode_attention_backend == BACKEND


@pytest.mark.parametrize("dense_layers", [2, 7])
def test_refuses_dense_layers_that_leave_none_sparse(dense_layers: int, tmp_path: Path) -> None:
    model = Model("two layers", "LlamaConfig", "LlamaForCausalLM").write(tmp_path)
    flags = ["--model-path", str(model), "--dense-layers", str(dense_layers)]
    with pytest.raises(UnsupportedError) as caught:
        parse_server_args(flags)
    assert str(caught.value) == (
        f"--dense-layers {dense_layers} leaves none of the 2 layers of LlamaForCausalLM sparse: "
        "lower it, or use --cache-rank-gpus 0."
    )


# What SGLang's version may be.


def pretend_sglang_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: version if name == "sglang" else real(name),
    )


@pytest.mark.parametrize(
    "version", ["0.4.10.post2", "0.5.15", "0.5.16rc1", "0.5.18", "0.6.0", "1.0"]
)
@pytest.mark.parametrize("flags", ["", "--cache-rank-gpus 0"])
def test_refuses_an_sglang_that_was_not_tested(
    version: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_sglang_is(version, monkeypatch)
    with pytest.raises(UnsupportedError) as caught:
        parse_server_args(flags.split())
    assert re.fullmatch(
        rf"SGLang {re.escape(version)} is outside the tested range \S+: "
        r"pip install 'sglang==0\.5\.16'\.",
        str(caught.value),
    )


@pytest.mark.parametrize("version", ["0.5.16", "0.5.16.post1", "0.5.17rc1", "0.5.17.dev3+gabc"])
def test_accepts_every_sglang_of_the_tested_range(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_sglang_is(version, monkeypatch)
    assert parse_server_args([]).has_cache_rank


# What is accepted, and what it becomes.


def test_no_arguments_serve_the_bundled_model_and_log_what_was_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parse_server_args([])
    assert args.model_path == str(BUNDLED_MODEL)
    assert args.dense_layers == 1
    assert args.inference_kv == "full"
    settings = {
        "disable_radix_cache": True,
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
        "attention_backend": "triton",
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
    model = Model("bf16", "LlamaConfig", "LlamaForCausalLM", (("dtype", "bfloat16"),)).write(
        tmp_path
    )
    args = parse_server_args(["--model-path", str(model)])
    assert args.dtype == "auto"
    assert str(args.get_model_config().dtype) == "torch.bfloat16"


@pytest.mark.parametrize("inference_kv", ["full", "working-set"])
def test_the_first_layer_is_dense(inference_kv: str) -> None:
    assert parse_server_args(["--inference-kv", inference_kv]).dense_layers == 1


def test_says_once_a_launch_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.cpu.has_gpu", lambda: False)
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
        ("--cache-rank-gpus 0 --kv-residency bf16 --dtype float32 --page-size 16", None),
        (
            "--cache-rank-gpus 0 --wire-dtype fp8 --kv-residency lynx",
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
        ("--wire-dtype fp8 --kv-residency lynx", None),
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
    own = [name for name in CACHE_RANK_FIELDS if name not in ("cache_rank_gpus", "decode_mode")]
    given: dict[str, Any] = dict.fromkeys(own, "another")
    CacheRankServerArgs(model_path=str(BUNDLED_MODEL), device="cpu", cache_rank_gpus=0, **given)
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in own)
    assert caplog.messages.count(f"without a cache rank these have no effect: {flags}") == 1


def test_without_a_cache_rank_no_model_is_refused(tmp_path: Path) -> None:
    model = Model("windowed", "MistralConfig", "MistralForCausalLM", (("sliding_window", 8),))
    flags = f"--cache-rank-gpus 0 --device cpu --model-path {model.write(tmp_path)}"
    assert not parse_server_args(flags.split()).has_cache_rank


def test_a_config_file_gives_our_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    Model("Llama", "LlamaConfig", "LlamaForCausalLM").write(model)
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model-path: {model}\n"
        "sparse-threshold: 8192\n"
        "sparse-budget: 512\n"
        "query-predictor: ema\n"
        "disable-overlap-schedule: true\n"
    )
    args = parse_server_args(["--config", str(config), "--sparse-budget", "256"])
    assert args.model_path == str(model)
    assert args.sparse_threshold == 8192
    assert args.sparse_budget == 256
    assert args.query_predictor == "ema"
    assert args.disable_overlap_schedule


def test_a_config_file_without_a_model_serves_the_bundled_one(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("sparse-budget: 512\n")
    args = parse_server_args(["--config", str(config)])
    assert (args.model_path, args.sparse_budget) == (str(BUNDLED_MODEL), 512)


def test_a_config_file_is_refused_like_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("page-size: 16\n")
    with pytest.raises(UnsupportedError, match=r"--page-size 16: .* drop the flag"):
        parse_server_args(["--config", str(config)])


@pytest.mark.parametrize(
    "spelling", ["--model-path {}", "--model {}", "--model-path={}", "--model={}", "--model-pat {}"]
)
def test_the_users_model_is_served_however_the_flag_is_spelled(
    spelling: str, tmp_path: Path
) -> None:
    model = Model("Llama", "LlamaConfig", "LlamaForCausalLM").write(tmp_path)
    assert parse_server_args(spelling.format(model).split()).model_path == str(model)


@pytest.mark.parametrize("changed", [{"score_keys": "fp8"}, {"kv_residency": "lynx"}])
def test_the_config_of_the_cache_rank_carries_the_flags(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "layers_per_group": 3,
        "sparse_budget": 77,
        "sink_tokens": 5,
        "recent_tokens": 9,
        "query_window": 2,
        "query_predictor": "ridge",
        "query_frame": "post",
        "selection_margin": 11,
        "delta_capacity": 13,
        "wire_dtype": "fp8",
        "recall_interval": 17,
        **changed,
    }
    assert {*given, "score_keys", "kv_residency"} == set(server_args.SHARED_FIELDS)
    flags = [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    args = parse_server_args(flags)
    model = server_args.ModelShape(1, 1, 1, 8, "float32", 1.0, rotary_frequency=(1.0,))
    config, usual = args.cache_rank_config(model, max_rows=6), CacheRankConfig(model)
    assert {name: getattr(config, name) for name in given} == given
    assert all(getattr(usual, name) != value for name, value in given.items())
    assert (config.model, config.max_rows, config.checksum) == (model, 6, False)
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    assert parse_server_args([]).cache_rank_config(model, max_rows=6).checksum


def test_checksums_of_rounded_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = server_args.ModelShape(1, 1, 1, 8, "bfloat16", 1.0)
    config = parse_server_args(["--wire-dtype", "fp8"]).cache_rank_config(model, max_rows=6)
    assert config.wire_torch_dtype == torch.float8_e4m3fn
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    message = (
        "--wire-dtype fp8: checksums compare tokens bit for bit, and shipped ones are rounded; use "
        "bf16, or no checksums."
    )
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        parse_server_args(["--wire-dtype", "fp8"])


def test_options_of_the_residency_are_numbers_where_they_can_be() -> None:
    model = server_args.ModelShape(1, 1, 1, 8, "float32", 1.0)
    for given, options in (
        ("alpha=5, reading=anchor", {"alpha": 5, "reading": "anchor"}),
        ("alpha=0.5", {"alpha": 0.5}),
        ("", {}),
    ):
        args = parse_server_args(["--kv-residency", "lynx", "--kv-residency-options", given])
        assert args.cache_rank_config(model, max_rows=6).kv_residency_options == options


def test_the_arguments_survive_pickling() -> None:
    args = parse_server_args(["--sparse-budget", "128", "--query-predictor", "ridge"])
    arrived = pickle.loads(pickle.dumps(args))
    assert type(arrived) is CacheRankServerArgs
    assert arrived == args
    assert arrived.has_cache_rank


@dataclass(frozen=True)
class Misspelled:
    flags: str
    message: str


@pytest.mark.parametrize(
    "misspelled",
    [
        Misspelled("--sparse-budgets 7", "unrecognized arguments: --sparse-budgets 7"),
        Misspelled("--sparse-budget many", "--sparse-budget: invalid int value: 'many'"),
        Misspelled("--query-predictor median", "--query-predictor: invalid choice: 'median'"),
        Misspelled("--query-frame middle", "--query-frame: invalid choice: 'middle'"),
        Misspelled("--inference-kv none", "--inference-kv: invalid choice: 'none'"),
        Misspelled("--score-keys fp3", "--score-keys: invalid choice: 'fp3'"),
        Misspelled("--wire-dtype float8", "--wire-dtype: invalid choice: 'float8'"),
        Misspelled("--trace-steps few", "--trace-steps: invalid int value: 'few'"),
        Misspelled("--kv-residency fp3", "--kv-residency: invalid choice: 'fp3'"),
        Misspelled(
            "--cache-rank-timeout soon", "--cache-rank-timeout: invalid float value: 'soon'"
        ),
        Misspelled("--model-path", "--model-path/--model: expected one argument"),
    ],
    ids=lambda misspelled: misspelled.flags,
)
def test_a_flag_that_cannot_be_read_exits_with_status_2(
    misspelled: Misspelled, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(misspelled.flags.split())
    assert caught.value.code == 2
    assert misspelled.message in capsys.readouterr().err.splitlines()[-1]


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
    with pytest.raises(UnsupportedError) as caught:
        sglang_ext.Engine(disable_radix_cache=False)
    assert str(caught.value) == (
        "disable_radix_cache=False: sparse requests leave the pool, so prefixes are not shared; "
        "drop the argument."
    )
    assert started == []


def test_the_engine_takes_the_bundled_model_unless_given_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = without_starting(monkeypatch)
    sglang_ext.Engine()
    sglang_ext.Engine(cache_rank_gpus=0, disable_radix_cache=False)
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
        {"model_path": "/other", "disable_radix_cache": True},
        {"server_args": arguments},
    ]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_refuses_a_port_that_somebody_listens_on(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip(f"no interface {address}")
        port = listener.getsockname()[1]
        refuse_used_port("0.0.0.0", port)  # bound, and nobody listens yet
        listener.listen()
        with pytest.raises(UnsupportedError) as caught:
            refuse_used_port("0.0.0.0", port)
        assert str(caught.value) == f"Port {port} of 0.0.0.0 is in use: choose another with --port."
    refuse_used_port("0.0.0.0", port)


def test_the_port_of_an_outgoing_connection_is_free_to_listen_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            refuse_used_port("127.0.0.1", client.getsockname()[1])


# The command itself.


@pytest.fixture(scope="module", autouse=True)
def launches() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Commands that end by themselves; they take seconds, so they run beside the other tests."""
    running = {
        flags: subprocess.Popen(
            [sys.executable, "-m", "sglang_ext.launch", *flags.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"},
        )
        for flags in ("--help", "--page-size 16")
    }
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


def test_help_shows_every_flag_of_ours_under_one_heading(
    launches: dict[str, subprocess.Popen[str]],
) -> None:
    output, _ = launches["--help"].communicate(timeout=120)
    assert launches["--help"].returncode == 0
    assert output.startswith("usage: python -m sglang_ext.launch")
    (section,) = re.findall(r"^cache rank:\n((?:(?: .*)?\n)+)", output, flags=re.MULTILINE)
    shown = re.findall(r"^  --([a-z-]+)", section, flags=re.MULTILINE)
    assert shown == [name.replace("_", "-") for name in CACHE_RANK_FIELDS]
    assert "--page-size" in output.replace(section, "")


def test_a_refusal_ends_the_command_with_one_line_and_status_2(
    launches: dict[str, subprocess.Popen[str]],
) -> None:
    output, errors = launches["--page-size 16"].communicate(timeout=120)
    assert launches["--page-size 16"].returncode == 2
    assert output == ""
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if line.startswith("error:")] == [
        errors.splitlines()[-1]
    ]
    assert errors.splitlines()[-1] == (
        "error: --page-size 16: tokens are selected one by one, so the page size must be 1; "
        "drop the flag."
    )

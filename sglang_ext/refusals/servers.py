"""What the arguments of a server may not ask for, whichever model it serves."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import torch

from cache_rank.config import ModelShape
from sglang_ext import compat, cpu
from sglang_ext.flags import BACKEND, CacheRankFlags, flag_of
from sglang_ext.refusals import (
    ALLOW_LARGE_BUDGET_VARIABLE,
    DROP,
    PLAIN,
    Refusal,
    UnsupportedError,
)
from sglang_ext.requests import wants_beams

_CPU_BACKENDS = {None, "torch_native", "intel_amx", BACKEND}

_GPU_BACKENDS = ("fa3", "flashinfer", "triton")


def _can_bind(address: str) -> bool:
    """Whether a socket of this machine can be bound to an address."""
    try:
        family, *_, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def _cannot_write(file: str) -> bool:
    """Whether a file can be neither made nor replaced."""
    path = Path(file).expanduser()
    if path.exists():
        return path.is_dir() or not os.access(path, os.W_OK)
    return not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)


def _working_set(args: CacheRankFlags) -> int:
    """The tokens that a KV head attends to in a sparse step, without the current one."""
    return args.sparse_budget + args.sink_tokens + args.recent_tokens


def _prefers_beams(args: CacheRankFlags) -> bool:
    """Whether requests that do not say otherwise search with several beams."""
    preferred = args.preferred_sampling_params
    if isinstance(preferred, str):
        try:
            preferred = json.loads(preferred)
        except ValueError:  # SGLang says so
            return False
    return isinstance(preferred, dict) and wants_beams(preferred)


def _own_gpus(args: CacheRankFlags) -> range:
    """The GPUs of SGLang's ranks, and those that --gpu-id-step leaves between them."""
    return range(args.base_gpu_id, args.base_gpu_id + args.tp_size * args.gpu_id_step)


def _decode_graph(args: CacheRankFlags) -> str | None:
    """The backend of decode that --cuda-graph-config names; SGLang lets it win over the flags."""
    config = args.cuda_graph_config
    phase = config.get("decode") if isinstance(config, dict) else getattr(config, "decode", None)
    return phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", None)


SERVERS = (
    Refusal(
        "--tp-size --pp-size --dp-size --nnodes",
        "a model is served by one GPU of one machine yet",
    ),
    Refusal(
        "--disaggregation-mode --encoder-only",
        "prefill, decode and encoders on separate servers are not supported",
    ),
    Refusal(
        "--tokenizer-worker-num --smg-grpc-mode --grpc-mode --use-ray",
        "requests are checked in one process that answers over HTTP",
    ),
    Refusal(
        "--device",
        "the ranks run on NVIDIA GPUs and on CPUs",
        f"pass --device cuda or cpu, or {PLAIN}",
        lambda args: args.device not in (None, "cpu", "cuda"),
    ),
    Refusal(
        "--device",
        "this machine has no usable NVIDIA GPU",
        f"pass --device cpu, or {DROP}",
        lambda args: args.device == "cuda" and not cpu.has_gpu(),
    ),
    Refusal(
        "--cache-rank-address",
        "that is not an address of this machine",
        f"pass the address of one of its interfaces, or {DROP} for loopback",
        lambda args: not _can_bind(args.cache_rank_address),
    ),
    Refusal(
        "--radix-cache-backend --enable-hierarchical-cache --enable-lmcache --enable-flexkv "
        "--enable-session-radix-cache --enable-unified-cache-external-linker",
        "only SGLang's own radix cache, in the KV pool, is told what was computed densely",
    ),
    Refusal("--enable-mixed-chunk", "prefill and decode rows cannot share a batch"),
    Refusal(
        "--enable-two-batch-overlap --enable-pdmux --enable-streaming-session",
        "two-batch overlap, PD multiplexing and streaming sessions are not supported",
    ),
    Refusal(
        "--speculative-algorithm",
        "speculative decoding verifies several queries a step, and the cache rank predicts one",
    ),
    Refusal("--is-embedding --dllm-algorithm", "only autoregressive generation has decode steps"),
    Refusal(
        "--enable-lora --lora-paths",
        "LoRA is not supported",
        f"merge the adapter into the model, or {DROP}",
    ),
    Refusal(
        "--model-impl",
        "this has no attention layers that a cache rank can serve",
        when=lambda args: args.model_impl == "transformers",
    ),
    Refusal(
        "--kv-cache-dtype",
        "the KV pool must have the model's dtype",
        when=lambda args: args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"),
    ),
    Refusal(
        "--decode-attention-backend",
        "decode goes through the cache rank's own backend",
        f"{DROP}, and choose the kernels with --attention-backend",
        lambda args: args.decode_attention_backend not in (None, BACKEND),
    ),
    Refusal(
        "--attention-backend --prefill-attention-backend",
        f"these choose kernels, and {BACKEND} has none of its own",
        f"name another backend, or {DROP}",
        lambda args: BACKEND in (args.attention_backend, args.prefill_attention_backend),
    ),
)
"""These rows are of every server with sparse decode."""

CPUS = (
    Refusal(
        "--attention-backend --prefill-attention-backend",
        "the CPU engine attends by torch",
        DROP,
        lambda args: not {args.attention_backend, args.prefill_attention_backend} <= _CPU_BACKENDS,
    ),
    Refusal(
        "--quantization",
        "the CPU engine has no kernels for weights in 8 bits",
        when=lambda args: args.quantization == "fp8",
    ),
    Refusal(
        "--enable-memory-saver",
        "what it saves is memory of GPUs, and its library loads only where there is a driver",
        f"{DROP}: on CPUs memory is released and resumed without it",
    ),
    Refusal(
        "--enable-torch-compile",
        "on CPUs SGLang cannot compile decode steps whose prefill has another attention backend",
    ),
    Refusal(
        "--enable-deterministic-inference --rl-on-policy-target",
        "SGLang has no deterministic attention on CPUs",
    ),
)
"""These rows are of every server with sparse decode whose ranks run on CPUs."""

CACHE_RANKS = (
    Refusal(
        "--cache-rank-gpus",
        "there is one cache rank for each tensor-parallel rank",
        f"pass 1, or {PLAIN}",
    ),
    Refusal(
        "--trace",
        "this file cannot be written",
        f"pass one in a folder that exists, or {DROP}",
        lambda args: args.trace is not None and _cannot_write(args.trace),
    ),
    Refusal(
        "--hysteresis",
        lambda args: (
            "a selected token would stay until as many others again as --sparse-budget "
            f"{args.sparse_budget} rank before it, so that what is selected hardly follows queries"
        ),
        "pass less than the budget, or drop it for an eighth of that",
        lambda args: args.hysteresis is not None and args.hysteresis >= args.sparse_budget,
    ),
    Refusal(
        "--preferred-sampling-params",
        "a cache rank cannot follow beams",
        f"take beam_width out of it, or {PLAIN}",
        _prefers_beams,
    ),
    Refusal(
        "--startup-weight-load-mode",
        "queries are forecast by weights that are not there yet when the cache rank gets them",
    ),
    Refusal(
        "--page-size",
        "tokens are selected one by one, so a page holds one token",
        when=lambda args: args.page_size not in (None, 1),
    ),
    Refusal(
        "--inference-kv --max-queued-requests",
        "requests whose cache rank is lost are recomputed, and a full queue would turn them away",
        "drop --max-queued-requests",
        lambda args: (
            args.max_queued_requests is not None
            and (args.on_gpu or args.inference_kv == "working-set")
        ),
    ),
    Refusal(
        "--inference-kv --enable-return-routed-experts --kv-canary",
        "tokens lose the rows of the KV pool by which routed experts and the canary find them",
        "drop --enable-return-routed-experts and --kv-canary, or pass --inference-kv full",
        lambda args: (
            args.inference_kv == "working-set"
            and (args.enable_return_routed_experts or args.kv_canary != "none")
        ),
    ),
    Refusal(
        "--inference-kv --disable-overlap-schedule",
        "only the overlap schedule can take back a step that the cache rank failed in",
        "drop --disable-overlap-schedule, or pass --inference-kv full",
        lambda args: args.inference_kv == "working-set" and args.disable_overlap_schedule,
    ),
    Refusal(
        "--sparse-threshold --sink-tokens --recent-tokens",
        "a sparse request must have more tokens than sinks and recent ones",
        "raise --sparse-threshold, or lower --sink-tokens or --recent-tokens",
        lambda args: args.sparse_threshold <= args.sink_tokens + args.recent_tokens,
    ),
    Refusal(
        "--sparse-threshold --sparse-budget --sink-tokens --recent-tokens",
        lambda args: (
            f"budget, sinks and recent tokens add up to {_working_set(args)}, and a request turns "
            f"sparse at {args.sparse_threshold} tokens"
        ),
        "lower --sparse-budget, or raise --sparse-threshold",
        lambda args: (
            _working_set(args) > args.sparse_threshold
            and os.environ.get(ALLOW_LARGE_BUDGET_VARIABLE) != "1"
        ),
    ),
)
"""These rows are of a server with a cache rank."""

GPUS = (
    Refusal(
        "--disable-overlap-schedule",
        "on GPUs only the overlap schedule can take back a step that the cache rank failed in",
        DROP,
        lambda args: args.disable_overlap_schedule,
    ),
    Refusal(
        "--cache-rank-base-gpu-id",
        "this is SGLang's own GPU, and a cache rank needs another",
        f"{DROP} to take the next one",
        lambda args: not args.shares_gpu and args.first_cache_rank_gpu in _own_gpus(args),
    ),
    Refusal(
        "--cache-rank-gpus --cache-rank-base-gpu-id --base-gpu-id --gpu-id-step",
        lambda args: (
            f"the cache rank would run on GPU {args.first_cache_rank_gpu}, counted from 0, and "
            f"this machine has {torch.cuda.device_count()}"
        ),
        f"pass another --cache-rank-base-gpu-id, add a GPU, or {PLAIN}; with "
        "CUDA_VISIBLE_DEVICES= both ranks run on CPUs, for tests",
        lambda args: args.first_cache_rank_gpu + args.cache_rank_gpus > torch.cuda.device_count(),
    ),
    Refusal(
        "--cache-rank-transfer-backend",
        lambda args: (
            f"GPU {args.base_gpu_id} cannot reach the memory of GPU {args.first_cache_rank_gpu}"
        ),
        "set it to nccl, or drop it",
        lambda args: (
            args.cache_rank_transfer_backend == "peer"
            and args.base_gpu_id != args.first_cache_rank_gpu
            and not torch.cuda.can_device_access_peer(args.base_gpu_id, args.first_cache_rank_gpu)
        ),
    ),
    Refusal(
        "--attention-backend",
        f"decode over working sets is by {', '.join(_GPU_BACKENDS)}, which read tokens one by one",
        f"pass one of them, or {DROP}",
        lambda args: args.attention_backend not in (None, *_GPU_BACKENDS),
    ),
    Refusal(
        "--cuda-graph-backend-decode --cuda-graph-config",
        "decode must be one full CUDA graph, inside which the exchange is gated, or none",
        "pass --cuda-graph-backend-decode full, and drop --cuda-graph-config",
        lambda args: (
            not {args.cuda_graph_backend_decode, _decode_graph(args)} <= {None, "full", "disabled"}
        ),
    ),
)
"""These rows are of a server with a cache rank on a GPU."""


def refuse_rust_server() -> None:
    """Refuse SGLang's server in Rust, which the environment asks for.

    Raises:
        UnsupportedError: it does.
    """
    if compat.serves_without_python():
        raise UnsupportedError(
            "SGLANG_RUST_SERVER: a server in Rust loads no plugins, which check what a request "
            "asks for. Unset it."
        )


ANY_SHAPE = ModelShape(1 << 20, 1, 1, 128, "bfloat16", 1.0)
"""The shape of a model that is not read yet; what depends on it, the table of models refuses."""

RANGES = {
    "cache_rank_timeout": (1, 86_400),  # a cache rank says four times a second that it is alive
    "cache_rank_max_restart_delay": (1, 3600),
    "cache_rank_mem_fraction": (0.01, 1),
    "max_sparse_requests": (1, None),
    "bulk_chunk_tokens": (2, None),  # every step adds one token of its own
    "dense_layers": (0, None),
    "trace_steps": (1, None),
}
"""The least and the most that flags take of which the cache rank itself is not told."""


def refuse_out_of_range(args: CacheRankFlags) -> None:
    """Refuse numbers that are too small or too large.

    Raises:
        UnsupportedError: one is; the message has the range.
    """
    for field, (least, most) in RANGES.items():
        value = getattr(args, field)
        if value is not None and not least <= value <= (math.inf if most is None else most):
            allowed = f"{least} or more" if most is None else f"a number from {least} to {most}"
            raise UnsupportedError(
                f"{flag_of(field)} {value}: this is out of range. Pass {allowed}."
            )
    try:
        args.cache_rank_config(ANY_SHAPE, max_rows=1)
    except ValueError as error:
        field, complaint = str(error).split(" ", 1)
        raise UnsupportedError(f"{flag_of(field)} {complaint}.") from None

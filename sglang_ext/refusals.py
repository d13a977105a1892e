"""What cannot be had together with a cache rank, each refused in one sentence with the remedy.

`args` is a CacheRankServerArgs throughout; its module imports this one.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.specifiers import SpecifierSet

from cache_rank.config import DTYPES, ModelShape
from sglang_ext.cpu import has_gpu
from sglang_ext.memory import bytes_beyond_allocator, dense_store_rows

BACKEND = "cache_rank"
SUPPORTED_SGLANG = SpecifierSet(">=0.5.16,<0.5.18")
MAX_HEAD_DIM = 256

ALLOW_LARGE_BUDGET_VARIABLE = "CACHE_RANK_ALLOW_LARGE_BUDGET"
"""Set to 1 to allow a working set above the sparse threshold: sparse then equals dense decode."""


class UnsupportedError(ValueError):
    """The user asked for something that cannot be had together with a cache rank."""


def refuse_unknown_sglang() -> None:
    version = importlib.metadata.version("sglang")
    if not SUPPORTED_SGLANG.contains(version, prereleases=True):
        raise UnsupportedError(
            f"SGLang {version} is outside the tested range {SUPPORTED_SGLANG}: "
            "pip install 'sglang==0.5.16'."
        )


def refuse_arguments(args: Any) -> None:
    """Refuse what the user explicitly asked for and cannot have."""
    for asked, message in _conflicts(args):
        if asked:
            raise UnsupportedError(message)
    # The config checks its own ranges; the shape is not known yet and does not matter to them.
    shape = ModelShape(1, 1, 1, 8, "bfloat16", 1.0, rotary_frequency=(1.0,))
    try:
        args.cache_rank_config(shape, max_rows=1)
    except ValueError as error:
        flag = str(error).split()[0].replace("_", "-")
        raise UnsupportedError(f"--{flag} {' '.join(str(error).split()[1:])}.") from None
    if args.is_baseline:
        return
    working_set = args.sparse_budget + args.sink_tokens + args.recent_tokens
    if args.sparse_threshold <= args.sink_tokens + args.recent_tokens:
        raise UnsupportedError(
            "--sparse-threshold must exceed --sink-tokens plus --recent-tokens "
            f"({args.sink_tokens + args.recent_tokens}): raise it."
        )
    if working_set > args.sparse_threshold and os.environ.get(ALLOW_LARGE_BUDGET_VARIABLE) != "1":
        raise UnsupportedError(
            f"--sparse-budget, --sink-tokens and --recent-tokens add up to {working_set}, more "
            f"than --sparse-threshold {args.sparse_threshold}: lower the budget or raise the "
            "threshold."
        )


def _gpu_conflicts(args: Any) -> list[tuple[bool, str]]:
    if not has_gpu() or args.device == "cpu" or args.is_baseline:
        return []
    own = range(args.base_gpu_id, args.base_gpu_id + args.tp_size * args.gpu_id_step)
    first, present = args.first_cache_rank_gpu, torch.cuda.device_count()
    return [
        (
            first in own,
            f"--cache-rank-base-gpu-id {first} is SGLang's own GPU: a cache rank needs another; "
            "drop the flag to take the next one.",
        ),
        (
            first + args.cache_rank_gpus > present,
            f"The cache rank would run on GPU {first}, and this machine has {present}: pass "
            "--cache-rank-base-gpu-id, add a GPU, or pass --cache-rank-gpus 0 for plain SGLang. "
            "With CUDA_VISIBLE_DEVICES= both ranks run on CPUs, for tests.",
        ),
        (
            args.cache_rank_transfer_backend == "peer"
            and first not in own
            and first < present
            and not torch.cuda.can_device_access_peer(own.start, first),
            f"--cache-rank-transfer-backend peer: GPU {own.start} cannot reach the memory of GPU "
            f"{first}; pass nccl, or drop the flag.",
        ),
        (
            args.attention_backend not in (None, "fa3", "triton"),
            f"--attention-backend {args.attention_backend}: decode over working sets in CUDA "
            "graphs is tested with fa3 and triton; pass one of them.",
        ),
        (
            not {args.cuda_graph_backend_decode, _graph_config(args)} <= {None, "full", "disabled"},
            "Decode must be one full CUDA graph, inside which the exchange is gated, or none: pass "
            "--cuda-graph-backend-decode full, and drop --cuda-graph-config.",
        ),
    ]


def _graph_config(args: Any) -> str | None:
    """Backend of decode that --cuda-graph-config names, which SGLang lets win over the flags."""
    config = args.cuda_graph_config
    phase = config.get("decode") if isinstance(config, dict) else getattr(config, "decode", None)
    return phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", None)


def _conflicts(args: Any) -> list[tuple[bool, str]]:
    page = args.baseline_page_size if args.is_baseline else 1
    radix = "radix cache: prompts of sparse requests leave the pool, so prefixes are not shared"
    return [
        (
            args.tp_size > 1,
            "Tensor parallelism is not supported with a cache rank yet: drop --tp-size.",
        ),
        (
            args.is_baseline and args.cache_rank_gpus != 0,
            f"--decode-mode {args.decode_mode} selects on the inference rank: add "
            "--cache-rank-gpus 0, or drop --decode-mode.",
        ),
        (
            args.is_baseline and args.inference_kv == "working-set",
            f"--decode-mode {args.decode_mode} keeps every token on the inference rank: drop "
            "--inference-kv.",
        ),
        (
            not args.is_baseline and args.cache_rank_gpus != 1,
            f"--cache-rank-gpus {args.cache_rank_gpus}: there is one cache rank for each "
            "tensor-parallel rank, so give 1, or 0 for plain SGLang.",
        ),
        (
            args.device not in (None, "cpu", "cuda"),
            f"--device {args.device}: the cache rank runs on NVIDIA GPUs and on CPUs; pass "
            "--device cuda or cpu, or --cache-rank-gpus 0 for plain SGLang.",
        ),
        (
            args.device == "cuda" and not has_gpu(),
            "--device cuda: this machine has no usable NVIDIA GPU; pass --device cpu, or drop the "
            "flag.",
        ),
        (
            args.cache_rank_transfer_backend != "auto" and (args.device == "cpu" or not has_gpu()),
            f"--cache-rank-transfer-backend {args.cache_rank_transfer_backend}: between GPUs only; "
            "drop the flag.",
        ),
        (
            args.trace_steps < 1,
            f"--trace-steps {args.trace_steps}: at least one step must be traced; pass 1 or more.",
        ),
        *_gpu_conflicts(args),
        (
            args.radix_cache_backend is not None
            or args.enable_hierarchical_cache
            or args.enable_lmcache
            or args.enable_session_radix_cache,
            f"No {radix}; drop --radix-cache-backend, --enable-hierarchical-cache, "
            "--enable-session-radix-cache and --enable-lmcache.",
        ),
        (
            args.page_size not in (None, page),
            f"--page-size {args.page_size}: tokens are selected "
            f"{'one by one' if page == 1 else 'by pages'}, so the page size must be {page}; drop "
            "the flag.",
        ),
        (
            args.enable_mixed_chunk,
            "Prefill and decode rows cannot share a batch: drop --enable-mixed-chunk.",
        ),
        (
            args.speculative_algorithm is not None,
            "Speculative decoding verifies several queries a step, and the cache rank predicts "
            "one: drop --speculative-algorithm.",
        ),
        (args.pp_size > 1, "Pipeline parallelism is not supported: drop --pp-size."),
        (
            args.dp_size > 1,
            "Data parallelism is not supported: drop --dp-size and start one server a replica.",
        ),
        (args.nnodes > 1, "Both ranks must be on one machine: drop --nnodes."),
        (
            args.disaggregation_mode != "null",
            "Prefill/decode disaggregation is not supported: drop --disaggregation-mode.",
        ),
        (
            bool(args.enable_lora or args.lora_paths),
            "LoRA is not supported: merge the adapter into the model, or drop --enable-lora "
            "and --lora-paths.",
        ),
        (
            args.kv_cache_dtype != "auto",
            f"--kv-cache-dtype {args.kv_cache_dtype}: the pool must hold the model's dtype; "
            "drop the flag.",
        ),
        (
            args.enable_two_batch_overlap or args.enable_pdmux or args.enable_streaming_session,
            "Two-batch overlap, PD multiplexing and streaming sessions are not supported: drop "
            "--enable-two-batch-overlap, --enable-pdmux and --enable-streaming-session.",
        ),
        (
            args.is_embedding or args.dllm_algorithm is not None,
            "Only autoregressive generation has decode steps: drop --is-embedding and "
            "--dllm-algorithm.",
        ),
        (
            args.decode_attention_backend not in (None, BACKEND),
            f"--decode-attention-backend {args.decode_attention_backend}: decode goes through "
            "the cache rank's backend; choose the kernels with --attention-backend.",
        ),
        (
            BACKEND in (args.attention_backend, args.prefill_attention_backend),
            "--attention-backend and --prefill-attention-backend choose kernels, and "
            f"{BACKEND} has none of its own: name another backend, or drop the flag.",
        ),
        (
            args.tokenizer_worker_num > 1,
            "Plugins are not loaded by several tokenizer workers, which check what a request asks "
            "of the cache rank: drop --tokenizer-worker-num.",
        ),
        (
            args.enable_memory_saver,
            "What a cache rank holds and writes is not released with SGLang's memory: drop "
            "--enable-memory-saver.",
        ),
        (
            args.inference_kv == "working-set" and args.max_queued_requests is not None,
            "--inference-kv working-set recomputes requests whose cache rank is lost, and "
            "--max-queued-requests would turn them away then: drop it, or use --inference-kv full.",
        ),
        (
            args.model_impl == "transformers",
            "--model-impl transformers has no attention layers that a cache rank can serve: drop "
            "the flag.",
        ),
        (
            args.strip_thinking_cache,
            "--strip-thinking-cache spares the radix cache, which is off: drop the flag.",
        ),
        (
            args.inference_kv == "working-set"
            and (args.enable_return_routed_experts or args.kv_canary != "none"),
            "--inference-kv working-set takes the pool rows of tokens away, by which "
            "--enable-return-routed-experts and --kv-canary look for them: drop them, or use "
            "--inference-kv full.",
        ),
        (
            args.inference_kv == "working-set" and args.disable_overlap_schedule,
            "--inference-kv working-set needs the overlap schedule to take back a step that "
            "the cache rank failed in: drop --disable-overlap-schedule.",
        ),
        (
            args.dense_layers < 0,
            "--dense-layers must not be negative.",
        ),
        (args.max_sparse_requests < 1, "--max-sparse-requests must be at least 1."),
        (
            args.bulk_chunk_tokens < 2,
            "--bulk-chunk-tokens must be at least 2: every step adds one token of its own.",
        ),
        (
            not 1 <= args.cache_rank_timeout < math.inf,
            "--cache-rank-timeout must be at least 1 second: a cache rank says four times a second "
            "that it is alive.",
        ),
        (
            args.cache_rank_mem_fraction is not None and not 0 < args.cache_rank_mem_fraction <= 1,
            "--cache-rank-mem-fraction must be above 0 and at most 1.",
        ),
        (
            _looks_missing(args.model_path),
            f"--model-path {args.model_path} does not exist or has no config.json: give a model "
            "folder or a Hugging Face repository id.",
        ),
        (
            not _can_bind(args.cache_rank_address),
            f"--cache-rank-address {args.cache_rank_address} is not an address of this machine: "
            "give one of its interfaces, or drop the flag for loopback.",
        ),
    ]


def refuse_model(args: Any) -> None:
    """Refuse models whose attention the working set cannot represent."""
    try:
        _refuse_model(args)
    except UnsupportedError as error:
        if not args.is_baseline:
            raise
        remedy = str(error).replace("use --cache-rank-gpus 0", "drop --decode-mode")
        raise UnsupportedError(remedy) from None


def _refuse_model(args: Any) -> None:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    model = args.get_model_config()
    name = ", ".join(model.hf_config.architectures or ["this model"])
    if not model.is_generation:
        raise UnsupportedError(
            f"{name} does not generate, so it has no decode steps: use --cache-rank-gpus 0."
        )
    if model.attention_arch == AttentionArch.MLA:
        raise UnsupportedError(
            f"{name} uses multi-head latent attention, which is not supported: "
            "use --cache-rank-gpus 0."
        )
    layer_types = getattr(model.hf_text_config, "layer_types", None) or []
    sliding = model.is_hybrid_swa or any(kind != "full_attention" for kind in layer_types)
    linear = mambaish_config(model) is not None
    if sliding or linear or (model.sliding_window_size or -1) > 0:
        raise UnsupportedError(
            f"{name} has sliding-window or linear attention layers, which are not supported: "
            "use --cache-rank-gpus 0."
        )
    if model.is_multimodal:
        raise UnsupportedError(
            f"{name} is multimodal, which is not supported: use --cache-rank-gpus 0."
        )
    if model.head_dim > MAX_HEAD_DIM or model.head_dim % 8:
        raise UnsupportedError(
            f"{name} has head dimension {model.head_dim}; multiples of 8 up to {MAX_HEAD_DIM} "
            "are supported: use --cache-rank-gpus 0."
        )
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype} is not supported: use --dtype bfloat16.")
    layers = model.num_hidden_layers
    if args.dense_layers >= layers:
        raise UnsupportedError(
            f"--dense-layers {args.dense_layers} leaves none of the {layers} layers of {name} "
            "sparse: lower it, or use --cache-rank-gpus 0."
        )
    if args.is_baseline:
        return
    token = 2 * model.get_num_kv_heads(args.tp_size) * model.head_dim * model.dtype.itemsize
    behind = bytes_beyond_allocator(args, layers, token)
    if args.device == "cpu" and behind > psutil.virtual_memory().available:
        remedies = "--sparse-budget"
        if dense_store_rows(args):
            remedies += ", --context-length or --dense-layers"
        raise UnsupportedError(
            f"--max-sparse-requests {args.max_sparse_requests} working sets of {name} take "
            f"{behind / 1e9:.0f} GB, more than this machine has free: lower it, or {remedies}."
        )


def refuse_used_port(host: str, port: int) -> None:
    """Refuse a port that another process listens on.

    Raises:
        UnsupportedError: it is taken.
    """
    for connection in psutil.net_connections(kind="tcp"):
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port:
            raise UnsupportedError(f"Port {port} of {host} is in use: choose another with --port.")


def _looks_missing(model_path: str) -> bool:
    """Whether a path is clearly local and not there; a repository id has one slash at most."""
    path = Path(model_path).expanduser()
    local = (
        path.is_absolute() or model_path.startswith(("./", "../", "~")) or model_path.count("/") > 1
    )
    return (local or path.is_dir()) and not (path / "config.json").is_file()


def _can_bind(address: str) -> bool:
    try:
        family, *_, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True

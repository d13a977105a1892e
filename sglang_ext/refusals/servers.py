"""What the arguments of a server may not ask for, whichever model it serves."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from sglang.srt.environ import envs

from cache_rank.channels.rate import RateLimit
from cache_rank.config import ModelShape
from cache_rank.residency import FORMATS
from sglang_ext import compat, cpu
from sglang_ext.disaggregation.codec import codes_of
from sglang_ext.disaggregation.wire import secret_of_environment
from sglang_ext.flags import (
    ALGORITHM,
    BACKEND,
    MOST_DRAFT_TOKENS,
    MOST_WIRE_DRAFTS,
    PREFILL_BACKEND,
    SGLANG_FIELDS,
    TRANSFERS,
    CacheRankFlags,
    field_of,
    flag_of,
)
from sglang_ext.refusals import (
    ALLOW_LARGE_BUDGET_VARIABLE,
    DROP,
    PLAIN,
    Objection,
    UnsupportedError,
    of_flags,
)

GPU_KERNELS, CPU_KERNELS = ("fa3", "flashinfer", "triton"), ("torch_native", "intel_amx")
"""SGLang's attention backends that read tokens one by one."""

SPARSE_DECODE_FLAGS = {
    "--is-embedding --encoder-only --dllm-algorithm": "only autoregression has decode steps",
    "--tokenizer-worker-num --smg-grpc-mode --grpc-mode --use-ray": (
        "requests are checked in one process that answers over HTTP"
    ),
    "--enable-mixed-chunk": "prefill and decode rows cannot share a batch",
    "--enable-two-batch-overlap --enable-pdmux --enable-streaming-session": "this is not supported",
    "--enable-lora --lora-paths": "LoRA is not supported, unless it is merged into the model",
}
"""Flags that sparse decode does not allow, and why."""

EXCHANGE_FLAGS = {
    "--tp-size --pp-size --dp-size --nnodes": "a model is served by one GPU of one machine yet",
    "--radix-cache-backend --enable-hierarchical-cache --enable-lmcache --enable-flexkv "
    "--enable-session-radix-cache --enable-unified-cache-external-linker": (
        "only SGLang's own radix cache, in the KV pool, is told what was computed densely"
    ),
    "--speculative-draft-weights": "drafts of a cache rank run with the model's own weights",
    "--startup-weight-load-mode": "the cache rank gets weights that are not loaded by then",
}
"""Flags that a cache rank in a process of its own does not allow, and why."""

_CONTEXT_PARALLEL = " ".join(
    flag
    for flag in "--dcp-size --attn-cp-size --enable-prefill-cp --enable-kv-cache-sharding".split()
    if field_of(flag) in SGLANG_FIELDS  # some came later
)

INLINE_FLAGS = {
    _CONTEXT_PARALLEL: "sketches lie by the rows of one pool, and parts of a context in several",
    "--pp-size --nnodes --enable-dp-attention": "this is not tested with selection in the process",
    "--moe-a2a-backend --moe-dense-tp-size": (
        "ranks agree on a batch beforehand, and do not on the prompts that sketches are fitted to"
    ),
    "--radix-cache-backend --enable-hierarchical-cache --enable-lmcache --enable-flexkv "
    "--enable-session-radix-cache --enable-unified-cache-external-linker": (
        "K and V that come back to the pool have no sketches"
    ),
}
"""Flags that selection in SGLang's process does not allow, and why."""

DRAFTS_FLAGS = {
    "--enable-deterministic-inference": "the rounding of a verification depends on its drafts",
    "--reuse-sparse-tokens": "all that the radix cache is offered is verified",
    "--speculative-draft-model-path --speculative-adaptive --speculative-use-rejection-sampling "
    "--speculative-attention-mode": "the model itself drafts, by selected tokens",
}
"""Flags that drafts do not allow, and why."""

TRANSFER_FLAGS = {
    "--tp-size --pp-size --dp-size --nnodes": "K and V travel between one GPU and another",
    "--disaggregation-decode-enable-radix-cache --disaggregation-decode-enable-offload-kvcache "
    "--enable-hierarchical-cache --enable-hisparse --enable-pd-role-switch": (
        "K and V come to the rows of SGLang's usual KV pool, for one request"
    ),
    "--speculative-algorithm": "K and V of drafts do not travel",
    "--disaggregation-enable-kv-checksum": "codes are decoded to other numbers",
}
"""Flags that our transfers do not allow, and why."""

GPU_VARIABLES = {
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "the KV pool gets its size after what is sized by it",
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": (
        "it keeps one graph for a number of requests, and steps that select have another"
    ),
}
"""Variables of SGLang that sparse decode on a GPU does not allow, and why."""


_WRITES_OVER_PLANS = (
    "the host queues several steps, and each writes over the plan of the one before"
)

TREE_VARIABLES = ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "SGLANG_ENABLE_UNIFIED_RADIX_TREE")
"""Variables of SGLang 0.5.16 that choose a radix cache of which we do not know what it is given."""


def sparse_decode(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to what sparse decode does not allow, wherever tokens are selected."""
    if compat.serves_without_python():
        raise UnsupportedError(
            "SGLANG_RUST_SERVER: that server loads no plugins, which check requests. Unset it."
        )
    for name, why in GPU_VARIABLES.items():
        variable = getattr(envs, name, None)  # some came later
        if args.on_gpu and variable is not None and variable.get():
            raise UnsupportedError(f"{name}: {why}. Unset it.")
    for name in TREE_VARIABLES:
        if (variable := getattr(envs, name, None)) is not None and variable.get():
            why = "tokens that sparse steps compute would be reused as dense ones"
            raise UnsupportedError(f"{name}: {why}. Unset it.")
    yield from of_flags(args, SPARSE_DECODE_FLAGS)
    if args.device not in (None, "cpu", "cuda") or (args.device == "cuda" and not cpu.has_gpu()):
        why = "sparse decode runs on CPUs, and on NVIDIA GPUs that are usable"
        yield Objection("--device", why, f"pass --device cpu, or {DROP}")
    if args.model_impl == "transformers":
        yield Objection("--model-impl", "this has no attention layers that can be sparse")
    if "beam_width" in str(args.preferred_sampling_params):
        yield Objection("--preferred-sampling-params", "sparse decode cannot follow beams")
    if args.decode_attention_backend not in (None, BACKEND):
        remedy = f"{DROP}, and choose the kernels with --attention-backend"
        yield Objection("--decode-attention-backend", "sparse decode has its own", remedy)
    if _names_other_kernels(args):
        why = f"kernels are those of {', '.join(GPU_KERNELS if args.on_gpu else CPU_KERNELS)}"
        remedy = f"pass one of them, or {DROP}"
        yield Objection("--attention-backend --prefill-attention-backend", why, remedy)


def exchange(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to what a cache rank that has a process of its own does not allow."""
    yield from of_flags(args, EXCHANGE_FLAGS)
    if args.disaggregation_mode != "null":
        yield from _half(args)
    if args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        yield Objection("--kv-cache-dtype", "the KV pool must have the model's dtype")
    if args.page_size not in (None, 1):
        yield Objection("--page-size", "tokens are selected one by one, so a page holds one token")
    if args.cache_rank_gpus != 1:
        why = "there is one cache rank for each tensor-parallel rank"
        yield Objection("--cache-rank-gpus", why, f"pass 1, or {PLAIN}")
    if args.calibration == "auto":
        why = "a cache rank is not calibrated by its server"
        remedy = f"make a folder (python -m sglang_ext.calibrate), or {DROP}"
        yield Objection("--calibration", why, remedy)
    if not _can_bind(args.cache_rank_address):
        remedy = f"pass the address of one of its interfaces, or {DROP} for loopback"
        yield Objection("--cache-rank-address", "this machine has no such address", remedy)
    if args.trace is not None and not _can_write(args.trace):
        remedy = f"pass one in a folder that exists, or {DROP}"
        yield Objection("--trace", "this file cannot be written", remedy)
    yield from _threshold(args)
    frees_rows = args.inference_kv == "working-set"
    if args.has_drafts:
        yield from _drafts(args)
    if args.has_drafts and frees_rows:
        yield from _verified_elsewhere(args)
    if not args.has_drafts and (
        args.disable_overlap_schedule or args.max_queued_requests is not None
    ):
        yield Objection(
            "--disable-overlap-schedule --max-queued-requests",
            "a step whose cache rank is lost is taken back, which only the overlap schedule can, "
            "and its requests are queued again, which a full queue would turn away",
            "drop --disable-overlap-schedule and --max-queued-requests",
        )
    if frees_rows and (args.enable_return_routed_experts or args.kv_canary != "none"):
        yield Objection(
            "--inference-kv --enable-return-routed-experts --kv-canary",
            "tokens lose the rows of the KV pool by which routed experts and the canary find them",
            "drop --enable-return-routed-experts and --kv-canary, or pass --inference-kv full",
        )
    if frees_rows and args.strip_thinking_cache:
        yield Objection(
            "--inference-kv --strip-thinking-cache",
            "SGLang frees all rows behind the prompt of a request, and many are freed by then",
            "drop --strip-thinking-cache, or pass --inference-kv full",
        )
    if args.on_gpu:
        yield from _exchange_between_gpus(args)


def inline(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to what selection in SGLang's own process does not allow."""
    yield from of_flags(args, INLINE_FLAGS)
    if args.disaggregation_mode != "null" and not args.transfers_codes:
        why = "K and V that come by this have no sketches"
        remedy = f"pass --disaggregation-transfer-backend {TRANSFERS}, or {PLAIN}"
        yield Objection("--disaggregation-transfer-backend", why, remedy)
    if args.inference_kv == "working-set":
        why = "rows of the KV pool are freed only where a cache rank holds their K and V"
        yield Objection("--inference-kv", why, "pass --cache-rank-gpus 1")
    if args.kv_cache_dtype not in ("auto", "bf16", "bfloat16", "fp8_e4m3"):
        why = "K and V are attended to in the model's dtype or in fp8_e4m3"
        yield Objection("--kv-cache-dtype", why)
    if args.kv_cache_dtype == "fp8_e4m3" and args.on_gpu and _compute_capability() < (8, 9):
        yield Objection("--kv-cache-dtype", "this GPU does not read FP8 in our kernels")
    if args.prefill_attention_backend not in (None, PREFILL_BACKEND):
        why = "prefill writes sketches of keys, beside the kernels of --attention-backend"
        remedy = f"{DROP}, and choose the kernels with --attention-backend"
        yield Objection("--prefill-attention-backend", why, remedy)
    if args.has_drafts:
        yield from _drafts(args)
    elif args.rounds_draft_weights:
        why = "nothing drafts"
        remedy = f"pass --speculative-algorithm {ALGORITHM}, or {DROP}"
        yield Objection("--speculative-draft-weights", why, remedy)
    if args.recent_tokens < 1:
        yield Objection("--recent-tokens", "the current token is one of them", "pass 1 or more")
    yield from _threshold(args)


def transfers(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to what a server of one half of a disaggregation does not allow."""
    yield from of_flags(args, TRANSFER_FLAGS)
    if args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        yield Objection("--kv-cache-dtype", "codes are made of the model's dtype")
    if args.page_size not in (None, 1):
        yield Objection("--page-size", "rows of tokens travel, so a page holds one token")
    try:
        codes_of(args.wire_codes, ANY_SHAPE)
    except ValueError as error:
        yield Objection("--wire-codes", str(error), "pass bf16, quantspec, hack or lynx")
    if args.wire_drafts:
        yield from _wire_drafts(args)
    if not args.only_decodes and args.cache_rank_address in ("0.0.0.0", "::"):
        why = "a server that decodes is told to connect to it"
        yield Objection("--cache-rank-address", why, "pass the address of one interface")
    elif not _can_bind(args.cache_rank_address):
        remedy = f"pass the address of one of its interfaces, or {DROP} for loopback"
        yield Objection("--cache-rank-address", "this machine has no such address", remedy)
    try:
        secret_of_environment()
        RateLimit.of_environment()
    except ValueError as error:
        raise UnsupportedError(f"{error}. Both servers are given the same.") from error


def _wire_drafts(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to drafts before all K and V are there."""
    flag = "--wire-drafts"
    if not 0 <= args.wire_drafts <= MOST_WIRE_DRAFTS:
        why = f"a request drafts at most {MOST_WIRE_DRAFTS} tokens"
        yield Objection(flag, why, f"pass 0 to {MOST_WIRE_DRAFTS}")
    if not args.only_decodes:
        yield Objection(flag, "only a server that decodes drafts")
    if args.has_cache_rank:
        yield Objection(flag, "a cache rank takes complete pages")
    if args.enable_deterministic_inference:
        yield Objection(flag, "a verification rounds otherwise than decode steps")
    if args.attention_backend == "flashinfer":
        yield Objection(flag, _WRITES_OVER_PLANS, "pass --attention-backend triton, or fa3")


def _half(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to halves of a disaggregation that cannot have a cache rank."""
    if not args.only_decodes:
        why = "a server that only prefills selects nothing"
        yield Objection("--disaggregation-mode", why, "drop --cache-rank-gpus")
    if not args.transfers_codes:
        why = "beside a cache rank, K and V come only by our transfers"
        remedy = f"pass --disaggregation-transfer-backend {TRANSFERS}, or {PLAIN}"
        yield Objection("--disaggregation-transfer-backend", why, remedy)
    yield from of_flags(args, {"--reuse-sparse-tokens": "what only decodes has no radix cache"})


def _drafts(args: CacheRankFlags) -> Iterator[Objection]:
    if str(args.speculative_algorithm).upper() != ALGORITHM:
        why = "it verifies several queries a step, and one is selected for"
        remedy = f"pass --speculative-algorithm {ALGORITHM}, {DROP}, or {PLAIN}"
        yield Objection("--speculative-algorithm", why, remedy)
    yield from of_flags(args, DRAFTS_FLAGS)
    if args.attention_backend == "flashinfer":
        remedy = "pass --attention-backend triton, or fa3"
        yield Objection("--attention-backend", _WRITES_OVER_PLANS, remedy)
    tokens = args.speculative_num_draft_tokens
    if tokens is not None and not 2 <= tokens <= MOST_DRAFT_TOKENS:
        why = f"a round has 1 to {MOST_DRAFT_TOKENS - 1} drafts beside the current token"
        remedy = f"pass 2 to {MOST_DRAFT_TOKENS}"
        yield Objection("--speculative-num-draft-tokens", why, remedy)
    drafts = None if tokens is None else tokens - 1
    if args.speculative_num_steps not in (None, drafts):
        why = "drafts are one less than --speculative-num-draft-tokens"
        yield Objection("--speculative-num-steps", why)
    if args.speculative_eagle_topk not in (None, 1):
        yield Objection("--speculative-eagle-topk", "drafts are a chain")
    if args.rounds_draft_weights:
        yield from _rounded_weights(args)


def _verified_elsewhere(args: CacheRankFlags) -> Iterator[Objection]:
    able = [name for name, held in FORMATS.items() if held.verifies]
    if args.kv_residency not in able:
        why = f"a cache rank verifies drafts over tokens that it holds as {' or '.join(able)}"
        remedy = "pass one of them, pass --inference-kv full, or drop --speculative-algorithm"
        yield Objection("--inference-kv --kv-residency", why, remedy)
    if args.max_queued_requests is not None:
        why = (
            "requests whose cache rank is lost are queued again, which a full queue would turn away"
        )
        remedy = "drop --max-queued-requests, or pass --inference-kv full"
        yield Objection("--inference-kv --max-queued-requests", why, remedy)


def _rounded_weights(args: CacheRankFlags) -> Iterator[Objection]:
    late = {"--startup-weight-load-mode": "weights that come late cannot be rounded for drafts"}
    yield from of_flags(args, late)
    if args.on_gpu and _compute_capability() < (8, 0):
        yield Objection("--speculative-draft-weights", "this GPU does not run SGLang's kernel")


def _compute_capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _threshold(args: CacheRankFlags) -> Iterator[Objection]:
    least = _least_threshold(args)
    if args.sparse_from < least:
        yield Objection(
            "--sparse-threshold --sparse-budget --sink-tokens --recent-tokens",
            f"a request has to have {least} tokens before it turns sparse: budget, sinks and "
            "recent ones",
            "raise --sparse-threshold, or lower one of the others",
        )


def _exchange_between_gpus(args: CacheRankFlags) -> Iterator[Objection]:
    own, other, there = args.base_gpu_id, args.first_cache_rank_gpu, torch.cuda.device_count()
    if other >= there or (own == other and not args.shares_gpu):
        yield Objection(
            "--cache-rank-gpus --cache-rank-base-gpu-id --base-gpu-id --gpu-id-step",
            f"the cache rank would run on GPU {other} of {there}, counted from 0, and SGLang does "
            f"on GPU {own}",
            f"pass another --cache-rank-base-gpu-id, add a GPU, or {PLAIN}; with "
            "CUDA_VISIBLE_DEVICES= both ranks run on CPUs, for tests",
        )
    if (
        args.cache_rank_transfer_backend == "peer"
        and own != other
        and not torch.cuda.can_device_access_peer(own, other)
    ):
        why = f"GPU {own} cannot reach the memory of GPU {other}"
        yield Objection("--cache-rank-transfer-backend", why, "set it to nccl, or drop it")
    if not {args.cuda_graph_backend_decode, _decode_graph(args)} <= {None, "full", "disabled"}:
        yield Objection(
            "--cuda-graph-backend-decode --cuda-graph-config",
            "decode must be one full CUDA graph, inside which the exchange is gated, or none",
            "pass --cuda-graph-backend-decode full, and drop --cuda-graph-config",
        )


def _names_other_kernels(args: CacheRankFlags) -> bool:
    """Whether an attention backend is named that sparse decode cannot take its kernels from."""
    decode, prefill = args.attention_backend, args.prefill_attention_backend
    if args.on_gpu:
        return prefill == BACKEND or decode not in (None, *GPU_KERNELS)
    return not {decode, prefill} <= {None, *CPU_KERNELS}


def _can_bind(address: str) -> bool:
    """Whether a socket of this machine can be bound to an address."""
    try:
        family, *_, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def _can_write(file: str) -> bool:
    """Whether a file can be made or replaced."""
    path = Path(file).expanduser()
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def _least_threshold(args: CacheRankFlags) -> int:
    """The length from which a request has the tokens that a sparse step attends to."""
    if os.environ.get(ALLOW_LARGE_BUDGET_VARIABLE) == "1":
        return args.sink_tokens + args.recent_tokens + 1
    return args.least_sparse_length


def _decode_graph(args: CacheRankFlags) -> str | None:
    """The backend of decode that --cuda-graph-config names; SGLang lets it win over the flags."""
    config = args.cuda_graph_config
    phase = config.get("decode") if isinstance(config, dict) else getattr(config, "decode", None)
    return phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", None)


ANY_SHAPE = ModelShape(1 << 20, 1, 1, 128, "bfloat16", 1.0)
"""The shape of a model that is not read yet; what depends on it, `models` refuses."""

RANGES = {
    "cache_rank_timeout": (1, 86_400),  # a cache rank says four times a second that it is alive
    "cache_rank_max_restart_delay": (1, 3600),
    "cache_rank_mem_fraction": (0.001, 1),
    "cache_rank_host_gb": (0, round(psutil.virtual_memory().total / 1e9)),
    "max_sparse_requests": (1, math.inf),
    "bulk_chunk_tokens": (2, math.inf),  # every step adds one token of its own
    "dense_layers": (0, math.inf),
    "trace_steps": (1, math.inf),
}
"""The least and the most that flags take of which the cache rank itself is not told."""


def refuse_out_of_range(args: CacheRankFlags) -> None:
    """Refuse numbers that are too small or too large.

    Raises:
        UnsupportedError: one is; the message has the range.
    """
    for field, (least, most) in RANGES.items():
        value = getattr(args, field)
        if value is not None and not least <= value <= most:
            allowed = f"{least} or more" if most == math.inf else f"a number from {least} to {most}"
            raise UnsupportedError(f"{flag_of(field)} {value}: out of range. Pass {allowed}.")
    try:
        args.cache_rank_config(ANY_SHAPE, max_rows=1)
    except ValueError as error:
        field, complaint = str(error).split(" ", 1)
        raise UnsupportedError(f"{flag_of(field)} {complaint}.") from None

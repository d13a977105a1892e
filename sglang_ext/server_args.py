"""SGLang's server arguments and ours: flags, what the cache rank needs set, and what it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.specifiers import SpecifierSet
from sglang.srt.arg_groups.arg_utils import A, Arg, add_cli_args_from_dataclass
from sglang.srt.server_args import ServerArgs

from cache_rank.config import DTYPES, CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS
from sglang_ext.cpu import has_gpu, say_once

logger = logging.getLogger(__name__)

BUNDLED_MODEL = Path(__file__).parent / "bundled_model"
BACKEND = "cache_rank"
SUPPORTED_SGLANG = SpecifierSet(">=0.5.16,<0.5.18")
MAX_HEAD_DIM = 256

ALLOW_LARGE_BUDGET_VARIABLE = "CACHE_RANK_ALLOW_LARGE_BUDGET"
"""Set to 1 to allow a working set above the sparse threshold: sparse then equals dense decode."""

CHECKSUM_VARIABLE = "CACHE_RANK_CHECKSUM"
"""Set to 1 to compare checksums of every slot on both ranks at every step."""

_CPU_POOL_TOKENS = 1 << 17
_CPU_RUNNING_REQUESTS = 64


class UnsupportedError(ValueError):
    """The user asked for something that cannot be had together with a cache rank."""


@dataclasses.dataclass
class CacheRankServerArgs(ServerArgs):
    """SGLang's ServerArgs with the flags of the cache rank.

    Raises:
        UnsupportedError: an argument that cannot be combined with a cache rank, with the remedy.
    """

    cache_rank_gpus: A[
        int,
        Arg(
            help="Number of cache ranks, one for each tensor-parallel rank; 0 is plain SGLang. "
            "Without a GPU every rank is a CPU process."
        ),
    ] = 1
    sparse_threshold: A[int, Arg(help="Length in tokens at which a request turns sparse.")] = 4096
    sparse_budget: A[
        int, Arg(help="Tokens that each KV head attends to beside sinks and recent tokens.")
    ] = 2048
    sink_tokens: A[int, Arg(help="First tokens that are always attended to.")] = 4
    recent_tokens: A[int, Arg(help="Newest tokens that are always attended to.")] = 64
    layers_per_group: A[
        int, Arg(help="Consecutive layers whose queries and answers share one message.")
    ] = 6
    query_window: A[int, Arg(help="Earlier queries that the next query is predicted from.")] = 16
    query_predictor: A[
        Literal["last", "ema", "spade", "ridge"],
        Arg(help="How the next query is predicted."),
    ] = "last"
    query_frame: A[
        Literal["post", "pre"],
        Arg(help="Predict among queries after or before rotary position embedding."),
    ] = "pre"
    selection_margin: A[
        int,
        Arg(help="A selected token stays while it ranks within --sparse-budget plus this."),
    ] = 256
    delta_capacity: A[
        int, Arg(help="Most tokens that may enter the working set of a KV head in one step.")
    ] = 128
    inference_kv: A[
        Literal["full", "working-set"],
        Arg(
            help="What the inference rank keeps of a sparse request: every token, or only the "
            "working set, which frees its pool for more requests."
        ),
    ] = "full"
    dense_layers: A[
        int | None,
        Arg(
            help="First layers that attend to every token. Default: 1, and 0 with "
            "--inference-kv working-set, which cannot have any."
        ),
    ] = None
    kv_residency: A[
        str,
        Arg(help="How the cache rank holds K and V; bf16 is as they came.", choices=list(FORMATS)),
    ] = "bf16"
    max_sparse_requests: A[
        int,
        Arg(help="Requests that can be sparse at once; each reserves a working set of pool rows."),
    ] = 32
    bulk_chunk_tokens: A[
        int,
        Arg(help="Tokens of a prompt that are shipped to the cache rank in one decode step."),
    ] = 512
    recall_interval: A[
        int,
        Arg(help="Steps between measurements of recall against exact selection; 0 is never."),
    ] = 64
    cache_rank_timeout: A[
        float,
        Arg(help="Seconds without an answer after which a cache rank counts as down."),
    ] = 5.0
    cache_rank_address: A[
        str,
        Arg(
            help="Host name or IP of the interface that the channels between the ranks bind to. "
            "They are authenticated, not encrypted: leave them on loopback where you can."
        ),
    ] = "127.0.0.1"

    def __post_init__(self) -> None:
        _refuse_unknown_sglang()
        if self.cache_rank_gpus == 0:
            super().__post_init__()
            return
        self._refuse_arguments()
        self._set_required()
        super().__post_init__()
        self._refuse_model()

    @property
    def has_cache_rank(self) -> bool:
        """Whether this server has a cache rank."""
        return self.cache_rank_gpus > 0

    def cache_rank_config(self, model: ModelShape, max_rows: int) -> CacheRankConfig:
        """What the cache rank is opened with.

        Raises:
            ValueError: a flag is out of range.
        """
        same = {field: getattr(self, field) for field in _SHARED_FIELDS}
        return CacheRankConfig(
            model=model,
            max_rows=max_rows,
            checksum=os.environ.get(CHECKSUM_VARIABLE) == "1",
            **same,
        )

    def _refuse_arguments(self) -> None:
        """Refuse what the user explicitly asked for and cannot have."""
        for asked, message in self._conflicts():
            if asked:
                raise UnsupportedError(message)
        # The config checks its own ranges; the shape is not known yet and does not matter to them.
        shape = ModelShape(1, 1, 1, 8, "bfloat16", 1.0, rotary_frequency=(1.0,))
        try:
            self.cache_rank_config(shape, max_rows=1)
        except ValueError as error:
            flag = str(error).split()[0].replace("_", "-")
            raise UnsupportedError(f"--{flag} {' '.join(str(error).split()[1:])}.") from None
        working_set = self.sparse_budget + self.sink_tokens + self.recent_tokens
        if self.sparse_threshold <= self.sink_tokens + self.recent_tokens:
            raise UnsupportedError(
                "--sparse-threshold must exceed --sink-tokens plus --recent-tokens "
                f"({self.sink_tokens + self.recent_tokens}): raise it."
            )
        if (
            working_set > self.sparse_threshold
            and os.environ.get(ALLOW_LARGE_BUDGET_VARIABLE) != "1"
        ):
            raise UnsupportedError(
                f"--sparse-budget, --sink-tokens and --recent-tokens add up to {working_set}, more "
                f"than --sparse-threshold {self.sparse_threshold}: lower the budget or raise the "
                "threshold."
            )

    def _conflicts(self) -> list[tuple[bool, str]]:
        radix = "radix cache: prompts of sparse requests leave the pool, so prefixes are not shared"
        return [
            (
                self.cache_rank_gpus != self.tp_size,
                f"--cache-rank-gpus {self.cache_rank_gpus} with --tp-size {self.tp_size}: there is "
                "one cache rank for each tensor-parallel rank, so give both the same number.",
            ),
            (
                self.tp_size > 1,
                "Tensor parallelism is not supported with a cache rank yet: drop --tp-size.",
            ),
            (
                (self.device or ("cuda" if has_gpu() else "cpu")) != "cpu",
                "The cache rank runs on CPU processes only in this version: pass --device cpu, or "
                "--cache-rank-gpus 0 for plain SGLang.",
            ),
            (
                self.radix_cache_backend is not None
                or self.enable_hierarchical_cache
                or self.enable_lmcache
                or self.enable_session_radix_cache,
                f"No {radix}; drop --radix-cache-backend, --enable-hierarchical-cache, "
                "--enable-session-radix-cache and --enable-lmcache.",
            ),
            (
                self.page_size not in (None, 1),
                f"--page-size {self.page_size}: tokens are selected one by one, so the page size "
                "must be 1; drop the flag.",
            ),
            (
                self.enable_mixed_chunk,
                "Prefill and decode rows cannot share a batch: drop --enable-mixed-chunk.",
            ),
            (
                self.speculative_algorithm is not None,
                "Speculative decoding verifies several queries a step, and the cache rank predicts "
                "one: drop --speculative-algorithm.",
            ),
            (self.pp_size > 1, "Pipeline parallelism is not supported: drop --pp-size."),
            (
                self.dp_size > 1,
                "Data parallelism is not supported: drop --dp-size and start one server a replica.",
            ),
            (self.nnodes > 1, "Both ranks must be on one machine: drop --nnodes."),
            (
                self.disaggregation_mode != "null",
                "Prefill/decode disaggregation is not supported: drop --disaggregation-mode.",
            ),
            (
                bool(self.enable_lora or self.lora_paths),
                "LoRA is not supported: merge the adapter into the model, or drop --enable-lora "
                "and --lora-paths.",
            ),
            (
                self.kv_cache_dtype != "auto",
                f"--kv-cache-dtype {self.kv_cache_dtype}: the pool must hold the model's dtype; "
                "drop the flag.",
            ),
            (
                self.enable_two_batch_overlap or self.enable_pdmux or self.enable_streaming_session,
                "Two-batch overlap, PD multiplexing and streaming sessions are not supported: drop "
                "--enable-two-batch-overlap, --enable-pdmux and --enable-streaming-session.",
            ),
            (
                self.is_embedding or self.dllm_algorithm is not None,
                "Only autoregressive generation has decode steps: drop --is-embedding and "
                "--dllm-algorithm.",
            ),
            (
                self.decode_attention_backend not in (None, BACKEND),
                f"--decode-attention-backend {self.decode_attention_backend}: decode goes through "
                "the cache rank's backend; choose the kernels with --attention-backend.",
            ),
            (
                BACKEND in (self.attention_backend, self.prefill_attention_backend),
                "--attention-backend and --prefill-attention-backend choose kernels, and "
                f"{BACKEND} has none of its own: name another backend, or drop the flag.",
            ),
            (
                self.inference_kv == "working-set" and bool(self.dense_layers),
                f"--dense-layers {self.dense_layers} needs every token on the inference rank: use "
                "--inference-kv full, or --dense-layers 0.",
            ),
            (
                self.inference_kv == "working-set" and self.disable_overlap_schedule,
                "--inference-kv working-set needs the overlap schedule to take back a step that "
                "the cache rank failed in: drop --disable-overlap-schedule.",
            ),
            (
                self.dense_layers is not None and self.dense_layers < 0,
                "--dense-layers must not be negative.",
            ),
            (self.max_sparse_requests < 1, "--max-sparse-requests must be at least 1."),
            (
                self.bulk_chunk_tokens < 2,
                "--bulk-chunk-tokens must be at least 2: every step adds one token of its own.",
            ),
            (
                not 0.1 <= self.cache_rank_timeout < math.inf,
                "--cache-rank-timeout must be at least 0.1 seconds.",
            ),
            (
                _looks_missing(self.model_path),
                f"--model-path {self.model_path} does not exist: give a model folder or a Hugging "
                "Face repository id.",
            ),
        ]

    def _set_required(self) -> None:
        """Set what the cache rank needs, and say so."""
        if self.dense_layers is None:
            self.dense_layers = 0 if self.inference_kv == "working-set" else 1
        self._set("disable_radix_cache", True, "sparse requests leave the pool")
        self._set("page_size", 1, "tokens are selected one by one")
        if not has_gpu():
            say_once()
            self._set("device", "cpu", "no GPU found")
        if self.device == "cpu":
            if self.attention_backend is None:
                self._set("attention_backend", "torch_native", "the CPU engine's backend")
            if self.sampling_backend is None:
                self._set("sampling_backend", "pytorch", "the CPU engine's sampler")
            if self.grammar_backend is None:
                self._set("grammar_backend", "none", "grammar kernels need a GPU")
            if self.max_total_tokens is None:
                self._set("max_total_tokens", _CPU_POOL_TOKENS, "host memory is shared")
            if self.max_running_requests is None:
                self._set("max_running_requests", _CPU_RUNNING_REQUESTS, "host memory is shared")
            if self.dtype == "auto" and _config_dtype(self.model_path) == "float32":
                self._set("dtype", "float32", "the checkpoint's own")
        self._set("decode_attention_backend", BACKEND, "sparse decode over the working set")

    def _set(self, field: str, value: Any, reason: str) -> None:
        if getattr(self, field) != value:
            setattr(self, field, value)
            logger.info("cache rank: --%s %s (%s)", field.replace("_", "-"), value, reason)

    def _refuse_model(self) -> None:
        """Refuse models whose attention the working set cannot represent."""
        from sglang.srt.configs.hybrid_arch import mambaish_config
        from sglang.srt.configs.model_config import AttentionArch

        model = self.get_model_config()
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
        if (self.dense_layers or 0) >= layers:
            raise UnsupportedError(
                f"--dense-layers {self.dense_layers} leaves none of the {layers} layers of {name} "
                "sparse: lower it, or use --cache-rank-gpus 0."
            )


_SHARED_FIELDS = (
    "layers_per_group",
    "sparse_budget",
    "sink_tokens",
    "recent_tokens",
    "query_window",
    "query_predictor",
    "query_frame",
    "selection_margin",
    "delta_capacity",
    "kv_residency",
    "recall_interval",
)

CACHE_RANK_FIELDS = [
    field.name
    for field in dataclasses.fields(CacheRankServerArgs)
    if field.name not in {inherited.name for inherited in dataclasses.fields(ServerArgs)}
]


def parse_server_args(argv: Sequence[str]) -> CacheRankServerArgs:
    """Parse a command line as SGLang's launcher does, with our flags under their own heading.

    Without a model path, the bundled model is served.

    Raises:
        UnsupportedError: see CacheRankServerArgs.
    """
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser(prog="python -m sglang_ext.launch")
    add_cli_args_from_dataclass(
        parser.add_argument_group("cache rank"), CacheRankServerArgs, fields=CACHE_RANK_FIELDS
    )
    ServerArgs.add_cli_args(parser)
    arguments = list(argv)
    if "--config" in arguments:
        arguments = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    # The last occurrence of a flag wins, however the user spells it.
    parsed = parser.parse_args(["--model-path", str(BUNDLED_MODEL), *arguments])
    logging.basicConfig(
        level=parsed.log_level.upper(),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    args: CacheRankServerArgs = CacheRankServerArgs.from_cli_args(parsed)
    return args


def _refuse_unknown_sglang() -> None:
    version = importlib.metadata.version("sglang")
    if not SUPPORTED_SGLANG.contains(version, prereleases=True):
        raise UnsupportedError(
            f"SGLang {version} is outside the tested range {SUPPORTED_SGLANG}: "
            "pip install 'sglang==0.5.16'."
        )


def _looks_missing(model_path: str) -> bool:
    """Whether a path is clearly local and not there; a repository id has one slash at most."""
    path = Path(model_path).expanduser()
    local = (
        path.is_absolute() or model_path.startswith(("./", "../", "~")) or model_path.count("/") > 1
    )
    return local and not path.exists()


def _config_dtype(model_path: str) -> str | None:
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return None
    values = json.loads(config.read_text())
    return values.get("dtype") or values.get("torch_dtype")


def refuse_used_port(host: str, port: int) -> None:
    """Refuse a port that another process listens on.

    Raises:
        UnsupportedError: it is taken.
    """
    for connection in psutil.net_connections(kind="tcp"):
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port:
            raise UnsupportedError(f"Port {port} of {host} is in use: choose another with --port.")

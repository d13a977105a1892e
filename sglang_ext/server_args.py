"""SGLang's server arguments and ours, and what the cache rank needs set."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from sglang.srt.arg_groups.arg_utils import A, Arg, add_cli_args_from_dataclass
from sglang.srt.server_args import ServerArgs

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS, require_format
from cache_rank.residency.options import parse_options
from sglang_ext.baselines.selection import QUEST_PAGE
from sglang_ext.cpu import has_gpu, say_once
from sglang_ext.refusals import BACKEND, refuse_arguments, refuse_model, refuse_unknown_sglang

logger = logging.getLogger(__name__)

BUNDLED_MODEL = Path(__file__).parent / "bundled_model"
CHECKSUM_VARIABLE = "CACHE_RANK_CHECKSUM"
"""Set to 1 to compare checksums of every slot on both ranks at every step."""

_CPU_POOL_TOKENS = 1 << 17
_CPU_RUNNING_REQUESTS = 64


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
    decode_mode: A[
        Literal["cache-rank", "quest", "window", "tova", "oracle"],
        Arg(
            help="How sparse layers decode. All but cache-rank are synchronous baselines on the "
            "inference rank and need --cache-rank-gpus 0: they select with the current query and "
            "share --sparse-budget, --sink-tokens, --recent-tokens and --dense-layers. They have "
            "no threshold: a request attends to everything while it has no more tokens than these "
            "add up to."
        ),
    ] = "cache-rank"
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
            help="What the inference rank keeps of a sparse request in sparse layers: every "
            "token, or only the working set, which frees its pool for more requests."
        ),
    ] = "full"
    dense_layers: A[int, Arg(help="First layers that attend to every token.")] = 1
    kv_residency: A[
        str,
        Arg(help="How the cache rank holds K and V; bf16 is as they came.", choices=list(FORMATS)),
    ] = "bf16"
    kv_residency_options: A[
        str,
        Arg(help="Options of --kv-residency, as name=value separated by commas."),
    ] = ""
    score_keys: A[
        Literal["resident", "fp8"],
        Arg(
            help="Score tokens by their keys as they are held, or by a copy in 8 bits, which "
            "halves what the cache rank reads in a step and takes a quarter more of its memory."
        ),
    ] = "resident"
    wire_dtype: A[
        Literal["bf16", "fp8"],
        Arg(
            help="How K and V travel back to the inference rank: bf16 is in the KV pool's own "
            "dtype, even if that is another; fp8 is rounded to e4m3, which halves an answer where "
            "steps wait for the link."
        ),
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
        Arg(
            help="Of so many steps, recall against exact selection is measured in one; 0 is never. "
            "Such a step scores one layer group of one request 3 + log2(query window) times more "
            "than others: by the true query, by its prediction and by earlier queries."
        ),
    ] = 64
    cache_rank_transfer_backend: A[
        Literal["auto", "peer", "nccl"],
        Arg(
            help="What carries the steps between GPUs: copies into the peer's memory, which take "
            "no multiprocessor, or NCCL. auto is peer where a GPU reaches the other's memory."
        ),
    ] = "auto"
    cache_rank_timeout: A[
        float,
        Arg(help="Seconds without an answer after which a cache rank counts as down."),
    ] = 5.0
    cache_rank_base_gpu_id: A[
        int | None,
        Arg(help="GPU of the first cache rank. Default: the one after SGLang's own GPUs."),
    ] = None
    cache_rank_mem_fraction: A[
        float | None,
        Arg(
            help="Share of the free memory of its GPU that a cache rank takes for tokens; the rest "
            "is for scores and messages. Default: 0.9; without a GPU, half of the host's, 8 GiB at "
            "most."
        ),
    ] = None
    trace: A[
        str | None,
        Arg(
            help="Write a timeline of a few decode steps of both ranks to this file; Perfetto and "
            "Chrome read it."
        ),
    ] = None
    trace_steps: A[int, Arg(help="Decode steps that --trace covers.")] = 8
    cache_rank_address: A[
        str,
        Arg(
            help="Host name or IP of the interface that the channels between the ranks bind to. "
            "They are authenticated, not encrypted: leave them on loopback where you can."
        ),
    ] = "127.0.0.1"

    def __post_init__(self) -> None:
        refuse_unknown_sglang()
        if self.cache_rank_gpus == 0 and not self.is_baseline:
            self._say_ignored("without a cache rank", ())
            super().__post_init__()
            return
        refuse_arguments(self)
        if self.is_baseline:
            self._say_ignored(f"with --decode-mode {self.decode_mode}", _BASELINE_FIELDS)
        self._set_required()
        super().__post_init__()
        refuse_model(self)

    @property
    def has_cache_rank(self) -> bool:
        """Whether this server has a cache rank."""
        return self.cache_rank_gpus > 0

    @property
    def is_baseline(self) -> bool:
        """Whether decode is one of the synchronous baselines."""
        return self.decode_mode != "cache-rank"

    @property
    def baseline_page_size(self) -> int:
        """Page size of a baseline: Quest's own, which SGLang can have only on a GPU."""
        on_gpu = has_gpu() and self.device != "cpu"
        return QUEST_PAGE if self.decode_mode == "quest" and on_gpu else 1

    @property
    def first_cache_rank_gpu(self) -> int:
        """The GPU of tensor-parallel rank 0's cache rank."""
        if self.cache_rank_base_gpu_id is not None:
            return self.cache_rank_base_gpu_id
        return self.base_gpu_id + self.tp_size * self.gpu_id_step

    def cache_rank_config(self, model: ModelShape, max_rows: int) -> CacheRankConfig:
        """What the cache rank is opened with.

        Raises:
            ValueError: a flag is out of range.
        """
        same = {field: getattr(self, field) for field in SHARED_FIELDS}
        config = CacheRankConfig(
            model=model,
            max_rows=max_rows,
            kv_residency_options=parse_options(self.kv_residency_options),
            checksum=os.environ.get(CHECKSUM_VARIABLE) == "1",
            **same,
        )
        require_format(config)
        return config

    def _set_required(self) -> None:
        """Set what the cache rank needs, and say so."""
        self._set("disable_radix_cache", True, "sparse requests leave the pool")
        if self.is_baseline:
            self._set("page_size", self.baseline_page_size, "what is selected together")
        else:
            self._set("page_size", 1, "tokens are selected one by one")
        if not has_gpu():
            say_once()
            self._set("device", "cpu", "no GPU found")
        device: str | None = self.device  # type: ignore[has-type]
        if device == "cpu":
            if self.attention_backend is None:
                self._set("attention_backend", "torch_native", "the CPU engine's backend")
            if self.sampling_backend is None:
                self._set("sampling_backend", "pytorch", "the CPU engine's sampler")
            if self.grammar_backend is None:
                self._set("grammar_backend", "none", "grammar kernels need a GPU")
            self._set("sleep_on_idle", True, "an idle scheduler would take a core from the others")
            if self.max_total_tokens is None:
                self._set("max_total_tokens", _CPU_POOL_TOKENS, "host memory is shared")
            if self.max_running_requests is None:
                self._set("max_running_requests", _CPU_RUNNING_REQUESTS, "host memory is shared")
            if self.dtype == "auto" and _config_dtype(self.model_path) == "float32":
                self._set("dtype", "float32", "the checkpoint's own")
        if device in (None, "cuda") and has_gpu():
            self.device = "cuda"
            if self.attention_backend is None:
                hopper = torch.cuda.get_device_capability()[0] == 9
                chosen = "fa3" if hopper else "triton"
                self._set("attention_backend", chosen, "kernels of this GPU")
        self._set("decode_attention_backend", BACKEND, "sparse decode over the working set")

    def _say_ignored(self, when: str, heeded: Sequence[str]) -> None:
        """Log which of our flags are not at their defaults and have no effect."""
        ignored = [
            f"--{field.name.replace('_', '-')}"
            for field in dataclasses.fields(self)
            if field.name in CACHE_RANK_FIELDS
            and field.name not in ("cache_rank_gpus", "decode_mode", *heeded)
            and getattr(self, field.name) != field.default
        ]
        if ignored:
            logger.warning("%s these have no effect: %s", when, ", ".join(ignored))

    def _set(self, field: str, value: Any, reason: str) -> None:
        if getattr(self, field) != value:
            setattr(self, field, value)
            logger.info("cache rank: --%s %s (%s)", field.replace("_", "-"), value, reason)


_BASELINE_FIELDS = ("sparse_budget", "sink_tokens", "recent_tokens", "dense_layers")

CACHE_RANK_FIELDS = [
    field.name
    for field in dataclasses.fields(CacheRankServerArgs)
    if field.name not in {inherited.name for inherited in dataclasses.fields(ServerArgs)}
]

SHARED_FIELDS = [
    name
    for name in CacheRankConfig.__struct_fields__
    if name in CACHE_RANK_FIELDS and name != "kv_residency_options"  # a text here
]
"""What the cache rank is told as it is given here."""


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


def _config_dtype(model_path: str) -> str | None:
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return None
    values = json.loads(config.read_text())
    return values.get("dtype") or values.get("torch_dtype")

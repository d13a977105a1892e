"""The flags of the cache rank, beside SGLang's own, and what they say together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from cache_rank.config import SMALL_SWAP_TOKENS, CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS, require_format
from cache_rank.residency.options import parse_options
from sglang_ext import compat, cpu
from sglang_ext.losses import LONGEST_DELAY_SECONDS

BACKEND = "cache_rank"
"""The name under which SGLang knows our decode attention backend."""

_DEFAULTS = CacheRankConfig(ModelShape(1, 1, 1, 8, "bfloat16", 1.0))
"""What the cache rank does unless it is told otherwise is the default of a flag, too."""

FORECAST_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Queries of these are forecast by default; those of others can be, if the user says so."""

FORECAST_ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Of these, a position is rotated at rates that no request's length changes; see rotary.py."""

FORECAST_GROUP_LAYERS = 2
HISTORY_GROUP_LAYERS = _DEFAULTS.layers_per_group
"""Layers of a group where queries are forecast, and where they are predicted from earlier ones."""

CHECKSUM_VARIABLE = "CACHE_RANK_CHECKSUM"
SHARE_GPU_VARIABLE = "CACHE_RANK_SHARE_GPU"
"""Set to 1, this variable makes both ranks compare checksums of every slot at every step."""


class Schedule(NamedTuple):
    """How queries are predicted, the layers of a group, and why."""

    query_predictor: str
    layers_per_group: int
    why: str


def choose_schedule(
    query_predictor: str | None,
    layers_per_group: int | None,
    forecast_lead: int,
    architecture: str,
    rotary_type: str,
    sparse_layers: int,
) -> Schedule:
    """Choose what the user does not, which is None, for a model's class and its sparse layers."""
    why = "as asked for"
    if query_predictor is None:
        groups = -(-sparse_layers // (layers_per_group or FORECAST_GROUP_LAYERS))
        query_predictor, why = "forecast", "from the hidden state of the same step"
        if architecture not in FORECAST_ARCHITECTURES:
            query_predictor, why = "last", "forecasts are not tested with this model"
        elif rotary_type not in FORECAST_ROTARY_TYPES:
            query_predictor, why = "last", f"a forecast cannot rotate by {rotary_type}"
        elif groups <= forecast_lead:
            query_predictor = "last"
            why = f"--forecast-lead {forecast_lead} needs more layer groups than {groups}"
    if layers_per_group is None:
        is_forecast = query_predictor == "forecast"
        layers_per_group = FORECAST_GROUP_LAYERS if is_forecast else HISTORY_GROUP_LAYERS
    return Schedule(query_predictor, layers_per_group, why)


def rotary_type(model: Mapping[str, Any]) -> str:
    """The kind of rotary embedding that a model's config.json names, in either of its forms."""
    rotary = model.get("rope_parameters") or model.get("rope_scaling") or {}
    return str(rotary.get("rope_type") or rotary.get("type") or "default")


def flag_of(field: str) -> str:
    """The flag that sets a field of the arguments."""
    return f"--{field.replace('_', '-')}"


def field_of(flag: str) -> str:
    """The field of the arguments that a flag sets."""
    return flag.removeprefix("--").replace("-", "_")


@compat.record
class CacheRankFlags(ServerArgs):
    """SGLang's arguments and ours, as the user gave them; CacheRankServerArgs checks them."""

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
    ] = _DEFAULTS.sparse_budget
    sink_tokens: A[int, Arg(help="First tokens that are always attended to.")] = (
        _DEFAULTS.sink_tokens
    )
    recent_tokens: A[int, Arg(help="Newest tokens that are always attended to.")] = (
        _DEFAULTS.recent_tokens
    )
    layers_per_group: A[
        int | None,
        Arg(
            help="Consecutive layers whose queries and answers share one message. Default: "
            f"{FORECAST_GROUP_LAYERS} where queries are forecast, {HISTORY_GROUP_LAYERS} otherwise."
        ),
    ] = None
    calibration: A[
        str | None,
        Arg(
            help="Folder with what sglang_ext.calibrate has fitted to this model and these flags: "
            "corrections of forecasts, without which they are by the model's own projections, and "
            "how keys are sketched."
        ),
    ] = None
    query_window: A[int, Arg(help="Earlier queries that the next query is predicted from.")] = (
        _DEFAULTS.query_window
    )
    query_predictor: A[
        Literal["last", "spade", "forecast"] | None,
        Arg(
            help="How a query is predicted: from those of earlier steps, or (forecast) from the "
            "hidden state of the same step, --forecast-lead layer groups before. Default: forecast "
            "for Llama, Qwen2 and Qwen3 with more layer groups than that, last otherwise."
        ),
    ] = None
    forecast_lead: A[
        int,
        Arg(help="Layer groups between a hidden state and the queries that are forecast from it."),
    ] = _DEFAULTS.forecast_lead
    query_frame: A[
        Literal["post", "pre"],
        Arg(help="Predict among queries after or before rotary position embedding."),
    ] = _DEFAULTS.query_frame
    hysteresis: A[
        int | None,
        Arg(
            help="A selected token stays while it ranks within --sparse-budget plus this. Default: "
            "an eighth of the budget."
        ),
    ] = None
    max_swap_tokens: A[
        int | None,
        Arg(
            help="Most tokens that may enter the working set of a KV head in one step. Default: a "
            f"sixteenth of --sparse-budget, or up to {SMALL_SWAP_TOKENS} of a small one."
        ),
    ] = None
    inference_kv: A[
        Literal["full", "working-set"],
        Arg(
            help="What the inference rank keeps of a sparse request in sparse layers: every "
            "token, or only the working set, which frees its pool for more requests."
        ),
    ] = "full"
    reuse_sparse_tokens: A[
        Literal["off", "on"],
        Arg(
            help="Whether the radix cache is offered tokens that sparse steps have computed: off "
            "offers only what was computed densely, so that reuse changes no answer; on offers all "
            "to requests that may be sparse, and to others what others of their kind computed."
        ),
    ] = "off"
    dense_layers: A[int, Arg(help="First layers that attend to every token.")] = 1
    kv_residency: A[
        str,
        Arg(help="How the cache rank holds K and V; bf16 is as they came.", choices=list(FORMATS)),
    ] = _DEFAULTS.kv_residency
    kv_residency_options: A[
        str,
        Arg(help="Options of --kv-residency, as name=value separated by commas."),
    ] = ""
    score_keys: A[
        Literal["resident", "sketch"],
        Arg(
            help="Score tokens by their keys as they are held, or by a sketch of --sketch-bits, "
            "beside any format, for which --calibration is needed."
        ),
    ] = _DEFAULTS.score_keys
    sketch_bits: A[Literal[1, 2, 3, 4], Arg(help="Bits of a sketch, an element of a key.")] = (
        _DEFAULTS.sketch_bits
    )
    score_normalizer: A[
        Literal["all", "attended"],
        Arg(
            help="By what the logits of query heads are compared: their log-sum-exp over all "
            "tokens; or, with --score-keys sketch, over those that are attended to, for which "
            "logits need not be written and read again."
        ),
    ] = _DEFAULTS.score_normalizer
    wire_dtype: A[
        Literal["bf16", "int8"],
        Arg(
            help="How K and V travel back to the inference rank: bf16 is in the KV pool's own "
            "dtype, even if that is another; int8 is rounded with a scale for 8 channels, which "
            "halves an answer."
        ),
    ] = _DEFAULTS.wire_dtype
    max_sparse_requests: A[
        int,
        Arg(help="Requests that can be sparse at once; each reserves a working set of pool rows."),
    ] = 32
    bulk_chunk_tokens: A[
        int,
        Arg(help="Tokens of a prompt that are shipped to the cache rank in one decode step."),
    ] = 512
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
    cache_rank_max_restart_delay: A[
        float,
        Arg(
            help="Most seconds that the restart of a lost cache rank is put off. The first three "
            "come at once; the delay of the next ones doubles from 1 s, until one is up for 60 s."
        ),
    ] = LONGEST_DELAY_SECONDS
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

    allow_untested_sglang: A[
        bool, Arg(help="Start with a release of SGLang that is not tested with a cache rank.")
    ] = False

    @property
    def has_cache_rank(self) -> bool:
        """Whether this server has a cache rank."""
        return self.cache_rank_gpus > 0

    @property
    def is_baseline(self) -> bool:
        """Whether decode is one of the synchronous baselines."""
        return self.decode_mode != "cache-rank"

    @property
    def reuses_prefixes(self) -> bool:
        """Whether SGLang's radix cache can be on: a baseline has to see every token prefilled, and
        with `--inference-kv working-set` the rows that could be reused are freed."""
        return not self.is_baseline and self.inference_kv == "full"

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks run on GPUs."""
        return cpu.has_gpu() and self.device != "cpu"

    @property
    def shares_gpu(self) -> bool:
        """Whether the ranks take turns on one GPU, which tests do where there is no other."""
        return os.environ.get(SHARE_GPU_VARIABLE) == "1"

    @property
    def first_cache_rank_gpu(self) -> int:
        """The GPU of the cache rank of tensor-parallel rank 0."""
        if self.cache_rank_base_gpu_id is not None:
            return self.cache_rank_base_gpu_id
        if self.shares_gpu:
            return self.base_gpu_id
        return self.base_gpu_id + self.tp_size * self.gpu_id_step

    def cache_rank_config(self, model: ModelShape, max_rows: int) -> CacheRankConfig:
        """Make the configuration that the cache rank is opened with.

        Raises:
            ValueError: a flag is out of range; the message begins with its field.
        """
        flags = {field: getattr(self, field) for field in CACHE_RANK_FIELDS}
        return make_config(flags, model, max_rows, os.environ.get(CHECKSUM_VARIABLE) == "1")


_SGLANG_FIELDS = compat.default_values(ServerArgs)

CACHE_RANK_FIELDS = [
    field for field in compat.default_values(CacheRankFlags) if field not in _SGLANG_FIELDS
]
"""The fields that we add to SGLang's."""

_SHARED_FIELDS = {*CACHE_RANK_FIELDS} & {*CacheRankConfig.__struct_fields__} - {
    "kv_residency_options"  # a text here
}
"""The fields that the cache rank is told as they are given here."""


def make_config(
    flags: Mapping[str, Any], model: ModelShape, max_rows: int, checksum: bool = False
) -> CacheRankConfig:
    """What a cache rank is opened with that is given these flags, by their fields.

    Raises:
        ValueError: a flag is out of range; the message begins with its field.
    """
    # Some are chosen only when the model is known.
    chosen = {name: flags[name] for name in _SHARED_FIELDS if flags[name] is not None}
    options = parse_options(flags["kv_residency_options"])
    config = msgspec.convert(
        {
            "model": model,
            "max_rows": max_rows,
            "kv_residency_options": options,
            "checksum": checksum,
            **chosen,
        },
        CacheRankConfig,
    )
    require_format(config)
    return config

"""The flags of the cache rank, beside SGLang's own, and what they say together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from cache_rank.budget import DEFAULT_CURVE, BudgetCurve
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS, require_format
from cache_rank.residency.options import parse_options
from sglang_ext import compat, cpu
from sglang_ext.prediction import FORECAST_GROUP_LAYERS, HISTORY_GROUP_LAYERS
from sglang_ext.two_ranks.restart_backoff import LONGEST_DELAY_SECONDS

BACKEND = "cache_rank"
"""The name under which SGLang knows our decode attention backend."""

PREFILL_BACKEND = "cache_rank_prefill"
"""The one under which it knows the prefill backend of inline selection.

SGLang takes two equal names for the choice of --attention-backend, which is that of the kernels.
"""

ALGORITHM = "CACHE_RANK"
"""The name under which SGLang knows our drafts; `--speculative-algorithm` takes it."""

DRAFT_TOKENS, MOST_DRAFT_TOKENS = 9, 33
"""Tokens of a verification, one of which is no draft: by default, and at most."""

TRANSFERS = "coded"
"""The name under which SGLang knows our transfer backend."""

WIRE_CODES = "wire_codes"
"""The key of a request's `custom_params` that names the codes in which its K and V travel."""

WIRE_DRAFTS = "wire_drafts"
"""The key that says whether it may draft before all K and V are there."""

MOST_WIRE_DRAFTS = 64
"""Drafts of a request before all K and V are there, as in Lynx (section 4.2)."""

WIRE_FORMATS = tuple(
    name for name, residency in FORMATS.items() if residency.tail_tokens() is not None
)
"""Formats whose pages can be read alone."""

_DEFAULTS = CacheRankConfig(ModelShape(1, 1, 1, 8, "bfloat16", 1.0))
"""What the cache rank does unless it is told otherwise is the default of a flag, too."""

CHECKSUM_VARIABLE = "CACHE_RANK_CHECKSUM"
"""Set to 1, this variable makes both ranks compare checksums of every slot at every step."""

SHARE_GPU_VARIABLE = "CACHE_RANK_SHARE_GPU"
"""Set to 1, this variable lets both ranks take turns on one GPU, for tests."""

CONFIG_FLAG = "--cache-rank-config"
"""The flag of the settings that users rarely turn: a JSON object."""

CONFIG_KEYS = (
    "kv_residency_options",
    "layers_per_group",
    "query_window",
    "sketch_bits",
    "score_normalizer",
    "wire_dtype",
    "bulk_chunk_tokens",
    "cache_rank_transfer_backend",
    "cache_rank_max_restart_delay",
    "trace_steps",
    "allow_untested_sglang",
)
"""The keys of CONFIG_FLAG; each is a field of the arguments."""


def flag_of(field: str) -> str:
    """What the user types to set a field of the arguments: a flag, or a key of CONFIG_FLAG."""
    if field in CONFIG_KEYS:
        return f"{CONFIG_FLAG} {field}"
    return f"--{field.replace('_', '-')}"


def field_of(flag: str) -> str:
    """The field of the arguments that a flag sets."""
    return flag.removeprefix("--").replace("-", "_")


LEAST_SPARSE_TOKENS = 1024
"""Shorter requests are dense by default: their divergence has not been measured."""

SPARSE_THRESHOLD = 4096
"""The length from which all requests are sparse where nothing weighs steps."""


@compat.record
class CacheRankFlags(ServerArgs):
    """SGLang's arguments and ours, as the user gave them; CacheRankServerArgs checks them."""

    cache_rank_gpus: A[
        int | None,
        Arg(
            help="1: a cache rank on a GPU of its own selects tokens; 0: plain SGLang; default: "
            "SGLang's process selects."
        ),
    ] = None
    sparse_threshold: A[
        int | None,
        Arg(
            help="Length in tokens from which a request is sparse; default: "
            f"{LEAST_SPARSE_TOKENS} where that makes steps shorter; with --inference-kv "
            f"working-set {SPARSE_THRESHOLD} in any case."
        ),
    ] = None
    sparse_budget: A[
        int | None,
        Arg(
            help="Tokens that each KV head attends to beside sinks and recent ones; default: "
            f"{DEFAULT_CURVE}."
        ),
    ] = None
    sink_tokens: A[int, Arg(help="First tokens that are always attended to.")] = (
        _DEFAULTS.sink_tokens
    )
    recent_tokens: A[int, Arg(help="Newest tokens that are always attended to.")] = (
        _DEFAULTS.recent_tokens
    )
    dense_layers: A[int, Arg(help="First layers that attend to every token.")] = 1
    max_sparse_requests: A[
        int, Arg(help="Requests that are sparse at once; each reserves a working set of rows.")
    ] = 64
    inference_kv: A[
        Literal["full", "working-set"],
        Arg(
            help="Tokens of a sparse request that stay in SGLang's KV pool; working-set frees rows."
        ),
    ] = "full"
    reuse_sparse_tokens: A[
        Literal["off", "on"],
        Arg(help="Whether the radix cache may reuse tokens that sparse steps have computed."),
    ] = "off"
    query_predictor: A[
        Literal["last", "spade", "forecast"] | None,
        Arg(help="How queries are predicted; default: forecast where the model allows, or last."),
    ] = None
    forecast_lead: A[
        int, Arg(help="Layer groups between a hidden state and the queries forecast from it.")
    ] = _DEFAULTS.forecast_lead
    calibration: A[
        str | None,
        Arg(
            help="Folder that sglang_ext.calibrate has written for this model and flags; auto, the "
            "default where SGLang's process selects: the server fits sketches itself."
        ),
    ] = None
    hysteresis: A[
        int | None,
        Arg(
            help="Ranks beyond the budget within which a selected token stays; default: budget / 8."
        ),
    ] = None
    max_swap_tokens: A[
        int | None,
        Arg(
            help="Tokens that may enter a KV head's working set in a step; default: budget / 16, "
            "but 64 of a smaller budget."
        ),
    ] = None
    kv_residency: A[
        str,
        Arg(help="How the cache rank holds K and V; bf16 is as they came.", choices=list(FORMATS)),
    ] = _DEFAULTS.kv_residency
    score_keys: A[
        Literal["resident", "sketch"],
        Arg(
            help="Keys that are scored: those held, or a sketch of them, which needs --calibration."
        ),
    ] = _DEFAULTS.score_keys
    speculative_draft_weights: A[
        Literal["model", "int4"],
        Arg(help="Weights of drafts: the model's, or a copy of its linear layers with 4 bits."),
    ] = "model"
    wire_codes: A[
        str,
        Arg(
            help="Codes in which a prefill server sends K and V: bf16, as they are, quantspec, "
            "hack or lynx; a format may have options, as in hack:bits=2."
        ),
    ] = "bf16"
    wire_drafts: A[
        int,
        Arg(
            help="Most tokens that a decode server drafts for a request when half of the bits of "
            f"quantspec or lynx have come, and the others not: 0 to {MOST_WIRE_DRAFTS}."
        ),
    ] = 0
    cache_rank_timeout: A[
        float, Arg(help="Seconds without an answer after which a cache rank counts as down.")
    ] = 5.0
    cache_rank_base_gpu_id: A[
        int | None, Arg(help="GPU of the cache rank; default: the one after SGLang's own.")
    ] = None
    cache_rank_mem_fraction: A[
        float | None,
        Arg(help="Share of free memory for tokens; default: 0.9, on CPUs 0.5 and at most 8 GiB."),
    ] = None
    cache_rank_host_gb: A[
        float, Arg(help="GB of host memory that keep prompts for which its GPU has no room.")
    ] = 0.0
    cache_rank_address: A[
        str, Arg(help="Address that channels between the ranks bind to; they are not encrypted.")
    ] = "127.0.0.1"
    trace: A[
        str | None, Arg(help="File for a timeline of a few decode steps, for Perfetto or Chrome.")
    ] = None

    # These are keys of --cache-rank-config.
    kv_residency_options: A[
        str, Arg(help="options of --kv-residency, as name=value,name=value")
    ] = ""
    layers_per_group: A[
        int | None,
        Arg(
            help="layers of one message; default: "
            f"{FORECAST_GROUP_LAYERS} for forecasts, or {HISTORY_GROUP_LAYERS}"
        ),
    ] = None
    query_window: A[int, Arg(help="earlier queries that the next one is predicted from")] = (
        _DEFAULTS.query_window
    )
    sketch_bits: A[Literal[1, 2, 3, 4], Arg(help="bits of a sketch, for each element of a key")] = (
        _DEFAULTS.sketch_bits
    )
    score_normalizer: A[
        Literal["all", "attended"],
        Arg(help='tokens in the normalizer: "all", or "attended" (sketch only)'),
    ] = _DEFAULTS.score_normalizer
    wire_dtype: A[
        Literal["bf16", "int8"],
        Arg(help='K and V of answers: "bf16" is the KV pool\'s dtype, "int8" half'),
    ] = _DEFAULTS.wire_dtype
    bulk_chunk_tokens: A[
        int,
        Arg(
            help="prompt tokens that are shipped to the cache rank in a decode step; as codes as "
            "many bytes"
        ),
    ] = 512
    cache_rank_transfer_backend: A[
        Literal["auto", "peer", "nccl"],
        Arg(help='what copies between GPUs: "auto", "peer" or "nccl"'),
    ] = "auto"
    cache_rank_max_restart_delay: A[
        float, Arg(help="most seconds before a lost cache rank is restarted")
    ] = LONGEST_DELAY_SECONDS
    trace_steps: A[int, Arg(help="decode steps that --trace covers")] = 8
    allow_untested_sglang: A[bool, Arg(help="start with an untested release of SGLang")] = False

    @property
    def placement(self) -> str:
        """Where tokens are selected: `inline`, `process` or `off`."""
        if self.cache_rank_gpus is None:
            return "off" if self.disaggregation_mode == "prefill" else "inline"
        return "process" if self.cache_rank_gpus > 0 else "off"

    @property
    def has_cache_rank(self) -> bool:
        """Whether this server has a cache rank, which is a process of its own."""
        return self.placement == "process"

    @property
    def is_inline(self) -> bool:
        """Whether SGLang's process selects."""
        return self.placement == "inline"

    @property
    def is_sparse(self) -> bool:
        """Whether long requests decode sparsely at all."""
        return self.placement != "off"

    @property
    def transfers_codes(self) -> bool:
        """Whether prompts are prefilled by one server and decoded by another, by our transfers."""
        ours = self.disaggregation_transfer_backend == TRANSFERS
        return ours and self.disaggregation_mode != "null"

    @property
    def only_decodes(self) -> bool:
        """Whether another server prefills what this one decodes."""
        return self.disaggregation_mode == "decode"

    @property
    def budget_curve(self) -> BudgetCurve:
        """How many tokens a request selects, by its length."""
        curve = BudgetCurve.given(self.sparse_budget)
        # The rows of drafts by a cache rank end with all slots.
        of_rows = self.has_drafts and self.has_cache_rank
        return BudgetCurve.flat(curve.most) if of_rows else curve

    @property
    def least_sparse_length(self) -> int:
        """The length from which a request has all the tokens that a sparse step attends to."""
        always, curve = self.sink_tokens + self.recent_tokens, self.budget_curve
        least = always + max(1, curve.least)
        while least < always + curve.at(least):  # budgets grow with the length, and more slowly
            least = always + curve.at(least)
        return least

    @property
    def sparse_from(self) -> int:
        """The length from which a request may be sparse."""
        if self.sparse_threshold is not None:
            return self.sparse_threshold
        if not self.selects_when_shorter:
            return SPARSE_THRESHOLD
        return max(LEAST_SPARSE_TOKENS, self.least_sparse_length)

    @property
    def sparse_anyway_from(self) -> int:
        """The length from which a request is sparse where nothing weighs steps."""
        return self.sparse_threshold or max(SPARSE_THRESHOLD, self.sparse_from)

    @property
    def has_drafts(self) -> bool:
        """Whether selection only drafts, and all that is answered is verified densely."""
        return self.is_sparse and self.speculative_algorithm is not None

    @property
    def draft_steps(self) -> int:
        """The most drafts of a round; 0 without."""
        return int(self.speculative_num_draft_tokens or DRAFT_TOKENS) - 1 if self.has_drafts else 0

    @property
    def rounds_draft_weights(self) -> bool:
        """Whether drafts have weights of 4 bits beside the model's."""
        return self.speculative_draft_weights == "int4"

    @property
    def selects_when_shorter(self) -> bool:
        """Whether requests are dense where selection would not make steps shorter."""
        if self.sparse_threshold is not None or self.enable_deterministic_inference:
            return False
        # Rounds of drafts by a cache rank have all drafts; what they take is not measured.
        return self.is_inline or (self.has_cache_rank and not self.has_drafts)

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
        checksum = os.environ.get(CHECKSUM_VARIABLE) == "1"
        config = make_config(flags, model, max_rows, checksum)
        steps = self.draft_steps
        verified = steps + 1 if steps and self.inference_kv == "working-set" else 0
        return msgspec.structs.replace(config, draft_steps=steps, verified_tokens=verified)


SGLANG_FIELDS = compat.default_values(ServerArgs)

CACHE_RANK_FIELDS = [
    field for field in compat.default_values(CacheRankFlags) if field not in SGLANG_FIELDS
]
"""The fields that we add to SGLang's."""

_INLINE_FIELDS = {
    "cache_rank_gpus",
    "sparse_threshold",
    "sparse_budget",
    "sink_tokens",
    "recent_tokens",
    "dense_layers",
    "reuse_sparse_tokens",
    "calibration",
    "sketch_bits",
    "speculative_draft_weights",
    "allow_untested_sglang",
}

HEEDED_FIELDS = {
    "inline": _INLINE_FIELDS,
    "process": {*CACHE_RANK_FIELDS},
    "off": {"cache_rank_gpus", "allow_untested_sglang"},
}
"""By the placement, those of our fields that have an effect."""

TRANSFER_FIELDS = {"wire_codes", "wire_drafts", "cache_rank_address"}
"""Those that have one with our transfers."""


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
    curve = BudgetCurve.given(chosen.pop("sparse_budget", None))
    config = msgspec.convert(
        {
            "model": model,
            "max_rows": max_rows,
            "kv_residency_options": options,
            "checksum": checksum,
            "sparse_budget": curve.most,
            "budget_factor": curve.factor,
            "least_budget": curve.least,
            **chosen,
        },
        CacheRankConfig,
    )
    require_format(config)
    return config

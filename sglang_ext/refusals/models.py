"""What a model may not be, and what this machine must have room for.

SGLang has read the configuration of the model by then.
"""

from __future__ import annotations

import json
from typing import Any

import psutil
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from cache_rank.config import DTYPES
from sglang_ext import compat
from sglang_ext.flags import FORECAST_ROTARY_TYPES, CacheRankFlags, rotary_type
from sglang_ext.memory import bytes_beyond_allocator
from sglang_ext.model_path import find_file
from sglang_ext.refusals import PLAIN, Refusal

MAX_HEAD_DIM = 256
"""The widest head that the kernels take, in elements."""

GPU_HEAD_DIMS = (64, 128, 256)
"""Tiles of kernels are powers of two on GPUs; the interpreter takes others, for tests on CPUs.

FlashInfer checks no others: heads of 80 or 96 elements end in illegal accesses of memory."""


def _model(args: CacheRankFlags) -> Any:
    """SGLang's configuration of the model."""
    return compat.model_config(args)


def _why_not(args: CacheRankFlags) -> str | None:
    """Why the model cannot be served with sparse decode, if it cannot."""
    model, heads = _model(args), _model(args).head_dim
    if not model.is_generation:
        return "the model does not generate, so it has no decode steps"
    if model.attention_arch == AttentionArch.MLA:
        return "multi-head latent attention is not supported"
    if _is_windowed(model):
        return "sliding-window and linear attention layers are not supported"
    if model.is_multimodal:
        return "multimodal models are not supported"
    if heads > MAX_HEAD_DIM or heads % 8 != 0:
        return f"heads have {heads} elements, and multiples of 8 up to {MAX_HEAD_DIM} are supported"
    if args.on_gpu and heads not in GPU_HEAD_DIMS:
        served = ", ".join(map(str, GPU_HEAD_DIMS))
        return f"heads have {heads} elements, and on GPUs a cache rank serves {served}"
    if _declares_small_kv(args):
        return "its K and V are declared to be quantized, and the KV pool has the model's dtype"
    return None


def _is_windowed(model: Any) -> bool:
    """Whether some layer attends to less than all tokens, or not by softmax attention at all."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or []
    return (
        model.is_hybrid_swa
        or any(kind != "full_attention" for kind in kinds)
        or mambaish_config(model) is not None
        or (model.sliding_window_size or -1) > 0
    )


def _declares_small_kv(args: CacheRankFlags) -> bool:
    """Whether the checkpoint says how K and V are quantized; ModelOpt does in a file of its own.

    SGLang then has scales in its attention layers. `--kv-cache-dtype bfloat16` leaves them there,
    and backends apply them to what was not divided by them.
    """
    declared = getattr(_model(args).hf_config, "quantization_config", None) or {}
    declared = declared if isinstance(declared, dict) else declared.to_dict()
    file = find_file(args.model_path, "hf_quant_config.json", args.revision)
    parts = [declared, json.loads(file.read_text()) if file else {}]
    parts += [part.get("quantization") or {} for part in parts]
    return any(
        part.get(key) for part in parts for key in ("kv_cache_scheme", "kv_cache_quant_algo")
    )


def _dtype(args: CacheRankFlags) -> str:
    """The dtype of the model and of its KV pool."""
    return str(_model(args).dtype).removeprefix("torch.")


def _rotary_type(args: CacheRankFlags) -> str:
    """How the model's configuration says that queries are rotated."""
    return rotary_type(_model(args).hf_text_config.to_dict())


def _groups(args: CacheRankFlags) -> int:
    """How many layer groups are not dense, once it is chosen how many layers make one."""
    assert args.layers_per_group is not None
    sparse_layers = _model(args).num_hidden_layers - args.dense_layers
    return int(-(-sparse_layers // args.layers_per_group))


def _bytes_of_working_sets(args: CacheRankFlags) -> int:
    """The host memory of all rows behind the KV pool."""
    model = _model(args)
    token = 2 * model.get_num_kv_heads(args.tp_size) * model.head_dim * model.dtype.itemsize
    return bytes_beyond_allocator(args, model.num_hidden_layers, token)


MODELS = (
    Refusal(
        "--model-path",
        lambda args: str(_why_not(args)),
        PLAIN,
        lambda args: _why_not(args) is not None,
    ),
    Refusal(
        "--dtype",
        lambda args: f"a KV pool of {_dtype(args)} is not supported",
        "pass --dtype bfloat16",
        lambda args: _dtype(args) not in DTYPES,
    ),
    Refusal(
        "--kv-cache-dtype",
        lambda args: f"the KV pool must have the model's dtype, which is {_dtype(args)}",
        when=lambda args: args.kv_cache_dtype != "auto" and _dtype(args) != "bfloat16",
    ),
    Refusal(
        "--dense-layers",
        lambda args: f"none of the model's {_model(args).num_hidden_layers} layers would be sparse",
        f"lower it, or {PLAIN}",
        lambda args: args.dense_layers >= _model(args).num_hidden_layers,
    ),
)
"""These rows are of every server with sparse decode."""

WORKING_SETS = (
    Refusal(
        "--calibration",
        lambda args: (
            "it is of forecasts and sketches, and queries are not forecast: --query-predictor is "
            f"{args.query_predictor}"
        ),
        "drop it, or pass --score-keys sketch, or, where the model has more layer groups than "
        "--forecast-lead, --query-predictor forecast",
        lambda args: (
            args.calibration is not None
            and args.query_predictor != "forecast"
            and args.score_keys != "sketch"
        ),
    ),
    Refusal(
        "--score-keys",
        "a sketch is fitted to the model's keys",
        "make a calibration (python -m sglang_ext.calibrate), and pass it by --calibration",
        lambda args: args.score_keys == "sketch" and args.calibration is None,
    ),
    Refusal(
        "--score-keys",
        lambda args: (
            f"heads have {_model(args).head_dim} elements, and a sketch needs a multiple of 32"
        ),
        "score by the keys as they are held",
        lambda args: args.score_keys == "sketch" and _model(args).head_dim % 32 != 0,
    ),
    Refusal(
        "--query-predictor --forecast-lead",
        lambda args: (
            f"the model has {_groups(args)} groups of sparse layers, and forecasts need "
            f"more than their lead of {args.forecast_lead}"
        ),
        "lower --forecast-lead or layers_per_group, or pass --query-predictor last",
        lambda args: args.query_predictor == "forecast" and _groups(args) <= args.forecast_lead,
    ),
    Refusal(
        "--query-predictor",
        lambda args: (
            f"queries are rotated by {_rotary_type(args)}, whose frequencies are not those of a "
            "position alone, or not known to be"
        ),
        "pass --query-predictor last",
        lambda args: (
            args.query_predictor == "forecast" and _rotary_type(args) not in FORECAST_ROTARY_TYPES
        ),
    ),
    Refusal(
        "--max-sparse-requests --inference-kv",
        lambda args: (
            f"the working sets take {_bytes_of_working_sets(args) / 1e9:.0f} GB, more than this "
            "machine has free"
        ),
        "lower --max-sparse-requests or --sparse-budget, or, with --inference-kv working-set, "
        "--context-length or --dense-layers",
        lambda args: (
            args.device == "cpu"
            and _bytes_of_working_sets(args) > psutil.virtual_memory().available
        ),
    ),
)
"""These rows are of a server with a cache rank."""

"""What a model may not be, and what this machine must have room for.

SGLang has read the configuration of the model by then.
"""

from __future__ import annotations

from typing import Any

import psutil

from cache_rank.config import DTYPES
from sglang_ext import compat
from sglang_ext.flags import FORECAST_ROTARY_TYPES, CacheRankFlags, field_of, rotary_type
from sglang_ext.memory import bytes_beyond_allocator
from sglang_ext.refusals import PLAIN, Refusal

MAX_HEAD_DIM = 256
"""The widest head that the kernels take, in elements."""

GPU_HEAD_DIMS = (64, 128, 256)
"""Tiles of kernels are powers of two on GPUs; the interpreter takes others, for tests on CPUs."""

FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""FlashInfer checks no others: heads of 80 or 96 elements end in illegal accesses of memory."""


def _model(args: CacheRankFlags) -> Any:
    """SGLang's configuration of the model."""
    return compat.model_config(args)


def _is_latent(args: CacheRankFlags) -> bool:
    """Whether the model has multi-head latent attention."""
    from sglang.srt.configs.model_config import AttentionArch

    return _model(args).attention_arch == AttentionArch.MLA


def _is_windowed(args: CacheRankFlags) -> bool:
    """Whether some layer attends to less than all tokens, or not by softmax attention at all."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model = _model(args)
    kinds = getattr(model.hf_text_config, "layer_types", None) or []
    return (
        model.is_hybrid_swa
        or any(kind != "full_attention" for kind in kinds)
        or mambaish_config(model) is not None
        or (model.sliding_window_size or -1) > 0
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


def _other_head_dim_than_flashinfers(asked: str) -> Refusal:
    """A row that refuses FlashInfer for a size of heads that it has no kernels for."""
    return Refusal(
        asked,
        lambda args: (
            f"heads have {_model(args).head_dim} elements, and FlashInfer has kernels for "
            f"{', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
        ),
        "pass triton",
        lambda args: (
            getattr(args, field_of(asked)) == "flashinfer"
            and _model(args).head_dim not in FLASHINFER_HEAD_DIMS
        ),
    )


MODELS = (
    Refusal(
        "--model-path",
        "the model does not generate, so it has no decode steps",
        PLAIN,
        lambda args: not _model(args).is_generation,
    ),
    Refusal("--model-path", "multi-head latent attention is not supported", PLAIN, _is_latent),
    Refusal(
        "--model-path",
        "sliding-window and linear attention layers are not supported",
        PLAIN,
        _is_windowed,
    ),
    Refusal(
        "--model-path",
        "multimodal models are not supported",
        PLAIN,
        lambda args: _model(args).is_multimodal,
    ),
    Refusal(
        "--model-path",
        lambda args: (
            f"the head dimension is {_model(args).head_dim}, and multiples of 8 up to "
            f"{MAX_HEAD_DIM} are supported"
        ),
        PLAIN,
        lambda args: _model(args).head_dim > MAX_HEAD_DIM or _model(args).head_dim % 8 != 0,
    ),
    Refusal(
        "--model-path",
        lambda args: (
            f"the head dimension is {_model(args).head_dim}, and on GPUs a cache rank serves "
            f"{', '.join(map(str, GPU_HEAD_DIMS))}"
        ),
        PLAIN,
        lambda args: (
            args.on_gpu and not args.is_baseline and _model(args).head_dim not in GPU_HEAD_DIMS
        ),
    ),
    _other_head_dim_than_flashinfers("--attention-backend"),
    _other_head_dim_than_flashinfers("--prefill-attention-backend"),
    Refusal(
        "--dtype",
        lambda args: f"a KV pool of {_dtype(args)} is not supported",
        "pass --dtype bfloat16",
        lambda args: _dtype(args) not in DTYPES,
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
        "lower --forecast-lead or --layers-per-group, or pass --query-predictor last",
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

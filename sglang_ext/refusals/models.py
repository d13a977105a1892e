"""What a model may not be, and what this machine must have room for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from cache_rank.config import DTYPES
from sglang_ext import compat
from sglang_ext.calibration.files import TENSORS, CalibrationError, read_card
from sglang_ext.flags import CacheRankFlags
from sglang_ext.four_bits import GROUP
from sglang_ext.memory import bytes_beyond_allocator
from sglang_ext.model_path import find_file
from sglang_ext.prediction import FORECAST_ROTARY_TYPES, rotary_type
from sglang_ext.refusals import DROP, PLAIN, Objection

MAX_HEAD_DIM = 256
"""The widest head that the kernels take, in elements."""

GPU_HEAD_DIMS = (64, 128, 256)
"""Tiles of kernels are powers of two on GPUs; the interpreter takes others, for tests on CPUs.

FlashInfer checks no others: heads of 80 or 96 elements end in illegal accesses of memory."""


MOSAICKV_HEAD_DIM = 128
"""The rotations of wider heads do not fit into the shared memory of an H100."""

MOST_QUERY_HEADS = 16
"""Query heads of a KV head that attention over rows takes."""


def sparse_decode(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to a model that sparse decode cannot serve, wherever tokens are selected."""
    model = compat.model_config(args)
    layers, dtype = model.num_hidden_layers, str(model.dtype).removeprefix("torch.")
    why_not = _why_not(args, model)
    if why_not is not None:
        yield Objection("--model-path", why_not, PLAIN)
    if dtype not in DTYPES:
        yield Objection(
            "--dtype", f"a KV pool of {dtype} is not supported", "pass --dtype bfloat16"
        )
    if args.dense_layers >= layers:
        why = f"none of the model's {layers} layers would be sparse"
        yield Objection("--dense-layers", why, f"lower it, or {PLAIN}")


def transfers(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to a model whose K and V do not lie in the rows of one plain pool."""
    if (why := _why_not(args, compat.model_config(args))) is not None:
        remedy = "serve it without --disaggregation-transfer-backend"
        yield Objection("--model-path", why, remedy)


def exchange(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to what a cache rank in a process of its own cannot do with the model."""
    model = compat.model_config(args)
    heads, sketches = model.head_dim, args.score_keys == "sketch"
    dtype = str(model.dtype).removeprefix("torch.")
    if args.kv_cache_dtype != "auto" and dtype != "bfloat16":
        why = f"the KV pool must have the model's dtype, which is {dtype}"
        yield Objection("--kv-cache-dtype", why)
    if sketches and args.calibration is None:
        remedy = "make a calibration (python -m sglang_ext.calibrate), and pass it by --calibration"
        yield Objection("--score-keys", "a sketch is fitted to the model's keys", remedy)
    if sketches and heads % 32 != 0:
        why = f"heads have {heads} elements, and a sketch needs a multiple of 32"
        yield Objection("--score-keys", why, "score by the keys as they are held")
    if args.on_gpu and args.kv_residency == "mosaickv" and heads > MOSAICKV_HEAD_DIM:
        why = f"on GPUs mosaickv takes heads of up to {MOSAICKV_HEAD_DIM} elements, not {heads}"
        yield Objection("--kv-residency", why, "use another format")
    if args.query_predictor == "forecast":
        yield from _forecasts(args, model)
    token = 2 * model.get_num_kv_heads(args.tp_size) * heads * model.dtype.itemsize
    taken = bytes_beyond_allocator(args, model.num_hidden_layers, token)
    if args.device == "cpu" and taken > psutil.virtual_memory().available:
        yield Objection(
            "--max-sparse-requests --inference-kv",
            f"the working sets take {taken / 1e9:.0f} GB, more than this machine has free",
            "lower --max-sparse-requests or --sparse-budget, or, with --inference-kv working-set, "
            "--context-length or --dense-layers",
        )


def inline(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to a model whose keys have no sketches, or whose heads the kernels do not take."""
    model = compat.model_config(args)
    if model.head_dim % 32 != 0:
        why = f"heads have {model.head_dim} elements, and a sketch needs a multiple of 32"
        yield Objection("--model-path", why, PLAIN)
    group = model.num_attention_heads // model.get_total_num_kv_heads()
    if group > MOST_QUERY_HEADS:
        why = f"{group} query heads share a KV head, and kernels take {MOST_QUERY_HEADS}"
        yield Objection("--model-path", why, PLAIN)
    if args.rounds_draft_weights:
        yield from _rounded_weights(args, model)


def _rounded_weights(args: CacheRankFlags, model: Any) -> Iterator[Objection]:
    """Object to weights that cannot be rounded; layers of unusual sizes are found as they load."""
    flag = "--speculative-draft-weights"
    if model.quantization is not None:
        yield Objection(flag, f"the model's own weights are quantized ({model.quantization})")
    if not args.on_gpu:
        return
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        why = f"the kernel multiplies bfloat16 and float16, and the model has {dtype}"
        yield Objection(flag, why, f"{DROP}, or pass --dtype bfloat16")
    split = {
        "hidden size": model.hidden_size,
        "heads": model.num_attention_heads * model.head_dim // args.tp_size,
        "intermediate size": getattr(model.hf_text_config, "intermediate_size", 0) // args.tp_size,
    }
    for name, inputs in split.items():
        if inputs % GROUP:
            why = f"layers over the {name} have {inputs} inputs, and the kernel takes multiples of"
            yield Objection(flag, f"{why} {GROUP}", f"{DROP}, or pass another --tp-size")


def calibration(args: CacheRankFlags) -> Iterator[Objection]:
    """Object to a calibration that is none, or not one of this model and these flags."""
    if args.calibration in (None, "auto"):
        return
    folder, model = Path(args.calibration), compat.model_config(args)
    try:
        card = read_card(folder)
    except CalibrationError as error:
        yield Objection("--calibration", str(error))
        return
    if not (folder / TENSORS).is_file():
        yield Objection("--calibration", f"it has no {TENSORS}", "calibrate again")
    expected = {
        "architecture": model.hf_config.architectures[0],
        "layers": model.num_hidden_layers,
        "query_heads": model.num_attention_heads,
        "kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.head_dim,
        "dense_layers": args.dense_layers,
    }
    if args.has_cache_rank and args.query_predictor == "forecast":
        expected |= {
            "hidden_size": model.hidden_size,
            "layers_per_group": args.layers_per_group,
            "forecast_lead": args.forecast_lead,
        }
    for name, value in expected.items():
        if (found := getattr(card, name)) != value:
            why = f"it is of {name} {found} ({card.model}), and the server has {value}"
            yield Objection("--calibration", why, "calibrate again with this model and these flags")


def _forecasts(args: CacheRankFlags, model: Any) -> Iterator[Objection]:
    assert args.layers_per_group is not None
    groups = -(-(model.num_hidden_layers - args.dense_layers) // args.layers_per_group)
    if groups <= args.forecast_lead:
        yield Objection(
            "--query-predictor --forecast-lead",
            f"the model has {groups} groups of sparse layers, and forecasts need more than their "
            f"lead of {args.forecast_lead}",
            "lower --forecast-lead or layers_per_group, or pass --query-predictor last",
        )
    rotary = rotary_type(model.hf_text_config.to_dict())
    if rotary not in FORECAST_ROTARY_TYPES:
        why = f"queries are rotated by {rotary}, which may depend on more than a position"
        yield Objection("--query-predictor", why, "pass --query-predictor last")


def _why_not(args: CacheRankFlags, model: Any) -> str | None:
    """Why the model cannot be served with sparse decode, if it cannot."""
    heads = model.head_dim
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
    if _declares_small_kv(args, model):
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


def _declares_small_kv(args: CacheRankFlags, model: Any) -> bool:
    """Whether the checkpoint says how K and V are quantized; ModelOpt does in a file of its own.

    SGLang then has scales in its attention layers. `--kv-cache-dtype bfloat16` leaves them there,
    and backends apply them to what was not divided by them.
    """
    declared = getattr(model.hf_config, "quantization_config", None) or {}
    declared = declared if isinstance(declared, dict) else declared.to_dict()
    file = find_file(args.model_path, "hf_quant_config.json", args.revision)
    parts = [declared, json.loads(file.read_text()) if file else {}]
    parts += [part.get("quantization") or {} for part in parts]
    return any(
        part.get(key) for part in parts for key in ("kv_cache_scheme", "kv_cache_quant_algo")
    )

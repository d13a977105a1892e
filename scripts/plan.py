"""Estimate how long a decode step takes, and how much fits, before anything is started.

    python -m scripts.plan --model-path Qwen/Qwen3-8B
    python -m scripts.plan --model-path DIR --quantization fp8 --gpu H100 --contexts 16384 \
        --set kv_residency=bf16,sparse_budget=1024

Compares a cache rank beside a GPU with plain SGLang, tensor parallel over the same two GPUs with an
FP8 cache. Needs no GPU, and of the model only its config.json. Estimates are by bytes over
bandwidth; docs/runs says how far measurements were from them. `needs` is what --set takes
so that all requests of a batch are sparse, and fit beside the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from scripts.shared.command import explained, make_parser
from scripts.shared.models import find_config, model_config
from scripts.shared.report import table
from scripts.shared.systems import System, parse_assignments
from sglang_ext import compat
from sglang_ext.flags import (
    CACHE_RANK_FIELDS,
    CacheRankFlags,
    choose_schedule,
    make_config,
    rotary_type,
)
from sglang_ext.planning import GPUS, DecoderSizes, Planner

TENSOR_PARALLEL = 2
"""The GPUs that a cache rank and the model take together."""


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Read a command line; ends if it is wrong."""
    parser = make_parser("plan", __doc__)
    add = parser.add_argument
    add("--model-path", "--model", dest="model", default="qwen3-8b", metavar="MODEL",
        help="a folder, a repository whose files are here, or a shape that is built in; "
        "default: qwen3-8b")  # fmt: skip
    add("--quantization", choices=["fp8"], help="of the weights; default: the model's own")
    add("--gpu", choices=list(GPUS), default="H200", help="both are such; default: H200")
    add("--gpus", type=int, choices=[TENSOR_PARALLEL], default=TENSOR_PARALLEL,
        help="GPUs of either system; default: 2")  # fmt: skip
    add("--contexts", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072],
        metavar="TOKENS", help="tokens of each request")  # fmt: skip
    add("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], metavar="REQUESTS",
        help="requests at once")  # fmt: skip
    add("--set", type=explained(parse_assignments), default={}, dest="settings",
        metavar="NAME=VALUE,...",
        help="arguments of the server with a cache rank that are not as by default")  # fmt: skip
    options = parser.parse_args(argv)
    if min(*options.contexts, *options.batches) < 1:
        parser.error("--contexts and --batches: must be 1 or more")
    settings = System("cache-rank", changes=options.settings).server_changes
    wishes = options.model, settings, options.quantization, options.gpu
    try:
        options.planner, options.flags = make_planner(*wishes)
    except ValueError as error:
        parser.error(str(error))
    return options


def make_planner(
    model: str, settings: Mapping[str, Any], quantization: str | None = None, gpu: str = "H200"
) -> tuple[Planner, dict[str, Any]]:
    """Estimates for a model, and all arguments of the server that are ours, by field.

    Args:
        model: a folder, a repository, or the name of a shape.
        settings: arguments of the server, by field, that are not as by default.
        quantization: of the weights; None is the model's own.
        gpu: of GPUS.

    Raises:
        ValueError: there is no such model, it cannot be estimated, or a setting is wrong.
    """
    if unknown := settings.keys() - {*CACHE_RANK_FIELDS}:
        raise ValueError(f"no argument {', '.join(sorted(unknown))} of a cache rank")
    config = read_config(model)
    sizes = DecoderSizes.of_config(config, quantization)
    defaults = compat.default_values(CacheRankFlags)
    flags = {name: defaults[name] for name in CACHE_RANK_FIELDS} | dict(settings)
    flags["query_predictor"], flags["layers_per_group"], _ = choose_schedule(
        flags["query_predictor"],
        flags["layers_per_group"],
        flags["forecast_lead"],
        architecture=(config.get("architectures") or [""])[0],
        rotary_type=rotary_type(config),
        sparse_layers=sizes.layers - flags["dense_layers"],
    )
    shape = sizes.shape(flags["dense_layers"])
    policy = make_config(flags, shape, flags["max_sparse_requests"])
    planner = Planner(sizes, GPUS[gpu], policy, flags["dense_layers"])
    return planner, flags


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a model that is here, or in a repository.

    Raises:
        ValueError: there is none.
    """
    if find_config(model) is None and model.count("/") == 1:
        from transformers import PretrainedConfig

        try:
            return dict(PretrainedConfig.get_config_dict(model)[0])
        except OSError as error:
            raise ValueError(str(error).splitlines()[0]) from None
    return model_config(model)


def plan(options: argparse.Namespace) -> str:
    """The tables, as text."""
    planner: Planner = options.planner
    share = options.flags["cache_rank_mem_fraction"]
    held = planner.cache_rank_tokens(share)
    rows = [
        _row(options, batch, context, held)
        for context in options.contexts
        for batch in options.batches
    ]
    header = ("batch × context", "step, ms", "hidden", "tensor parallel, ms", "× faster", "needs")
    memory = (
        f"The cache rank holds {held:,} tokens. A pool of plain SGLang holds about "
        f"{planner.dense_tokens():,} on one GPU, as that beside a cache rank does with "
        f"--inference-kv full, and {planner.dense_tokens(options.gpus, kv_bytes=1):,} in FP8 on "
        f"{options.gpus}."
    )
    parts = [table(header, rows), memory]
    if options.contexts[-1] >= options.flags["sparse_threshold"]:
        parts.append(planner.summary(options.contexts[-1], options.gpus, share))
    return "\n\n".join(parts)


def _row(options: argparse.Namespace, batch: int, context: int, held: int) -> list[str]:
    """A line of the table; no step of ours if the requests stay dense, or are not held."""
    planner: Planner = options.planner
    flags = options.flags
    theirs = planner.dense(batch, context, options.gpus, kv_bytes=1)
    label, milliseconds = f"{batch} × {context:,}", f"{1e3 * theirs:.2f}"
    is_dense = context < flags["sparse_threshold"]
    if is_dense or batch * context > held:
        why = "stays dense" if is_dense else "does not fit"
        return [label, "–", why, milliseconds, "–", ""]
    ours = planner.cache_rank(batch, context)
    needs = []
    if batch > flags["max_sparse_requests"]:
        needs.append(f"max_sparse_requests={batch}")
    if flags["inference_kv"] == "full" and batch * context > planner.dense_tokens():
        needs.append("inference_kv=working-set")
    return [
        label,
        f"{1e3 * ours.step:.2f}",
        "yes" if ours.is_hidden else "no",
        milliseconds,
        f"{theirs / ours.step:.2f}",
        ",".join(needs),
    ]


def main() -> None:
    """Print the plan."""
    print(plan(parse_options()))


if __name__ == "__main__":
    main()

"""Estimate how long a decode step takes, and how much fits, before anything is started.

    python -m sglang_ext.plan --model-path Qwen/Qwen3-8B
    python -m sglang_ext.plan --model-path DIR --quantization fp8 --gpu H100 --contexts 16384 \\
        --kv-residency bf16 --sparse-budget 1024

Compares a cache rank beside a GPU with plain SGLang, tensor parallel over the same two GPUs with an
FP8 cache. Needs no GPU, and of the model only its config.json. Estimates are by bytes over
bandwidth; docs/guide.md, under "Sizing", says how near they are. The flags of the cache rank are
those of a server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from sglang_ext import compat
from sglang_ext.command_line import make_parser, table
from sglang_ext.flags import (
    CACHE_RANK_FIELDS,
    CONFIG_KEYS,
    CacheRankFlags,
    add_flags,
    choose_schedule,
    make_config,
    rotary_type,
)
from sglang_ext.planning import GPUS, TENSOR_PARALLEL, DecoderSizes, Planner


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("plan", __doc__)
    add = parser.add_argument
    add("--quantization", choices=["fp8"], help="of the weights; default: the model's own")
    add("--gpu", choices=list(GPUS), default="H200", help="both are such; default: %(default)s")
    add("--contexts", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072],
        metavar="TOKENS", help="tokens of each request")  # fmt: skip
    add("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], metavar="REQUESTS",
        help="requests at once")  # fmt: skip
    add_flags(parser, CacheRankFlags)
    defaults = compat.default_values(CacheRankFlags)
    parser.set_defaults(**{key: defaults[key] for key in CONFIG_KEYS})
    options = parser.parse_args(argv)
    if min(*options.contexts, *options.batches) < 1:
        parser.error("--contexts and --batches: must be 1 or more")
    return options


def make_planner(options: argparse.Namespace) -> Planner:
    """Estimates for the model and the flags of a command line.

    Raises:
        OSError: the model has no config.json.
        ValueError: the model cannot be estimated, or a flag is wrong.
    """
    config = PretrainedConfig.get_config_dict(options.model_path)[0]
    sizes = DecoderSizes.of_config(config, options.quantization)
    flags: dict[str, Any] = {name: getattr(options, name) for name in CACHE_RANK_FIELDS}
    flags["query_predictor"], flags["layers_per_group"], _ = choose_schedule(
        options.query_predictor,
        options.layers_per_group,
        options.forecast_lead,
        architecture=(config.get("architectures") or [""])[0],
        sparse_layers=sizes.layers - options.dense_layers,
        rotary_type=rotary_type(config),
    )
    shape = sizes.shape(options.dense_layers)
    policy = make_config(flags, shape, options.max_sparse_requests)
    return Planner(sizes, GPUS[options.gpu], policy, options.dense_layers)


def plan(options: argparse.Namespace) -> str:
    """The table, and what is in memory, as text.

    Raises:
        OSError, ValueError: as `make_planner`.
    """
    planner = make_planner(options)
    share = options.cache_rank_mem_fraction
    held = planner.cache_rank_tokens(share)

    def row(batch: int, context: int) -> list[str]:
        theirs = planner.tensor_parallel(batch, context)
        cells = [f"{batch} × {context:,}", "–", "", f"{1e3 * theirs:.2f}", "–"]
        if context < options.sparse_threshold:
            cells[2] = "stays dense"
        elif batch * context > held:
            cells[2] = "does not fit"
        else:
            ours = planner.cache_rank(batch, context)
            cells[1], cells[4] = f"{1e3 * ours.step:.2f}", f"{theirs / ours.step:.2f}"
            cells[2] = "yes" if ours.is_hidden else "no"
        return cells

    rows = [row(batch, context) for context in options.contexts for batch in options.batches]
    header = ("batch × context", "step, ms", "hidden", "tensor parallel, ms", "× faster")
    parts = [
        table(header, rows),
        f"The cache rank holds {held:,} tokens, of {options.max_sparse_requests} requests by "
        f"--max-sparse-requests. A pool of plain SGLang holds about {planner.dense_tokens():,} on "
        "one GPU, which is also what fits beside a cache rank without --inference-kv working-set, "
        f"and {planner.dense_tokens(TENSOR_PARALLEL, kv_bytes=1):,} in FP8 on {TENSOR_PARALLEL}.",
    ]
    if options.contexts[-1] >= options.sparse_threshold:
        parts.append(planner.summary(options.contexts[-1], share))
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Print the plan; the exit status."""
    options = parse_options(argv)
    try:
        print(plan(options))
    except (OSError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

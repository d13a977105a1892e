"""Estimate how long a decode step takes, and how much fits, before anything is started.

    python -m sglang_ext.plan --model-path Qwen/Qwen3-8B
    python -m sglang_ext.plan --model-path DIR --quantization fp8 --gpu H100 --contexts 16384 \\
        --kv-residency bf16 --sparse-budget 1024

Compares dense decode, selection in SGLang's process (inline), and a cache rank on a second GPU, and
with the last plain SGLang, tensor parallel over the same two GPUs with an FP8 cache. Needs no GPU,
and of the model only its config.json. Estimates are by bytes over bandwidth; docs/guide.md, under
"Sizing", says how to read them. Our flags are those of a server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from transformers import PretrainedConfig

from sglang_ext import compat
from sglang_ext.command_line import make_parser, table
from sglang_ext.flag_parser import add_flags
from sglang_ext.flags import (
    CONFIG_KEYS,
    LEAST_SPARSE_TOKENS,
    SPARSE_THRESHOLD,
    CacheRankFlags,
)
from sglang_ext.planning import GPUS, TENSOR_PARALLEL, Planner

ON_GPUS = {"": (1, 2), " TP": (TENSOR_PARALLEL, 1)}
"""How many GPUs SGLang's process has, and how many bytes an element of the KV cache."""

GPUS_TAKEN = {"dense": 1, "inline": 1, "dense TP": TENSOR_PARALLEL, "inline TP": TENSOR_PARALLEL,
              "cache rank": 2}  # fmt: skip
HEADER = ("batch × context", "take", *(f"{name}, ms" for name in GPUS_TAKEN), "hidden")


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("plan", __doc__)
    add = parser.add_argument
    add("--quantization", choices=["fp8"], help="of the weights; default: the model's own")
    add("--gpu", choices=list(GPUS), default="H200", help="both are such; default: %(default)s")
    add("--contexts", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    add("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    add_flags(parser, CacheRankFlags)
    defaults = compat.default_values(CacheRankFlags)
    parser.set_defaults(**{key: defaults[key] for key in CONFIG_KEYS})
    options = parser.parse_args(argv)
    if min(*options.contexts, *options.batches) < 1:
        parser.error("--contexts and --batches must be at least 1")
    return options


def plan(options: argparse.Namespace) -> str:
    """The table, and what is in memory, as text.

    Raises:
        OSError: the model has no config.json.
        ValueError: the model cannot be estimated, or a flag is wrong.
    """
    config = PretrainedConfig.get_config_dict(options.model_path)[0]
    planner = Planner(GPUS[options.gpu], config, options.quantization, vars(options))
    held = planner.cache_rank_tokens(options.cache_rank_mem_fraction)
    sparse_from = options.sparse_threshold or LEAST_SPARSE_TOKENS
    # Without the flag steps are dense that selection would not make shorter.
    anyway_from = options.sparse_threshold or sys.maxsize
    if options.inference_kv == "working-set":
        anyway_from = options.sparse_threshold or SPARSE_THRESHOLD

    def row(batch: int, context: int) -> tuple[str, ...]:
        inference, cache = planner.cache_rank(batch, context)
        hidden = "yes" if cache <= inference else "no"
        steps, room = dict[str, float](), dict[str, int]()
        for name, of_gpus in ON_GPUS.items():
            dense = steps[f"dense{name}"] = planner.dense(batch, context, *of_gpus)
            room[f"dense{name}"] = planner.dense_tokens(*of_gpus)
            if context < sparse_from:
                continue
            inline = planner.inline(batch, context, *of_gpus)
            steps[f"inline{name}"] = inline if options.sparse_threshold else min(inline, dense)
            room[f"inline{name}"] = planner.inline_tokens(*of_gpus)
        exchanged = max(inference, cache)
        is_shorter = context >= sparse_from and exchanged < steps["dense"]
        if is_shorter or context >= anyway_from:
            steps["cache rank"], room["cache rank"] = exchanged, held
        else:
            hidden = "stays dense"
        if batch * context > held:
            hidden = "does not fit"
        fitting = {name: step for name, step in steps.items() if batch * context <= room[name]}
        shown = (f"{1e3 * fitting[name]:.2f}" if name in fitting else "–" for name in GPUS_TAKEN)
        take = min(fitting, key=lambda name: fitting[name] * GPUS_TAKEN[name], default="–")
        return f"{batch} × {context:,}", take, *shown, hidden

    rows = [row(batch, context) for context in options.contexts for batch in options.batches]
    on_both = planner.dense_tokens(TENSOR_PARALLEL, kv_bytes=1)
    return (
        f"{table(HEADER, rows)}\n\n"
        "Take: what decodes the most tokens a second for each GPU. TP is tensor parallel over "
        f"{TENSOR_PARALLEL} GPUs with an FP8 KV cache. A cache rank takes a second GPU.\n\n"
        f"The cache rank holds {held:,} tokens, of {options.max_sparse_requests} requests by "
        f"--max-sparse-requests. A pool of plain SGLang holds about {planner.dense_tokens():,} on "
        "one GPU, which is also what fits beside a cache rank without --inference-kv working-set, "
        f"{planner.inline_tokens():,} with sketches; in FP8 on {TENSOR_PARALLEL} GPUs {on_both:,}, "
        f"and {planner.inline_tokens(TENSOR_PARALLEL, 1):,} with sketches."
    )


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

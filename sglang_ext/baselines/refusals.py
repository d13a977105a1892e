"""What cannot be had together with a synchronous baseline."""

from __future__ import annotations

import torch

from sglang_ext.baselines.selection import QUEST_PAGE
from sglang_ext.flags import CacheRankFlags
from sglang_ext.refusals import PLAIN, Refusal


def page_size(args: CacheRankFlags) -> int:
    """The page size of a baseline's KV pool: Quest's own, which SGLang can have only on a GPU."""
    return QUEST_PAGE if args.decode_mode == "quest" and args.on_gpu else 1


REFUSALS = (
    Refusal(
        "--decode-mode --cache-rank-gpus",
        "this mode selects on the inference rank",
        "add --cache-rank-gpus 0, or drop --decode-mode",
        lambda args: args.cache_rank_gpus != 0,
    ),
    Refusal(
        "--decode-mode",
        "this mode attends by FlashAttention-3, which SGLang has from Ampere to Hopper",
        PLAIN,
        lambda args: args.on_gpu and torch.cuda.get_device_capability()[0] not in (8, 9),
    ),
    Refusal(
        "--decode-mode --inference-kv",
        "this mode keeps every token on the inference rank",
        "drop --inference-kv",
        lambda args: args.inference_kv == "working-set",
    ),
    Refusal(
        "--decode-mode --page-size",
        lambda args: f"what this mode selects together makes the page size {page_size(args)}",
        "drop --page-size",
        lambda args: args.page_size not in (None, page_size(args)),
    ),
    Refusal(
        "--decode-mode --enable-memory-saver",
        "what this mode keeps beside the KV pool is not released with it",
        "drop --enable-memory-saver",
        lambda args: args.enable_memory_saver,
    ),
)
"""These rows are of a server with one of the modes, beside the rows of every server."""

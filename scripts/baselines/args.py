"""The arguments of a server that decodes by a baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from sglang.srt.arg_groups.arg_utils import A, Arg

from scripts.baselines.selection import QUEST_PAGE
from sglang_ext import compat, refusals
from sglang_ext.refusals import UnsupportedError, models, refuse, servers
from sglang_ext.server_args import CacheRankServerArgs

BACKEND = "baseline"
"""The name under which SGLang knows the decode attention backend."""


@compat.record
class BaselineServerArgs(CacheRankServerArgs):
    """SGLang's arguments, those of a working set, and the mode; there is no cache rank.

    There is no threshold: a request attends to everything while it has no more tokens than sinks,
    selected and recent ones add up to.
    """

    cache_rank_gpus: A[int, Arg(help="0: these modes select on the inference rank.")] = 0
    decode_mode: A[
        Literal["quest", "window", "tova", "oracle"], Arg(help="How sparse layers decode.")
    ] = "quest"

    def _resolve(self, let_sglang: Callable[[], None]) -> None:
        refusals.refuse_untested_sglang(self)
        if self.has_cache_rank:
            raise UnsupportedError("a baseline has no cache rank: pass --cache-rank-gpus 0.")
        if self.on_gpu and torch.cuda.get_device_capability()[0] not in (8, 9):
            raise UnsupportedError(
                "baselines attend by FlashAttention-3, which SGLang has from Ampere to Hopper."
            )
        refuse(self, servers.sparse_decode(self))
        refuse(self, refusals.of_flags(self, servers.EXCHANGE_FLAGS))
        servers.refuse_out_of_range(self)
        self._set("disable_radix_cache", True, "a baseline has to see every token prefilled")
        # SGLang's CPU engine has pages of one token.
        page = QUEST_PAGE if self.decode_mode == "quest" and self.on_gpu else 1
        self._set("page_size", page, "what is selected together")
        self._set_for_device()
        self._set("decode_attention_backend", BACKEND, "selection by the current query")
        let_sglang()
        refuse(self, models.sparse_decode(self))

"""What SGLang's registry of speculative algorithms knows of ours."""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ext.flags import ALGORITHM

_WORKER = "sglang_ext.drafts.worker:DraftWorker"
"""Found where a model runs: arguments are read without SGLang's layers, which it brings."""


class DraftsBySelection(CustomSpecAlgo):
    """The algorithm, with what SGLang's scheduler asks of one beside what the base class has."""

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def supports_mixed_chunk(self) -> bool:
        return False

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        device, *others = args
        return FutureMap(device, self, *others, **kwargs)


@functools.cache
def register() -> None:
    """Make the algorithm known to SGLang, in every process that reads arguments or runs a model."""

    def worker(server_args: Any) -> type:
        return pkgutil.resolve_name(_WORKER)

    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DraftsBySelection)(
        worker
    )

"""What we keep of SGLang's requests, on the requests themselves, wherever tokens are selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

DenseReason = Literal[
    "prefill",
    "below_threshold",
    "not_shorter",
    "asked",
    "cache_rank_losses",
    "down",
    "max_sparse_requests",
    "cache_rank_memory",
    "shipping",
    "warming",
]
"""Why a request attends to everything; docs/guide.md says what each means."""


@dataclasses.dataclass(slots=True)
class RequestStatistics:
    """What the response reports of one request, over all its sequences; see docs/guide.md."""

    sparse_steps: int = 0
    dense_reason: DenseReason | None = "prefill"
    attended_tokens: int = 0
    tokens_shipped: int = 0
    late_steps: int = 0
    stale_steps: int = 0
    retractions: int = 0
    wire_drafts: int = 0
    wire_drafts_accepted: int = 0


def asks_to_stay_dense(request: Any) -> bool:
    """Whether the `custom_params` of a request say so."""
    custom = request.sampling_params.custom_params
    return isinstance(custom, dict) and custom.get("cache_rank") is False


def prepare_requests(requests: Sequence[Any]) -> None:
    """Give SGLang's Req objects the attributes that outlive a sequence."""
    for request in requests:
        if not hasattr(request, "cache_rank_statistics"):
            request.cache_rank_statistics = RequestStatistics()
            request.cache_rank_losses = 0
            request.cache_rank_kv_is_gone = False
            request.cache_rank_dense_tokens = None
            request.cache_rank_dense_reasons = set()
            request.cache_rank_sparse_from = None

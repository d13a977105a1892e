"""How what a response reports of its request travels: beside each token of a step's output."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from sglang_ext.request_state import RequestStatistics, prepare_requests
from sglang_ext.requests.bodies import CACHE_RANK

_NAMES = [field.name for field in dataclasses.fields(RequestStatistics)]

values_of = operator.attrgetter(*_NAMES)
"""The values of statistics, in the order of their names."""


def report(result: Any, requests: list[Any]) -> None:
    """Let a step's result carry what responses report so far, one entry a request."""
    prepare_requests(requests)
    info = result.logits_output.customized_info or {}
    info[CACHE_RANK] = [values_of(request.cache_rank_statistics) for request in requests]
    result.logits_output.customized_info = info


def report_all(request: Any) -> None:
    """Give a request entries for the tokens that it has before its first step here."""
    prepare_requests([request])
    entries = [values_of(request.cache_rank_statistics)] * len(request.output_ids)
    request.customized_info = {CACHE_RANK: entries}


def repeat(requests: list[Any], result: Any) -> None:
    """Add an entry for each token of a round but the last, whose entry SGLang adds itself.

    It finds the entries of the tokens that it sends by the number of those that it has sent.
    """
    statistics = result.logits_output.customized_info[CACHE_RANK]
    for request, own, tokens in zip(requests, statistics, result.accept_lens.tolist(), strict=True):
        if not request.finished() and not request.is_retracted:
            request.customized_info[CACHE_RANK].extend([own] * (tokens - 1))


def summary(per_token: list[tuple[int | float | str | None, ...] | None]) -> dict[str, Any]:
    """Return by name what the last token of a request that has statistics says."""
    last = next((values for values in reversed(per_token) if values is not None), None)
    return dict(zip(_NAMES, last or values_of(RequestStatistics()), strict=True))

"""A first token, which the prefill server has computed, does not wait for K and V."""

from __future__ import annotations

from typing import Any


def release(scheduler: Any, request: Any, token: int) -> bool:
    """Stream a first token, unless the request ends with it or wants more than tokens.

    SGLang is told of it when all K and V are there, and does not send it twice.

    Returns:
        Whether it is new, and others are to follow.
    """
    if request.output_ids or getattr(request, "pd_rebootstrap_forced_output_id", None) is not None:
        return False  # it was prefilled again, and goes on where it was
    request.output_ids.append(token)
    goes_on = not ends(request)
    if goes_on and request.stream and not request.return_logprob:
        scheduler.output_streamer.stream_output([request], return_logprob=False)
    request.output_ids.pop()
    return goes_on


def ends(request: Any) -> bool:
    """Whether a request ends with its last token, or has to; SGLang finds that out again."""
    if request.to_finish is not None:
        return True
    request.update_finish_state()
    is_last = bool(request.finished())
    request.finished_reason = request.finished_len = None
    return is_last

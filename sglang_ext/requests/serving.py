"""What surrounds SGLang's serving of requests, in the process that speaks HTTP."""

from __future__ import annotations

import logging
import re
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import HTTPException

from sglang_ext.reports import summary
from sglang_ext.requests import heed_body, refuse_request
from sglang_ext.requests.bodies import CACHE_RANK, note_wish
from sglang_ext.requests.bounds import Limits

logger = logging.getLogger(__name__)

SAMPLE = "-sample-"
"""Between the name of a request and what tells its samples apart."""

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError)
"""What code raises that is given values of other types, sizes or lengths than it expects."""


async def read_body(original: Callable[..., Awaitable[bytes]], request: Any) -> bytes:
    """Read the body of a request, and note what it asks of the cache rank."""
    body = await original(request)
    try:
        note_wish(body)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    return body


async def generate(
    original: Callable[..., AsyncIterator[Any]],
    manager: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> AsyncIterator[Any]:
    """Refuse what cannot be served, and turn per-token statistics into one summary."""
    server, model = manager.server_args, manager.model_config
    labels = frozenset(getattr(server, "tokenizer_metrics_allowed_custom_labels", None) or ())
    half = None if server.disaggregation_mode == "null" else server.disaggregation_mode
    limits = Limits(model.vocab_size, model.context_len, labels, half)
    refuse_request(request, limits, getattr(server, "is_sparse", False))
    heed_body(request)
    has_begun, said = False, dict[int, dict[str, Any]]()
    try:
        async for output in original(manager, request, *args, **kwargs):
            has_begun = True
            for item in output if isinstance(output, list) else [output]:
                meta = item.get("meta_info") or {}
                if isinstance(entries := meta.get(CACHE_RANK), list):
                    which = item.get("index", 0)
                    if entries or which not in said:  # tokens may have no entries of their own
                        said[which] = summary(entries)
                    meta[CACHE_RANK] = said[which]
            yield output
    except HTTPException as error:
        if "Grammar accept_token failed" not in str(error.detail):
            raise
        raise ValueError("no token of this model keeps to the grammar of the request") from error
    except _UNREADABLE as error:
        if has_begun:
            raise
        logger.exception("A request cannot be read.")
        raise ValueError(_blame(error)) from error


def answer_error(
    original: Callable[..., Any],
    serving: Any,
    message: str,
    err_type: str = "BadRequestError",
    status_code: int = 400,
    param: str | None = None,
) -> Any:
    """Answer 400 where SGLang answers 500 to values that it has not expected in a request."""
    error = sys.exc_info()[1]
    if status_code == 500 and isinstance(error, _UNREADABLE):
        message, err_type, status_code = _blame(error), "BadRequestError", 400
    return original(serving, message, err_type, status_code, param)


def answer_exceptions(app: Any) -> None:
    """Let SGLang's HTTP application answer 400 to a request that its own code cannot read."""

    async def answer(request: Any, error: Exception) -> Any:
        logger.error("A request cannot be read.", exc_info=error)
        message = str(error) if isinstance(error, ValueError) else _blame(error)
        return await app.exception_handlers[HTTPException](request, HTTPException(400, message))

    for kind in (ValueError, *_UNREADABLE):
        app.add_exception_handler(kind, answer)


def name_sample(original: Callable[..., Any], request: Any) -> Any:
    """Name a sample of a request after it, so that it is found when the request is aborted."""
    if not isinstance(request.rid, str):
        return original(request)
    request.rid = f"{request.rid.partition(SAMPLE)[0]}{SAMPLE}{uuid.uuid4().hex}"
    return request.rid


def abort_samples(
    original: Callable[..., None], manager: Any, rid: str = "", *args: Any, **kwargs: Any
) -> None:
    """Abort a request, or all of its samples: SGLang knows these by names of their own."""
    of_request = re.compile(rf"{re.escape(rid)}(_\d+)?{SAMPLE}")
    samples = [name for name in manager.rid_to_state if rid and of_request.match(name)]
    for name in samples or [rid]:
        original(manager, name, *args, **kwargs)


def _blame(error: Exception) -> str:
    return f"the request holds what cannot be read: {type(error).__name__}: {error}"

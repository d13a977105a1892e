"""What a request may not ask for: what would end or stall SGLang, and what we could not read."""

from __future__ import annotations

from typing import Any

from sglang_ext.flags import WIRE_CODES, WIRE_DRAFTS, WIRE_FORMATS
from sglang_ext.requests.bodies import CACHE_RANK, is_misspelt, wish_of_body
from sglang_ext.requests.bounds import (
    MOST_SAMPLES,
    NOBODY,
    ONE_A_PROMPT,
    SET_BY_SGLANG,
    Limits,
    request_bounds,
    sampling_bounds,
)
from sglang_ext.requests.patterns import refuse_patterns

_NOT_TOKENS = ("input_embeds", "positional_embed_overrides")
"""What a prompt may be made of beside tokens, by which alone prompts are told apart."""


def refuse_request(request: Any, limits: Limits, is_sparse: bool) -> None:
    """Refuse a request of any of SGLang's APIs, alone or a batch.

    Args:
        request: SGLang's GenerateReqInput or EmbeddingReqInput, not yet normalized.

    Raises:
        ValueError: the request says what cannot be served; clients get its text with a 400.
    """
    prompts = _prompts(request)
    input_ids = getattr(request, "input_ids", None)
    if input_ids:
        for ids in input_ids if isinstance(input_ids[0], list) else [input_ids]:
            _refuse_ids(ids, limits.vocabulary)
    for name in _NOT_TOKENS if is_sparse else ():
        if getattr(request, name, None) is not None:
            raise ValueError(f"{name}: a server with sparse decode takes tokens; send input_ids")
    for name in ONE_A_PROMPT:
        _refuse_other_lengths(name, getattr(request, name, None), prompts)
    for name, bound in request_bounds(limits).items():
        value = getattr(request, name, None)
        for one in value if name in ONE_A_PROMPT and isinstance(value, list) else [value]:
            bound.check(name, one)
    if limits.half is not None:
        _refuse_meetings(request, limits.half, prompts)
    params = getattr(request, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        if one is not None:
            _refuse_params(one, limits, prompts or 1, is_sparse)


def heed_body(request: Any) -> None:
    """Give a request what its HTTP body asks of the cache rank, which some APIs drop."""
    wish = wish_of_body.get()
    if wish is None or not hasattr(request, "sampling_params"):
        return
    params = request.sampling_params or {}
    asked = [
        {**one, "custom_params": {CACHE_RANK: wish, **(one.get("custom_params") or {})}}
        for one in (params if isinstance(params, list) else [params])
    ]
    request.sampling_params = asked if isinstance(params, list) else asked[0]


def _prompts(request: Any) -> int | None:
    """Count the prompts of a batch; None is a single request."""
    text = getattr(request, "text", None)
    if text is not None:
        return len(text) if isinstance(text, list) else None
    for name in ("input_ids", "input_embeds"):
        values = getattr(request, name, None)
        if values:
            deep = values[0] if name == "input_ids" else next(iter(values[0]), None)
            return len(values) if isinstance(deep, list) else None
    return None


def _refuse_ids(ids: Any, vocabulary: int) -> None:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError("input_ids must be lists of integers")
    if not ids:
        raise ValueError("input_ids: each prompt of a batch must have a token")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"input_ids: {token} is not a token; those of this model go from 0 to "
                f"{vocabulary - 1}"
            )


def _refuse_other_lengths(name: str, value: Any, prompts: int | None) -> None:
    if not isinstance(value, list):
        return
    if prompts is None:
        raise ValueError(f"{name}: a request of one prompt takes one value, not a list")
    if len(value) != prompts:
        raise ValueError(f"{name}: {len(value)} values for {prompts} prompts; give one for each")


def _refuse_meetings(request: Any, half: str, prompts: int | None) -> None:
    """Refuse rooms in which two halves of a disaggregation would not meet."""
    given = (getattr(request, name, None) for name in ("bootstrap_host", "bootstrap_room"))
    hosts, rooms = (
        value if isinstance(value, list) else [value] * (prompts or 1) for value in given
    )
    for host, room in zip(hosts, rooms, strict=True):
        if room == 0 and host != NOBODY:  # SGLang's metadata has it for no room
            raise ValueError("bootstrap_room must be 1 or more")
        if half == "decode" and room is not None and not (isinstance(host, str) and host):
            raise ValueError("bootstrap_host must name the prefill server that has the room")


def _refuse_params(params: Any, limits: Limits, prompts: int, is_sparse: bool) -> None:
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params must be an object, got {params!r:.80}")
    for name in params:
        if name in SET_BY_SGLANG or is_misspelt(name):
            raise ValueError(f"{name} is not a sampling parameter")
    if is_sparse and (params.get("beam_width") or 1) != 1:
        raise ValueError(
            "beam_width: sparse decode cannot follow beams; drop it, or ask a server with "
            "--cache-rank-gpus 0"
        )
    for name, bound in sampling_bounds(limits).items():
        bound.check(name, params.get(name))
    refuse_patterns(params.get("stop_regex"))
    samples = params.get("n", 1)
    if samples is None:
        raise ValueError("n must be an integer; leave it out for one sample")
    if samples > 1 and samples * prompts > MOST_SAMPLES:
        raise ValueError(
            f"n: {samples} samples of {prompts} prompts; one request may ask for "
            f"{MOST_SAMPLES} samples in all"
        )
    custom = params.get("custom_params") or {}
    for name in custom:
        if is_misspelt(name):
            raise ValueError(f"custom_params.{name}: did you mean {CACHE_RANK}?")
    codes = custom.get(WIRE_CODES)
    if codes is not None and codes not in WIRE_FORMATS:
        raise ValueError(
            f"custom_params.{WIRE_CODES} must be one of {', '.join(WIRE_FORMATS)}, "
            f"got {codes!r:.80}"
        )
    for name in (WIRE_DRAFTS, CACHE_RANK):
        wanted = custom.get(name)
        if wanted is not None and not isinstance(wanted, bool):
            raise ValueError(f"custom_params.{name} must be true or false, got {wanted!r:.80}")

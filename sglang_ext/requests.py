"""What a request may not ask for: what would end SGLang's scheduler, and what we could not read."""

from __future__ import annotations

from typing import Any

CACHE_RANK = "cache_rank"
"""The key of what is ours: in `custom_params`, `meta_info` and `/server_info`."""

_NOT_TOKENS = ("input_embeds", "positional_embed_overrides")
"""What a prompt may be made of beside tokens, by which alone the cache rank tells prompts apart."""

_COUNTS = ("max_new_tokens", "min_new_tokens")


def refuse_request(request: Any, vocabulary: int, has_cache_rank: bool) -> None:
    """Refuse a request of any of SGLang's APIs, alone or a batch.

    Args:
        request: SGLang's GenerateReqInput or EmbeddingReqInput.
        vocabulary: how many token ids the model has.
        has_cache_rank: whether the server has one.

    Raises:
        ValueError: the request says what cannot be served; clients get its text with a 400.
    """
    input_ids = getattr(request, "input_ids", None) or []
    for ids in input_ids if isinstance(next(iter(input_ids), None), list) else [input_ids]:
        _refuse_ids(ids, vocabulary)
    for name in _NOT_TOKENS if has_cache_rank else ():
        if getattr(request, name, None) is not None:
            raise ValueError(f"{name}: a server with a cache rank takes tokens; send input_ids")
    params = getattr(request, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        if isinstance(one, dict):
            _refuse_params(one)
            if has_cache_rank and wants_beams(one):
                raise ValueError(
                    "beam_width: a cache rank cannot follow beams; drop it, or ask a server with "
                    "--cache-rank-gpus 0"
                )


def wants_beams(params: dict[str, Any]) -> bool:
    """Whether sampling parameters ask for a search with several beams."""
    return (params.get("beam_width") or 1) != 1


def _refuse_ids(ids: Any, vocabulary: int) -> None:
    if not ids:
        return
    if not all(type(token) is int for token in ids):
        raise ValueError("input_ids must be lists of integers")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"input_ids: {token} is not a token; those of this model go from 0 to "
                f"{vocabulary - 1}"
            )


def _refuse_params(params: dict[str, Any]) -> None:
    for name in _COUNTS:
        count = params.get(name)
        if count is not None and (type(count) is not int or count < 0):
            raise ValueError(f"{name} must be an integer, 0 or more, got {count!r}")
    custom = params.get("custom_params")
    if custom is not None and not isinstance(custom, dict):
        raise ValueError(f"custom_params must be an object, got {custom!r}")
    wanted = (custom or {}).get(CACHE_RANK)
    if wanted is not None and not isinstance(wanted, bool):
        raise ValueError(f"custom_params.{CACHE_RANK} must be true or false, got {wanted!r}")

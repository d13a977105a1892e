"""Requests that would end the scheduler, or that we could not read, are refused in a sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.requests import CACHE_RANK, refuse_request
from sglang_ext.requests.bounds import NOBODY, Limits

# After ours, which makes SGLang importable without a GPU.
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # isort: skip

LIMITS = Limits(vocabulary=300, context=2048)
CUSTOM = "custom_params"


def refuse(is_sparse: bool = True, half: str | None = None, **request: Any) -> None:
    refuse_request(SimpleNamespace(**request), LIMITS._replace(half=half), is_sparse)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"input_ids": None, "text": "a"},
        {"input_ids": []},
        {"input_ids": [0, 299]},
        {"input_ids": [[0, 1], [299]]},
        *(
            {"sampling_params": params}
            for params in (
                None,
                {"max_new_tokens": None, "min_new_tokens": 3},
                {CUSTOM: {"other": "anything"}},
                {CUSTOM: {CACHE_RANK: None}},
                {CUSTOM: {CACHE_RANK: True}},
                {CUSTOM: {"wire_codes": "hack", "wire_drafts": False}},
            )
        ),
        {"text": ["a", "b"], "sampling_params": [{}, {CUSTOM: {CACHE_RANK: False}}]},
    ],
    ids=str,
)
def test_what_can_be_served_is(request_: dict[str, Any]) -> None:
    refuse(**request_)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"input_ids": [[5], [5, 10**9]]}, "input_ids: 1000000000 is not a token"),
        ({"input_ids": [[5], []]}, "input_ids: each prompt of a batch must have a token"),
        ({"input_ids": [True]}, "input_ids must be lists of integers"),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"min_new_tokens": []}]},
            "min_new_tokens .* got ",
        ),
        ({"sampling_params": {CUSTOM: "a"}}, "custom_params must be an object, got 'a'"),
        ({"sampling_params": {CUSTOM: {CACHE_RANK: 0}}}, "must be true or false, got 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(request_: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse(**request_)


def test_a_beam_search_is_refused_with_a_cache_rank() -> None:
    beams: dict[str, Any] = {"sampling_params": {"beam_width": 2}}
    refuse(sampling_params={"beam_width": 1})
    refuse(is_sparse=False, **beams)
    with pytest.raises(ValueError, match=r"^beam_width: .* --cache-rank-gpus 0"):
        refuse(**beams)


@pytest.mark.parametrize("name", ["input_embeds", "positional_embed_overrides"])
def test_embeddings_are_refused_where_tokens_are_needed(name: str) -> None:
    refuse(is_sparse=False, **{name: [[0.5]]})
    with pytest.raises(ValueError, match=f"{name}: .* send input_ids"):
        refuse(is_sparse=True, **{name: [[0.5]]})


MEETING: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 7}


@pytest.mark.parametrize(
    ("half", "request_", "said"),
    [
        ("decode", {"bootstrap_host": None}, "bootstrap_host must name the prefill server"),
        ("decode", {"text": ["a", "b"], "bootstrap_host": ["x", None]}, "bootstrap_host must name"),
        ("decode", {"bootstrap_room": 0}, "bootstrap_room must be 1 or more"),
        ("prefill", {"text": ["a", "b"], "bootstrap_room": [7, 0]}, "bootstrap_room must be 1"),
        ("prefill", {"top_logprobs_num": 129}, "top_logprobs_num must be an integer from 0 to 128"),
    ],
)
def test_half_of_a_disaggregation_refuses_what_would_end_or_stall_it(
    half: str, request_: dict[str, Any], said: str
) -> None:
    refuse(**MEETING | request_)
    refuse(half=half, **MEETING)
    with pytest.raises(ValueError, match=said):
        refuse(half=half, **MEETING | request_)


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_half_that_warms_up_meets_nobody(half: str) -> None:
    assert NOBODY == FAKE_BOOTSTRAP_HOST
    refuse(half=half, bootstrap_host=NOBODY, bootstrap_room=0)

"""What each field of a request may hold, in two tables: of requests, and of sampling parameters.

A value beyond them ends SGLang's scheduler, stalls every other request, or has no meaning.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_SAMPLES = 4096
"""The samples of all prompts of one request; SGLang sends them to its scheduler one by one."""

MOST_ALTERNATIVES = 256
"""The most likely tokens that come with each token of a prompt or an answer."""

MOST_SENT_ALTERNATIVES = 128
"""The same between two halves of a disaggregation: SGLang has room for so many."""

NOBODY = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST, for requests that warm up half of a disaggregation."""

INT32 = 2**31 - 1
INT64 = 2**63 - 1

LARGEST_BIAS = 1e30
"""A logit that has been given it is finite in every floating-point type of the models' range."""


class Limits(NamedTuple):
    """What requests may ask of a model."""

    vocabulary: int
    """How many token ids it has."""

    context: int
    """How many tokens a prompt and its answer may have."""

    labels: frozenset[str] = frozenset()
    """What clients may call their requests in metrics."""

    half: str | None = None
    """`prefill` or `decode` for a server that does only that, else None."""


class Bound(NamedTuple):
    """What a field may hold; null always stands for its default."""

    what: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        """Refuse a value.

        Raises:
            ValueError: the field must not hold it.
        """
        if value is not None and not self.holds(value):
            raise ValueError(f"{name} must be {self.what}, got {reprlib.repr(value)}")


def integer(least: int, most: int) -> Bound:
    return Bound(
        f"an integer from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float, most: float) -> Bound:
    return Bound(  # not-a-number is in no range
        f"a number from {least:g} to {most:g}",
        lambda value: type(value) in (int, float) and least <= value <= most,
    )


def listed(item: Bound) -> Bound:
    """Lists of items; SGLang drops null."""
    return Bound(
        f"a list, each of it {item.what}",
        lambda value: (
            isinstance(value, list) and all(one is None or item.holds(one) for one in value)
        ),
    )


def either(one: Bound, other: Bound) -> Bound:
    return Bound(
        f"{one.what}, or {other.what}", lambda value: one.holds(value) or other.holds(value)
    )


def by_token(item: Bound, vocabulary: int) -> Bound:
    """Objects of a value for each of some tokens, which JSON writes as strings."""

    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(
            str(token).isdecimal() and int(token) < vocabulary and item.holds(one)
            for token, one in value.items()
        )

    return Bound(f"an object of tokens below {vocabulary}, each with {item.what}", holds)


def structured(fields: dict[str, Bound]) -> Bound:
    """Objects whose fields, where they are given, hold what they may."""

    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(
            value.get(name) is None or bound.holds(value[name]) for name, bound in fields.items()
        )

    return Bound("an object; " + ", ".join(f"{n} is {b.what}" for n, b in fields.items()), holds)


def by_name(names: frozenset[str]) -> Bound:
    """Objects with some of these names, each with a string."""
    return Bound(
        f"an object of strings, named in [{', '.join(sorted(names))}]",
        lambda value: (
            isinstance(value, dict)
            and names.issuperset(value)
            and all(isinstance(one, str) for one in value.values())
        ),
    )


FLAG = Bound("true or false", lambda value: isinstance(value, bool))
TEXT = Bound("a string", lambda value: isinstance(value, str))
OBJECT = Bound("an object", lambda value: isinstance(value, dict))
TEXTS = either(TEXT, listed(TEXT))
COUNT = integer(0, INT32)


ONE_A_PROMPT = (
    "rid",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_hidden_states",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "custom_logit_processor",
    "lora_path",
    "lora_id",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
"""Fields of a request that hold one value for all prompts of a batch, or a list of one for each."""

SET_BY_SGLANG = (
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
)
"""Fields of SamplingParams that SGLang derives from others; nobody else may set them."""


@functools.cache
def request_bounds(limits: Limits) -> dict[str, Bound]:
    """Return the bounds of the fields of GenerateReqInput and EmbeddingReqInput."""
    position = integer(0, limits.context)
    tokens = listed(integer(0, limits.vocabulary - 1))
    positions = listed(position)
    return {
        "rid": TEXT,
        # Log-probabilities.
        "return_logprob": FLAG,
        "logprob_start_len": integer(-1, limits.context),
        "top_logprobs_num": integer(
            0, MOST_SENT_ALTERNATIVES if limits.half else MOST_ALTERNATIVES
        ),
        "token_ids_logprob": either(tokens, listed(tokens)),
        "multi_item_delimiter_indices": either(positions, listed(positions)),
        "token_indices_to_pool": either(positions, listed(positions)),
        # Prompts and what is thought of them.
        "max_thinking_tokens": position,
        "routed_experts_start_len": position,
        "session_params": structured(
            {
                "id": TEXT,
                "rid": TEXT,
                "offset": integer(-1, limits.context),
                "replace": FLAG,
                "drop_previous_output": FLAG,
            }
        ),
        "dimensions": integer(1, INT32),
        "custom_labels": by_name(limits.labels),
        # Where and when a request is computed.
        "priority": integer(-INT32, INT32),
        "routed_dp_rank": COUNT,
        "data_parallel_rank": COUNT,
        "disagg_prefill_dp_rank": COUNT,
        "decode_tp_size": COUNT,
        "bootstrap_port": COUNT,
        "bootstrap_room": integer(0, INT64),
    }


@functools.cache
def sampling_bounds(limits: Limits) -> dict[str, Bound]:
    """Return the bounds of the fields of SamplingParams."""
    return {
        # How many tokens.
        "max_new_tokens": COUNT,
        "min_new_tokens": COUNT,
        "n": integer(1, MOST_SAMPLES),
        "beam_width": integer(1, MOST_ALTERNATIVES),
        "stream_interval": integer(1, INT32),
        # How they are drawn.
        "temperature": number(0, 1e6),
        "top_p": number(0, 1),
        "top_k": integer(-1, 2**30),
        "min_p": number(0, 1),
        "frequency_penalty": number(-2, 2),
        "presence_penalty": number(-2, 2),
        "repetition_penalty": number(1e-3, 2),
        "logit_bias": by_token(number(-LARGEST_BIAS, LARGEST_BIAS), limits.vocabulary),
        "sampling_seed": integer(-INT64, INT64),
        # What ends them.
        "stop": TEXTS,
        "stop_token_ids": listed(integer(0, limits.vocabulary - 1)),
        "stop_regex": TEXTS,
        "ignore_eos": FLAG,
        "no_stop_trim": FLAG,
        # What they are made to be, and how they are written.
        "json_schema": TEXT,
        "regex": TEXT,
        "ebnf": TEXT,
        "structural_tag": TEXT,
        "skip_special_tokens": FLAG,
        "spaces_between_special_tokens": FLAG,
        "custom_params": OBJECT,
    }

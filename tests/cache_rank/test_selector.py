"""All sequences of a cache rank at once, against one synchronous reference a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import msgspec
import pytest
import torch
from modelled_request import Computed, Request, assert_refused
from served_selector import CPU, Served, load_bases, load_projections
from small_models import FORECAST, GQA, MODELS, small_config, with_rotary
from torch import Tensor

from cache_rank.graphs import CudaGraphCache
from cache_rank.kernels.select.reference import EMPTY
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import NO_SEQUENCE, Row

PROMPTS = (1, 45, PAGE_TOKENS - 3, PAGE_TOKENS + 44)
"""Short, usual, crossing into a second page, and beyond it."""


def decode_together(served: Served, **weights: dict[int, Tensor]) -> list[Request]:
    """Requests of any length, whose references get some weights, in batches of some of them."""
    requests = [
        served.arrive(sequence_id, prompt) for sequence_id, prompt in enumerate(PROMPTS, start=1)
    ]
    for request in requests:
        vars(request.reference).update(weights)
    for batch in (
        *([requests] * 4),
        requests[::-1],
        requests[1:2],  # the others skip a step
        [requests[2], requests[0]],
        requests[1:],
        [requests[3], requests[0], requests[2]],
    ):
        served.decode(batch)
    assert int(served.selector.overflow) > 0
    return requests


@pytest.mark.parametrize(
    ("model", "predictor", "layers_per_group"),
    [("mha", "last", 1), ("gqa", "spade", 2), ("gqa", "last", 3), ("mqa", "spade", 2)],
)
def test_a_step_of_rows_of_any_length_equals_the_reference_row_by_row(
    model: str, predictor: str, layers_per_group: int
) -> None:
    config = small_config(
        with_rotary(MODELS[model], interleaved=model == "gqa"),
        query_predictor=predictor,
        layers_per_group=layers_per_group,
        checksum=True,
    )
    decode_together(Served(config))


@pytest.mark.parametrize(
    ("model", "layers_per_group", "lead", "rotary", "is_fitted"),
    [
        ("mha", 2, 1, True, False),
        ("gqa", 1, 2, True, True),
        ("gqa", 1, 2, True, False),
        ("mqa", 2, 2, False, True),
        ("gqa", 4, 1, True, True),
    ],
)
def test_forecasts_select_for_the_step_itself_and_the_first_groups_for_the_next(
    model: str, layers_per_group: int, lead: int, rotary: bool, is_fitted: bool
) -> None:
    shape = FORECAST[model]
    if rotary:
        shape = with_rotary(shape, interleaved=model == "gqa")
    config = small_config(
        shape,
        query_predictor="forecast",
        forecast_lead=lead,
        layers_per_group=layers_per_group,
        checksum=True,
    )
    served = Served(config)
    first = 0 if is_fitted else lead * layers_per_group
    projections = load_projections(served, first)
    requests = decode_together(served, projections=projections)
    # Weights may change in the middle of a request.
    projections.update(load_projections(served, first, seed=1))
    for _ in range(3):
        served.decode(requests)


@pytest.mark.parametrize("predictor", ["last", "forecast"])
def test_rows_fill_as_many_slots_as_their_lengths_ask_for(predictor: str) -> None:
    config = small_config(
        FORECAST["gqa"],
        query_predictor=predictor,
        layers_per_group=1,
        sparse_budget=16,
        budget_factor=1,
        least_budget=2,
        checksum=True,
    )
    served = Served(config)
    projections = load_projections(served, first=0) if predictor == "forecast" else {}
    requests = [
        served.arrive(sequence_id + 1, prompt) for sequence_id, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        request.reference.projections = projections
    for _ in range(12):
        served.decode(requests)
    filled = [served.selector.sequences[request.sequence_id].filled for request in requests]
    assert filled == [3, 7, 16, 16]  # roots of 13, 57, 265 and 312, at most 16


class Seen(CudaGraphCache):
    """It captures nothing, and remembers for what it was asked, but for where messages are."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.keys: list[Hashable] = []

    def run(self, key: Any, *actions: Callable[[], None]) -> None:
        self.keys.append(tuple(part for part in key if type(part) is not int))
        super().run(key, *actions)


def test_what_was_captured_before_projections_came_is_not_replayed_after() -> None:
    config = small_config(FORECAST["gqa"], query_predictor="forecast", layers_per_group=1)
    served = Served(config)
    request = served.arrive(1, prompt=45)
    keys = []
    for _ in range(2):
        served.selector._graphs = seen = Seen()
        served.exchange([request.row], [request.compute()])
        keys.append(seen.keys)
        load_projections(served, first=0)
    changed = [one != other for one, other in zip(*keys, strict=True)]
    assert changed == [
        message.selects_for is not None and not message.same_step
        for message in config.layer_messages
    ]
    assert any(changed)


@pytest.mark.parametrize(
    ("model", "bits", "normalizer"),
    [("mha", 1, "attended"), ("gqa", 2, "attended"), ("gqa", 2, "all"), ("mqa", 4, "all")],
)
def test_scores_of_sketches_are_those_of_the_reference(
    model: str, bits: int, normalizer: str
) -> None:
    """Whatever is shipped: it comes from the format beside them."""
    config = small_config(
        msgspec.structs.replace(MODELS[model], head_dim=32),
        score_keys="sketch",
        sketch_bits=bits,
        score_normalizer=normalizer,
        checksum=True,
    )
    served = Served(config)
    decode_together(served, bases=load_bases(served))


@pytest.mark.parametrize("model", MODELS)
def test_tokens_shipped_in_8_bits_are_the_same_tokens_rounded(model: str) -> None:
    served = Served(small_config(MODELS[model], wire_dtype="int8"))
    requests = decode_together(served)
    assert max(request.filled for request in requests) == served.config.sparse_budget


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_refused_row_changes_nothing(place: int) -> None:
    served = Served(small_config(checksum=True))
    bystander = served.arrive(1, 40)
    requests = [served.arrive(2, 30), served.arrive(3, 280)]
    served.decode([bystander, *requests])
    selector = served.selector
    sequence = selector.sequences[1]
    before = dataclasses.asdict(sequence)
    slot_map = selector.slot_map(sequence, range(3)).clone()
    for bad in (bystander.row, Row(77, 0), Row(1, 2**40), Row(NO_SEQUENCE, -1)):
        tensors = [request.compute() for request in requests]
        rows = [request.row for request in requests]
        garbage = Computed(*(torch.full_like(part, float("nan")) for part in tensors[0]))
        rows.insert(place, bad)
        tensors.insert(place, garbage)
        answers = served.exchange(rows, tensors, refused={place})
        assert_refused(answers, place)
        del tensors[place]
        live = [index for index in range(3) if index != place]
        for request, computed, index in zip(requests, tensors, live, strict=True):
            request.choose(*computed)
            served.check(request, index, answers)
        assert dataclasses.asdict(sequence) == before
        assert torch.equal(selector.slot_map(sequence, range(3)), slot_map)
    served.decode([bystander, *requests])


def test_a_poisoned_row_leaves_its_batch_mates_alone() -> None:
    served = Served(small_config(query_predictor="spade"))
    healthy, poisoned = served.arrive(1, 30), served.arrive(2, 30)
    for step in range(8):
        tensors = [request.compute() for request in (healthy, poisoned)]
        if step == 2:
            for part in tensors[1]:
                part.fill_(float("nan"))
        rows = [healthy.row, poisoned.row]
        answers = served.exchange(rows, tensors)
        healthy.choose(*tensors[0])
        served.check(healthy, 0, answers)
        poisoned.position += 1
    served.end(poisoned)
    # Whoever takes its slot and pages is healthy.
    successor = served.arrive(3, 30)
    for _ in range(8):
        served.decode([successor, healthy])


def test_slots_and_pages_of_ended_sequences_are_used_again() -> None:
    served = Served(small_config(checksum=True), pages=4)
    selector = served.selector
    lasting = served.arrive(1, 20)
    slots, pages = set(), set()
    for sequence_id in range(2, 6):
        request = served.arrive(sequence_id, 2 * PAGE_TOKENS - 4)
        sequence = selector.sequences[sequence_id]
        assert (selector.slot_map(sequence, range(3)) == EMPTY).all()
        for _ in range(5):  # into a third page
            served.decode([lasting, request])
        slots.add(sequence.slot)
        pages.update(sequence.pages)
        assert len(sequence.pages) == 3
        assert selector.pages.free == 0
        served.end(request)
        assert not selector.end(sequence_id)
        assert selector.pages.free == 3
        assert sequence_id not in selector.sequences
    assert len(slots) == 1
    assert len(pages) == 3
    served.end(lasting)
    assert selector.pages.free == 4
    assert (selector.tokens_held, selector.bytes_held) == (0, 0)


def test_it_is_full_when_every_slot_is_taken() -> None:
    config = small_config(max_rows=3)
    served = Served(config)
    requests = []
    for sequence_id in range(1, 4):
        assert not served.selector.is_full
        requests.append(served.arrive(sequence_id, 10))
    assert served.selector.is_full
    assert len({sequence.slot for sequence in served.selector.sequences.values()}) == 3
    served.end(requests[1])
    assert not served.selector.is_full


@pytest.mark.parametrize("worst", [True, False], ids=["all-just-begun-a-page", "one-large"])
def test_what_fits_by_capacity_fits_however_it_is_divided(worst: bool) -> None:
    config = small_config(max_rows=4)
    served = Served(config, pages=12)
    selector = served.selector
    assert selector.capacity_tokens == 8 * PAGE_TOKENS
    first = [2 * PAGE_TOKENS + 1] * 3 if worst else [1] * 3
    counts = [*first, selector.capacity_tokens - sum(first)]
    model = config.model
    for sequence_id, count in enumerate(counts, start=1):
        shape = (2, model.layers, count, model.kv_heads, model.head_dim)
        selector.load(selector.begin(sequence_id), torch.zeros(shape, dtype=model.torch_dtype))
    assert selector.tokens_held == selector.capacity_tokens
    assert selector.bytes_held >= selector.capacity_tokens * model.bytes_per_token
    assert selector.bytes_held <= 12 * PAGE_TOKENS * model.bytes_per_token


def test_overflow_counts_tokens_that_waited() -> None:
    """With a margin that lets no token fall, 8 slots fill at 3 a step: 5, then 2 tokens wait."""
    served = Served(small_config(hysteresis=1000))
    requests = [served.arrive(sequence_id, 50 + 10 * sequence_id) for sequence_id in (1, 2, 3)]
    heads = GQA.layers * GQA.kv_heads * 3
    for waited in (5, 7, 7, 7):
        served.decode(requests)
        assert int(served.selector.overflow) == waited * heads

"""`mosaickv`: what is held however tokens arrive, what scores read, and the memory it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mosaickv_sequence import DENSE, SHORT, Held, Immediately, drifting
from served_selector import Served
from small_models import GQA, MHA, MODELS, small_config

from cache_rank.kernels.score.reference import score_tokens


@given(data=st.data())
def test_codes_and_scores_are_the_same_bits_however_tokens_arrive(data: st.DataObject) -> None:
    size = st.one_of(st.just(1), st.integers(2, 70), st.integers(200, 700))
    sizes = data.draw(st.lists(size, min_size=1, max_size=6))
    model = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    tokens = drifting(model, sum(sizes))
    held, whole = Held.empty(tokens, model, **SHORT), Held.whole(tokens, model, **SHORT)
    for count in sizes:
        if count == 1:
            held.append()
        else:
            held.load(count)
    assert held.codes() == whole.codes()
    assert torch.equal(held.read(), whole.read())
    queries = held.queries()
    assert torch.equal(held.score(queries), whole.score(queries))


class WhenAsked(Future[Any]):
    """The thread is so slow that whoever needs its result waits for all of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def result(self, timeout: float | None = None) -> Any:
        return self._function()


class AtLast(Executor):
    """Nothing happens before the result is asked for."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return WhenAsked(lambda: function(*args, **kwargs))


@pytest.mark.parametrize("executor", [Immediately, AtLast])
def test_nothing_depends_on_how_long_the_thread_takes(executor: type[Executor]) -> None:
    tokens = drifting(MHA, 1200)
    held, other = (Held.empty(tokens, **SHORT) for _ in range(2))
    held.residency._memory.executor = executor()  # type: ignore[assignment]
    queries = held.queries()
    for count in (300, 200, 90, 31, 1, 1, 200, 377):
        for one in (held, other):
            one.load(count)
        assert held.codes() == other.codes()
        assert torch.equal(held.score(queries), other.score(queries))


def test_the_thread_is_another_and_a_step_does_not_wait_before_the_result_is_due() -> None:
    held = Held.empty(drifting(MHA, 500), segment=512, threshold=0)
    held.load(383)
    thread, go_on = [], threading.Event()

    def wait() -> None:
        thread.append(threading.current_thread())
        assert go_on.wait(60)

    held.residency._memory.executor.submit(wait)
    held.append()  # the segment of 128 tokens ends, and its own strategy waits for `wait`
    before = held.read()
    while held.resident < 384 + 64 - 1:
        held.append()
    assert torch.equal(held.read()[..., :384, :], before)
    go_on.set()
    held.append()
    assert not torch.equal(held.read()[..., 256:384, :], before[..., 256:, :])
    assert thread[0] is not threading.current_thread()


@pytest.mark.parametrize(
    ("model", "count"), [("mha", 1), ("gqa", 31), ("mqa", 256), ("gqa", 300), ("mha", 1200)]
)
def test_all_elements_of_all_channels_are_dense_but_for_rounding(model: str, count: int) -> None:
    shape = MODELS[model]
    held = Held.whole(drifting(shape, count), shape, segment=512, **DENSE)
    eps = torch.finfo(shape.torch_dtype).eps
    for found, source in zip(held.read(), held.tokens, strict=True):
        assert (found.float() - source.float()).abs().max() <= 8 * eps * source.float().abs().max()
    queries = held.queries()
    expected = score_tokens(queries, held.tokens[0], shape.scale)
    torch.testing.assert_close(held.score(queries), expected, rtol=16 * eps, atol=64 * eps)


@pytest.mark.parametrize("count", [40, 300, 1500])
def test_scores_are_those_of_the_decoded_keys(count: int) -> None:
    held = Held.whole(drifting(MHA, count), **SHORT)
    queries = held.queries()
    expected = score_tokens(queries, held.read()[0], MHA.scale)
    torch.testing.assert_close(held.score(queries), expected, rtol=1e-4, atol=1e-4)


@given(
    model=st.sampled_from(sorted(MODELS)),
    kind=st.sampled_from(("constant", "zero", "large", "tiny", "outlier channel", "outlier token")),
    count=st.integers(250, 800),
)
def test_channels_of_any_kind_are_served(model: str, kind: str, count: int) -> None:
    shape = MODELS[model]
    tokens = drifting(shape, count).float()
    largest = torch.finfo(shape.torch_dtype).max / 100
    if kind == "constant":
        tokens = torch.ones_like(tokens) * 3
    elif kind == "zero":
        tokens = torch.zeros_like(tokens)
    elif kind == "large":
        tokens = (tokens.sign() * largest).clamp(-1e36, 1e36)
    elif kind == "tiny":
        tokens *= 1e-6
    elif kind == "outlier channel":
        tokens[..., 3] *= 1000
    else:
        tokens[..., count // 2, :] *= 1000
    held = Held.whole(tokens.to(shape.torch_dtype), shape, **SHORT)
    found = held.read()
    assert found.isfinite().all()
    if kind in ("constant", "zero"):  # one direction, which any strategy keeps
        torch.testing.assert_close(found, held.tokens, rtol=0.02, atol=0)
    scores = held.score(held.queries())
    assert (scores <= 0).all()


def test_a_sequence_that_has_ended_leaves_its_strategies_to_others() -> None:
    """More sequences of a slot than there are strategies, one after another."""
    held = Held.empty(drifting(MHA, 600), **SHORT)
    free = len(held.residency._memory.free_rows)
    for turn in range(free // 2):
        held.load(600)
        assert len(held.residency._memory.free_rows) < free
        if turn % 2:  # else it is taken to have ended when another begins
            held.residency.end(held.slot)
            assert held.residency._segments == {}
            assert len(held.residency._memory.free_rows) == free
        held.resident = 0


def test_selections_are_those_of_the_synchronous_reference_where_nothing_is_lost() -> None:
    """Through the end of a segment, and the step from which its own rotation serves."""
    shape = msgspec.structs.replace(GQA, dtype="float32")
    config = small_config(
        shape,
        kv_residency="mosaickv",
        kv_residency_options={**DENSE, "segment": 512, "threshold": 0},
    )
    served = Served(config)
    request = served.arrive(1, prompt=350)
    for _ in range(110):
        row, computed = request.row, request.compute()
        request.choose(*computed)
        answers = served.exchange([row], [computed])
        for layers, down in zip(config.groups, answers, strict=True):
            request.apply(layers, down.slots[0], down.keys[0], down.values[0])
        served.check_slots(request)
    for layer in range(shape.layers):
        index = torch.tensor(request.reference.slots[layer])
        for head, tokens in enumerate(index):
            for held, source in (
                (request.keys, request.reference.keys),
                (request.values, request.reference.values),
            ):
                torch.testing.assert_close(
                    held[layer, head], source[layer][head, tokens], rtol=1e-4, atol=1e-4
                )

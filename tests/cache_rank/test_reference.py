"""The synchronous reference against dense attention, and its choice of tokens against the rules."""

from __future__ import annotations

import pytest
import torch
from modelled_request import Request
from small_models import MODELS, small_config
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.reference import SynchronousReference

UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def append(request: Request) -> Tensor:
    """The next token joins every layer; returns its queries (layers, Hq, D)."""
    computed = request.compute()
    for layer, of_layer in enumerate(zip(*computed[:3], strict=True)):
        request.reference.append(layer, *of_layer)
    return computed.queries


def select(request: Request) -> None:
    for layer in range(request.config.model.layers):
        request.reference.select(layer, request.position)
    request.position += 1


def attention(reference: SynchronousReference, layer: int, query: Tensor, position: int) -> Tensor:
    """Softmax attention over the attended tokens in float64: (Hq, D)."""
    model = reference.config.model
    group = model.query_heads // model.kv_heads
    outputs = []
    for head, vector in enumerate(query.double()):
        kept = torch.tensor(reference.attended(layer, head // group, position))
        keys = reference.keys[layer][head // group, kept].double()
        values = reference.values[layer][head // group, kept].double()
        outputs.append((keys @ vector * model.scale).softmax(-1) @ values)
    return torch.stack(outputs)


def tolerance(reference: SynchronousReference, layer: int, query: Tensor) -> float:
    """Logits are sums of D products; softmax and the sum over tokens round in proportion."""
    model = reference.config.model
    keys, values = reference.keys[layer].float(), reference.values[layer].float()
    largest = float(query.float().norm(dim=-1).max() * keys.norm(dim=-1).max()) * model.scale
    tokens = keys.shape[1]
    relative = 2 * (model.head_dim + 4) * largest + 2 * tokens
    return relative * UNIT_ROUNDOFF * float(values.abs().max())


@pytest.mark.parametrize("budget", [8, 100], ids=["sparse", "dense"])
@pytest.mark.parametrize("model", MODELS)
def test_attention_is_that_of_the_attended_tokens_alone(model: str, budget: int) -> None:
    """With a budget beyond the length, these are all tokens."""
    config = small_config(MODELS[model], sparse_budget=budget, max_swap_tokens=budget)
    request = Request(config, 1, prompt=30)
    reference = request.reference
    append(request)
    select(request)
    for _ in range(10):
        for layer, query in enumerate(append(request)):
            attended = reference.attended(layer, 0, request.position)
            assert (attended == list(range(request.position + 1))) == (budget == 100)
            found = reference.attend(layer, query, request.position)
            expected = attention(reference, layer, query, request.position)
            assert found.dtype == torch.float32
            assert (found - expected).abs().max() <= tolerance(reference, layer, query)
        select(request)


@pytest.mark.parametrize(
    ("sinks", "recent", "budget", "prompt"),
    [
        (2, 4, 8, 30),
        (0, 4, 8, 30),
        (2, 0, 8, 30),
        (0, 0, 8, 30),
        (5, 3, 4, 1),  # starts inside the sinks
        (1, 10, 4, 5),  # starts inside the recent window
        (2, 4, 1, 30),
    ],
)
def test_attends_to_sinks_slots_recent_tokens_and_the_current_one(
    sinks: int, recent: int, budget: int, prompt: int
) -> None:
    config = small_config(sink_tokens=sinks, recent_tokens=recent, sparse_budget=budget)
    request = Request(config, 1, prompt)
    reference, filled = request.reference, 0
    for _ in range(15):
        append(request)
        position = request.position
        anyway = {*range(min(sinks, position + 1)), *range(max(0, position - recent), position + 1)}
        for layer in range(config.model.layers):
            for kv_head in range(config.model.kv_heads):
                attended = reference.attended(layer, kv_head, position)
                slots = reference.slots[layer][kv_head]
                chosen = {token for token in slots if token is not None}
                assert len(chosen) == filled, "not as the configuration says"
                assert attended == sorted(set(attended)), "not ascending, or a token twice"
                assert set(attended) == chosen | anyway
                assert not chosen & anyway, "a slot is wasted"
        filled = config.filled_after(position, filled)
        select(request)


def test_constant_queries_settle_on_the_exact_top_tokens() -> None:
    """With `last` and no margin, the same query again and again leaves nothing to exchange."""
    config = small_config(query_predictor="last", hysteresis=0)
    reference, model = Request(config, 1, prompt=60).reference, config.model
    torch.manual_seed(0)
    query = torch.randn(model.query_heads, model.head_dim).to(model.torch_dtype)
    # New keys are zero: no logit, so no competition for tokens with a high one.
    zero = torch.zeros(model.kv_heads, model.head_dim, dtype=model.torch_dtype)
    for position in range(60, 66):
        reference.append(0, query, zero, zero)
        reference.select(0, position)
    group = model.query_heads // model.kv_heads
    candidates = config.candidates_after(65)
    for kv_head in range(model.kv_heads):
        keys = reference.keys[0][kv_head].double()
        heads = query[kv_head * group : (kv_head + 1) * group].double()
        score = (heads @ keys.T * model.scale).softmax(-1).amax(0).tolist()
        exact = sorted(candidates, key=lambda t: (score[t], t), reverse=True)
        assert set(reference.slots[0][kv_head]) == set(exact[: config.sparse_budget])


def test_a_token_within_the_margin_stays_and_one_beyond_it_leaves() -> None:
    model = ModelShape(1, query_heads=1, kv_heads=1, head_dim=2, dtype="float32", scale=1.0)
    config = small_config(
        model,
        query_predictor="last",
        sparse_budget=2,
        hysteresis=1,
        sink_tokens=0,
        recent_tokens=0,
    )
    # The first query ranks tokens 0 1 2 3, the second one 2 3 1 0; decoded tokens come last.
    keys = torch.tensor([[4.0, 1.0], [3.0, 2.0], [2.0, 4.0], [1.0, 3.0]]).view(1, 4, 1, 2)
    reference = SynchronousReference(config, keys, keys)
    last = torch.full((1, 2), -9.0)
    reference.append(0, torch.tensor([[1.0, 0.0]]), last, last)
    reference.select(0, position=4)
    assert reference.slots[0][0] == [0, 1]
    reference.append(0, torch.tensor([[0.0, 1.0]]), last, last)
    reference.select(0, position=5)
    assert reference.slots[0][0] == [2, 1]  # 1 is third of k + margin = 3, and 0 is fourth

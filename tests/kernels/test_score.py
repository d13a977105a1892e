"""Token scoring against a softmax written out for every query head in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.score.reference import score_tokens

UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Heads:
    name: str
    query_heads: int
    kv_heads: int


HEADS = (Heads("mha", 4, 4), Heads("gqa", 6, 2), Heads("mqa", 4, 1), Heads("one-head", 1, 1))


def naive_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The best log-probability that any query head of a group gives each token, head by head."""
    layers, query_heads, _ = queries.shape
    _, kv_heads, tokens, _ = keys.shape
    group = query_heads // kv_heads
    scores = torch.full((layers, kv_heads, tokens), -torch.inf).double()
    for layer in range(layers):
        for head in range(query_heads):
            kv_head = head // group
            logits = keys[layer, kv_head].double() @ queries[layer, head].double() * scale
            log_probability = logits.softmax(-1).log()
            scores[layer, kv_head] = torch.maximum(scores[layer, kv_head], log_probability)
    return scores


def tolerance(queries: Tensor, keys: Tensor, scale: float) -> float:
    """A logit is a sum of D products; log-sum-exp and the subtraction round at the logits' size."""
    head_dim, tokens = keys.shape[-1], keys.shape[-2]
    largest = float(queries.float().norm(dim=-1).max() * keys.float().norm(dim=-1).max()) * scale
    return UNIT_ROUNDOFF * (2 * (head_dim + 4) * largest + tokens + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 67])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.name)
def test_equals_the_best_log_probability_of_the_group(
    heads: Heads, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    queries = 3 * torch.randn(3, heads.query_heads, 16)
    keys = torch.randn(3, heads.kv_heads, tokens, 16).to(dtype)
    scores = score_tokens(queries, keys, 0.25)
    assert scores.dtype == torch.float32
    assert scores.shape == (3, heads.kv_heads, tokens)
    difference = (scores - naive_scores(queries, keys, 0.25)).abs().max()
    assert difference <= tolerance(queries, keys, 0.25)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.name)
def test_a_single_token_has_all_the_probability(heads: Heads) -> None:
    queries = torch.randn(2, heads.query_heads, 8)
    keys = torch.randn(2, heads.kv_heads, 1, 8)
    assert torch.equal(score_tokens(queries, keys, 1.0), torch.zeros(2, heads.kv_heads, 1))


def test_scores_are_log_probabilities() -> None:
    torch.manual_seed(0)
    queries, keys = 20 * torch.randn(2, 4, 16), torch.randn(2, 2, 50, 16)
    assert (score_tokens(queries, keys, 0.25) <= 0).all()
    alone = score_tokens(queries[:, :2], keys, 0.25)  # one query head a kv head: they sum to 1
    assert (alone.double().exp().sum(-1) - 1).abs().max() <= tolerance(queries, keys, 0.25)


def test_a_head_that_needs_a_token_is_not_outvoted_by_one_with_larger_logits() -> None:
    """The loud head is nearly uniform; the quiet one puts most of its probability on token 3."""
    keys = torch.zeros(1, 1, 8, 2)
    keys[..., 0] = torch.linspace(100.0, 100.1, 8)
    keys[0, 0, 3, 1] = 6.0
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    assert int(score_tokens(queries, keys, 1.0).argmax()) == 3


def test_keys_inside_a_larger_buffer_score_the_same() -> None:
    torch.manual_seed(0)
    queries, buffer = torch.randn(2, 4, 16), torch.randn(2, 2, 64, 16)
    view = buffer[:, :, :37]
    scores = score_tokens(queries, view, 0.25)
    difference = (scores - score_tokens(queries, view.contiguous(), 0.25)).abs().max()
    assert difference <= 2 * tolerance(queries, view, 0.25)


def test_inputs_are_left_as_they_were() -> None:
    queries, keys = torch.randn(1, 2, 8), torch.randn(1, 2, 5, 8)
    before = queries.clone(), keys.clone()
    score_tokens(queries, keys, 1.0)
    assert torch.equal(queries, before[0])
    assert torch.equal(keys, before[1])

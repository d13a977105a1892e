"""Token scoring against a softmax written out for every query head in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.score.reference import score_tokens

UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


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


@pytest.mark.parametrize("tokens", [1, 2, 67])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((4, 4), torch.float32),
        ((6, 2), torch.bfloat16),
        ((4, 1), torch.float16),
        ((1, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_equals_the_best_log_probability_of_the_group(
    heads: tuple[int, int], tokens: int, dtype: torch.dtype
) -> None:
    """With a key for each query head, for some of them, and for all."""
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    queries = 3 * torch.randn(3, query_heads, 16)
    keys = torch.randn(3, kv_heads, tokens, 16).to(dtype)
    scores = score_tokens(queries, keys, 0.25)
    assert scores.dtype == torch.float32
    assert scores.shape == (3, kv_heads, tokens)
    difference = (scores - naive_scores(queries, keys, 0.25)).abs().max()
    assert difference <= tolerance(queries, keys, 0.25)


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

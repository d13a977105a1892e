"""What is scored in the place of sketches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scripts.baselines.drafting import QUEST_PAGE, SELECTORS, Question, Seen

KV_HEADS, GROUP, HEAD_DIM, TOKENS = 2, 3, 8, 37
SCALE = HEAD_DIM**-0.5


@pytest.fixture
def keys() -> Tensor:
    return torch.randn((KV_HEADS, TOKENS, HEAD_DIM), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def queries() -> Tensor:
    """Those of the last tokens of a pass, the newest one wrong: it is at a position to come."""
    shape = (4, KV_HEADS * GROUP, HEAD_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def seen(queries: Tensor) -> Seen:
    return Seen(TOKENS - 3, queries)


def attention(query: Tensor, keys: Tensor) -> Tensor:
    """(Hkv, G, T)."""
    return (query.view(KV_HEADS, GROUP, HEAD_DIM) @ keys.mT * SCALE).softmax(-1)


def test_the_query_scores_by_attention_of_the_head_that_attends_most(
    seen: Seen, keys: Tensor, queries: Tensor
) -> None:
    scores = SELECTORS["exact"](Question(seen, queries[0], keys, SCALE))
    torch.testing.assert_close(scores, attention(queries[0], keys).amax(1))


def test_the_query_before_is_of_the_last_pass_or_of_the_last_draft(
    seen: Seen, keys: Tensor, queries: Tensor
) -> None:
    score = SELECTORS["last-query"]
    found = score(Question(seen, queries[3], keys, SCALE))
    torch.testing.assert_close(found, attention(queries[2], keys).amax(1))
    seen.last_query = queries[1]
    found = score(Question(seen, queries[3], keys, SCALE))
    torch.testing.assert_close(found, attention(queries[1], keys).amax(1))


def test_a_round_is_scored_once_by_what_was_confirmed(
    seen: Seen, keys: Tensor, queries: Tensor
) -> None:
    score = SELECTORS["once-a-round"]
    first = score(Question(seen, queries[3], keys, SCALE))
    expected = sum(attention(query, keys) for query in queries[:3])
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(first, expected.sum(1))
    longer = torch.cat((keys, torch.full_like(keys[:, :1], 100.0)), dim=1)
    later = score(Question(seen, queries[0], longer, SCALE))
    assert torch.equal(later[:, :TOKENS], first)
    assert (later[:, TOKENS] < first.min()).all()  # a draft is no candidate


def test_quest_bounds_the_logits_of_pages(seen: Seen, keys: Tensor, queries: Tensor) -> None:
    scores = SELECTORS["quest"](Question(seen, queries[0], keys, SCALE))
    logits = (queries[0].view(KV_HEADS, GROUP, HEAD_DIM) @ keys.mT).amax(1)
    assert scores.shape == logits.shape
    assert (scores >= logits - 1e-5).all()
    for page in scores.split(QUEST_PAGE, dim=1):
        assert (page == page[:, :1]).all()
    one = keys[:, :1]
    bound = SELECTORS["quest"](Question(seen, queries[0], one, SCALE))
    torch.testing.assert_close(bound, logits[:, :1])  # a page of one token


def test_the_newest_tokens_score_best(seen: Seen, keys: Tensor, queries: Tensor) -> None:
    scores = SELECTORS["newest"](Question(seen, queries[0], keys, SCALE))
    assert (scores.diff(dim=1) > 0).all()

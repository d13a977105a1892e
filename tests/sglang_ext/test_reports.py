"""What responses report travels beside the tokens that it is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext.reports import repeat, report, summary, values_of
from sglang_ext.request_state import RequestStatistics
from sglang_ext.requests.bodies import CACHE_RANK


def request(steps: int, finished: bool = False) -> Any:
    return SimpleNamespace(
        customized_info={CACHE_RANK: ["of the prefill"]},
        finished=lambda: finished,
        is_retracted=False,
        cache_rank_statistics=RequestStatistics(steps),
    )


def test_every_token_of_a_round_has_an_entry() -> None:
    """SGLang adds one entry itself, for requests that go on; other info of a step is kept."""
    output = SimpleNamespace(customized_info={"other": [1]})
    result = SimpleNamespace(logits_output=output, accept_lens=torch.tensor([3, 1, 2]))
    requests = [request(5), request(6), request(7, finished=True)]
    report(result, requests)
    entries = [values_of(RequestStatistics(steps)) for steps in (5, 6, 7)]
    assert output.customized_info == {"other": [1], CACHE_RANK: entries}
    repeat(requests, result)
    found = [each.customized_info[CACHE_RANK][1:] for each in requests]
    assert found == [[entries[0]] * 2, [], []]


def test_the_last_entry_counts() -> None:
    values = tuple(range(9))
    assert list(summary([None, (9,) * 9, values, None]).values()) == list(values)
    assert summary([])["sparse_steps"] == 0

"""What responses report travels beside the tokens that it is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext.reports import repeat, report, summary
from sglang_ext.requests.bodies import CACHE_RANK


def test_every_token_of_a_round_has_an_entry() -> None:
    """SGLang adds one entry itself, for requests that go on."""

    def request(finished: bool = False) -> Any:
        info = {CACHE_RANK: ["of the prefill"]}
        return SimpleNamespace(customized_info=info, finished=lambda: finished, is_retracted=False)

    output = SimpleNamespace(customized_info=None)
    result = SimpleNamespace(logits_output=output, accept_lens=torch.tensor([3, 1, 2]))
    requests = [request(), request(), request(finished=True)]
    report(result, [("a",), ("b",), ("c",)])
    repeat(requests, result)
    found = [each.customized_info[CACHE_RANK][1:] for each in requests]
    assert found == [[("a",)] * 2, [], []]


def test_other_info_of_a_step_is_kept() -> None:
    result = SimpleNamespace(logits_output=SimpleNamespace(customized_info={"other": [1]}))
    report(result, [("a",)])
    assert result.logits_output.customized_info == {"other": [1], CACHE_RANK: [("a",)]}


def test_the_last_entry_counts() -> None:
    values = tuple(range(7))
    assert list(summary([None, (9,) * 7, values, None]).values()) == list(values)
    assert summary([])["sparse_steps"] == 0

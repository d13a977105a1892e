"""What a decode server does with requests whose K and V are still to come."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.disaggregation.arrival_drafts import ArrivalDrafts
from sglang_ext.disaggregation.backend import CodedKVReceiver
from sglang_ext.disaggregation.hooks import after_resuming
from sglang_ext.flags import TRANSFERS

# After ours, which makes SGLang importable without a GPU.
from sglang.srt.disaggregation.base import KVPoll  # isort: skip


@pytest.mark.parametrize("retracted", [0, 1])
def test_prompts_go_on_to_arrive_while_a_retracted_request_waits(retracted: int) -> None:
    asked: list[int] = []
    waiting = [
        SimpleNamespace(kv_receiver=SimpleNamespace(poll=functools.partial(asked.append, number)))
        for number in range(2)
    ]
    scheduler = SimpleNamespace(disagg_decode_transfer_queue=SimpleNamespace(queue=waiting))
    queue = SimpleNamespace(
        scheduler=scheduler,
        retracted_queue=["a request"] * retracted,
        transfer_backend=SimpleNamespace(value=TRANSFERS),
    )
    after_resuming([], queue)
    assert asked == [0, 1] * retracted


def test_a_request_whose_room_another_has_left_has_failed() -> None:
    receiver: Any = object.__new__(CodedKVReceiver)
    receiver._arrival, receiver.conclude_state, receiver.bootstrap_room = None, None, 7
    receiver.kv_mgr = SimpleNamespace(request_status={7: KVPoll.WaitingForInput})
    assert receiver.poll() == KVPoll.WaitingForInput
    del receiver.kv_mgr.request_status[7]
    assert receiver.poll() == receiver.conclude_state == KVPoll.Failed


@pytest.mark.parametrize("beside", [{}, {"lora_id": "adapter"}, {"grammar": "compiled"}], ids=str)
def test_only_what_depends_on_tokens_alone_drafts_early(beside: dict[str, Any]) -> None:
    drafts: Any = object.__new__(ArrivalDrafts)
    drafts._most, drafts._sparse_from = 8, None
    names = "json_schema regex ebnf structural_tag custom_params min_p".split()
    penalties = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
    params = SimpleNamespace(
        **dict.fromkeys(names), **penalties, min_new_tokens=0, max_new_tokens=20
    )
    nothing = {"custom_logit_processor": None, "lora_id": None, "grammar": None}
    request = SimpleNamespace(sampling_params=params, **nothing | beside)
    assert drafts._may_draft(request) is not bool(beside)

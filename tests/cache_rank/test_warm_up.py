"""A cache rank that is open has compiled its kernels: no step waits for another one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import triton
from lone_link import LoneLink
from served_selector import Served
from small_models import small_config

from cache_rank import rank, residency
from cache_rank.config import ModelShape
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Load, Open, Row, Step
from cache_rank.warm_up import warm_up

MODEL = ModelShape(
    5, query_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", scale=64**-0.5, hidden_size=64
)
MEMORY_BYTES = 1 << 30
LENGTHS = (1, 40, 700, 4095, 5000, 33_000, 70_001, 131_071, *range(100, 110))
"""Tokens of the prompts that come one after the other; one grows to more than 128 K."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"wire_dtype": "int8"},
        {"kv_residency": "quantspec", "kv_residency_options": {"reading": 4}},
        {"kv_residency": "hack", "kv_residency_options": {"bits": 4}, "wire_dtype": "int8"},
        {"kv_residency": "lynx"},
        {"kv_residency": "mosaickv"},
        {"query_predictor": "forecast", "forecast_lead": 1},
    ],
    ids=["bf16", "int8", "quantspec", "hack", "lynx", "mosaickv", "forecast"],
)
def test_no_step_compiles_a_kernel(policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "memory_for_tokens", lambda *of: MEMORY_BYTES)
    config = small_config(MODEL, **policy, max_rows=len(LENGTHS))
    link: Any = LoneLink(config)
    opened = rank.CacheRank(Open(config, {}), link, torch.device("cuda"))
    compiled: list[str] = []

    def note(**call: Any) -> None:
        compiled.append(f"{call['fn'].name} with {call['repr']}")

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    positions: dict[int, int] = {}
    number = 0
    as_codes = residency.takes_codes(config)
    for sequence_id, tokens in enumerate(LENGTHS, start=1):
        first, pages = 0, tokens // PAGE_TOKENS * PAGE_TOKENS
        if as_codes and sequence_id % 2 and pages:
            opened.handle(Load(sequence_id, 0, pages, as_codes=True))
            first = pages - (residency.shared_tail(config) or 0)
        opened.handle(Load(sequence_id, first, tokens - first))
        positions[sequence_id] = tokens
        for _ in range(24):
            number += 1
            rows = [Row(sequence_id, position) for sequence_id, position in positions.items()]
            assert opened.step(Step(number, rows)) is None
            positions = {sequence_id: position + 1 for sequence_id, position in positions.items()}
    torch.cuda.synchronize()
    assert compiled == []


@pytest.mark.timeout(60)
def test_steps_of_drafts_warm_up_too_where_even_the_newest_token_competes() -> None:
    config = small_config(MODEL, draft_steps=3, sink_tokens=0, recent_tokens=0)
    served, link = Served(config), cast(Any, None)  # a link is for attention alone
    warm_up(served.selector, served.messages, link, torch.device("cpu"))
    assert not served.selector.sequences

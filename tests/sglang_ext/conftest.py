"""Set up what tests of command lines need."""

from __future__ import annotations

import os

import pytest
from parsed_args import Make, parser

from sglang_ext import cpu, server_args
from sglang_ext.flags import CHECKSUM_VARIABLE
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE
from sglang_ext.server_args import BUNDLED_MODEL, CacheRankServerArgs


@pytest.fixture
def parses_on_a_cpu(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse as on a machine without a GPU."""
    made = parser()
    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    monkeypatch.setattr(server_args, "argument_parser", lambda kind: made)
    for variable in (ALLOW_LARGE_BUDGET_VARIABLE, CHECKSUM_VARIABLE):
        os.environ.pop(variable, None)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make arguments as the user gives them, on a machine without a GPU, and resolve nothing."""
    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    monkeypatch.setattr(CacheRankServerArgs, "_resolve", lambda self, let_sglang: None)
    for variable in [name for name in os.environ if name.startswith("CACHE_RANK_")]:
        monkeypatch.delenv(variable)
    usual = {"model_path": str(BUNDLED_MODEL), "cache_rank_gpus": 1}
    return lambda **fields: CacheRankServerArgs(**{**usual, **fields})

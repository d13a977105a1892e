"""Set up what tests of command lines need."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from parsed_args import Make, parser

from sglang_ext import cpu, server_args
from sglang_ext.flags import CHECKSUM_VARIABLE
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE
from sglang_ext.server_args import BUNDLED_MODEL, CacheRankServerArgs


@pytest.fixture
def parses_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parsing sets up logging and the environment; the tests are of a machine without a GPU."""
    made = parser()
    environment, level = dict(os.environ), logging.root.level
    handlers, logging.root.handlers = logging.root.handlers, []
    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    monkeypatch.setattr(server_args, "argument_parser", lambda kind: made)
    for variable in (ALLOW_LARGE_BUDGET_VARIABLE, CHECKSUM_VARIABLE):
        os.environ.pop(variable, None)
    yield
    os.environ.clear()
    os.environ.update(environment)
    logging.root.handlers = handlers
    logging.root.setLevel(level)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make arguments as the user gives them, on a machine without a GPU, and resolve nothing."""
    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    monkeypatch.setattr(CacheRankServerArgs, "_resolve", lambda self, let_sglang: None)
    for variable in [name for name in os.environ if name.startswith("CACHE_RANK_")]:
        monkeypatch.delenv(variable)
    usual = {"model_path": str(BUNDLED_MODEL), "cache_rank_gpus": 1}
    return lambda **fields: CacheRankServerArgs(**{**usual, **fields})

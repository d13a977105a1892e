"""Set up what tests of command lines need."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from parsed_args import parser

from sglang_ext import cpu, server_args
from sglang_ext.flags import CHECKSUM_VARIABLE
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE


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

"""What a cache rank says of itself while its device is behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import small_config

from cache_rank import rank
from cache_rank.copies import Readback
from cache_rank.protocol import Open, up_sizes


def test_an_overflow_that_is_not_known_yet_is_the_last_that_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "memory_for_tokens", lambda *of: 1 << 22)
    config = small_config()
    sizes = up_sizes(config, config.max_rows)
    link: Any = SimpleNamespace(buffers=[torch.zeros(size, dtype=torch.uint8) for size in sizes])
    opened = rank.CacheRank(Open(config, {}), link, torch.device("cpu"))
    values = iter([None, torch.tensor(5000), None, torch.tensor(5100)])
    monkeypatch.setattr(Readback, "value", lambda self: next(values))
    assert [opened.report(0).overflow_tokens for _ in range(4)] == [0, 5000, 5000, 5100]

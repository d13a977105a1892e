"""Tests of kernels share how few programs they start."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.attend import triton


@pytest.fixture
def few_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes its time for each program, also for one without work."""
    if device.type == "cpu":
        monkeypatch.setattr(triton, "LAUNCH", triton.LAUNCH._replace(most_splits=8))

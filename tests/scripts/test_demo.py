"""What the demo makes of the machine that it finds."""

from __future__ import annotations

import pytest
import torch

from scripts import demo


@pytest.mark.parametrize(
    ("gpus", "environment"), [(0, {}), (1, {"CUDA_VISIBLE_DEVICES": ""}), (2, {})]
)
def test_one_gpu_is_too_few(
    gpus: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert demo.environment() == environment

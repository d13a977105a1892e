"""The logit processor that forces tokens, as SGLang calls it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scripts.language.forcing import ForcedTokens


def parameters(tokens: list[int], file: Path, read: int = 4) -> dict[str, Any]:
    """What SGLang hands over of a request of which it has read so many of 4 prompt tokens."""
    request = SimpleNamespace(
        extend_range=SimpleNamespace(end=read), extend_end=read, origin_input_ids=[0] * 4
    )
    return {"forced": {"tokens": tokens, "file": str(file), "step": 0}, "__req__": request}


def test_tokens_are_forced_and_their_logits_kept_as_they_came(tmp_path: Path) -> None:
    long, short = parameters([3, 1, 0], tmp_path / "long"), parameters([2], tmp_path / "short")
    steps = torch.randn((3, 2, 5), generator=torch.Generator().manual_seed(0))
    best = [step.argmax(-1).tolist() for step in steps]
    found = [ForcedTokens()(step.clone(), [long, short]).argmax(-1).tolist() for step in steps]
    assert found == [[3, 2], [1, best[1][1]], [0, best[2][1]]]
    for row, (name, count) in enumerate((("long", 3), ("short", 1))):
        logits = np.fromfile(tmp_path / name, np.float32).reshape(count, 5)
        assert (logits == steps[:count, row].numpy()).all()


def test_a_chunk_of_a_prompt_forces_nothing(tmp_path: Path) -> None:
    params = parameters([3], tmp_path / "logits", read=2)
    logits = torch.randn((1, 5))
    assert torch.equal(ForcedTokens()(logits.clone(), [params]), logits)
    assert not (tmp_path / "logits").exists()
    params["__req__"].extend_range.end = params["__req__"].extend_end = 4
    assert ForcedTokens()(logits, [params]).argmax(-1).tolist() == [3]

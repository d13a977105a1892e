"""The logit processor that forces tokens, as SGLang calls it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scripts.language.forcing import ForcedTokens


def parameters(tokens: list[int], file: Path | None, read: int = 4) -> dict[str, Any]:
    """What SGLang hands over of a request of which it has read so many of 4 prompt tokens."""
    request = SimpleNamespace(
        extend_range=SimpleNamespace(end=read), extend_end=read, origin_input_ids=[0] * 4
    )
    named = None if file is None else str(file)
    return {"forced": {"tokens": tokens, "file": named, "step": 0}, "__req__": request}


def test_tokens_are_forced_first_and_free_then(tmp_path: Path) -> None:
    kept = parameters([3, 1], tmp_path / "logits")
    short = parameters([2], None)
    free = parameters([], None)
    steps = torch.randn((3, 3, 5), generator=torch.Generator().manual_seed(0))
    best = [step.argmax(-1).tolist() for step in steps]
    found = [
        ForcedTokens()(step.clone(), [kept, short, free]).argmax(-1).tolist() for step in steps
    ]
    assert found[0] == [3, 2, best[0][2]]
    assert found[1] == [1, best[1][1], best[1][2]]
    assert found[2] == best[2]
    # The logits of forced tokens are kept as they came.
    logits = np.fromfile(tmp_path / "logits", np.float32).reshape(2, 5)
    assert (logits == steps[:2, 0].numpy()).all()


def test_a_chunk_of_a_prompt_forces_nothing(tmp_path: Path) -> None:
    params = parameters([3], tmp_path / "logits", read=2)
    logits = torch.randn((1, 5))
    assert torch.equal(ForcedTokens()(logits.clone(), [params]), logits)
    assert not (tmp_path / "logits").exists()
    params["__req__"].extend_range.end = params["__req__"].extend_end = 4
    assert ForcedTokens()(logits, [params]).argmax(-1).tolist() == [3]

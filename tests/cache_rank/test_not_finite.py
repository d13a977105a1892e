"""What cannot be held is said with its place, whichever flag it was noted in."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS

from cache_rank.residency.not_finite import NotFinite

MODEL = MODELS["gqa"]
CPU = torch.device("cpu")


NOTHING = torch.zeros((2, 1, MODEL.kv_heads), dtype=torch.bool)
"""Of one layer."""


def refusing(part: int, head: int) -> torch.Tensor:
    refused = NOTHING.clone()
    refused[part, 0, head] = True
    return refused


@pytest.mark.parametrize(
    ("part", "layer", "head"),
    [("keys", 0, 0), ("keys", 0, 1), ("values", 0, 0), ("values", MODEL.layers - 1, 1)],
)
def test_a_finding_is_said_with_its_place(part: str, layer: int, head: int) -> None:
    """Two streams that note at once in flags of their own lose nothing."""
    found, layers = NotFinite(MODEL, CPU, flags=3), range(layer, layer + 1)
    found.note(1, layers, NOTHING)
    found.check()
    found.note(1, layers, refusing(("keys", "values").index(part), head))
    noted = found.flags.clone()
    for flag in range(3):
        found.note(flag, range(1), NOTHING)
    assert torch.equal(found.flags, noted)
    assert noted.count_nonzero() == 1
    for wait in (False, True):
        with pytest.raises(ValueError, match=f"{part} of layer {layer}, kv head {head} are not"):
            found.check(wait)

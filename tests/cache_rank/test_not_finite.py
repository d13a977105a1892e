"""What cannot be held is said with its place, whichever flag it was noted in."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS

from cache_rank.residency.not_finite import NotFinite

MODEL = MODELS["gqa"]
CPU = torch.device("cpu")


def refusing(part: int, layer: int, head: int) -> torch.Tensor:
    """Of one layer."""
    refused = torch.zeros((2, 1, MODEL.kv_heads), dtype=torch.bool)
    refused[part, 0, head] = True
    return refused


@pytest.mark.parametrize(
    ("part", "layer", "head"),
    [("keys", 0, 0), ("keys", 0, 1), ("values", 0, 0), ("values", MODEL.layers - 1, 1)],
)
def test_a_finding_is_said_with_its_place(part: str, layer: int, head: int) -> None:
    found = NotFinite(MODEL, CPU)
    layers = range(layer, layer + 1)
    found.note(0, layers, torch.zeros((2, 1, MODEL.kv_heads), dtype=torch.bool))
    found.check()
    found.note(0, layers, refusing(("keys", "values").index(part), layer, head))
    for wait in (False, True):
        with pytest.raises(ValueError, match=f"{part} of layer {layer}, kv head {head} are not"):
            found.check(wait)


def test_what_is_noted_in_one_flag_leaves_the_others_alone() -> None:
    """So two streams that note at once in flags of their own lose nothing."""
    found = NotFinite(MODEL, CPU, flags=3)
    found.note(1, range(1, 2), refusing(0, 1, 0))
    noted = found.flags.clone()
    for flag in (0, 2):
        found.note(flag, range(1), torch.zeros((2, 1, MODEL.kv_heads), dtype=torch.bool))
    found.note(1, range(1), torch.zeros((2, 1, MODEL.kv_heads), dtype=torch.bool))
    assert torch.equal(found.flags, noted)
    assert noted.count_nonzero() == 1
    with pytest.raises(ValueError, match="keys of layer 1, kv head 0 are not finite"):
        found.check()

"""AsyncSpade's Eq. 6 to 11 against arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.accuracy import flops
from scripts.accuracy.flops import ModelSize

SMALL = ModelSize(layers=3, hidden=5, query_heads=4, kv_heads=2, head_dim=7, intermediate=11)
SHAPES = Path(__file__).parents[3] / "scripts" / "speed" / "model_shapes"


def qwen3_8b() -> ModelSize:
    return ModelSize.of_config(json.loads((SHAPES / "qwen3-8b" / "config.json").read_text()))


def test_linear_layers() -> None:
    # Eq. 6: 3 (4 * 5 * 4 * 7 + 4 * 2 * 7 * 5 + 6 * 5 * 11) = 3 (560 + 280 + 330)
    assert flops.linear_layers(SMALL) == 3510


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("dense", 3 * 4 * 28 * 320),  # Eq. 7
        ("tova", 3 * (4 * 28 * 50 + 2 * 28 * 320)),  # Eq. 8
        ("oracle", 3 * (4 * 28 * 50 + 2 * 28 * 320)),
        ("quest", 3 * (4 * 28 * 50 + 2 * 28 * 20)),  # Eq. 9
        ("cache-rank", 3 * 4 * 28 * 50),  # Eq. 10
        ("window", 3 * 4 * 28 * 50),
    ],
)
def test_attention(mode: str, expected: int) -> None:
    assert flops.decode_token(SMALL, mode, tokens=320, selected=50) == 3510 + expected  # Eq. 11


def test_dense_layers_attend_to_everything() -> None:
    found = flops.decode_token(SMALL, "quest", tokens=320, selected=50, dense_layers=1)
    assert found == 3510 + 4 * 28 * 320 + 2 * (4 * 28 * 50 + 2 * 28 * 20)


def test_no_more_is_attended_to_than_there_is() -> None:
    dense = flops.decode_token(SMALL, "dense", tokens=40, selected=0)
    assert flops.decode_token(SMALL, "cache-rank", tokens=40, selected=50) == dense


def test_a_published_model() -> None:
    """Qwen3-8B: its linear layers are its weights but for embeddings, twice."""
    model = qwen3_8b()
    assert model == ModelSize(36, 4096, 32, 8, 128, 12288)
    assert flops.linear_layers(model) == 2 * 6_945_767_424
    # At 32 K tokens, attention to all of them costs more than the weights.
    assert flops.attention(model, 32768) > flops.linear_layers(model)

"""Frequencies against SGLang's own table in float32, whatever dtype it has in a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import base, get_rope
from torch import Tensor

from sglang_ext.rotary import Rotary, rotary_of

HEAD_DIM = 128
LONGEST = 4096
BASE = 500_000.0
FACTOR = 4.0
ORIGINAL = 1024  # positions before they were scaled
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": FACTOR},
    "dynamic": {"rope_type": "dynamic", "factor": FACTOR},
    "dynamic with alpha": {"rope_type": "dynamic", "alpha": 1000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn with a factor of attention": {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "attn_factor": 1.5,
        "beta_fast": 16,
        "truncate": False,
    },
}


@pytest.fixture(autouse=True)
def _without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's rotary embeddings can be made outside its processes."""
    monkeypatch.setattr(base, "_is_cpu", not torch.cuda.is_available())
    no_arguments = SimpleNamespace(rl_on_policy_target=None)
    monkeypatch.setattr(base, "get_server_args", lambda: no_arguments, raising=False)


def table(module: Any) -> Tensor:
    return module.cos_sin_cache


def make(
    scaling: dict[str, Any] | None,
    dtype: torch.dtype,
    rotary_dim: int = HEAD_DIM,
    is_neox_style: bool = True,
) -> Any:
    return get_rope(HEAD_DIM, rotary_dim, LONGEST, BASE, is_neox_style, scaling, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_table_of_sglang_in_float32_follows_from_the_frequencies(
    scaling: str, dtype: torch.dtype
) -> None:
    rotary = rotary_of(make(SCALINGS[scaling], dtype))
    own = table(make(SCALINGS[scaling], torch.float32))
    positions = torch.arange(own.shape[0], dtype=torch.float32)
    angles = torch.outer(positions, torch.tensor(rotary.frequency))
    made = torch.cat((angles.cos(), angles.sin()), dim=-1) * rotary.scale
    assert not rotary.interleaved
    # SGLang divides positions by a linear factor, not frequencies: of powers of two it is the same.
    torch.testing.assert_close(made, own, rtol=0, atol=1e-6)


def test_a_part_of_a_head_is_rotated_and_neighbours_are_told() -> None:
    rotary = rotary_of(make(None, torch.bfloat16, rotary_dim=64, is_neox_style=False))
    frequency = BASE ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(
        torch.tensor(rotary.frequency, dtype=torch.float64), frequency, rtol=1e-5, atol=0
    )
    assert rotary.interleaved


def test_a_model_that_rotates_nothing_has_no_frequencies() -> None:
    assert rotary_of(torch.nn.Linear(2, 2)) == Rotary((), False, 1.0)


LONG_AND_SHORT = {
    "rope_type": "longrope",
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [4.0] * (HEAD_DIM // 2),
    "original_max_position_embeddings": ORIGINAL,
}


def test_frequencies_that_depend_on_the_longest_request_are_refused() -> None:
    """SGLang rotates a whole batch by long factors once one of its positions is long."""
    with pytest.raises(ValueError, match="Phi3LongRoPEScaledRotaryEmbedding does not rotate by"):
        rotary_of(make(LONG_AND_SHORT, torch.float32))


def test_an_embedding_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="Gemma4RotaryEmbedding does not rotate by one frequency"):
        rotary_of(make({"rope_type": "proportional"}, torch.float32))


def test_layers_that_rotate_otherwise_than_others_are_refused() -> None:
    layers = torch.nn.ModuleList(make(SCALINGS[name], torch.float32) for name in ("none", "linear"))
    with pytest.raises(ValueError, match="its layers differ in their rotary embedding"):
        rotary_of(layers)
    same = torch.nn.ModuleList(make(SCALINGS["none"], dtype) for dtype in DTYPES)
    assert rotary_of(same) == rotary_of(same[0])

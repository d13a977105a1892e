"""measure_residency on a small model: real cache-rank processes."""

from __future__ import annotations

import pytest

from cache_rank.config import ModelShape
from cache_rank.pages import PAGE_TOKENS
from scripts.formats.measurements import Variant
from scripts.formats.memory import markdown, measure
from scripts.measure_residency import main
from scripts.shared.models import model_config, model_shape

MODEL = ModelShape(8, 8, 8, 128, "bfloat16", 128**-0.5)
TOKENS = 8 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("variant", "bits"),
    [
        pytest.param(Variant("bf16", {}), 16, marks=pytest.mark.thorough),
        (Variant("hack", {"bits": 4}), 4.625),
    ],
)
def test_a_process_holds_and_grows_by_what_the_arithmetic_says(
    variant: Variant, bits: float
) -> None:
    # The allocator keeps copies of a chunk in float32, 4 MB each: of small chunks that is little.
    occupied = measure(MODEL, variant, TOKENS, chunk=64)
    assert occupied.token == bits * occupied.elements / 8
    assert occupied.reported == TOKENS * occupied.token
    held = occupied.reported + occupied.fixed
    assert 0.9 * held < occupied.grown < held + 48e6, "scratch of loading is kept"
    assert f"| {bits:.3f} |" in markdown([occupied])


def test_shapes_are_those_of_the_models() -> None:
    model = model_shape(model_config("qwen3-8b"))
    assert (model.layers, model.query_heads, model.kv_heads, model.head_dim) == (36, 32, 8, 128)
    assert model.bytes_per_token == 147456


@pytest.mark.parametrize(
    ("argument", "message"),
    [("--formats=bf15", "bf15: use some of"), ("--tokens=0", "at least 1"), ("--model=x", "'x'")],
)
def test_what_cannot_be_measured_is_refused(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([argument])
    assert message in capsys.readouterr().err

"""A correction is the ridge solution, and with enough directions it explains what can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibration_cards import make_card
from msgspec.structs import replace
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.kernels.rotary.reference import rotate_to
from sglang_ext.calibration.collecting import KeyCollector
from sglang_ext.calibration.files import (
    Calibration,
    CalibrationError,
    Fit,
    read,
    sources,
    write,
)
from sglang_ext.calibration.fitting import Correction, NormalEquations, fit
from sglang_ext.calibration.key_statistics import KeyBasis, KeyMoments, key_basis

SHAPE = ModelShape(1, 2, 1, 8, "float32", 1.0)


def equations_of(states: Tensor, queries: Tensor) -> NormalEquations:
    equations = NormalEquations(states.T @ states, queries.shape[1])
    for part in (slice(0, 50), slice(50, None)):
        equations.add(states[part], queries[part])
    return equations


@pytest.fixture
def sample() -> tuple[Tensor, Tensor, Tensor]:
    """States (T, H + 1), a projection (H + 1, N) and what it should have been."""
    torch.manual_seed(0)
    states = torch.cat((torch.randn(400, 24), torch.ones(400, 1)), dim=1)
    projection = torch.randn(25, 40)
    true = projection + 0.3 * torch.randn(25, 3) @ torch.randn(3, 40)
    return states, projection, true


def test_it_is_the_ridge_solution(sample: tuple[Tensor, Tensor, Tensor]) -> None:
    states, projection, true = sample
    queries = states @ true + 0.1 * torch.randn(400, 40)
    found = fit(equations_of(states, queries), projection, rank=40, ridge=0.05)
    h, gram = states.double(), states.T.double() @ states.double()
    strength = 0.05 * gram.diagonal().mean()
    residual = h.T @ (queries.double() - h @ projection.double())
    expected = torch.linalg.solve(gram + strength * torch.eye(25).double(), residual)
    torch.testing.assert_close(found.left @ found.right, expected.float(), rtol=1e-3, atol=1e-4)


def test_a_few_directions_explain_what_differs_in_as_many(
    sample: tuple[Tensor, Tensor, Tensor],
) -> None:
    states, projection, true = sample
    equations = equations_of(states, states @ true)
    plain = equations.unexplained(projection)
    shares = [
        equations.unexplained(fit(equations, projection, rank, ridge=1e-6).added_to(projection))
        for rank in (1, 2, 3)
    ]
    assert plain > shares[0] > shares[1] > shares[2]
    assert plain > 0.1
    assert shares[2] == pytest.approx(0, abs=1e-5)


CARD = make_card(
    layers=5,
    query_heads=4,
    kv_heads=2,
    head_dim=10,
    forecast_lead=2,
    texts={"a": "0" * 64},
    fits={
        **{layer: Fit(layer + 2, 1.0, 0.2, 1.0, 0.3, is_before=True) for layer in (1, 2)},
        **{layer: Fit(layer - 2, 0.5, 0.1, 0.6, 0.2) for layer in (3, 4)},
    },
)


def as_written(shape: tuple[int, int]) -> Tensor:
    """Random numbers that bfloat16 can hold."""
    return torch.randn(shape).bfloat16().float()


def calibration() -> Calibration:
    torch.manual_seed(0)
    corrections = {layer: Correction(*map(as_written, ((25, 3), (3, 40)))) for layer in CARD.fits}
    bases = {
        layer: KeyBasis(torch.randn(2, 10, 10), torch.randn(2, 10))
        for layer in range(CARD.dense_layers, CARD.layers)
    }
    return Calibration(CARD, corrections, bases)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = calibration()
    write(tmp_path / "new", written)
    found = read(tmp_path / "new")
    assert found.card == CARD
    for layer, correction in written.corrections.items():
        for part, expected in zip(found.corrections[layer], correction, strict=True):
            assert torch.equal(part, expected)
    for layer, basis in written.bases.items():
        for part, expected in zip(found.bases[layer], basis, strict=True):
            assert torch.equal(part, expected)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "card.json").unlink(), "has no card.json; make one with"),
        (lambda folder: (folder / "card.json").write_text("{}"), "is no card"),
        (lambda folder: (folder / "calibration.safetensors").write_bytes(b"x"), "cannot be read"),
        (
            lambda folder: write(folder, Calibration(replace(CARD, version=9), {}, {})),
            "of version 9",
        ),
        (lambda folder: write(folder, Calibration(CARD, {}, {})), "cannot be read"),
        (
            lambda folder: write(
                folder, calibration()._replace(card=replace(CARD, hidden_size=25))
            ),
            "layer 1 has another shape",
        ),
        (
            lambda folder: write(folder, calibration()._replace(card=replace(CARD, kv_heads=4))),
            "layer 1 has another shape",
        ),
    ],
)
def test_a_folder_that_is_none_is_refused(
    tmp_path: Path, break_it: Callable[[Path], None], message: str
) -> None:
    write(tmp_path, calibration())
    break_it(tmp_path)
    with pytest.raises(CalibrationError, match=message):
        read(tmp_path)


def test_a_basis_spreads_keys_evenly_by_what_queries_ask() -> None:
    torch.manual_seed(0)
    mixed = torch.randn(2, 8, 8) * torch.tensor([3.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.2, 0.1])
    keys = torch.randn(5000, 2, 8) @ torch.randn(8, 8) + torch.randn(2, 8)
    queries = (torch.randn(5000, 2, 3, 8) @ mixed.mT[:, None, :, :].transpose(0, 1)).flatten(1, 2)
    moments = KeyMoments(2, 8, torch.device("cpu"))
    for part in (slice(0, 2000), slice(2000, 5000)):
        moments.add(queries[part], keys[part])
    basis, mean = key_basis(moments)
    torch.testing.assert_close(mean, keys.mean(0), rtol=1e-4, atol=1e-4)
    coded = (keys.transpose(0, 1) - mean[:, None]) @ basis.mT  # (Hkv, T, D)
    moment = coded.mT @ coded / 5000
    torch.testing.assert_close(moment, torch.eye(8).expand(2, 8, 8), rtol=0, atol=0.02)
    # Queries ask the first directions most.
    asked = queries.unflatten(1, (2, 3)).transpose(0, 1).flatten(1, 2) @ torch.linalg.inv(basis)
    squares = asked.square().mean(1)
    assert bool((squares[:, :-1] > squares[:, 1:]).all())


@pytest.mark.parametrize("interleaved", [False, True])
def test_moments_are_of_the_whole_context_wherever_a_text_stands(interleaved: bool) -> None:
    """The last two dimensions turn once in it, and in a text by a tenth at most."""
    context, tokens, first, text = 6283, 11_000, 2000, 600
    frequency = torch.tensor((1.0, 0.1, 0.01, 0.001))
    turning = replace(
        SHAPE, rotary_frequency=(*frequency.tolist(),), rotary_interleaved=interleaved
    )
    slow = [6, 7] if interleaved else [3, 7]
    torch.manual_seed(0)
    content = torch.randn(tokens, 3, 8)
    content[..., slow] += 5
    layer: Any = SimpleNamespace(attention=torch.nn.Identity(), head_dim=8)

    def moments_at(begin: int) -> KeyMoments:
        collector = KeyCollector([layer], 0, turning, context)
        for part in content.split(text):
            positions = begin + torch.arange(len(part))
            turned = rotate_to(part, positions, frequency, interleaved, 1.0)
            batch = SimpleNamespace(
                forward_mode=SimpleNamespace(is_extend=lambda: True), positions=positions
            )
            queries, keys = turned[:, :2].flatten(1), turned[:, 2:].flatten(1)
            collector._on_attention(0, queries, keys, keys, batch)
        return collector.moments[0]

    early, late = moments_at(0), moments_at(first)
    assert early.tokens == late.tokens == tokens
    for one, other in zip(vars(early).values(), vars(late).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=0.5)
    mean = key_basis(early).mean[0]
    assert mean[slow].norm() < 0.1 * 5


def test_moments_of_a_model_that_does_not_rotate_are_those_of_its_text() -> None:
    torch.manual_seed(0)
    layer: Any = SimpleNamespace(attention=torch.nn.Identity(), head_dim=8)
    collector, expected = (
        KeyCollector([layer], 0, SHAPE, 4000),
        KeyMoments(1, 8, torch.device("cpu")),
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True), positions=torch.arange(700)
    )
    queries, keys = torch.randn(700, 16), torch.randn(700, 8)
    collector._on_attention(0, queries, keys, keys, batch)
    expected.add(queries.view(700, 2, 8), keys.view(700, 1, 8))
    for one, other in zip(
        vars(collector.moments[0]).values(), vars(expected).values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)


def test_the_sources_are_the_first_layers_of_earlier_groups_or_of_the_token_before() -> None:
    assert sources(8, dense_layers=1, layers_per_group=2, forecast_lead=1) == {
        **{1: (7, True), 2: (7, True)},
        **{3: (1, False), 4: (1, False)},
        **{5: (3, False), 6: (3, False)},
        **{7: (5, False)},
    }
    assert sources(6, dense_layers=0, layers_per_group=1, forecast_lead=2) == {
        **{0: (4, True), 1: (5, True)},
        **{2: (0, False), 3: (1, False), 4: (2, False), 5: (3, False)},
    }
    with pytest.raises(ValueError, match="has 5 layers, and none is left"):
        sources(5, dense_layers=1, layers_per_group=2, forecast_lead=2)

"""A language model is calibrated: forecasts fitted to some texts are better on others, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ext.calibrate import main
from sglang_ext.calibration.files import read
from sglang_ext.server_args import BUNDLED_MODEL


@pytest.mark.thorough
@pytest.mark.language_model
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("language-model")
def test_forecasts_get_better_on_texts_that_were_not_fitted_to(
    language_model: Path, tmp_path: Path
) -> None:
    arguments = f"--model-path {language_model} --out {tmp_path / 'new'} --tokens 600 --rank 32"
    texts = "--text tensors python functions --held-out distributions"
    # An engine sets up the logging and the signals of its process.
    command = [sys.executable, "-m", "sglang_ext.calibrate", *arguments.split(), *texts.split()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=840, check=True)
    card, corrections, bases = read(tmp_path / "new")
    assert {*bases} == {*range(1, 30)}
    assert bases[1].basis.shape == (3, 64, 64)
    assert (card.architecture, card.layers, card.tokens) == ("LlamaForCausalLM", 30, 1800)
    assert {*card.texts} == {"tensors", "python", "functions"}
    assert {*card.fits} == {*corrections} == {*range(1, 30)}
    for layer, fit in card.fits.items():
        assert fit.is_before == (layer < 5)  # behind the dense layer and two groups of 2
        assert fit.source in ((27, 29) if fit.is_before else (layer - 4, layer - 5))
        assert fit.fitted < fit.held_out < fit.plain_held_out
        assert corrections[layer].left.shape == (577, 32)
    table = ran.stdout.splitlines()
    assert sum(line.startswith("| ") for line in table) == 2 + 29


def test_a_model_without_layers_enough_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(BUNDLED_MODEL), str(tmp_path / "new")
    assert main(["--model-path", model, "--out", out, "--text", __file__]) == 1
    assert "has 2 layers" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

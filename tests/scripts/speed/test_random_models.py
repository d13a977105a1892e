"""Models of random weights attend as trained ones do, and have a calibration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.shared.models import model_config
from scripts.speed.calibration import DUMMY_LARGEST, norms_for_unit_logits, write_blank
from sglang_ext.calibration.files import read, sources


class TestWeights:
    @pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
    def test_logits_have_about_unit_variance(self, name: str) -> None:
        config = model_config(name)
        norms = dict(norms_for_unit_logits(config))
        assert {int(name.split(".")[2]) for name in norms} == set(
            range(config["num_hidden_layers"])
        )
        torch.manual_seed(0)
        hidden, head_dim = config["hidden_size"], 128
        normalized = torch.nn.functional.rms_norm(torch.randn(200, hidden), (hidden,))
        normalized *= norms["model.layers.3.input_layernorm.weight"].float()
        projected = [
            normalized @ torch.empty(hidden, head_dim).uniform_(-DUMMY_LARGEST, DUMMY_LARGEST)
            for _ in range(2)
        ]
        if name.startswith("qwen3"):
            projected = [
                torch.nn.functional.rms_norm(
                    part,
                    (head_dim,),
                    norms[f"model.layers.3.self_attn.{which}_norm.weight"].float(),
                )
                for part, which in zip(projected, "qk", strict=True)
            ]
        logits = projected[0] @ projected[1].T * head_dim**-0.5
        assert 0.8 < float(logits.std()) < 1.2


def test_a_blank_calibration_is_of_the_model_and_corrects_no_projection(tmp_path: Path) -> None:
    config = {**model_config("llama-3.1-8b"), "num_hidden_layers": 8}
    engine = {"score_keys": "sketch", "dense_layers": 3}
    write_blank(tmp_path, config, engine)
    card, corrections, bases = read(tmp_path)
    layers = config["num_hidden_layers"]
    assert card.architecture == config["architectures"][0]
    told = sources(layers, 3, 2, 2)
    assert [*corrections] == [*told]
    assert [*bases] == [*range(3, layers)]
    projection = torch.rand(card.hidden_size + 1, card.query_heads * card.head_dim)
    for layer, correction in corrections.items():
        # What only the token before tells starts from nothing, and zeros would be one long tie.
        assert torch.equal(correction.added_to(projection), projection) != told[layer].is_before

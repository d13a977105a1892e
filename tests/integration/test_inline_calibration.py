"""A server fits its sketches once for a model, and takes no other model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibration_cards import make_card
from workload import REUSE, SMALL_INLINE, random_prompts

from scripts.shared.serving import Server, serve
from sglang_ext.calibration.files import Calibration, write
from sglang_ext.inline.calibrating import kept
from sglang_ext.inline.selection import Heads

HEADS = Heads(layers=3, query_heads=4, kv_heads=2, head_dim=32)
"""Of the random model, behind its dense layer."""

FITTED, READ = "sketches fitted in", "sketches are as fitted before"

(PROMPT,) = random_prompts([300], seed=21)


def kept_file(cache_home: Path) -> Path:
    """The one file that is kept of the random model."""
    files = (cache_home / "sglang-cache-rank" / "sketches").iterdir()
    (file,) = (file for file in files if kept(file, HEADS) is not None)
    return file


def start(model: Path, cache_home: Path, *flags: str) -> tuple[str, list[int]]:
    """The log of a start with a small budget, and an answer, which depends on the sketches."""
    arguments = [*SMALL_INLINE, *REUSE, "--sparse-budget", "8", "--model-path", str(model), *flags]
    with serve(arguments, {"XDG_CACHE_HOME": str(cache_home)}) as server:
        response = server.generate(PROMPT, 60)
        assert response["meta_info"]["cache_rank"]["sparse_steps"] == 59
        return server.log.read_text(), response["output_ids"]


@pytest.mark.thorough
def test_a_model_is_fitted_to_once(
    inline_server: Server, random_model: Callable[..., Path], cache_home: Path, tmp_path: Path
) -> None:
    # Which of the two it is depends on whether another test has started a server before.
    first = inline_server.log.read_text()
    assert (FITTED in first) != (READ in first)
    file = kept_file(cache_home)
    fitted = kept(file, HEADS)
    assert fitted is not None
    log, answer = start(random_model(), cache_home)
    assert READ in log
    assert FITTED not in log

    damaged = tmp_path / file.relative_to(cache_home)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(file.read_bytes()[:-100])
    log, again = start(random_model(), tmp_path)
    assert FITTED in log
    assert READ not in log
    found = kept(damaged, HEADS)
    assert found is not None
    for one, other in zip(found, fitted, strict=True):
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-3, atol=1e-3)
    assert again == answer


@pytest.mark.thorough
def test_a_folder_of_the_model_is_read(
    inline_server: Server, random_model: Callable[..., Path], cache_home: Path, tmp_path: Path
) -> None:
    fitted = kept(kept_file(cache_home), HEADS)
    assert fitted is not None
    card = make_card(architecture="Qwen3ForCausalLM", hidden_size=64, query_heads=4, kv_heads=2)
    bases = {1 + layer: basis for layer, basis in enumerate(fitted)}
    write(tmp_path / "own", Calibration(card, {}, bases))
    # A fit is in the flag's folder, and none in the user's.
    log, _ = start(random_model(), tmp_path, "--calibration", str(tmp_path / "own"))
    assert FITTED not in log
    assert READ not in log
    assert not (tmp_path / "sglang-cache-rank").exists()


@pytest.mark.thorough
def test_sketches_are_fitted_again_to_weights_that_come_after_dummies(
    inline_server: Server, random_model: Callable[..., Path], cache_home: Path, tmp_path: Path
) -> None:
    log, expected = start(random_model(), cache_home)
    assert READ in log
    flags = [*SMALL_INLINE, *REUSE, "--sparse-budget", "8", "--model-path", str(random_model())]
    with serve([*flags, "--load-format", "dummy"], {"XDG_CACHE_HOME": str(tmp_path)}) as server:
        assert server.generate(PROMPT, 60)["output_ids"] != expected
        body = {"model_path": str(random_model()), "load_format": "auto"}
        assert server.post("/update_weights_from_disk", body).json()["success"]
        assert server.log.read_text().count(FITTED) == 1
        for known in (0, len(PROMPT) - 1):
            response = server.generate(PROMPT, 60)
            assert response["output_ids"] == expected
            assert response["meta_info"]["cached_tokens"] == known
        assert server.post("/update_weights_from_disk", body).json()["success"]
        assert server.generate(PROMPT, 60)["output_ids"] == expected
        assert server.log.read_text().count(FITTED) == 2

"""A server fits its sketches once for a model, and takes no other model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from calibration_cards import make_card
from workload import REUSE, SMALL_INLINE, random_prompts

from scripts.shared.serving import Server, serve
from sglang_ext.calibration.files import Calibration, write
from sglang_ext.inline.calibrating import kept
from sglang_ext.inline.selection import Heads

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("plain server")]

HEADS = Heads(layers=3, query_heads=4, kv_heads=2, head_dim=32)
"""Of the random model, behind its dense layer."""

FITTED, READ = "sketches fitted in", "sketches are as fitted before"
FLAGS = [*SMALL_INLINE, *REUSE, "--sparse-budget", "8"]

(PROMPT,) = random_prompts([300], seed=21)


def answer(server: Server) -> list[int]:
    """An answer that depends on the sketches, because few tokens are selected."""
    response = server.generate(PROMPT, 60)
    assert response["meta_info"]["cache_rank"]["sparse_steps"] == 59
    tokens: list[int] = response["output_ids"]
    return tokens


def test_a_model_is_fitted_to_once_and_again_when_weights_come_after_dummies(
    inline_server: Server, random_model: Callable[..., Path], cache_home: Path, tmp_path: Path
) -> None:
    # Which of the two it is depends on whether another test has started a server before.
    first = inline_server.log.read_text()
    assert (FITTED in first) != (READ in first)
    flags = [*FLAGS, "--model-path", str(random_model())]
    with serve(flags, {"XDG_CACHE_HOME": str(cache_home)}) as server:
        log, expected = server.log.read_text(), answer(server)
    assert READ in log
    assert FITTED not in log

    with serve([*flags, "--load-format", "dummy"], {"XDG_CACHE_HOME": str(tmp_path)}) as server:
        assert answer(server) != expected
        assert server.log.read_text().count(FITTED) == 1
        body = {"model_path": str(random_model()), "load_format": "auto"}
        for _ in range(2):
            assert server.post("/update_weights_from_disk", body).json()["success"]
            assert answer(server) == answer(server) == expected  # the second time from the tree
        assert server.log.read_text().count(FITTED) == 2  # once after the dummies


def test_a_folder_of_the_model_is_read(
    inline_server: Server, random_model: Callable[..., Path], cache_home: Path, tmp_path: Path
) -> None:
    files = (cache_home / "sglang-cache-rank" / "sketches").iterdir()
    (fitted,) = (found for file in files if (found := kept(file, HEADS)) is not None)
    card = make_card(architecture="Qwen3ForCausalLM", hidden_size=64, query_heads=4, kv_heads=2)
    bases = {1 + layer: basis for layer, basis in enumerate(fitted)}
    write(tmp_path / "own", Calibration(card, {}, bases))
    # A fit is in the flag's folder, and none in the user's.
    flags = [*FLAGS, "--model-path", str(random_model()), "--calibration", str(tmp_path / "own")]
    with serve(flags, {"XDG_CACHE_HOME": str(tmp_path)}) as server:
        log = server.log.read_text()
        answer(server)
    assert FITTED not in log
    assert READ not in log
    assert not (tmp_path / "sglang-cache-rank").exists()

"""A real language model, SmolLM2-135M-Instruct, decodes texts by force on the real engine."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from disaggregated import Half, ask_both
from tokenizers import Tokenizer

from cache_rank.channels.rate import LINK_GBPS_VARIABLE
from scripts.score_text import main
from scripts.shared.serving import PLAIN
from sglang_ext.calibration.texts import TEXTS
from sglang_ext.flags import MOST_WIRE_DRAFTS

# Two servers take minutes where other tests take the cores as well.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.language_model,
    pytest.mark.xdist_group("language-model"),
    pytest.mark.timeout(900),
]

SETTINGS = (
    "--context 400 --tokens 48 --warm-up 24 --text opticks --gpus "
    "--systems cache-rank:sparse_budget=1024"
)


def test_every_token_selected_equals_dense(language_model: Path, tmp_path: Path) -> None:
    arguments = ["--model-path", str(language_model), "--out", str(tmp_path / "out")]
    assert main([*arguments, *SETTINGS.split()]) == 0
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    (cell,) = report["cells"]
    assert (cell["text"], cell["budget"]) == ("opticks", 1024)
    assert cell["largest_difference"] < 1e-4
    assert 0 <= cell["kl"] < 1e-6
    assert cell["top1_agreement"] == 1
    # 17 exchanged steps fill the query window; slots fill in one.
    assert cell["sparse_from"] <= 24
    assert cell["stale_steps"] == 0
    assert not (tmp_path / "out" / "logits").exists()


@pytest.mark.parametrize("codes", ["quantspec", "lynx"])
def test_drafts_on_half_the_bits_are_mostly_right(
    language_model: Path, codes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of texts that the model continues greedily; each has time for some drafts."""
    tokenizer = Tokenizer.from_file(str(language_model / "tokenizer.json"))
    prompts = [tokenizer.encode(text.read()).ids[:2800] for text in TEXTS.values()]
    flags = [*PLAIN, "--model-path", str(language_model), "--skip-tokenizer-init"]
    params = {"sampling_params": {"custom_params": {"wire_codes": codes}}}
    rate = {LINK_GBPS_VARIABLE: "0.02"}
    with contextlib.ExitStack() as stack:
        drafts = ["--wire-drafts", str(MOST_WIRE_DRAFTS)]
        halves = Half("prefill", flags, rate), Half("decode", [*flags, *drafts])
        for half in halves:
            stack.callback(half.stop)
        for half in halves:
            half.wait_ready()
        answers = [ask_both(*halves, [prompt], 80, **params)[0] for prompt in prompts]
    ours = [answer["meta_info"]["cache_rank"] for answer in answers]
    right, drafted = (
        [one[name] for one in ours] for name in ("wire_drafts_accepted", "wire_drafts")
    )
    with capsys.disabled():
        print(f"\n{codes}: {right} of {drafted} drafts are right")
    assert min(drafted) > 0
    assert sum(right) > sum(drafted) / 6

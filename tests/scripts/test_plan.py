"""A plan is printed from a model's configuration, before anything is started."""

from __future__ import annotations

import pytest

from scripts.plan import parse_options, plan


def test_a_plan_has_a_row_for_each_batch_and_context() -> None:
    text = plan(parse_options("--contexts 8192 32768 --batches 1 24".split()))
    rows = [line.split(" | ") for line in text.splitlines() if " × " in line][1:]
    assert [row[0] for row in rows] == [
        *("| 1 × 8,192", "| 24 × 8,192"),
        *("| 1 × 32,768", "| 24 × 32,768"),
    ]
    assert [row[2] for row in rows] == ["yes", "yes", "yes", "no"]
    assert "The cache rank holds 1,7" in text
    assert text.splitlines()[-1].startswith("estimates (H200, 32,768 tokens a request;")


def test_settings_and_weights_change_a_plan() -> None:
    def step(*arguments: str) -> float:
        options = parse_options(["--contexts", "32768", "--batches", "24", *arguments])
        return float(plan(options).splitlines()[2].split(" | ")[1])

    usual = step()
    assert step("--set", "kv_residency=bf16") > 1.5 * usual
    assert step("--set", "query_predictor=last,layers_per_group=6") < usual
    assert step("--gpu", "H100") > 1.2 * usual
    large = ("--model", "qwen3-32b", "--batches", "8")
    assert step(*large, "--quantization", "fp8") < 0.85 * step(*large)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--model nowhere", "no model 'nowhere'"),
        ("--set kv_residency=zip", "kv_residency zip: unknown"),
        ("--set sparse_budget=0", "sparse_budget"),
        ("--set port=3", "no argument port of a cache rank"),
        ("--set sparse_budget=many", "sparse_budget"),
        ("--set kv_residency=hack,kv_residency_options=bits=3", "bits"),
        ("--contexts 0", "must be 1 or more"),
        ("--gpus 3", "invalid choice: 3"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments.split())
    assert why in capsys.readouterr().err

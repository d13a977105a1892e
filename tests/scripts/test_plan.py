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


def test_a_plan_says_what_does_not_fit_and_what_a_batch_needs() -> None:
    def cells(batch: int, context: int, *arguments: str) -> list[str]:
        shape = ("--batches", str(batch), "--contexts", str(context))
        line = plan(parse_options([*shape, *arguments])).splitlines()[2]
        return [cell.strip() for cell in line.strip("|").split("|")][1:]

    step, hidden, _, faster, needs = cells(64, 32768)
    assert (step, hidden, faster, needs) == ("–", "does not fit", "–", "")
    step, hidden, _, faster, needs = cells(4, 4095)
    assert (step, hidden, faster, needs) == ("–", "stays dense", "–", "")
    assert cells(4, 4096)[1] == "yes"
    assert cells(4, 4095, "--set", "sparse_threshold=4000")[1] == "yes"
    assert cells(16, 32768)[-1] == ""
    assert cells(24, 32768)[-1] == "inference_kv=working-set"
    assert cells(16, 32768, "--set", "cache_rank_mem_fraction=0.1")[1] == "does not fit"
    every = "max_sparse_requests=64,inference_kv=working-set"
    assert cells(64, 16384)[-1] == every
    assert cells(64, 16384, "--set", every)[-1] == ""


def test_a_plan_says_nothing_of_where_dense_requests_pay() -> None:
    assert "estimates (" not in plan(parse_options("--contexts 2048 --batches 1".split()))


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
        ("--set kv_residency=mosaickv", "kv_residency mosaickv is not estimated"),
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

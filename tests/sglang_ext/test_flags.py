"""What the flags of a server become in the configuration of the cache rank."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch
from parsed_args import parse

from cache_rank.budget import DEFAULT_CURVE, BudgetCurve
from cache_rank.config import CacheRankConfig, ModelShape
from sglang_ext.flag_parser import read_config
from sglang_ext.flags import (
    CACHE_RANK_FIELDS,
    CHECKSUM_VARIABLE,
    CONFIG_FLAG,
    CONFIG_KEYS,
    flag_of,
)
from sglang_ext.refusals import UnsupportedError
from sglang_ext.server_args import BUNDLED_MODEL, parse_server_args

pytestmark = pytest.mark.usefixtures("parses_on_a_cpu")


def test_the_config_of_the_cache_rank_carries_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "layers_per_group": 3,
        "forecast_lead": 4,
        "sparse_budget": 77,
        "sink_tokens": 5,
        "recent_tokens": 9,
        "query_window": 2,
        "query_predictor": "spade",
        "hysteresis": 11,
        "max_swap_tokens": 13,
        "wire_dtype": "int8",
        "sketch_bits": 3,
        "kv_residency": "lynx",
    }
    shared = {*CACHE_RANK_FIELDS} & {*CacheRankConfig.__struct_fields__}
    scores = {"score_keys", "score_normalizer", "kv_residency_options"}
    assert {*given} | scores == shared
    keys = {name: value for name, value in given.items() if name in CONFIG_KEYS}
    flags = [CONFIG_FLAG, json.dumps(keys)]
    for name, value in given.items():
        if name not in keys:
            flags += [flag_of(name), str(value)]
    args = parse(flags)
    model = ModelShape(1, 1, 1, 8, "float32", 1.0, rotary_frequency=(1.0,))
    config, usual = args.cache_rank_config(model, max_rows=6), CacheRankConfig(model)
    assert {name: getattr(config, name) for name in given} == given
    assert all(getattr(usual, name) != value for name, value in given.items())
    assert (config.model, config.max_rows, config.checksum) == (model, 6, False)
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    assert parse(["--kv-residency", "bf16"]).cache_rank_config(model, 6).checksum


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("", (128, 64)),
        ("--sparse-budget 40 --hysteresis 0", (0, 40)),
        ("--sparse-budget 40 --max-swap-tokens 3", (5, 3)),
    ],
)
def test_what_stays_and_what_enters_follows_the_budget(flags: str, sizes: tuple[int, int]) -> None:
    args = parse(flags.split())
    assert (args.hysteresis, args.max_swap_tokens) == sizes
    config = args.cache_rank_config(ModelShape(1, 1, 1, 8, "float32", 1.0), max_rows=6)
    assert (config.hysteresis, config.max_swap_tokens) == sizes


@pytest.mark.parametrize(
    ("flags", "curve"),
    [
        ("", DEFAULT_CURVE),
        ("--cache-rank-gpus 1", DEFAULT_CURVE),
        ("--cache-rank-gpus 1 --speculative-algorithm CACHE_RANK", BudgetCurve.flat(1024)),
        ("--sparse-budget 40 --cache-rank-gpus 1", BudgetCurve.flat(40)),
    ],
)
def test_budgets_follow_lengths_by_default(flags: str, curve: BudgetCurve) -> None:
    args = parse_server_args(["--model-path", str(BUNDLED_MODEL), *flags.split()])
    assert args.budget_curve == curve
    config = args.cache_rank_config(ModelShape(1, 1, 1, 8, "float32", 1.0), max_rows=6)
    assert config.budget_curve == curve
    assert pickle.loads(pickle.dumps(args)).budget_curve == curve


def test_checksums_of_rounded_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelShape(1, 1, 1, 8, "bfloat16", 1.0)
    config = parse([CONFIG_FLAG, '{"wire_dtype": "int8"}']).cache_rank_config(model, max_rows=6)
    assert config.wire_torch_dtype == torch.int8
    monkeypatch.setenv(CHECKSUM_VARIABLE, "1")
    with pytest.raises(UnsupportedError, match=r"^--cache-rank-config wire_dtype int8: "):
        parse([CONFIG_FLAG, '{"wire_dtype": "int8"}'])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ('{"sketch_bit": 3}', "unknown key sketch_bit; the keys are kv_residency_options, layers"),
        ('{"sketch_bits": 5}', "sketch_bits: Invalid enum value 5"),
        ('{"trace_steps": "8"}', "trace_steps: Expected `int`, got `str`"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused(
    text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        read_config(text)
    with pytest.raises(SystemExit, match="2"):
        parse([CONFIG_FLAG, text])
    assert f"argument {CONFIG_FLAG}: " in capsys.readouterr().err


def test_options_of_the_residency_are_numbers_where_they_can_be() -> None:
    model = ModelShape(1, 1, 1, 8, "float32", 1.0)
    for given, options in (
        ("alpha=5, reading=anchor", {"alpha": 5, "reading": "anchor"}),
        ("alpha=0.5", {"alpha": 0.5}),
        ("", {}),
    ):
        args = parse(
            ["--kv-residency", "lynx", CONFIG_FLAG, json.dumps({"kv_residency_options": given})]
        )
        assert args.cache_rank_config(model, max_rows=6).kv_residency_options == options

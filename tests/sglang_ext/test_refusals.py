"""What is refused with a cache rank, row by row, and what is only warned of."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parsed_args import Make, pretend_gpus
from sglang.srt.environ import envs

from sglang_ext import compat
from sglang_ext.disaggregation.wire import SECRET_VARIABLE
from sglang_ext.flags import BACKEND, CONFIG_KEYS, DRAFT_TOKENS, TRANSFERS, field_of, flag_of
from sglang_ext.refusals import PLAIN, Objection, UnsupportedError, known, of_flags, refuse, servers
from sglang_ext.server_args import CacheRankServerArgs, argument_parser

Object = Callable[[CacheRankServerArgs], Iterator[Objection]]


@functools.cache
def options() -> set[str]:
    """Every flag that there is, and the keys of --cache-rank-config as flags."""
    there = {option for each in argument_parser()._actions for option in each.option_strings}
    return there | {f"--{key.replace('_', '-')}" for key in CONFIG_KEYS}


def named_flags(text: str) -> set[str]:
    return {*re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", text)}


def check(args: CacheRankServerArgs, object_to: Object, flags: str) -> None:
    """The arguments are refused; the message names these flags and a remedy, by its true flags."""
    objection = next(object_to(args))
    assert named_flags(" ".join(objection)) <= options() | compat.ABSENT_FLAGS
    with pytest.raises(UnsupportedError) as caught:
        refuse(args, object_to(args))
    sentences = re.fullmatch(r"(--.+?): (.+?)\. ([A-Z].+)\.", str(caught.value))
    assert sentences
    named, why, remedy = sentences.groups()
    assert re.findall(r"(?<!\S)--[a-z0-9-]+", named) == flags.split()
    assert "{" not in why + remedy


SPARSE_DECODE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("--device", {"device": "npu"}),
    ("--device", {"device": "cuda"}),
    ("--is-embedding", {"is_embedding": True}),
    ("--model-impl", {"model_impl": "transformers"}),
    ("--decode-attention-backend", {"decode_attention_backend": "triton"}),
    ("--prefill-attention-backend", {"prefill_attention_backend": BACKEND}),
    ("--attention-backend", {"attention_backend": "triton"}),
    ("--prefill-attention-backend", {"prefill_attention_backend": "fa3"}),
    ("--preferred-sampling-params", {"preferred_sampling_params": '{"beam_width": 4}'}),
]
LATE_WEIGHTS: list[dict[str, Any]] = (
    [{"startup_weight_load_mode": "overlap"}]
    if "--startup-weight-load-mode" not in compat.ABSENT_FLAGS
    else []
)
EXCHANGE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("--kv-cache-dtype", {"kv_cache_dtype": "fp8_e4m3"}),
    ("--page-size", {"page_size": 16}),
    ("--pp-size --nnodes", {"pp_size": 2, "nnodes": 2}),
    ("--cache-rank-address", {"cache_rank_address": "not.an.address.invalid"}),
    ("--speculative-algorithm", {"speculative_algorithm": "NGRAM"}),
    *(
        (flag, {"inference_kv": "working-set", "speculative_algorithm": "CACHE_RANK", **fields})
        for flag, fields in (
            ("--inference-kv --kv-residency", {"kv_residency": "hack"}),
            ("--inference-kv --kv-residency", {"kv_residency": "mosaickv"}),
            ("--inference-kv --max-queued-requests", {"max_queued_requests": 8}),
        )
    ),
    ("--cache-rank-gpus", {"cache_rank_gpus": 2}),
    ("--calibration", {"calibration": "auto"}),
    ("--trace", {"trace": "missing-folder/trace.json"}),
    ("--trace", {"trace": "."}),
    ("--inference-kv --kv-canary", {"inference_kv": "working-set", "kv_canary": "log"}),
    (
        "--inference-kv --strip-thinking-cache",
        {"inference_kv": "working-set", "strip_thinking_cache": True},
    ),
    ("--max-queued-requests", {"max_queued_requests": 8}),
    ("--disable-overlap-schedule", {"disable_overlap_schedule": True}),
    ("--sparse-threshold", {"sparse_threshold": 68}),
    ("--sparse-threshold", {"sparse_threshold": 259}),
    ("--sparse-threshold --sparse-budget", {"sparse_threshold": 4096, "sparse_budget": 4029}),
    ("--speculative-draft-weights", {"speculative_draft_weights": "int4"}),
    *(("--startup-weight-load-mode", late) for late in LATE_WEIGHTS),
]
INLINE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("--speculative-algorithm", {"speculative_algorithm": "NGRAM"}),
    ("--inference-kv", {"inference_kv": "working-set"}),
    ("--kv-cache-dtype", {"kv_cache_dtype": "fp8_e5m2"}),
    ("--recent-tokens", {"recent_tokens": 0}),
    ("--speculative-draft-weights", {"speculative_draft_weights": "int4"}),
    ("--moe-a2a-backend", {"moe_a2a_backend": "deepep"}),
    ("--prefill-attention-backend", {"prefill_attention_backend": "torch_native"}),
    ("--sparse-threshold", {"sparse_threshold": 68}),
    ("--sparse-threshold", {"sparse_threshold": 259}),  # 192 tokens are selected of so many
    ("--sparse-threshold --sparse-budget", {"sparse_threshold": 2115, "sparse_budget": 2048}),
    *(
        (flag, {"speculative_algorithm": "CACHE_RANK", **fields})
        for flag, fields in (
            ("--attention-backend", {"attention_backend": "flashinfer"}),
            ("--speculative-draft-model-path", {"speculative_draft_model_path": "draft"}),
            ("--speculative-num-draft-tokens", {"speculative_num_draft_tokens": 1}),
            ("--speculative-num-draft-tokens", {"speculative_num_draft_tokens": 34}),
            ("--speculative-num-steps", {"speculative_num_steps": 5}),
            ("--speculative-eagle-topk", {"speculative_eagle_topk": 2}),
            *(
                ("--startup-weight-load-mode", {**late, "speculative_draft_weights": "int4"})
                for late in LATE_WEIGHTS
            ),
        )
    ),
]
TRANSFER_CASES: list[tuple[str, dict[str, Any]]] = [
    ("--tp-size", {"tp_size": 2}),
    ("--speculative-algorithm", {"speculative_algorithm": "CACHE_RANK"}),
    (
        "--disaggregation-decode-enable-radix-cache",
        {"disaggregation_decode_enable_radix_cache": True},
    ),
    ("--kv-cache-dtype", {"kv_cache_dtype": "fp8_e4m3"}),
    ("--page-size", {"page_size": 16}),
    ("--wire-codes", {"wire_codes": "zip"}),
    ("--wire-codes", {"wire_codes": "hack:bits=3"}),
    ("--wire-codes", {"wire_codes": "mosaickv"}),
    ("--wire-drafts", {"wire_drafts": 65}),
    ("--cache-rank-address", {"cache_rank_address": "not.an.address.invalid"}),
    ("--cache-rank-address", {"cache_rank_address": "0.0.0.0"}),
    *(
        ("--disaggregation-enable-kv-checksum", {"disaggregation_enable_kv_checksum": True})
        for _ in range(compat.IS_NEW)
    ),
]
GPU_CASES: list[tuple[int, Object, str, dict[str, Any]]] = [
    (2, servers.sparse_decode, "--attention-backend", {"attention_backend": "trtllm_mha"}),
    *(
        (gpus, servers.exchange, flags, fields)
        for gpus, flags, fields in (
            (2, "--cache-rank-gpus --cache-rank-base-gpu-id", {"cache_rank_base_gpu_id": 0}),
            (1, "--cache-rank-gpus", {}),
            (2, "--cache-rank-gpus --gpu-id-step", {"gpu_id_step": 2}),
            (2, "--cache-rank-config", {"cache_rank_transfer_backend": "peer"}),
            (2, "--cuda-graph-backend-decode", {"cuda_graph_backend_decode": "breakable"}),
            (2, "--cuda-graph-config", {"cuda_graph_config": {"decode": {"backend": "breakable"}}}),
        )
    ),
]


@pytest.mark.parametrize(
    ("object_to", "flags", "fields"),
    [
        *((servers.sparse_decode, *case) for case in SPARSE_DECODE_CASES),
        *((servers.exchange, *case) for case in EXCHANGE_CASES),
    ],
)
def test_refuses_and_names_the_flags_and_a_remedy(
    object_to: Object, flags: str, fields: dict[str, Any], make: Make
) -> None:
    check(make(**fields), object_to, flags)


@pytest.mark.parametrize(("flags", "fields"), INLINE_CASES)
def test_refuses_what_selection_in_the_process_cannot_do(
    flags: str, fields: dict[str, Any], make: Make
) -> None:
    check(make(cache_rank_gpus=None, **fields), servers.inline, flags)


@pytest.mark.parametrize(("flags", "fields"), TRANSFER_CASES)
def test_refuses_what_transfers_cannot_do(
    flags: str, fields: dict[str, Any], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "x" * 16)
    check(make(cache_rank_gpus=0, **fields), servers.transfers, flags)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_both_halves_need_a_secret_and_our_transfers(
    mode: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that prefills selects nothing, wherever tokens are selected."""
    half = {"disaggregation_mode": mode, "disaggregation_transfer_backend": TRANSFERS}
    args = make(cache_rank_gpus=None, **half)
    assert args.placement == ("off" if mode == "prefill" else "inline")
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(UnsupportedError, match=f"^{SECRET_VARIABLE} must have at least 16"):
        refuse(args, servers.transfers(args))
    monkeypatch.setenv(SECRET_VARIABLE, "x" * 16)
    assert [*servers.transfers(args), *servers.inline(args)] == []
    others = {**half, "cache_rank_gpus": None, "disaggregation_transfer_backend": "nixl"}
    check(make(**others), servers.inline, "--disaggregation-transfer-backend")


def test_a_pair_may_decode_what_comes_by_our_transfers(make: Make) -> None:
    half = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": TRANSFERS}
    for inference_kv in ("full", "working-set"):
        assert [*servers.exchange(make(**half, inference_kv=inference_kv))] == []
    prefills = make(**{**half, "disaggregation_mode": "prefill"})
    check(prefills, servers.exchange, "--disaggregation-mode")
    others = make(**{**half, "disaggregation_transfer_backend": "nixl"})
    check(others, servers.exchange, "--disaggregation-transfer-backend")
    check(make(**half, reuse_sparse_tokens="on"), servers.exchange, "--reuse-sparse-tokens")


@pytest.mark.parametrize(
    ("always", "least"), [(68, 260), (704, 896), (1204, 1430), (100_000, 101_024)]
)
def test_the_least_threshold_is_one_that_covers_its_own_budget(
    always: int, least: int, make: Make
) -> None:
    """It is accepted, and a shorter one is told of it."""
    fields = {"cache_rank_gpus": None, "recent_tokens": always - 4}
    assert not list(servers.inline(make(sparse_threshold=least, **fields)))
    (objection,) = servers.inline(make(sparse_threshold=least - 1, **fields))
    assert f"a request has to have {least} tokens" in objection.why


@pytest.mark.parametrize(("gpus", "object_to", "flags", "fields"), GPU_CASES)
def test_refuses_what_gpus_cannot_do(
    gpus: int,
    object_to: Object,
    flags: str,
    fields: dict[str, Any],
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(gpus, monkeypatch)
    check(make(**fields), object_to, flags)


@pytest.mark.parametrize("generation", [7, 8])
def test_old_gpus_have_no_kernel_for_weights_of_4_bits(
    generation: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(1, monkeypatch, generation)
    asked = {"speculative_algorithm": "CACHE_RANK", "speculative_draft_weights": "int4"}
    args = make(cache_rank_gpus=None, **asked)
    if generation < 8:
        check(args, servers.inline, "--speculative-draft-weights")
    else:
        assert not [*servers.inline(args)]


@pytest.mark.parametrize("gpus", [0, 2])
def test_what_nobody_asked_for_is_not_refused(
    gpus: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(gpus, monkeypatch)
    args = make()
    assert [*servers.sparse_decode(args), *servers.exchange(args)] == []
    args = make(cache_rank_gpus=None)
    assert [*servers.sparse_decode(args), *servers.inline(args)] == []


@pytest.mark.parametrize("name", servers.GPU_VARIABLES)
@pytest.mark.parametrize("gpus", [0, 2])
def test_variables_that_change_pools_and_graphs_are_refused(
    gpus: int, name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(envs, name):
        pytest.skip("this release of SGLang does not have it")
    pretend_gpus(gpus, monkeypatch)
    monkeypatch.setenv(name, "1")
    if gpus:
        with pytest.raises(UnsupportedError, match=f"^{name}: "):
            refuse(make(), servers.sparse_decode(make()))
    else:
        refuse(make(), servers.sparse_decode(make()))


@pytest.mark.parametrize("name", servers.TREE_VARIABLES)
def test_other_radix_caches_are_refused(
    name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(envs, name):
        pytest.skip("this release of SGLang does not have it")
    monkeypatch.setenv(name, "1")
    with pytest.raises(UnsupportedError, match=f"^{name}: "):
        refuse(make(), servers.sparse_decode(make()))


def test_full_queues_are_allowed_where_steps_only_draft(make: Make) -> None:
    args = make(max_queued_requests=8, speculative_algorithm="CACHE_RANK")
    refuse(args, servers.exchange(args))


@pytest.mark.parametrize("kv_residency", ["quantspec", "bf16", "lynx"])
def test_a_cache_rank_may_verify(make: Make, kv_residency: str) -> None:
    asked = {"speculative_algorithm": "CACHE_RANK", "inference_kv": "working-set"}
    args = make(kv_residency=kv_residency, **asked)
    refuse(args, servers.exchange(args))
    drafts, most = DRAFT_TOKENS - 1, DRAFT_TOKENS
    config = args.cache_rank_config(servers.ANY_SHAPE, max_rows=1)
    assert (config.draft_steps, config.verified_tokens) == (drafts, most)
    full = make(kv_residency=kv_residency, speculative_algorithm="CACHE_RANK")
    assert full.cache_rank_config(servers.ANY_SHAPE, max_rows=1).verified_tokens == 0


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("cache_rank_timeout", (0.95, float("inf"), float("nan"))),
        ("cache_rank_max_restart_delay", (0.5, 3601)),
        ("cache_rank_mem_fraction", (0, 1.1, float("nan"))),
        ("cache_rank_host_gb", (-1, 1e6)),
        ("max_sparse_requests", (0,)),
        ("bulk_chunk_tokens", (1,)),
        ("dense_layers", (-1,)),
        ("trace_steps", (0,)),
        ("sparse_budget", (0, -1)),
        ("sink_tokens", (-1,)),
        ("score_normalizer", ("attended",)),
    ],
)
def test_refuses_values_out_of_range(field: str, values: tuple[Any, ...], make: Make) -> None:
    servers.refuse_out_of_range(make())
    for value in values:
        with pytest.raises(UnsupportedError, match=rf"^{flag_of(field)} \S"):
            servers.refuse_out_of_range(make(**{field: value}))


def test_refuses_options_of_a_residency(make: Make) -> None:
    args = make(kv_residency="quantspec", kv_residency_options="reading=4,alpha")
    with pytest.raises(UnsupportedError, match=r"^--cache-rank-config kv_residency_options "):
        servers.refuse_out_of_range(args)


def test_the_list_of_known_flags_names_flags_that_there_are() -> None:
    assert len(known.KNOWN - {*compat.default_values(CacheRankServerArgs)}) <= 2  # of one release


def test_a_refusal_names_the_flags_that_were_given_as_they_are_typed(make: Make) -> None:
    args = make(sink_tokens=7, trace="t.json", disable_overlap_schedule=True)
    asked = "--trace --recent-tokens --sink-tokens --disable-overlap-schedule"
    (objection,) = of_flags(args, {asked: "it is a test", "--recent-tokens": "it is a test"})
    assert objection.message(args) == (
        "--trace t.json --sink-tokens 7 --disable-overlap-schedule: it is a test. "
        "Drop --trace and --sink-tokens and --disable-overlap-schedule."
    )
    assert Objection("--recent-tokens", "{}", PLAIN).message(args) == (
        "--recent-tokens 64: {}. Pass --cache-rank-gpus 0 for plain SGLang."
    )


def test_one_line_names_the_flags_that_nobody_has_tried(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    known.say_unknown(make(enable_metrics=True, api_key="secret", sparse_budget=7))
    assert caplog.messages == []
    known.say_unknown(make(cpu_offload_gb=1, enable_metrics=True, num_continuous_decode_steps=2))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said, _, flags = record.getMessage().rpartition(": ")
    assert said == "cache rank: not known to work with it"
    assert {*flags.split(", ")} == {"--cpu-offload-gb", "--num-continuous-decode-steps"}
    assert all(field_of(flag) not in known.KNOWN for flag in flags.split(", "))


def test_a_file_that_can_be_written_takes_a_trace(make: Make, tmp_path: Path) -> None:
    args = make(trace=str(tmp_path / "trace.json"))
    refuse(args, servers.exchange(args))

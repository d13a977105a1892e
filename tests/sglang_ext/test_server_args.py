"""What the launcher sets, what it accepts, and every combination it refuses at the door."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from parsed_args import LLAMA, Model, parse, pretend_gpus, refusal_of
from sglang.srt.server_args import ServerArgs

from cache_rank.budget import DEFAULT_CURVE
from sglang_ext import compat, server_args
from sglang_ext.flags import BACKEND, CONFIG_FLAG, PREFILL_BACKEND, SHARE_GPU_VARIABLE
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE, UnsupportedError
from sglang_ext.server_args import BUNDLED_MODEL, parse_server_args

pytestmark = pytest.mark.usefixtures("parses_on_a_cpu")


@pytest.mark.parametrize(
    "flags",
    [
        "--tp-size 2",
        '--cache-rank-config {"trace_steps":0}',
        "--score-keys sketch",
        "--max-sparse-requests 10000000",
        "--enable-mixed-chunk",
    ],
)
def test_the_command_line_is_refused_where_a_table_refuses_it(flags: str) -> None:
    assert re.match(rf"{flags.split()[0]}( \S+){{0,2}}: \S.+\. \S.+\.$", refusal_of(flags))


@pytest.mark.parametrize(
    ("generation", "has_flashinfer", "kernels"),
    [(8, True, "flashinfer"), (8, False, "triton"), (9, True, "fa3"), (10, True, "flashinfer")],
)
def test_gpus_have_the_kernels_of_their_generation(
    generation: int, has_flashinfer: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(2, monkeypatch, generation)
    monkeypatch.setattr(server_args, "is_flashinfer_available", lambda: has_flashinfer)
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    args = parse([])
    assert (args.device, args.attention_backend, args.page_size) == ("cuda", kernels, 1)
    assert args.decode_attention_backend == BACKEND
    assert (args.max_total_tokens, args.sampling_backend) == (None, None)
    given = (
        '--cache-rank-base-gpu-id 1 --cache-rank-config {"cache_rank_transfer_backend":"nccl"} '
        "--attention-backend triton "
        "--cuda-graph-backend-decode full"
    )
    args = parse(given.split())
    assert (args.first_cache_rank_gpu, args.attention_backend) == (1, "triton")
    runs_ahead = parse(["--speculative-algorithm", "CACHE_RANK"])
    assert runs_ahead.attention_backend == kernels.replace("flashinfer", "triton")


@pytest.mark.parametrize(
    ("flags", "gpu"),
    [
        ("", 1),
        ("--base-gpu-id 3", 4),
        ("--base-gpu-id 1 --gpu-id-step 2", 3),
        ("--cache-rank-base-gpu-id 0 --base-gpu-id 1", 0),
    ],
)
def test_the_cache_rank_takes_the_gpu_after_sglangs_own(flags: str, gpu: int) -> None:
    assert parse(flags.split()).first_cache_rank_gpu == gpu


def test_ranks_share_a_gpu_if_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(ServerArgs, compat.RESOLVED_IN, lambda self: None)  # it looks for the GPUs
    monkeypatch.setenv(SHARE_GPU_VARIABLE, "1")
    for flags in ([], ["--cache-rank-config", '{"cache_rank_transfer_backend": "peer"}']):
        args = parse(flags)
        assert (args.base_gpu_id, args.first_cache_rank_gpu) == (0, 0)


def test_the_environment_allows_a_working_set_above_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_large = ["--sparse-threshold", "100", "--sparse-budget", "2048"]
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "0")
    with pytest.raises(UnsupportedError, match="--sparse-threshold"):
        parse(too_large)
    monkeypatch.setenv(ALLOW_LARGE_BUDGET_VARIABLE, "1")
    assert parse(too_large).sparse_threshold == 100


@pytest.mark.parametrize(
    "flags",
    [
        "--sink-tokens 0",
        "--recent-tokens 0",
        "--dense-layers 0",
        "--sparse-threshold 2116",
        "--cache-rank-timeout 1.0",
        "--cache-rank-mem-fraction 1.0",
        "--page-size 1",
        "--reuse-sparse-tokens on",
        "--inference-kv working-set --dense-layers 0",
    ],
)
def test_accepts_values_at_the_edge_of_what_is_refused(flags: str) -> None:
    args = parse(flags.split())
    name, value = flags.split()[-2:]
    assert str(getattr(args, name.removeprefix("--").replace("-", "_"))) == value


@pytest.mark.skipif(bool(compat.ABSENT_FLAGS), reason="this release has no server in Rust")
def test_a_server_without_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(UnsupportedError, match=r"^SGLANG_RUST_SERVER: .*\. Unset it\.$"):
        parse([])


def test_an_sglang_that_was_not_tested_is_refused_and_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("0.4.10.post2", "0.5.19.post1", "0.5.99"):
        monkeypatch.setattr(compat, "RELEASE", Version(version))
        with pytest.raises(UnsupportedError, match=rf"^SGLang {version} .* or pass "):
            parse(["--cache-rank-gpus", "0"])
    assert parse([CONFIG_FLAG, '{"allow_untested_sglang": true}'])
    assert "SGLang 0.5.99 is not tested (--cache-rank-config" in capsys.readouterr().err


def test_no_arguments_serve_the_bundled_model_and_log_what_was_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parse([])
    assert args.model_path == str(BUNDLED_MODEL)
    assert args.dense_layers == 1
    assert args.inference_kv == "full"
    assert not args.disable_radix_cache
    settings = {
        "page_size": 1,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        **({} if compat.HAS_GRAMMARS_ON_CPUS else {"grammar_backend": "none"}),
        "max_total_tokens": 131072,
        "max_running_requests": 64,
        "dtype": "float32",
        "decode_attention_backend": "cache_rank",
    }
    assert {name: getattr(args, name) for name in settings} == settings
    logged = capsys.readouterr().err
    assert "no GPU found: this is served by CPU processes" in logged
    for name, value in settings.items():
        assert re.search(rf"cache rank: --{name.replace('_', '-')} {value} \(.+\)\n", logged), name


def test_by_default_the_servers_own_process_selects(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_server_args([])
    assert (args.placement, args.is_sparse, args.has_cache_rank) == ("inline", True, False)
    assert args.model_path == str(BUNDLED_MODEL)
    assert args.prefill_attention_backend == PREFILL_BACKEND
    assert args.decode_attention_backend == BACKEND
    assert not args.disable_radix_cache
    assert "heeds" not in capsys.readouterr().err


@pytest.mark.parametrize("placement", ["", "--cache-rank-gpus 1"])
@pytest.mark.parametrize(("tokens", "drafts"), [("", 8), ("--speculative-num-draft-tokens 5", 4)])
def test_drafts_are_a_chain_and_share_noise(tokens: str, drafts: int, placement: str) -> None:
    flags = f"--speculative-algorithm cache_rank {tokens} {placement}"
    args = parse_server_args(flags.split())
    assert args.draft_steps == drafts
    assert args.speculative_num_draft_tokens == drafts + 1
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (drafts, 1)
    assert args.sampling_backend == "pytorch"
    assert args.disable_overlap_schedule  # as SGLang has it on CPUs
    assert args.has_drafts


def test_without_a_cache_rank_it_is_plain_sglang() -> None:
    flags = (
        "--cache-rank-gpus 0 --device cpu --page-size 16 --enable-mixed-chunk --sparse-budget 0 "
        "--attention-backend triton --decode-attention-backend torch_native --dense-layers 99"
    )
    args = parse(flags.split())
    assert not args.has_cache_rank
    assert not args.disable_radix_cache
    assert args.enable_mixed_chunk
    assert args.page_size == 16
    assert args.decode_attention_backend == "torch_native"
    assert args.dtype == "auto"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--cache-rank-gpus 0", None),
        (
            '--cache-rank-gpus 0 --cache-rank-config {"wire_dtype":"int8"} --kv-residency lynx',
            "without a cache rank these have no effect: --kv-residency, --cache-rank-config "
            "wire_dtype",
        ),
        ('--cache-rank-config {"wire_dtype":"int8"} --kv-residency lynx', None),
    ],
)
def test_one_line_names_the_flags_that_are_ignored(
    flags: str, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(["--device", "cpu", *flags.split()])
    logged = capsys.readouterr().err.splitlines()
    said = [each.split("] ", 1)[1] for each in logged if "no effect" in each]
    assert said == ([] if line is None else [line])


def test_a_config_file_gives_our_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    LLAMA.write(model)
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model-path: {model}\n"
        "sparse-threshold: 8192\n"
        "sparse-budget: 512\n"
        "query-predictor: spade\n"
        "disable-radix-cache: true\n"
    )
    args = parse(["--config", str(config), "--sparse-budget", "256"])
    assert args.sparse_budget == 256
    assert args.query_predictor == "spade"
    assert args.disable_radix_cache


@pytest.mark.parametrize(
    "spelling", ["--model-path {}", "--model {}", "--model-path={}", "--model={}", "--model-pat {}"]
)
def test_the_users_model_is_served_however_the_flag_is_spelled(
    spelling: str, tmp_path: Path
) -> None:
    model = LLAMA.write(tmp_path)
    assert parse(spelling.format(model).split()).model_path == str(model)


def test_what_was_chosen_is_said_at_start_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model("Qwen3", {"head_dim": 128}).write(tmp_path)
    parse(["--model-path", str(model)])
    parse_server_args(["--model-path", str(model)])
    logged = capsys.readouterr().err
    assert f"cache rank: --sparse-budget {DEFAULT_CURVE}, --kv-residency quantspec\n" in logged
    assert "cache rank: --query-predictor last (" in logged
    selected = r"cache rank: tokens are selected in this process \(.+\), --sparse-budget "
    assert re.search(selected + re.escape(str(DEFAULT_CURVE)), logged)

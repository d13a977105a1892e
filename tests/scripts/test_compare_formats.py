"""compare_formats on tiny sequences: its numbers, data and files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.measure.recording import Recorder
from cache_rank.protocol import Load, Row, UpMessage
from cache_rank.residency import FORMATS
from cache_rank.selector import Selector
from scripts.compare_formats import main, parse_options
from scripts.formats.comparison import compare_formats, make_sample
from scripts.formats.quality import Measurement
from scripts.formats.report import Comparison
from scripts.shared.models import BUNDLED_FOLDER

CPU = torch.device("cpu")
TINY = "--tokens 600 --layers 1 --query-heads 4 --head-dim 32 --steps 2 --budget 32 --repeats 1"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """The comparison of all formats, as the program writes it."""
    out = tmp_path_factory.mktemp("formats")
    assert main([*TINY.split(), "--out", str(out)]) == 0
    return msgspec.json.decode((out / "formats.json").read_bytes(), type=Comparison), out


def line(comparison: Comparison, name: str, options: str = "") -> Measurement:
    (found,) = (m for m in comparison.measurements if (m.format, m.options) == (name, options))
    return found


def test_tokens_as_they_came_have_no_error(comparison: tuple[Comparison, Path]) -> None:
    exact = line(comparison[0], "bf16")
    assert exact.bits == 16
    assert exact.key_error == exact.value_error == exact.output_error == 0
    assert exact.score_error == pytest.approx(0, abs=1e-12)
    assert exact.recall == 1


def test_every_format_has_a_line_and_is_worth_what_it_holds(
    comparison: tuple[Comparison, Path],
) -> None:
    assert {m.format for m in comparison[0].measurements} > set(FORMATS)
    for m in comparison[0].measurements:
        assert m.bits is not None
        assert m.attention_mass is not None
        assert m.recall is not None
        assert 0 < m.bits <= 20
        assert 0 <= m.recall <= 1
        assert 0 <= m.attention_mass <= 1
        if m.format in FORMATS:
            assert m.encode is not None
            assert m.encode.tokens > 0
    fine, coarse = (line(comparison[0], "quantspec", f"reading={bits}") for bits in (8, 4))
    assert fine.output_error == coarse.output_error  # both nibbles are shipped
    assert fine.score_error is not None
    assert coarse.score_error is not None
    assert fine.score_error < coarse.score_error / 10
    two, four = (line(comparison[0], "hack", f"bits={bits},partition=64") for bits in (2, 4))
    assert two.key_error is not None
    assert four.key_error is not None
    assert four.key_error < two.key_error / 10


def test_outlier_channels_cost_a_token_its_bits_and_a_channel_nothing(
    comparison: tuple[Comparison, Path],
) -> None:
    channel, token = (
        line(comparison[0], *name)
        for name in (("INT8 per channel", "groups of 128 tokens"), ("INT8 per token",))
    )
    assert channel.key_error is not None
    assert token.key_error is not None
    assert channel.key_error < token.key_error / 5


def test_a_comparison_comes_back_from_its_file(comparison: tuple[Comparison, Path]) -> None:
    read, out = comparison
    assert read.tokens == 600
    assert read.command[-1] == str(out)
    text = (out / "formats.md").read_text()
    assert "| bf16 |  | 16.000 | 16 | 0.0e+00 |" in text
    assert text.count("| lynx | reading=anchor |") == 2  # errors, and throughput
    assert (out / "formats.png").stat().st_size > 1000


def test_a_recording_is_compared_on(tmp_path: Path) -> None:
    model = ModelShape(1, query_heads=4, kv_heads=2, head_dim=16, dtype="bfloat16", scale=0.25)
    config = CacheRankConfig(model, 1, sparse_budget=8, max_swap_tokens=8, max_rows=1)
    generator = torch.Generator().manual_seed(1)
    shipment = torch.randn((2, 1, 300, 2, 16), generator=generator).to(torch.bfloat16)
    (boundary,) = config.boundaries
    current = torch.randn(UpMessage.size(config, boundary, 1) // 2, generator=generator)
    up = UpMessage(config, boundary, 1, current.to(torch.bfloat16).view(torch.uint8))
    selector, recorder = Selector(config, CPU, 1 << 24), Recorder(tmp_path, config)
    selector.load(selector.begin(1), shipment)
    recorder.record_load(Load(1, 0, 300), shipment)
    recorder.record_step(selector, selector.begin_step(0, [Row(1, 300)]), boundary, up)

    options = parse_options(
        ["--recording", str(tmp_path), "--formats", "bf16,quantspec", "--budget", "8"]
    )
    found = compare_formats(options, make_sample(options))
    assert found.tokens == 301
    assert found.steps == 1
    assert line(found, "bf16").recall == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recording {folder}", "holds no recorded decode step"),
        ("--recording {folder}/broken", "not an event of a recording"),
        ("--recording {folder}/other", "not an event of a recording"),
        ("--tokens 2000 --budget 4000", "smaller budget"),
        ("--tokens 200", "longer sequence"),
        ("--tokens 600 --only-layers 1,2", "no layer 2: there are 0 to 1"),
        ("--head-dim 20", "multiple of"),
        ("--tokens 600 --query-heads 3", "multiple of"),
    ],
)
def test_bad_data_is_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("broken", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "00000001.pt").write_bytes(b"nothing")
    torch.save(torch.zeros(3), tmp_path / "other" / "00000001.pt")
    words = arguments.format(folder=tmp_path).split()
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_served_model_is_compared_on(tmp_path: Path) -> None:
    """The bundled model reads a file of this project, and its second layer is compared on."""
    readme = Path(__file__).parents[2] / "README.md"
    options = parse_options(
        [
            *("--model-path", str(BUNDLED_FOLDER), "--text", str(readme), "--only-layers", "1"),
            *("--dtype", "bfloat16", "--tokens", "400", "--steps", "4", "--budget", "32"),
            *("--formats", "bf16,quantspec", "--repeats", "1"),
        ]
    )
    sample = make_sample(options)
    assert sample.keys.shape == sample.values.shape == (1, 2, 400, 64)
    assert sample.keys.dtype == sample.queries.dtype == torch.bfloat16
    assert sample.steps == 4
    assert sample.describe().startswith("README.md, as read by bundled_model: 1 layers")
    found = compare_formats(options, sample)
    assert line(found, "bf16").recall == 1
    coarse = line(found, "quantspec", "reading=4").recall
    assert coarse is not None
    assert 0.5 < coarse <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--text {folder}/none", "none"),
        ("--text {folder}/short", "3 tokens, and the sequence takes 488"),
        ("--text {folder}/short --tokens 9000000", "bundled_model takes"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("a b")
    words = ["--tokens", "500", "--steps", "4", *arguments.format(folder=tmp_path).split()]
    assert main(["--model-path", str(BUNDLED_FOLDER), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *("--formats bf16,int5", "--steps 0", "--formats ,", "--only-layers one"),
        *("--model-path folder", "--text file", "--model-path a --text b --recording c"),
    ],
)
def test_bad_arguments_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments.split())
    assert arguments.split()[0] in capsys.readouterr().err


def test_wrong_layers_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--only-layers", "one"])
    assert "'one': write numbers separated by commas" in capsys.readouterr().err

"""compare_formats on tiny sequences: what its numbers mean, its data and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_rank_kernels.score.reference import score_tokens

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import DownMessage, Load, Row, UpMessage
from cache_rank.recording import Recorder
from cache_rank.residency import FORMATS
from cache_rank.selector import Selector
from cache_rank.timeline import Timeline
from comparison.measurements import Variant, config_for, measure, variants
from comparison.quality import Exact, Measurement
from comparison.report import Comparison, read_comparison
from comparison.samples import Sample, read_recording
from comparison.synthetic import OUTLIER_CHANNELS, OUTLIER_MAGNITUDE, synthetic_sample
from comparison.uniform import measure_uniform, uniform_quantization
from scripts.compare_formats import compare_formats, main, make_sample, parse_options

CPU = torch.device("cpu")
TINY = "--tokens 600 --layers 1 --query-heads 4 --head-dim 32 --steps 2 --budget 32 --repeats 1"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """Of all formats, as the program writes it."""
    out = tmp_path_factory.mktemp("formats")
    assert main([*TINY.split(), "--out", str(out)]) == 0
    return read_comparison(out / "formats.json"), out


def tiny_sample(dtype: torch.dtype = torch.bfloat16) -> Sample:
    return synthetic_sample(600, 2, 1, 4, 2, 32, dtype=dtype)


def line(comparison: Comparison, name: str, options: str = "") -> Measurement:
    (found,) = (m for m in comparison.measurements if (m.format, m.options) == (name, options))
    return found


def test_tokens_as_they_came_have_no_error(comparison: tuple[Comparison, Path]) -> None:
    exact, coarse = (line(comparison[0], "bf16", options) for options in ("", "score keys fp8"))
    assert exact.bits == 16
    assert coarse.bits == 20  # 8 more for a key, none for a value
    for m in (exact, coarse):
        assert m.key_error == m.value_error == m.output_error == 0
    assert exact.score_error == pytest.approx(0, abs=1e-12)
    assert exact.recall == 1
    assert coarse.score_error is not None
    assert 1e-5 < coarse.score_error < 0.1


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


def test_errors_are_those_of_the_definition() -> None:
    sample = tiny_sample(torch.float32)
    exact = Exact.of(sample)
    config = config_for(sample, Variant("bf16", {}), 32, 1)
    m = measure_uniform(sample, exact, config, 4, per_channel=False)
    keys, values = (part.clone() for part in (sample.keys, sample.values))
    for part in (keys, values):
        part[:, :, :512] = uniform_quantization(part[:, :, :512], 4, dim=-1)  # whole groups

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).square().sum() / one.square().sum())

    older = slice(0, 600 - 256)
    assert m.key_error == pytest.approx(error(sample.keys[:, :, older], keys[:, :, older]))
    assert m.value_error == pytest.approx(error(sample.values[:, :, older], values[:, :, older]))
    outputs: list[list[torch.Tensor]] = [[], []]
    scores: list[list[torch.Tensor]] = [[], []]
    for side, (k, v) in enumerate(((sample.keys, sample.values), (keys, values))):
        for tokens, query in zip((599, 600), sample.queries, strict=True):
            for head in range(4):
                logits = k[0, head // 2, :tokens] @ query[0, head] * 32**-0.5
                outputs[side].append(logits.softmax(0) @ v[0, head // 2, :tokens])
            score = score_tokens(query, k[:, :, :tokens], 32**-0.5)
            score = score[..., 4 : tokens - 1 - 64]  # neither sinks nor recent tokens
            scores[side].append((score - score.mean(-1, keepdim=True)).flatten())
    for measured, (true, found) in ((m.output_error, outputs), (m.score_error, scores)):
        assert measured == pytest.approx(error(torch.cat(true), torch.cat(found)), rel=1e-4)


def test_synthetic_keys_are_a_function_of_the_seed_and_have_outlier_channels() -> None:
    sample, again = (synthetic_sample(2000, 3, 2, 4, 2, 64, seed=7) for _ in range(2))
    other = synthetic_sample(2000, 3, 2, 4, 2, 64, seed=8)
    for one, two, third in zip(sample[:3], again[:3], other[:3], strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, two)
        assert not torch.equal(one, third)
    first = sample.keys[:, :, :20].float().mean(2)  # before the means have moved
    large = first.abs() > OUTLIER_MAGNITUDE / 2
    assert (large.sum(-1) == OUTLIER_CHANNELS).all()
    assert not torch.equal(large[0, 0], large[0, 1])
    moved = (sample.keys[:, :, -20:].float().mean(2) - first)[large].abs()
    assert moved.max() > 1  # the fastest of them
    assert moved.min() < 1  # the slowest
    assert sample.values.float().std() < 2
    values = sample.values.float().mean(2)
    assert values.abs().max() < 1
    # A few tokens have most of the attention.
    scores = Exact.of(sample).scores[-1].exp()
    assert (scores.topk(100).values.sum(-1) > 0.4 * scores.sum(-1)).all()


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    """What a selector received for the longest of two sequences, in two groups of layers."""
    model = ModelShape(3, query_heads=4, kv_heads=2, head_dim=16, dtype="bfloat16", scale=0.25)
    config = CacheRankConfig(model, 2, sparse_budget=8, delta_capacity=8, max_rows=2)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    lengths = {1: 300, 2: 310}
    steps = 4
    tokens = {
        epoch: [normal(2, 3, 2, length + steps, 16), normal(steps, 3, 4, 16)]
        for epoch, length in lengths.items()
    }
    selector, recorder = Selector(config, CPU, 1 << 24), Recorder(tmp_path)
    timeline = Timeline("", CPU)
    for epoch, length in lengths.items():
        sequence = selector.begin(epoch)
        for part in (slice(0, 200), slice(200, length)):  # shipped in two parts
            shipment = tokens[epoch][0][:, :, :, part].transpose(2, 3).contiguous()
            recorder.record_load(Load(epoch, part.start, shipment.shape[2]), shipment)
            selector.load(sequence, shipment)
    for number in range(steps):
        rows = [Row(epoch, length + number) for epoch, length in lengths.items()]
        step = selector.begin_step(number, rows)
        for group, layers in enumerate(config.groups):
            size = UpMessage.size(config, len(layers), len(rows))
            up = UpMessage(config, len(layers), len(rows), torch.zeros(size, dtype=torch.uint8))
            part = slice(layers.start, layers.stop)
            for index, row in enumerate(rows):
                kv, queries = tokens[row.epoch]
                up.queries[index] = queries[number, part]
                up.keys[index], up.values[index] = kv[:, part, :, row.position]
            selector.append(step, group, up)
            scores = selector.score(step, group, timeline)
            size = DownMessage.size(config, len(layers), len(rows))
            down = DownMessage(config, len(layers), len(rows), torch.zeros(size, dtype=torch.uint8))
            selector.answer(step, group, scores, down, timeline)
            if (number, group) != (steps - 1, 1):  # it was stopped in the middle of a step
                recorder.record_step(selector, step, group, up)
        selector.end_step(step)

    sample = read_recording(tmp_path, 2)
    kv, queries = tokens[2]
    assert torch.equal(sample.keys, kv[0, :, :, : 310 + steps - 1])
    assert torch.equal(sample.values, kv[1, :, :, : 310 + steps - 1])
    assert torch.equal(sample.queries, queries[1:3])
    assert sample.positions == range(311, 313)
    assert sample.scale == 0.25

    options = parse_options(
        ["--recording", str(tmp_path), "--formats", "bf16,quantspec", "--budget", "8"]
    )
    found = compare_formats(options, make_sample(options))
    assert found.tokens == 313
    assert found.steps == 3
    assert line(found, "bf16").recall == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recording {folder}", "holds no recorded decode step"),
        ("--recording {folder}/broken", "not an event of a recording"),
        ("--recording {folder}/other", "not an event of a recording"),
        ("--tokens 2000 --budget 4000", "smaller budget"),
        ("--tokens 200", "longer sequence"),
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


@pytest.mark.parametrize("arguments", ["--formats bf16,int5", "--steps 0", "--formats ,"])
def test_bad_arguments_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments.split())
    assert arguments.split()[0] in capsys.readouterr().err


def test_a_format_without_lines_of_its_own_is_compared_with_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FORMATS, "new", FORMATS["quantspec"])
    assert variants(["new"], torch.bfloat16) == [Variant("new", {})]
    sample = tiny_sample()
    m = measure(sample, Exact.of(sample), Variant("new", {}), 32, repeats=1)
    assert m.bits is not None
    assert m.score is not None
    assert m.score.gigabytes is None

"""Formats that hold codes: what is encoded and when, and that it is what scores and answers use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from held_sequences import CPU, Held, append_together, rows_of
from small_models import GQA, MODELS, small_config
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels import by_device
from cache_rank.kernels.hack import reference as hack
from cache_rank.kernels.lynx import reference as lynx
from cache_rank.kernels.quantspec import reference as quantspec
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.pages import PAGE_TOKENS

COARSE: dict[str, dict[str, Any]] = {
    "lynx": {"reading": "anchor"},
    "quantspec": {"reading": 4},
    "hack": {},
}
FINE = {"lynx": {"reading": "full"}, "quantspec": {"reading": 8}}
WITH_KERNELS = ("quantspec", "lynx")

SCORE_TOLERANCE = 5e-3
"""Kernels round queries to 15 bits, and keys of lynx to half precision."""

every_format = pytest.mark.parametrize("name", COARSE)
SINGLE = msgspec.structs.replace(GQA, dtype="float32")
LARGE = ModelShape(3, 8, 2, 128, "bfloat16", 128**-0.5)
"""As GPUs take it."""


def coded_tokens(name: str, resident: int) -> int:
    if name == "quantspec":
        return max(0, resident // 128 - 1) * 128
    group = {"lynx": 256, "hack": 64}[name]
    return resident // group * group


def decoded(
    name: str, tokens: Tensor, is_keys: bool, fine: bool = True, alpha: float = 1
) -> Tensor:
    """What a format makes of (..., tokens, D), float32."""
    coded = coded_tokens(name, tokens.shape[-2])
    if not coded:
        return tokens.float()
    complete, rest = tokens[..., :coded, :], tokens[..., coded:, :]
    if name == "lynx":
        pages = complete.unflatten(-2, (-1, 256))
        groups = lynx.decode_tokens(lynx.align(lynx.encode_page(pages, alpha)), alpha, fine)
    elif name == "hack":
        if is_keys:
            groups = hack.decode(hack.encode_keys(complete, 4, 64), 4, 64)
        else:
            groups = hack.decode(hack.encode_values(complete, 4, 64), 4, 64)
        return torch.cat((groups, rest.float()), dim=-2)
    else:
        codes = quantspec.encode(complete.unflatten(-2, (-1, 128)), dim=-2 if is_keys else -1)
        groups = quantspec.decode(codes, 8 if fine else 4)
    return torch.cat((groups.flatten(-3, -2), rest.float()), dim=-2)


def codes_of(held: Held) -> list[bytes]:
    """Of all complete groups, plane by plane."""
    coded = coded_tokens(held.config.kv_residency, held.resident)
    pages = held.page_table[: -(-coded // PAGE_TOKENS)].long()
    return [
        plane[pages]
        .permute(1, 2, 0, 3, 4)
        .flatten(2, 3)[:, :, : coded * plane.shape[3] // PAGE_TOKENS]
        .contiguous()
        .view(torch.uint8)
        .cpu()
        .numpy()
        .tobytes()
        for planes in held.residency._tokens.planes
        for plane in planes
    ]


@every_format
@pytest.mark.parametrize(
    ("count", "model"),
    [
        (127, "gqa"),
        (256, "mqa"),
        (257, "mha"),
        (700, "gqa"),
    ],
)
def test_complete_groups_are_decoded_and_the_newest_tokens_as_they_came(
    name: str, count: int, model: str
) -> None:
    """Decoded in full, whatever scores read."""
    held = Held.whole(name, count, model=MODELS[model], **COARSE[name])
    coded = coded_tokens(name, count)
    for read, source, is_keys in zip(
        held.read(), (held.keys, held.values), (True, False), strict=True
    ):
        expected = decoded(name, source, is_keys)
        assert read.dtype == source.dtype
        assert torch.equal(read, expected.to(source.dtype))
        assert torch.equal(read[..., coded:, :], source[..., coded:, :])
        if coded:
            assert not torch.equal(read, source)
    if name == "quantspec" and count >= 128:
        assert count - coded in range(128, 256)


@pytest.mark.parametrize("name", ["lynx", "quantspec"])
@pytest.mark.parametrize("count", [256, 2900])
@pytest.mark.parametrize("coarse", [False, True])
def test_scores_are_those_of_the_decoded_keys(name: str, count: int, coarse: bool) -> None:
    options = (COARSE if coarse else FINE)[name]
    held = Held.whole(name, count, model=SINGLE, **options)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(SINGLE.layers, SINGLE.query_heads, SINGLE.head_dim, generator=generator)
    keys = decoded(name, held.keys, is_keys=True, fine=not coarse)
    expected = score_tokens(queries, keys, SINGLE.scale)
    torch.testing.assert_close(held.score(queries), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, 64, 2900])
def test_scores_of_hack_take_the_query_in_8_bits_but_for_the_newest_keys(count: int) -> None:
    held = Held.whole("hack", count, model=SINGLE)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(SINGLE.layers, SINGLE.query_heads, SINGLE.head_dim, generator=generator)
    keys = decoded("hack", held.keys, is_keys=True)
    grouped = queries.unflatten(1, (SINGLE.kv_heads, -1))
    in_8_bits = hack.decode(hack.encode_queries(grouped, 64), 8, 64)
    coded = coded_tokens("hack", count)
    parts = (
        in_8_bits @ keys[:, :, :coded].transpose(-1, -2),
        grouped @ keys[:, :, coded:].transpose(-1, -2),
    )
    logits = torch.cat(parts, dim=-1) * SINGLE.scale
    expected = torch.log_softmax(logits, dim=-1).amax(dim=-2)
    torch.testing.assert_close(held.score(queries), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "partition", "seed"),
    [(2, 16, None), (2, 64, 7), (4, 32, 0)],
)
def test_hack_encodes_by_its_options(bits: int, partition: int, seed: int | None) -> None:
    options: dict[str, Any] = {"bits": bits, "partition": partition}
    if seed is not None:
        options |= {"rounding": "stochastic", "seed": seed}
    model = ModelShape(3, 2, 1, 96, "bfloat16", 1.0)  # partitions of channels are not all full
    held = Held.whole("hack", 150, model=model, **options)
    by_steps = Held.empty("hack", 150, model=model, **options)
    for count in (50, 13, 64):
        by_steps.load(count)
        by_steps.append()
    by_steps.load(20)
    assert codes_of(held) == codes_of(by_steps)
    keys, values = (part[:, :, :128] for part in (held.keys, held.values))
    encoded = hack.encode_keys(keys, bits, partition, seed)
    expected_keys = hack.decode(encoded, bits, partition)
    encoded = hack.encode_values(values, bits, partition, seed)
    expected_values = hack.decode(encoded, bits, partition)
    found = held.read(positions=torch.arange(128))
    for part, expected in zip(found, (expected_keys, expected_values), strict=True):
        assert torch.equal(part, expected.to(part.dtype))
    config = held.config
    assert msgspec.json.decode(msgspec.json.encode(config), type=CacheRankConfig) == config


def test_alpha_is_that_of_the_options() -> None:
    held = Held.whole("lynx", 256, model=SINGLE, alpha=20)
    assert torch.equal(held.read()[0], decoded("lynx", held.keys, is_keys=True, alpha=20))
    assert not torch.equal(held.read()[0], decoded("lynx", held.keys, is_keys=True))


@pytest.mark.parametrize(
    ("name", "part", "position", "wrong", "complete"),
    [
        ("lynx", "keys", 77, float("nan"), 256),
        ("quantspec", "values", 77, float("inf"), 256),
        ("hack", "keys", 77, -float("inf"), 128),
        ("mosaickv", "keys", 77, float("nan"), 96),
        ("mosaickv", "values", 77, -float("inf"), 96),
        ("mosaickv", "keys", 290, 3e38, 320),
        ("mosaickv", "values", 290, float("inf"), 320),
    ],
)
def test_what_is_not_finite_is_refused_with_its_layer_and_head(
    name: str, part: str, position: int, wrong: float, complete: int
) -> None:
    """When its group, or its buffer, is complete."""
    held, by_steps = Held.empty(name, 400), Held.empty(name, 400)
    for one in (held, by_steps):
        getattr(one, part)[2, 1, position, 3] = wrong
    message = f"{part} of layer 2, kv head 1 are not finite, or span more than float32"
    with pytest.raises(ValueError, match=message):
        held.load(400)
    by_steps.load(complete - 1)
    with pytest.raises(ValueError, match=message):
        by_steps.append()


@every_format
def test_what_decodes_beyond_the_range_of_the_dtype_stays_finite(name: str) -> None:
    largest = 65504.0
    held = Held.empty(name, 256 if name == "lynx" else 384, model=MODELS["mqa"])
    for part in (held.keys, held.values):
        part.copy_(part.sign() * largest - part)
    held.load(held.keys.shape[2])
    for read in held.read():
        assert read.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bf16", {"alpha": 3}, "kv_residency_options alpha=3: bf16 takes no options"),
        (
            "lynx",
            {"alpha": 0},
            r"kv_residency_options alpha=0: lynx takes alpha from 0\.01 to 1000, reading full "
            "or anchor",
        ),
        ("lynx", {"alpha": float("nan")}, "alpha=nan: lynx takes"),
        ("quantspec", {"reading": 5}, "reading=5: quantspec takes reading 4 or 8"),
        (
            "hack",
            {"bits": 3},
            "bits=3: hack takes bits 4 or 2, partition 64 or 32 or 16, rounding nearest or "
            "stochastic, seed a whole number from 0 to 65535",
        ),
        ("hack", {"seed": 0.5}, r"seed=0\.5: hack takes .*, seed a whole number from 0 to 65535"),
        ("mosaickv", {"rate": 50}, "rate=50: mosaickv takes rate auto or 0 or 62.5 or 75 or 87.5"),
        ("mosaickv", {"loss": "small"}, "loss=small: mosaickv takes"),
    ],
)
def test_options_are_refused_with_those_that_there_are(
    name: str, options: dict[str, Any], message: str
) -> None:
    config = small_config(kv_residency=name, kv_residency_options=options)
    with pytest.raises(ValueError, match=message):
        residency.require_format(config)


@pytest.mark.parametrize("name", [*COARSE, "mosaickv"])
def test_checksums_are_refused(name: str) -> None:
    message = f"kv_residency {name}: checksums compare tokens bit for bit"
    with pytest.raises(ValueError, match=message):
        residency.require_format(small_config(kv_residency=name, checksum=True))


def held_after_arrivals(
    name: str, model: ModelShape, device: torch.device, **options: Any
) -> tuple[Held, list[Tensor]]:
    """A sequence that came by shipments and steps, beside another; what its messages and scores
    said."""
    held, other = Held.two(name, 700, 140, model=model, device=device, **options)
    held.load(510)
    other.load(126)
    for _ in range(3):
        append_together([held, other])
    held.load(186)
    held.append()
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(model.layers, model.query_heads, model.head_dim, generator=generator)
    said = [held.score(queries.to(device)), other.score(queries.to(device))]
    entering = torch.randint(-9, 128, (2, 2, model.kv_heads, 50), generator=generator)
    entering[0] += torch.where(entering[0] >= 0, 572, 0)
    out = torch.full((2, *entering.shape, model.head_dim), 7.0, dtype=model.torch_dtype)
    out, entering = out.to(device), entering.to(device, torch.int32)
    rows = rows_of([held, other], [699, 128])
    held.residency.gather(rows, range(1, 3), entering, out[0], out[1])
    return held, [out, *held.read(), *other.read(), *said]


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs take no heads as small as these")
def test_kernels_hold_and_say_what_the_references_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one format; tests/kernels has the kernels of all."""
    name, model = "quantspec", MODELS["mqa"]
    options = COARSE[name]
    expected, expected_said = held_after_arrivals(name, model, CPU, **options)
    monkeypatch.setattr(by_device, "is_on_gpu", lambda *arguments: True)
    held, said = held_after_arrivals(name, model, CPU, **options)
    assert codes_of(held) == codes_of(expected)
    for one, other in zip(said[:-2], expected_said[:-2], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(said[-2:], expected_said[-2:], strict=True):
        torch.testing.assert_close(one, other, atol=SCORE_TOLERANCE, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("coarse", [False, True])
def test_gpus_hold_and_say_what_cpus_do(name: str, coarse: bool) -> None:
    options = (COARSE if coarse else FINE)[name]
    expected, expected_said = held_after_arrivals(name, LARGE, CPU, **options)
    held, said = held_after_arrivals(name, LARGE, torch.device("cuda"), **options)
    assert codes_of(held) == codes_of(expected)
    for one, other in zip(said[:-2], expected_said[:-2], strict=True):
        assert torch.equal(one.cpu(), other)
    for one, other in zip(said[-2:], expected_said[-2:], strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=SCORE_TOLERANCE, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "position"), [("quantspec", 77), ("lynx", 77), ("mosaickv", 77), ("mosaickv", 290)]
)
def test_gpus_refuse_what_is_not_finite_some_steps_later(name: str, position: int) -> None:
    held = Held.empty(name, 700, model=LARGE, device=torch.device("cuda"))
    held.values[2, 1, position, 3] = float("nan")
    with pytest.raises(ValueError, match="values of layer 2, kv head 1 are not finite"):  # noqa: PT012
        held.load(330)
        for _ in range(100):
            torch.cuda.synchronize()
            held.append()
            held.residency.check()

"""Formats that hold codes: what is encoded and when, and that it is what scores and answers use."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from cache_rank.protocol import AnswerHeader
from cache_rank.residency.coded import CodedResidency
from cache_rank.step_rows import StepRows

CPU = torch.device("cpu")
PAGES = 12
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
        groups = lynx.decode_page(lynx.encode_page(pages, alpha), alpha, fine)
    elif name == "hack":
        if is_keys:
            groups = hack.decode_keys(hack.encode_keys(complete, 4, 64), 4, 64)
        else:
            groups = hack.decode_values(hack.encode_values(complete, 4, 64), 4, 64)
        return torch.cat((groups, rest.float()), dim=-2)
    else:
        encode = quantspec.encode_keys if is_keys else quantspec.encode_values
        groups = quantspec.decode(encode(complete.unflatten(-2, (-1, 128))), 8 if fine else 4)
    return torch.cat((groups.flatten(-3, -2), rest.float()), dim=-2)


@dataclass
class Held:
    """A sequence in a residency; K and V are (layers, Hkv, tokens, D) each."""

    config: CacheRankConfig
    residency: CodedResidency
    keys: Tensor
    values: Tensor
    slot: int
    pages: list[int]
    resident: int = 0

    @classmethod
    def empty(
        cls,
        name: str,
        count: int,
        model: ModelShape = GQA,
        slot: int = 1,
        beside: Held | None = None,
        tokens_seed: int = 0,
        device: torch.device = CPU,
        **options: Any,
    ) -> Held:
        config = small_config(model, kv_residency=name, kv_residency_options=options)
        held = beside.residency if beside else residency.create(config, PAGES, device)
        assert isinstance(held, CodedResidency)
        generator = torch.Generator().manual_seed(tokens_seed)
        shape = (2, model.layers, model.kv_heads, count, model.head_dim)
        tokens = torch.randn(shape, generator=generator).to(model.torch_dtype)
        keys, values = tokens.to(held._device)
        pages = list(range(PAGES))
        random.Random(tokens_seed).shuffle(pages)
        return cls(config, held, keys, values, slot, pages)

    @classmethod
    def whole(cls, name: str, count: int, **arguments: Any) -> Held:
        held = cls.empty(name, count, **arguments)
        held.load(count)
        return held

    @property
    def page_table(self) -> Tensor:
        return torch.tensor(self.pages, dtype=torch.int32, device=self.keys.device)

    @property
    def layers(self) -> range:
        return range(self.config.model.layers)

    def load(self, count: int) -> None:
        part = slice(self.resident, self.resident + count)
        shipment = torch.stack((self.keys, self.values))[:, :, :, part].transpose(2, 3)
        shipment = shipment.contiguous()
        self.residency.load(self.page_table, self.slot, self.resident, shipment)
        self.resident += count

    def append(self) -> None:
        """The next token, in two groups of layers."""
        append_together([self])

    def rows(self, position: int) -> StepRows:
        return rows_of([self], [position])

    def read(self, positions: range | None = None) -> tuple[Tensor, Tensor]:
        index = torch.tensor(positions or range(self.resident), device=self.keys.device)
        shape = (*self.keys.shape[:2], len(index))
        return self.residency.read(self.rows(self.resident - 1), self.layers, index.expand(shape))

    def score(self, queries: Tensor, exact: bool = False) -> Tensor:
        rows = self.rows(self.resident - 1)
        scores = self.residency.score(rows, self.layers, queries.unsqueeze(0), exact)
        return scores[0, ..., : self.resident].clone()

    def codes(self) -> list[bytes]:
        """Of all complete groups, plane by plane."""
        coded = coded_tokens(self.config.kv_residency, self.resident)
        pages = self.page_table[: -(-coded // PAGE_TOKENS)].long()
        return [
            plane[pages]
            .permute(1, 2, 0, 3, 4)
            .flatten(2, 3)[:, :, : coded * plane.shape[3] // PAGE_TOKENS]
            .contiguous()
            .view(torch.uint8)
            .cpu()
            .numpy()
            .tobytes()
            for planes in self.residency._tokens.planes
            for plane in planes
        ]


def rows_of(sequences: list[Held], positions: list[int]) -> StepRows:
    device = sequences[0].keys.device
    return StepRows(
        torch.tensor([held.slot for held in sequences], dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.ones(len(sequences), dtype=torch.int32, device=device),
        torch.stack([held.page_table for held in sequences]),
        torch.zeros((len(sequences), len(AnswerHeader._fields)), dtype=torch.int64, device=device),
        capacity=max(positions) + 1,
    )


def append_together(sequences: list[Held]) -> None:
    """The next token of every sequence of one residency, in two groups of layers."""
    model = sequences[0].config.model
    ring = torch.zeros((4, model.layers, model.query_heads, 5, model.head_dim)).to(
        sequences[0].keys
    )
    rows = rows_of(sequences, [held.resident for held in sequences])
    for layers in (range(0, 2), range(2, model.layers)):
        group = slice(layers.start, layers.stop)
        up = torch.stack(
            [
                torch.cat(
                    (
                        torch.ones_like(ring[held.slot, group, :, 0]),
                        held.keys[group, :, held.resident],
                        held.values[group, :, held.resident],
                    ),
                    dim=1,
                )
                for held in sequences
            ]
        )
        sequences[0].residency.append(rows, layers, up, ring)
    for held in sequences:
        assert (ring[held.slot, :, :, held.resident % 5] == 1).all()
        held.resident += 1


@every_format
@given(data=st.data())
def test_codes_are_the_same_bits_however_tokens_arrive(name: str, data: st.DataObject) -> None:
    size = st.one_of(st.just(1), st.integers(2, 40), st.integers(100, 600))
    sizes = data.draw(st.lists(size, min_size=1, max_size=5))
    total = sum(sizes)
    held = Held.empty(name, total)
    for count in sizes:
        if count == 1:
            held.append()
        else:
            held.load(count)
    whole = Held.whole(name, total)
    assert held.codes() == whole.codes()
    for one, other in zip(held.read(), whole.read(), strict=True):
        assert torch.equal(one, other)
    queries = torch.randn(len(held.layers), GQA.query_heads, GQA.head_dim)
    assert torch.equal(held.score(queries), whole.score(queries))


@every_format
def test_sequences_that_share_steps_are_encoded_as_alone(name: str) -> None:
    """Token by token through several groups, at different positions of them."""
    left = Held.empty(name, 530, slot=0)
    right = Held.empty(name, 600, slot=3, beside=left, tokens_seed=1)
    left.pages, right.pages = left.pages[:3], left.pages[3:6]
    right.load(70)
    while left.resident < 530:
        append_together([left, right])
    for held, seed in ((left, 0), (right, 1)):
        whole = Held.whole(name, 530 if held is left else 600, tokens_seed=seed)
        assert held.codes() == whole.codes()
        for one, other in zip(held.read(), whole.read(), strict=True):
            assert torch.equal(one, other)


@every_format
@pytest.mark.parametrize("count", [1, 127, 128, 255, 256, 257, 384, 512, 700])
@pytest.mark.parametrize("model", MODELS)
def test_complete_groups_are_decoded_and_the_newest_tokens_as_they_came(
    name: str, count: int, model: str
) -> None:
    held = Held.whole(name, count, model=MODELS[model])
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


@every_format
def test_a_group_is_encoded_when_it_is_complete_and_never_again(name: str) -> None:
    count, expected = {
        "lynx": (300, [256]),
        "quantspec": (400, [256, 384]),
        "hack": (200, [64, 128, 192]),
    }[name]
    held = Held.empty(name, count)
    before: list[Tensor] = []
    changes = []
    for position in range(count):
        held.append()
        keys, _ = held.read()
        now = decoded(name, held.keys[:, :, : position + 1], is_keys=True)
        assert torch.equal(keys, now.to(keys.dtype))
        if before and not torch.equal(before[-1], keys[:, :, :position]):
            changes.append(position + 1)
        before = [keys]
    assert changes == expected


@pytest.mark.parametrize("name", ["lynx", "quantspec"])
@pytest.mark.parametrize("count", [5, 130, 256, 300, 700, 2900])
@pytest.mark.parametrize("coarse", [False, True])
def test_scores_are_those_of_the_decoded_keys(name: str, count: int, coarse: bool) -> None:
    options = (COARSE if coarse else FINE)[name]
    held = Held.whole(name, count, model=SINGLE, **options)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(SINGLE.layers, SINGLE.query_heads, SINGLE.head_dim, generator=generator)
    for exact in (False, True):
        keys = decoded(name, held.keys, is_keys=True, fine=exact or not coarse)
        expected = score_tokens(queries, keys, SINGLE.scale)
        torch.testing.assert_close(held.score(queries, exact), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, 64, 130, 2900])
def test_scores_of_hack_take_the_query_in_8_bits_but_for_the_newest_keys(count: int) -> None:
    held = Held.whole("hack", count, model=SINGLE)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(SINGLE.layers, SINGLE.query_heads, SINGLE.head_dim, generator=generator)
    keys = decoded("hack", held.keys, is_keys=True)
    expected = score_tokens(queries, keys, SINGLE.scale)
    torch.testing.assert_close(held.score(queries, exact=True), expected, rtol=1e-5, atol=1e-5)

    grouped = queries.unflatten(1, (SINGLE.kv_heads, -1))
    in_8_bits = hack.decode_keys(hack.encode_queries(grouped, 64), 8, 64)
    coded = coded_tokens("hack", count)
    parts = (
        in_8_bits @ keys[:, :, :coded].transpose(-1, -2),
        grouped @ keys[:, :, coded:].transpose(-1, -2),
    )
    logits = torch.cat(parts, dim=-1) * SINGLE.scale
    expected = torch.log_softmax(logits, dim=-1).amax(dim=-2)
    torch.testing.assert_close(held.score(queries), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("partition", [16, 32, 64])
@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("bits", [2, 4])
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
    assert held.codes() == by_steps.codes()
    keys, values = (part[:, :, :128] for part in (held.keys, held.values))
    found_keys, found_values = held.read(range(128))
    for found, expected in (
        (
            found_keys,
            hack.decode_keys(hack.encode_keys(keys, bits, partition, seed), bits, partition),
        ),
        (
            found_values,
            hack.decode_values(hack.encode_values(values, bits, partition, seed), bits, partition),
        ),
    ):
        assert torch.equal(found, expected.to(found.dtype))
    config = held.config
    assert msgspec.json.decode(msgspec.json.encode(config), type=CacheRankConfig) == config


def test_alpha_is_that_of_the_options() -> None:
    held = Held.whole("lynx", 256, model=SINGLE, alpha=20)
    assert torch.equal(held.read()[0], decoded("lynx", held.keys, is_keys=True, alpha=20))
    assert not torch.equal(held.read()[0], decoded("lynx", held.keys, is_keys=True))


@every_format
def test_gather_is_decoded_in_full_whatever_scores_read(name: str) -> None:
    left = Held.empty(name, 700, slot=2, **COARSE[name])
    right = Held.empty(name, 300, slot=0, beside=left, tokens_seed=1)
    left.pages, right.pages = left.pages[:3], left.pages[3:6]
    left.load(700)
    right.load(300)
    layers = range(1, 3)
    generator = torch.Generator().manual_seed(0)
    entering = torch.randint(-1, 300, (2, 2, 2, 9), generator=generator, dtype=torch.int32)
    entering[0, ..., 0] = 699
    shape = (*entering.shape, GQA.head_dim)
    keys, values = (torch.full(shape, 7.0, dtype=GQA.torch_dtype) for _ in range(2))
    rows = rows_of([left, right], [699, 299])
    left.residency.gather(rows, layers, entering, keys, values)
    for row, held in enumerate((left, right)):
        for gathered, source in ((keys, held.keys), (values, held.values)):
            full = decoded(name, source, is_keys=source is held.keys).to(source.dtype)
            for layer in layers:
                for head in range(GQA.kv_heads):
                    place = (row, layer - layers.start, head)
                    index = entering[place].long()
                    expected = full[layer, head, index.clamp(min=0)]
                    expected[index < 0] = 7.0
                    assert torch.equal(gathered[place], expected)


@every_format
def test_pages_and_slots_serve_one_sequence_after_another(name: str) -> None:
    first = Held.whole(name, 700)
    for count in (300, 1, 513):
        following = Held.empty(name, count, beside=first, tokens_seed=count)
        following.pages = first.pages[::-1]
        following.load(count - 1 if count > 1 else 1)
        while following.resident < count:
            following.append()
        alone = Held.whole(name, count, tokens_seed=count)
        for one, other in zip(following.read(), alone.read(), strict=True):
            assert torch.equal(one, other)
        queries = torch.randn(len(alone.layers), GQA.query_heads, GQA.head_dim)
        assert torch.equal(following.score(queries), alone.score(queries))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_token_takes_the_bytes_of_its_codes_and_of_what_they_are_relative_to(
    head_dim: int,
) -> None:
    model = ModelShape(3, 4, 2, head_dim, "bfloat16", 1.0)
    heads = model.layers * model.kv_heads
    elements = 2 * heads * head_dim
    by_name = {
        # A byte an element; a page has 2 float32 a channel, a chunk 2 float16.
        "lynx": elements + elements * 8 // 256 + elements * 4 // 32,
        # A byte an element; 2 bfloat16 a channel and group of keys, and a token of values.
        "quantspec": elements + heads * (head_dim * 4 // 128 + 4),
        # 4 bits an element; 2 bfloat16 a partition of 64 elements, and of keys 2 bytes.
        "hack": elements // 2 + elements * 4 // 64 + elements // 64,
    }
    rings_of = {"lynx": 256, "quantspec": 256, "hack": 64}
    for name, expected in by_name.items():
        config = small_config(model, kv_residency=name)
        assert residency.bytes_per_token(config) == expected
        assert expected < 0.6 * model.bytes_per_token
        held = residency.create(config, PAGES, CPU)
        assert isinstance(held, CodedResidency)
        planes = [plane for planes in held._tokens.planes for plane in planes]
        assert PAGES * PAGE_TOKENS * expected == sum(plane.nbytes for plane in planes)
        rings = sum(ring.nbytes for ring in held._tokens.rings)
        assert residency.fixed_bytes(config) == rings
        assert rings == 4 * rings_of[name] * model.bytes_per_token


@every_format
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_is_not_finite_is_refused_with_its_layer_and_head(
    name: str, wrong: float, part: str
) -> None:
    held = Held.empty(name, 400)
    getattr(held, part)[2, 1, 77, 3] = wrong
    message = f"{part} of layer 2, kv head 1 are not finite"
    with pytest.raises(ValueError, match=message):
        held.load(400)
    by_steps = Held.empty(name, 400)
    getattr(by_steps, part)[2, 1, 77, 3] = wrong
    by_steps.load(127 if name == "hack" else 255)
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
        ("lynx", {"alpha": "three"}, "alpha=three: lynx takes"),
        ("lynx", {"alpha": float("nan")}, "alpha=nan: lynx takes"),
        ("lynx", {"reading": 4}, "reading=4: lynx takes"),
        ("quantspec", {"reading": 5}, "reading=5: quantspec takes reading 4 or 8"),
        ("quantspec", {"group": 64}, "group=64: quantspec takes"),
        (
            "hack",
            {"bits": 3},
            "bits=3: hack takes bits 4 or 2, partition 64 or 32 or 16, rounding nearest or "
            "stochastic, seed from 0 to 65535",
        ),
        ("hack", {"seed": 0.5}, r"seed=0\.5: hack takes a whole number"),
        ("hack", {"seed": float("nan")}, "seed=nan: hack takes bits"),
    ],
)
def test_options_are_refused_with_those_that_there_are(
    name: str, options: dict[str, Any], message: str
) -> None:
    config = small_config(kv_residency=name, kv_residency_options=options)
    with pytest.raises(ValueError, match=message):
        residency.create(config, PAGES, CPU)


@every_format
def test_options_survive_the_control_channel(name: str) -> None:
    options = {**COARSE[name], **({"alpha": 2.5} if name == "lynx" else {})}
    config = small_config(kv_residency=name, kv_residency_options=options)
    assert msgspec.json.decode(msgspec.json.encode(config), type=CacheRankConfig) == config


@every_format
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checksum": True}, "kv_residency {}: checksums compare tokens bit for bit"),
    ],
)
def test_what_codes_cannot_be_combined_with_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.format(name)):
        residency.create(small_config(kv_residency=name, **changes), PAGES, CPU)


def held_after_arrivals(
    name: str, model: ModelShape, device: torch.device, **options: Any
) -> tuple[Held, list[Tensor]]:
    """A sequence that came by shipments and steps, beside another; what its messages and scores
    said."""
    held = Held.empty(name, 700, model=model, device=device, **options)
    other = Held.empty(name, 140, model=model, slot=3, beside=held, tokens_seed=1)
    held.pages, other.pages = held.pages[:3], held.pages[3:6]
    held.load(510)
    other.load(126)
    for _ in range(3):
        append_together([held, other])
    held.load(186)
    held.append()
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(model.layers, model.query_heads, model.head_dim, generator=generator)
    said = [held.score(queries.to(device)), other.score(queries.to(device), exact=True)]
    entering = torch.randint(-9, 128, (2, 2, model.kv_heads, 50), generator=generator)
    entering[0] += torch.where(entering[0] >= 0, 572, 0)
    out = torch.full((2, *entering.shape, model.head_dim), 7.0, dtype=model.torch_dtype)
    out, entering = out.to(device), entering.to(device, torch.int32)
    rows = rows_of([held, other], [699, 128])
    held.residency.gather(rows, range(1, 3), entering, out[0], out[1])
    return held, [out, *held.read(), *other.read(), *said]


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs take no heads as small as these")
@pytest.mark.parametrize(
    ("name", "model", "coarse"),
    [
        ("quantspec", "mqa", True),
        pytest.param("lynx", "mha", False, marks=pytest.mark.thorough),
        pytest.param("lynx", "mqa", True, marks=pytest.mark.thorough),
        pytest.param("quantspec", "mha", False, marks=pytest.mark.thorough),
    ],
)
def test_kernels_hold_and_say_what_the_references_do(
    name: str, model: str, coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (COARSE if coarse else FINE)[name]
    expected, expected_said = held_after_arrivals(name, MODELS[model], CPU, **options)
    monkeypatch.setattr(by_device, "is_on_gpu", lambda *arguments: True)
    held, said = held_after_arrivals(name, MODELS[model], CPU, **options)
    assert held.codes() == expected.codes()
    for one, other in zip(said[:-2], expected_said[:-2], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(said[-2:], expected_said[-2:], strict=True):
        torch.testing.assert_close(one, other, atol=SCORE_TOLERANCE, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("coarse", [False, True])
def test_gpus_hold_and_say_what_cpus_do(name: str, coarse: bool) -> None:
    model = ModelShape(3, 8, 2, 128, "bfloat16", 128**-0.5)
    options = (COARSE if coarse else FINE)[name]
    expected, expected_said = held_after_arrivals(name, model, CPU, **options)
    held, said = held_after_arrivals(name, model, torch.device("cuda"), **options)
    assert held.codes() == expected.codes()
    for one, other in zip(said[:-2], expected_said[:-2], strict=True):
        assert torch.equal(one.cpu(), other)
    for one, other in zip(said[-2:], expected_said[-2:], strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=SCORE_TOLERANCE, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_gpus_refuse_what_is_not_finite_some_steps_later(name: str) -> None:
    held = Held.empty(name, 700, device=torch.device("cuda"))
    held.values[2, 1, 77, 3] = float("nan")
    with pytest.raises(ValueError, match="values of layer 2, kv head 1 are not finite"):  # noqa: PT012
        held.load(600)
        for _ in range(100):
            torch.cuda.synchronize()
            held.append()
            held.residency.check()

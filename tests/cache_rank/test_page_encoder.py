"""Pages that are encoded elsewhere are those that the cache rank would have made of the tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from modelled_request import Request
from served_selector import Served
from small_models import GQA, MODELS, small_config
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels import by_device
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Row
from cache_rank.residency.coded import CodedPages
from cache_rank.residency.encoding import PageEncoder, shipment_bytes, tokens_as_codes
from cache_rank.residency.hack import HackResidency
from cache_rank.resident_sequence import ResidentSequence

CPU = torch.device("cpu")
LARGE = ModelShape(3, 8, 2, 128, "bfloat16", 128**-0.5)
"""As GPUs take it."""
FORMATS: dict[str, dict[str, Any]] = {
    "quantspec": {},
    "lynx": {"alpha": 20},
    "hack": {"bits": 4},
    "hack of 2 bits": {"bits": 2, "rounding": "stochastic", "seed": 7},
}

every_format = pytest.mark.parametrize("name", FORMATS)


def config_of(name: str, model: ModelShape = GQA, **changes: Any) -> CacheRankConfig:
    held, options = name.split()[0], FORMATS[name]
    return small_config(model, kv_residency=held, kv_residency_options=options, **changes)


def encode(encoder: PageEncoder, tokens: Tensor) -> Tensor:
    """The message of tokens; what is around its memory is left alone."""
    size = encoder.size(tokens.shape[2])
    memory = torch.full((size + 512,), 77, dtype=torch.uint8, device=tokens.device)
    encoder.encode(tokens, memory[256:][:size])
    assert (memory[:256] == 77).all()
    assert (memory[256 + size :] == 77).all()
    return memory[256:][:size]


def ship_pages(
    served: Served, sequence: ResidentSequence, prompt: Tensor, counts: list[int]
) -> None:
    """Ship pages of a prompt, (2, layers, n, Hkv, D), so many at a time; all but one encoder's."""
    device = served.selector.overflow.device
    encoder = PageEncoder(served.config, max(counts) * PAGE_TOKENS, device)
    for pages in counts:
        first, count = sequence.complete, pages * PAGE_TOKENS
        room = encoder.room(count)
        room.copy_(prompt[:, :, first : first + count])
        packed = encode(encoder, room)
        assert packed.nbytes == shipment_bytes(served.config, count)
        assert served.selector.may_load_pages(sequence, first)
        served.selector.load_pages(sequence, count, packed)


def held_by(served: Served, sequence: ResidentSequence) -> list[Tensor]:
    """All that is read of a sequence: its codes, and the tokens of its ring, byte by byte."""
    tokens = served.selector._residency._tokens  # type: ignore[attr-defined]
    coded = tokens.coded(sequence.tokens)
    held = []
    for planes, ring in zip(tokens.planes, tokens.rings, strict=True):
        for plane in planes:
            of_pages = plane[sequence.pages].permute(1, 2, 0, 3, 4).flatten(2, 3)
            held.append(of_pages[:, :, : coded * plane.shape[3] // PAGE_TOKENS])
        newest = torch.arange(coded, sequence.tokens, device=ring.device) % ring.shape[3]
        held.append(ring[sequence.slot][:, :, newest])
    return [part.contiguous().view(torch.uint8).cpu() for part in held]


def assert_held_alike(served: Served, left: ResidentSequence, right: ResidentSequence) -> None:
    assert left.tokens == right.tokens
    for one, other in zip(held_by(served, left), held_by(served, right), strict=True):
        assert torch.equal(one, other)


def ragged(name: str, model: ModelShape, length: int, device: torch.device) -> None:
    """Ship a prompt as codes and as it is, and let both sequences go on."""
    config = config_of(name, model)
    served = Served(config, pages=40, device=device)
    request = Request(config, 1, length)
    by_codes, as_is = served.selector.begin(1), served.selector.begin(2)
    pages = length // PAGE_TOKENS
    ship_pages(served, by_codes, request.prompt, [2] * (pages // 2) + [1] * (pages % 2))
    assert by_codes.tokens == pages * PAGE_TOKENS - (residency.shared_tail(config) or 0)
    served.ship(by_codes, request.prompt, 50)
    served.ship(as_is, request.prompt, 300)
    assert_held_alike(served, by_codes, as_is)
    for _ in range(3):
        computed = request.compute()
        rows = [Row(sequence.sequence_id, sequence.tokens) for sequence in (by_codes, as_is)]
        for down in served.exchange(rows, [computed, computed]):
            for part in (down.slots, down.keys, down.values):
                assert torch.equal(part[0], part[1])
    assert_held_alike(served, by_codes, as_is)


@every_format
@pytest.mark.parametrize(
    ("length", "model"),
    [(256, "gqa"), (257, "mqa"), (384, "mha"), (511, "gqa"), (767, "gqa"), (1022, "mha")],
)
def test_codes_from_elsewhere_are_those_of_the_cache_rank(
    name: str, length: int, model: str
) -> None:
    """At borders of pages and groups, and between; at some the steps complete a group."""
    ragged(name, MODELS[model], length, CPU)


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("length", [512, 767, 1022])
def test_codes_from_elsewhere_are_those_of_the_cache_rank_on_gpus(name: str, length: int) -> None:
    ragged(name, LARGE, length, torch.device("cuda"))


@every_format
@pytest.mark.parametrize("more", [0, 1])
def test_a_sequence_goes_on_with_codes_behind_pages_of_another(name: str, more: int) -> None:
    config = config_of(name)
    served, length = Served(config, pages=40), 4 * PAGE_TOKENS - 8
    selector, request = served.selector, Request(config, 1, length)
    first, second, alone = (selector.begin(sequence_id) for sequence_id in (1, 2, 3))
    served.ship(alone, request.prompt, 50)
    ship_pages(served, first, request.prompt, [1, 2])
    shared = 3 - bool(residency.shared_tail(config))
    assert selector.may_share(first, [*range(shared)])
    assert not selector.may_share(first, [*range(shared + 1)])
    served.ship(first, request.prompt, 50)
    selector.share(first, [7, 8])
    selector.adopt(second, [7, 8][: 1 + more])
    ship_pages(served, second, request.prompt, [2 - more])
    served.ship(second, request.prompt, 50)
    for sequence in (first, second):
        assert_held_alike(served, sequence, alone)
    # What it names next is behind what it has of others.
    selector.share(second, [9])
    index = 1 + more
    packed = selector.pack_named(9)
    assert torch.equal(packed, selector._residency.pack_page(alone.pages[index]))


@every_format
def test_what_follows_pages_may_come_with_tokens_of_others(name: str) -> None:
    """Of one sequence the last tokens of its pages, of one these and more, of one only more."""
    config = config_of(name)
    served = Served(config, pages=40)
    selector, request = served.selector, Request(config, 1, 700)
    tail = residency.shared_tail(config) or 0
    sequences = [selector.begin(sequence_id) for sequence_id in (1, 2, 3)]
    alone = selector.begin(4)
    served.ship(sequences[2], request.prompt[:, :, :300])
    for sequence in sequences[:2]:
        ship_pages(served, sequence, request.prompt, [2])
    counts = [tail // 2 or 5, tail + 90, 270]
    parts, tokens = [], []
    for sequence, count in zip(sequences, counts, strict=True):
        parts.append((sequence, sum(part.shape[2] for part in tokens), count))
        tokens.append(request.prompt[:, :, sequence.tokens : sequence.tokens + count])
    selector.load_together(parts, torch.cat(tokens, dim=2))
    for sequence in sequences:
        served.ship(sequence, request.prompt)
    served.ship(alone, request.prompt, 300)
    for sequence in sequences:
        assert_held_alike(served, sequence, alone)


def test_pages_go_on_where_pages_end() -> None:
    """Not behind tokens that came as they are."""
    config = config_of("quantspec")
    served, request = Served(config, pages=40), Request(config, 1, 600)
    sequence, selector = served.selector.begin(1), served.selector
    assert not selector.may_load_pages(sequence, PAGE_TOKENS)
    ship_pages(served, sequence, request.prompt, [1])
    assert not selector.may_load_pages(sequence, 0)
    assert selector.may_load_pages(sequence, PAGE_TOKENS)
    served.ship(sequence, request.prompt[:, :, :PAGE_TOKENS])
    assert not selector.may_load_pages(sequence, PAGE_TOKENS)


@pytest.mark.parametrize(
    ("name", "part", "wrong"),
    [("lynx", 0, float("nan")), ("quantspec", 1, float("inf")), ("hack", 0, -float("inf"))],
)
@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["reference", "triton"]
)
def test_what_is_not_finite_is_refused_by_the_cache_rank(
    name: str, part: int, wrong: float, kernels: bool
) -> None:
    """As if it had encoded it; what was encoded before or after is not touched by it."""
    config = config_of(name, LARGE if kernels else GQA)
    device = torch.device("cuda") if kernels else CPU
    served, request = Served(config, pages=40, device=device), Request(config, 1, 600)
    ship_pages(served, served.selector.begin(1), request.prompt, [1, 1])
    request.prompt[part, 2, 77, 1, 3] = wrong
    named = f"{('keys', 'values')[part]} of layer 2, kv head 1 are not finite"
    with pytest.raises(ValueError, match=named):  # noqa: PT012
        ship_pages(served, served.selector.begin(2), request.prompt, [2])
        for _ in range(100):
            torch.cuda.synchronize()
            served.selector._residency.check()
    encoder = PageEncoder(config, PAGE_TOKENS, device)
    for page in (1, 0):
        tokens = request.prompt[:, :, page * PAGE_TOKENS :][:, :, :PAGE_TOKENS]
        encoder.room(PAGE_TOKENS).copy_(tokens)
        flag = encode(encoder, encoder.room(PAGE_TOKENS))[:4].view(torch.int32)
        assert bool(flag) == (page == 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs take no heads as small as these")
def test_kernels_encode_what_the_references_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one format; tests/kernels has the kernels of all."""
    config = config_of("hack", MODELS["mqa"])
    tokens = Request(config, 1, 2 * PAGE_TOKENS).prompt
    packed = []
    for runs_kernels in (False, True):
        monkeypatch.setattr(by_device, "is_on_gpu", lambda *of, runs=runs_kernels: runs)
        encoder = PageEncoder(config, 2 * PAGE_TOKENS, CPU)
        encoder.room(2 * PAGE_TOKENS).copy_(tokens)
        packed.append(encode(encoder, encoder.room(2 * PAGE_TOKENS)))
    layout = CodedPages(HackResidency, config, 2)
    (_, one_of_all), (_, other_of_all) = (layout.of(memory) for memory in packed)
    for one, other in zip(sum(one_of_all, ()), sum(other_of_all, ()), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_chunk_of_codes_has_no_more_bytes_and_no_fewer_tokens() -> None:
    model = ModelShape(36, 32, 8, 128, "bfloat16", 1.0)
    found = {
        name: tokens_as_codes(config_of(name, model), 512)
        for name in ("quantspec", "lynx", "hack", "hack of 2 bits")
    }
    assert found == {"quantspec": 768, "lynx": 768, "hack": 1536, "hack of 2 bits": 3072}
    for name, tokens in found.items():
        assert shipment_bytes(config_of(name, model), tokens) <= 512 * model.bytes_per_token
    quantspec = config_of("quantspec", model)
    assert tokens_as_codes(quantspec, 100) == 0  # no page fits
    assert tokens_as_codes(quantspec, 260) == 0  # a page has fewer tokens
    for exact in ("bf16", "mosaickv"):
        assert tokens_as_codes(small_config(model, kv_residency=exact), 512) == 0
    sketched = msgspec.structs.replace(quantspec, score_keys="sketch")
    assert tokens_as_codes(sketched, 512) == 0

"""K and V go from the pool of one server to that of another, over a socket of this machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import msgspec
import pytest
import torch
from both_ends import LAYERS, METADATA, Servers, draw_rows, ends, make_pool, sent_in_chunks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from waiting import wait_until

from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.encoding import PageEncoder
from sglang_ext.disaggregation import wire
from sglang_ext.disaggregation.codec import BUFFERS, HostPages, PageCodec
from sglang_ext.disaggregation.wire import Hello, Tail, Wire, link_of_environment
from sglang_ext.flags import WIRE_FORMATS


@pytest.mark.parametrize("codes", [*WIRE_FORMATS, "hack:bits=2,partition=16"])
@pytest.mark.parametrize(("tokens", "chunks"), [(700, (300, 10, 260)), (512, ()), (40, (40,))])
@pytest.mark.parametrize("in_parts", [False, True])
def test_what_comes_is_what_the_codec_reads(
    servers: Servers, codes: str, tokens: int, chunks: tuple[int, ...], in_parts: bool
) -> None:
    """Whole pages as codes, the tokens behind them exactly, and no other row is written."""
    source, target = draw_rows(tokens, 2), draw_rows(tokens, 3)
    expected = make_pool(1)
    codec = PageCodec(servers.prefill, codes)
    whole = tokens // PAGE_TOKENS * PAGE_TOKENS
    for start in range(0, whole, PAGE_TOKENS):
        codec_of_target = PageCodec(expected, codes)
        page = slice(start, start + PAGE_TOKENS)
        codec_of_target.decode(codec.encode(source[page]), target[page])
    raw = servers.prefill.collect(source[whole:]).view(-1).view(torch.uint8)
    expected.put_raw(raw, target[whole:])

    departure, arrival = servers.begin(7, target, codes, in_parts=in_parts)
    sent_in_chunks(departure, source, *chunks)
    ends(arrival, "here")
    wait_until(lambda: departure.is_done, 5)
    assert arrival.metadata == METADATA
    for found, wanted in (
        (servers.decode.keys, expected.keys),
        (servers.decode.values, expected.values),
    ):
        for one, other in zip(found.tensors, wanted.tensors, strict=True):
            assert torch.equal(one, other)
    if codes == "bf16":
        exact = servers.prefill.collect(source)
        assert torch.equal(servers.decode.collect(target), exact)
    elif whole:
        exact, came = servers.prefill.collect(source), servers.decode.collect(target)
        error = (came - exact)[:, :, :whole].norm() / exact[:, :, :whole].norm()
        assert 0 < error < (0.6 if "bits=2" in codes else 0.12)
        assert departure.sent_bytes < tokens * servers.prefill.token_bytes * 0.9
    assert [rows.tolist() for rows in servers.written] == [target.tolist()]
    for index, (rows, codec, packed) in enumerate(servers.passed_on):
        first = index * PAGE_TOKENS
        assert torch.equal(rows, target[: first + PAGE_TOKENS])
        came = PageCodec(servers.prefill, codes).encode(source[first : first + PAGE_TOKENS])
        assert torch.equal(packed, came)
        assert codec.config.kv_residency == codes.split(":")[0]
    assert len(servers.passed_on) == tokens // PAGE_TOKENS


@pytest.mark.parametrize("codes", ["lynx", "quantspec"])
def test_first_parts_can_be_read_before_the_rest_comes(
    servers: Servers, codes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata overtakes pages, and the rest comes behind all first parts and the last tokens."""
    monkeypatch.setenv("CACHE_RANK_LINK_GBPS", "0.004")
    servers.link = link_of_environment()
    source, target = draw_rows(1100, 2), draw_rows(1100, 3)
    departure, arrival = servers.begin(7, target, codes, in_parts=True)
    sent_in_chunks(departure, source, 300)

    def is_readable() -> bool:
        assert arrival.poll() == "coming", arrival.failure
        return arrival.can_be_read

    wait_until(lambda: arrival.metadata is not None, 8)
    assert not is_readable()
    wait_until(is_readable, 8)
    assert servers.passed_on == []
    exact, by_first_parts = servers.prefill.collect(source), servers.decode.collect(target)
    assert torch.equal(by_first_parts[:, :, 1024:], exact[:, :, 1024:])
    codec = PageCodec(servers.prefill, codes)
    packed = codec.encode(source[:PAGE_TOKENS])
    assert codec.part_bytes["first"] + codec.part_bytes["rest"] == codec.packed_bytes
    parts = codec.take_part(packed, "first"), codec.take_part(packed, "rest")
    assert torch.equal(codec.join(*parts), packed)
    ends(arrival, "here")
    came = servers.decode.collect(target)
    errors = [((each - exact).norm() / exact.norm()).item() for each in (came, by_first_parts)]
    assert 0 < errors[0] < 0.02 < errors[1] < 0.1
    assert len(servers.passed_on) == 4


@given(order=st.permutations(range(8)), polls=st.lists(st.booleans(), min_size=9, max_size=9))
def test_parts_may_come_in_any_order(order: list[int], polls: list[bool]) -> None:
    """Metadata anywhere, and the rest of a page anywhere behind its first part."""
    servers = Servers()
    source, target = draw_rows(3 * PAGE_TOKENS + 5, 2), draw_rows(3 * PAGE_TOKENS + 5, 3)
    arrival = servers.arrive(7, target, in_parts=True)
    found: list[tuple[Hello, Wire]] = []
    wait_until(lambda: bool(found.extend(filter(None, [servers.listener.take(7)])) or found), 5)
    one, codec = found[0][1], PageCodec(servers.prefill, "lynx")
    pages = [codec.encode(rows) for rows in source[: 3 * PAGE_TOKENS].split(PAGE_TOKENS)]

    def send(frame: wire.Frame, payload: Tensor | None = None) -> None:
        one.send(frame, None if payload is None else memoryview(payload.numpy()), servers.link)

    def send_part(index: int, part: wire.Part) -> None:
        packed = codec.take_part(pages[index], part)
        send(wire.Page("lynx", len(packed), part), packed)

    first_parts: list[Callable[[], None]] = [
        functools.partial(send_part, index, "first") for index in range(3)
    ]
    tail = servers.prefill.collect(source[-5:]).view(-1).view(torch.uint8)
    first_parts.append(lambda: send(Tail(5, len(tail)), tail))
    rests = [functools.partial(send_part, index, "rest") for index in range(3)]
    sent, is_next = [0, 0], [first_parts, rests]
    for which, polled in zip(order, polls, strict=False):
        if which == 7:
            send(wire.Metadata(48), torch.tensor(list(METADATA), dtype=torch.uint8))
        else:
            has_first_part = sent[1] < min(3, sent[0])
            lane = int(sent[0] == 4 or (which >= 4 and has_first_part))
            is_next[lane][sent[lane]]()
            sent[lane] += 1
        if polled:
            assert arrival.poll() == "coming", arrival.failure
    one.send(wire.End(), None, servers.link)
    ends(arrival, "here")
    one.wait_acknowledged()
    expected = make_pool(1)
    for packed, rows in zip(pages, target[: 3 * PAGE_TOKENS].split(PAGE_TOKENS), strict=True):
        PageCodec(expected, "lynx").decode(packed, rows)
    expected.put_raw(tail, target[-5:])
    assert torch.equal(servers.decode.collect(target), expected.collect(target))
    for (*_, packed), page in zip(servers.passed_on, pages, strict=True):
        assert torch.equal(packed, page)
    assert arrival.metadata == METADATA


@pytest.mark.parametrize("codes", ["quantspec", "lynx", "hack", "hack:bits=2,partition=16"])
@pytest.mark.parametrize("dense_layers", [0, 1])
def test_a_page_goes_on_as_the_codes_that_the_cache_rank_would_have_made(
    servers: Servers, codes: str, dense_layers: int
) -> None:
    pool, rows = servers.prefill, draw_rows(PAGE_TOKENS, 2)
    codec = PageCodec(pool, codes)
    config = codec.config
    held = msgspec.structs.replace(config.model, layers=LAYERS - dense_layers)
    encoder = PageEncoder(msgspec.structs.replace(config, model=held), PAGE_TOKENS, pool.device)
    passed_on, expected = torch.full((2, encoder.size(PAGE_TOKENS)), 77, dtype=torch.uint8)
    encoder.pack(codec.planes(codec.encode(rows)), passed_on)
    tokens = encoder.room(PAGE_TOKENS)
    tokens.copy_(pool.collect(rows)[:, dense_layers:])
    encoder.encode(tokens, expected)
    assert torch.equal(passed_on, expected)


def test_several_at_once_share_the_link(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_RANK_LINK_GBPS", "0.05")
    servers.link = link_of_environment()
    source = draw_rows(2400, 4)
    parts, targets = source.split(600), draw_rows(2400, 5).split(600)
    pairs = [servers.begin(room, rows) for room, rows in enumerate(targets)]
    since = time.monotonic()
    for (departure, _), part in zip(pairs, parts, strict=True):
        sent_in_chunks(departure, part, 512)
    for (_, arrival), part, rows in zip(pairs, parts, targets, strict=True):
        ends(arrival, "here", 30)
        assert torch.equal(servers.decode.collect(rows), servers.prefill.collect(part))
    size = 2400 * servers.prefill.token_bytes
    assert time.monotonic() - since > size / 0.05e9 * 8 * 0.9


def test_a_page_goes_before_the_prompt_is_computed(servers: Servers) -> None:
    source, target = draw_rows(600, 6), draw_rows(600, 7)
    departure, arrival = servers.begin(1, target)
    departure.send(source[:300], [], None)
    wait_until(lambda: arrival.poll() == "coming" and arrival._placed == PAGE_TOKENS, 5)
    time.sleep(2.5 * wire.ALIVE_SECONDS)
    departure.send(source[300:], [], METADATA)
    ends(arrival, "here")


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_whoever_gives_up_ends_the_other(servers: Servers, who: str) -> None:
    source, target = draw_rows(600, 6), draw_rows(600, 7)
    departure, arrival = servers.begin(1, target)
    departure.send(source[:300], [], None)
    (departure if who == "prefill" else arrival).fail("aborted")
    ends(arrival, "failed")
    wait_until(lambda: departure.failure is not None, 5)
    assert "aborted" in {departure.failure, arrival.failure}
    assert servers.written == []


def test_what_cannot_be_encoded_fails_alone(servers: Servers) -> None:
    source, target = draw_rows(600, 8), draw_rows(1200, 9)
    servers.prefill.keys.tensors[1][source[100], 1, 3] = torch.inf
    departure, arrival = servers.begin(1, target[:600], "hack")
    sent_in_chunks(departure, source)
    ends(arrival, "failed")
    assert "keys of layer 1, kv head 1 are not finite" in str(departure.failure)
    servers.prefill.keys.tensors[1][source[100], 1, 3] = 0.0
    departure, arrival = servers.begin(2, target[600:], "hack")
    sent_in_chunks(departure, source)
    ends(arrival, "here")


def test_another_that_waits_for_memory_meanwhile_does_not_fail(servers: Servers) -> None:
    source, target = draw_rows(1200, 8), draw_rows(1200, 9)
    servers.prefill.keys.tensors[1][source[100], 1, 3] = torch.inf
    free, arriving = servers.pages
    buffers = [free.take(0, 1) for _ in range(BUFFERS)]
    waiting, arrives = servers.begin(1, target[600:], "hack")
    sent_in_chunks(waiting, source[600:])
    time.sleep(0.3)  # its page is to be encoded when there is memory
    servers.pages = HostPages(False), arriving
    departure, arrival = servers.begin(2, target[:600], "hack")
    sent_in_chunks(departure, source[:600])
    ends(arrival, "failed")
    for buffer in buffers:
        assert buffer is not None
        free.give_back(buffer)
    ends(arrives, "here")

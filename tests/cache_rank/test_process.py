"""A real cache-rank process, driven over its wire as the inference rank drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import torch
from modelled_request import Request, assert_refused
from small_models import GQA, MHA, small_config, with_rotary
from torch import Tensor
from wired_rank import LONG, InferenceRank

from cache_rank.kernels.newest.reference import attend_to
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import (
    NO_SEQUENCE,
    Adopt,
    Attend,
    AttendedMessage,
    Drop,
    End,
    Flush,
    Load,
    LoadTogether,
    Open,
    Restore,
    Row,
    Share,
)
from cache_rank.residency.encoding import PageEncoder
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError, ProcessSettings


def test_says_what_to_do_when_no_token_fits(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CacheRankDownError, match="cannot start"):
        InferenceRank(
            small_config(GQA), settings=ProcessSettings("127.0.0.1", memory_fraction=1e-9)
        )
    assert (
        "raise --cache-rank-mem-fraction, or lower --max-sparse-requests" in capfd.readouterr().err
    )


@pytest.fixture(scope="module")
def lasting_rank() -> Iterator[InferenceRank]:
    """One process for all tests that leave it serving."""
    policy = {"query_predictor": "spade", "verified_tokens": 3}
    config = small_config(with_rotary(GQA), checksum=True, **policy)
    with closing(InferenceRank(config)) as rank:
        yield rank


@pytest.fixture
def rank(lasting_rank: InferenceRank) -> Iterator[InferenceRank]:
    """The lasting process, empty; it must be the same one afterwards."""
    yield lasting_rank
    lasting_rank.connection.control.send(Flush())
    assert lasting_rank.supervisor.connection is lasting_rank.connection


ARRIVALS = {0: (40, 15), 6: (90, None), 20: (1, None), 30: (7, 3)}
"""Step -> tokens of the prompt that arrives, and how many a Load ships (None: all)."""

DEPARTURES = {26: 0, 36: 0, 42: 1}
"""Step -> which of the live requests ends."""


def test_selections_equal_the_synchronous_reference_slot_by_slot(rank: InferenceRank) -> None:
    """test_selector.py steps other models in this process."""
    live: list[Request] = []
    for step in range(50):
        if step in DEPARTURES:
            rank.end(live.pop(DEPARTURES[step]))
        if step in ARRIVALS:
            live.append(rank.arrive(*ARRIVALS[step]))
        rank.decode(live if step % 2 else live[::-1])
    rank.end(*live)


def test_refused_rows_are_answered_for_no_sequence_and_the_others_are_served(
    rank: InferenceRank,
) -> None:
    request, ended = rank.arrive(prompt=20), rank.arrive(prompt=20)
    rank.decode([request, ended])
    rank.end(ended)
    garbage = ended.compute()
    never_begun = rank.new_request(prompt=5)
    bad_rows: list[Callable[[], Row]] = [
        lambda: Row(ended.sequence_id, ended.position),
        lambda: Row(never_begun.sequence_id, never_begun.position),
        lambda: Row(NO_SEQUENCE, 0),
        lambda: Row(2**62, 0),
        lambda: Row(request.sequence_id, request.position - 1),
        lambda: Row(request.sequence_id, request.position + 1),
        lambda: Row(request.sequence_id, -1),
    ]
    for bad_row in bad_rows:
        tensors = request.compute()
        rows = [bad_row(), request.row]
        answers = rank.exchange(rows, [garbage, tensors])
        assert_refused(answers, 0)
        request.choose(*tensors)
        request.check_answers(rank.last_step, 1, answers)
    rank.expect_refused(len(bad_rows))
    rank.end(request)


def test_a_second_row_of_one_request_is_refused(rank: InferenceRank) -> None:
    request = rank.arrive(prompt=20)
    tensors = request.compute()
    row = request.row
    answers = rank.exchange([row, row], [tensors, tensors])
    assert_refused(answers, 1)
    request.choose(*tensors)
    request.check_answers(rank.last_step, 0, answers)
    rank.decode([request])
    rank.expect_refused(1)
    rank.end(request)


def test_a_step_that_comes_again_is_refused_whole(rank: InferenceRank) -> None:
    request = rank.arrive(prompt=20)
    rank.decode([request])
    for step in (rank.last_step, rank.last_step - 1, rank.last_step, 0):
        garbage = request.compute()
        rows = [request.row]
        assert_refused(rank.exchange(rows, [garbage], step=step), 0)
    rank.expect_refused(4)
    # The refused steps left no tokens behind.
    rank.decode([request])
    rank.end(request)


def test_loads_and_ends_of_what_is_not_live_are_refused(rank: InferenceRank) -> None:
    request, ended = rank.arrive(prompt=20), rank.arrive(prompt=20)
    rank.decode([request])
    rank.end(ended)
    unshipped = rank.new_request(prompt=5)
    bad_loads = [
        Load(ended.sequence_id, 20, 5),  # is over
        Load(ended.sequence_id, 0, 5),  # a sequence does not begin twice
        Load(unshipped.sequence_id, 3, 5),  # does not begin at the beginning
        Load(request.sequence_id, 0, 5),  # is there already
        Load(request.sequence_id, 20, 5),  # one token behind
        Load(request.sequence_id, 22, 5),  # one token ahead
    ]
    for bad in bad_loads:
        rank.send_load(bad, unshipped.prompt)
    for count in (0, -1, rank.connection.capacity_tokens * 1000):
        rank.connection.control.send(Load(unshipped.sequence_id, 0, count))
    rank.connection.control.send(Load(unshipped.sequence_id, 0, PAGE_TOKENS, as_codes=True))
    rank.end(ended)
    rank.connection.control.send(End([unshipped.sequence_id, 2**40]))
    rank.expect_refused(len(bad_loads) + 6)
    rank.decode([request])
    rank.end(request)


def test_loads_of_several_sequences_come_together_and_each_is_refused_by_itself(
    rank: InferenceRank,
) -> None:
    """The same tokens as in loads of their own; a request's steps read them."""
    first, second = rank.new_request(prompt=20), rank.new_request(prompt=300)
    begun = [
        Load(first.sequence_id, 0, 12),
        Load(second.sequence_id, 0, 290),
    ]
    of_both = [(first, 0, 12), (second, 0, 290)]
    rank.send_load(LoadTogether(begun), tokens_of(of_both))
    rest = [
        Load(second.sequence_id, 290, 10),
        Load(2**40, 3, 5),  # is not live
        Load(second.sequence_id, 290, 10),  # comes twice
        Load(first.sequence_id, 12, 8),
    ]
    of_rest = [(second, 290, 300), (first, 0, 5), (second, 290, 300), (first, 12, 20)]
    rank.send_load(LoadTogether(rest), tokens_of(of_rest))
    code = Load(first.sequence_id, 0, PAGE_TOKENS, as_codes=True)
    for loads in ([], [Load(first.sequence_id, 20, 0)], [code]):
        rank.connection.control.send(LoadTogether(loads))
    rank.expect_refused(4)
    rank.decode([second, first])
    rank.end(first)
    rank.end(second)


def tokens_of(parts: Sequence[tuple[Request, int, int]]) -> Tensor:
    """Tokens [begin, end) of the prompt of each request, one behind the other."""
    return torch.cat([request.prompt[:, :, begin:end] for request, begin, end in parts], dim=2)


def test_pages_come_as_codes_where_pages_end() -> None:
    config = small_config(GQA, kv_residency="quantspec")
    encoder = PageEncoder(config, PAGE_TOKENS, torch.device("cpu"))

    def encoded(request: Request, first: int) -> Tensor:
        room = encoder.room(PAGE_TOKENS)
        room.copy_(request.prompt[:, :, first : first + PAGE_TOKENS])
        packed = torch.empty(encoder.size(PAGE_TOKENS), dtype=torch.uint8)
        encoder.encode(room, packed)
        return packed

    with closing(InferenceRank(config)) as rank:
        request, other = rank.new_request(3 * PAGE_TOKENS), rank.new_request(PAGE_TOKENS)
        page = encoded(request, 0)
        for first in (0, PAGE_TOKENS):
            load = Load(request.sequence_id, first, PAGE_TOKENS, as_codes=True)
            rank.send_load(load, encoded(request, first))
        rest = request.prompt[:, :, 2 * PAGE_TOKENS - 128 :].contiguous()
        rank.load(other, 128)
        bad = [
            Load(request.sequence_id, 0, PAGE_TOKENS, as_codes=True),  # is there already
            Load(request.sequence_id, 3 * PAGE_TOKENS, PAGE_TOKENS, as_codes=True),
            Load(other.sequence_id, PAGE_TOKENS, PAGE_TOKENS, as_codes=True),  # behind tokens
            Load(other.sequence_id, 0, PAGE_TOKENS, as_codes=True),
        ]
        for load in bad:
            rank.send_load(load, page)
        rank.send_load(Load(request.sequence_id, 2 * PAGE_TOKENS, rest.shape[2]), rest)
        rank.send_load(Load(request.sequence_id, 2 * PAGE_TOKENS - 128, rest.shape[2]), rest)
        for count in (100, PAGE_TOKENS + 1):
            load = Load(other.sequence_id, PAGE_TOKENS, count, as_codes=True)
            rank.connection.control.send(load)
        rank.expect_refused(len(bad) + 3)
        tokens = request.prompt.shape[2] + other.prompt.shape[2]
        rank.reports.wait_for(lambda report: report.tokens_held == tokens)
        rows, tensors = [Row(request.sequence_id, 3 * PAGE_TOKENS)], [request.compute()]
        assert all(
            down.header[0, 1] == request.sequence_id for down in rank.exchange(rows, tensors)
        )


def test_pages_that_there_are_not_are_refused(rank: InferenceRank) -> None:
    request, ended, long = rank.arrive(20), rank.arrive(20), rank.arrive(2 * PAGE_TOKENS + 1)
    rank.end(ended)
    send = rank.connection.control.send
    send(Share(long.sequence_id, [1]))
    bad = [
        Share(request.sequence_id, [2]),  # has no complete page
        Share(long.sequence_id, [1]),  # the name is taken
        Share(long.sequence_id, [2, 2]),
        Share(long.sequence_id, [2, 3]),  # has one more
        Share(ended.sequence_id, [2]),
        Adopt(ended.sequence_id, [1]),
        Adopt(long.sequence_id + 1, [1, 1]),
        Adopt(long.sequence_id + 1, [2]),
        Adopt(request.sequence_id, [1]),  # holds tokens
        Adopt(long.sequence_id, [2]),
        Drop([2]),
    ]
    for message in bad:
        send(message)
    rank.expect_refused(len(bad))
    rank.decode([request, long])
    rank.end(request, long)


def test_queries_attend_to_all_that_was_shipped(rank: InferenceRank) -> None:
    """Layer by layer, of two requests; what no inference rank sends is refused first."""
    send, bulk = rank.connection.control.send, rank.connection.link.bulk
    requests = [rank.arrive(prompt=300, chunk=128), rank.arrive(prompt=1)]
    rows = [request.row for request in requests]
    bad = [
        Attend([], 2),
        Attend(rows, 0),
        Attend(rows, 4),  # three were agreed
        Attend([Row(rows[0].sequence_id, 299)], 2),
        Attend([Row(rows[0].sequence_id, 301)], 2),
        Attend([rows[0], Row(2**62, 1)], 2),
    ]
    for message in bad:
        send(message)
    rank.expect_refused(len(bad))
    for width in (1, 3):
        send(Attend(rows, width))
        for layer in range(GQA.layers):
            queries = torch.randn(2, width, GQA.query_heads, GQA.head_dim).bfloat16()
            sent = bulk.send(queries)
            answer = AttendedMessage(rank.config, 2, width, torch.device("cpu"))
            bulk.receive(answer.buffer).wait(LONG)
            sent.wait(LONG)
            for row, request in enumerate(requests):
                keys, values = request.prompt[:, layer].transpose(1, 2)
                seen = torch.ones(1, 1, keys.shape[1], dtype=torch.bool)
                expected = attend_to(queries[row, None], keys[None], values[None], seen, GQA.scale)
                found = answer.outputs[row, None].float(), answer.log_sums[row, None]
                torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    rank.decode(requests)
    rank.end(*requests)


def test_pages_come_back_as_they_were_shipped(rank: InferenceRank) -> None:
    send = rank.connection.control.send

    def receive(into: Tensor) -> Tensor:
        rank.connection.link.bulk.receive(into).wait(LONG)
        return into

    request = rank.arrive(prompt=2 * PAGE_TOKENS + 40, chunk=100)
    send(Share(request.sequence_id, [1, 2]))
    rank.end(request)
    for names in ([1, 2], [2], [2, 1]):
        send(Restore(names))
        assert int(receive(torch.zeros(1, dtype=torch.int64))) == PAGE_TOKENS * len(names)
        for name in names:
            shipped = request.prompt[:, :, (name - 1) * PAGE_TOKENS : name * PAGE_TOKENS]
            shipped = shipped.transpose(2, 3).contiguous()
            assert torch.equal(receive(torch.empty_like(shipped)), shipped)
    for names in ([1, 3], []):
        send(Restore(names))
        assert int(receive(torch.ones(1, dtype=torch.int64))) == 0
    rank.expect_refused(2)
    send(Drop([1, 2]))
    rank.reports.wait_for(lambda report: report.bytes_held == 0)


def test_a_second_open_is_refused(rank: InferenceRank) -> None:
    request = rank.arrive(prompt=20)
    rank.connection.control.send(Open(small_config(MHA), {"up": b"/nowhere"}))
    rank.decode([request])
    rank.expect_refused(1)
    rank.end(request)


def test_a_sequence_id_is_never_used_again(rank: InferenceRank) -> None:
    request = rank.arrive(prompt=20)
    rank.connection.control.send(Flush())
    rank.load(request)
    garbage = request.compute()
    rows = [request.row]
    assert_refused(rank.exchange(rows, [garbage]), 0)
    rank.expect_refused(2)

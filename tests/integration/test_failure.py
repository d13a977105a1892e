"""The cache rank is killed, stopped, slowed down and attacked under eight concurrent streams."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import zmq
from endings import assert_streams_end
from transformers import AutoTokenizer
from waiting import wait_until
from workload import streamed

from scripts.accuracy.pointer_chase import Problem, make_chain
from scripts.shared.serving import Server, serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE
from sglang_ext.server_args import BUNDLED_MODEL

TIMEOUT = 8.0
CHAINS = [make_chain(seed=seed, facts=128, hops=60) for seed in range(8)]
ARGUMENTS = (
    "--cache-rank-gpus 1 --sparse-threshold 270 --sparse-budget 640 --sink-tokens 4 "
    "--recent-tokens 16 "
    '--cache-rank-config {"query_window":8,"layers_per_group":1,"bulk_chunk_tokens":128} '
    "--max-swap-tokens 64 --max-sparse-requests 8 --max-total-tokens 8000 --enable-metrics "
    f"--cache-rank-timeout {TIMEOUT}"
).split()


FULL = pytest.param("full", marks=[pytest.mark.thorough, pytest.mark.xdist_group("failure full")])
WORKING_SET = pytest.param(
    "working-set", marks=[pytest.mark.releases, pytest.mark.xdist_group("failure working-set")]
)

with_working_sets = pytest.mark.parametrize("server", [WORKING_SET], indirect=True)
"""What happens is the same with whole contexts."""


@pytest.fixture(scope="module", params=[FULL, WORKING_SET])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One server has whole contexts, and the other working sets and forecasts."""
    environment = {
        ALLOW_LARGE_BUDGET_VARIABLE: "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    arguments = [*ARGUMENTS, "--inference-kv", request.param]
    if request.param == "working-set":
        # The bundled model has two layers: the second is then selected for in the same step.
        arguments += "--query-predictor forecast --forecast-lead 1 --dense-layers 0".split()
    with serve(arguments, environment) as running:
        running.mode = request.param  # type: ignore[attr-defined]
        yield running


def wait_for_steps(server: Server, count: int) -> None:
    """Wait until so many more steps have been exchanged."""
    steps = server.cache_rank()["steps"]
    wait_until(lambda: server.cache_rank()["steps"] >= steps + count)


class Streams:
    """Eight chains decode at once. Each has one right answer, so a wrong token shows."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.tokenizer: Any = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
        self.prompts = [self.tokenizer(chain.prompt)["input_ids"] for chain in CHAINS]

    def run(self, disturb: Callable[[], None] | None = None) -> list[Any]:
        """Run all chains, and call `disturb` once at least four of them are sparse."""
        errors: list[BaseException] = []

        def when_sparse() -> None:
            try:
                wait_until(lambda: self.server.cache_rank()["sparse_requests"] >= 4)
                assert disturb is not None
                disturb()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=when_sparse, daemon=True)
        if disturb is not None:
            thread.start()
        responses = self.server.generate_all(self.prompts, CHAINS[0].max_tokens)
        if disturb is not None:
            thread.join(timeout=120)
            assert not thread.is_alive()
        assert not errors, errors
        return responses

    def expected(self, chain: Problem) -> list[int]:
        ids: list[int] = self.tokenizer(" ".join(chain.answer), add_special_tokens=False)[
            "input_ids"
        ]
        return ids


@pytest.fixture(scope="module")
def streams(server: Server) -> Streams:
    return Streams(server)


def assert_exact(streams: Streams, responses: list[Any]) -> None:
    """Full attention walks every chain without an error, so must every response."""
    for chain, response in zip(CHAINS, responses, strict=True):
        assert response["output_ids"] == streams.expected(chain)


def statistics(responses: list[Any], name: str) -> int:
    return sum(response["meta_info"]["cache_rank"][name] for response in responses)


def kill(server: Server) -> None:
    server.signal_cache_rank(signal.SIGKILL)


def lose_the_cache_rank(server: Server, streams: Streams, number: int) -> None:
    """Signal the cache rank: answers stay exact, and so are those with the next cache rank.

    Requests that made a step without their answers are recomputed, whatever SGLang's pool keeps.
    """
    starts = server.cache_rank()["starts"]

    def disturb() -> None:
        server.signal_cache_rank(number)
        wait_until(lambda: not server.metrics()["sglang_cache_rank_up"], 60)

    responses = streams.run(disturb)
    assert_exact(streams, responses)
    assert statistics(responses, "stale_steps") > 0
    assert statistics(responses, "retractions") > 0

    state = server.wait_for(60, up=True, starts=starts + 1)
    ending = "killed by SIGKILL" if number == signal.SIGKILL else "killed by this server"
    assert state["last_loss"].startswith(f"was lost: {ending}")
    assert state["last_loss"] in server.log.read_text(errors="replace")
    assert server.metrics()["sglang_cache_rank_losses_total"] == state["losses"] > 0
    assert server.metrics()["sglang_cache_rank_up"] == 1
    after = streams.run()
    assert_exact(streams, after)
    assert statistics(after, "stale_steps") == 0
    assert all(response["meta_info"]["cache_rank"]["sparse_steps"] > 200 for response in after)


def test_a_cache_rank_is_killed(server: Server, streams: Streams) -> None:
    lose_the_cache_rank(server, streams, signal.SIGKILL)


@with_working_sets
def test_a_cache_rank_is_stopped(server: Server, streams: Streams) -> None:
    lose_the_cache_rank(server, streams, signal.SIGSTOP)


def replace_the_cache_rank(server: Server) -> None:
    """Kill it, and pause: else the answers could end before the next one is up."""
    kill(server)
    wait_until(lambda: not server.cache_rank()["up"])
    server.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
    server.wait_for(60, up=True)
    server.post("/continue_generation").raise_for_status()


def test_what_was_sparse_is_sparse_again_with_the_next_cache_rank(
    server: Server, streams: Streams
) -> None:
    server.wait_for(60, up=True)
    responses = streams.run(lambda: replace_the_cache_rank(server))
    assert_exact(streams, responses)
    assert statistics(responses, "stale_steps") > 0
    assert [r["meta_info"]["cache_rank"]["dense_reason"] for r in responses] == [None] * 8


@with_working_sets
def test_late_answers_are_waited_for(server: Server, streams: Streams) -> None:
    def disturb() -> None:
        pid = int(server.cache_rank()["pid"])
        for _ in range(5):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            wait_for_steps(server, 2)

    starts = server.cache_rank()["starts"]
    responses = streams.run(disturb)
    assert_exact(streams, responses)
    assert statistics(responses, "late_steps") > 0
    assert statistics(responses, "stale_steps") == 0
    assert server.cache_rank()["starts"] == starts


@with_working_sets
def test_foreign_control_messages_change_nothing(server: Server, streams: Streams) -> None:
    def disturb() -> None:
        process = psutil.Process(int(server.cache_rank()["pid"]))
        ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"]
        assert all(c.laddr.ip == "127.0.0.1" for c in process.net_connections("tcp") if c.laddr)
        refused = server.cache_rank()["refused_messages"]
        context = zmq.Context()
        sockets = [context.socket(zmq.PUSH) for _ in ports]
        for socket, port in zip(sockets, ports, strict=True):
            socket.connect(f"tcp://127.0.0.1:{port}")
            for frame in (b"", b"x", b"CRNK" + bytes(60), os.urandom(2_000_000)):
                socket.send(frame)
        wait_until(lambda: server.cache_rank()["refused_messages"] >= refused + 4)
        for socket in sockets:
            socket.close(linger=0)  # some of these ports do not speak ZMQ and take nothing
        context.term()

    responses = streams.run(disturb)
    assert_exact(streams, responses)
    assert statistics(responses, "stale_steps") == 0


def test_the_pool_is_freed_where_it_may_be(server: Server, streams: Streams) -> None:
    free = server.cache_rank()["pool_free_tokens"]
    while_sparse: dict[str, int] = {}

    def disturb() -> None:
        server.wait_for(30, sparse_requests=8)
        wait_for_steps(server, 2)  # rows are freed in the steps that follow
        while_sparse.update(server.cache_rank())

    assert_exact(streams, streams.run(disturb))
    assert while_sparse["sparse_requests"] == 8
    used = (free - while_sparse["pool_free_tokens"]) / 8
    if server.mode == "working-set":  # type: ignore[attr-defined]
        # The recent window and less than two strides of tokens not yet freed.
        assert used < 16 + 2 * 64
    else:
        assert used > 270
    assert server.wait_for(10, sequences=0)["pool_free_tokens"] == free


def test_a_server_stops_while_streams_run(server: Server, streams: Streams) -> None:
    """The last test of a server: nothing is left of it."""
    is_working_set = server.mode == "working-set"  # type: ignore[attr-defined]
    number, reason = (signal.SIGINT, "abort") if is_working_set else (signal.SIGTERM, "length")
    assert_streams_end(server, streams.prompts[:4], number, 1, True, reason)


@pytest.fixture(scope="module")
def small_sets() -> Iterator[Server]:
    """Its working sets are small, and travel in 8 bits: a step with its last selection is wrong."""
    sparse = (
        "--sparse-threshold 264 --sparse-budget 40 --hysteresis 8 --max-swap-tokens 40 "
        '--cache-rank-config {"wire_dtype":"int8"}'
    )
    environment = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with serve([*ARGUMENTS, *sparse.split()], environment) as server:
        yield server


@pytest.mark.thorough
@pytest.mark.xdist_group("failure of small sets")
def test_a_step_that_cannot_be_changed_is_taken_back(small_sets: Server) -> None:
    """What such a step says is not used."""
    streams = Streams(small_sets)
    for _ in range(3):
        small_sets.wait_for(60, up=True)
        responses = streams.run(lambda: kill(small_sets))
        assert_exact(streams, responses)
        assert statistics(responses, "retractions") > 0
    small_sets.wait_for(60, up=True, sequences=0)


@pytest.mark.thorough
@pytest.mark.xdist_group("failure of small sets")
def test_a_last_step_that_cannot_be_changed_is_taken_back(small_sets: Server) -> None:
    """Each step from some on is the last of one request, so that one is lost in its last step."""
    pid = int(small_sets.wait_for(60, up=True)["pid"])
    streams = Streams(small_sets)
    lengths = range(91, 91 + len(CHAINS))
    sampling = [{"max_new_tokens": length, "temperature": 0} for length in lengths]
    latest: dict[int, Any] = {}
    for event in streamed(small_sets, {"input_ids": streams.prompts, "sampling_params": sampling}):
        latest[event["index"]] = event
        if event["meta_info"]["completion_tokens"] == 90 and pid:
            os.kill(pid, signal.SIGKILL)
            pid = 0
    responses = [latest[index] for index in range(len(CHAINS))]
    assert statistics(responses, "retractions") > 0
    for response, chain, length in zip(responses, CHAINS, lengths, strict=True):
        assert response["output_ids"] == streams.expected(chain)[:length]
    small_sets.wait_for(60, up=True, sequences=0)


@pytest.mark.thorough
@pytest.mark.xdist_group("failure of small sets")
def test_a_second_signal_aborts_streams(small_sets: Server) -> None:
    """The last test of this server."""
    prompts = Streams(small_sets).prompts[:4]
    assert_streams_end(small_sets, prompts, signal.SIGTERM, 2, False, "abort")

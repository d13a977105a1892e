"""Runs streams and disturbances against one server, and says what came of them."""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import requests

from scripts.operations.disturbances import Scene, disturb
from scripts.operations.streams import Ended, Streams
from scripts.operations.watch import Memory, Watch
from scripts.shared.serving import Server
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

TIMEOUT = 2.0
"""Seconds after which the server counts a silent cache rank as down."""

# A working set holds all tokens of a chain, so that an answer has one right value whichever way it
# was computed: a wrong token is a token of the wrong place or time.
ARGUMENTS = (
    "--sparse-threshold 270 --sparse-budget 640 --sink-tokens 4 --recent-tokens 16 "
    "--max-total-tokens 8000 --enable-metrics"
).split()

CACHE_RANK = (
    f"--cache-rank-gpus 1 --max-swap-tokens 64 --cache-rank-timeout {TIMEOUT} "
    '--cache-rank-config {"query_window":8,"layers_per_group":1,"bulk_chunk_tokens":128,'
    '"cache_rank_max_restart_delay":2}'
).split()
"""Where tokens are selected by a cache rank; without these, the server's own process selects."""

SECONDS_BETWEEN_DISTURBANCES = (0.5, 3.0)
METRICS_OF_A_PROCESS = re.compile(r"(?:counter|gauge|histogram|summary)\w*_(\d+)\.db")
"""The names of files in which Prometheus' client keeps what a process with this pid has counted."""

SECONDS_TO_END = 60.0


class Setting(NamedTuple):
    """What a soak is bounded by, and what it draws from.

    Attributes:
        seconds: how long requests are sent.
        streams: requests at once.
        most_requests: after so many it ends early.
        seed: of prompts and disturbances.
        disturbances: the names of those that come.
    """

    seconds: float
    streams: int
    most_requests: int
    seed: int
    disturbances: Sequence[str]


class Verdict(msgspec.Struct, frozen=True):
    """What came of a soak.

    Attributes:
        requests: how many ended, by kind.
        sparse_requests: how many of them decoded over a working set.
        mistakes: what was wrong, in words; empty if nothing was.
        interrupted: whether it was ended before its time.
        disturbances: how many there were, by name.
        losses: of cache ranks, as the server counts them.
        requests_at_losses: how many requests were sparse then, summed over the losses.
        outages: seconds of each time without a cache rank.
        longest_seconds: of a request.
        inference_memory, cache_rank_memory: of either rank, if there is one.
    """

    requests: Counter[str]
    sparse_requests: int
    mistakes: list[str]
    interrupted: bool
    disturbances: Counter[str]
    losses: int
    requests_at_losses: int
    outages: list[float]
    longest_seconds: float
    inference_memory: Memory
    cache_rank_memory: Memory | None

    @property
    def result(self) -> str:
        """In a word: one that was interrupted has not passed, whatever it saw until then."""
        if self.mistakes:
            return "FAILED"
        return "INTERRUPTED" if self.interrupted else "PASSED"

    def __str__(self) -> str:
        """The verdict in one line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.requests.items()))
        said = (
            f"{self.result}: {self.requests.total()} requests "
            f"({kinds}; {self.sparse_requests} sparse), the longest {self.longest_seconds:.1f} s, "
            f"{len(self.mistakes)} mistakes; {self.disturbances.total()} disturbances"
        )
        memory = f"; memory of the inference rank {self.inference_memory}"
        if self.cache_rank_memory is None:
            return said + memory
        outages = "never down"
        if self.outages:
            outages = (
                f"up again after {statistics.median(self.outages):.1f} s, "
                f"{max(self.outages):.1f} at most"
            )
        losses = f", {self.losses} losses of {self.requests_at_losses} sparse requests, {outages}"
        return f"{said}{losses}{memory}, of the cache rank {self.cache_rank_memory}"


def soak(
    arguments: Sequence[str],
    environment: dict[str, str],
    setting: Setting,
    show: Callable[[str], None],
) -> Verdict:
    """Start a server, use and disturb it, and end it.

    An interruption (SIGINT) while it is in use ends that early, with a verdict.

    Args:
        arguments: of the server, beside ARGUMENTS.
        environment: of the server.
        setting: how long and how much.
        show: is given a line about the state of things every second or so.

    Raises:
        RuntimeError: the server did not start.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server = Server(
            [*ARGUMENTS, *arguments],
            {**environment, ALLOW_LARGE_BUDGET_VARIABLE: "1", "TMPDIR": folder},
        )
        try:
            server.wait_ready()
            server.generate([5, 6, 7], 2)  # some files are made with the first token
            places = Path(folder), Path("/dev/shm")
            files = files_in(*places)
            verdict = _use(server, setting, show)
            left = files_in(*places) - files
            verdict.mistakes.extend(f"left behind: {name}" for name in sorted(left))
            return verdict
        finally:
            server.stop()


def _use(server: Server, setting: Setting, show: Callable[[str], None]) -> Verdict:
    source = random.Random(f"disturbances {setting.seed}")
    mistakes: list[str] = []
    disturbances: Counter[str] = Counter()
    first = server.cache_rank()
    has_cache_rank = "pid" in first
    watch = Watch(server, server.process.pid)
    streams = Streams(server, setting.streams, setting.seed, setting.most_requests)
    scene = Scene(server, streams, source, TIMEOUT)
    interrupted = False
    deadline = time.monotonic() + setting.seconds
    try:
        while time.monotonic() < deadline and streams.running:
            time.sleep(source.uniform(*SECONDS_BETWEEN_DISTURBANCES))
            if server.process.poll() is not None:
                mistakes.append(f"the server ended: {server.tail()[-500:]}")
                break
            try:
                if setting.disturbances:
                    disturbances[disturb(scene, setting.disturbances)] += 1
            except Exception as error:  # a disturbance that the server does not take is a finding
                mistakes.append(f"{type(error).__name__}: {error}")
            show(_line(streams.ended, disturbances, deadline - time.monotonic()))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        streams.stop()
        try:
            mistakes += _what_is_left(server, first["pool_free_tokens"], has_cache_rank)
        finally:
            watch.stop()
    mistakes += [one.mistake for one in streams.ended if one.mistake]
    memories = {"inference rank": watch.inference_memory}
    if has_cache_rank:
        memories["cache rank"] = watch.cache_rank_memory
    for name, memory in memories.items():
        if not memory.late and not interrupted:
            mistakes.append(f"the memory of the {name} was not seen: soak for longer")
        elif not memory.flat:
            mistakes.append(f"the memory of the {name} grows: {memory}")
    state = server.cache_rank() if server.process.poll() is None else {}
    return Verdict(
        Counter(one.kind for one in streams.ended),
        sum(one.sparse_steps > 0 for one in streams.ended),
        mistakes,
        interrupted,
        disturbances,
        state.get("losses", 0),
        sum(one.losses for one in streams.ended),
        watch.outages,
        max((one.seconds for one in streams.ended), default=0.0),
        watch.inference_memory,
        memories.get("cache rank"),
    )


def _what_is_left(server: Server, free: int, has_cache_rank: bool) -> list[str]:
    """What is not as before the first request, when the last one has ended."""
    if server.process.poll() is not None:
        return []
    try:
        idle = {"up": True, "sequences": 0} if has_cache_rank else {"sparse_requests": 0}
        server.wait_for(SECONDS_TO_END, **idle)
        server.flush_cache(SECONDS_TO_END)  # prompts are kept for those who come again
        empty = {"tokens_held": 0} if has_cache_rank else {}
        state = server.wait_for(SECONDS_TO_END, **empty)
    except (TimeoutError, requests.RequestException) as error:
        return [str(error)[:500]]
    if state["pool_free_tokens"] != free:
        return [f"{free - state['pool_free_tokens']} tokens of SGLang's pool are not free"]
    return []


def files_in(*places: Path) -> set[str]:
    """What lies in folders that a server leaves files in.

    Without the metrics of processes that live, which are made when something is first counted.
    """
    found = (path for place in places for path in place.rglob("*"))
    return {str(path) for path in found if not _is_of_a_living_process(path.name)}


def _is_of_a_living_process(name: str) -> bool:
    metrics = METRICS_OF_A_PROCESS.fullmatch(name)
    return metrics is not None and psutil.pid_exists(int(metrics[1]))


def _line(ended: list[Ended], disturbances: Counter[str], seconds: float) -> str:
    mistakes = sum(one.mistake is not None for one in ended)
    return (
        f"{max(seconds, 0):.0f} s left: {len(ended)} requests, {mistakes} mistakes, "
        + ", ".join(f"{count} {name}" for name, count in disturbances.items())
    )

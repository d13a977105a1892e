"""Use a server for a while, disturb it at random, and check every answer.

    python -m scripts.soak --seconds 1800
    python -m scripts.soak --seconds 600 --streams 16 --modes working-set
    python -m scripts.soak --disturbances kill stall -- --cache-rank-mem-fraction 0.2

Serves the bundled model, on GPUs where there are two, with the flags behind `--`. Tokens are
selected by a cache rank, with either --inference-kv, and in the server's own process. Several
streams of requests walk through tables of facts, so that every token has one right value. Meanwhile
the cache rank is killed, stopped and delayed, requests are aborted, generation is paused, caches
are flushed and weights are loaded again. At the end the pools have to be whole, the memory of both
ranks flat, and no file left behind. Prints one line a mode; the status is 1 if anything was wrong.
One that is interrupted ends what is under way, and says what it has seen. No other server may start
or end on the machine meanwhile: its files in /dev/shm would count as left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests
from rich.console import Console
from rich.status import Status

from scripts.demo import environment
from scripts.operations.disturbances import DISTURBANCES, Scene
from scripts.operations.streams import Ended, Streams
from scripts.operations.watch import Memory, Watch
from scripts.shared.command import make_parser, run
from scripts.shared.serving import Server, serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

INLINE = "inline"
MODES = ("full", "working-set", INLINE)

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
SECONDS_TO_END = 60.0
METRICS_OF_A_PROCESS = re.compile(r"(?:counter|gauge|histogram|summary)\w*_(\d+)\.db")
"""The names of files in which Prometheus' client keeps what a process with this pid has counted."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("soak", __doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=120, help="in all, start-up apart; default: 120")
    add("--streams", type=int, default=8, help="requests at once; default: 8")
    add("--modes", nargs="+", choices=MODES, default=list(MODES),
        help="--inference-kv of a cache rank, or none; default: one after the other")  # fmt: skip
    add("--disturbances", nargs="+", choices=list(DISTURBANCES), default=list(DISTURBANCES),
        help="those that come, drawn by their weights; default: all")  # fmt: skip
    add("flags", nargs="*", help="flags of the server, behind --")
    return parser.parse_args(argv)


@dataclass
class Outcome:
    """What came of the use of a server."""

    ended: list[Ended]
    disturbances: int
    outages: list[float]  # seconds
    memories: dict[str, Memory]
    mistakes: list[str]  # in words
    interrupted: bool  # ended before its time

    def __str__(self) -> str:
        """The verdict in one line; one that was interrupted has not passed."""
        result = "FAILED" if self.mistakes else "INTERRUPTED" if self.interrupted else "PASSED"
        kinds = Counter(one.kind for one in self.ended)
        parts = [
            f"{len(self.ended)} requests ("
            + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            + f"; {sum(one.sparse_steps > 0 for one in self.ended)} sparse)",
            f"the longest {max((one.seconds for one in self.ended), default=0):.1f} s",
            f"{len(self.mistakes)} mistakes",
            f"{self.disturbances} disturbances",
        ]
        if self.outages:
            median, most = statistics.median(self.outages), max(self.outages)
            losses = sum(one.losses for one in self.ended)
            parts += [
                f"{len(self.outages)} losses of {losses} sparse requests",
                f"up again after {median:.1f} s, {most:.1f} at most",
            ]
        parts += [f"memory of the {name} {memory}" for name, memory in self.memories.items()]
        return f"{result}: {', '.join(parts)}"


def soak(options: argparse.Namespace, mode: str, status: Status) -> Outcome:
    """Use and disturb a server in a mode; what it leaves behind is a mistake."""
    flags, names = options.flags, options.disturbances
    if mode == INLINE:
        names = [name for name in names if not DISTURBANCES[name].of_cache_rank]
    else:
        most = ["--max-sparse-requests", str(options.streams)]
        flags = [*CACHE_RANK, "--inference-kv", mode, *most, *flags]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        variables = {**environment(), ALLOW_LARGE_BUDGET_VARIABLE: "1", "TMPDIR": folder}
        with serve([*ARGUMENTS, *flags], variables) as server:
            server.generate([5, 6, 7], 2)  # some files are made with the first token
            places = Path(folder), Path("/dev/shm")
            files = files_in(*places)
            outcome = use(server, options, names, lambda said: status.update(f"{mode}: {said}"))
            left = files_in(*places) - files
    outcome.mistakes += [f"left behind: {name}" for name in sorted(left)]
    return outcome


def use(
    server: Server, options: argparse.Namespace, names: Sequence[str], say: Callable[[str], None]
) -> Outcome:
    """Use a server for its share of the time, with these disturbances, and see what is left."""
    first, source, mistakes = server.cache_rank(), random.Random("disturbances"), list[str]()
    disturbances, interrupted = 0, False
    deadline = time.monotonic() + options.seconds / len(options.modes)
    with contextlib.closing(Watch(server, "pid" in first)) as watch:
        streams = Streams(server, options.streams)
        scene = Scene(server, streams, source, TIMEOUT)
        try:
            while (left := deadline - time.monotonic()) > 0:
                say(f"{left:.0f} s left: {len(streams.ended)} requests")
                time.sleep(source.uniform(*SECONDS_BETWEEN_DISTURBANCES))
                if server.process.poll() is not None:
                    mistakes.append(f"the server ended: {server.tail()[-500:]}")
                    break
                (name,) = source.choices(names, [DISTURBANCES[name].weight for name in names])
                disturbances += 1
                try:
                    DISTURBANCES[name].act(scene)
                except Exception as error:  # one that the server does not take is a finding
                    mistakes.append(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            streams.stop()
        mistakes += what_is_left(server, first)
    mistakes += [one.mistake for one in streams.ended if one.mistake]
    memories = watch.memories()
    for name, memory in memories.items():
        if not memory.late and not interrupted:
            mistakes.append(f"the memory of the {name} was not seen: soak for longer")
        elif not memory.flat:
            mistakes.append(f"the memory of the {name} grows: {memory}")
    return Outcome(streams.ended, disturbances, watch.outages, memories, mistakes, interrupted)


def what_is_left(server: Server, first: dict[str, Any]) -> list[str]:
    """What is not as in the `first` state, before all requests, when the last one has ended."""
    if server.process.poll() is not None:
        return []
    with_cache_rank = "pid" in first
    try:
        idle = {"up": True, "sequences": 0} if with_cache_rank else {"sparse_requests": 0}
        server.wait_for(SECONDS_TO_END, **idle)
        server.flush_cache(SECONDS_TO_END)  # prompts are kept for those who come again
        empty = {"tokens_held": 0} if with_cache_rank else {}
        state = server.wait_for(SECONDS_TO_END, **empty)
    except (TimeoutError, requests.RequestException) as error:
        return [str(error)[:500]]
    if missing := first["pool_free_tokens"] - state["pool_free_tokens"]:
        return [f"{missing} tokens of SGLang's pool are not free"]
    return []


def files_in(*places: Path) -> set[str]:
    """What lies in folders that a server leaves files in.

    Without the metrics of processes that live, which are made when something is first counted.
    """
    found = set()
    for path in (path for place in places for path in place.rglob("*")):
        metrics = METRICS_OF_A_PROCESS.fullmatch(path.name)
        if metrics is None or not psutil.pid_exists(int(metrics[1])):
            found.add(str(path))
    return found


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    console = Console()
    failed = False
    for mode in options.modes:
        with console.status(f"{mode}: starting") as status:
            outcome = soak(options, mode, status)
        console.print(f"{mode}: {outcome}", soft_wrap=True, highlight=False)
        for mistake in outcome.mistakes:
            console.print(f"  {mistake}", soft_wrap=True, highlight=False, markup=False)
        failed |= bool(outcome.mistakes) or outcome.interrupted
        if outcome.interrupted:
            break
    return int(failed)


if __name__ == "__main__":
    run(main)

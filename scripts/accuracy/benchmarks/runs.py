"""One benchmark on one server, and the folder that it leaves.

OUT/BENCHMARK/run.json           what was asked of which server, and what it says of the run
OUT/BENCHMARK/sgl_eval_*/        the harness's answers and metrics
"""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from scripts.accuracy.benchmarks import harness
from scripts.accuracy.benchmarks.harness import Answer
from scripts.shared.serving import Client, ServerError, cache_rank_state

MOST_THREADS = 64
PROMPT_TOKENS = 2048
"""A question is taken to have so many tokens where requests at a time are counted."""

_NO_ROOM = ("max_sparse_requests", "cache_rank_memory")
_HIDDEN = ("api_key", "admin_api_key", "ssl_keyfile_password", "internal_states")
_DENSE_REQUESTS = re.compile(
    r'^sglang_cache_rank_dense_requests_total\{.*reason="(\w+)".*\} (\S+)$', re.MULTILINE
)
_GROWING = ("steps", "tokens_shipped", "steps_waited", "wait_seconds", "retractions", "starts")
"""These parts of the cache rank's state only grow."""


class Record(msgspec.Struct):
    """What was run; `run.json`.

    Attributes:
        benchmark: its name on our command line.
        command: our command line.
        dense: requests asked to stay dense.
        server: what `/server_info` said, less secrets and internal states.
        counters: what the cache rank counted meanwhile; empty without one.
        dense_requests: by reason, requests beyond the sparse threshold that had a step which stayed
            dense; empty where the server does not export metrics.
        cache_rank: what `/server_info` said of it after the last answer.
        warnings: what a reader of the results has to know.
    """

    benchmark: str
    command: str
    dense: bool
    server: dict[str, Any]
    counters: dict[str, float] = {}
    dense_requests: dict[str, int] = {}
    cache_rank: dict[str, Any] = {}
    warnings: list[str] = []


class Run(NamedTuple):
    """A finished run."""

    folder: Path
    record: Record
    metrics: dict[str, Any]  # the harness's
    answers: list[Answer]


class EvaluatedServer(Client):
    """A server that answers benchmarks.

    Attributes:
        info: what `/server_info` said at first, less secrets and internal states.
        context_length: tokens that a request may have, its answer included.
        capacity_tokens: tokens that the cache rank can hold; 0 without one.
    """

    def __init__(self, url: str) -> None:
        """Ask a server.

        Raises:
            ServerError: it does not answer, or is not SGLang's.
        """
        super().__init__(url)
        info = self.read("/server_info")
        self.capacity_tokens = int(cache_rank_state(info).get("capacity_tokens", 0))
        self.context_length = int(self.read("/v1/models")["data"][0]["max_model_len"])
        self.info = {name: value for name, value in info.items() if name not in _HIDDEN}

    def most_sparse_requests(self, request_tokens: int) -> int:
        """The requests of this length, answer included, that the cache rank can hold at once.

        A request reserves the memory of its longest possible answer; one for which there is no room
        or no working set stays dense until there is.
        """
        length = min(request_tokens, self.context_length) + 1
        return min(int(self.info["max_sparse_requests"]), self.capacity_tokens // length)

    def counters(self) -> tuple[Counter[str], Counter[str]]:
        """Counters of the cache rank, and of dense requests, which take --enable-metrics."""
        state = self.cache_rank()
        text = self.get("/metrics").text if self.info.get("enable_metrics") else ""
        dense = {reason: int(float(count)) for reason, count in _DENSE_REQUESTS.findall(text)}
        return Counter({name: state[name] for name in _GROWING if name in state}), Counter(dense)


def run_benchmark(options: Namespace, command: str) -> Record:
    """Ask a server every question of a benchmark, and keep the answers.

    Raises:
        FileExistsError: the benchmark has a folder already.
        InterruptedError: the harness did not end well; what it has is kept.
        ModuleNotFoundError: the harness is not installed.
        OSError: the questions cannot be read from the hub.
        ServerError: the server is not one on which the benchmark means anything.
    """
    try:
        version("sgl-eval")
    except PackageNotFoundError:
        raise ModuleNotFoundError("no sgl-eval: pip install --editable '.[eval]'") from None
    server = EvaluatedServer(options.base_url)
    folder: Path = options.out / options.benchmark
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: give another --out, or remove it")
    threads = _threads(server, options)
    folder.mkdir(parents=True)
    record = Record(options.benchmark, command, options.dense, server.info)
    if not options.no_thinking and not server.info.get("reasoning_parser"):
        record.warnings.append(
            "the server has no --reasoning-parser: answers are read from within the thinking, also "
            "of an answer that was cut short"
        )
    arguments = harness.arguments(options, server.url, folder, threads)
    print(shlex.join(["sgl-eval", *arguments]))
    before = server.counters()
    status = harness.run_harness(arguments, harness.extra_body(options))
    counters, dense_requests = server.counters()
    counters.subtract(before[0])
    record.counters, record.dense_requests = dict(counters), dict(dense_requests - before[1])
    record.cache_rank = server.cache_rank()
    record.warnings += _warnings_of_steps(record)
    write_record(record, folder)
    if status:
        raise InterruptedError(f"the harness ended with status {status}; see {folder}")
    failed = [answer.has_failed for answer in harness.read_results(folder)[1]]
    if any(failed):
        record.warnings.append(f"{sum(failed)} of {len(failed)} requests failed and are left out")
        write_record(record, folder)
    return record


def read_run(folder: Path) -> Run:
    """Read what `run_benchmark` left.

    Raises:
        FileNotFoundError: the folder has no finished run.
        ValueError: the run was cut short.
    """
    record = msgspec.json.decode((folder / "run.json").read_bytes(), type=Record)
    return Run(folder, record, *harness.read_results(folder))


def write_record(record: Record, folder: Path) -> None:
    """Write `run.json`."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    (folder / "run.json").write_text(text + "\n", encoding="utf-8")


def _threads(server: EvaluatedServer, options: Namespace) -> int:
    """The requests at a time, so that none stays dense for want of room on the cache rank."""
    if server.context_length < options.max_tokens + 1:
        raise ServerError(
            f"the server's requests have at most {server.context_length} tokens, prompt included: "
            f"no room for --max-tokens {options.max_tokens}"
        )
    room = MOST_THREADS
    if server.info.get("cache_rank_gpus") and not options.dense:
        longest = PROMPT_TOKENS + options.max_tokens
        room = server.most_sparse_requests(longest)
        if room == 0:
            raise ServerError(
                f"the cache rank holds {server.capacity_tokens} tokens and a request may have "
                f"{longest}: every request would stay dense. Lower --max-tokens"
            )
    return options.num_threads or min(MOST_THREADS, room)


def _warnings_of_steps(record: Record) -> list[str]:
    """What a reader has to know of the steps that were sparse, and of those that were not."""
    steps = int(record.counters.get("steps", 0))
    if record.dense or record.server.get("cache_rank_gpus", 0) == 0:
        stray = f"{steps} decode steps were sparse: other requests ran meanwhile"
        return [stray] if steps else []
    warnings = []
    if steps == 0:
        warnings.append(
            "no decode step was sparse: no request came beyond --sparse-threshold "
            f"{record.server['sparse_threshold']}, so that this is a dense run"
        )
    for reason, count in sorted(record.dense_requests.items()):
        remedy = ": lower --num-threads" if reason in _NO_ROOM else ""
        warnings.append(f"{count} requests beyond the threshold had dense steps ({reason}){remedy}")
    if not record.server.get("enable_metrics"):
        warnings.append(
            "the server was started without --enable-metrics: how many requests stayed dense for "
            "want of room on the cache rank is not known"
        )
    if restarts := int(record.counters.get("starts", 0)):
        warnings.append(f"the cache rank was lost and started again, {restarts} times")
    return warnings

"""Starts the real server and talks to a running one over HTTP."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests

from scripts.shared.machine import kill_session

START_SECONDS = 400
"""A first server on a GPU compiles kernels for minutes."""

LONGEST_REASON = 160
"""Tables hold so many characters of an error."""

PORTS = (10_000, 32_000)
"""Servers listen on a port from the first to below the last of these."""

SECONDS_OF_ONE_INTERRUPTION = 1.0
"""Signals that follow one another faster are one interruption."""

PLAIN = (
    "--cache-rank-gpus 0 --device cpu --attention-backend torch_native --sampling-backend pytorch "
    "--grammar-backend none --disable-radix-cache --page-size 1 --max-total-tokens 40000 "
    "--max-running-requests 64 --dtype float32 --sleep-on-idle"
).split()
"""The command line of plain SGLang on a CPU."""

BASELINE_FLAGS = {"--decode-mode", "--draft-selector", "--round-kv"}
"""The launcher of baselines takes these."""


class ServerError(RuntimeError):
    """No server answers, or not as it should."""


class Client:
    """Talks to a server that runs; its address may have a trailing /v1."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    def get(self, path: str, timeout: float = 30) -> requests.Response:
        """Read a path of the server; ServerError if no server answers."""
        try:
            return requests.get(f"{self.url}{path}", timeout=timeout)
        except requests.RequestException as error:
            raise ServerError(f"no server answers at {self.url}{path}: {error}") from error

    def read(self, path: str) -> dict[str, Any]:
        """Read a path that holds a JSON object; ServerError if there is none."""
        response = self.get(path)
        if not response.ok:
            raise ServerError(f"{self.url}{path} answers {response.status_code}: is it SGLang?")
        return dict(response.json())

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 240) -> Any:
        return requests.post(f"{self.url}{path}", json=body or {}, timeout=timeout)

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[list[int]],
        max_new_tokens: int,
        timeout: float = 240,
        **options: Any,
    ) -> Any:
        """One request, or a batch; the response of `/generate`. ServerError if it was refused."""
        parameters = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        parameters |= options.pop("sampling_params", {})
        body = {"input_ids": list(input_ids), "sampling_params": parameters, **options}
        response = self.post("/generate", body, timeout)
        if not response.ok:
            raise ServerError(f"/generate answers {response.status_code}: {response.text[:500]}")
        return response.json()

    def generate_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any
    ) -> list[Any]:
        """Requests that SGLang begins in the same turn; responses in the order of the prompts."""
        return list(self.generate([list(prompt) for prompt in prompts], max_new_tokens, **options))

    def cache_rank(self) -> dict[str, Any]:
        """The state of the cache rank in `/server_info`; empty without one."""
        return cache_rank_state(self.read("/server_info"))

    def flush_cache(self, timeout: float = 15) -> None:
        """Empty the prefix caches; TimeoutError if SGLang refuses it for so many seconds.

        It does for a moment after an answer has come.
        """
        deadline = time.monotonic() + timeout
        while (response := self.post("/flush_cache")).status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError(f"/flush_cache answers {response.status_code}: {response.text}")
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """The cache rank's Prometheus samples, label values dropped and summed over."""
        samples: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("sglang_cache_rank_"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0]
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def signal_cache_rank(self, number: int) -> int | None:
        """Send a signal to the cache-rank process, if there is one; its pid."""
        pid = self.cache_rank().get("pid")
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return int(pid)
        return None


def start_process(command: list[str], log: Path, environment: dict[str, str]) -> Any:
    """Start a server; what is returned has `pid`, `poll` and `wait` of a Popen."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


class Server(Client):
    """One server that this process starts: with a cache rank, plain SGLang, or a baseline."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.log = log or Path(tempfile.mkstemp(prefix="server-", suffix=".log")[1])
        is_baseline = not BASELINE_FLAGS.isdisjoint(arguments)
        launcher = "scripts.baselines" if is_baseline else "sglang_ext"
        command = [sys.executable, "-m", f"{launcher}.launch", "--port", str(self.port)]
        command += ["--skip-server-warmup", "--log-level-http", "warning", *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.process = start_process(command, self.log, variables)

    def wait_ready(self, seconds: float = START_SECONDS) -> Server:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended: {self.tail()}")
            with contextlib.suppress(ServerError):
                if self.get("/health", timeout=5).status_code == 200:
                    return self
            time.sleep(0.2)
        raise TimeoutError(f"server not ready: {self.tail()}")

    def wait_for(self, timeout: float, **expected: Any) -> dict[str, Any]:
        """Wait until the cache rank's state has these values."""
        deadline = time.monotonic() + timeout
        while True:
            state = self.cache_rank()
            if all(state[name] == value for name, value in expected.items()):
                return state
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected {expected}, state is {state}: {self.tail()}")
            time.sleep(0.1)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if " HTTP/1.1" not in line)[-6000:]

    def stop(self, wait_seconds: float = 0.0) -> None:
        """End every process at once, and give them time to free their memory."""
        kill_session(self.process.pid, wait_seconds)
        self.process.wait()


@contextlib.contextmanager
def serve(arguments: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A running server, stopped at the end."""
    server = Server(arguments, environment)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def reason_of(error: Exception, log: str = "") -> str:
    """One phrase for a server that failed, by what was raised and what its log says."""
    said = f"{log}\n{type(error).__name__}: {error}"
    if re.search("out of memory|outofmemory|not enough memory", said, re.IGNORECASE):
        return "out of memory"
    errors = re.findall(r"^[\w.]*(?:Error|Exception): .+", said, flags=re.MULTILINE)
    return (errors or [type(error).__name__])[-1][:LONGEST_REASON].replace("|", "/")  # in a table


def stop_on_sigterm() -> None:
    """Let SIGTERM interrupt this process, as Ctrl-C does, so that it stops the servers it runs.

    `timeout` signals a process and then its group: the second one must not cut off the stopping.
    """
    last = -math.inf

    def interrupt(_number: int, _frame: Any) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > SECONDS_OF_ONE_INTERRUPTION:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def free_port() -> int:
    """A port that nobody listens on.

    It is not one of those that the system hands out, which another server's connections could take
    while this one starts.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def cache_rank_state(info: dict[str, Any]) -> dict[str, Any]:
    """What a `/server_info` says of the cache rank; empty without one."""
    states = info.get("internal_states") or [{}]
    return states[0].get("cache_rank") or {}

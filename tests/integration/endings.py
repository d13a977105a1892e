"""How a server ends that a test no longer needs. Processes come and go together."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from typing import Any

import psutil
import requests
from waiting import wait_until

from scripts.shared.serving import Server


def assert_it_stops(server: Server, number: int, times: int = 1, to_all: bool = False) -> None:
    """Signal a server, or all that a terminal would signal: nothing is left of it."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    state = server.cache_rank()
    if state.get("placement") != "inline":
        assert int(state["pid"]) in {process.pid for process in processes}
    logged = server.log.stat().st_size
    for _ in range(times):
        # The server is the first process of its group, as a shell's child is in a terminal.
        (os.killpg if to_all else os.kill)(server.process.pid, number)
        time.sleep(0.5)
    assert server.process.wait(timeout=60) == 0, server.tail()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    said = server.log.read_bytes()[logged:].decode(errors="replace")
    assert not re.search("crashed|Traceback|SIGQUIT|was lost", said), said


def assert_streams_end(
    server: Server, prompts: list[list[int]], number: int, times: int, to_all: bool, reason: str
) -> None:
    """Stop a server while streams run: each of them ends for this reason."""
    ends: list[Any] = []
    tokens = 1400 if reason == "abort" else 300
    threads = [
        threading.Thread(target=lambda prompt=prompt: ends.append(_last(server, prompt, tokens)))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.cache_rank()["sparse_requests"] == len(threads), 60)
    assert_it_stops(server, number, times, to_all)
    for thread in threads:
        thread.join()
    assert [end["meta_info"]["finish_reason"]["type"] for end in ends] == [reason] * len(prompts)


def _last(server: Server, prompt: list[int], tokens: int) -> Any:
    """The last that a stream says before it ends as streams do."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    url = f"{server.url}/generate"
    with requests.post(url, json=body, stream=True, timeout=120) as response:
        *_, event, done = (line for line in response.iter_lines() if line)
    assert done == b"data: [DONE]"
    return json.loads(event.removeprefix(b"data: "))


def assert_its_processes_follow_a_dead_scheduler(server: Server) -> None:
    """A cache rank is a child of its scheduler, which is killed."""
    cache_rank = psutil.Process(int(server.cache_rank()["pid"]))
    psutil.Process(cache_rank.ppid()).kill()
    cache_rank.wait(timeout=60)
    assert server.process.wait(timeout=60) != 0

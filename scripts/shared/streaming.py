"""Sends requests to running servers, many at once, and notes when each chunk of an answer comes.

SGLang's own `sglang.benchmark.serving` knows one server, counts tokens by their text, which servers
of shapes without a tokenizer do not send, and divides a gap by the tokens of the chunk after it.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from scripts.shared.serving import ServerError


class Request(NamedTuple):
    """What is asked: a prompt, and tokens of its answer."""

    prompt: list[int]
    answer: int


@dataclass
class Answer:
    """What one request has reported so far."""

    prompt: int  # tokens
    sent: float = field(default_factory=time.perf_counter)  # when
    tokens: array[int] = field(default_factory=lambda: array("q"))  # so far, one entry a chunk
    times: array[float] = field(default_factory=lambda: array("d"))  # when each chunk came
    cached: int = 0  # tokens of the prompt that were not computed
    output: list[int] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)  # the cache rank's, in the last report

    @property
    def written(self) -> int:
        """Tokens so far."""
        return self.tokens[-1] if self.tokens else 0

    def seconds_to(self, token: int) -> float:
        """From the request until an answer had so many tokens."""
        return self.times[bisect.bisect_left(self.tokens, token)] - self.sent

    @property
    def sparse_steps(self) -> int:
        """Steps over selected tokens."""
        return int(self.statistics.get("sparse_steps", 0))


def connect() -> aiohttp.ClientSession:
    """A session of as many requests at once, and for as long, as one likes."""
    connections, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connections, timeout=timeout)


async def follow(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    answer: Answer,
    note: Callable[[int], object] = lambda tokens: None,
    options: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> None:
    """Ask a server for an answer of fixed length, and `note` how many tokens each chunk brings.

    `options` are of the request, beside those of sampling. ServerError if the server refuses the
    request or ends it with an error, aiohttp.ClientError if the server is gone.
    """
    parameters = {"temperature": 0.0, "ignore_eos": True, **sampling}
    body = {"input_ids": prompt, "sampling_params": parameters, "stream": True}
    body |= options or {}
    async with session.post(f"{url}/generate", json=body) as response:
        async for line in response.content:
            if response.status != 200 or line.startswith(b'data: {"error"'):
                raise ServerError(f"{url} answers {response.status}: {line.decode()}")
            if not line.startswith(b"data: {"):
                continue
            chunk = msgspec.json.decode(line.removeprefix(b"data: "))
            meta = chunk["meta_info"]
            new = meta["completion_tokens"] - answer.written
            if new > 0:
                answer.times.append(time.perf_counter())
                answer.tokens.append(meta["completion_tokens"])
            answer.output += chunk["output_ids"]
            answer.cached = meta["cached_tokens"]
            answer.statistics = meta.get("cache_rank") or answer.statistics
            note(new)


async def send(
    urls: Sequence[str], requests: Sequence[Request], streams: int, note: Callable[[int], object]
) -> list[Answer]:
    """Send all requests, and return their answers in the order of their ends.

    A stream takes the next request when its last has ended, and sends it to the server that has
    fewest, as routers do. ServerError if a request failed or its answer has another length than
    asked for, aiohttp.ClientError if a server is gone.
    """
    left, in_flight, answers = iter(requests), dict.fromkeys(urls, 0), list[Answer]()

    async def stream() -> None:
        for request in left:
            url = min(in_flight, key=in_flight.__getitem__)
            in_flight[url] += 1
            answer, asked = Answer(len(request.prompt)), request.answer
            await follow(session, url, request.prompt, answer, note, max_new_tokens=asked)
            if answer.written != asked:
                raise ServerError(f"an answer ended after {answer.written} of {asked} tokens")
            answers.append(answer)
            in_flight[url] -= 1

    async with connect() as session:
        await asyncio.gather(*(stream() for _ in range(streams)))
    return answers

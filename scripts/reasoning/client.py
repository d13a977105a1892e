"""Sends requests to servers, and notes when each token comes.

SGLang's own `sglang.benchmark.serving` knows one server, counts tokens by their text, which servers
of shapes without a tokenizer do not send, and divides a gap by the tokens of the chunk after it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from scripts.reasoning.loads import Request
from scripts.shared.serving import ServerError
from scripts.shared.streaming import chunks_of, connect


@dataclass
class Answer:
    """What one request has reported."""

    prompt: int  # tokens
    sent: float  # when
    tokens: array[int] = field(default_factory=lambda: array("q"))  # so far, one entry a chunk
    times: array[float] = field(default_factory=lambda: array("d"))  # when each chunk came
    sparse_steps: int = 0  # over selected tokens
    cached: int = 0  # tokens of the prompt that were not computed
    output: list[int] = field(default_factory=list)


async def send(
    urls: Sequence[str], requests: Sequence[Request], streams: int, note: Callable[[int], object]
) -> list[Answer]:
    """Send all requests, and return their answers in the order of their ends.

    Args:
        urls: of the servers. A request goes to the one that has fewest, as routers do.
        requests: a stream takes the next one when its last has ended.
        streams: requests at once.
        note: is told how many tokens have come.

    Raises:
        ServerError: a request failed, or its answer is not as long as it was asked to be.
        aiohttp.ClientError: a server is gone.
    """
    left, in_flight, answers = iter(requests), dict.fromkeys(urls, 0), list[Answer]()

    async def stream() -> None:
        for request in left:
            url = min(in_flight, key=in_flight.__getitem__)
            in_flight[url] += 1
            answers.append(await _ask(session, url, request, note))
            in_flight[url] -= 1

    async with connect() as session:
        await asyncio.gather(*(stream() for _ in range(streams)))
    return answers


async def _ask(
    session: aiohttp.ClientSession, url: str, request: Request, note: Callable[[int], object]
) -> Answer:
    parameters = {"max_new_tokens": request.answer, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": request.prompt, "sampling_params": parameters}
    answer, seen = Answer(len(request.prompt), time.perf_counter()), 0
    async for chunk in chunks_of(session, url, body):
        meta = chunk["meta_info"]
        if (tokens := meta["completion_tokens"]) > seen:
            answer.times.append(time.perf_counter())
            answer.tokens.append(tokens)
            note(tokens - seen)
            seen = tokens
        answer.output += chunk["output_ids"]
        answer.cached = meta["cached_tokens"]
        answer.sparse_steps = (meta.get("cache_rank") or {}).get("sparse_steps", 0)
    if seen != request.answer:
        raise ServerError(f"an answer ended after {seen} of {request.answer} tokens")
    return answer

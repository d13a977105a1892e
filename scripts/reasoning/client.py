"""Sends requests to servers, and notes when each token comes.

SGLang's own `sglang.benchmark.serving` knows one server, counts tokens by their text, which servers
of shapes without a tokenizer do not send, and divides a gap by the tokens of the chunk after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from scripts.reasoning.loads import Request
from scripts.shared.serving import ServerError
from scripts.shared.streaming import Answer, connect, follow


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
            answer, asked = Answer(len(request.prompt)), request.answer
            await follow(session, url, request.prompt, answer, note, max_new_tokens=asked)
            if answer.written != asked:
                raise ServerError(f"an answer ended after {answer.written} of {asked} tokens")
            answers.append(answer)
            in_flight[url] -= 1

    async with connect() as session:
        await asyncio.gather(*(stream() for _ in range(streams)))
    return answers

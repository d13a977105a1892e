"""Reads the answers of running servers chunk by chunk, many at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from scripts.shared.serving import ServerError


def connect() -> aiohttp.ClientSession:
    """A session of as many requests at once, and for as long, as one likes."""
    connections, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connections, timeout=timeout)


async def chunks_of(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Ask `/generate` of a server, and give each chunk when it comes.

    Raises:
        ServerError: the server refuses the request, or ends it with an error.
        aiohttp.ClientError: the server is gone.
    """
    async with session.post(f"{url}/generate", json={**body, "stream": True}) as response:
        async for line in response.content:
            if response.status != 200 or line.startswith(b'data: {"error"'):
                raise ServerError(f"{url} answers {response.status}: {line.decode()}")
            if line.startswith(b"data: {"):
                yield msgspec.json.decode(line.removeprefix(b"data: "))

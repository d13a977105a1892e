"""Requests that follow one another in several streams, and whose every token is checked."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import requests
from transformers import AutoTokenizer

from scripts.accuracy.pointer_chase import make_chain
from scripts.shared.serving import Client, ServerError
from sglang_ext.server_args import BUNDLED_MODEL

FACTS, HOPS = 128, 60
PROMPTS = 32
"""Chains that streams draw from: some prompts come again, and some come at the same time."""

DENSE_SHARE, SHORT_SHARE = 0.1, 0.2
"""Shares of requests that ask for dense decode, and that end in the middle of their chain."""


class Ended(NamedTuple):
    """How a request ended."""

    kind: str  # `finished`, `aborted`, or `failed` if the server gave no answer
    seconds: float
    sparse_steps: int = 0
    losses: int = 0  # cache ranks that were lost while it was sparse
    mistake: str | None = None  # what is wrong with the answer, or with the server


class Chain(NamedTuple):
    """A prompt, and the only right continuation of it, in tokens."""

    prompt: list[int]
    answer: list[int]

    def mistake(self, name: str, tokens: Sequence[int], expected: int | None) -> str | None:
        """What is wrong with an answer, of which so many tokens are expected, if that is known."""
        if expected is not None and len(tokens) != expected:
            return f"{name}: {len(tokens)} tokens where {expected} were asked for"
        pairs = zip(tokens, self.answer, strict=False)
        wrong = next(itertools.compress(itertools.count(), (a != b for a, b in pairs)), None)
        return None if wrong is None else f"{name}: token {wrong} of {len(tokens)} is wrong"


class Streams:
    """Threads that ask a server for chains, one after the other, until they are told to stop.

    A chain has one right continuation. An answer is that, or, if it was aborted, a beginning of it.
    """

    def __init__(self, client: Client, streams: int) -> None:
        """Start so many streams to a server of the bundled model."""
        self.ended: list[Ended] = []
        self._client = client
        self._numbers = itertools.count()
        self._active: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        tokenizer: Any = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
        problems = [make_chain(number, FACTS, HOPS) for number in range(PROMPTS)]
        prompts = tokenizer([one.prompt for one in problems])["input_ids"]
        answers = [" ".join(one.answer) for one in problems]
        encoded = tokenizer(answers, add_special_tokens=False)["input_ids"]
        self._chains = list(map(Chain, prompts, encoded))
        self._pool = ThreadPoolExecutor(streams)
        for stream in range(streams):
            self._pool.submit(self._run, random.Random(stream))

    def active(self) -> list[str]:
        """The names of the requests under way."""
        with self._lock:
            return sorted(self._active)

    def stop(self) -> None:
        """Send no more, and wait for those under way."""
        self._stopping.set()
        self._pool.shutdown()

    def _run(self, source: random.Random) -> None:
        while not self._stopping.is_set():
            with self._lock:
                name = f"soak-{next(self._numbers)}"
                self._active.add(name)
            ended = self._ask(name, source)
            with self._lock:
                self._active.remove(name)
                self.ended.append(ended)
            if ended.kind == "failed":
                time.sleep(1)  # a server that is gone answers at once

    def _ask(self, name: str, source: random.Random) -> Ended:
        chain = source.choice(self._chains)
        tokens = len(chain.answer)
        if source.random() < SHORT_SHARE:
            tokens = source.randint(1, tokens)
        sparse = source.random() >= DENSE_SHARE
        started = time.monotonic()
        try:
            response = self._client.generate(
                chain.prompt,
                tokens,
                rid=name,
                sampling_params={"custom_params": {"cache_rank": sparse}},
            )
        except (requests.RequestException, ServerError, ValueError) as error:
            return Ended("failed", time.monotonic() - started, mistake=f"{name}: {error}")
        seconds = time.monotonic() - started
        meta = response["meta_info"]
        aborted = meta["finish_reason"]["type"] == "abort"
        statistics = meta.get("cache_rank") or {}
        return Ended(
            "aborted" if aborted else "finished",
            seconds,
            statistics.get("sparse_steps", 0),
            statistics.get("stale_steps", 0),
            chain.mistake(name, response["output_ids"], None if aborted else tokens),
        )

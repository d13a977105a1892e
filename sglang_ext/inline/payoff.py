"""Whether a decode step is shorter if it selects, told from steps that a server has measured.

A decode step takes what its attention reads, over a bandwidth, and something beside it. Without
selection it reads K and V of all tokens; with it their sketches, and K and V of those that are
attended to. When a server starts it measures steps of two lengths, with selection and without.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_ext.inline.selection import NEVER, Selection
from sglang_ext.inline.steps import Lengths, decode_batch

logger = logging.getLogger(__name__)

Verify = Callable[[Tensor, Tensor, Tensor, Lengths, Tensor], Any]
"""Verifies tokens at positions, of request slots of some lengths, and writes them to pool rows."""

REQUESTS_ON_GPU, REQUESTS_ON_CPU = 32, 2
"""Requests of the steps that are measured, at most."""

SHORT, LONG = 1024, 8192
"""Tokens of each, at most; the short ones have an eighth."""

STEPS = 4
"""Steps of each kind and length, of which the first is not counted."""


class StepTime(NamedTuple):
    """How long a step takes that reads so much.

    Attributes:
        least: seconds of one that reads no keys.
    """

    least: float
    of_byte: float

    def of(self, read: float) -> float:
        """Seconds of a step that reads so many bytes of keys, values and sketches."""
        return self.least + self.of_byte * read


class VerificationTime(NamedTuple):
    """How long it takes to verify the drafts of some requests.

    Attributes:
        step: of as many requests as were measured.
        requests: that number.
        of_request: seconds that one request more takes beside what it reads.
    """

    step: StepTime
    requests: int
    of_request: float

    def of(self, requests: int, read: float) -> float:
        """Seconds for so many requests, if so many bytes are read."""
        return self.step.of(read) + (requests - self.requests) * self.of_request


class Payoff(NamedTuple):
    """What steps of both kinds take.

    Attributes:
        token_bytes: K and V of a token in all sparse layers.
        sketch_bytes: its sketches there.
        verification: of drafts; None without them.
    """

    dense: StepTime
    sparse: StepTime
    token_bytes: int
    sketch_bytes: int
    verification: VerificationTime | None = None

    def is_shorter(self, tokens: int, scored: int, attended: int) -> bool:
        """Whether a step is shorter if it selects.

        Args:
            tokens: of all requests.
            scored: of those that would be sparse.
            attended: of `tokens`, those that it would attend to.
        """
        read = attended * self.token_bytes + scored * self.sketch_bytes
        return self.sparse.of(read) < self.dense.of(tokens * self.token_bytes)

    def of_round(
        self, requests: int, tokens: int, scored: int, attended: int
    ) -> tuple[float, float, float]:
        """Seconds of a dense step, of one draft and of a verification; see `is_shorter`."""
        assert self.verification is not None
        read = tokens * self.token_bytes
        drafts = attended * self.token_bytes + scored * self.sketch_bytes
        verified = self.verification.of(requests, read)
        return self.dense.of(read), self.sparse.of(drafts), verified

    def shortest(self, requests: int, attended: Callable[[int], int], lengths: range) -> int | None:
        """The least of some lengths from which so many sparse requests have shorter steps.

        Args:
            requests: all of one length.
            attended: tokens that a request of a length attends to.
        """

        def is_shorter(length: int) -> bool:
            tokens = requests * length
            return self.is_shorter(tokens, tokens, requests * attended(length))

        at = bisect.bisect_left(lengths, True, key=is_shorter)
        return lengths[at] if at < len(lengths) else None


def say_from_where(payoff: Payoff, attended: Callable[[int], int], lengths: range) -> None:
    """Log from which length a step selects, of 1, 8 and 64 requests; see `Payoff.shortest`."""
    found = {requests: payoff.shortest(requests, attended, lengths) for requests in (1, 8, 64)}
    said = ", ".join(f"{n} from {least}" if least else f"{n} never" for n, least in found.items())
    logger.info(
        "cache rank: steps select where that is shorter; tokens of so many requests: %s", said
    )


def measure(
    runner: Any, selection: Selection, tp_group: Any, verify: Verify | None = None, width: int = 1
) -> Payoff | None:
    """Measure decode steps of a loaded model whose pool is free; None if it is too small.

    Tensor-parallel ranks measure together, and agree.

    Args:
        tp_group: of the ranks, on CPUs.
        width: tokens of a request that it verifies.
    """
    requests, longest = load(runner)
    shortest = max(longest // 8, width, selection.least_length)
    if longest < max(8, 2 * shortest):
        return None
    few = max(1, requests // 4)
    seconds: dict[str, float] = {}
    with taking(runner, requests, longest) as rows:
        steps = _Steps(runner, selection, rows)
        for name, tokens in (("short", shortest), ("long", longest)):
            seconds[f"dense {name}"] = steps.decode(tokens, is_sparse=False)
            seconds[f"sparse {name}"] = steps.decode(tokens, is_sparse=True)
            if verify is not None:
                seconds[f"verify {name}"] = steps.verify(verify, requests, tokens, width)
        if verify is not None:
            seconds["verify few"] = steps.verify(verify, few, shortest, width)
    agreed = torch.tensor(list(seconds.values()), dtype=torch.float64)
    torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX, group=tp_group)
    seconds = dict(zip(seconds, agreed.tolist(), strict=True))

    pool = runner.token_to_kv_pool
    kept = [*pool.k_buffer[-selection.layers :], *pool.v_buffer[-selection.layers :]]
    token_bytes = sum(part[0].numel() * part.element_size() for part in kept)
    sketch_bytes = selection.sketch_bytes // len(pool.k_buffer[-1])

    def step_time(kind: str) -> StepTime:
        def read(tokens: int) -> int:
            if kind != "sparse":
                return requests * tokens * token_bytes
            return requests * (selection.attended(tokens) * token_bytes + tokens * sketch_bytes)

        first, last = seconds[f"{kind} short"], seconds[f"{kind} long"]
        of_byte = max(0.0, last - first) / max(1, read(longest) - read(shortest))
        return StepTime(max(0.0, first - of_byte * read(shortest)), of_byte)

    times = step_time("dense"), step_time("sparse"), token_bytes, sketch_bytes
    if verify is None:
        return Payoff(*times)
    step, more = step_time("verify"), requests - few
    longer = seconds["verify short"] - seconds["verify few"]
    read = step.of_byte * more * shortest * token_bytes
    return Payoff(*times, VerificationTime(step, requests, max(0.0, longer - read) / max(1, more)))


def load(runner: Any) -> tuple[int, int]:
    """How many requests are measured, and the tokens of each, in whole pages."""
    on_gpu = torch.device(runner.device).type == "cuda"
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool_allocator
    requests = min(REQUESTS_ON_GPU if on_gpu else REQUESTS_ON_CPU, len(table))
    if (captured := getattr(runner.decode_cuda_graph_runner, "max_bs", None)) is not None:
        requests = min(requests, captured)
    longest = min(LONG, int(runner.model_config.context_len), table.shape[1])
    length = min(longest, pool.available_size() // requests)
    page = int(pool.page_size)
    return requests, length // page * page


@contextlib.contextmanager
def taking(runner: Any, requests: int, length: int) -> Iterator[Tensor]:
    """Give the first request slots pool rows for a while, (requests, length) int64."""
    allocator = runner.token_to_kv_pool_allocator
    table, slots = runner.req_to_token_pool.req_to_token, slice(requests)
    taken = allocator.alloc(requests * length)
    rows = taken.view(requests, length)
    table[slots, :length] = rows.to(table.dtype)
    try:
        yield rows
    finally:
        table[slots, :length] = 0
        allocator.free(taken)


class _Steps:
    """Runs steps of requests that hold pool rows, and times them."""

    def __init__(self, runner: Any, selection: Selection, rows: Tensor) -> None:
        self._runner, self._selection, self._rows = runner, selection, rows

    def decode(self, tokens: int, is_sparse: bool) -> float:
        """Seconds of a decode step of requests of so many tokens."""
        requests = len(self._rows)
        zeros, slots, lengths = self._requests(requests, tokens)
        rows = self._rows[:, tokens - 1]

        def make() -> Callable[[], Any]:
            batch = decode_batch(self._runner, zeros, slots, lengths, rows)
            return functools.partial(self._runner.forward, batch)

        before, sparse_from = self._selection.step_is_sparse, self._selection.sparse_from
        self._selection.step_is_sparse = is_sparse
        sparse_from[:requests] = 0 if is_sparse else NEVER
        try:
            return self._time(make)
        finally:
            self._selection.step_is_sparse = before
            sparse_from[:requests] = NEVER

    def verify(self, verify: Verify, requests: int, tokens: int, width: int) -> float:
        """Seconds of a verification, after which requests have so many tokens."""
        zeros, slots, lengths = self._requests(requests, tokens - width)
        positions = lengths.device[:, None] + torch.arange(width, device=slots.device)
        rows = self._rows[:requests, tokens - width : tokens]
        of_step = zeros[:, None].expand(requests, width), positions, slots, lengths, rows
        return self._time(lambda: functools.partial(verify, *of_step))

    def _requests(self, count: int, tokens: int) -> tuple[Tensor, Tensor, Lengths]:
        """Token 0 for each of the first slots, these, and their lengths."""
        host, device = torch.full((count,), tokens, dtype=torch.int64), self._runner.device
        slots = torch.arange(count, device=device)
        return torch.zeros_like(slots), slots, Lengths(host.to(device), host)

    @torch.inference_mode()
    def _time(self, make: Callable[[], Callable[[], Any]]) -> float:
        """The least seconds of several steps, each made anew: SGLang writes to batches."""
        wait = torch.get_device_module(self._runner.device).synchronize
        taken = []
        for _ in range(STEPS):
            step = make()
            wait()
            started = time.perf_counter()
            step()
            wait()
            taken.append(time.perf_counter() - started)
        return min(taken[1:])

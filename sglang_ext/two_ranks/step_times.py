"""How long decode steps take with a cache rank and without, measured when a server starts.

A step with sparse requests reads fewer keys and values, and exchanges. What that takes is the time
of an exchanged step less that of a dense one that reads as much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_ext.own_batches import FIRST_SLOT, Lengths, decode_batch, measured_load, taking
from sglang_ext.payoff import Payoff, StepTime, say_from_where
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.two_ranks import inference_rank
from sglang_ext.two_ranks.inference_rank import InferenceRank
from sglang_ext.two_ranks.lifecycle import Phase

logger = logging.getLogger(__name__)

STEPS = 8
"""Steps of each kind, of which the least counts."""

_NEVER = sys.maxsize


def prepare(scheduler: Any, args: CacheRankServerArgs) -> None:
    """Measure the steps of a scheduler that is about to serve, and let them say who is sparse.

    With `--inference-kv working-set` long requests are sparse in any case, for the sake of memory.
    """
    rank = inference_rank.current()
    if rank is None or not args.selects_when_shorter:
        return
    payoff = measure(scheduler.tp_worker.model_runner, rank)
    if payoff is None:
        logger.warning(
            "cache rank: steps could not be measured; requests are sparse from %d tokens on",
            args.sparse_anyway_from,
        )
        return
    planner = rank.planner
    planner.payoff = payoff
    if args.inference_kv == "full":
        planner.sparse_anyway_from = _NEVER
    longest = int(scheduler.tp_worker.model_runner.model_config.context_len)
    say_from_where(payoff, planner.attended, range(args.sparse_from, longest, 64))


def measure(runner: Any, rank: InferenceRank) -> Payoff | None:
    """Measure steps of a loaded model whose pool is free; None if it is too small for them."""
    requests, longest = measured_load(runner)
    requests = min(requests, rank.args.max_sparse_requests)
    shortest = rank.args.sparse_from
    steps_at_most = _steps_until_sparse(rank) + STEPS
    if longest < shortest + steps_at_most:
        return None
    with taking(runner, requests, longest) as rows:
        steps = _Steps(runner, rank, rows)
        with _sparse_from(rank, _NEVER):
            short, long = steps.dense(shortest), steps.dense(longest)
        with _sparse_from(rank, 0):
            exchanged, attended = steps.sparse(shortest, steps_at_most)
    if exchanged is None:
        return None
    token_bytes = rank.config.model.bytes_per_token
    of_all = requests * token_bytes
    dense = StepTime.through((short, shortest * of_all), (long, longest * of_all))
    beside = max(0.0, exchanged - dense.of(attended * of_all))
    # The cache rank reads keys for scores meanwhile.
    return Payoff(dense, dense._replace(least=dense.least + beside), token_bytes, sketch_bytes=0)


def _steps_until_sparse(rank: InferenceRank) -> int:
    """At most so many steps ship a short request, fill its slots, and make it sparse."""
    args, config = rank.args, rank.config
    # What pages hold that went as codes may go once more.
    shipping = 1 + -(-args.sparse_from // args.bulk_chunk_tokens)
    filling = -(-config.sparse_budget // config.max_swap_tokens)
    return shipping + config.query_window + filling + 4


@contextlib.contextmanager
def _sparse_from(rank: InferenceRank, length: int) -> Iterator[None]:
    """Let requests be sparse from a length on for a while, and no step be traced."""
    planner, step = rank.planner, rank.decode_step
    before, tracer = planner.sparse_anyway_from, step.tracer
    planner.sparse_anyway_from, step.tracer = length, None
    try:
        yield
    finally:
        planner.sparse_anyway_from, step.tracer = before, tracer


@dataclasses.dataclass(eq=False)
class _Request:
    """What a step reads of SGLang's requests. It shares no prompt, and no row of it is evicted."""

    req_pool_idx: int
    sampling_params: SimpleNamespace
    origin_input_ids: range
    cache_protected_len: int = sys.maxsize
    cache_rank_weights: int = -1

    @property
    def kv(self) -> _Request:
        return self


class _Steps:
    """Runs steps of requests that hold pool rows, (requests, tokens), and times them."""

    def __init__(self, runner: Any, rank: InferenceRank, rows: Tensor) -> None:
        self._runner, self._rank, self._rows = runner, rank, rows
        self._slots = torch.arange(FIRST_SLOT, FIRST_SLOT + len(rows), device=rows.device)

    def dense(self, tokens: int) -> float:
        """Seconds of a step of requests that have so many tokens and stay dense."""
        requests = self._requests(tokens)
        return min(self._time(requests, tokens) for _ in range(STEPS))

    def sparse(self, tokens: int, steps_at_most: int) -> tuple[float | None, int]:
        """Seconds of a step of sparse requests, and the tokens that each attends to.

        They have so many tokens when they begin; None if they do not turn sparse.
        """
        rank, requests = self._rank, self._requests(tokens)
        live, taken = rank.lifecycle.live, []
        try:
            for step in range(steps_at_most):
                seconds = self._time(requests, tokens + step)
                if len(live) < len(requests):
                    break  # no room, or the cache rank is lost
                if all(sequence.phase is Phase.SPARSE for sequence in live.values()):
                    taken.append(seconds)
            attended = max((each.statistics.attended_tokens for each in live.values()), default=0)
        finally:
            for request in requests:
                rank.on_request_freed(request)
        return min(taken[1:], default=None), attended

    def _requests(self, tokens: int) -> list[_Request]:
        params = SimpleNamespace(custom_params=None, max_new_tokens=len(self._rows[0]))
        return [_Request(slot, params, range(tokens)) for slot in self._slots.tolist()]

    @torch.inference_mode()
    def _time(self, requests: list[_Request], tokens: int) -> float:
        """Seconds of one step, the current tokens included."""
        host = torch.full((len(requests),), tokens, dtype=torch.int64)
        lengths = Lengths(host.to(self._rows.device), host)
        zeros, rows = torch.zeros_like(self._slots), self._rows[:, tokens - 1]
        batch = decode_batch(self._runner, zeros, self._slots, lengths, rows)
        forward = functools.partial(self._runner.forward, batch)
        self._wait()
        started = time.perf_counter()
        self._rank.decode_step.run(requests, host.tolist(), forward)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        """Wait for the forward pass; what is exchanged for the next one may go on."""
        if self._rows.is_cuda:
            torch.cuda.current_stream().synchronize()

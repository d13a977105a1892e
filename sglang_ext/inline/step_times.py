"""Measures decode steps of a loaded model, with selection and without, when a server starts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_ext.inline.selection import NEVER, Selection
from sglang_ext.own_batches import FIRST_SLOT, Lengths, decode_batch, measured_load, taking
from sglang_ext.payoff import Payoff, StepTime, VerificationTime

Verify = Callable[[Tensor, Tensor, Tensor, Lengths, Tensor], Any]
"""Verifies tokens at positions, of request slots of some lengths, and writes them to pool rows."""

STEPS = 4
"""Steps of each kind and length, of which the first is not counted."""


def measure(
    runner: Any, selection: Selection, tp_group: Any, verify: Verify | None = None, width: int = 1
) -> Payoff | None:
    """Measure decode steps of a loaded model whose pool is free; None if it is too small.

    Tensor-parallel ranks measure together, and agree.

    Args:
        tp_group: of the ranks, on CPUs.
        width: tokens of a request that it verifies.
    """
    requests, longest = measured_load(runner)
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
        def measured(name: str, tokens: int) -> tuple[float, int]:
            read = tokens * token_bytes
            if kind == "sparse":
                read = selection.attended(tokens) * token_bytes + tokens * sketch_bytes
            return seconds[f"{kind} {name}"], requests * read

        return StepTime.through(measured("short", shortest), measured("long", longest))

    times = step_time("dense"), step_time("sparse"), token_bytes, sketch_bytes
    if verify is None:
        return Payoff(*times)
    step, more = step_time("verify"), requests - few
    longer = seconds["verify short"] - seconds["verify few"]
    read = step.of_byte * more * shortest * token_bytes
    return Payoff(*times, VerificationTime(step, requests, max(0.0, longer - read) / max(1, more)))


class _Steps:
    """Runs steps of requests that hold pool rows, and times them."""

    def __init__(self, runner: Any, selection: Selection, rows: Tensor) -> None:
        self._runner, self._selection, self._rows = runner, selection, rows

    def decode(self, tokens: int, is_sparse: bool) -> float:
        """Seconds of a decode step of requests of so many tokens."""
        zeros, slots, lengths = self._requests(len(self._rows), tokens)
        rows = self._rows[:, tokens - 1]

        def make() -> Callable[[], Any]:
            batch = decode_batch(self._runner, zeros, slots, lengths, rows)
            return functools.partial(self._runner.forward, batch)

        before, sparse_from = self._selection.step_is_sparse, self._selection.sparse_from
        self._selection.step_is_sparse = is_sparse
        sparse_from[slots] = 0 if is_sparse else NEVER
        try:
            return self._time(make)
        finally:
            self._selection.step_is_sparse = before
            sparse_from[slots] = NEVER

    def verify(self, verify: Verify, requests: int, tokens: int, width: int) -> float:
        """Seconds of a verification, after which requests have so many tokens."""
        zeros, slots, lengths = self._requests(requests, tokens - width)
        positions = lengths.device[:, None] + torch.arange(width, device=slots.device)
        rows = self._rows[:requests, tokens - width : tokens]
        of_step = zeros[:, None].expand(requests, width), positions, slots, lengths, rows
        return self._time(lambda: functools.partial(verify, *of_step))

    def _requests(self, count: int, tokens: int) -> tuple[Tensor, Tensor, Lengths]:
        """Token 0 for each of the first slots that requests have, these, and their lengths."""
        host, device = torch.full((count,), tokens, dtype=torch.int64), self._runner.device
        slots = torch.arange(FIRST_SLOT, FIRST_SLOT + count, device=device)
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

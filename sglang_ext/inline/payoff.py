"""Whether a decode step is shorter if it selects, told from steps that a server has measured.

A decode step takes what its attention reads, over a bandwidth, and something beside it. Without
selection it reads K and V of all tokens; with it their sketches, and K and V of those that are
attended to. When a server starts it measures steps of two lengths, with selection and without.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_ext import compat
from sglang_ext.inline.selection import NEVER, Selection

logger = logging.getLogger(__name__)

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
        of_byte: seconds.
    """

    least: float
    of_byte: float

    def of(self, read: float) -> float:
        """Seconds of a step that reads so many bytes of keys, values and sketches."""
        return self.least + self.of_byte * read


class Payoff(NamedTuple):
    """What steps of both kinds take.

    Attributes:
        dense, sparse: their times.
        token_bytes: K and V of a token in all sparse layers.
        sketch_bytes: its sketches there.
    """

    dense: StepTime
    sparse: StepTime
    token_bytes: int
    sketch_bytes: int

    def is_shorter(self, tokens: int, scored: int, attended: int) -> bool:
        """Whether a step is shorter if it selects.

        Args:
            tokens: of all requests.
            scored: of those that would be sparse.
            attended: of `tokens`, those that it would attend to.
        """
        without = self.dense.of(tokens * self.token_bytes)
        read = attended * self.token_bytes + scored * self.sketch_bytes
        return self.sparse.of(read) < without

    def shortest(self, requests: int, attended: Callable[[int], int], lengths: range) -> int | None:
        """The least of some lengths from which so many sparse requests have shorter steps.

        Args:
            requests: all of one length.
            attended: tokens that a request of a length attends to.
            lengths: that are tried.
        """

        def is_shorter(length: int) -> bool:
            tokens = requests * length
            return self.is_shorter(tokens, tokens, requests * attended(length))

        at = bisect.bisect_left(lengths, True, key=is_shorter)
        return lengths[at] if at < len(lengths) else None


def measure(runner: Any, selection: Selection, tp_group: Any) -> Payoff | None:
    """Measure decode steps of a loaded model whose pool is free; None if it is too small.

    Tensor-parallel ranks measure together, and agree.
    """
    allocator = runner.token_to_kv_pool_allocator
    requests, length = _load(runner)
    if length < 8:
        return None
    rows = allocator.alloc(requests * length)
    table, slots = runner.req_to_token_pool.req_to_token, slice(requests)
    table[slots, :length] = rows.view(requests, length).to(table.dtype)
    before, seconds = selection.step_is_sparse, {}
    try:
        for is_sparse in (False, True):
            selection.step_is_sparse = is_sparse
            selection.sparse_from[slots] = 0 if is_sparse else NEVER
            for tokens in (length // 8, length):
                of_step = rows.view(requests, length)[:, tokens - 1]
                seconds[is_sparse, tokens] = _time(runner, tokens, of_step)
    finally:
        selection.step_is_sparse = before
        selection.sparse_from[slots] = NEVER
        table[slots, :length] = 0
        allocator.free(rows)
    agreed = torch.tensor(list(seconds.values()), dtype=torch.float64)
    torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX, group=tp_group)
    seconds = dict(zip(seconds, agreed.tolist(), strict=True))

    pool = runner.token_to_kv_pool
    kept = [*pool.k_buffer[-selection.layers :], *pool.v_buffer[-selection.layers :]]
    token_bytes = sum(part[0].numel() * part.element_size() for part in kept)
    sketch_bytes = selection.sketch_bytes // len(pool.k_buffer[-1])

    def step_time(is_sparse: bool) -> StepTime:
        def read(tokens: int) -> int:
            if not is_sparse:
                return requests * tokens * token_bytes
            return requests * (selection.attended(tokens) * token_bytes + tokens * sketch_bytes)

        short, long = length // 8, length
        first, last = seconds[is_sparse, short], seconds[is_sparse, long]
        of_byte = max(0.0, last - first) / max(1, read(long) - read(short))
        return StepTime(max(0.0, first - of_byte * read(short)), of_byte)

    return Payoff(step_time(False), step_time(True), token_bytes, sketch_bytes)


def _load(runner: Any) -> tuple[int, int]:
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


@torch.inference_mode()
def _time(runner: Any, tokens: int, rows: torch.Tensor) -> float:
    """Seconds of a decode step of requests of so many tokens, whose new ones have these rows."""
    count, device = len(rows), runner.device
    best = float("inf")
    for step in range(STEPS):
        lengths = torch.full((count,), tokens, dtype=torch.int64)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=count,
            input_ids=torch.zeros(count, dtype=torch.int64, device=device),
            req_pool_indices=torch.arange(count, device=device),
            seq_lens=lengths.to(device),
            seq_lens_cpu=lengths,
            seq_lens_sum=count * tokens,
            orig_seq_lens=lengths.to(device, torch.int32),
            out_cache_loc=rows,
            positions=lengths.to(device) - 1,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        compat.set_real_tokens(batch, count)
        wait = torch.get_device_module(device).synchronize
        wait()
        started = time.perf_counter()
        runner.forward(batch)
        wait()
        if step:
            best = min(best, time.perf_counter() - started)
    return best

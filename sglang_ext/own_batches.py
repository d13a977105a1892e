"""Forward batches that we make ourselves, of requests that hold slots and rows.

A server that starts measures such steps, of slots and rows that nobody has yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor

from sglang_ext import compat

REQUESTS_ON_GPU, REQUESTS_ON_CPU = 32, 2
"""Requests of the steps that are measured, at most."""

FIRST_SLOT = 1
"""SGLang has slot 0 for what pads batches."""

LONGEST = 8192
"""Tokens of each, at most."""


class Lengths(NamedTuple):
    """How many tokens requests have, (B,) int64, where the model runs and on the host."""

    device: Tensor
    host: Tensor

    def after(self, tokens: int) -> Lengths:
        return Lengths(self.device + tokens, self.host + tokens)


def batch_of(
    runner: Any,
    mode: ForwardMode,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    lengths: Lengths,
    rows: Tensor,
) -> ForwardBatch:
    """Make a batch for `runner.forward`.

    Args:
        tokens, positions, rows: (n,) int64, of the tokens that are read; rows are the pool's.
        slots: (B,) request slots.
        lengths: of the requests, as the mode counts them.
    """
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(slots),
        input_ids=tokens,
        req_pool_indices=slots,
        seq_lens=lengths.device,
        seq_lens_cpu=lengths.host,
        seq_lens_sum=int(lengths.host.sum()),
        orig_seq_lens=lengths.device.to(torch.int32),
        out_cache_loc=rows,
        positions=positions,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    compat.set_real_tokens(batch, len(tokens))
    return batch


def decode_batch(
    runner: Any, tokens: Tensor, slots: Tensor, lengths: Lengths, rows: Tensor
) -> ForwardBatch:
    """Make a decode step: (B,) tokens, slots and pool rows; lengths have the current tokens."""
    positions = lengths.device - 1
    return batch_of(runner, ForwardMode.DECODE, tokens, positions, slots, lengths, rows)


def as_extend(batch: ForwardBatch, lengths: Lengths, width: int) -> None:
    """Let a batch read so many tokens of each request behind those that `lengths` has."""
    count, after = len(lengths.host), lengths.after(width)
    batch.extend_prefix_lens = lengths.device.to(torch.int32)
    batch.extend_prefix_lens_cpu = lengths.host.tolist()
    batch.extend_seq_lens = torch.full_like(batch.extend_prefix_lens, width)
    batch.extend_seq_lens_cpu = [width] * count
    batch.extend_start_loc = torch.arange(count, dtype=torch.int32, device=after.device.device)
    batch.extend_start_loc *= width
    batch.extend_num_tokens = count * width
    batch.seq_lens, batch.seq_lens_cpu = after.device, after.host
    batch.seq_lens_sum = int(after.host.sum())


def measured_load(runner: Any) -> tuple[int, int]:
    """How many requests are measured, and the tokens of each, in whole pages."""
    on_gpu = torch.device(runner.device).type == "cuda"
    slots, pool = runner.req_to_token_pool, runner.token_to_kv_pool_allocator
    requests = min(REQUESTS_ON_GPU if on_gpu else REQUESTS_ON_CPU, slots.size)
    if (captured := getattr(runner.decode_cuda_graph_runner, "max_bs", None)) is not None:
        requests = min(requests, captured)
    longest = min(LONGEST, int(runner.model_config.context_len), slots.req_to_token.shape[1])
    length = min(longest, pool.available_size() // requests)
    page = int(pool.page_size)
    return requests, length // page * page


@contextlib.contextmanager
def taking(runner: Any, requests: int, length: int) -> Iterator[Tensor]:
    """Give request slots pool rows for a while, (requests, length) int64, from FIRST_SLOT on."""
    allocator = runner.token_to_kv_pool_allocator
    table = runner.req_to_token_pool.req_to_token
    slots = slice(FIRST_SLOT, FIRST_SLOT + requests)
    taken = allocator.alloc(requests * length)
    rows = taken.view(requests, length)
    table[slots, :length] = rows.to(table.dtype)
    try:
        yield rows
    finally:
        table[slots, :length] = 0
        allocator.free(taken)

"""Forward batches that we make ourselves, of requests that hold slots and rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor

from sglang_ext import compat


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

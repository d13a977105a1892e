"""Tokens drawn with noise that depends on a request's seed and a position, and on nothing else.

Drafts and verification share the noise. So the verified tokens are those that plain SGLang draws
with this seed, at any temperature, and a draft is right where it is equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import (
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from torch import Tensor


def seeds_of(requests: Sequence[Any], device: str) -> Tensor:
    """The seeds of requests, (B,) int64: those that they ask for, or else such of their names."""

    def seed(request: Any) -> int:
        asked = request.sampling_params.sampling_seed
        return zlib.crc32(request.rid.encode()) if asked is None else int(asked)

    return torch.tensor([seed(request) for request in requests], dtype=torch.int64).to(
        device, non_blocking=True
    )


def draw(logits: Tensor, sampling: Any, seeds: Tensor | None, positions: Tensor) -> Tensor:
    """Draw the tokens that follow some positions, as SGLang's sampler of PyTorch does.

    Args:
        logits: (B * n, vocabulary), of n positions of each request; a bias is added to them.
        sampling: SGLang's SamplingBatchInfo of B requests.
        seeds: (B,) int64; None where all requests are greedy.
        positions: (B * n,) int64, of the tokens that the logits follow.

    Returns:
        (B * n,) int64.
    """
    each = len(logits) // len(sampling.temperatures)

    def of_rows(values: Tensor) -> Tensor:
        return values.repeat_interleave(each, dim=0) if each > 1 else values

    if sampling.logit_bias is not None:
        logits.add_(of_rows(sampling.logit_bias))
    if sampling.is_all_greedy or seeds is None:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits / of_rows(sampling.temperatures), dim=-1)
    if not sampling.need_top_k_sampling and not sampling.need_top_p_sampling:
        drawn = sampling_from_probs_torch(probabilities, of_rows(seeds), positions)
    else:
        drawn = top_k_top_p_min_p_sampling_from_probs_torch(
            probabilities,
            of_rows(sampling.top_ks),
            of_rows(sampling.top_ps),
            of_rows(sampling.min_ps),
            False,
            of_rows(seeds),
            positions,
        )
    return drawn.view(-1).long()

"""How many drafts a verification confirms."""

from __future__ import annotations

import math

import torch
from sglang.srt.environ import envs
from torch import Tensor


def accepted(drafts: Tensor, verified: Tensor) -> Tensor:
    """How many drafts are what the verification draws, before the first one that is not.

    Args:
        drafts: (B, n) tokens.
        verified: (B, n + 1) or wider, the token that is drawn before each draft's place.

    Returns:
        (B,) int32.
    """
    is_right = drafts == verified[:, : drafts.shape[1]]
    return is_right.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)


class ForcedAcceptance:
    """As many tokens of a round as SGLANG_SIMULATE_ACC_LEN says, on average; for timing only."""

    def __init__(self) -> None:
        self.tokens = float(envs.SGLANG_SIMULATE_ACC_LEN.get())
        self._owed = 0.0

    def __call__(self, real: Tensor, drafts: int) -> Tensor:
        """Put a forced number of drafts in the place of the real ones, where one is asked for."""
        if self.tokens <= 0:
            return real
        self._owed += min(self.tokens, drafts + 1.0)
        tokens = math.floor(self._owed)
        self._owed -= tokens
        return torch.full_like(real, tokens - 1)

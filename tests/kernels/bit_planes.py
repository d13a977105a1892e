"""Keys that lie in bit planes."""

from __future__ import annotations

import torch
from torch import Tensor


def keys_of(planes: Tensor) -> Tensor:
    """The keys of tokens, (units, tokens), of their bit planes; see `RowScratch`."""
    bits = planes.long().unsqueeze(-1) >> torch.arange(8, device=planes.device) & 1
    plane = torch.arange(8, device=planes.device)[:, None, None]
    return (bits << plane).sum(dim=1).flatten(1)

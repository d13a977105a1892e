"""The hash behind SGLang's seeded noise, in plain torch: CPUs have no kernel of it."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hash seeds, positions and columns as MurmurHash3 does 16 bytes, by 32 bits.

    Args:
        seeds: (n,) 64-bit integers.
        positions: (n,) integers.
        columns: (m,) integers.

    Returns:
        (n, m) uint32.
    """
    seeds = seeds.view(torch.int64)[:, None]
    state = torch.zeros_like(seeds)
    for block in (seeds, seeds >> 32, positions[:, None].long(), columns[None].long()):
        state = _mix(state, block & _LOW)
    state = state ^ 16
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = _times(_rotated(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _times(value: Tensor, factor: int) -> Tensor:
    return (value * factor) & _LOW  # int64 wraps around


def _rotated(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _LOW

"""Keys, values and queries that look like those of a long decode, from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.kernels.rotary.reference import rotate_to
from scripts.shared.recordings import Recorded

ROTARY_BASE = 1e6
OUTLIER_CHANNELS = 4
OUTLIER_MAGNITUDE = 16.0
TARGETS = 24
STRONGEST, FADING = 0.6, 0.85


def synthetic_sample(
    tokens: int = 4096,
    steps: int = 16,
    layers: int = 2,
    query_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Recorded:
    """One sequence with outlier channels in its keys.

    What is modelled:

    - Keys after rotary embedding. The keys of a head have a mean that is OUTLIER_MAGNITUDE in a few
      of its channels, different ones in each head, and zero in the others. They are channels of the
      slower half of the rotary frequencies, so that the mean drifts along the tokens, over
      thousands of them, from a channel to the one that is rotated with it.
    - What a token adds to that is normal, in random directions of the head, the j-th of which has
      an energy of 1 / j: three quarters are in the best quarter of the directions. It is not
      rotated; that would only blur the directions.
    - Values are such noise alone, in other directions, and have no outliers.
    - A query looks for TARGETS earlier tokens: it holds what they add, and noise. In each step one
      token becomes the strongest of them and the others fade, so that attention is peaked, and
      changes slowly. Each query head has targets of its own.

    Left out are attention sinks and neighbours that resemble each other. The newest `steps` tokens
    have queries. `head_dim` is a multiple of 16.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (layers, kv_heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    energy = 1 / torch.arange(1, head_dim + 1)
    spread = (energy / energy.sum()).sqrt().unsqueeze(-1)
    content, values = (
        normal(*heads, tokens, head_dim) @ (spread * normal(*heads, head_dim, head_dim))
        for _ in range(2)
    )
    keys = content + _rotated(_outlier_means(heads, head_dim, generator), tokens)

    group = query_heads // kv_heads
    count = steps - 1 + TARGETS
    targets = torch.randint(tokens - steps, (*heads, group * count), generator=generator)
    wanted = content.gather(2, targets.unsqueeze(-1).expand(-1, -1, -1, head_dim))
    wanted = wanted.unflatten(2, (group, count))  # (layers, Hkv, G, steps - 1 + TARGETS, D)
    strength = STRONGEST * FADING ** torch.arange(TARGETS - 1, -1, -1)  # the newest is last
    sought = torch.einsum("lhgsdt,t->slhgd", wanted.unfold(3, TARGETS, 1), strength)
    queries = sought.flatten(2, 3) + 0.5 * normal(steps, layers, query_heads, head_dim)
    return Recorded(keys.to(dtype), values.to(dtype), queries.to(dtype))


def _outlier_means(heads: tuple[int, int], head_dim: int, generator: torch.Generator) -> Tensor:
    """(layers, Hkv, D): zero but for a few channels, in the slower half of the rotary pairs."""
    pairs, slower = head_dim // 2, head_dim // 4
    place = torch.rand((*heads, slower), generator=generator).argsort(-1)[..., :OUTLIER_CHANNELS]
    # A pair are two channels, half the head dimension apart; the mean starts in one of them.
    first = torch.randint(2, place.shape, generator=generator)
    sign = 1.0 - 2.0 * torch.randint(2, place.shape, generator=generator)
    means = torch.zeros((*heads, head_dim))
    return means.scatter_(-1, place + pairs - slower + pairs * first, OUTLIER_MAGNITUDE * sign)


def _rotated(vectors: Tensor, tokens: int) -> Tensor:
    """Vectors (..., D) under rotary embedding at each position: (..., tokens, D)."""
    half = vectors.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half) / half)
    everywhere = vectors.expand(tokens, *vectors.shape)
    rotated = rotate_to(everywhere, torch.arange(tokens), frequency, interleaved=False, scale=1.0)
    return rotated.movedim(0, -2)

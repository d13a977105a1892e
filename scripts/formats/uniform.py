"""Uniform quantization, beside which residency formats are read."""

from __future__ import annotations

from torch import Tensor, float32

from cache_rank.config import CacheRankConfig
from scripts.formats.quality import Exact, Measurement, compare, scores_of
from scripts.formats.samples import Sample

UNIFORM_GROUP = 128
"""So many tokens share a scale in the uniform baselines per channel."""


def measure_uniform(
    sample: Sample, exact: Exact, config: CacheRankConfig, bits: int, per_channel: bool
) -> Measurement:
    """Compare uniform quantization of keys and values with the sample.

    Steps are even between the smallest and the largest element: of a channel over UNIFORM_GROUP
    tokens, or of a token over its channels. These two numbers are float32. The newest tokens that
    make no whole group stay as they came, as in the formats.
    """
    members = UNIFORM_GROUP if per_channel else sample.keys.shape[-1]
    measurement = Measurement(
        f"INT{bits} per {'channel' if per_channel else 'token'}",
        f"groups of {UNIFORM_GROUP} tokens" if per_channel else "",
        bits + 2 * 32 / members,
        bits,
    )
    complete = sample.tokens // UNIFORM_GROUP * UNIFORM_GROUP
    keys, values = (tokens.to(float32, copy=True) for tokens in (sample.keys, sample.values))
    for tokens in (keys, values):
        groups = tokens[:, :, :complete].unflatten(2, (-1, UNIFORM_GROUP))
        groups.copy_(uniform_quantization(groups, bits, dim=-2 if per_channel else -1))
    read_keys, read_values = (tokens.to(sample.keys.dtype) for tokens in (keys, values))
    scores = scores_of(sample, keys)
    compare(measurement, sample, exact, read_keys, read_values, scores, config)
    return measurement


def uniform_quantization(tokens: Tensor, bits: int, dim: int) -> Tensor:
    """Rounded to 2^bits even steps between the smallest and the largest along `dim`."""
    smallest = tokens.amin(dim=dim, keepdim=True)
    step = (tokens.amax(dim=dim, keepdim=True) - smallest) / (2**bits - 1)
    return ((tokens - smallest) / step).nan_to_num().round() * step + smallest

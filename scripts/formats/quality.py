"""How good a residency format is, and the uniform quantization beside which it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.kernels.select.reference import top_tokens
from cache_rank.measure.recall import measure_recall
from cache_rank.pages import PAGE_TOKENS
from scripts.formats.samples import Sample

UNIFORM_GROUP = 128
"""So many tokens share a scale in the uniform baselines per channel."""


class Throughput(msgspec.Struct, frozen=True):
    """How fast one operation is.

    Gigabytes are 10^9 bytes: for scores, codes that are read; else all that is held of a token.
    """

    tokens: float  # a second, each in all layers and KV heads
    gigabytes: float | None  # a second; None if it is not known


class Measurement(msgspec.Struct):
    """One line of the comparison.

    Errors are vNMSE, E |x - y|² / E |x|², None if not finite. `score_error` is that of
    log-probabilities, both about their mean over the candidates, because what all tokens share
    changes no selection. Those of keys and values leave out the newest page, which formats may hold
    as it came.
    """

    format: str  # name, or that of a baseline
    options: str  # options as in `--kv-residency-options`, or of the baseline
    bits: float | None = None  # bits of an element as held, all that grows with tokens
    key_bits: int | None = None  # bits of a key's element that scores read, without scales
    key_error: float | None = None
    value_error: float | None = None
    output_error: float | None = None  # error of attention over all tokens
    score_error: float | None = None
    recall: float | None = None  # share of the exact k best that are among the k best by the scores
    attention_mass: float | None = None  # share of the candidates' attention that these hold
    encode: Throughput | None = None  # a baseline has no throughput
    score: Throughput | None = None
    gather: Throughput | None = None


class Exact(NamedTuple):
    """A sample's attention in full precision, a step each."""

    outputs: list[Tensor]  # (layers, Hq, D) float32
    scores: list[Tensor]  # (layers, Hkv, position + 1) float32, see `score_tokens`

    @classmethod
    def of(cls, sample: Sample) -> Exact:
        return cls(_outputs(sample, sample.keys, sample.values), scores_of(sample, sample.keys))


def compare(
    measurement: Measurement,
    sample: Sample,
    exact: Exact,
    keys: Tensor,
    values: Tensor,
    scores: Sequence[Tensor],
    config: CacheRankConfig,
) -> None:
    """Fill in errors, recall and attention mass.

    Args:
        measurement: is filled in.
        sample: on the device of all else.
        exact: the sample's attention.
        keys, values: what is read back, (layers, Hkv, tokens, D).
        scores: one a step, (layers, Hkv, position + 1) float32.
        config: says how many tokens are selected, and among which.
    """
    older = slice(0, sample.tokens - PAGE_TOKENS)
    measurement.key_error = _error([sample.keys[:, :, older]], [keys[:, :, older]])
    measurement.value_error = _error([sample.values[:, :, older]], [values[:, :, older]])
    measurement.output_error = _error(exact.outputs, _outputs(sample, keys, values))

    centred, selected = [], []
    for position, true, found in zip(sample.positions, exact.scores, scores, strict=True):
        candidates = config.candidates_after(position - 1)
        both = [part[..., candidates.start : candidates.stop] for part in (true, found)]
        centred.append([part - part.mean(dim=-1, keepdim=True) for part in both])
        chosen = top_tokens(found[..., :position], candidates, config.sparse_budget)
        selected.append(measure_recall(true, chosen, config, position))
    measurement.score_error = _error(*map(list, zip(*centred, strict=True)))
    measurement.recall, measurement.attention_mass = torch.stack(selected).mean((0, 2, 3)).tolist()


def _error(true: Sequence[Tensor], found: Sequence[Tensor]) -> float | None:
    """vNMSE over all the tensors; None if it is not finite."""
    differences = [one.float() - other.float() for one, other in zip(true, found, strict=True)]
    error = _energy(differences) / _energy(true)
    return float(error) if error.isfinite() else None


def _energy(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.float().square().sum().double() for tensor in tensors]).sum()


def _outputs(sample: Sample, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Attention of every step over keys and values: (layers, Hq, D) float32 each."""
    outputs = []
    for position, query in zip(sample.positions, sample.queries, strict=True):
        grouped = query.float().unflatten(1, (keys.shape[1], -1))  # (layers, Hkv, G, D)
        logits = grouped @ keys[:, :, : position + 1].float().transpose(-1, -2) * sample.scale
        output = logits.softmax(dim=-1) @ values[:, :, : position + 1].float()
        outputs.append(output.flatten(1, 2))
    return outputs


def scores_of(sample: Sample, keys: Tensor) -> list[Tensor]:
    """Scores of every step by keys of any float dtype, see Exact."""
    return [
        score_tokens(query, keys[:, :, : position + 1], sample.scale)
        for position, query in zip(sample.positions, sample.queries, strict=True)
    ]


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
    keys, values = (tokens.to(torch.float32, copy=True) for tokens in (sample.keys, sample.values))
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

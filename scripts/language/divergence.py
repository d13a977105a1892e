"""How far the distributions of one way to decode are from those of dense decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from scripts.shared.statistics import quantile

LOW_RATIO = 0.05
"""The quantile of the probability ratio that is reported, as in Sparrow (arXiv 2606.08446)."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Distributions over the whole vocabulary, compared; means over tokens.

    Attributes:
        kl: KL(dense ‖ system) in nats.
        nll_difference: what the text's own token costs more than in dense decoding, nats.
        top1_agreement: share of tokens where both have the same most probable token.
        ratio_mean: the mean of min(1, ratio) over tokens that dense decoding draws, where ratio is
            the system's probability over dense decoding's. (That of the ratio itself is 1 for any
            two distributions.) It is 1 minus the total variation.
        ratio_p5: the 5th percentile of that ratio, over all that dense decoding may draw at all
            positions; computed, not sampled.
        largest_difference: of two log-probabilities of the text's own tokens.
    """

    kl: float
    nll_difference: float
    top1_agreement: float
    ratio_mean: float
    ratio_p5: float
    largest_difference: float


def compare(dense: Tensor, system: Tensor, text: Sequence[int]) -> Divergence:
    """Compare log-probabilities, (tokens, vocabulary) each, at the tokens of a text, [tokens]."""
    weights, log_ratio = dense.exp(), system - dense
    difference = -log_ratio.gather(-1, torch.tensor(text)[:, None])
    return Divergence(
        kl=float(kl_by_token(dense, system).mean()),
        nll_difference=float(difference.mean()),
        top1_agreement=float((dense.argmax(-1) == system.argmax(-1)).double().mean()),
        ratio_mean=float(torch.minimum(weights, system.exp()).sum(-1).mean()),
        ratio_p5=math.exp(quantile(log_ratio.flatten(), LOW_RATIO, weights.flatten())),
        largest_difference=float(difference.abs().max()),
    )


def kl_by_token(dense: Tensor, system: Tensor) -> Tensor:
    """KL(dense ‖ system) of each token, [tokens] in nats, of log-probabilities."""
    return (dense.exp() * (dense - system)).sum(-1)

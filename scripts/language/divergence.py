"""How far the distributions of one way to decode are from those of dense decoding."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


def compare(
    dense: NDArray[np.float64], system: NDArray[np.float64], text: Sequence[int]
) -> Divergence:
    """Compare log-probabilities, (tokens, vocabulary) each, at the tokens of a text, [tokens]."""
    p, q = torch.from_numpy(dense), torch.from_numpy(system)
    own = torch.tensor(text)[:, None]
    weights, log_ratio = p.exp(), q - p
    difference = -log_ratio.gather(-1, own)
    return Divergence(
        kl=-float((weights * log_ratio).sum(-1).mean()),
        nll_difference=float(difference.mean()),
        top1_agreement=float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        ratio_mean=float(torch.minimum(weights, q.exp()).sum(-1).mean()),
        ratio_p5=float(weighted_quantile(log_ratio, weights, LOW_RATIO).exp()),
        largest_difference=float(difference.abs().max()),
    )


def kl_by_token(dense: NDArray[np.float64], system: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(dense ‖ system) of each token, [tokens] in nats, of log-probabilities."""
    p, q = torch.from_numpy(dense), torch.from_numpy(system)
    return (p.exp() * (p - q)).sum(-1).numpy()


def weighted_quantile(values: Tensor, weights: Tensor, share: float) -> Tensor:
    """The smallest value up to which there is this share of all weights; both of one shape."""
    ordered, order = values.flatten().sort()
    below = weights.flatten()[order].cumsum(0)
    return ordered[(below < share * below[-1]).sum().clamp(max=ordered.numel() - 1)]

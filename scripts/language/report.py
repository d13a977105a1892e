"""How far ways to decode are from dense decoding: measures of texts, their record, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from scripts.shared.comparison import Run, place_of
from scripts.shared.report import number, table_of
from scripts.shared.statistics import interval, mean, quantile

LOW_RATIO = 0.05
"""The quantile of the probability ratio that is reported, as in Sparrow (arXiv 2606.08446)."""

MEASURES = {
    "KL": ("kl", 4),
    "NLL minus dense": ("nll_difference", 4),
    "top-1 agreement": ("top1_agreement", 3),
    "ratio, mean": ("ratio_mean", 3),
    "ratio, 5 %": ("ratio_p5", 2),
}
"""The columns of the first table: a field of Score, and decimals."""

EXPLANATION = """\
KL is of the dense distribution from the system's, over the whole vocabulary, in nats a token. NLL
is of the text's own tokens. The ratio is the system's probability over dense decoding's of tokens
that dense decoding draws: its mean, where a ratio above 1 counts as 1, and its 5th percentile
(Sparrow, arXiv 2606.08446, asks for .86). Brackets are 95 % intervals over texts."""


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
        kl=float((weights * (dense - system)).sum(-1).mean()),
        nll_difference=float(difference.mean()),
        top1_agreement=float((dense.argmax(-1) == system.argmax(-1)).double().mean()),
        ratio_mean=float(torch.minimum(weights, system.exp()).sum(-1).mean()),
        ratio_p5=math.exp(quantile(log_ratio.flatten(), LOW_RATIO, weights.flatten())),
        largest_difference=float(difference.abs().max()),
    )


class Score(Divergence, frozen=True, kw_only=True):
    """How far a system is from dense decoding on one text, in the tokens that count."""

    text: str
    system: str  # label, without the budget
    budget: int | None  # k, tokens that each KV head selects; None for a system that selects none
    attended: int  # most tokens that a sparse layer attends to
    sparse_from: int | None  # tokens that were decoded before attention was sparse
    late_steps: int = 0  # that waited for their selection
    stale_steps: int = 0  # that missed it


class TextRun(Run, kw_only=True):
    """How scores came about."""

    context: int  # tokens of a text that are read and decoded
    scored: int  # the last of them, which count
    warm_up: int  # those before, which are decoded while systems become sparse
    texts: dict[str, str]  # hashes of the whole texts, by name


class Report(msgspec.Struct):
    """The content of `results.json`."""

    run: TextRun
    cells: list[Score]


def markdown(found: Report) -> str:
    run = found.run
    ordered = sorted(found.cells, key=lambda s: (place_of(s.system), s.system, s.budget or 0))
    cells = [list(scores) for _, scores in groupby(ordered, lambda s: (s.system, s.budget))]
    parts = [
        f"# {Path(run.model).name} on {len(run.texts)} texts",
        run.head(),
        f"Of each text {run.context} tokens, the last {run.scored} of which count, after "
        f"{run.warm_up} that decode while systems become sparse.",
        EXPLANATION,
        table_of(_names(scores) | _measures(scores) for scores in cells),
        "## KL by text",
        table_of(
            _names(scores) | {score.text: number(score.kl, 4) for score in scores}
            for scores in cells
        ),
        "## Texts",
        table_of({"text": name, "sha256": sha256[:16]} for name, sha256 in run.texts.items()),
        *run.foot(),
    ]
    return "\n\n".join(parts)


def _names(scores: Sequence[Score]) -> dict[str, str]:
    return {"system": scores[0].system, "k": number(scores[0].budget, 0)}


def _measures(scores: Sequence[Score]) -> dict[str, str]:
    return {
        "attended": str(scores[0].attended),
        **{
            title: interval(mean([getattr(score, field) for score in scores]), digits)
            for title, (field, digits) in MEASURES.items()
        },
    }

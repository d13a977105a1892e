"""Pairs what a system costs a language model with what its steps take, by the share attended to.

Accuracy and speed are measured on models and contexts of different sizes. What they have in common
is the share of the context that each KV head selects: 128 of 4,096 tokens and 1,024 of 32,768 are
both 1/32.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import msgspec

from scripts.language.records import Report, cells_of
from scripts.shared.systems import DENSE, System
from scripts.tradeoff.steps import MeasuredSteps, Steps, StepTime


class Curve(NamedTuple):
    """What is drawn as one line.

    Attributes:
        name: in the legend.
        scored: label of a system in the record of texts, without its budget; DENSE for a system
            that attends to everything, which has steps and no divergence.
        timed: label of a system in the record of speed, likewise.
    """

    name: str
    scored: str
    timed: str


class Point(msgspec.Struct, frozen=True):
    """A system at a share of the context.

    Attributes:
        curve: its name.
        scored, timed: the systems whose divergence and whose step these are.
        is_estimated: whether the step is an estimate; divergences are always measured.
        gpus: that the system takes.
        share: of the context that each KV head selects, as `1/32`; empty for all of it.
        text_budget, step_budget: k where divergence, and where the step is from.
        kl: divergence from dense decoding of each text, nats a token; none for all of the context.
        step_ms: of a decode step.
        tokens_per_second: of the batch.
    """

    curve: str
    scored: str
    timed: str
    is_estimated: bool
    gpus: int
    share: str
    text_budget: int | None
    step_budget: int | None
    kl: list[float]
    step_ms: float
    tokens_per_second: float | None

    @property
    def tokens_per_second_and_gpu(self) -> float | None:
        """Tokens of the batch in a second, over the GPUs that make them."""
        return None if self.tokens_per_second is None else self.tokens_per_second / self.gpus


def points_of(curve: Curve, texts: Report, steps: Steps) -> list[Point]:
    """The points of a curve, from the smallest share on.

    Args:
        curve: what to look for.
        texts: the record of `score_text`.
        steps: the times of steps.

    Raises:
        ValueError: a record lacks the system, or they have no share in common.
    """
    if System.parse(curve.timed).at_budget:
        raise ValueError(f"{curve.timed}: runs at a context of its own, and has no share of this")
    if curve.scored == DENSE:
        step = steps.find(curve.timed, None)
        if step is None:
            raise ValueError(f"{curve.name}: no step of {curve.timed} at {steps.shape} is recorded")
        return [_point(curve, steps, step, [])]
    cells = [cell for cell in cells_of(texts.cells) if cell.system == curve.scored]
    if not cells:
        scored = ", ".join(dict.fromkeys(score.system for score in texts.cells))
        raise ValueError(f"{curve.name}: no text was scored by {curve.scored}, only by {scored}")
    points = []
    for cell in cells:
        share = None if cell.budget is None else Fraction(cell.budget, texts.run.context)
        budget = None if share is None else share * steps.shape.context
        if budget is not None and budget.denominator > 1:
            continue
        step = steps.find(curve.timed, None if budget is None else int(budget))
        if step is not None:
            kl = [score.kl for score in cell.scores]
            points.append(_point(curve, steps, step, kl, cell.budget, share))
    if not points:
        raise ValueError(_nothing_in_common(curve, texts, steps))
    return sorted(points, key=lambda point: point.text_budget or 0)


def _point(
    curve: Curve,
    steps: Steps,
    step: StepTime,
    kl: list[float],
    text_budget: int | None = None,
    share: Fraction | None = None,
) -> Point:
    return Point(
        *curve,
        is_estimated=steps.is_estimated,
        gpus=System.parse(curve.timed).gpus,
        share="" if share is None else str(share),
        text_budget=text_budget,
        step_budget=None if share is None else int(share * steps.shape.context),
        kl=kl,
        step_ms=step.milliseconds,
        tokens_per_second=step.tokens_per_second,
    )


def _nothing_in_common(curve: Curve, texts: Report, steps: Steps) -> str:
    scored = [cell.budget for cell in cells_of(texts.cells) if cell.system == curve.scored]
    context = texts.run.context
    shares = ", ".join(str(Fraction(budget, context)) for budget in scored if budget)
    timed = steps.budgets(curve.timed) if isinstance(steps, MeasuredSteps) else []
    known = ", ".join(str(Fraction(budget, steps.shape.context)) for budget in timed) or "none"
    return (
        f"{curve.name}: {curve.scored} was scored at shares of {shares or 'no budget'}, and steps "
        f"of {curve.timed} at {steps.shape} are recorded at {known}: measure some share of both"
    )


def curves_in_common(texts: Report, steps: MeasuredSteps) -> list[Curve]:
    """The systems that both records have under one label, and those that attend to everything."""
    scored = {cell.system for cell in cells_of(texts.cells)}
    curves = []
    for label in steps.labels:
        system = System.parse(label)
        if label in scored:
            curves.append(Curve(label, label, label))
        elif not system.has_budget:
            curves.append(Curve(label, DENSE, label))
    return curves

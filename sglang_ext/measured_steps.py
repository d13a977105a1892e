"""Measured steps: who is measured in them, and what comes of it.

    choose          before the forward pass, decides whose selection is measured, for both ranks
    score           behind it, queues the scores by the keys in SGLang's pool
    on_measurement  takes what the cache rank measured, in the supervisor's thread
    settle          between steps, joins both and passes on what is complete

With `--inference-kv working-set` nobody has the keys as they came: what the cache rank measures by
the keys that it holds is all there is.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.copies import Readback
from cache_rank.protocol import Measured, Measurement
from sglang_ext.exchange.base import Exchange
from sglang_ext.lifecycle import Lifecycle, Phase
from sglang_ext.metrics import CacheRankMetrics
from sglang_ext.step_plan import StepPlan
from sglang_ext.true_recall import TrueRecall

GOLDEN_RATIO = (5**0.5 - 1) / 2


def measured_step(turn: int, interval: int) -> int:
    """Number of the measured step that so many come before.

    Of every `interval` steps one is measured, and not the same one each time: a text may repeat
    itself, and so may how well its queries are predicted. Multiples of the golden ratio spread
    evenly, and so does every n-th of them: those of one layer group and row.
    """
    return turn * interval + int(turn * GOLDEN_RATIO % 1 * interval)


def measured_turn(step: int, interval: int) -> int | None:
    """How many measured steps come before this one; None if it is none itself.

    Args:
        step: number of a step.
        interval: see `measured_step`; 0 measures none.
    """
    turn = step // interval if interval else 0
    return turn if interval and step == measured_step(turn, interval) else None


class MeasuredSteps:
    """The measured steps of one inference rank. All but `on_measurement` is for one thread."""

    def __init__(
        self,
        config: CacheRankConfig,
        lifecycle: Lifecycle,
        metrics: CacheRankMetrics,
        true_recall: TrueRecall | None,
    ) -> None:
        """Begin with none.

        Args:
            config: agreed with the cache rank.
            lifecycle: the epochs, whose requests are told what was measured of them.
            metrics: told of every measurement that is complete.
            true_recall: measures by the keys as they came; None where nobody has them.
        """
        self._config = config
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._true_recall = true_recall
        self._arrived: deque[Measurement] = deque()
        self._comparing: deque[tuple[Measurement, Readback]] = deque()

    def choose(self, plan: StepPlan) -> Measured | None:
        """Decide whose selection is measured in a step: one sparse request's, in one layer group.

        Groups and requests take turns, so that measuring never costs a step much.
        """
        turn = measured_turn(plan.step, self._config.recall_interval)
        if turn is None:
            return None
        rows = [
            row
            for row, sequence in enumerate(plan.rows.sequences)
            if sequence.phase is Phase.SPARSE and sequence.filled
        ]
        if not rows:
            return None
        requests, group = divmod(turn, len(self._config.groups))
        return Measured(rows[requests % len(rows)], group, self._true_recall is not None)

    def score(self, plan: StepPlan, exchange: Exchange) -> None:
        """Queue the inference rank's half, right behind the forward pass of a measured step."""
        measured = plan.measured
        if measured is None or self._true_recall is None:
            return
        self._true_recall.score(
            plan.step,
            plan.rows.sequences[measured.row],
            plan.rows.positions[measured.row],
            self._config.groups[measured.group],
            exchange.queries(measured.group, measured.row),
        )

    def on_measurement(self, measurement: Measurement) -> None:
        """Take what the cache rank measured. Safe from any thread."""
        self._arrived.append(measurement)

    def settle(self) -> None:
        """Pass on the measurements that are complete; nothing waits for the device."""
        while self._arrived:
            measurement = self._arrived.popleft()
            if self._true_recall is None:
                self._pass_on(measurement, None)
            elif (shares := self._true_recall.compare(measurement)) is not None:
                self._comparing.append((measurement, shares))
        while self._comparing and (values := self._comparing[0][1].value()) is not None:
            measurement, _ = self._comparing.popleft()
            self._pass_on(measurement, values)

    def _pass_on(self, measurement: Measurement, shares: Tensor | None) -> None:
        means = self._metrics.on_measurement(measurement, shares)
        if means is not None:
            self._lifecycle.note_measured(measurement.epoch, means)

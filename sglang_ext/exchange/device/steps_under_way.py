"""The steps whose answers the device is not done with, as the host keeps account of them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from sglang_ext.exchange.connection import CacheRankDownError
from sglang_ext.exchange.slots import ExchangedRows
from sglang_ext.lifecycle import SparseSequence

Outcome = Sequence[Sequence[int]]
"""For each request of a step, the groups in which its answer was applied, and the tokens."""


@dataclasses.dataclass(slots=True)
class _StepUnderWay:
    """One step; `waiting_since` is when it was first seen to have begun and not to be answered."""

    step: int
    rows: ExchangedRows
    waiting_since: float | None = None


class StepsUnderWay:
    """Steps in the order in which they were queued.

    The scheduler thread adds and settles them; the supervisor's thread looks for overdue ones.
    """

    def __init__(self, groups: int, timeout: float) -> None:
        """Begin with none.

        Args:
            groups: layer groups, in each of which an answer must have been applied.
            timeout: seconds from when a step's first message is computed until its answers are
                overdue.
        """
        self._groups = groups
        self._timeout = timeout
        self._steps: deque[_StepUnderWay] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, rows: ExchangedRows) -> None:
        """Add a step whose transfers have been queued."""
        with self._lock:
            self._steps.append(_StepUnderWay(step, rows))

    def settle(
        self, newest: int, outcome_of: Callable[[int], Outcome]
    ) -> Iterator[tuple[SparseSequence, int]]:
        """Remove the steps that are answered, and yield the tokens that each request got.

        Args:
            newest: the last step whose answers have been applied.
            outcome_of: gives the outcome of a step.

        Raises:
            CacheRankDownError: an answer was not for its request.
        """
        while self._steps and self._steps[0].step <= newest:
            oldest = self._steps[0]
            applied, shipped = outcome_of(oldest.step)
            for sequence in self._without_answer(oldest, applied):
                if not sequence.ended:
                    raise CacheRankDownError(
                        f"the answer to step {oldest.step} is not for epoch {sequence.epoch}"
                    )
            with self._lock:
                self._steps.popleft()
            yield from zip(oldest.rows.sequences, shipped, strict=False)

    def missed(
        self, step: int, newest: int, outcome_of: Callable[[int], Outcome]
    ) -> list[SparseSequence]:
        """Return the requests of a step that did not get all of their answer.

        Args:
            step: its transfers have ended, one way or the other; it may be settled.
            newest, outcome_of: as above.
        """
        entry = next((entry for entry in self._steps if entry.step == step), None)
        if entry is None:
            return []
        if step > newest:
            return list(entry.rows.sequences)
        return self._without_answer(entry, outcome_of(step)[0])

    def _without_answer(self, entry: _StepUnderWay, applied: Sequence[int]) -> list[SparseSequence]:
        pairs = zip(entry.rows.sequences, applied, strict=False)
        return [sequence for sequence, groups in pairs if groups != self._groups]

    def check_deadline(self, applied: int, computed: int) -> None:
        """Look for an overdue answer. Long prompts may be computed before a step is.

        Args:
            applied: the last step whose answers have been applied.
            computed: the last step whose first message has been computed.

        Raises:
            CacheRankDownError: an answer is overdue.
        """
        with self._lock:
            oldest = self._steps[0] if self._steps else None
        if oldest is None or oldest.step <= applied or oldest.step > computed:
            return
        now = time.monotonic()
        if oldest.waiting_since is None:
            oldest.waiting_since = now
        late = now - oldest.waiting_since
        if late > self._timeout:
            raise CacheRankDownError(f"no answer to step {oldest.step} in {late:.1f} s")

"""Why a cache rank was lost or did not start, and when the next one is started."""

from __future__ import annotations

import dataclasses

PROMPT_RESTARTS = 3
"""So many restarts in a row come at once."""

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0
"""The default of `cache_rank_max_restart_delay`."""

STABLE_SECONDS = 60.0
"""A cache rank that was up for so long begins a new row of restarts."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A cache rank that was lost, or did not start.

    Attributes:
        reason: what was noticed first.
        last_words: the last line of its standard error; may be empty.
        lifetime_seconds: from its spawn to its end.
        restart_delay_seconds: from its end to the next spawn.
    """

    was_up: bool
    reason: str
    ending: str
    last_words: str
    lifetime_seconds: float
    restart_delay_seconds: float

    def line(self) -> str:
        """Say it in one line of a log."""
        what = "was lost" if self.was_up else "did not start"
        delay = self.restart_delay_seconds
        when = f"in {delay:g} s" if delay else "at once"
        said = f"its last line of stderr: {self.last_words!r}" if self.last_words else "no stderr"
        reason = " ".join(self.reason.split())
        return (
            f"{what}: {self.ending}, {self.lifetime_seconds:.1f} s after its spawn; "
            f"seen as: {reason}; {said}; the next start comes {when}"
        )


class RestartBackoff:
    """How long each restart is put off: three not at all, then 1, 2, 4 and so on seconds."""

    def __init__(self, longest: float = LONGEST_DELAY_SECONDS) -> None:
        self._longest = longest
        self._in_a_row = 0
        self._next = FIRST_DELAY_SECONDS

    def after(self, up_seconds: float) -> float:
        """Return the delay, in seconds, after a cache rank that was up for so long; 0 if never."""
        if up_seconds >= STABLE_SECONDS:
            self._in_a_row, self._next = 0, FIRST_DELAY_SECONDS
        self._in_a_row += 1
        if self._in_a_row <= PROMPT_RESTARTS:
            return 0.0
        delay = min(self._next, self._longest)
        self._next = 2 * delay
        return delay

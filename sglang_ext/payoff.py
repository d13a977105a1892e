"""Whether a decode step is shorter if it selects, told from steps that a server has measured.

A decode step takes what its attention reads, over a bandwidth, and something beside it. Without
selection it reads K and V of all tokens; with it those that are attended to, and inline the
sketches of all. `inline/step_times.py` and `two_ranks/step_times.py` measure.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)


class StepTime(NamedTuple):
    """How long a step takes, by the bytes that it reads.

    Attributes:
        least: seconds of one that reads no keys.
    """

    least: float
    of_byte: float

    @classmethod
    def through(cls, short: tuple[float, float], long: tuple[float, float]) -> StepTime:
        """The line through two measured steps: the seconds of each, and the bytes that it read."""
        of_byte = max(0.0, long[0] - short[0]) / max(1, long[1] - short[1])
        return cls(max(0.0, short[0] - of_byte * short[1]), of_byte)

    def of(self, read: float) -> float:
        """Seconds of a step that reads so many bytes of keys, values and sketches."""
        return self.least + self.of_byte * read


class VerificationTime(NamedTuple):
    """How long it takes to verify the drafts of some requests.

    Attributes:
        step: of as many requests as were measured.
        requests: that number.
        of_request: seconds that one request more takes beside what it reads.
    """

    step: StepTime
    requests: int
    of_request: float

    def of(self, requests: int, read: float) -> float:
        """Seconds for so many requests, if so many bytes are read."""
        return self.step.of(read) + (requests - self.requests) * self.of_request


class Payoff(NamedTuple):
    """What steps of both kinds take.

    Attributes:
        token_bytes: K and V of a token in all sparse layers.
        sketch_bytes: its sketches there.
        verification: of drafts; None without them.
    """

    dense: StepTime
    sparse: StepTime
    token_bytes: int
    sketch_bytes: int
    verification: VerificationTime | None = None

    def is_shorter(self, tokens: int, scored: int, attended: int) -> bool:
        """Whether a step is shorter if it selects.

        Args:
            tokens: of all requests.
            scored: of those that would be sparse.
            attended: of `tokens`, those that it would attend to.
        """
        read = attended * self.token_bytes + scored * self.sketch_bytes
        return self.sparse.of(read) < self.dense.of(tokens * self.token_bytes)

    def of_round(
        self, requests: int, tokens: int, scored: int, attended: int
    ) -> tuple[float, float, float]:
        """Seconds of a dense step, of one draft and of a verification; see `is_shorter`."""
        assert self.verification is not None
        read = tokens * self.token_bytes
        drafts = attended * self.token_bytes + scored * self.sketch_bytes
        verified = self.verification.of(requests, read)
        return self.dense.of(read), self.sparse.of(drafts), verified

    def shortest(self, requests: int, attended: Callable[[int], int], lengths: range) -> int | None:
        """The least of some lengths from which selection makes the steps of requests shorter.

        Args:
            requests: all of one length.
            attended: tokens that a request of a length attends to.
        """

        def is_shorter(length: int) -> bool:
            tokens = requests * length
            return self.is_shorter(tokens, tokens, requests * attended(length))

        at = bisect.bisect_left(lengths, True, key=is_shorter)
        return lengths[at] if at < len(lengths) else None


def say_from_where(payoff: Payoff, attended: Callable[[int], int], lengths: range) -> None:
    """Log from which length a step selects, of 1, 8 and 64 requests; see `Payoff.shortest`."""
    found = {requests: payoff.shortest(requests, attended, lengths) for requests in (1, 8, 64)}
    said = ", ".join(f"{n} from {least}" if least else f"{n} never" for n, least in found.items())
    logger.info(
        "cache rank: steps select where that is shorter; tokens of so many requests: %s", said
    )

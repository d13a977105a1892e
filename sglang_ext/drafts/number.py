"""How many drafts a round has: the number with the least time for a token that is confirmed."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_ext.payoff import Payoff

AT_FIRST = 0.9
"""The share of drafts that is taken to be right before any was verified."""

WEIGHT = 32.0
"""Drafts that this counts as."""

MEMORY = 0.99
"""How much an earlier round weighs, by each later one."""

TRY_AGAIN_AFTER = 256
"""Dense rounds after which drafts are tried again, if they would pay at the share at first."""


class Acceptance(NamedTuple):
    """Drafts of the last rounds: those confirmed, and all that were compared."""

    right: float = AT_FIRST * WEIGHT
    compared: float = WEIGHT

    @property
    def share(self) -> float:
        """The probability that a draft is right whose predecessors are."""
        return self.right / self.compared

    def after(self, accepted: list[int], drafts: int) -> Acceptance:
        """With a round more; drafts of a request are compared up to the first wrong one."""
        right = sum(accepted)
        compared = right + sum(number < drafts for number in accepted)
        return Acceptance(MEMORY * self.right + right, MEMORY * self.compared + compared)


class DraftNumber:
    """Chooses for each round.

    Attributes:
        payoff: the times of steps; None where every round with a long request has the most.
    """

    def __init__(self, most: int, payoff: Payoff | None) -> None:
        self.most = most
        self.payoff = payoff
        self._acceptance = Acceptance()
        self._rounds = self._dense_rounds = 0

    def choose(self, requests: int, tokens: int, scored: int, attended: int) -> int:
        """Choose for a batch; all of this is summed over its requests.

        Args:
            requests: how many they are.
            tokens: that they have.
            scored: tokens of those that a draft selects for.
            attended: of `tokens`, those that a draft attends to.
        """
        if self.payoff is None:
            return self.most
        times = self.payoff.of_round(requests, tokens, scored, attended)
        best = self._fastest(*times, self._acceptance.share)
        if best:
            self._dense_rounds = 0
            return best
        self._dense_rounds += 1
        if self._dense_rounds < TRY_AGAIN_AFTER:
            return 0
        self._dense_rounds = 0
        return self._fastest(*times, AT_FIRST)

    def _fastest(self, dense: float, draft: float, verification: float, share: float) -> int:
        """The number of drafts with the least time for a token; 0 if that is a dense step."""
        best, least, tokens, probability = 0, dense, 1.0, 1.0
        for number in range(1, self.most + 1):
            probability *= share
            tokens += probability
            taken = (number * draft + verification) / tokens
            if taken < least:
                best, least = number, taken
        return best

    def note(self, accepted: list[int], drafts: int) -> None:
        """Take account of a round: how many drafts of each request were right."""
        if drafts:
            self._rounds += 1
            self._acceptance = self._acceptance.after(accepted, drafts)

    def state(self) -> dict[str, Any]:
        """What `/server_info` shows."""
        return {"most": self.most, "rounds": self._rounds, "right": self._acceptance.share}

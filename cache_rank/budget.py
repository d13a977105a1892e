"""How many tokens a request selects, beside sinks and recent ones, by its length.

What selection costs in quality follows the number of selected tokens, and hardly the length of the
request: a short one needs fewer for the same divergence, and a long one not many times as many.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class BudgetCurve(NamedTuple):
    """A multiple of the square root of a length, between two bounds.

    Attributes:
        factor: of the square root; 0 where every length has the same budget.
        least, most: the bounds.
    """

    factor: int
    least: int
    most: int

    @classmethod
    def given(cls, budget: int | None) -> BudgetCurve:
        """The same budget at every length, if one is given, or the default."""
        return DEFAULT_CURVE if budget is None else cls.flat(budget)

    @classmethod
    def flat(cls, budget: int) -> BudgetCurve:
        return cls(0, budget, budget)

    def at(self, length: int) -> int:
        return min(max(self.least, int(self.factor * math.sqrt(length))), self.most)

    def of(self, lengths: Tensor) -> Tensor:
        """The budgets of requests of such lengths, (B,) int32, computed where they are."""
        return (lengths.float().sqrt() * self.factor).clamp(self.least, self.most).to(torch.int32)

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.most)
        return f"{self.factor} * sqrt(length), from {self.least} to {self.most}"


DEFAULT_CURVE = BudgetCurve(6, 192, 1024)
"""What a request selects unless a server is told otherwise."""

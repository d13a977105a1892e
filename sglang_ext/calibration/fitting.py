"""The correction of a projection by which the hidden state of an earlier layer tells its queries.

With H the rows [norm(x), 1] of many tokens, x what entered the earlier layer, W the projection and
Q the true queries before their norm and rotation,

    C = (HᵀH + λI)⁻¹ Hᵀ (Q - H W)

so that with little data the projection stays as it is. A few dozen directions of C hold all that
helps. Those are kept that change the queries of these tokens most, which are the largest singular
values of (HᵀH)^½ C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MORE_DIRECTIONS = 16
"""So many more than are kept take part in the search for the largest."""

_ITERATIONS = 4


class NormalEquations:
    """Sums over tokens, all that a fit needs to know of them.

    Attributes:
        gram: (H + 1, H + 1) float32, HᵀH.
        cross: (H + 1, N) float32, HᵀQ.
        energy: () float64, the sum of squares of Q.
    """

    def __init__(self, gram: Tensor, width: int) -> None:
        """Begin with none; several layers of one source share its `gram`."""
        self.gram = gram
        self.cross = gram.new_zeros((gram.shape[0], width))
        self.energy = torch.zeros((), dtype=torch.float64, device=gram.device)
        self.tokens = 0

    def add(self, states: Tensor, queries: Tensor) -> None:
        """Add tokens, whose states are in `gram`: (T, H + 1) and (T, N) float32."""
        self.cross.addmm_(states.T, queries)
        self.energy += queries.double().square().sum()
        self.tokens += states.shape[0]

    def unexplained(self, projection: Tensor) -> float:
        """The share of the queries' squares that a projection, (H + 1, N), does not explain."""
        gram, cross, rows = (part.double() for part in (self.gram, self.cross, projection))
        explained = 2 * (rows * cross).sum() - (rows * (gram @ rows)).sum()
        return float(1 - explained / self.energy)


class Correction(NamedTuple):
    """What is added to a projection: the product of two thin matrices.

    Attributes:
        left: (H + 1, rank) float32.
        right: (rank, N) float32.
    """

    left: Tensor
    right: Tensor

    def added_to(self, projection: Tensor) -> Tensor:
        """The corrected projection, (H + 1, N) float32."""
        return torch.addmm(projection.float(), self.left.float(), self.right.float())


def fit(equations: NormalEquations, projection: Tensor, rank: int, ridge: float) -> Correction:
    """Fit the correction of a projection.

    Args:
        projection: (H + 1, N), with the weights of the input norm in it, and its constant.
        rank: directions that are kept; fewer where there are fewer.
        ridge: λ as a share of the mean of the diagonal of HᵀH.
    """
    gram, rows = equations.gram.double(), projection.double()
    residual = equations.cross.double() - gram @ rows
    strength = ridge * gram.diagonal().mean()
    factor = torch.linalg.cholesky(gram + strength * torch.eye(len(gram)).to(gram))
    correction = torch.cholesky_solve(residual, factor)
    rank = min(rank, *correction.shape)
    most = min(rank + _MORE_DIRECTIONS, *correction.shape)
    with torch.random.fork_rng(devices=[gram.device] if gram.is_cuda else []):
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(factor.T @ correction, most, _ITERATIONS)
    scaled = left[:, :rank] * sizes[:rank]
    unweighted = torch.linalg.solve_triangular(factor.T, scaled, upper=True)
    return Correction(unweighted.float(), right[:, :rank].T.float().contiguous())

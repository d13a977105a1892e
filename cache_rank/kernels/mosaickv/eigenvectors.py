"""Rotations of many covariances at once, Triton: the Jacobi method in parallel.

On a GPU, torch.linalg.eigh takes one matrix after another, some milliseconds each, and a model has
hundreds. Here each has a program of its own. A sweep over a matrix of D channels has D - 1 rounds.
In each round every channel is rotated against one other, in D / 2 pairs that do not touch each
other, so that in a sweep each pair has met once. After six to ten sweeps nothing is left off the
diagonal (Golub and Van Loan, Matrix Computations, section 8.5).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_SWEEPS = 16
"""A matrix takes at most this many sweeps, even if rounding leaves more than is tolerated."""

_TOLERATED = 1e-28
"""This share of a matrix's squares may be off its diagonal."""

_MATRICES = 64
"""A launch has this many matrices, each on a multiprocessor for milliseconds: steps need others."""


def rotation_of(covariance: Tensor, channels: int) -> Tensor:
    """See the reference: the columns are the same but for rounding and signs. D is a power of two.

    What is returned for a matrix does not depend on what other matrices there are.
    """
    dims = covariance.shape[-1]
    assert dims == triton.next_power_of_2(dims)
    matrices = covariance.double().clone(memory_format=torch.contiguous_format)
    if dims == 1:
        return torch.ones_like(matrices)
    vectors = torch.eye(dims, dtype=torch.float64, device=covariance.device)
    vectors = vectors.expand_as(matrices).contiguous()
    angles = torch.empty_like(matrices[..., 0])
    rotation = matrices.new_empty((*covariance.shape[:-1], channels))
    warps = max(1, min(16, dims * dims // 1024))
    every = [part.flatten(0, -3) for part in (matrices, vectors, rotation)]
    every.insert(2, angles.flatten(0, -2))
    for parts in zip(*(part.split(_MATRICES) for part in every), strict=True):
        _diagonalize[(parts[0].shape[0],)](
            *parts,
            channels,
            DIMS=dims,
            ROWS=min(dims, 16),
            TOLERATED=_TOLERATED,
            MOST_SWEEPS=_MOST_SWEEPS,
            num_warps=warps,
            maxnreg=min(255, 65536 // (32 * warps)),  # or the compiler takes far too few
        )
    return rotation


@triton.jit
def _store_angles(matrix, angles, first, second, DIMS: tl.constexpr):
    """Write the cosines and sines of the rotations after which pairs of channels do not covary.

    They go through memory, since otherwise every thread that needs one would compute it.
    """
    one = tl.load(matrix + first * (DIMS + 1))
    other = tl.load(matrix + second * (DIMS + 1))
    both = tl.load(matrix + first * DIMS + second)
    ratio = (other - one) / tl.where(both == 0, 1.0, 2 * both)
    size = 1 / (tl.abs(ratio) + tl.sqrt(1 + ratio * ratio))
    tangent = tl.where(both == 0, 0.0, tl.where(ratio < 0, -size, size))
    cosine = 1 / tl.sqrt(1 + tangent * tangent)
    pair = tl.arange(0, DIMS // 2)
    tl.store(angles + pair, cosine)
    tl.store(angles + DIMS // 2 + pair, tangent * cosine)
    tl.debug_barrier()


@triton.jit
def _rotate_pairs(matrix, vectors, angles, first, second, DIMS: tl.constexpr):
    """Replace A by JᵀAJ and V by JᵀV, where J rotates all channels in pairs."""
    _store_angles(matrix, angles, first, second, DIMS)
    pair = tl.arange(0, DIMS // 2)
    cosine, sine = tl.load(angles + pair), tl.load(angles + DIMS // 2 + pair)
    upper, lower = first[:, None] * DIMS, second[:, None] * DIMS
    left, right = first[None, :], second[None, :]
    upper_left, upper_right = tl.load(matrix + upper + left), tl.load(matrix + upper + right)
    lower_left, lower_right = tl.load(matrix + lower + left), tl.load(matrix + lower + right)
    tl.debug_barrier()  # all is read before any is written
    c, s = cosine[:, None], sine[:, None]
    upper_left, lower_left = c * upper_left - s * lower_left, s * upper_left + c * lower_left
    upper_right, lower_right = c * upper_right - s * lower_right, s * upper_right + c * lower_right
    c, s = cosine[None, :], sine[None, :]
    tl.store(matrix + upper + left, c * upper_left - s * upper_right)
    tl.store(matrix + lower + right, s * lower_left + c * lower_right)
    of_pair = first[:, None] == first[None, :]
    tl.store(matrix + upper + right, tl.where(of_pair, 0.0, s * upper_left + c * upper_right))
    tl.store(matrix + lower + left, tl.where(of_pair, 0.0, c * lower_left - s * lower_right))

    dims = tl.arange(0, DIMS)[None, :]
    above, below = tl.load(vectors + upper + dims), tl.load(vectors + lower + dims)
    tl.debug_barrier()
    c, s = cosine[:, None], sine[:, None]
    tl.store(vectors + upper + dims, c * above - s * below)
    tl.store(vectors + lower + dims, s * above + c * below)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["channels"])
def _diagonalize(
    matrices,
    vectors,
    angles,
    rotations,
    channels,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    TOLERATED: tl.constexpr,
    MOST_SWEEPS: tl.constexpr,
):
    """One program finds the eigenvectors of one matrix; the best are the columns of its rotation.

    The matrix becomes diagonal, and rows of `vectors` become its eigenvectors.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix, own = matrices + program * DIMS * DIMS, vectors + program * DIMS * DIMS
    dims, pair = tl.arange(0, DIMS), tl.arange(0, DIMS // 2)
    sweep, is_done = 0, 0
    while (sweep < MOST_SWEEPS) & (is_done == 0):
        # The circle method: the last channel stays where it is and the others move on.
        for turn in range(DIMS - 1):
            first = (turn + pair) % (DIMS - 1)
            second = (turn + DIMS - 1 - pair) % (DIMS - 1)
            second = tl.where(pair == 0, DIMS - 1, second)
            _rotate_pairs(matrix, own, angles + program * DIMS, first, second, DIMS)
        # How much is left off the diagonal.
        squares, rest = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
        for start in range(0, DIMS, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            content = tl.load(matrix + row * DIMS + dims[None, :])
            squares += tl.sum(content * content, axis=1)
            rest += tl.sum(tl.where(row == dims[None, :], 0.0, content * content), axis=1)
        is_done = (tl.sum(rest) <= TOLERATED * tl.sum(squares)).to(tl.int32)
        sweep += 1
    # Eigenvectors in the order of their eigenvalues, largest first.
    others = tl.load(matrix + dims * (DIMS + 1))[None, :]
    target = rotations + program * DIMS * channels
    for start in range(0, DIMS, ROWS):
        row = start + tl.arange(0, ROWS)
        energy = tl.load(matrix + row * (DIMS + 1))[:, None]
        is_tied = (others == energy) & (dims[None, :] < row[:, None])
        rank = tl.sum(((others > energy) | is_tied).to(tl.int32), axis=1)[:, None]
        content = tl.load(own + row[:, None] * DIMS + dims[None, :])
        tl.store(target + dims[None, :] * channels + rank, content, mask=rank < channels)

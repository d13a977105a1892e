"""Memory of scores grows in place of what it was."""

from __future__ import annotations

import weakref

import torch

from cache_rank.residency.scores import ScoreBuffers


def test_a_workspace_is_let_go_before_a_larger_one_is_made() -> None:
    """Each may take most of what a GPU has left beside the tokens."""
    made: list[weakref.ref[torch.Tensor]] = []

    def make_workspace(rows: int, layers: int, tokens: int) -> torch.Tensor:
        assert all(before() is None for before in made)
        workspace = torch.empty(rows, layers)
        made.append(weakref.ref(workspace))
        return workspace

    buffers = ScoreBuffers(2, make_workspace, torch.device("cpu"))
    for tokens in (1, 5000, 9000, 4000):
        buffers.take(1, 3, tokens)
    assert len(made) == 3
    assert made[-1]() is not None

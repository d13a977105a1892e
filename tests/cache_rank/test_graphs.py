"""Captured work does what the action does, from whatever its memory holds when it is replayed."""

import pytest
import torch

from cache_rank.graphs import CAPTURES_A_STEP, CudaGraphCache


class Doubled:
    """An action on memory that stays where it is, which counts how often it runs on the host."""

    def __init__(self, device: torch.device) -> None:
        self.given = torch.zeros(4, device=device)
        self.out = torch.zeros(4, device=device)
        self.runs = 0

    def __call__(self) -> None:
        self.runs += 1
        torch.mul(self.given, 2, out=self.out)


def check(graphs: CudaGraphCache, action: Doubled, key: str, value: float) -> None:
    action.given.fill_(value)
    graphs.allow_more()
    graphs.run(key, action)
    assert action.out.tolist() == [2 * value] * 4


@pytest.mark.gpu
def test_on_a_gpu_the_action_runs_once_is_captured_and_then_replayed() -> None:
    graphs, action = CudaGraphCache(torch.device("cuda")), Doubled(torch.device("cuda"))
    for turn in range(5):
        check(graphs, action, "doubled", turn)
    assert action.runs == 2

    other = Doubled(torch.device("cuda"))
    check(graphs, other, "other", 7)
    assert (other.runs, action.runs) == (1, 2)

    graphs.clear()
    for turn in range(3):
        check(graphs, action, "doubled", turn)
    assert action.runs == 4


@pytest.mark.gpu
def test_a_graph_is_replayed_on_the_stream_that_asks() -> None:
    graphs, action = CudaGraphCache(torch.device("cuda")), Doubled(torch.device("cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(4):
            check(graphs, action, "doubled", turn)


@pytest.mark.gpu
def test_a_step_captures_a_few_actions_and_runs_the_others_as_they_are() -> None:
    graphs = CudaGraphCache(torch.device("cuda"))
    actions = [Doubled(torch.device("cuda")) for _ in range(2 * CAPTURES_A_STEP)]
    for step in range(4):
        graphs.allow_more()
        for key, action in enumerate(actions):
            action.given.fill_(step)
            graphs.run(key, action)
            assert action.out.tolist() == [2 * step] * 4
    # Once to compile; the second half once more in the step that captured the first.
    assert [action.runs for action in actions] == [2] * CAPTURES_A_STEP + [3] * CAPTURES_A_STEP

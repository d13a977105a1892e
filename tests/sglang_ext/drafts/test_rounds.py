"""What a round of drafts is made of: noise, acceptance, and the tokens that go on."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.drafts import sampling
from sglang_ext.drafts.acceptance import ForcedAcceptance, accepted
from sglang_ext.drafts.forwards import Forwards
from sglang_ext.drafts.noise import murmur_hash32
from sglang_ext.drafts.worker import CurrentTokens, DraftWorker
from sglang_ext.own_batches import Lengths


def murmur3(data: bytes) -> int:
    """MurmurHash3 of whole words, seed 0, by its definition."""
    low = 0xFFFFFFFF
    state = 0
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & low
        word = ((word << 15 | word >> 17) & low) * 0x1B873593 & low
        state ^= word
        state = ((state << 13 | state >> 19) & low) * 5 + 0xE6546B64 & low
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & low
    return state ^ state >> 16


def test_the_hash_is_murmurs() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # published
    source = random.Random(0)
    seeds = [0, 1, 2**32 - 1, 2**63 - 1, -1, *(source.getrandbits(63) for _ in range(5))]
    positions = [0, 7, 40_000, *(source.getrandbits(20) for _ in range(7))]
    columns = [0, 1, 151_935]
    found = murmur_hash32(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    for row, seed, position in zip(found.tolist(), seeds, positions, strict=True):
        words = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position)
        start = b"".join(word.to_bytes(4, "little") for word in words)
        assert row == [murmur3(start + column.to_bytes(4, "little")) for column in columns]


@pytest.mark.gpu(1)
def test_the_hash_is_that_of_sglangs_kernel() -> None:
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32 as kernel

    seeds = torch.randint(-(2**62), 2**62, (9,)).to(torch.uint64)
    positions, columns = torch.arange(9) * 7919, torch.arange(3000)
    theirs = kernel(seeds.cuda(), positions.cuda(), columns.cuda())
    assert murmur_hash32(seeds, positions, columns).tolist() == theirs.tolist()


@pytest.mark.parametrize(
    ("drafts", "verified", "count"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 9, 3, 4], 1),  # what is right behind a wrong one does not count
        ([1, 2, 3], [9, 2, 3, 4], 0),
        ([1], [1, 2, 3, 4], 1),  # a verification is as wide as the most drafts
    ],
)
def test_drafts_count_up_to_the_first_wrong_one(
    drafts: list[int], verified: list[int], count: int
) -> None:
    assert accepted(torch.tensor([drafts]), torch.tensor([verified])).tolist() == [count]


def test_acceptance_is_forced_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.tensor([3, 0], dtype=torch.int32)
    assert ForcedAcceptance()(real, 4) is real
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.25")
    forced = ForcedAcceptance()
    found = [forced(real, 4).tolist() for _ in range(4)]
    assert found == [[1, 1], [1, 1], [1, 1], [2, 2]]  # beside each round's own token
    assert forced(real, 1).tolist() == [1, 1]


def sampling_info(**given: Any) -> Any:
    ones = torch.ones(2, 1)
    defaults = {
        "temperatures": ones,
        "is_all_greedy": False,
        "logit_bias": None,
        "need_top_k_sampling": False,
        "need_top_p_sampling": False,
    }
    return SimpleNamespace(**{**defaults, **given})


@torch.compiler.set_stance("force_eager")  # SGLang compiles what draws
def test_noise_is_of_the_seed_and_the_position_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32)
    logits = torch.randn(6, 50)
    seeds, positions = torch.tensor([5, 6]), torch.tensor([10, 11, 12, 10, 11, 12])
    of_rows = sampling.draw(logits.clone(), sampling_info(), seeds, positions)
    for row in range(6):
        one = sampling_info(temperatures=torch.ones(1, 1))
        of_row = seeds[row // 3 : row // 3 + 1], positions[row : row + 1]
        assert sampling.draw(logits[row : row + 1].clone(), one, *of_row) == of_rows[row]
    assert len(set(of_rows.tolist())) > 2


def test_a_bias_is_of_all_tokens_of_a_request() -> None:
    logits, bias = torch.zeros(6, 4), torch.zeros(2, 4)
    bias[0, 1], bias[1, 3] = 1.0, 1.0
    info = sampling_info(is_all_greedy=True, logit_bias=bias)
    assert sampling.draw(logits, info, None, torch.arange(6)).tolist() == [1, 1, 1, 3, 3, 3]


def test_requests_without_a_seed_have_one_of_their_names() -> None:
    def request(name: str, seed: int | None = None) -> Any:
        return SimpleNamespace(rid=name, sampling_params=SimpleNamespace(sampling_seed=seed))

    one, again, other, asked = sampling.seeds_of(
        [request("a"), request("a"), request("b"), request("a", 17)], "cpu"
    ).tolist()
    assert one == again != other
    assert asked == 17


def test_current_tokens_follow_their_requests() -> None:
    """By themselves, or by request slots where steps overlap."""
    for field in ("bonus_tokens", "future_indices"):
        one = CurrentTokens(torch.tensor([1, 2, 3]))
        other = CurrentTokens(torch.tensor([4]))
        if field == "future_indices":
            one.future_indices, other.future_indices = one.bonus_tokens, other.bonus_tokens
        one.filter_batch(torch.tensor([2, 0]))
        one.merge_batch(other)
        assert getattr(one, field).tolist() == [3, 1, 4]


def test_each_forward_pass_has_graphs_of_its_own() -> None:
    """Also where steps are measured that have no drafts."""
    seen: list[tuple[str, int, list[int]]] = []

    def forward(batch: Any) -> Any:
        graphs = runner.decode_cuda_graph_runner
        seen.append((graphs, len(batch.input_ids), batch.positions.tolist()))
        output = SimpleNamespace(next_token_logits=torch.zeros(len(batch.input_ids), 3))
        return SimpleNamespace(logits_output=output)

    runner: Any = SimpleNamespace(
        device="cpu", decode_cuda_graph_runner="verify", spec_algorithm=None, forward=forward
    )
    forwards = Forwards(runner, width=2)
    forwards._decode_graphs, forwards._verify_graphs = "decode", "verify"
    slots, host = torch.tensor([1, 2]), torch.tensor([10, 20])
    lengths, rows = Lengths(host, host), torch.zeros(2, 2, dtype=torch.int64)
    positions = host[:, None] + torch.arange(2)
    with forwards.as_decode():
        forwards.decode(slots, slots, lengths.after(1), rows[:, 0])
        forwards.verify(rows, positions, slots, lengths, rows)
    assert runner.decode_cuda_graph_runner == "verify"
    runner.decode_cuda_graph_runner = None  # as in a verification by a cache rank
    forwards.verify(rows, positions, slots, lengths, rows, in_graph=False)
    assert seen == [
        ("decode", 2, [10, 20]),
        ("verify", 4, [10, 11, 20, 21]),
        (None, 4, [10, 11, 20, 21]),
    ]


@pytest.mark.parametrize("is_all_greedy", [True, False])
@torch.compiler.set_stance("force_eager")
def test_tensor_parallel_ranks_take_what_the_first_has_drawn(
    is_all_greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32)
    worker: Any = object.__new__(DraftWorker)
    worker._tp_group = SimpleNamespace(broadcast=lambda tokens: tokens.fill_(3))
    logits, info = torch.randn(2, 50), sampling_info(is_all_greedy=is_all_greedy)
    info.sampling_seed = torch.tensor([5, 6])
    drawn = worker._draw(logits.clone(), info, torch.tensor([10, 10]))
    assert drawn.tolist() == (logits.argmax(-1).tolist() if is_all_greedy else [3, 3])

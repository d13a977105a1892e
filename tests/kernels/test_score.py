"""Scores: of one sequence against a softmax in float64, and through the page table.

There the reference is held against one sequence at a time, and Triton against the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score import reference, triton
from cache_rank.kernels.score.reference import score_tokens

PAGE = 16
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def naive_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The best log-probability that any query head of a group gives each token, in float64."""
    group = queries.shape[1] // keys.shape[1]
    of_heads = keys.double().repeat_interleave(group, dim=1)  # (L, Hq, T, D)
    logits = (of_heads @ queries.double().unsqueeze(-1)).squeeze(-1) * scale
    return logits.softmax(-1).log().unflatten(1, (-1, group)).amax(dim=2)


def tolerance(queries: Tensor, keys: Tensor, scale: float) -> float:
    """A logit is a sum of D products; log-sum-exp and the subtraction round at the logits' size."""
    head_dim, tokens = keys.shape[-1], keys.shape[-2]
    largest = float(queries.float().norm(dim=-1).max() * keys.float().norm(dim=-1).max()) * scale
    return UNIT_ROUNDOFF * (2 * (head_dim + 4) * largest + tokens + 4)


@pytest.mark.parametrize("tokens", [1, 67])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((4, 4), torch.float32),
        ((6, 2), torch.bfloat16),
        ((4, 1), torch.float16),
        ((1, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_equals_the_best_log_probability_of_the_group(
    heads: tuple[int, int], tokens: int, dtype: torch.dtype
) -> None:
    """With a key for each query head, for some of them, and for all."""
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    queries = 3 * torch.randn(3, query_heads, 16)
    keys = torch.randn(3, kv_heads, tokens, 16).to(dtype)
    scores = score_tokens(queries, keys, 0.25)
    assert scores.dtype == torch.float32
    assert scores.shape == (3, kv_heads, tokens)
    difference = (scores - naive_scores(queries, keys, 0.25)).abs().max()
    assert difference <= tolerance(queries, keys, 0.25)


def random_step(
    device: torch.device,
    positions: list[int],
    slots: list[int],
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    page: int = PAGE,
):
    generator = torch.Generator().manual_seed(3)
    rows, pages = len(positions), max(positions) // page + 1
    pool = torch.randn((rows * pages, layers + 1, kv_heads, page, head_dim), generator=generator)
    queries = torch.randn((rows, layers, kv_heads * group, head_dim), generator=generator) * 2
    table = torch.randperm(rows * pages, generator=generator).view(rows, pages).to(torch.int32)
    to_device = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    return (
        queries.to(device),
        pool.to(device, dtype),
        PagedRows(table.to(device), to_device(slots), to_device(positions)),
        1,
        head_dim**-0.5,
    )


def score(implementation: Any, step, capacity: int) -> Tensor:
    queries, pool = step[0], step[1]
    rows, layers, query_heads, _ = queries.shape
    kv_heads = pool.shape[2]
    out = torch.full((rows, layers, kv_heads, capacity), 7.0, device=queries.device)
    workspace = implementation.score_workspace(
        rows, layers, kv_heads, query_heads // kv_heads, capacity, queries.device
    )
    implementation.score_step(*step, workspace, out)
    return out


def test_reference_scores_every_row_through_its_own_pages() -> None:
    step = random_step(torch.device("cpu"), [0, 15, 40], [2, 0, 1])
    queries, pool, (table, _, positions), first, scale = step
    out = score(reference, step, 48)
    for row, position in enumerate(positions.tolist()):
        keys = torch.stack(
            [
                pool[table[row, token // PAGE], first:, :, token % PAGE]
                for token in range(position + 1)
            ],
            dim=2,
        )
        expected = score_tokens(queries[row], keys, scale)
        assert torch.equal(out[row, :, :, : position + 1], expected)
        assert (out[row, :, :, position + 1 :] == 7.0).all()


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        (1, {"layers": 1, "kv_heads": 1, "dtype": torch.bfloat16}),
        (2, {}),
        (3, {"layers": 1, "dtype": torch.float16}),
        (4, {"kv_heads": 1, "dtype": torch.bfloat16}),
        (8, {"layers": 1, "kv_heads": 1}),
    ],
    ids=str,
)
def test_triton_equals_reference(
    device: torch.device, group: int, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "CHUNK_TOKENS", 32)  # several programs a row
    step = random_step(device, [0, 31, 70, 5], [1, 0, 3, -1], group=group, **shape)
    actual, expected = score(triton, step, 80), score(reference, step, 80)
    assert (actual[3] == 7.0).all()
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=1e-5)


def test_triton_of_more_chunks_than_are_summed_together(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "CHUNK_TOKENS", 16)
    together = 128
    if device.type == "cpu":  # the interpreter takes 0.1 s a chunk, and reads constants anew
        together = 4
        monkeypatch.setattr(triton, "_FINISH_CHUNKS", tl.constexpr(together))
    positions = [16 * together - 1, 16 * together, 16 * together * 5 // 2]
    step = random_step(device, positions, [0, 1, 2], layers=1, kv_heads=1, page=64)
    step[0][:] *= torch.tensor([1.0, 0.0, 40.0], device=device).view(3, 1, 1, 1)
    capacity = 64 * (positions[2] // 64 + 1)
    actual, expected = score(triton, step, capacity), score(reference, step, capacity)
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 1e5], ids=["usual", "beyond float16"])
def test_scores_of_rounded_logits_are_those_of_float16_logits(
    device: torch.device, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "CHUNK_TOKENS", 32)
    queries, *rest = random_step(device, [70], [0], layers=1, group=4)
    queries *= factor
    workspace = triton.score_workspace(1, 1, 2, 4, 71, device)
    out = torch.empty((1, 1, 2, 71), device=device)
    triton.score_step(queries, *rest, workspace, out)
    logits = workspace.logits.clamp(-65504, 65504).half().float()  # (Hkv, T, G)
    expected = torch.log_softmax(logits, dim=1).amax(dim=-1)
    triton.score_step(queries, *rest, workspace, out, rounded=True)  # in the same workspace
    float32 = 1e-5 + 1e-7 * float(logits.abs().max())
    torch.testing.assert_close(out.flatten(0, 2), expected, atol=float32, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 8])
def test_triton_at_full_size(group: int) -> None:
    step = random_step(
        torch.device("cuda"),
        [32767, 20001, 255, 140000],
        [0, 1, 2, 3],
        torch.bfloat16,
        layers=3,
        kv_heads=8,
        group=group,
        head_dim=128,
        page=256,
    )
    actual, expected = score(triton, step, 140032), score(reference, step, 140032)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)

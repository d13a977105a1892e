"""Residencies attend to all that they hold: as attention to what they decode."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from held_sequences import Held, attended, rows_of
from small_models import GQA

from cache_rank.config import ModelShape
from cache_rank.kernels import by_device
from cache_rank.kernels.coded import attending
from cache_rank.kernels.newest.reference import attend_to, merge
from cache_rank.residency import FORMATS

MODEL = msgspec.structs.replace(GQA, dtype="float32")  # what is read is not rounded
LENGTHS = (700, 1, 127, 128, 255, 256, 257, 384)
"""Without codes, with some, and around the ends of their groups."""


def held_together(name: str, model: ModelShape = MODEL, **options: Any) -> list[Held]:
    """Sequences of LENGTHS in one residency, on pages of their own."""
    sequences: list[Held] = []
    for index, length in enumerate(LENGTHS[:4]):
        beside = sequences[0] if sequences else None
        place = {"slot": index, "beside": beside, "tokens_seed": index}
        held = Held.empty(name, length, model, **place, **options)
        held.pages = list(range(4 * index, 4 * index + 4))[::-1]
        held.load(length)
        sequences.append(held)
    return sequences


def attention_to_all(held: Held, layer: int, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs and log-sum-exps of queries (Q, Hq, D) over what is read of all tokens, float64."""
    group = queries.shape[1] // held.config.model.kv_heads
    keys, values = (
        part[layer].double().repeat_interleave(group, dim=0) for part in held.read()
    )  # (Hq, n, D)
    logits = torch.einsum("qhd,hnd->qhn", queries.double(), keys) * held.config.model.scale
    return torch.einsum("qhn,hnd->qhd", logits.softmax(-1), values), logits.logsumexp(-1)


def random_queries(rows: int, count: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(rows, count, MODEL.query_heads, MODEL.head_dim)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("bf16", {}), ("quantspec", {}), ("quantspec", {"reading": 8})),
        *(("lynx", {"reading": "anchor"}), ("lynx", {"alpha": 3})),
        *(("mosaickv", {"segment": 512, "dropped": 25}), ("mosaickv", {"group": 4})),
    ],
    ids=str,
)
def test_attention_is_that_to_all_decoded_tokens(
    name: str, options: dict[str, Any], count: int
) -> None:
    """Both planes of codes are read, whatever scores read; a sequence may have none."""
    sequences = held_together(name, **options)
    queries = random_queries(len(sequences), count)
    rows = rows_of(sequences, [held.resident - 1 for held in sequences])
    for layer in sequences[0].layers:
        out, log_sums = attended(sequences[0].residency, rows, layer, queries)
        for row, held in enumerate(sequences):
            expected = attention_to_all(held, layer, queries[row])
            torch.testing.assert_close(out[row].double(), expected[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(log_sums[row].double(), expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["quantspec", "lynx", "mosaickv"])
def test_newest_tokens_are_found_in_a_ring_that_has_gone_round(name: str, length: int) -> None:
    """A ring has older ones beside them, and at first what is no number."""
    held = Held.empty(name, length, MODEL)
    store = held.residency._memory.store if name == "mosaickv" else held.residency._tokens
    for ring in store.rings:
        ring.fill_(torch.nan)
    while held.resident < length:
        held.load(min(60, length - held.resident))
    queries = random_queries(1, 3)
    out, log_sums = attended(held.residency, rows_of([held], [length - 1]), 1, queries)
    expected = attention_to_all(held, 1, queries[0])
    torch.testing.assert_close(out[0].double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_sums[0].double(), expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["quantspec", "lynx", "mosaickv"])
def test_a_refused_row_attends_to_nothing(name: str) -> None:
    sequences = held_together(name)[:2]
    queries = random_queries(2, 2)
    rows = rows_of(sequences, [held.resident - 1 for held in sequences], refused=(1,))
    out, log_sums = attended(sequences[0].residency, rows, 0, queries)
    assert (out[1] == 0).all()
    assert (log_sums[1] == -torch.inf).all()
    assert out[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        *(("quantspec", {}, 1), ("lynx", {"reading": "anchor"}, 3)),
        *(("mosaickv", {"segment": 512, "threshold": 20, "dropped": 25}, 1), ("mosaickv", {}, 3)),
    ],
    ids=str,
)
def test_triton_attends_to_all_that_is_held(
    name: str,
    options: dict[str, Any],
    count: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same codes; scores of these residencies read the upper plane alone."""
    monkeypatch.setattr(attending, "_MOST_SPLITS", 3)
    monkeypatch.setattr(by_device, "is_on_gpu", lambda *arguments: False)
    wide = msgspec.structs.replace(MODEL, head_dim=64, scale=0.125)
    sequences = held_together(name, wide, device=device, **options)
    queries = torch.randn(len(sequences), count, wide.query_heads, wide.head_dim).to(device)
    positions = [held.resident - 1 for held in sequences]
    rows = rows_of(sequences, positions, refused=(2,))
    expected = attended(sequences[0].residency, rows, 1, queries)
    monkeypatch.setattr(by_device, "is_on_gpu", lambda *arguments: True)
    found = attended(sequences[0].residency, rows, 1, queries)
    assert not torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=0)


def test_parts_merge_to_the_whole() -> None:
    """A query that sees none of one part has the other part's, and one that sees nothing, 0."""
    torch.manual_seed(0)
    queries = torch.randn(3, 4, 4, 8)
    keys, values = torch.randn(2, 3, 2, 30, 8)
    is_seen = torch.rand(3, 4, 30) < 0.5
    is_seen[0, :, :20], is_seen[1, :, 20:], is_seen[2, 3] = False, False, False
    whole = attend_to(queries, keys, values, is_seen, 0.3)
    parts = [
        attend_to(queries, keys[:, :, part], values[:, :, part], is_seen[:, :, part], 0.3)
        for part in (slice(0, 20), slice(20, 30))
    ]
    found = merge(*parts)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert (found[0][2, 3] == 0).all()
    assert (found[1][2, 3] == -torch.inf).all()


def test_formats_that_verify_are_those_that_hold_tokens_exactly_or_in_8_bits() -> None:
    able = {name for name, held in FORMATS.items() if held.verifies}
    assert able == {"bf16", "quantspec", "lynx"}

"""Attention over codes is timed beside that over bfloat16, and compared with it."""

from __future__ import annotations

import pytest
import torch

from scripts.speed.attention import FORMATS, attention_rows, attention_table


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_is_timed_and_compared(queries: int) -> None:
    rows = list(attention_rows(2, 512, queries, torch.device("cpu")))
    found = {row["attention"]: row for row in rows}
    assert len(found) == len(rows) == 1 + 3 + len(FORMATS)
    exact = found["PyTorch, bfloat16"]["bytes"]
    assert exact == 2 * 2 * 512 * 8 * 128 * 2
    for name, share, error in (
        ("quantspec, 4 bits", (64 + 4) / 256, 0.2),
        ("quantspec, 8 bits", (128 + 4) / 256, 0.02),
        ("hack, 4 bits", (64 + 10) / 256, 0.05),
        ("hack, 2 bits", (32 + 10) / 256, 0.05),
    ):
        row = found[f"{name}: on codes"]
        assert row["bytes"] == pytest.approx(share * exact, rel=0.05)
        assert row["error"] < error
        assert row["ms"] > 0
    for row in rows:
        row["share"] = 0.5
    table = attention_table(rows)
    assert "| 2 x 0 K | quantspec, 4 bits: on codes |" in table

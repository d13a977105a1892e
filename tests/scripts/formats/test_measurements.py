"""What is compared of a format."""

from __future__ import annotations

import pytest
import torch

from cache_rank.residency import FORMATS
from scripts.formats.measurements import Variant, measure, variants
from scripts.formats.quality import Exact
from scripts.formats.synthetic import synthetic_sample


def test_a_format_without_lines_of_its_own_is_compared_with_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FORMATS, "new", FORMATS["quantspec"])
    assert variants(["new"], torch.bfloat16) == [Variant("new", {})]
    sample = synthetic_sample(600, 2, 1, 4, 2, 32)
    m = measure(sample, Exact.of(sample), Variant("new", {}), 32, repeats=1)
    assert m.bits is not None
    assert m.score is not None
    assert m.score.gigabytes is None

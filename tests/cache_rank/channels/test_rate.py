"""What is sent waits as long as a slower link would take."""

from __future__ import annotations

import time

import pytest

from cache_rank.channels.rate import LINK_GBPS_VARIABLE, RateLimit


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits, of a clock that only they move on."""
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 100 + sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def test_bytes_take_their_time(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LINK_GBPS_VARIABLE, "8")
    limit = RateLimit.of_environment()
    for sent in (10**9, 500_000_000):
        limit.wait(sent)
    assert slept == pytest.approx([1.0, 0.5])
    slept.append(7.0)  # the link was idle
    limit.wait(10**9)
    assert slept[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan"])
def test_no_positive_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LINK_GBPS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{LINK_GBPS_VARIABLE}={text}: no positive number"):
        RateLimit.of_environment()


def test_without_a_limit_nothing_waits(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINK_GBPS_VARIABLE, raising=False)
    RateLimit.of_environment().wait(10**12)
    assert slept == [0.0]

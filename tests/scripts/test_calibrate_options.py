"""The parts of calibrate that need no engine."""

from __future__ import annotations

import pytest

from scripts.calibrate import parse_options


def test_wrong_engine_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--out", "out", "--engine-args", "{"])
    assert "--engine-args: Expecting property name" in capsys.readouterr().err

"""What all command lines share."""

from __future__ import annotations

import pytest

from scripts.shared.command import explained, make_parser


def test_a_wrong_value_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser("nothing", "Does nothing.")
    parser.add_argument("--number", type=explained(int))
    assert parser.parse_args(["--number", "3"]).number == 3
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--number", "three"])
    assert "--number: invalid literal for int() with base 10: 'three'" in capsys.readouterr().err

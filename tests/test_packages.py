"""What pip installs is an SGLang that is supported."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from sglang_ext.compat import TESTED

ROOT = Path(__file__).parent.parent


def test_releases_of_sglang_are_refused_at_start_up_and_not_by_pip() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(line).name: Requirement(line) for line in project["dependencies"]}
    assert str(wanted["sglang"].specifier) == f">={TESTED[0]}"


def test_make_installs_the_newest_release_that_is_tested() -> None:
    (newest,) = re.findall(r"^NEWEST_TESTED := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert newest == TESTED[-1]
    assert sorted(TESTED, key=Version) == [*TESTED]

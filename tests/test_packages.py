"""An installation that is not editable holds every package and the SGLang that is supported."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from sglang_ext.compat import TESTED_ON_GPUS

ROOT = Path(__file__).parent.parent


def test_every_package_is_installed() -> None:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        name.split(".")[0]: ROOT / configured["package-dir"].get(name, name)
        for name in configured["packages"]
        if "." not in name
    }
    found = {
        ".".join([name, *file.relative_to(folder).parts[:-1]])
        for name, folder in folders.items()
        for file in folder.rglob("*.py")
    }
    assert sorted(found | set(folders)) == sorted(configured["packages"])


def test_what_is_installed_is_what_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(line).name: Requirement(line) for line in project["dependencies"]}
    assert wanted["sglang"].specifier == TESTED_ON_GPUS

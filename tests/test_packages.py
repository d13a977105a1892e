"""What an installation holds that is not editable."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
    assert found | set(folders) == set(configured["packages"])

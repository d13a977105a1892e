"""What the README tells a user to type runs where only the package is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts.shared.models import MODEL_SHAPES
from sglang_ext import calibrate, plan
from sglang_ext.server_args import BUNDLED_MODEL

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed this package, as it does from a checkout."""
    checkout, folder = (tmp_path_factory.mktemp(name) for name in ("checkout", "installed"))
    for name in ("cache_rank", "sglang_ext"):  # of a copy: a build writes beside what it builds
        shutil.copytree(ROOT / name, checkout / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(checkout)], check=True)
    return folder


def run(installed: Path, folder: Path, module: str, *arguments: str) -> tuple[int, str]:
    """Run `python -m MODULE` of the installed package in a folder; exit status and output."""
    # A checkout that this interpreter knows of is hidden: nothing may import scripts.
    only = (
        "import runpy, sys; sys.modules['scripts'] = None; folder, module = sys.argv[1:3]; "
        "del sys.argv[1:3]; sys.path.insert(0, folder); "
        "runpy.run_module(module, run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-P", "-c", only, str(installed), module, *arguments]
    ran = subprocess.run(
        command, cwd=folder, env={"PATH": "", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_a_plan_is_made(installed: Path, tmp_path: Path) -> None:
    status, said = run(
        installed, tmp_path, "sglang_ext.plan", "--model-path", str(MODEL_SHAPES / "qwen3-8b")
    )
    assert (status, "inline, ms" in said) == (0, True), said


@pytest.mark.parametrize(("command", "model"), [(plan, "/nowhere"), (calibrate, "empty")])
def test_a_model_that_is_not_there_is_said(
    command: ModuleType,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--model-path", model])
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--model: {model}: this does not exist or has no config.json. Pass a model" in said


def test_wrong_engine_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        calibrate.main(["--model-path", str(BUNDLED_MODEL), "--out", "new", "--engine-args", "{"])
    assert "--engine-args: Expecting property name" in capsys.readouterr().err

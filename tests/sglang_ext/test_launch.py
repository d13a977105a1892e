"""The command: its help, its status, its port, and whether there is a model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from huggingface_hub import constants

import sglang_ext
from sglang_ext import compat, launch
from sglang_ext.model_path import require_model
from sglang_ext.port import require_free
from sglang_ext.refusals import UnsupportedError

ROOT = Path(sglang_ext.__file__).parent.parent


# The port.


def test_refuses_a_port_that_somebody_listens_on() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        require_free("127.0.0.1", port)  # bound, and nobody listens yet
        listener.listen()
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            with pytest.raises(UnsupportedError, match=f"^--port {port}: "):
                require_free(host, port)


@pytest.mark.parametrize(
    ("host", "port", "flag"),
    [
        ("127.0.0.1", 0, "--port"),
        ("127.0.0.1", 1 << 16, "--port"),
        ("no.such.host.invalid", 12345, "--host"),
        ("192.0.2.1", 12345, "--port"),  # nobody's address
    ],
)
def test_refuses_a_port_that_cannot_be_had(host: str, port: int, flag: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{flag} "):
        require_free(host, port)


def test_a_server_whose_port_another_one_has_is_refused_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_serve", lambda *_: pytest.fail("it is started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert launch.main(["--port", str(port)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: --port {port}: it cannot be had on 127.0.0.1")


# The model.


@pytest.mark.parametrize("path", ["/nowhere", "./nowhere", "../nowhere", "~/nowhere", "a/b/c"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"^--model-path {re.escape(path)}: this does not"):
        require_model(path)


def test_a_model_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--somebody--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc")
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "snapshots/abc/config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    require_model("somebody/model")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}\. Unset HF_HUB_OFFLINE, or "):
        require_model("somebody/mistyped")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", hub)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub + "/{repo_id}/{revision}/{filename}"
        )
        with pytest.raises(FileNotFoundError, match=f"{hub} does not answer"):
            require_model("somebody/model")


# The status.


def test_what_sglang_asserts_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--enable-mis"]) == 2
    printed, errors = capsys.readouterr()
    assert (printed, "Traceback" in errors) == ("", False)
    assert errors.splitlines()[-1].startswith("error: Multi-item scoring")


@pytest.mark.parametrize(
    ("flags", "refused", "spared"),
    [
        ("--model-path /nowhere", "--model-path /nowhere", {"sglang", "torch"}),
        (
            "--enable-mixed-chunk",
            "--enable-mixed-chunk",
            {"sglang.srt.layers", "sglang.srt.entrypoints.http_server"},
        ),
    ],
)
def test_a_refusal_ends_the_command_and_spares_imports(
    flags: str, refused: str, spared: set[str]
) -> None:
    program = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print({spared} & sys.modules.keys()))\n"
        "runpy.run_module('sglang_ext.launch', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, *flags.split()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (2, "set()\n")
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"error: {refused}: ")


@pytest.mark.skipif(not compat.IS_NEW, reason="this release has no such commands")
def test_sglang_serve_finds_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.cli.serve_backends import SERVE_BACKENDS_GROUP, ServeBackendRegistry, ServeRequest

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"][SERVE_BACKENDS_GROUP]
    installed = tmp_path / "sglang_cache_rank-9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {project['name']}\nVersion: 9\n")
    lines = [f"{name} = {target}\n" for name, target in entries.items()]
    (installed / "entry_points.txt").write_text("".join([f"[{SERVE_BACKENDS_GROUP}]\n", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    backend = ServeBackendRegistry({}).get("cache-rank").backend
    with pytest.raises(SystemExit) as caught:
        backend.run(ServeRequest(("--model-path", "/nowhere"), "/nowhere"))
    assert caught.value.code == 2
    assert "error: --model-path /nowhere: " in capsys.readouterr().err

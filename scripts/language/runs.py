"""How results came about: the head of a folder of results, which a later run goes on from."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from scripts.shared.machine import describe


class Run(msgspec.Struct, kw_only=True):
    """What all comparisons with dense decoding record.

    Attributes:
        commands: that were run, the first and those that resumed it.
        machine: what it ran on, and versions.
        model: its folder or name.
        settings: arguments of sparse systems.
        servers: what servers said of themselves, by label.
        failures: of servers, by label.
    """

    commands: list[str]
    machine: dict[str, Any]
    model: str
    settings: dict[str, Any]
    servers: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}


RunT = TypeVar("RunT", bound=Run)

_GROWS = frozenset({"commands", "machine", "servers", "failures", "layers"})
"""What may differ when a run is resumed."""


def common_fields(name: str, argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """The fields of Run, of a `python -m scripts.NAME`."""
    versions = {part: importlib.metadata.version(part) for part in ("sglang", "torch")}
    return {
        "commands": [shlex.join(["python", "-m", f"scripts.{name}", *argv])],
        "machine": {**describe(list(dict.fromkeys(options.gpus))), **versions},
        "model": options.model,
        "settings": options.settings,
    }


def find_run(out: Path, kind: type[RunT]) -> RunT | None:
    """The run whose results a folder has, if it has any."""
    header = _header(out)
    return msgspec.json.decode(header.read_bytes(), type=kind) if header.is_file() else None


def go_on(run: Run, earlier: Run | None, options: Namespace) -> None:
    """Take over what an earlier run in the same folder knew, if there is one.

    Raises:
        ValueError: --resume was not given, or the earlier run was another.
    """
    if earlier is None:
        return
    if not options.resume:
        raise ValueError(f"{options.out} has results: pass --resume, or another --out")
    for name in run.__struct_fields__:
        if name not in _GROWS and getattr(run, name) != getattr(earlier, name):
            raise ValueError(f"{options.out} was made with another {name}: pass another --out")
    for name in {"servers", "layers"} & set(run.__struct_fields__):
        setattr(run, name, getattr(earlier, name))
    run.commands = list(dict.fromkeys([*earlier.commands, *run.commands]))


@contextlib.contextmanager
def recorded(run: Run, out: Path) -> Iterator[None]:
    """Write a run before the block and again behind it, however it ends."""
    header = _header(out)
    header.write_bytes(msgspec.json.encode(run))
    try:
        yield
    finally:  # also of an interrupted run, whose results count
        header.write_bytes(msgspec.json.encode(run))


def _header(out: Path) -> Path:
    return out / "run.json"

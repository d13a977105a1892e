"""Records as JSON lines, so that what an interrupted run has found is kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class Lines(Generic[RecordT]):
    """A file of records of one kind, appended to as they come; threads may share it."""

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        """Take a path; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._kind = kind
        self._lock = threading.Lock()

    def append(self, record: RecordT) -> None:
        """Write a line."""
        line = msgspec.json.encode(record) + b"\n"
        with self._lock, self._path.open("ab") as file:
            file.write(line)

    def read(self) -> list[RecordT]:
        """All records so far; the last line may be half a line, if a run was killed."""
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().splitlines(keepends=True)
        return [
            msgspec.json.decode(line, type=self._kind) for line in lines if line.endswith(b"\n")
        ]

    def drop_half_line(self) -> None:
        """Cut what a killed run left unfinished, so that the next line starts on its own."""
        if self._path.exists():
            whole = self._path.read_bytes()
            self._path.write_bytes(whole[: whole.rfind(b"\n") + 1])

"""What all commands share: how they are read, recorded and run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, ParamSpec, TypeVar

from scripts.shared.serving import ServerError, stop_on_sigterm

P = ParamSpec("P")
ValueT = TypeVar("ValueT")


class UsageError(argparse.ArgumentTypeError, ValueError):
    """What a user asked for makes no sense; it is said without a traceback."""


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m scripts.NAME`; its description is printed as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m scripts.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def explained(read: Callable[P, ValueT]) -> Callable[P, ValueT]:
    """The same function; where it raises ValueError, a user has written what it reads."""

    def read_or_explain(*args: P.args, **kwargs: P.kwargs) -> ValueT:
        try:
            return read(*args, **kwargs)
        except ValueError as error:
            raise UsageError(str(error)) from None

    return read_or_explain


def command_line(name: str, argv: Sequence[str]) -> str:
    """A run of `python -m scripts.NAME`, as one types it."""
    return shlex.join(["python", "-m", f"scripts.{name}", *argv])


def run(main: Callable[[Sequence[str]], int], interrupted: str = "interrupted") -> NoReturn:
    """Run a command with this process's arguments; `main` returns the exit status.

    SIGTERM interrupts it, as Ctrl-C does. What a user, a file or a server got wrong is said without
    a traceback; a fault of the program shows its own.
    """
    stop_on_sigterm()
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, ServerError, UsageError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(interrupted)

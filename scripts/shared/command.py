"""What all commands share: how they are read, recorded and run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from scripts.shared.serving import ServerError, stop_on_sigterm

ValueT = TypeVar("ValueT")


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m scripts.NAME`; its description is printed as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m scripts.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def explained(read: Callable[[str], ValueT]) -> Callable[[str], ValueT]:
    """A `type=` of arguments that shows why `read` raises ValueError; argparse hides the reason."""

    def read_or_explain(text: str) -> ValueT:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_or_explain


def command_line(name: str, argv: Sequence[str]) -> str:
    """A run of `python -m scripts.NAME`, as one types it."""
    return shlex.join(["python", "-m", f"scripts.{name}", *argv])


def run(main: Callable[[Sequence[str]], int], interrupted: str = "interrupted") -> NoReturn:
    """Run a command with this process's arguments; `main` returns the exit status.

    SIGTERM interrupts it, as Ctrl-C does. What a user, a file or a server got wrong is said without
    a traceback.
    """
    stop_on_sigterm()
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, ServerError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(interrupted)

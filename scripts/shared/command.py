"""What all command lines share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

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

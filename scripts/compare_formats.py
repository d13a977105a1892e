"""Compare residency formats: error, selection and throughput of each, with its options.

    python -m scripts.compare_formats [--model-path MODEL --text FILE] [--device cuda]

The keys and values are synthetic and have outlier channels (scripts/formats/synthetic.py). With
`--model-path` they are those of a model: it is served, reads the beginning of the text, and
continues it; the queries are those of the tokens that it decodes. With `--recording` they are those
that a server with CACHE_RANK_RECORD=FOLDER recorded. Without arguments it takes a quarter of a
minute on two CPU cores; with `--device cuda` the default shape is larger. Writes formats.json,
formats.md and formats.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cache_rank.config import DTYPES
from cache_rank.residency import FORMATS
from scripts.formats.comparison import compare_formats, make_sample
from scripts.formats.report import markdown, write_comparison
from scripts.shared.command import explained, make_parser
from scripts.shared.serving import stop_on_sigterm

SIZES = ("tokens", "layers", "query_heads", "kv_heads", "budget", "rows")
SHAPES = {"cpu": (4096, 2, 8, 2, 256, 1), "cuda": (32768, 6, 32, 8, 2048, 8)}
"""The synthetic sample and a step have these SIZES; on GPUs they are a layer group of Qwen3-8B."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = make_parser("compare_formats", __doc__)
    add = parser.add_argument
    add("--device", choices=list(SHAPES), default="cpu")
    add("--formats", default=",".join(FORMATS), help="separated by commas; default: all")
    add("--model-path", metavar="MODEL", help="what this computes: a folder, or a name as smollm2")
    add("--text", type=Path, metavar="FILE", help="what the model reads")
    add("--recording", type=Path, metavar="FOLDER", help="compare on a recorded sequence")
    add("--only-layers", type=explained(_numbers), metavar="LIST",
        help="of the model, such as 3,15,27")  # fmt: skip
    add("--dtype", choices=list(DTYPES), help="round keys, values and queries to it")
    add("--tokens", type=int, help="of the sequence, but for a recording; default: 4096 on a CPU")
    add("--layers", type=int, help="of the synthetic sequence, as the next three")
    add("--query-heads", type=int)
    add("--kv-heads", type=int)
    add("--head-dim", type=int, default=128)
    add("--steps", type=int, default=16, help="newest tokens, whose queries are compared by")
    add("--seed", type=int, default=0, help="of the synthetic sequence")
    add("--budget", type=int, help="k, tokens selected of each KV head")
    add("--rows", type=int, help="requests of a step that is timed")
    add("--repeats", type=int, default=3, help="of a call that is timed; the median counts")
    add("--out", type=Path, metavar="FOLDER", default=Path("results/formats"))
    options = parser.parse_args(argv)
    for name, value in zip(SIZES, SHAPES[options.device], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    unknown = [name for name in options.formats if name not in FORMATS]
    if unknown or not options.formats:
        parser.error(f"--formats {', '.join(unknown)}: use some of {', '.join(FORMATS)}")
    for name in ("tokens", "layers", "steps", "budget", "rows", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if (options.model_path is None) != (options.text is None):
        parser.error("--model-path and --text: give both, or neither")
    if options.model_path and options.recording:
        parser.error("--model-path records by itself: leave out --recording")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU")
    return options


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r}: write numbers separated by commas, as in 3,15,27") from None


@torch.no_grad()
def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_options(argv)
    stop_on_sigterm()
    try:
        sample = make_sample(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    comparison = compare_formats(options, sample)
    comparison.command = ["python", "-m", "scripts.compare_formats", *argv]
    print(markdown(comparison))
    for path in write_comparison(comparison, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

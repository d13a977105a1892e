"""Compare residency formats: errors, recall and bytes of a token of each, with its options.

    python -m scripts.compare_formats [--recording FOLDER] [--device cuda]

The keys and values are synthetic and have outlier channels (scripts/formats/synthetic.py). With
`--recording` they are those that a server with CACHE_RANK_RECORD=FOLDER recorded. Writes
formats.json and formats.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency import FORMATS
from scripts.formats.measurements import (
    Comparison,
    config_for,
    markdown,
    measure_all,
    write_comparison,
)
from scripts.formats.samples import Sample, recorded_sample
from scripts.formats.synthetic import synthetic_sample
from scripts.shared.command import command_line, make_parser
from scripts.shared.machine import describe, visible_gpus


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("compare_formats", __doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT",
        help="default: %(default)s")  # fmt: skip
    add("--recording", type=Path, metavar="FOLDER", help="compare on a recorded sequence")
    add("--tokens", type=int, default=4096, help="of the synthetic sequence, as the next five")
    add("--layers", type=int, default=2)
    add("--query-heads", type=int, default=8)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=128)
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=16, help="newest tokens, whose queries are compared by")
    add("--budget", type=int, default=256, help="k, tokens selected of each KV head")
    add("--out", type=Path, metavar="FOLDER", default=Path("results/formats"))
    options = parser.parse_args(argv)
    for name in ("tokens", "layers", "steps", "budget"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU")
    return options


def make_sample(options: argparse.Namespace) -> Sample:
    """The sequence to compare on.

    Raises:
        ValueError: it cannot be made or read, or is too short.
    """
    if options.recording:
        sample = recorded_sample(options.recording, options.steps)
    else:
        sizes = ("tokens", "steps", "layers", "query_heads", "kv_heads", "head_dim", "seed")
        sample = synthetic_sample(*(getattr(options, name) for name in sizes))
    sample = sample.to(torch.device(options.device))
    if sample.positions.start <= PAGE_TOKENS:
        raise ValueError(
            f"{sample.positions.start} tokens before the first query are too few: the newest "
            f"{PAGE_TOKENS} may be held as they came; compare on a longer sequence"
        )
    config = config_for(sample, options.budget)
    candidates = len(config.candidates_after(sample.positions.start - 1))
    if candidates <= options.budget:
        raise ValueError(
            f"--budget {options.budget} selects all of the {candidates} tokens that compete; "
            "compare on a longer sequence, or give a smaller budget"
        )
    return sample


@torch.no_grad()
def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_options(argv)
    try:
        sample = make_sample(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    comparison = Comparison(
        command=command_line("compare_formats", argv),
        machine=describe(visible_gpus() if options.device == "cuda" else []),
        source=sample.describe(),
        tokens=sample.tokens,
        steps=sample.steps,
        budget=options.budget,
        measurements=measure_all(options, sample),
    )
    print(markdown(comparison))
    for path in write_comparison(comparison, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compare residency formats: error, selection and throughput of each, with its options.

    python -m scripts.compare_formats [--device cuda] [--recording FOLDER] [--out FOLDER]

On synthetic keys and values with outlier channels (scripts/formats/synthetic.py), or on those of a
model that was served with CACHE_RANK_RECORD=FOLDER. Without arguments it takes a quarter of a
minute on two CPU cores; with `--device cuda` the default shape is larger. Writes formats.json,
formats.md and formats.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency import FORMATS
from scripts.formats.measurements import Variant, config_for, measure, variants
from scripts.formats.quality import Exact
from scripts.formats.report import Comparison, markdown, write_comparison
from scripts.formats.samples import Sample, read_recording
from scripts.formats.synthetic import synthetic_sample
from scripts.formats.uniform import measure_uniform
from scripts.shared.machine import describe, visible_gpus

SHAPES = {
    "cpu": {"tokens": 4096, "layers": 2, "query_heads": 8, "kv_heads": 2, "budget": 256, "rows": 1},
    "cuda": {
        **{"tokens": 32768, "layers": 6, "query_heads": 32, "kv_heads": 8},
        **{"budget": 2048, "rows": 8},
    },
}
"""Of the synthetic sample and of a step, by device: the second is a layer group of Qwen3-8B."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_formats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=list(SHAPES), default="cpu")
    add("--formats", default=",".join(FORMATS), help="separated by commas; default: all")
    add("--recording", type=Path, metavar="FOLDER", help="compare on a recorded sequence")
    add("--tokens", type=int, help="of the synthetic sequence")
    add("--layers", type=int)
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
    for name, value in SHAPES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    unknown = [name for name in options.formats if name not in FORMATS]
    if unknown or not options.formats:
        parser.error(f"--formats {', '.join(unknown)}: use some of {', '.join(FORMATS)}")
    for name in ("tokens", "layers", "steps", "budget", "rows", "repeats"):
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
        sample = read_recording(options.recording, options.steps)
    else:
        sample = synthetic_sample(
            options.tokens,
            options.steps,
            options.layers,
            options.query_heads,
            options.kv_heads,
            options.head_dim,
            options.seed,
        )
    if sample.positions.start <= PAGE_TOKENS:
        raise ValueError(
            f"{sample.positions.start} tokens before the first query are too few: the newest "
            f"{PAGE_TOKENS} may be held as they came; compare on a longer sequence"
        )
    config = config_for(sample, Variant("bf16", {}), options.budget, options.rows)
    candidates = len(config.candidates_after(sample.positions.start - 1))
    if candidates <= options.budget:
        raise ValueError(
            f"--budget {options.budget} selects all of the {candidates} tokens that compete; "
            "compare on a longer sequence, or give a smaller budget"
        )
    return sample.to(torch.device(options.device))


def compare_formats(options: argparse.Namespace, sample: Sample) -> Comparison:
    """Measure all variants of all formats, and the baselines."""
    exact = Exact.of(sample)
    config = config_for(sample, Variant("bf16", {}), options.budget, rows=1)
    measurements = [
        measure(sample, exact, variant, options.budget, options.rows, options.repeats)
        for variant in tqdm(variants(options.formats, sample.keys.dtype), desc="formats")
    ] + [
        measure_uniform(sample, exact, config, bits, per_channel)
        for bits in (8, 4)
        for per_channel in (True, False)
    ]
    return Comparison(
        [],
        describe(visible_gpus() if options.device == "cuda" else []),
        sample.source,
        sample.tokens,
        sample.steps,
        options.budget,
        options.rows,
        measurements,
    )


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_options(argv)
    torch.set_grad_enabled(False)
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

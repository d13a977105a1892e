"""Measure what tokens occupy in each residency format, in a running cache rank.

    python -m scripts.measure_residency [--model qwen3-8b] [--tokens 32768] [--formats bf16,lynx]

Starts the real cache-rank process for each format, ships it one sequence over the real link, and
compares what the arithmetic says with what the process reports, and with how much its memory grew.
The values are random numbers, on which memory does not depend; all layers are shipped. Needs the
memory of a sequence in bf16 at least: 4.8 GB for 32 K tokens of Qwen3-8B.

    bits            an element of K and V, with everything codes are relative to: the arithmetic of
                    `bytes_per_token`
    pages           that many bits times the elements, and as the process reports it, GB
    beside pages    of each slot: full-precision rings and buffers, the arithmetic of `fixed_bytes`
    process grew    resident set after the sequence less before it, GB; more than pages and what is
                    beside them is scratch that the allocator keeps
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from cache_rank.residency import FORMATS
from scripts.formats.memory import VARIANTS, markdown, measure
from scripts.shared.command import make_parser
from scripts.shared.models import model_config, model_shape


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    parser = make_parser("measure_residency", __doc__)
    add = parser.add_argument
    add("--model", default="qwen3-8b", help="a name in scripts/speed/model_shapes, or a folder")
    add("--tokens", type=int, default=32768)
    add("--chunk", type=int, default=512, help="tokens of a shipment")
    add("--formats", default=",".join(FORMATS), help="separated by commas; default: all")
    options = parser.parse_args(argv)
    chosen = options.formats.split(",")
    if unknown := [name for name in chosen if name not in FORMATS]:
        parser.error(f"--formats {', '.join(unknown)}: use some of {', '.join(FORMATS)}")
    if min(options.tokens, options.chunk) < 1:
        parser.error("--tokens and --chunk must be at least 1")
    torch.set_grad_enabled(False)
    try:
        model = model_shape(model_config(options.model))
    except ValueError as error:
        parser.error(f"--model: {error}")
    occupied = []
    for variant in VARIANTS:
        if variant.format in chosen:
            occupied.append(measure(model, variant, options.tokens, options.chunk))
            print(markdown(occupied[-1:]).splitlines()[-1], file=sys.stderr)
    print(markdown(occupied))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

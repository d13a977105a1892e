"""Time the kernels of one layer group, and a whole step of the cache rank, on one GPU.

    python -m scripts.profile_kernels [--rows 8] [--tokens 32768] [--json FILE]
    python -m scripts.profile_kernels --scores --rows 8 16 32

With `--scores`, only the scores of all 36 layers are timed, by what they read of the keys.

Shapes are Qwen3-8B's, six layers a group. Each kernel stands beside its plain torch reference where
that runs in reasonable time, with the bytes that it has to move and the share of the bandwidth of a
large copy in the same run that this makes. Selection stands beside FlashInfer's top-k, if that is
installed, which does a part of it. The last rows are whole steps of the selector, without channels:
what a cache rank needs for a step at the least.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from cache_rank.pages import PAGE_TOKENS
from scripts.shared.command import make_parser
from scripts.speed.kernels import markdown, measure, measure_scoring
from scripts.speed.scores import scores_table


def main() -> None:
    """Measure and print."""
    parser = make_parser("profile_kernels", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: needs an NVIDIA GPU")
    if options.tokens % PAGE_TOKENS:
        sys.exit(f"error: --tokens must be a multiple of {PAGE_TOKENS}")
    torch.set_grad_enabled(False)
    if options.scores:
        report: dict[str, Any] = measure_scoring(options.rows, options.tokens)
        text = scores_table(report["rows"])
    else:
        if len(options.rows) > 1:
            parser.error("--rows: several numbers need --scores")
        report = measure(options.rows[0], options.tokens)
        text = markdown(report["rows"])
    bandwidth = report["copy_bytes_per_second"] / 1e12
    print(f"{report['shape']}, copy {bandwidth:.2f} TB/s\n\n{text}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

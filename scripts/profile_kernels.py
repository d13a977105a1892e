"""Time the kernels of one layer group, and a whole step of the cache rank, on one GPU.

    python -m scripts.profile_kernels [--rows 8] [--tokens 32768] [--json FILE]
    python -m scripts.profile_kernels --attend [--queries 1] [--json FILE]

Shapes are Qwen3-8B's, six layers a group. Each kernel stands beside its plain torch reference where
that runs in reasonable time, with the bytes that it has to move and the share of the bandwidth of a
large copy in the same run that this makes. The last rows are whole steps of the selector, without
channels: what a cache rank needs for a step at the least.

With `--attend` it times attention of one layer instead, at several shapes: over bfloat16 keys and
values, over codes that are decoded first, and over codes where they lie. Of these it says how far
outputs are off those of tokens that are decoded in full (root mean square).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from cache_rank.pages import PAGE_TOKENS
from scripts.shared.command import make_parser
from scripts.speed.attention import attention_table, measure_attention
from scripts.speed.kernels import DEVICE, copy_bandwidth, markdown, measure


def main() -> None:
    """Measure and print."""
    parser = make_parser("profile_kernels", __doc__)
    parser.add_argument("--rows", type=int, default=8, help="requests")
    parser.add_argument("--tokens", type=int, default=32768, help="of each request")
    parser.add_argument("--json", type=Path, help="file to write as well")
    parser.add_argument("--attend", action="store_true", help="time attention over codes instead")
    parser.add_argument("--queries", type=int, default=1, help="of each request, with --attend")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: needs an NVIDIA GPU")
    if options.tokens % PAGE_TOKENS:
        sys.exit(f"error: --tokens must be a multiple of {PAGE_TOKENS}")
    torch.set_grad_enabled(False)
    if options.attend:
        report = measure_attention(options.queries, copy_bandwidth(), DEVICE)
        text = attention_table(report["rows"])
    else:
        report = measure(options.rows, options.tokens)
        text = markdown(report["rows"])
    bandwidth = report["copy_bytes_per_second"] / 1e12
    print(f"{report['shape']}, copy {bandwidth:.2f} TB/s\n\n{text}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

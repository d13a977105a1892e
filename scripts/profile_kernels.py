"""Time attention of a layer on one GPU: over bfloat16, over decoded codes, over codes as they lie.

    python -m scripts.profile_kernels [--queries 1] [--json FILE]

The shape is Qwen3-8B's, with several numbers of requests and tokens. Each line has the bytes that a
kernel has to move, and the share of the bandwidth of a large copy in the same run that this makes.
Where codes are read as they lie, it says how far outputs are off those of tokens that are decoded
in full (root mean square). The ablations of HACK, section 7.4, are among them: *sums anew* takes
the sums of codes from the codes in each step, and *last block anew* encodes the last 32 tokens in
each step before it attends to their codes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.shared.command import make_parser
from scripts.shared.report import number, percent, table_of
from scripts.speed.attention import SHAPES, attention_rows, median_ms


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(1 << 32, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: target.copy_(source)))


def cells(row: dict[str, Any]) -> dict[str, str]:
    """One of these in a table."""
    return {
        "requests x tokens": f"{row['requests']} x {row['tokens'] // 1024} K",
        "kernel": row["kernel"],
        "queries": str(row["queries"]),
        "ms": number(row["ms"], 3),
        "MB moved": number(row["bytes"] / 1e6, 0),
        "share of copy": number(row["share"]),
        "off by": percent(row.get("error"), 2),
    }


def main() -> None:
    """Measure and print, each time also as soon as there is one: some kernels compile for long."""
    parser = make_parser("profile_kernels", __doc__)
    parser.add_argument("--queries", type=int, default=1, help="of each request")
    parser.add_argument("--json", type=Path, help="file to write as well")
    options = parser.parse_args()
    if options.queries < 1 or not torch.cuda.is_available():
        sys.exit("error: needs an NVIDIA GPU, and --queries of at least 1")
    torch.set_grad_enabled(False)
    torch.set_default_device("cuda")
    bandwidth = copy_bandwidth()
    results = []
    for shape in SHAPES:
        for row in attention_rows(*shape, options.queries):
            results.append({**row, "share": row["bytes"] / (1e-3 * row["ms"]) / bandwidth})
            print(*cells(results[-1]).values(), sep=", ", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name()
    print(f"{name}, copy {bandwidth / 1e12:.2f} TB/s\n\n{table_of(map(cells, results))}")
    if options.json:
        report = {"device": name, "copy_bytes_per_second": bandwidth, "rows": results}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Time the answers of a decode step between two GPUs, by what carries them.

    python -m scripts.profile_wire [--batches 8 16] [--channels 2 4 8] [--json FILE]

Compares copies into the peer's memory with NCCL, by how many channels it may use. Answers have the
size that they have in a step, and are sent one after the other while nothing else runs: what a step
needs for its transfers at the least. NCCL reads its settings once, so every line is measured by two
processes of its own. `NCCL_MAX_P2P_NCHANNELS` sets the channels of a server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_args

import torch

from cache_rank.config import CacheRankConfig, WireDtype
from cache_rank.protocol import down_sizes
from scripts.shared.command import make_parser
from scripts.shared.models import model_config, model_shape
from scripts.speed.wire import markdown, measure


def main() -> int:
    """Measure and print; the exit status."""
    parser = make_parser("profile_wire", __doc__)
    parser.add_argument("--model", default="qwen3-8b", help="as of profile_tpot")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16], help="requests a step")
    parser.add_argument("--channels", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--wire-dtype", default="bf16", choices=get_args(WireDtype))
    parser.add_argument("--layers-per-group", type=int, default=6)
    parser.add_argument("--max-swap-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.error(f"needs two GPUs, found {torch.cuda.device_count()}")
    config = CacheRankConfig(
        model_shape(model_config(args.model)),
        layers_per_group=args.layers_per_group,
        max_swap_tokens=args.max_swap_tokens,
        wire_dtype=args.wire_dtype,
    )
    messages = {batch: tuple(down_sizes(config, batch)) for batch in args.batches}
    wires = [wire for channels in (0, *args.channels) for wire in measure(channels, messages)]
    print(markdown(wires, messages))
    if args.json:
        args.json.write_text(json.dumps([wire._asdict() for wire in wires], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

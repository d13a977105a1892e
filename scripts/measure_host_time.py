"""Measure the host time that a decode step spends in our hooks, and how fast a cache rank starts.

    python -m scripts.measure_host_time [--steps 400] [--device cuda]

Runs the inference rank's real code against a real cache-rank process, on made-up tensors in the
place of a model. `hooks` is what every step pays beside SGLang's own work: planning, the table and
the accounting. `announce` is the control message. `exchange` is, on CPUs, staging, sending, waiting
and scattering; with nothing to overlap it, the wait is the cache rank's whole time. On two GPUs, in
the shape of Qwen3-8B, it is queueing all of that on streams: what is staged is staged by SGLang's
graph there, and nothing waits. The last line is one JSON object.
"""

from __future__ import annotations

import json
import platform

from scripts.shared.command import make_parser
from scripts.speed.host_time import MODELS, HostTime, describe


def main() -> None:
    """Measure and print."""
    parser = make_parser("measure_host_time", __doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", choices=list(MODELS), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--starts", type=int, default=5, help="of a cache rank, that are timed")
    options = parser.parse_args()
    host = HostTime(options.device)
    found = host.measure_batches(options.batches, options.steps)
    starts = host.measure_starts(options.starts)
    host.close()
    print(f"Host time per decode step, all requests sparse\n\n{describe(found, starts)}\n")
    results = {"machine": platform.platform(), "microseconds": found, "start_seconds": starts}
    print(json.dumps(results))


if __name__ == "__main__":
    main()

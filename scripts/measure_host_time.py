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
import os
import platform
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cache_rank.channels.nccl import prepare_environment
from cache_rank.config import ModelShape
from scripts.shared.command import make_parser
from scripts.shared.report import table_of
from sglang_ext.memory import reserve_rows
from sglang_ext.pools import Pools
from sglang_ext.reports import values_of
from sglang_ext.server_args import CacheRankServerArgs, parse_server_args
from sglang_ext.two_ranks.exchange.connection import ProcessSettings
from sglang_ext.two_ranks.inference_rank import InferenceRank
from sglang_ext.two_ranks.supervisor import Supervisor

LENGTH = 600
MODELS = {
    # Few and small layers: a host that waits long for a slow cache rank measures its cold caches.
    "cpu": ModelShape(1, 4, 2, 64, "float32", 64**-0.5),
    "cuda": ModelShape(35, 32, 8, 128, "bfloat16", 128**-0.5),
}
"""These layers are exchanged; one before them is dense."""

SLOTS, CONTEXT = 64, 4096


def make_rank(args: CacheRankServerArgs, supervisor: Supervisor) -> InferenceRank:
    """An inference rank over pools of random numbers."""
    model, device = MODELS[args.device], torch.device(args.device)
    rows = SLOTS * CONTEXT // 4 + reserve_rows(args)
    table = torch.arange(SLOTS * CONTEXT, dtype=torch.int32, device=device).view(SLOTS, CONTEXT)

    def pool() -> list[torch.Tensor]:
        shape, kind = (rows, model.kv_heads, model.head_dim), model.torch_dtype
        return [torch.randn(shape, dtype=kind, device=device) for _ in range(model.layers + 1)]

    allocator = SimpleNamespace(available_size=lambda: rows)
    pools = Pools(table % (SLOTS * CONTEXT // 4), pool(), pool(), allocator)
    return InferenceRank(
        args, model, pools, tp_rank=0, supervisor=supervisor, selection_weights=None
    )


def make_request(slot: int) -> Any:
    """What the inference rank reads of SGLang's Req."""
    request = SimpleNamespace(
        req_pool_idx=slot,
        origin_input_ids=range(slot, slot + LENGTH),  # nothing in common
        output_ids=[],
        extra_key=None,
        cache_salt=None,
        cache_protected_len=0,
        sampling_params=SimpleNamespace(custom_params=None, max_new_tokens=2048),
        cache_rank_weights=0,  # the first ones, as hooks of ours note
    )
    request.kv = request  # where later releases have what is in the pools
    return request


def measure(rank: InferenceRank, batch: int, steps: int) -> dict[str, float]:
    """Run decode steps; microseconds of each part, of the steps whose requests are all sparse."""
    requests = [make_request(slot) for slot in range(1, batch + 1)]
    model, on_gpu = rank.config.model, rank.device.type == "cuda"
    heads = model.query_heads + model.kv_heads
    made = torch.randn(batch, heads, model.head_dim, dtype=model.torch_dtype, device=rank.device)
    queries, keys = (
        part.contiguous() for part in made.split([model.query_heads, model.kv_heads], 1)
    )
    seconds: dict[str, list[float]] = {"hooks": [], "announce": [], "exchange": []}
    for step in range(steps):
        lengths = [LENGTH + step] * batch
        started = time.perf_counter()
        plan = rank.decode_step.plan(requests, lengths)
        planned = time.perf_counter()
        rank.decode_step.announce(plan)
        announced = time.perf_counter()
        rank.gate.begin_forward()
        for group, layers in enumerate(rank.config.groups):
            rank.gate.enter_group(group)
            for layer in range(len(layers)):
                rank.gate.stage(group, layer, queries, keys, keys)
            rank.gate.leave_group(group)
        exchanged = time.perf_counter()
        rank.decode_step.end(plan)
        queued = time.perf_counter()
        [values_of(request.cache_rank_statistics) for request in requests]
        ended = time.perf_counter()
        if on_gpu:
            torch.cuda.synchronize()
        if len(plan.sparse) == batch:
            staged, finished = exchanged - announced, queued - exchanged
            seconds["announce"].append(announced - planned)
            seconds["exchange"].append(finished if on_gpu else staged)
            rest = (planned - started) + (ended - queued)
            seconds["hooks"].append(rest if on_gpu else rest + finished)
    for request in requests:
        rank.on_request_freed(request)
    return {
        f"{part}_p{percent}": 1e6 * float(np.percentile(values, percent))
        for part, values in seconds.items()
        for percent in (50, 99)
    }


def main() -> None:
    parser = make_parser("measure_host_time", __doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", choices=list(MODELS), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--starts", type=int, default=5, help="of a cache rank, that are timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    args = parse_server_args(
        f"--device {options.device} --cache-rank-gpus 1 --sparse-threshold 512 --sparse-budget 64 "
        "--max-swap-tokens 16 --log-level warning".split()
    )
    settings = ProcessSettings(args.cache_rank_address)
    if options.device == "cuda":
        prepare_environment(os.environ, args.cache_rank_address)
        settings = settings._replace(inference_device="cuda:0", cache_device="cuda:1")
    supervisor = Supervisor("cache-rank-0", settings, timeout=60.0)
    rank = make_rank(args, supervisor)
    found = {batch: measure(rank, batch, options.steps) for batch in options.batches}
    starts = []
    for _ in range(options.starts):
        fresh = Supervisor("cache-rank-0", settings, timeout=60.0)
        fresh.open(rank.config)
        starts.append(fresh.start_seconds)
        fresh.close()
    supervisor.close()
    table = table_of(
        {"batch": str(batch)} | {n.replace("_", " "): f"{us:.0f} µs" for n, us in row.items()}
        for batch, row in found.items()
    )
    print(f"Host time per decode step, all requests sparse\n\n{table}\n")
    if starts:
        print(f"start-up of a cache rank: {statistics.median(starts):.2f} s, median\n")
    results = {"machine": platform.platform(), "microseconds": found, "start_seconds": starts}
    print(json.dumps(results))


if __name__ == "__main__":
    main()

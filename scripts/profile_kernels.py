"""Time the kernels of one layer group, and a whole step of the cache rank, on one GPU.

    python -m scripts.profile_kernels [--rows 8] [--tokens 32768] [--json FILE]

Shapes are Qwen3-8B's, six layers a group. Each kernel stands beside its plain torch reference where
that runs in reasonable time, with the bytes that it has to move and the share of the bandwidth of a
large copy in the same run that this makes. The last rows are whole steps of the selector, without
channels: what a cache rank needs for a step at the least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from cache_rank_kernels.scatter.reference import layer_buffers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.operations import operations_for
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import DownMessage, Row, UpMessage, bulk_shape
from cache_rank.selector import Selector
from cache_rank.timeline import Timeline

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 36, 32, 8, 128
GROUP_LAYERS = 6
HEAD_START_CYCLES = 2_000_000
"""About a millisecond."""

CPU = torch.device("cpu")


def microseconds(action: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of an action on the device, after two that warm up."""
    times = []
    for repeat in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # Longer than the host takes to queue the action, which is not what is timed.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        action()
        stop.record()
        torch.cuda.synchronize()
        if repeat > 1:
            times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-6 * microseconds(lambda: target.copy_(source)))


def kernel_rows(config: CacheRankConfig, rows: int, tokens: int) -> list[dict[str, Any]]:
    """Time the kernels of one layer group."""
    device = torch.device("cuda")
    triton, torch_only = operations_for(device), operations_for(CPU)
    generator = torch.Generator(device).manual_seed(0)
    budget, capacity = config.sparse_budget, config.delta_capacity
    pages = tokens // PAGE_TOKENS
    pool = (rows * pages, GROUP_LAYERS, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    keys = torch.randn(pool, generator=generator, device=device, dtype=torch.bfloat16)
    values = torch.randn(pool, generator=generator, device=device, dtype=torch.bfloat16)
    coarse = keys.to(torch.float8_e4m3fn)
    table = torch.randperm(rows * pages, generator=generator, device=device).view(rows, pages)
    table = table.to(torch.int32)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    positions = torch.full_like(slots, tokens - 1)
    queries = torch.randn(
        (rows, GROUP_LAYERS, QUERY_HEADS, HEAD_DIM), generator=generator, device=device
    )
    heads = (rows, GROUP_LAYERS, KV_HEADS)
    scores = torch.empty((*heads, tokens), device=device)
    workspace = triton.score_workspace(
        rows, GROUP_LAYERS, KV_HEADS, QUERY_HEADS // KV_HEADS, tokens, device
    )
    scale = HEAD_DIM**-0.5

    def score(operations: Any, held: torch.Tensor) -> Callable[[], None]:
        return lambda: operations.score_step(
            queries, held, table, slots, positions, 0, scale, workspace, scores
        )

    results = [
        {
            "kernel": f"score, {name} keys",
            "us": microseconds(score(triton, held)),
            "torch_us": microseconds(score(torch_only, held), 3) if held is keys else None,
            "bytes": held.nbytes,
        }
        for name, held in (("bf16", keys), ("fp8", coarse))
    ]

    score(triton, keys)()
    fresh = scores.clone()
    mirror = torch.full((*heads, budget), -1, dtype=torch.int32, device=device)
    entering = torch.empty((*heads, capacity), dtype=torch.int32, device=device)
    entering_slots = torch.empty_like(entering)
    changed = torch.zeros((rows, 2), dtype=torch.int32, device=device)
    scratch = triton.select_workspace(
        rows, GROUP_LAYERS, KV_HEADS, budget, config.selection_margin, device
    )

    def select(filled: bool) -> None:
        triton.select_step(
            scores,
            mirror,
            slots,
            positions,
            0,
            config.sink_tokens,
            config.recent_tokens,
            config.selection_margin,
            scratch,
            entering,
            entering_slots,
            changed,
            filled=filled,
        )

    for _ in range(2 * budget // capacity):  # fill the slots
        scores.copy_(fresh)
        select(filled=False)
    noisy = fresh + 0.05 * torch.randn(fresh.shape, generator=generator, device=device)
    filled_slots = mirror.clone()

    def restore() -> None:
        scores.copy_(noisy)
        mirror.copy_(filled_slots)
        changed.zero_()

    def select_again() -> None:
        restore()
        select(filled=True)

    units = rows * GROUP_LAYERS * KV_HEADS
    select_again()
    entered = int(changed[:, 0].sum()) / units
    results.append(
        {
            "kernel": f"select, {units} rows, {entered:.0f} of {budget} enter",
            "us": microseconds(select_again) - microseconds(restore),
            "torch_us": microseconds(lambda: torch.topk(fresh, budget, dim=-1)),
            "bytes": fresh.nbytes,
        }
    )
    out = torch.empty((*heads, capacity, HEAD_DIM), dtype=torch.bfloat16, device=device)
    out_values = torch.empty_like(out)
    everywhere = torch.randint(0, tokens, entering.shape, generator=generator, device=device)
    everywhere = everywhere.to(torch.int32)
    moved = 2 * 2 * out.nbytes

    def gather(operations: Any) -> Callable[[], None]:
        return lambda: operations.gather_step(
            keys, values, table, slots, 0, everywhere, out, out_values
        )

    results.append(
        {
            "kernel": f"gather, {capacity} tokens a row",
            "us": microseconds(gather(triton)),
            "torch_us": microseconds(gather(torch_only)),
            "bytes": moved,
        }
    )
    working_sets = [
        layer_buffers(
            [
                torch.zeros((rows * budget, KV_HEADS, HEAD_DIM), dtype=out.dtype, device=device)
                for _ in range(GROUP_LAYERS)
            ]
        )
        for _ in range(2)
    ]
    header = torch.zeros((rows, 6), dtype=torch.int64, device=device)
    places = torch.randint(0, budget, entering.shape, generator=generator, device=device)
    applied = torch.empty(rows, dtype=torch.int32, device=device)

    def scatter(operations: Any) -> Callable[[], None]:
        return lambda: operations.scatter_step(
            *working_sets,
            slots * budget,
            header,
            header[:, :4].contiguous(),
            places.to(torch.int32),
            out,
            out_values,
            applied,
        )

    results.append(
        {
            "kernel": f"scatter, {capacity} tokens a row",
            "us": microseconds(scatter(triton)),
            "torch_us": microseconds(scatter(torch_only)),
            "bytes": moved,
        }
    )
    return results


def step_time(config: CacheRankConfig, rows: int, tokens: int, steps: int = 24) -> float:
    """Median time of a whole step of the selector, in microseconds."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    page_bytes = PAGE_TOKENS * config.model.bytes_per_token * 5 // 4
    pages = rows * (tokens // PAGE_TOKENS + 2) + config.max_rows
    selector = Selector(config, device, pages * page_bytes)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    for epoch in range(1, rows + 1):
        sequence = selector.begin(epoch)
        for _ in range(0, tokens, 4096):
            selector.load(sequence, random(*bulk_shape(config, min(4096, tokens))))
    timeline = Timeline("", device)
    heads = config.model.query_heads + 2 * config.model.kv_heads
    drift = [random(rows, len(layers), heads, HEAD_DIM) for layers in config.groups]
    downs = [
        torch.zeros(DownMessage.size(config, len(g), rows), dtype=torch.uint8, device=device)
        for g in config.groups
    ]
    numbers = iter(range(1, 1000))

    def step() -> None:
        number = next(numbers)
        announced = [Row(epoch, tokens - 1 + number) for epoch in range(1, rows + 1)]
        step = selector.begin_step(number, announced)
        for group, layers in enumerate(config.groups):
            drift[group].add_(0.1 * random(*drift[group].shape))
            up = UpMessage(config, len(layers), rows, drift[group].view(torch.uint8).view(-1))
            selector.append(step, group, up)
            scores = selector.score(step, group, timeline)
            down = DownMessage(config, len(layers), rows, downs[group])
            selector.answer(step, group, scores, down, timeline)
        selector.end_step(step)

    return microseconds(step, steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: needs an NVIDIA GPU")
    if options.tokens % PAGE_TOKENS:
        sys.exit(f"error: --tokens must be a multiple of {PAGE_TOKENS}")
    torch.set_grad_enabled(False)
    console = Console()
    rotary = tuple(1e6 ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2))
    model = ModelShape(LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, "bfloat16", HEAD_DIM**-0.5, rotary)
    config = CacheRankConfig(model, layers_per_group=GROUP_LAYERS, max_rows=options.rows)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    rows = kernel_rows(config, options.rows, options.tokens)
    torch.cuda.empty_cache()
    for keys in track(("resident", "fp8"), description="steps", console=console):
        variant = msgspec.structs.replace(config, score_keys=keys)
        time = step_time(variant, options.rows, options.tokens)
        rows.append({"kernel": f"whole step, score keys {keys}", "us": time})
        torch.cuda.empty_cache()

    shape = f"{options.rows} x {options.tokens} tokens, {torch.cuda.get_device_name()}"
    table = Table(title=f"{shape}, copy {bandwidth / 1e12:.2f} TB/s")
    for column in ("kernel", "µs", "torch, µs", "MB", "share of copy"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for row in rows:
        moved = row.get("bytes")
        row["share"] = moved / (1e-6 * row["us"]) / bandwidth if moved else None
        table.add_row(
            row["kernel"],
            f"{row['us']:.0f}",
            f"{row['torch_us']:.0f}" if row.get("torch_us") else "",
            f"{moved / 1e6:.0f}" if moved else "",
            f"{row['share']:.2f}" if row["share"] else "",
        )
    console.print(table)
    report = {"shape": shape, "copy_bytes_per_second": bandwidth, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

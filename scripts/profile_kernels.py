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
from cache_rank.measure.timing import median_microseconds
from cache_rank.operations import operations_for
from cache_rank.pages import PAGE_TOKENS
from scripts.speed.cache_step import measure_cache_step

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 36, 32, 8, 128
GROUP_LAYERS = 6
STEPS = 24
"""Whole steps that are timed."""
DRIFTS = ((1.0, 0.02), (1.0, 0.1), (0.0, 1.0))
"""What is left of scores when slots are selected again, and what is added: from hardly anything to
scores that have nothing to do with those before."""
CPU = torch.device("cpu")


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-6 * median_microseconds(lambda: target.copy_(source)))


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
            "us": median_microseconds(score(triton, held)),
            "torch_us": median_microseconds(score(torch_only, held), 3) if held is keys else None,
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

    def select() -> None:
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
        )

    for _ in range(2 * budget // capacity):  # fill the slots
        scores.copy_(fresh)
        select()
    filled_slots, current = mirror.clone(), fresh

    def restore() -> None:
        scores.copy_(current)
        mirror.copy_(filled_slots)
        changed.zero_()

    def select_again() -> None:
        restore()
        select()

    units = rows * GROUP_LAYERS * KV_HEADS
    for kept, drift in DRIFTS:
        noise = torch.randn(fresh.shape, generator=generator, device=device)
        current = kept * fresh + drift * noise
        select_again()
        entered = int(changed[:, 0].sum()) / units
        results.append(
            {
                "kernel": f"select, {units} rows, {entered:.0f} of {budget} enter",
                "us": median_microseconds(select_again) - median_microseconds(restore),
                "torch_us": median_microseconds(lambda: torch.topk(fresh, budget, dim=-1)),
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
            "us": median_microseconds(gather(triton)),
            "torch_us": median_microseconds(gather(torch_only)),
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
            "us": median_microseconds(scatter(triton)),
            "torch_us": median_microseconds(scatter(torch_only)),
            "bytes": moved,
        }
    )
    return results


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
        found = measure_cache_step(variant, options.tokens, STEPS, torch.device("cuda"))
        time = 1e6 * statistics.median(found.seconds)
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

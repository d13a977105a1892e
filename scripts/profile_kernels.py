"""Time the kernels of one layer group of the cache rank on one GPU.

    python -m scripts.profile_kernels [--rows 8] [--tokens 32768] [--json FILE]
    python -m scripts.profile_kernels --attend [--queries 1] [--json FILE]

Shapes are Qwen3-8B's, six layers a group. Each kernel stands beside its plain torch reference where
that runs in reasonable time, with the bytes that it has to move and the share of the bandwidth of a
large copy in the same run that this makes.

With `--attend` it times attention of one layer instead, at several shapes: over bfloat16 keys and
values, over codes that are decoded first, and over codes where they lie. Of these it says how far
outputs are off those of tokens that are decoded in full (root mean square). The ablations of HACK,
section 7.4, are among them: *sums anew* takes the sums of codes from the codes in each step, and
*last block anew* encodes the last 32 tokens in each step before it attends to their codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.gather import gather_step
from cache_rank.kernels.gather import reference as torch_gather
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.scatter import reference as torch_scatter
from cache_rank.kernels.scatter import scatter_step
from cache_rank.kernels.scatter.reference import layer_buffers
from cache_rank.kernels.score import reference as torch_score
from cache_rank.kernels.score import score_step, score_workspace
from cache_rank.kernels.select import select_step, select_workspace
from cache_rank.pages import PAGE_TOKENS
from scripts.shared.command import make_parser
from scripts.shared.report import number, percent, table_of
from scripts.speed.attention import SHAPES, attention_rows, median_ms

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP_LAYERS = 6
DRIFTS = ((1.0, 0.02), (1.0, 0.1), (0.0, 1.0))
"""Slots are selected again by scores of which a share is left and to which noise is added: from
hardly any noise to scores that have nothing to do with those before."""
DEVICE = torch.device("cuda")


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: target.copy_(source)))


def kernel_rows(rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Time the kernels of one layer group, one after the other."""
    model = ModelShape(36, QUERY_HEADS, KV_HEADS, HEAD_DIM, "bfloat16", HEAD_DIM**-0.5)
    config = CacheRankConfig(model, layers_per_group=GROUP_LAYERS, kv_residency="bf16")
    budget, capacity, pages = config.sparse_budget, config.max_swap_tokens, tokens // PAGE_TOKENS
    heads = (rows, GROUP_LAYERS, KV_HEADS)
    pool = (rows * pages, GROUP_LAYERS, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    sets = (2, GROUP_LAYERS, rows * budget, KV_HEADS, HEAD_DIM)
    torch.manual_seed(0)
    with DEVICE:
        keys, values = (torch.randn(pool, dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(rows * pages).view(rows, pages).to(torch.int32)
        slots = torch.arange(rows, dtype=torch.int32)
        positions = torch.full_like(slots, tokens - 1)
        paged = PagedRows(table, slots, positions)
        queries = torch.randn((rows, GROUP_LAYERS, QUERY_HEADS, HEAD_DIM))
        scores = torch.empty((*heads, tokens))
        slot_map = torch.full((*heads, budget), -1, dtype=torch.int32)
        budgets = torch.full((rows,), budget, dtype=torch.int32)
        entering, entering_slots = torch.empty((2, *heads, capacity), dtype=torch.int32)
        changed = torch.zeros((rows, 2), dtype=torch.int32)
        out, out_values = torch.empty((2, *heads, capacity, HEAD_DIM), dtype=torch.bfloat16)
        everywhere = torch.randint(0, tokens, entering.shape, dtype=torch.int32)
        places = torch.randint(0, budget, entering.shape, dtype=torch.int32)
        working_sets = [
            layer_buffers(list(layers)) for layers in torch.zeros(sets, dtype=torch.bfloat16)
        ]
        header = torch.zeros((rows, 6), dtype=torch.int64)
        applied = torch.empty_like(slots)
    workspace = score_workspace(*heads, QUERY_HEADS // KV_HEADS, tokens, DEVICE)
    scratch = select_workspace(*heads, budget, config.hysteresis, DEVICE)

    def row(kernel: str, ms: float, torch_ms: float, moved: int) -> dict[str, Any]:
        shape = {"requests": rows, "tokens": tokens, "queries": 1}
        return {**shape, "kernel": kernel, "ms": ms, "torch_ms": torch_ms, "bytes": moved}

    def score(by: Callable[..., None] = score_step) -> None:
        by(queries, keys, paged, 0, HEAD_DIM**-0.5, workspace, scores)

    plain = median_ms(lambda: score(torch_score.score_step), 3)
    yield row("score, bf16 keys", median_ms(score), plain, keys.nbytes)

    score()
    fresh = scores.clone()

    def select() -> None:
        policy = (config.sink_tokens, config.recent_tokens, config.hysteresis)
        into = (scratch, entering, entering_slots, changed)
        select_step(scores, slot_map, slots, positions, budgets, 0, *policy, *into)

    for _ in range(2 * budget // capacity):  # fill the slots
        scores.copy_(fresh)
        select()
    filled_slots, current = slot_map.clone(), fresh

    def restore() -> None:
        scores.copy_(current)
        slot_map.copy_(filled_slots)
        changed.zero_()

    def select_again() -> None:
        restore()
        select()

    units = rows * GROUP_LAYERS * KV_HEADS
    for kept, drift in DRIFTS:
        current = kept * fresh + drift * torch.randn_like(fresh)
        select_again()
        entered = int(changed[:, 0].sum()) / units
        took = median_ms(select_again) - median_ms(restore)
        plain = median_ms(lambda: torch.topk(fresh, budget, dim=-1))
        name = f"select, {units} rows, {entered:.0f} of {budget} enter"
        yield row(name, took, plain, fresh.nbytes)

    def gather(by: Callable[..., None] = gather_step) -> None:
        by(keys, values, paged, 0, everywhere, out, out_values)

    expected = header[:, :4].contiguous()

    def scatter(by: Callable[..., None] = scatter_step) -> None:
        by(*working_sets, slots * budget, header, expected, places, out, out_values, applied)

    moved, size = 2 * 2 * out.nbytes, f"{capacity} tokens a row"
    plain = median_ms(lambda: gather(torch_gather.gather_step))
    yield row(f"gather, {size}", median_ms(gather), plain, moved)
    plain = median_ms(lambda: scatter(torch_scatter.scatter_step))
    yield row(f"scatter, {size}", median_ms(scatter), plain, moved)


def cells(row: dict[str, Any]) -> dict[str, str]:
    """One of these, or of attention, in a table."""
    return {
        "requests x tokens": f"{row['requests']} x {row['tokens'] // 1024} K",
        "kernel": row["kernel"],
        "queries": str(row["queries"]),
        "ms": number(row["ms"], 3),
        "torch, ms": number(row.get("torch_ms"), 3),
        "MB moved": number(row["bytes"] / 1e6, 0),
        "share of copy": number(row["share"]),
        "off by": percent(row.get("error"), 2),
    }


def main() -> None:
    """Measure and print, each time also as soon as there is one: some kernels compile for long."""
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
    bandwidth = copy_bandwidth()
    timed: Iterator[dict[str, Any]]
    if options.attend:
        torch.set_default_device(DEVICE)
        timed = (row for one in SHAPES for row in attention_rows(*one, options.queries))
    else:
        timed = kernel_rows(options.rows, options.tokens)
    results = []
    for row in timed:
        results.append({**row, "share": row["bytes"] / (1e-3 * row["ms"]) / bandwidth})
        print(*cells(results[-1]).values(), sep=", ", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name()
    print(f"{name}, copy {bandwidth / 1e12:.2f} TB/s\n\n{table_of(map(cells, results))}")
    if options.json:
        report = {"device": name, "copy_bytes_per_second": bandwidth, "rows": results}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

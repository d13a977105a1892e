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

import argparse
import queue
import sys
import time
from collections.abc import Sequence

import msgspec
import psutil
import torch
from tqdm import tqdm

from cache_rank import residency
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import Load, Report, bulk_shape
from cache_rank.residency import FORMATS
from scripts.formats.measurements import Variant
from scripts.shared.models import model_config, model_shape
from scripts.shared.report import number, table
from sglang_ext.supervisor import Connection, Place, Supervisor

PATIENCE_SECONDS = 600.0
"""For the process to take over a shipment; slow formats encode a hundred tokens a second."""

VARIANTS = (
    Variant("bf16", {}),
    Variant("bf16", {}, score_keys="fp8"),
    Variant("lynx", {}),
    Variant("quantspec", {}),
    Variant("hack", {"bits": 4}),
    Variant("hack", {"bits": 2}),
    Variant("mosaickv", {}),
    Variant("mosaickv", {"rate": 87.5}),
)
"""One for each size that a token can have; other options read the same bytes in other ways."""


class Occupied(msgspec.Struct):
    """What one sequence occupies, in bytes.

    Attributes:
        format, options: of the residency.
        tokens: of the sequence.
        elements: of K and V of a token, all layers.
        token: of one token, by the arithmetic.
        fixed: beside the pages, by the arithmetic.
        reported: of the pages, by the process.
        grown: of the process's resident set.
    """

    format: str
    options: str
    tokens: int
    elements: int
    token: int
    fixed: int
    reported: int
    grown: int


def measure(model: ModelShape, variant: Variant, tokens: int, chunk: int) -> Occupied:
    """Load one sequence into a cache rank of its own.

    Args:
        model: whose tokens they are.
        variant: how they are held.
        tokens: of the sequence.
        chunk: tokens of a shipment.

    Raises:
        CacheRankDownError: the process could not be started.
        RuntimeError: it ended, or the tokens do not fit in the memory that it takes.
    """
    config = CacheRankConfig(
        model,
        kv_residency=variant.format,
        kv_residency_options=variant.options,
        score_keys=variant.score_keys,
        max_rows=1,
    )
    reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
    supervisor = Supervisor("cache-rank-0", Place("127.0.0.1"), PATIENCE_SECONDS)
    supervisor.on_report = reports.put
    try:
        connection = supervisor.open(config)
        if connection.capacity_tokens < tokens:
            raise RuntimeError(f"{tokens} tokens wanted, {connection.capacity_tokens} fit")
        process = psutil.Process(connection.pid)
        before = process.memory_info().rss
        _ship(connection, config, tokens, chunk)
        reported = _wait_for(reports, tokens).bytes_held
        grown = process.memory_info().rss - before
    finally:
        supervisor.close()
    options = ",".join(f"{name}={value}" for name, value in variant.options.items())
    return Occupied(
        variant.format,
        options if variant.score_keys == "resident" else f"score keys {variant.score_keys}",
        tokens,
        2 * model.layers * model.kv_heads * model.head_dim,
        residency.bytes_per_token(config),
        residency.fixed_bytes(config),
        reported,
        grown,
    )


def _ship(connection: Connection, config: CacheRankConfig, tokens: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = bulk_shape(config, chunk)
    shipment = torch.randn(shape, generator=generator, dtype=config.model.torch_dtype)
    for start in tqdm(range(0, tokens, chunk), desc=config.kv_residency, leave=False):
        count = min(chunk, tokens - start)
        connection.control.send(Load(1, start, count))
        part = shipment[:, :, :count].contiguous()
        connection.link.bulk.send(part).wait(PATIENCE_SECONDS)


def _wait_for(reports: queue.SimpleQueue[Report | None], tokens: int) -> Report:
    """The first report of all tokens."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        report = reports.get(timeout=PATIENCE_SECONDS)
        if report is None:
            break
        if report.tokens_held == tokens:
            return report
    raise RuntimeError("the cache rank ended, or took too long")


def markdown(occupied: Sequence[Occupied]) -> str:
    """A table; the units are those of the module."""
    header = [
        *("format", "options", "bits", "pages, arithmetic", "pages, reported"),
        *("beside pages, a slot", "process grew"),
    ]
    rows = []
    for one in occupied:
        sizes = (one.token * one.tokens, one.reported, one.fixed, one.grown)
        bits = 8 * one.token / one.elements
        rows.append(
            [one.format, one.options, number(bits, 3), *(number(size / 1e9, 3) for size in sizes)]
        )
    return table(header, rows)


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure_residency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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

"""Ships a sequence to a cache rank of its own, and measures what it occupies there."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil
import torch
from tqdm import tqdm

from cache_rank import residency
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import Load, Report, bulk_shape
from scripts.formats.measurements import Variant
from scripts.shared.report import number, table_of
from sglang_ext.exchange.connection import Connection, Placement
from sglang_ext.supervisor import Supervisor

PATIENCE_SECONDS = 600.0
"""The process may take so long for a shipment; slow formats encode a hundred tokens a second."""

VARIANTS = (
    Variant("bf16", {}),
    Variant("lynx", {}),
    Variant("quantspec", {}),
    Variant("hack", {"bits": 4}),
    Variant("hack", {"bits": 2}),
    Variant("mosaickv", {}),
    Variant("mosaickv", {"rate": 87.5}),
)
"""There is one for each size of a token; other options read the same bytes in other ways."""


class Occupied(NamedTuple):
    """What one sequence occupies, in bytes."""

    variant: Variant
    tokens: int  # tokens of the sequence
    elements: int  # elements of K and V of a token, all layers
    token: int  # bytes of one token, by the arithmetic
    fixed: int  # bytes beside the pages, by the arithmetic
    reported: int  # bytes of the pages, by the process
    grown: int  # bytes of the process's resident set


def measure(model: ModelShape, variant: Variant, tokens: int, chunk: int) -> Occupied:
    """Load one sequence of so many tokens, in chunks, into a cache rank of its own.

    Raises:
        CacheRankDownError: the process could not be started.
        RuntimeError: it ended, or the tokens do not fit in the memory that it takes.
    """
    config = variant.configure(CacheRankConfig(model, max_rows=1))
    reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
    supervisor = Supervisor("cache-rank-0", Placement("127.0.0.1"), PATIENCE_SECONDS)
    supervisor.on_report = reports.put
    try:
        connection = supervisor.open(config)
        if connection.capacity_tokens < tokens:
            raise RuntimeError(f"{tokens} tokens wanted, {connection.capacity_tokens} fit")
        process = psutil.Process(connection.process.pid)
        before = process.memory_info().rss
        _ship(connection, config, tokens, chunk)
        reported = _wait_for(reports, tokens).bytes_held
        grown = process.memory_info().rss - before
    finally:
        supervisor.close()
    token, fixed = residency.bytes_per_token(config), residency.fixed_bytes(config)
    elements = 2 * model.layers * model.kv_heads * model.head_dim
    return Occupied(variant, tokens, elements, token, fixed, reported, grown)


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
    return table_of(
        {
            "format": one.variant.format,
            "options": one.variant.title,
            "bits": number(8 * one.token / one.elements, 3),
            "pages, arithmetic": number(one.token * one.tokens / 1e9, 3),
            "pages, reported": number(one.reported / 1e9, 3),
            "beside pages, a slot": number(one.fixed / 1e9, 3),
            "process grew": number(one.grown / 1e9, 3),
        }
        for one in occupied
    )

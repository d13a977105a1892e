"""The servers of an evaluation: how they are started on this machine, and what is kept of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.shared.serving import PLAIN, Client, Server

RECORDED = (
    *("version", "model_path", "dtype", "attention_backend", "decode_mode", "cache_rank_gpus"),
    *("sparse_threshold", "sparse_budget", "sink_tokens", "recent_tokens", "dense_layers"),
    *("query_predictor", "query_window", "hysteresis", "max_swap_tokens"),
    *("layers_per_group", "forecast_lead", "calibration"),
    *("kv_residency", "kv_residency_options", "score_keys", "sketch_bits", "score_normalizer"),
    *("wire_dtype", "inference_kv"),
)
"""The arguments of a server that bear on accuracy."""

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)

LEAST_POOL_TOKENS = 8192

_REASON = 300
"""A report quotes so many characters of the last line of a failure."""


def machine_flags(on_gpus: bool, requests: int, tokens: int) -> list[str]:
    """Flags that any system needs on this machine.

    Args:
        on_gpus: whether the server runs on GPUs.
        requests: requests at once.
        tokens: of all of them together.
    """
    machine = PLAIN[2:]  # without the choice of plain SGLang
    if on_gpus:
        batches = [str(batch) for batch in GRAPH_BATCHES if batch < 2 * requests]
        machine = [
            *("--dtype", "bfloat16", "--cuda-graph-backend-prefill", "disabled"),
            *("--cuda-graph-bs-decode", *batches, "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--disable-radix-cache"),
        ]
    # SGLang counts a request twice while its prompt is computed in chunks.
    room = (requests + 1, max(LEAST_POOL_TOKENS, 2 * tokens))
    return [*machine, "--max-running-requests", str(room[0]), "--max-total-tokens", str(room[1])]


class Servers:
    """The servers that run at the moment, of which each job has one."""

    def __init__(self) -> None:
        self._running: set[Server] = set()

    @contextlib.contextmanager
    def start(
        self,
        flags: Sequence[str],
        gpus: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """A server on these GPUs, or on the CPU if there are none; stopped at the end."""
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        server = Server(flags, {**seen, **(environment or {})})
        self._running.add(server)
        try:
            yield server.wait_ready()
        finally:
            server.stop()
            self._running.remove(server)

    def stop(self) -> None:
        """Stop them all, so that the jobs that wait for them end."""
        for server in list(self._running):
            server.stop()


def describe_server(server: Client) -> dict[str, Any]:
    """The arguments that the server was started with, as far as they are RECORDED."""
    info = server.read("/server_info")
    return {name: info[name] for name in RECORDED if name in info}


def reason_of(error: Exception) -> str:
    """A failure in a line, for a report."""
    reason = str(error).strip().rpartition("\n")[2][-_REASON:]
    return f"{type(error).__name__}: {reason}"

"""Sends problems to a running server, many at once, and grades what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from scripts.accuracy.outcomes import Cell, Outcome
from scripts.accuracy.tasks import TASKS, Problem
from scripts.shared.serving import Client
from scripts.shared.systems import DENSE

REQUEST_SECONDS = 3600.0

RECORDED = (
    *("version", "model_path", "dtype", "attention_backend", "decode_mode", "cache_rank_gpus"),
    *("sparse_threshold", "sparse_budget", "sink_tokens", "recent_tokens", "dense_layers"),
    *("query_predictor", "query_frame", "query_window", "selection_margin", "delta_capacity"),
    *("kv_residency", "kv_residency_options", "score_keys", "wire_dtype", "inference_kv"),
)
"""The arguments of a server that bear on accuracy."""

STATISTICS = ("sparse_steps", "late_steps", "stale_steps", "recall", "attention_mass")
"""The statistics of a response, fields of Outcome, that a cache rank adds."""


def run_cell(
    server: Client, cell: Cell, seeds: Iterable[int], concurrency: int
) -> Iterator[Outcome]:
    """Decode a cell's problems, so many at once; outcomes in the order in which they end.

    Raises:
        requests.RequestException: the server refused a problem or is gone.
        ValueError: the task does not take the dials.
    """
    task = TASKS[cell.task]
    with ThreadPoolExecutor(concurrency) as pool:
        calls = [
            pool.submit(_decode, server, cell, seed, task.make(seed, **cell.dials))
            for seed in seeds
        ]
        try:
            for call in as_completed(calls):
                yield call.result()
        finally:
            pool.shutdown(cancel_futures=True)


def describe_server(server: Client) -> dict[str, Any]:
    """The arguments that the server was started with, as far as they are RECORDED."""
    info = server.read("/server_info")
    return {name: info[name] for name in RECORDED if name in info}


def _decode(server: Client, cell: Cell, seed: int, problem: Problem) -> Outcome:
    sampling: dict[str, Any] = {"max_new_tokens": problem.max_tokens, **problem.sampling}
    if cell.system == DENSE:  # also on a server which has a cache rank
        sampling["custom_params"] = {"cache_rank": False}
    # SGLang refuses an empty text; a space is no word, and leaves <bos>.
    body = {"text": problem.prompt or " ", "sampling_params": sampling}
    response = server.post("/generate", body, timeout=REQUEST_SECONDS)
    response.raise_for_status()
    decoded = response.json()
    grade, meta = problem.grade(decoded["text"]), decoded["meta_info"]
    cache_rank = meta.get("cache_rank") or {}
    return Outcome(
        cell,
        seed,
        *(grade.correct_hops, grade.correct_prefix_hops, grade.hops, grade.exact),
        *(meta["prompt_tokens"], meta["completion_tokens"]),
        **{name: cache_rank[name] for name in STATISTICS if name in cache_rank},
    )

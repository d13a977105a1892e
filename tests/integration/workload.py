"""Flags and prompts that integration tests share, and how they compare answers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import requests
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.shared.serving import Server, serve
from sglang_ext.flags import CHECKSUM_VARIABLE
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

VOCABULARY = 300

SMALL_CACHE_RANK = (
    "--cache-rank-gpus 1 --kv-residency bf16 --sink-tokens 4 --recent-tokens 8 "
    "--max-sparse-requests 8 "
    '--cache-rank-config {"layers_per_group":2,"query_window":4,"bulk_chunk_tokens":64} '
    "--max-total-tokens 20000 --enable-metrics --dtype float32"
).split()

SMALL_INLINE = ("--sink-tokens 4 --recent-tokens 8 --enable-metrics --dtype float32").split()

# A working set of 60 tokens: a tenth of the length that a walk of 80 hops reaches. Flags that are
# not given follow from the budget.
TENTH_OF_THE_CONTEXT = (
    "--enable-metrics --sparse-threshold 264 --sparse-budget 40 --recent-tokens 16"
).split()

REUSE = (
    "--skip-tokenizer-init --sparse-threshold 100 --max-total-tokens 2500 "
    "--chunked-prefill-size 128"
).split()

WORKING_SET = (
    "--inference-kv working-set --sparse-budget 1024 --max-swap-tokens 64 --cache-rank-timeout 8"
).split()

STRICT_POOL = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}
"""The environment of a server that checks pools after every batch."""

STRICT = {CHECKSUM_VARIABLE: "1", **STRICT_POOL}
"""The environment of a server that checks slots at every step, and pools after every batch."""

DENSE = {"sampling_params": {"custom_params": {"cache_rank": False}}}
"""A request with these options stays dense."""

GPU_FLAGS = (
    "--cache-rank-gpus 1 --kv-residency bf16 --dtype bfloat16 "
    "--cuda-graph-backend-prefill disabled "
    "--cuda-graph-bs-decode 1 2 4 8 --max-running-requests 16 --max-total-tokens 100000 "
    "--sampling-backend pytorch --grammar-backend none --cache-rank-mem-fraction 0.2"
).split()


LIKELY_TOKENS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 8}


def select_everything(
    model: Path, cache_home: Path, *flags: str, **environment: str
) -> AbstractContextManager[Server]:
    """Serve with selection in SGLang's process, and a budget that covers every context."""
    given = [*SMALL_INLINE, *REUSE, "--sparse-budget", "2040", "--model-path", str(model)]
    allowed = {ALLOW_LARGE_BUDGET_VARIABLE: "1", "XDG_CACHE_HOME": str(cache_home)}
    return serve([*given, *flags], allowed | environment)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Draw prompts of random tokens."""
    source = random.Random(seed)
    return [[source.randrange(5, VOCABULARY - 5) for _ in range(length)] for length in lengths]


def log_probabilities(response: Any) -> list[float]:
    """The log-probabilities of the generated tokens."""
    return [entry[0] for entry in response["meta_info"]["output_token_logprobs"]]


def difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference of two lists of log-probabilities."""
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def assert_same_answers(
    answers: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-5
) -> None:
    """Compare tokens, and log-probabilities but for rounding."""
    for answer, plain in zip(answers, expected, strict=True):
        assert answer["output_ids"] == plain["output_ids"]
        assert difference(log_probabilities(answer), log_probabilities(plain)) < tolerance


def cached(response: Any) -> int:
    """Count the tokens of a prompt that were not computed."""
    return int(response["meta_info"]["cached_tokens"])


def sparse_steps(response: Any) -> int:
    return int(response["meta_info"]["cache_rank"]["sparse_steps"])


def streamed(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ask, and yield what is said of the answer, chunk by chunk."""
    url = f"{server.url}/generate"
    with requests.post(url, json={**body, "stream": True}, stream=True, timeout=240) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def assert_sparse_is_dense(server: Server, least_sparse_steps: int, tolerance: float = 0.1) -> None:
    """Compare requests on a GPU that select every token with those that stay dense.

    One at a time: the rounding of a dense step depends on how many requests are in its batch.
    """
    compared = 0
    for prompt in random_prompts([650, 900, 1300, 700, 800, 1000, 1200, 750]):
        found = server.generate(prompt, 200, **LIKELY_TOKENS)
        expected = server.generate(prompt, 200, **LIKELY_TOKENS, **DENSE)
        assert found["meta_info"]["cache_rank"]["sparse_steps"] > least_sparse_steps
        assert expected["meta_info"]["cache_rank"]["sparse_steps"] == 0
        compared += same_but_for_rounding(found, expected, tolerance)
    assert compared > 200


def same_but_for_rounding(found: Any, expected: Any, tolerance: float = 0.1) -> int:
    """Compare two answers that were asked for with LIKELY_TOKENS; how many tokens are the same.

    Where tokens are equally likely, rounding decides, and the rest is another text. Rounding
    changes log-probabilities by less than the tolerance.
    """
    tokens = found["output_ids"]
    pairs = enumerate(zip(tokens, expected["output_ids"], strict=True))
    same = next((i for i, (ours, theirs) in pairs if ours != theirs), len(tokens))
    if same < len(tokens):
        top = expected["meta_info"]["output_top_logprobs"][same]
        likely = {token: logprob for logprob, token, *_ in top}
        assert likely[tokens[same]] > max(likely.values()) - 2 * tolerance, (same, top)
    ours, theirs = log_probabilities(found)[:same], log_probabilities(expected)[:same]
    assert difference(ours, theirs) < tolerance
    return same


def copy_model(model: Path, folder: Path, changed: dict[str, Tensor]) -> Path:
    """Copy a model with other weights of some names."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = {**load_file(model / "model.safetensors"), **changed}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def negated_queries(model: Path) -> dict[str, Tensor]:
    """Weights by which a model attends to other tokens."""
    weights = load_file(model / "model.safetensors")
    return {name: -weight for name, weight in weights.items() if "q_proj.weight" in name}

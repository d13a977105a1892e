"""The synchronous baselines through the engine: a server for each mode, and a plain one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from scripts.accuracy.tasks.pointer_chase import make_chain
from scripts.shared.serving import PLAIN, Server, log_probabilities, serve
from scripts.shared.systems import DECODE_MODES
from sglang_ext.server_args import BUNDLED_MODEL

SINKS, RECENT, BUDGET, DENSE_LAYERS, PAGE = 4, 16, 16, 1, 16
MODEL = ["--model-path", str(BUNDLED_MODEL), "--dtype", "float32"]
ATTENDED = SINKS + BUDGET + RECENT + 1


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serve([*PLAIN, *MODEL]) as server:
        yield server


@pytest.fixture(scope="module", params=DECODE_MODES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    arguments = [
        *("--cache-rank-gpus", "0", "--decode-mode", request.param),
        *("--sparse-budget", str(BUDGET), "--dense-layers", str(DENSE_LAYERS)),
        *("--sink-tokens", str(SINKS), "--recent-tokens", str(RECENT)),
        *("--chunked-prefill-size", "100", "--max-total-tokens", "20000"),
    ]
    environment = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with serve([*arguments, *MODEL], environment) as running:
        running.mode = request.param  # type: ignore[attr-defined]
        yield running


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 255, (length,), generator=generator).tolist() for length in lengths]


def difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def test_requests_within_the_budget_are_dense(plain: Server, server: Server) -> None:
    prompts = prompts_of([1, 9, ATTENDED - 20])
    dense = [plain.generate(prompt, 20, return_logprob=True) for prompt in prompts]
    ours = server.generate_all(prompts, 20, return_logprob=True)
    for one, other in zip(ours, dense, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert difference(log_probabilities(one), log_probabilities(other)) < 1e-5


class NaiveAttention:
    """Attention of one request over what a mode selects, head by head and token by token."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        dense = self.mode == "dense" or query.shape[2] > 1
        if dense or module.layer_idx < DENSE_LAYERS:
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        query, key, value = query[0, :, 0], key[0], value[0]
        group = len(query) // len(key)
        logits = torch.stack([key[head // group] @ query[head] for head in range(len(query))])
        probabilities = (logits * module.scaling).softmax(dim=-1)
        output = torch.empty_like(query)
        for head in range(len(query)):
            kv_head = head // group
            heads = slice(kv_head * group, (kv_head + 1) * group)
            tokens = self.tokens_of(probabilities, query[heads], key[kv_head], heads)
            weights = (logits[head, tokens] * module.scaling).softmax(dim=-1)
            output[head] = weights @ value[kv_head, tokens]
        return output[None, None], None

    def tokens_of(self, probabilities: Any, queries: Any, keys: Any, heads: slice) -> list[int]:
        length = len(keys)
        if self.mode == "quest":
            first_recent = (length - 1 - RECENT) // PAGE
            scores = {}
            for page in range(1, first_recent):
                within = keys[page * PAGE : (page + 1) * PAGE]
                products = queries[:, None] * within  # (G, PAGE, D)
                scores[page] = float(products.amax(dim=1).sum(dim=-1).max())
            best = sorted(scores, key=lambda page: -scores[page])[: BUDGET // PAGE]
            pages = [0, *best, *range(max(1, first_recent), math.ceil(length / PAGE))]
            return [t for p in pages for t in range(p * PAGE, min(length, (p + 1) * PAGE))]
        score = {
            "window": torch.arange(length),
            "tova": probabilities.mean(dim=0),
            "oracle": probabilities[heads].amax(dim=0),
        }[self.mode]
        between = range(SINKS, max(SINKS, length - 1 - RECENT))
        best = sorted(between, key=lambda token: -float(score[token]))[:BUDGET]
        return [*range(SINKS), *best, *range(max(SINKS, length - 1 - RECENT), length)]


@torch.no_grad()
def naive_log_probabilities(mode: str, prompt: list[int], generated: list[int]) -> list[float]:
    AttentionInterface.register("naive_selection", NaiveAttention(mode))
    model: Any = Qwen3ForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    model.set_attn_implementation("naive_selection")
    cache, found, tokens = DynamicCache(), [], torch.tensor([prompt])
    for token in generated:
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(float(logits.log_softmax(-1)[token]))
        tokens = torch.tensor([[token]])
    return found


def test_log_probabilities_equal_a_naive_selection(plain: Server, server: Server) -> None:
    prompts = prompts_of([150, 233, 90])
    for prompt, response in zip(
        prompts, server.generate_all(prompts, 40, return_logprob=True), strict=True
    ):
        mode = server.mode  # type: ignore[attr-defined]
        expected = naive_log_probabilities(mode, prompt, response["output_ids"])
        assert difference(log_probabilities(response), expected) < 1e-4
        # The comparison means something: attending to everything gives other numbers.
        dense = naive_log_probabilities("dense", prompt, response["output_ids"])
        assert difference(log_probabilities(response), dense) > 1e-3


CORRECT_HOPS = {"window": (0, 10), "quest": (20, 60), "tova": (80, 80), "oracle": (80, 80)}
"""Fewest and most of 80 that a mode may find: all by token, some by page, few by recency."""


def test_a_better_selection_answers_more(server: Server) -> None:
    chains = [make_chain(seed, facts=128, hops=20) for seed in range(4)]
    correct = 0
    for chain in chains:
        body = {
            "text": chain.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": chain.max_tokens},
        }
        correct += chain.grade(server.post("/generate", body).json()["text"]).correct_hops
    fewest, most = CORRECT_HOPS[server.mode]  # type: ignore[attr-defined]
    assert fewest <= correct <= most

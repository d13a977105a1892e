"""On the real engine, Quest attends to what a naive version of it selects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from workload import difference, random_prompts

from scripts.shared.serving import Server, log_probabilities, serve

# tests/scripts/baselines/test_baselines.py tests all modes without a server.
pytestmark = [pytest.mark.xdist_group("plain server"), pytest.mark.thorough]

SINKS, RECENT, BUDGET, DENSE_LAYERS, PAGE = 4, 16, 16, 1, 16
ATTENDED = SINKS + BUDGET + RECENT + 1


@pytest.fixture(scope="module")
def server(random_model: Callable[..., Path]) -> Iterator[Server]:
    arguments = [
        *("--model-path", str(random_model()), "--skip-tokenizer-init", "--dtype", "float32"),
        *("--decode-mode", "quest"),
        *("--sparse-budget", str(BUDGET), "--dense-layers", str(DENSE_LAYERS)),
        *("--sink-tokens", str(SINKS), "--recent-tokens", str(RECENT)),
        *("--chunked-prefill-size", "100", "--max-total-tokens", "20000"),
    ]
    with serve(arguments, {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}) as running:
        yield running


def test_requests_within_the_budget_are_dense(plain_server: Server, server: Server) -> None:
    prompts = random_prompts([1, 9, ATTENDED - 20])
    dense = plain_server.generate_all(prompts, 20, return_logprob=True)
    ours = server.generate_all(prompts, 20, return_logprob=True)
    for one, other in zip(ours, dense, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert difference(log_probabilities(one), log_probabilities(other)) < 1e-5


class NaiveAttention:
    """It attends, for one request, to the pages that are selected, head by head."""

    def __init__(self, is_dense: bool) -> None:
        self.is_dense = is_dense

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        if self.is_dense or query.shape[2] > 1 or module.layer_idx < DENSE_LAYERS:
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        query, key, value = query[0, :, 0], key[0], value[0]
        group = len(query) // len(key)
        output = torch.empty_like(query)
        for head in range(len(query)):
            kv_head = head // group
            queries = query[kv_head * group : (kv_head + 1) * group]
            tokens = self.tokens_of(queries, key[kv_head])
            weights = (key[kv_head, tokens] @ query[head] * module.scaling).softmax(dim=-1)
            output[head] = weights @ value[kv_head, tokens]
        return output[None, None], None

    def tokens_of(self, queries: Any, keys: Any) -> list[int]:
        length = len(keys)
        first_recent = (length - 1 - RECENT) // PAGE
        scores = {}
        for page in range(1, first_recent):
            within = keys[page * PAGE : (page + 1) * PAGE]
            products = queries[:, None] * within  # (G, PAGE, D)
            scores[page] = float(products.amax(dim=1).sum(dim=-1).max())
        best = sorted(scores, key=lambda page: -scores[page])[: BUDGET // PAGE]
        pages = [0, *best, *range(max(1, first_recent), math.ceil(length / PAGE))]
        return [t for p in pages for t in range(p * PAGE, min(length, (p + 1) * PAGE))]


@torch.no_grad()
def naive_log_probabilities(
    folder: Path, prompt: list[int], generated: list[int], is_dense: bool = False
) -> list[float]:
    AttentionInterface.register("naive_selection", NaiveAttention(is_dense))
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation("naive_selection")
    cache, found, tokens = DynamicCache(), [], torch.tensor([prompt])
    for token in generated:
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(float(logits.log_softmax(-1)[token]))
        tokens = torch.tensor([[token]])
    return found


def test_log_probabilities_equal_a_naive_selection(
    server: Server, random_model: Callable[..., Path]
) -> None:
    prompts = random_prompts([150, 233, 90])
    for prompt, response in zip(
        prompts, server.generate_all(prompts, 40, return_logprob=True), strict=True
    ):
        generated = response["output_ids"]
        expected = naive_log_probabilities(random_model(), prompt, generated)
        assert difference(log_probabilities(response), expected) < 1e-4
        # The comparison means something: attending to everything gives other numbers.
        dense = naive_log_probabilities(random_model(), prompt, generated, is_dense=True)
        assert difference(log_probabilities(response), dense) > 1e-3

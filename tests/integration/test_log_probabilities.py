"""Log-probabilities equal the synchronous reference inside another implementation of the model.

The model runs in transformers, whose attention is replaced by the synchronous reference. It shares
neither kernels, nor the pool, nor the exchange with SGLang and the cache rank. Its weights are
random and wide, so that which tokens are attended to shows in every probability.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from workload import SMALL_CACHE_RANK, random_prompts

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.reference import SynchronousReference
from scripts.shared.serving import log_probabilities, serve

THRESHOLD, BUDGET, SINKS, RECENT, WINDOW, CAPACITY, MARGIN = 120, 32, 4, 8, 8, 12, 6
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32
NEW_TOKENS = 240
DENSE_LAYERS = 1


class ReferenceAttention:
    """Attention of one request: dense below its turn, then by the reference, layer by layer.

    The request is shipped in the first step at the threshold and warms up from the next; it turns
    sparse when the query window and every slot that can be used are full.
    """

    def __init__(self, config: CacheRankConfig) -> None:
        self.config = config
        self.reference: SynchronousReference | None = None
        self.exchanged = self.filled = self.sparse_steps = 0
        self.is_sparse = False

    def begin_step(self, position: int) -> None:
        wanted = self.config.slots_wanted_after(position - 1)
        warm = self.exchanged > self.config.query_window and self.filled == wanted
        self.is_sparse = self.is_sparse or warm
        self.sparse_steps += self.is_sparse

    def end_step(self, position: int, cache: DynamicCache) -> None:
        if self.reference is not None:
            self.exchanged += 1
            self.filled = self.config.filled_after(position, self.filled)
        elif position + 1 >= THRESHOLD:
            layers = cache.layers[DENSE_LAYERS:]
            keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers])
            values = torch.stack([layer.values[0].transpose(0, 1) for layer in layers])
            self.reference = SynchronousReference(self.config, keys, values)

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx - DENSE_LAYERS
        if self.reference is None or layer < 0:
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        position = key.shape[2] - 1
        self.reference.append(layer, query[0, :, 0], key[0, :, -1], value[0, :, -1])
        if self.is_sparse:
            output = self.reference.attend(layer, query[0, :, 0], position)[None, None]
        else:
            output, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        self.reference.select(layer, position)
        return output, None


def reference_log_probabilities(
    config: CacheRankConfig, folder: Path, prompt: list[int], generated: list[int]
) -> tuple[list[float], int]:
    """Of the generated tokens, teacher-forced; and how many steps were sparse."""
    attention = ReferenceAttention(config)
    AttentionInterface.register("synchronous_reference", attention)
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation("synchronous_reference")
    cache, found = DynamicCache(), []
    tokens = torch.tensor([prompt])
    for token in generated:
        position = cache.get_seq_length()
        if found:
            attention.begin_step(position)
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[0, -1]
        if found:
            attention.end_step(position, cache)
        found.append(float(logits.log_softmax(-1)[token]))
        tokens = torch.tensor([[token]])
    return found, attention.sparse_steps


@pytest.mark.parametrize(("predictor", "frame"), [("last", "pre"), ("spade", "post")])
def test_log_probabilities_equal_the_reference(
    predictor: Any, frame: Any, random_model: Callable[..., Path]
) -> None:
    model = random_model("qwen3", LAYERS, HEADS, KV_HEADS)
    (prompt,) = random_prompts([150])
    arguments = [
        *SMALL_CACHE_RANK,
        *("--model-path", str(model), "--skip-tokenizer-init"),
        *("--sparse-threshold", str(THRESHOLD), "--sparse-budget", str(BUDGET)),
        *("--recent-tokens", str(RECENT), "--sink-tokens", str(SINKS)),
        *("--query-window", str(WINDOW), "--delta-capacity", str(CAPACITY)),
        *("--selection-margin", str(MARGIN), "--bulk-chunk-tokens", "512"),
        *("--query-predictor", predictor, "--query-frame", frame),
    ]
    with serve(arguments) as server:
        response = server.generate(prompt, NEW_TOKENS, return_logprob=True)
        stay_dense = {"custom_params": {"cache_rank": False}}
        dense = server.generate(prompt, NEW_TOKENS, return_logprob=True, sampling_params=stay_dense)

    rotary = Qwen3ForCausalLM.from_pretrained(model).model.rotary_emb.inv_freq
    config = CacheRankConfig(
        ModelShape(
            LAYERS - DENSE_LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            "float32",
            HEAD_DIM**-0.5,
            tuple(rotary.tolist()),
        ),
        sparse_budget=BUDGET,
        sink_tokens=SINKS,
        recent_tokens=RECENT,
        query_window=WINDOW,
        query_predictor=predictor,
        query_frame=frame,
        selection_margin=MARGIN,
        delta_capacity=CAPACITY,
    )
    with torch.no_grad():
        expected, sparse_steps = reference_log_probabilities(
            config, model, prompt, response["output_ids"]
        )
    assert response["meta_info"]["cache_rank"]["sparse_steps"] == sparse_steps > 200
    assert difference(log_probabilities(response), expected) < 1e-4
    # The comparison means something: attending to everything gives other numbers.
    assert difference(log_probabilities(dense), expected) > 1e-2


def difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))

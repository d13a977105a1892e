"""How long a decode step takes, and how much fits, estimated before anything is started.

Decode is bound by what it reads: a step takes its bytes over the bandwidth of a copy, and something
for each layer. The constants were fitted to the tables of docs/runs, with which the tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from cache_rank.config import ModelShape
from cache_rank.kernels.sketch.reference import sketch_shape
from cache_rank.residency import capacity_tokens, memory_for_tokens
from sglang_ext.flags import make_config
from sglang_ext.prediction import choose_schedule, rotary_type

# Seconds beside those of bytes: of a layer of the model; on the cache rank of a layer, of a layer
# group, and in a layer for each request and KV head to gather, and to compare heads by the tokens
# attended to.
_LAYER, _CACHE_LAYER, _CACHE_GROUP, _GATHER, _NORMALIZER = 54e-6, 10e-6, 65e-6, 0.05e-6, 0.1e-6

# Of a sparse layer whose tokens are selected in SGLang's process: seconds beside bytes, and the
# share of the bandwidth of a copy at which sketches are scored.
_INLINE_LAYER, _SKETCH_SHARE = 21e-6, 0.62

# What a scored token costs beside its key: for each logit, by powers of two of query heads, and to
# select.
_LOGIT_BYTES, _SELECT_BYTES = 7.5, 32

# Of the bandwidth of a copy, at which a forecast reads projections.
_FORECAST_SHARE = 0.55

_KEY_BITS = {"bf16": 16.0, "lynx": 16.0, "quantspec": 4.25, "hack": 4.5}
"""Bits that a score reads of an element of a key. Lynx reads fewer, and takes as long."""

_LOADED_SHARE = 0.85
"""SGLang gives its weights and its KV pool so much of a GPU; its `mem_fraction_static` here."""

CONTEXT_BYTES = 700_000_000
"""A process takes so much of a GPU before it has allocated anything."""

TENSOR_PARALLEL = 2
"""A cache rank and the model take so many GPUs, and so many are given to plain SGLang."""


class Gpu(NamedTuple):
    """What a step is bound by.

    Attributes:
        bandwidth: of a large copy, bytes read and written, in bytes a second.
        fp8_kv_share: of the bandwidth, at which attention reads an FP8 cache: it computes more for
            each byte.
    """

    bandwidth: float
    memory: float
    fp8_kv_share: float = 0.6


GPUS = {
    "H200": Gpu(4.30e12, 150e9),
    "H100": Gpu(3.00e12, 85e9, fp8_kv_share=0.7),
    # By their data sheets' bandwidths, as the H200's copy is to its own.
    "A100": Gpu(1.83e12, 85e9),
    "B200": Gpu(7.17e12, 192e9),
}


class Decoder(NamedTuple):
    """A dense decoder, by what a step reads of it.

    Attributes:
        attention: its shape, of all layers.
        layer_bytes, head_bytes: weights of a layer, and of the language model's head.
    """

    attention: ModelShape
    hidden_size: int
    layer_bytes: int
    head_bytes: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], quantization: str | None = None) -> Decoder:
        """Read a config.json of a model with one MLP a layer, such as Llama or Qwen3.

        Raises:
            ValueError: it has experts, weights of other formats, or no such layers.
        """
        named = (config.get("quantization_config") or {}).get("quant_method")
        chosen = quantization or named
        if chosen not in (None, "fp8"):
            raise ValueError(f"{chosen} weights are not estimated: only bfloat16 and fp8")
        if any("expert" in name and config[name] for name in config):
            raise ValueError("models with experts are not estimated: a step reads some of them")
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            kv_heads = config.get("num_key_value_heads") or heads
            head_dim = config.get("head_dim") or hidden // heads
            weights = 2 * hidden * (heads + kv_heads) * head_dim
            weights += 3 * hidden * config["intermediate_size"]
            layers, head = config["num_hidden_layers"], config["vocab_size"] * hidden
        except KeyError as error:
            raise ValueError(f"the model's config.json has no {error}") from None
        scale = head_dim**-0.5
        shape = ModelShape(layers, heads, kv_heads, head_dim, "bfloat16", scale, (1.0,))
        return cls(shape, hidden, weights * (1 if chosen == "fp8" else 2), 2 * head)

    @property
    def step_bytes(self) -> int:
        """What a step reads of the weights."""
        return self.attention.layers * self.layer_bytes + self.head_bytes


class Planner:
    """Estimates of steps in which all requests are sparse, for two GPUs of a kind."""

    def __init__(
        self,
        gpu: Gpu,
        config: Mapping[str, Any],
        quantization: str | None,
        flags: Mapping[str, Any],
    ) -> None:
        """Read a model and the flags of a server, chosen or not.

        Raises:
            ValueError: the model or the format cannot be estimated, or a flag is wrong.
        """
        self._model, self._gpu = Decoder.of_config(config, quantization), gpu
        attention = self._model.attention
        predictor, group_layers, _ = choose_schedule(
            flags["query_predictor"],
            flags["layers_per_group"],
            flags["forecast_lead"],
            architecture=(config.get("architectures") or [""])[0],
            sparse_layers=attention.layers - flags["dense_layers"],
            rotary_type=rotary_type(config),
        )
        chosen = {**flags, "query_predictor": predictor, "layers_per_group": group_layers}
        sparse_layers = max(1, attention.layers - flags["dense_layers"])
        sparse = msgspec.structs.replace(attention, layers=sparse_layers)
        self._config = make_config(chosen, sparse, flags["max_sparse_requests"])
        if self._config.kv_residency not in _KEY_BITS:
            raise ValueError(f"kv_residency {self._config.kv_residency} is not estimated")

    def dense(self, batch: int, context: int, gpus: int = 1, kv_bytes: int = 2) -> float:
        """Seconds of a step of plain SGLang, tensor parallel over so many GPUs."""
        layers = self._model.attention.layers
        weights = self._model.step_bytes / self._gpu.bandwidth
        attention = layers * self._attention(batch * context, kv_bytes)
        return (weights + attention) / gpus + layers * _LAYER

    def inline(self, batch: int, context: int, gpus: int = 1, kv_bytes: int = 2) -> float:
        """Seconds of a step in which SGLang's process selects for all requests."""
        scored = self._config.model.layers * batch * context * self._sketch_bytes
        overhead = self._config.model.layers * _INLINE_LAYER
        attended = self._over_selected(batch, context, gpus, kv_bytes)
        return attended + scored / (self._gpu.bandwidth * _SKETCH_SHARE) / gpus + overhead

    def cache_rank(self, batch: int, context: int) -> tuple[float, float]:
        """Seconds of a step of the inference rank and of the cache rank, which work at once."""
        model, config, bandwidth = self._model.attention, self._config, self._gpu.bandwidth
        sparse_layers = config.model.layers
        inference = self._over_selected(batch, context)
        sketched = config.score_keys == "sketch"
        bits = config.sketch_bits if sketched else _KEY_BITS[config.kv_residency]
        # Heads are compared by what all their logits add up to, unless that is known before.
        known = config.score_normalizer == "attended"
        logits = 1 if known else 1 + _power_of_two(model.query_heads // model.kv_heads)
        scored = bits * model.head_dim / 8 + _LOGIT_BYTES * logits + _SELECT_BYTES
        rows = batch * model.kv_heads
        layer = rows * context * scored / bandwidth + _CACHE_LAYER
        layer += rows * (_GATHER + (_NORMALIZER if known else 0.0))
        if config.query_predictor == "forecast":
            projection = 2 * self._model.hidden_size * model.query_heads * model.head_dim
            layer += projection / (bandwidth * _FORECAST_SHARE)
        groups = -(-sparse_layers // config.layers_per_group)
        return inference, sparse_layers * layer + groups * _CACHE_GROUP

    def dense_tokens(self, gpus: int = 1, kv_bytes: int = 2) -> int:
        """How many tokens the pool of plain SGLang holds on so many GPUs."""
        return self._pool_tokens(gpus, self._model.attention.bytes_per_token * kv_bytes / 2)

    def inline_tokens(self, gpus: int = 1, kv_bytes: int = 2) -> int:
        """How many tokens the pool holds beside their sketches, on so many GPUs."""
        sketches = self._config.model.layers * self._sketch_bytes
        token_bytes = self._model.attention.bytes_per_token * kv_bytes / 2
        return self._pool_tokens(gpus, token_bytes + sketches)

    def cache_rank_tokens(self, memory_fraction: float | None = None) -> int:
        """How many tokens the cache rank holds in such a share of its GPU."""
        free = int(self._gpu.memory) - CONTEXT_BYTES
        return capacity_tokens(self._config, memory_for_tokens(free, memory_fraction, on_gpu=True))

    @property
    def _sketch_bytes(self) -> int:
        """Bytes of the sketches of a token in one layer."""
        model = self._config.model
        return model.kv_heads * sketch_shape(model.head_dim, self._config.sketch_bits).bytes

    def _over_selected(self, batch: int, context: int, gpus: int = 1, kv_bytes: int = 2) -> float:
        """Seconds of a step whose sparse layers attend to what is selected."""
        config, layers = self._config, self._model.attention.layers
        budget = config.budget_curve.at(context)
        attended = config.sink_tokens + budget + config.recent_tokens + 1
        left_out = batch * max(0, context - attended)
        of_dense_layers = (layers - config.model.layers) * self._attention(left_out, kv_bytes)
        return self.dense(batch, min(attended, context), gpus, kv_bytes) + of_dense_layers / gpus

    def _pool_tokens(self, gpus: int, token_bytes: float) -> int:
        """How many tokens of such a size SGLang's pool holds on so many GPUs."""
        weights = self._model.step_bytes + self._model.head_bytes  # and the embedding
        free = gpus * self._gpu.memory * _LOADED_SHARE - weights
        return max(0, int(free / token_bytes))

    def _attention(self, tokens: int, kv_bytes: int) -> float:
        """Seconds in which one layer reads K and V of so many tokens."""
        model = self._model.attention
        share = self._gpu.fp8_kv_share if kv_bytes == 1 else 1.0
        elements = 2 * model.kv_heads * model.head_dim
        return tokens * elements * kv_bytes / (self._gpu.bandwidth * share)


def _power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()

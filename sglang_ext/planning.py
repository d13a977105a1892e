"""How long a decode step takes, and how much fits, estimated before anything is started.

Decode is bound by what it reads: a step takes its bytes over the bandwidth of a copy, and something
for each layer. The constants were fitted to the tables of docs/runs, with which the tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.sketch.reference import sketch_shape
from cache_rank.residency import capacity_tokens, memory_for_tokens
from sglang_ext.flags import make_config
from sglang_ext.prediction import choose_schedule, rotary_type

# Seconds beside bytes: of a layer of the model; of a layer and of a layer group in the cache rank;
# and there, in a layer for each request and KV head, to gather, and to compare heads by the tokens
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
        name: what estimates say that they are of.
        driver_name: variants have others, and less or other memory.
        bandwidth: of a large copy, bytes read and written, in bytes a second.
        memory: in bytes.
        fp8_kv_share: of the bandwidth, at which attention reads an FP8 cache: it computes more for
            each byte.
    """

    name: str
    driver_name: str
    bandwidth: float
    memory: float
    fp8_kv_share: float = 0.6


GPUS = {
    "H200": Gpu("H200", "NVIDIA H200", 4.30e12, 150e9),
    "H100": Gpu("H100", "NVIDIA H100 80GB HBM3", 3.00e12, 85e9, fp8_kv_share=0.7),
    # By their bandwidths, as the H200's copy is to its own.
    "A100": Gpu("A100, by its data sheet", "NVIDIA A100-SXM4-80GB", 1.83e12, 85e9),
    "B200": Gpu("B200, by its data sheet", "NVIDIA B200", 7.17e12, 192e9),
}


def find_gpu(driver_name: str) -> Gpu | None:
    """The GPU of a driver's name, if it is one of GPUS."""
    return next((gpu for gpu in GPUS.values() if gpu.driver_name == driver_name), None)


class Decoder(NamedTuple):
    """A dense decoder, by what a step reads of it.

    Attributes:
        attention: its shape, of all layers.
        hidden_size: elements of a hidden state.
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

    def sparse_shape(self, dense_layers: int) -> ModelShape:
        """The attention of all but the first layers, which stay dense."""
        layers = max(1, self.attention.layers - dense_layers)
        return msgspec.structs.replace(self.attention, layers=layers)

    @property
    def step_bytes(self) -> int:
        """What a step reads of the weights."""
        return self.attention.layers * self.layer_bytes + self.head_bytes


class Estimate(NamedTuple):
    """Seconds of a decode step of the inference rank alone, and of the cache rank alone."""

    inference: float
    cache: float

    @property
    def step(self) -> float:
        """What a step takes: both work at the same time."""
        return max(self)

    @property
    def is_hidden(self) -> bool:
        """Whether the cache rank takes no longer than the model."""
        return self.cache <= self.inference


def make_planner(
    gpu: Gpu, config: Mapping[str, Any], quantization: str | None, flags: Mapping[str, Any]
) -> Planner:
    """Estimates for a model and the flags of a server, chosen or not.

    Args:
        gpu: both ranks have such a one.
        config: the model's config.json.
        quantization: of its weights, if not its own.
        flags: ours, by their fields.

    Raises:
        ValueError: the model or the format cannot be estimated, or a flag is wrong.
    """
    model = Decoder.of_config(config, quantization)
    predictor, group_layers, _ = choose_schedule(
        flags["query_predictor"],
        flags["layers_per_group"],
        flags["forecast_lead"],
        architecture=(config.get("architectures") or [""])[0],
        sparse_layers=model.attention.layers - flags["dense_layers"],
        rotary_type=rotary_type(config),
    )
    chosen = {**flags, "query_predictor": predictor, "layers_per_group": group_layers}
    shape = model.sparse_shape(flags["dense_layers"])
    return Planner(model, gpu, make_config(chosen, shape, flags["max_sparse_requests"]))


class Planner:
    """Estimates for a model and a GPU.

    Args:
        config: of the cache rank, of the sparse layers; budgets are the same inline.

    Raises:
        ValueError: the format of the cache rank cannot be estimated.
    """

    def __init__(self, model: Decoder, gpu: Gpu, config: CacheRankConfig) -> None:
        if config.kv_residency not in _KEY_BITS:
            raise ValueError(f"kv_residency {config.kv_residency} is not estimated")
        self._model, self._gpu, self._config = model, gpu, config

    def dense(self, batch: int, context: int, gpus: int = 1, kv_bytes: int = 2) -> float:
        """Seconds of a step of plain SGLang, tensor parallel over so many GPUs."""
        layers = self._model.attention.layers
        weights = self._model.step_bytes / self._gpu.bandwidth
        attention = layers * self._attention(batch * context, kv_bytes)
        return (weights + attention) / gpus + layers * _LAYER

    def tensor_parallel(self, batch: int, context: int) -> float:
        """Seconds of a step of plain SGLang on as many GPUs as a cache rank takes, FP8 cache."""
        return self.dense(batch, context, TENSOR_PARALLEL, kv_bytes=1)

    def inline(self, batch: int, context: int, gpus: int = 1, kv_bytes: int = 2) -> float:
        """Seconds of a step in which SGLang's process selects for all requests."""
        scored = self._config.model.layers * batch * context * self._sketch_bytes
        overhead = self._config.model.layers * _INLINE_LAYER
        attended = self._over_selected(batch, context, gpus, kv_bytes)
        return attended + scored / (self._gpu.bandwidth * _SKETCH_SHARE) / gpus + overhead

    def cache_rank(self, batch: int, context: int) -> Estimate:
        """A step in which a cache rank selects for all requests."""
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
        return Estimate(inference, sparse_layers * layer + groups * _CACHE_GROUP)

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

    def summary(self, context: int = 32768, memory_fraction: float | None = None) -> str:
        """Say in a line up to what the cache rank hides, and for what batches it pays.

        Of the batches that it holds in such a share of its GPU.
        """
        held = self.cache_rank_tokens(memory_fraction) // context
        batches = range(1, 1 + min(held, 1024))
        ours = {batch: self.cache_rank(batch, context) for batch in batches}
        hidden = sum(ours[batch].is_hidden for batch in batches)
        won = [b for b in batches if ours[b].step < self.tensor_parallel(b, context)]
        pays = f"from {won[0]} to {won[-1]} requests" if won else "for no batch that fits"
        inline = (self.inline(batch, context, TENSOR_PARALLEL, kv_bytes=1) for batch in won)
        if shorter := sum(step < ours[batch].step for batch, step in zip(won, inline, strict=True)):
            pays += f"; inline on those GPUs is shorter for {shorter} of these {len(won)} batches"
        return (
            f"estimates ({self._gpu.name}, {context:,} tokens a request; python -m sglang_ext.plan "
            f"has more): hidden behind the model up to {hidden} requests, and a step is shorter "
            f"than of {TENSOR_PARALLEL} tensor-parallel GPUs with an FP8 cache {pays}"
        )

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

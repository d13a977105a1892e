"""How long a decode step takes, and how much fits, estimated before anything is started.

Decode is bound by what it reads: a step takes its bytes over the bandwidth of a copy, and something
for each layer. The constants were fitted to the tables of docs/runs, with which the tests compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import capacity_tokens, memory_for_tokens

_LAYER_SECONDS = 54e-6
"""What a layer of the model takes beside its bytes."""

_CACHE_LAYER_SECONDS, _CACHE_GROUP_SECONDS = 10e-6, 65e-6
"""What a layer, and a layer group, take in the cache rank beside bytes."""

_GATHER_SECONDS = 0.05e-6
"""Gathers in a layer, for each request and KV head."""

_NORMALIZER_SECONDS = 0.1e-6
"""The tokens of a layer by which heads are compared, where their logits are not all written, for
each request and KV head."""

_LOGIT_BYTES, _SELECT_BYTES = 7.5, 32
"""What a scored token costs beside its key: for each logit that is written and read, and to select.

Kernels take query heads of a KV head by powers of two.
"""

_FORECAST_SHARE = 0.55
"""A forecast reads projections at this share of the bandwidth of a copy."""

_KEY_BITS = {"bf16": 16.0, "lynx": 16.0, "quantspec": 4.25, "hack": 4.5}
"""Bits that a score reads of an element of a key. Lynx reads fewer, and takes as long."""

_LOADED_SHARE = 0.85
"""SGLang gives its weights and its KV pool so much of a GPU; its `mem_fraction_static` here."""

_MOST_REQUESTS = 1 << 10
"""No larger batch is looked at."""

CONTEXT_BYTES = 700_000_000
"""A process takes so much of a GPU before it has allocated anything."""

TENSOR_PARALLEL = 2
"""A cache rank and the model take so many GPUs, and so many are given to plain SGLang."""


class Gpu(NamedTuple):
    """What a step is bound by.

    Attributes:
        name: as the driver has it.
        bandwidth: of a large copy, bytes read and written, in bytes a second.
        memory: in bytes.
        fp8_kv_share: of the bandwidth, at which attention reads an FP8 cache. It computes more for
            each byte, and gets less of a higher bandwidth.
        measured: whether estimates were compared with measurements on it.
    """

    name: str
    bandwidth: float
    memory: float
    fp8_kv_share: float = 0.6
    measured: bool = False


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", 4.30e12, 150e9, measured=True),
        Gpu("H100", 3.00e12, 85e9, fp8_kv_share=0.7, measured=True),
        # By their data sheets' bandwidths, as the H200's copy is to its own.
        Gpu("A100", 1.83e12, 85e9),
        Gpu("B200", 7.17e12, 192e9),
    )
}
"""The GPUs that estimates are made for."""

_LESSER = {"MIG", "PCIE", "NVL", "40GB"}
"""Slices and variants that share a name with one of GPUS, and have less or other memory."""


def find_gpu(name: str) -> Gpu | None:
    """The GPU of a driver's name, such as NVIDIA H200, if it is one of GPUS."""
    words = re.split(r"\W", name.upper())
    if not _LESSER.isdisjoint(words):
        return None
    return next((gpu for known, gpu in GPUS.items() if known in words), None)


class DecoderSizes(NamedTuple):
    """A dense decoder, by what a step reads of it.

    Attributes:
        layers, query_heads, kv_heads, head_dim, hidden_size: of its attention.
        layer_weights, head_weights: weights of a layer, and of the language model's head.
        weight_bytes: bytes of a weight of a layer; the head's take two.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    layer_weights: int
    head_weights: int
    weight_bytes: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], quantization: str | None = None) -> DecoderSizes:
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
            attention = 2 * hidden * (heads + kv_heads) * head_dim
            layer = attention + 3 * hidden * config["intermediate_size"]
            layers, head = config["num_hidden_layers"], config["vocab_size"] * hidden
        except KeyError as error:
            raise ValueError(f"the model's config.json has no {error}") from None
        weight_bytes = 1 if chosen == "fp8" else 2
        return cls(layers, heads, kv_heads, head_dim, hidden, layer, head, weight_bytes)

    def shape(self, dense_layers: int) -> ModelShape:
        """The attention of the sparse layers, as far as memory depends on it."""
        layers = max(1, self.layers - dense_layers)
        scale = self.head_dim**-0.5
        heads = (self.query_heads, self.kv_heads, self.head_dim)
        return ModelShape(layers, *heads, "bfloat16", scale, rotary_frequency=(1.0,))

    @property
    def step_bytes(self) -> int:
        """What a step reads of the weights."""
        return self.layers * self.layer_weights * self.weight_bytes + 2 * self.head_weights

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim


class Estimate(NamedTuple):
    """A decode step of a batch, in seconds.

    Attributes:
        inference: of the inference rank alone.
        cache: of the cache rank alone.
    """

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


class Planner:
    """Estimates for a model, a GPU, and a configuration of the cache rank."""

    def __init__(
        self, sizes: DecoderSizes, gpu: Gpu, config: CacheRankConfig, dense_layers: int
    ) -> None:
        """Take the first layers as dense, whatever `config.model` says of layers.

        Raises:
            ValueError: the format of the cache rank cannot be estimated.
        """
        if config.kv_residency not in _KEY_BITS:
            raise ValueError(f"kv_residency {config.kv_residency} is not estimated")
        self._sizes = sizes
        self._gpu = gpu
        self._config = config
        self._dense_layers = dense_layers

    def dense(self, batch: int, context: int, gpus: int = 1, kv_bytes: int = 2) -> float:
        """Seconds of a step of plain SGLang, tensor parallel over so many GPUs."""
        sizes = self._sizes
        weights = sizes.step_bytes / self._gpu.bandwidth
        attention = sizes.layers * self._attention(batch * context, kv_bytes)
        return (weights + attention) / gpus + sizes.layers * _LAYER_SECONDS

    def cache_rank(self, batch: int, context: int) -> Estimate:
        """A step in which all requests are sparse."""
        sizes, config, bandwidth = self._sizes, self._config, self._gpu.bandwidth
        attended = config.sink_tokens + config.sparse_budget + config.recent_tokens + 1
        in_dense_layers = self._attention(batch * max(0, context - attended), 2)
        inference = self.dense(batch, min(attended, context))
        inference += self._dense_layers * in_dense_layers

        sketched = config.score_keys == "sketch"
        bits = config.sketch_bits if sketched else _KEY_BITS[config.kv_residency]
        # Heads are compared by what all their logits add up to, unless that is known before.
        known = config.score_normalizer == "attended"
        logits = 1 if known else 1 + _power_of_two(sizes.query_heads // sizes.kv_heads)
        scored = bits * sizes.head_dim / 8 + _LOGIT_BYTES * logits + _SELECT_BYTES
        rows = batch * sizes.kv_heads
        of_rows = _GATHER_SECONDS + (_NORMALIZER_SECONDS if known else 0.0)
        layer = rows * context * scored / bandwidth + rows * of_rows + _CACHE_LAYER_SECONDS
        if config.query_predictor == "forecast":
            projection = 2 * sizes.hidden_size * sizes.query_heads * sizes.head_dim
            layer += projection / (bandwidth * _FORECAST_SHARE)
        layers = sizes.layers - self._dense_layers
        groups = -(-layers // config.layers_per_group)
        return Estimate(inference, layers * layer + groups * _CACHE_GROUP_SECONDS)

    def tensor_parallel(self, batch: int, context: int) -> float:
        """Seconds of a step of plain SGLang on as many GPUs as a cache rank takes, FP8 cache."""
        return self.dense(batch, context, TENSOR_PARALLEL, kv_bytes=1)

    def dense_tokens(self, gpus: int = 1, kv_bytes: int = 2) -> int:
        """How many tokens the pool of plain SGLang holds on so many GPUs."""
        sizes = self._sizes
        weights = sizes.step_bytes + 2 * sizes.head_weights  # and the embedding
        free = gpus * self._gpu.memory * _LOADED_SHARE - weights
        return max(0, int(free / (sizes.layers * sizes.kv_elements * kv_bytes)))

    def cache_rank_tokens(self, memory_fraction: float | None = None) -> int:
        """How many tokens the cache rank holds in such a share of its GPU: `capacity_tokens`."""
        free = int(self._gpu.memory) - CONTEXT_BYTES
        memory = memory_for_tokens(free, memory_fraction, on_gpu=True)
        return capacity_tokens(self._config, memory)

    def summary(self, context: int = 32768, memory_fraction: float | None = None) -> str:
        """Say in a line up to what the cache rank hides, and for what batches it pays.

        Of the batches that it holds in such a share of its GPU.
        """
        held = self.cache_rank_tokens(memory_fraction) // context
        batches = range(1, 1 + min(held, _MOST_REQUESTS))
        ours = {batch: self.cache_rank(batch, context) for batch in batches}
        hidden = sum(ours[batch].is_hidden for batch in batches)
        won = [b for b in batches if ours[b].step < self.tensor_parallel(b, context)]
        pays = f"from {won[0]} to {won[-1]} requests" if won else "for no batch that fits"
        gpu = self._gpu.name if self._gpu.measured else f"{self._gpu.name}, by its data sheet"
        return (
            f"estimates ({gpu}, {context:,} tokens a request; python -m sglang_ext.plan has more): "
            f"hidden behind the model up to {hidden} requests, and a step is shorter than of "
            f"{TENSOR_PARALLEL} tensor-parallel GPUs with an FP8 cache {pays}"
        )

    def _attention(self, tokens: int, kv_bytes: int) -> float:
        """Seconds in which one layer reads K and V of so many tokens."""
        share = self._gpu.fp8_kv_share if kv_bytes == 1 else 1.0
        return tokens * self._sizes.kv_elements * kv_bytes / (self._gpu.bandwidth * share)


def _power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()

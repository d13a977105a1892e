"""How long a decode step takes, and how much fits, estimated before anything is started.

Decode is bound by what it reads: a step takes its bytes over the bandwidth of a copy, and something
for each layer. The constants were fitted to the tables of docs/runs, with which the tests compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import capacity_tokens, memory_for_tokens

_LAYER_SECONDS = 54e-6
"""What a layer of the model takes beside its bytes."""

_LOGIT_BYTES = 7.5
"""What the logits of a query head cost for each scored token, written and read, in bytes.

Kernels take query heads of a KV head by powers of two.
"""

_SELECT_SECONDS = (6e-6, 7.5e-12)
"""Selection in a layer; and for each of its scores."""

_GATHER_SECONDS = (4e-6, 0.05e-6)
"""Appends and gathers in a layer; and for each request and KV head."""

_NORMALIZER_SECONDS = 0.1e-6
"""The scattered tokens of a layer by which heads are compared, for each request and KV head."""

_FORECAST_SHARE = 0.55
"""A forecast reads projections at this share of the bandwidth of a copy."""

_GROUP_SECONDS = 65e-6
"""What a layer group costs the cache rank beside its layers."""

_LOADED_SHARE = 0.85
"""SGLang gives its weights and its KV pool so much of a GPU; its `mem_fraction_static` here."""

_MOST_REQUESTS = 1 << 10
"""No larger batch is looked at."""

CONTEXT_BYTES = 700_000_000
"""A process takes so much of a GPU before it has allocated anything."""


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
        if config.kv_residency == "mosaickv":
            raise ValueError("kv_residency mosaickv is not estimated: bytes do not bind it")
        self._sizes = sizes
        self._gpu = gpu
        self._config = config
        self._dense_layers = dense_layers

    def dense(self, batch: int, context: int, gpus: int = 1, kv_bytes: int = 2) -> float:
        """Seconds of a step of plain SGLang, tensor parallel over so many GPUs."""
        sizes = self._sizes
        return (
            sizes.step_bytes / gpus / self._gpu.bandwidth
            + sizes.layers * self._attention(batch * context, kv_bytes) / gpus
            + sizes.layers * _LAYER_SECONDS
        )

    def cache_rank(self, batch: int, context: int) -> Estimate:
        """A step in which all requests are sparse."""
        sizes, config = self._sizes, self._config
        attended = config.sink_tokens + config.sparse_budget + config.recent_tokens + 1
        sparse_layers = sizes.layers - self._dense_layers
        inference = self.dense(batch, min(attended, context)) + self._dense_layers * (
            self._attention(batch * max(0, context - attended), 2)
        )
        rows = batch * sizes.kv_heads
        scores = rows * context
        # Logits are written by each query head, and read for the scores of all heads of a group,
        # unless what heads are compared by is known before.
        known = config.score_normalizer == "attended"
        heads = 0 if known else _next_power_of_two(sizes.query_heads // sizes.kv_heads)
        scored = self._scored_bytes() + _LOGIT_BYTES * (heads + 1)
        layer = (
            scores * scored / self._gpu.bandwidth
            + sum(_at(_SELECT_SECONDS, scores))
            + sum(_at(_GATHER_SECONDS, rows))
            + (rows * _NORMALIZER_SECONDS if known else 0.0)
        )
        if config.query_predictor == "forecast":
            projection = 2 * sizes.hidden_size * sizes.query_heads * sizes.head_dim
            layer += projection / (self._gpu.bandwidth * _FORECAST_SHARE)
        groups = -(-sparse_layers // config.layers_per_group)
        return Estimate(inference, sparse_layers * layer + groups * _GROUP_SECONDS)

    def largest_hidden_batch(self, context: int) -> int:
        """The most requests of such a length for which the cache rank hides behind the model."""
        return _last(lambda batch: self.cache_rank(batch, context).is_hidden)

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

    def batches_won(self, context: int, gpus: int) -> range:
        """The batches whose step is shorter than with tensor parallelism and an FP8 cache.

        From the least one to the last before one that is not; empty if there is none.
        """

        def is_longer(batch: int) -> bool:
            return self.cache_rank(batch, context).step >= self.dense(batch, context, gpus, 1)

        first = 1 + _last(is_longer)
        return range(first, 1 + _last(lambda batch: not is_longer(batch), first))

    def summary(
        self, context: int = 32768, gpus: int = 2, memory_fraction: float | None = None
    ) -> str:
        """Say in a line up to what the cache rank hides, and from what on it pays.

        Nothing is said of more requests than it holds in such a share of its GPU.
        """
        held = min(_MOST_REQUESTS, self.cache_rank_tokens(memory_fraction) // context)
        hidden = min(held, self.largest_hidden_batch(context))
        won = self.batches_won(context, gpus)
        gpu = self._gpu.name if self._gpu.measured else f"{self._gpu.name}, by its data sheet"
        than = f"than of {gpus} tensor-parallel GPUs with an FP8 cache"
        if won.start > held:
            pays = f"never shorter {than}"
        elif won[-1] >= held:
            pays = f"shorter {than} from {won.start} on"
        else:
            pays = f"shorter {than} from {won.start} to {won[-1]} requests"
        return (
            f"estimates ({gpu}, {context:,} tokens a request; python -m scripts.plan has more): "
            f"hidden behind the model up to {hidden} requests, and a step is {pays}"
        )

    def _attention(self, tokens: int, kv_bytes: int) -> float:
        """Seconds in which one layer reads K and V of so many tokens."""
        share = self._gpu.fp8_kv_share if kv_bytes == 1 else 1.0
        return tokens * self._sizes.kv_elements * kv_bytes / (self._gpu.bandwidth * share)

    def _scored_bytes(self) -> float:
        """What a score reads of a key, in bytes."""
        config = self._config
        options = config.kv_residency_options
        bits: float
        if config.score_keys == "sketch":
            bits = config.sketch_bits
        elif config.kv_residency == "bf16":
            bits = 16
        elif config.kv_residency == "lynx":
            # It reads fewer: to decode logarithms takes as long as to read so many.
            bits = 11 if options.get("reading") == "anchor" else 16
        elif config.kv_residency == "hack":
            bits = float(options.get("bits", 4)) + 0.5
        else:
            bits = float(options.get("reading", 4)) + 0.25
        return bits * self._sizes.head_dim / 8


def _next_power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _at(line: tuple[float, float], x: float) -> tuple[float, float]:
    return line[0], line[1] * x


def _last(holds: Callable[[int], bool], first: int = 1) -> int:
    """The number up to which a condition holds, from the first on; the one before if never."""
    numbers = range(first, _MOST_REQUESTS + 1)
    return next((number - 1 for number in numbers if not holds(number)), _MOST_REQUESTS)

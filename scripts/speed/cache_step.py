"""The cache rank's step alone: no engine and no channels, so one GPU and seconds suffice."""

from __future__ import annotations

from functools import partial

import torch

from cache_rank.config import CacheRankConfig
from cache_rank.measure.timeline import Timeline
from cache_rank.measure.timing import device_seconds
from cache_rank.messages import MessageBuffers
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Row, basis_shape, bulk_shape, down_sizes, projection_shape, up_sizes
from cache_rank.residency import bytes_per_token, fixed_bytes
from cache_rank.selector import Selector

LOADED_TOKENS = 4096
DRIFT = 0.1
"""Each step adds noise of so much of their standard deviation to queries, keys and values."""


def measure_cache_step(
    config: CacheRankConfig, tokens: int, steps: int, device: torch.device
) -> list[float]:
    """Seconds of steps over `config.max_rows` sequences of so many tokens, whose slots are full.

    Queries, keys and values are random numbers that drift.
    """
    rows, model = config.max_rows, config.model
    fill = -(-config.sparse_budget // config.max_swap_tokens)
    pages = rows * -(-(tokens + fill + steps) // PAGE_TOKENS)
    page_bytes = PAGE_TOKENS * bytes_per_token(config)
    selector = Selector(config, device, pages * page_bytes + fixed_bytes(config))
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=model.torch_dtype)

    if config.score_keys == "sketch":
        heads, elements, width = basis_shape(config)
        basis = torch.eye(elements, width, device=device)  # keys are independent, around 0
        for layer in range(model.layers):
            selector.load_basis(layer, basis.expand(heads, elements, width))
    for sequence_id in range(1, rows + 1):
        sequence = selector.begin(sequence_id)
        for start in range(0, tokens, LOADED_TOKENS):
            count = min(LOADED_TOKENS, tokens - start)
            selector.load(sequence, random(*bulk_shape(config, count)))
    if config.forecasts:
        for layer in range(model.layers):
            projection = random(*projection_shape(config)) / model.hidden_size**0.5
            selector.load_projection(layer, projection)
    current = [random(size // model.torch_dtype.itemsize) for size in up_sizes(config, rows)]
    answers = [
        torch.zeros(size, dtype=torch.uint8, device=device) for size in down_sizes(config, rows)
    ]
    buffers = MessageBuffers(config, [tensor.view(torch.uint8) for tensor in current], answers)
    messages = buffers.of(rows)
    timeline = Timeline("", device)

    def step(number: int) -> None:
        announced = [Row(sequence_id, tokens - 1 + number) for sequence_id in range(1, rows + 1)]
        step = selector.begin_step(number, announced)
        for layer_message, up in zip(config.layer_messages, messages.up, strict=True):
            selector.serve(step, layer_message, up, messages.answer_of(layer_message), timeline)
        selector.end_step(step)

    seconds = []
    for number in range(1, 1 + fill + steps):
        for tensor in current:
            tensor.add_(DRIFT * random(*tensor.shape))
        seconds.append(device_seconds(partial(step, number), device))
    return seconds[fill:]

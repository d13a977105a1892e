"""A cache rank serves a sequence of its own before it opens, so that no request waits.

On a GPU the first launch of every kernel compiles or loads it, and memory is taken. On a CPU there
is nothing to gain beyond the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from cache_rank import residency
from cache_rank.channels.link import Link
from cache_rank.messages import MessageBuffers
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import NO_SEQUENCE, AttendedMessage, Row, bulk_shape
from cache_rank.residency.encoding import shipment_bytes
from cache_rank.selector import Selector

WARM_UP_TOKENS = 768
"""A sequence of so many tokens has used all kernels of every format, but for those of its steps.

`mosaickv` needs most: 256 open a sequence, and later ones are compressed by what they were.
"""


def warm_up(selector: Selector, messages: MessageBuffers, link: Link, device: torch.device) -> None:
    """Serve a sequence until its slots are full, and end it."""
    config, on_gpu = selector.config, device.type == "cuda"
    tokens = config.sink_tokens + config.recent_tokens + config.sparse_budget
    tokens = max(tokens, WARM_UP_TOKENS) if on_gpu else 1
    tokens = min(tokens, selector.capacity_tokens) or 1
    sequence = selector.begin(NO_SEQUENCE)
    if tokens > PAGE_TOKENS and residency.takes_codes(config):
        size = shipment_bytes(config, PAGE_TOKENS)
        packed = torch.zeros(size, dtype=torch.uint8, device=device)
        selector.load_pages(sequence, PAGE_TOKENS, packed)
    shipment = torch.zeros(
        bulk_shape(config, tokens - sequence.tokens),
        dtype=config.model.torch_dtype,
        device=device,
    )
    selector.load(sequence, shipment)
    # Steps of drafts do not add their token.
    wanted = config.slots_wanted_after(tokens - 1 if config.draft_steps else tokens)
    queries = config.query_window + 1 if on_gpu else 1
    while sequence.filled < wanted or sequence.queries < queries:
        rows = [Row(sequence.sequence_id, max(sequence.tokens, sequence.stepped))]
        _step(selector, messages, rows, refused=())
    if config.verified_tokens:
        _attend(selector, link, device, config.max_rows if on_gpu else 1)
    if on_gpu:  # forecasts of many rows have a kernel of their own
        rows = [Row(NO_SEQUENCE, 0)] * config.max_rows
        _step(selector, messages, rows, refused=range(config.max_rows))
    selector.end(NO_SEQUENCE)
    if on_gpu:
        torch.cuda.synchronize(device)


def _attend(selector: Selector, link: Link, device: torch.device, most: int) -> None:
    """Attend for every number of rows: kernels depend on it, not only on its power of two."""
    config = selector.config
    with link.in_background():
        if device.type == "cuda":
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for rows in range(1, most + 1):
            attended = selector.attended([Row(NO_SEQUENCE, 0)] * rows)
            for width in (1, config.verified_tokens):
                answer = AttendedMessage(config, rows, width, device)
                selector.attend(attended, 0, torch.zeros_like(answer.outputs), answer)


def _step(
    selector: Selector, messages: MessageBuffers, rows: Sequence[Row], refused: Collection[int]
) -> None:
    step, of_rows = selector.begin_step(0, rows, refused), messages.of(len(rows))
    for layer_message, up in zip(selector.config.layer_messages, of_rows.up, strict=True):
        selector.serve(step, layer_message, up, of_rows.answer_of(layer_message))

"""A selector, driven as the process drives it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from modelled_request import Computed, Request, fill_up
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.select.reference import EMPTY
from cache_rank.messages import MessageBuffers
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import (
    DownMessage,
    Row,
    basis_shape,
    down_sizes,
    projection_shape,
    up_sizes,
)
from cache_rank.resident_sequence import ResidentSequence
from cache_rank.selector import Selector

CPU = torch.device("cpu")
MAX_PROMPT = 1 << 20


class Served:
    """A selector, and messages that stay where they are, as the process's do."""

    def __init__(
        self,
        config: CacheRankConfig,
        pages: int = 12,
        device: torch.device = CPU,
        host_pages: int = 0,
    ) -> None:
        self.config = config
        page = PAGE_TOKENS * residency.bytes_per_token(config)
        memory = residency.fixed_bytes(config) + pages * page
        self.selector = Selector(config, device, memory, host_pages * page)
        self.steps = 0
        self._device = device
        ups, answers = (
            [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
            for sizes in (up_sizes(config, config.max_rows), down_sizes(config, config.max_rows))
        )
        self.messages = MessageBuffers(config, ups, answers)

    def arrive(self, sequence_id: int, prompt: int) -> Request:
        request = Request(self.config, sequence_id, prompt)
        self.ship(self.selector.begin(sequence_id), request.prompt)
        return request

    def ship(self, sequence: ResidentSequence, prompt: Tensor, chunk: int = MAX_PROMPT) -> None:
        """What is missing of a prompt, (2, layers, n, Hkv, D), in chunks."""
        for start in range(sequence.tokens, prompt.shape[2], chunk):
            shipment = prompt[:, :, start : start + chunk].contiguous()
            self.selector.load(sequence, shipment.to(self._device))
        assert sequence.tokens == prompt.shape[2]

    def exchange(
        self,
        rows: Sequence[Row],
        tensors: Sequence[Computed],
        refused: Collection[int] = (),
    ) -> list[DownMessage]:
        """One step; the answers hold until the next. `tensors` are as of `Request.compute`."""
        config, selector, messages = self.config, self.selector, self.messages.of(len(rows))
        self.steps += 1
        step = selector.begin_step(self.steps, rows, refused)
        for layer_message, up in zip(config.layer_messages, messages.up, strict=True):
            fill_up(up, config, layer_message, tensors)
            if (down := messages.answer_of(layer_message)) is not None:
                down.buffer.fill_(1)
            selector.serve(step, layer_message, up, down)
        selector.end_step(step)
        return messages.down

    def decode(self, requests: Sequence[Request]) -> None:
        """One step of some requests, whose answers must be those of the reference."""
        tensors = [request.compute() for request in requests]
        rows = [request.row for request in requests]
        answers = self.exchange(rows, tensors)
        for index, (request, computed) in enumerate(zip(requests, tensors, strict=True)):
            request.choose(*computed)
            self.check(request, index, answers)

    def check(self, request: Request, index: int, answers: Sequence[DownMessage]) -> None:
        """A row's answers, too, are those of the reference, which has chosen already."""
        request.check_answers(self.steps, index, answers)
        self.check_slots(request)

    def check_slots(self, request: Request) -> None:
        """What the selector holds is what the reference has chosen."""
        sequence = self.selector.sequences[request.sequence_id]
        for layers in self.config.groups:
            chosen = self.selector.slot_map(sequence, layers).tolist()
            assert chosen == [
                [[EMPTY if token is None else token for token in head] for head in layer]
                for layer in request.reference.slots[layers.start : layers.stop]
            ]

    def end(self, *requests: Request) -> None:
        for request in requests:
            assert self.selector.end(request.sequence_id)


def load_projections(served: Served, first: int, seed: int = 0) -> dict[int, Tensor]:
    """Random weights for forecasts, of each layer from the first one on."""
    config, projections = served.config, {}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(first, config.model.layers):
        projection = torch.randn(projection_shape(config), generator=generator)
        projections[layer] = projection.to(config.model.torch_dtype)
        served.selector.load_projection(layer, projections[layer])
    return projections


def load_bases(served: Served) -> dict[int, Tensor]:
    """Random bases for sketches of heads of 32 elements, of each layer."""
    config, bases = served.config, {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(config.model.layers):
        bases[layer] = 0.1 * torch.randn(basis_shape(config), generator=generator)
        bases[layer][:, :-1] += 2 * torch.eye(32)
        served.selector.load_basis(layer, bases[layer])
    return bases

"""Prompts are loaded beside the steps: on one GPU, what a late load may write into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lone_link import LoneLink
from modelled_request import Request, pack_up
from small_models import small_config
from torch import Tensor

from cache_rank import rank
from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import ModelShape
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Load, Open, Row, Step

MODEL = ModelShape(3, query_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", scale=64**-0.5)
MEMORY_BYTES = 1 << 24
PROMPT = PAGE_TOKENS - 8
LATE_CYCLES = 2_000_000_000
"""About a second, of which the host needs a small part to queue a step."""


class Driven:
    """A cache rank on a GPU, and the inference rank's side of its link."""

    def __init__(self) -> None:
        self.config = small_config(MODEL)
        self.link: Any = LoneLink(self.config)
        self.rank = rank.CacheRank(Open(self.config, {}), self.link, torch.device("cuda"))
        self._steps = 0

    def put_token(self, request: Request) -> Tensor:
        """Put a request's next token on the wire; its K and V, (2, layers, Hkv, D)."""
        computed = request.compute()
        for layer_message in self.config.layer_messages:
            self.link.up.put(pack_up(self.config, layer_message, [computed]).buffer)
        return torch.stack((computed.keys, computed.values))

    def step(self, request: Request) -> None:
        self._steps += 1
        rows = [Row(request.sequence_id, request.position)]
        assert self.rank.step(Step(self._steps, rows)) is None
        request.position += 1

    def load(self, request: Request) -> None:
        self.rank.handle(Load(request.sequence_id, 0, request.prompt.shape[2]))

    def pages_of(self, request: Request) -> list[int]:
        return list(self.rank.selector.sequences[request.sequence_id].pages)

    def held(self, request: Request, first: int) -> Tensor:
        """K and V of a request's tokens from `first` on, (2, layers, Hkv, n, D)."""
        selector = self.rank.selector
        sequence = selector.sequences[request.sequence_id]
        positions = torch.arange(first, sequence.tokens, device="cuda")
        positions = positions.expand(MODEL.layers, MODEL.kv_heads, -1)
        pages, newest = torch.tensor(sequence.pages, dtype=torch.int32), sequence.tokens - 1
        rows = BatchMetadata.of_one(pages, sequence.slot, newest, torch.device("cuda"))
        return torch.stack(selector._residency.read(rows, range(MODEL.layers), positions)).cpu()


@pytest.mark.gpu
def test_a_late_load_of_an_ended_sequence_leaves_the_next_owner_of_its_pages_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "memory_for_tokens", lambda *of: MEMORY_BYTES)
    driven = Driven()
    owner, ended = (Request(driven.config, sequence_id, PROMPT) for sequence_id in (1, 2))
    bulk = driven.link.bulk
    bulk.put(owner.prompt)
    bulk.put(ended.prompt)
    driven.load(owner)
    written = []
    for _ in range(PAGE_TOKENS - PROMPT):  # its page is full then, and every kernel compiled
        written.append(driven.put_token(owner))
        driven.step(owner)
    written.append(driven.put_token(owner))
    torch.cuda.synchronize()

    bulk.late_cycles = LATE_CYCLES
    driven.load(ended)
    freed = driven.pages_of(ended)
    assert driven.rank.end([ended.sequence_id]) is None
    driven.step(owner)
    assert not bulk.stream.query(), "the load was not late"

    assert driven.pages_of(owner)[1:] == freed
    torch.cuda.synchronize()
    assert torch.equal(driven.held(owner, PROMPT), torch.stack(written, dim=3))

"""Steps that draft bring queries alone, and may begin again; what is verified is shipped."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from modelled_request import Request, assert_refused
from served_selector import Served, load_projections
from small_models import FORECAST, GQA, small_config, with_rotary
from torch import Tensor
from wired_rank import InferenceRank

from cache_rank.config import CacheRankConfig
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Row
from cache_rank.residency import FORMATS


class Drafting(Request):
    """A request whose steps draft: its reference holds what was shipped."""

    def __init__(self, config: CacheRankConfig, sequence_id: int, prompt: int) -> None:
        super().__init__(config, sequence_id, prompt)
        self.held = prompt

    def choose(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> None:
        config, reference, newest = self.config, self.reference, self.held - 1
        for message in config.layer_messages:
            for layer in () if message.kv_of is None else config.groups[message.kv_of]:
                window = [queries[layer].float(), *reference.queries[layer]]
                reference.queries[layer] = window[: config.query_window + 1]
            group = message.selects_for
            for layer in () if group is None else config.groups[group]:
                if message.same_step or layer in reference.projections:
                    position = self.position + (not message.same_step)
                    predicted = reference.forecast(layer, hidden[message.hidden_of], position)
                else:
                    predicted = reference.predict(layer)
                reference._choose(layer, predicted, newest)
        self.filled = config.filled_after(newest, self.filled)
        self.fresh_filled = config.filled_after(newest, self.fresh_filled)
        self.position += 1

    def verify(self, tokens: int) -> Tensor:
        """So many tokens stand, and the next round begins behind them; what is to be shipped."""
        model, reference = self.config.model, self.reference
        shipment = self._random(2, model.layers, tokens, model.kv_heads, model.head_dim)
        for held, new in zip((reference.keys, reference.values), shipment, strict=True):
            held[:] = [
                torch.cat((one, two.transpose(0, 1)), dim=1)
                for one, two in zip(held, new, strict=True)
            ]
        self.held += tokens
        back = self.position - self.held
        reference.queries = [[] if back < 0 else part[back:] for part in reference.queries]
        self.position = self.held
        return shipment


def drafting(served: Served, sequence_id: int, prompt: int) -> Drafting:
    request = Drafting(served.config, sequence_id, prompt)
    served.ship(served.selector.begin(sequence_id), request.prompt)
    return request


ROUNDS = ([4, 1], [1, 4], [2, 3], [4, 4], [1, 1], [3, 2])
"""Of each request, how many tokens stand of a round of three drafts."""


@pytest.mark.parametrize(
    ("predictor", "kv_residency"),
    [("spade", "bf16"), ("forecast", "bf16"), *(("last", name) for name in FORMATS)],
)
def test_drafts_are_selected_for_among_what_is_verified(predictor: str, kv_residency: str) -> None:
    """The second request comes to another page and, held as codes, to another group of them."""
    is_exact = kv_residency == "bf16"
    model = FORECAST["gqa"] if predictor == "forecast" else with_rotary(GQA)
    config = small_config(
        model,
        query_predictor=predictor,
        layers_per_group=1,
        draft_steps=3,
        checksum=is_exact,
        kv_residency=kv_residency,
    )
    served = Served(config)
    projections = load_projections(served, 2) if predictor == "forecast" else {}
    requests = [drafting(served, 1, 45), drafting(served, 2, PAGE_TOKENS - 8)]
    for request in requests:
        request.reference.projections = projections
    for verified in ROUNDS:
        for _ in range(config.draft_steps):
            if is_exact:
                served.decode(requests)
                continue
            tensors = [request.compute() for request in requests]
            served.exchange([request.row for request in requests], tensors)
            for request in requests:
                request.position += 1
        for request, tokens in zip(requests, verified, strict=True):
            sequence = served.selector.sequences[request.sequence_id]
            assert sequence.tokens == request.held
            served.selector.load(sequence, request.verify(tokens))
    for request in requests:
        assert_held(served, request, is_exact)


def assert_held(served: Served, request: Drafting, is_exact: bool) -> None:
    """Whatever the drafts brought, each token that is held is the one that was shipped."""
    layers = range(served.config.model.layers)
    step = served.selector.begin_step(served.steps + 1, [request.row])
    positions = torch.arange(request.held).expand(len(layers), served.config.model.kv_heads, -1)
    read = served.selector._residency.read(step.after, layers, positions)
    for held, parts in zip((request.reference.keys, request.reference.values), read, strict=True):
        error = (torch.stack(held).float() - parts.float()).abs()
        assert error.mean() <= (0 if is_exact else 0.5)
        assert error[:, :, -7:].max() == 0  # the newest are in full precision in any format


def test_drafts_beyond_those_of_a_round_are_refused() -> None:
    with closing(InferenceRank(small_config(draft_steps=3))) as rank:
        request = rank.arrive(prompt=20)
        tensors = request.compute()
        for position in (19, 23, 22, 20):
            answers = rank.exchange([Row(request.sequence_id, position)], [tensors])
            if position in (19, 23):
                assert_refused(answers, 0)
            else:
                assert answers[0].header[0, 1] == request.sequence_id
        rank.expect_refused(2)

"""Pages that several sequences have: held once, never written again, as good as one's own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from modelled_request import Computed, Request
from served_selector import Served, load_bases
from small_models import GQA, small_config
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Row
from cache_rank.resident_sequence import ResidentSequence

PROMPT = 3 * PAGE_TOKENS - 8
WANTED = 2
"""Of this prompt, so many pages are shared."""

every_format = pytest.mark.parametrize(
    "options",
    [
        {"kv_residency": "bf16"},
        {"kv_residency": "bf16", "score_keys": "sketch"},
        {"kv_residency": "lynx"},
        {"kv_residency": "quantspec"},
        {"kv_residency": "quantspec", "score_keys": "sketch"},
        {"kv_residency": "hack"},
    ],
    ids=lambda options: "-".join(options.values()),
)


def config_with(**options: Any) -> CacheRankConfig:
    model = msgspec.structs.replace(GQA, dtype="float32", head_dim=32)
    return small_config(model, **options)


def served_with(options: dict[str, Any], pages: int = 40, host_pages: int = 0) -> Served:
    served = Served(config_with(**options), pages, host_pages=host_pages)
    if "score_keys" in options:
        load_bases(served)
    return served


def read(served: Served, name: int) -> Tensor:
    """A page as the inference rank decodes what comes back."""
    config = msgspec.structs.replace(served.config, max_rows=1, score_keys="resident")
    pages = residency.create(config, 1, torch.device("cpu"))
    packed = served.selector.pack_named(name)
    assert packed.shape == (pages.packed_bytes,)
    pages.unpack_page(packed, 0)
    return torch.stack(pages.read_first_page())


def step(served: Served, sequence: ResidentSequence, computed: Computed) -> list[Tensor]:
    """One decode step; the answers to its messages."""
    answers = served.exchange([Row(sequence.sequence_id, sequence.tokens)], [computed])
    return [part.clone() for down in answers for part in (down.slots, down.keys, down.values)]


@every_format
def test_a_sequence_on_pages_of_another_answers_as_if_they_were_its_own(
    options: dict[str, Any],
) -> None:
    served = served_with(options)
    config, selector = served.config, served.selector
    request = Request(config, 1, PROMPT)
    first, second, alone = (selector.begin(sequence_id) for sequence_id in (1, 2, 3))
    served.ship(first, request.prompt, 50)
    assert selector.may_share(first, [7, 8])
    selector.share(first, [7, 8])
    selector.adopt(second, [7, 8])
    tail = residency.shared_tail(config)
    assert tail is not None
    assert second.tokens == WANTED * PAGE_TOKENS - tail
    assert second.pages[0] == first.pages[0]
    assert (second.pages[1] == first.pages[1]) == (tail == 0)
    for sequence in (second, alone):
        served.ship(sequence, request.prompt, 50)
    # The first one goes another way: what it appends must not show in the pages.
    noise = Request(config, 9, 1)
    for _ in range(12):  # into a fourth page
        computed = request.compute()
        step(served, first, noise.compute())
        answers = step(served, second, computed)
        for ours, expected in zip(answers, step(served, alone, computed), strict=True):
            assert torch.equal(ours, expected)


@every_format
def test_pages_are_counted_once_and_stay_until_they_are_dropped(options: dict[str, Any]) -> None:
    served = served_with(options)
    config, selector = served.config, served.selector
    prompt = Request(config, 1, PROMPT).prompt
    free = selector.pages.free
    first = selector.begin(1)
    served.ship(first, prompt, 200)
    assert selector.tokens_held == PROMPT
    selector.share(first, [1, 2])
    assert selector.tokens_held == PROMPT
    assert selector.tokens_kept == 0
    copied = 1 if residency.shared_tail(config) else 0
    second = selector.begin(2)
    selector.adopt(second, [1, 2])
    served.ship(second, prompt, 200)
    assert selector.tokens_held == 2 * PROMPT - (WANTED - copied) * PAGE_TOKENS
    assert selector.pages.free == free - 2 * 3 + WANTED - copied
    selector.end(1)
    selector.end(2)
    assert selector.tokens_held == selector.tokens_kept == WANTED * PAGE_TOKENS
    assert selector.pages.free == free - WANTED
    third = selector.begin(3)
    selector.adopt(third, [1])
    selector.named.drop([1, 2])
    assert selector.pages.free == free - 1
    selector.end(3)
    assert selector.pages.free == free
    assert selector.tokens_held == selector.tokens_kept == 0


@every_format
def test_pages_that_are_still_written_cannot_be_shared(options: dict[str, Any]) -> None:
    served = served_with(options)
    selector = served.selector
    tail = residency.shared_tail(served.config)
    assert tail is not None
    request = Request(served.config, 1, PAGE_TOKENS + tail)
    sequence = selector.begin(1)
    served.ship(sequence, request.prompt[:, :, :-1], 200)
    assert not selector.may_share(sequence, [1])
    served.ship(sequence, request.prompt, 200)
    assert selector.may_share(sequence, [1])
    assert not selector.may_share(sequence, [1, 2])


def test_mosaickv_shares_nothing() -> None:
    assert residency.shared_tail(config_with(kv_residency="mosaickv")) is None


@every_format
def test_a_page_is_read_from_its_codes_whatever_else_there_is(options: dict[str, Any]) -> None:
    served = served_with(options)
    config, selector = served.config, served.selector
    first, second = (selector.begin(sequence_id) for sequence_id in (1, 2))
    prompts = [Request(config, number, PROMPT).prompt for number in (1, 2)]
    served.ship(first, prompts[0], 100)
    selector.share(first, [7, 8])
    served.ship(second, prompts[1], 100)
    selector.end(1)
    for index, name in enumerate((7, 8)):
        page = read(served, name)
        shipped = prompts[0][:, :, index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS].transpose(2, 3)
        lost = torch.linalg.vector_norm(page - shipped) / torch.linalg.vector_norm(shipped)
        assert lost < {"bf16": 1e-9, "hack": 0.2}.get(config.kv_residency, 0.03)


@every_format
def test_pages_come_back_from_the_host_as_they_were(options: dict[str, Any]) -> None:
    served = served_with(options, pages=8, host_pages=6)
    config, selector = served.config, served.selector
    prompts = [Request(config, number, PROMPT).prompt for number in range(4)]
    kept = {}
    for number, prompt in enumerate(prompts):
        sequence, names = selector.begin(number), [2 * number, 2 * number + 1]
        served.ship(sequence, prompt, 200)
        selector.share(sequence, names)
        kept |= {name: read(served, name) for name in names}
        selector.end(number)
    assert selector.pages.free == 1
    assert selector.tokens_on_host == PAGE_TOKENS
    assert selector.tokens_held == selector.tokens_kept == 8 * PAGE_TOKENS
    for name, page in kept.items():
        assert torch.equal(read(served, name), page)
    assert selector.tokens_on_host == PAGE_TOKENS  # nothing has moved
    sequence = selector.begin(5)
    selector.adopt(sequence, [0, 1])
    served.ship(sequence, prompts[0], 200)
    for name, page in kept.items():
        assert torch.equal(read(served, name), page)
    selector.end(5)
    selector.named.drop([*kept])
    assert selector.tokens_held == selector.tokens_on_host == 0
    assert selector.pages.free == 8

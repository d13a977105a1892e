"""Pages of prompts are encoded where they are computed, and travel as codes.

They are, bit for bit, what the cache rank would make of the tokens. The newest tokens of a sequence
travel as they are: a format may hold them so, see kernels/coded/reference.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.coded import encode_groups
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.rows import Shipment
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import bulk_shape
from cache_rank.residency.coded import CodedPages, CodedResidency


def coded_format(config: CacheRankConfig) -> type[CodedResidency]:
    """The format of a config for which `residency.takes_codes`."""
    held = residency.FORMATS[config.kv_residency]
    assert issubclass(held, CodedResidency)
    return held


def shipment_bytes(config: CacheRankConfig, count: int) -> int:
    """Bytes of complete pages, of `count` tokens, in a message."""
    return CodedPages(coded_format(config), config, count // PAGE_TOKENS).size


def tokens_as_codes(config: CacheRankConfig, tokens: int) -> int:
    """How many tokens are shipped as codes in no more bytes than so many as they are.

    They fill pages. 0 where no codes are taken, or pages would hold fewer tokens.
    """
    if not residency.takes_codes(config):
        return 0
    page = shipment_bytes(config, PAGE_TOKENS)
    coded = tokens * config.model.bytes_per_token // page * PAGE_TOKENS
    return coded if coded >= tokens else 0


class PageEncoder:
    """Encodes pages of one sequence at a time.

    Attributes:
        most: at most so many tokens.
    """

    def __init__(self, config: CacheRankConfig, most: int, device: torch.device) -> None:
        """Take memory for so many tokens, a page or more; see `residency.takes_codes`."""
        self.most = most
        self._config, self._held = config, coded_format(config)
        self._layout = functools.cache(functools.partial(CodedPages, self._held, config))
        self._codecs = self._held.codecs(config)
        model = config.model
        size = math.prod(bulk_shape(config, most))
        self._memory = torch.empty(size, dtype=model.torch_dtype, device=device)
        # Its length says that no complete group stays in full precision; none is read from it.
        ring = (1, model.layers, model.kv_heads, self._held.group_tokens, model.head_dim)
        self._ring = self._memory[: math.prod(ring)].view(ring)
        self._pages = torch.arange(most // PAGE_TOKENS, dtype=torch.int32)

    def size(self, count: int) -> int:
        """Bytes of a message of so many tokens."""
        return self._layout(count // PAGE_TOKENS).size

    def room(self, count: int) -> Tensor:
        """Where the tokens of complete pages are put to be encoded, (2, layers, count, Hkv, D)."""
        shape = bulk_shape(self._config, count)
        return self._memory[: math.prod(shape)].view(shape)

    def pack(self, page: Sequence[Tensor], packed: Tensor) -> None:
        """Copy a page that came as codes to memory of the `size`, laid out as by `encode`.

        Args:
            page: each of `Residency.page_planes`, (layers, bytes) uint8. Of more layers than the
                cache rank holds, the last are copied.
        """
        not_finite, planes = self._layout(1).of(packed)
        not_finite.zero_()
        for plane, came in zip(sum(planes, ()), page, strict=True):
            held = plane[0].flatten(1).view(torch.uint8)
            held.copy_(came[-len(held) :])

    def encode(self, tokens: Tensor, packed: Tensor) -> None:
        """Encode what was put into `room` to memory of the `size`, uint8; see `CodedPages`."""
        config, count = self._config, tokens.shape[2]
        not_finite, planes = self._layout(count // PAGE_TOKENS).of(packed)
        not_finite.zero_()
        held = CodedTokens(
            self._codecs,
            planes,
            (self._ring, self._ring),
            not_finite,
            self._held.group_tokens,
            PAGE_TOKENS,
        )
        shipment = Shipment.of_one(tokens, self._pages[: count // PAGE_TOKENS])
        encode_groups(held, shipment.rows, range(config.model.layers), shipment)

"""Pages of packed vectors of `mosaickv`: keys, values and per-block keys (MosaicKV section 5.1).

Every entry has room for the most elements and bits that any candidate strategy may need, and there
is one for every block of the smallest size; a strategy that needs less leaves the rest unused.
"""

from __future__ import annotations

import torch
from cache_rank_kernels.mosaickv.reference import PackedVectors, bitmap_bytes
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.mosaickv_strategy import Candidates, CompressedTokens, Strategy


class PackedPages:
    """Packed vectors of all sequences, in pages of PAGE_TOKENS tokens."""

    @staticmethod
    def bytes_per_token(candidates: Candidates, model: ModelShape) -> int:
        """Of keys, values and per-block keys, all layers."""
        vector = candidates.kept * model.torch_dtype.itemsize + candidates.bitmap_bytes
        of_page = (2 * PAGE_TOKENS + candidates.page_blocks) * vector
        return -(-of_page * model.layers * model.kv_heads // PAGE_TOKENS)

    def __init__(
        self, candidates: Candidates, model: ModelShape, pages: int, device: torch.device
    ) -> None:
        self._heads = torch.arange(model.kv_heads).unsqueeze(-1)
        self._keys, self._values, self._block_keys = (
            _Vectors(candidates, model, pages, entries, device)
            for entries in (PAGE_TOKENS, PAGE_TOKENS, candidates.page_blocks)
        )

    def write(self, pages: Tensor, layer: int, first: int, tokens: CompressedTokens) -> None:
        """Write successive tokens of a layer, the first of them at position `first`.

        Args:
            pages: (pages,) int32 of the sequence.
            layer: that they are of.
            first: a multiple of their block.
            tokens: of all kv heads.
        """
        position = torch.arange(first, first + tokens.loss.shape[0])
        self._keys.write(pages, layer, self._heads, position, tokens.keys)
        self._values.write(pages, layer, self._heads, position, tokens.values)
        if (block := tokens.strategy.block) > 1:
            first_of_block = position[::block]
            self._block_keys.write(pages, layer, self._heads, first_of_block, tokens.block_keys)

    def keys(
        self, pages: Tensor, layer: int, head: Tensor, position: Tensor, strategy: Strategy
    ) -> PackedVectors:
        """Keys, of heads and positions that broadcast, both int64, to the leading dimensions."""
        return self._keys.read(pages, layer, head, position, strategy)

    def tokens(
        self, pages: Tensor, layer: int, head: Tensor, position: Tensor, strategy: Strategy
    ) -> tuple[PackedVectors, PackedVectors]:
        """Keys and values; see `keys`."""
        values = self._values.read(pages, layer, head, position, strategy)
        return self.keys(pages, layer, head, position, strategy), values

    def block_keys(
        self, pages: Tensor, layer: int, position: Tensor, strategy: Strategy
    ) -> PackedVectors:
        """Keys of the blocks that begin at (n,) int64 positions: (Hkv, n, ...)."""
        return self._block_keys.read(pages, layer, self._heads, position, strategy)


class _Vectors:
    """Packed vectors, so many entries a page."""

    def __init__(
        self,
        candidates: Candidates,
        model: ModelShape,
        pages: int,
        entries: int,
        device: torch.device,
    ) -> None:
        self._entries = entries
        shape = (pages, model.layers, model.kv_heads, entries)
        self._elements = torch.empty(
            (*shape, candidates.kept), dtype=model.torch_dtype, device=device
        )
        self._bitmap = torch.empty(
            (*shape, candidates.bitmap_bytes), dtype=torch.uint8, device=device
        )

    def write(
        self, pages: Tensor, layer: int, head: Tensor, position: Tensor, vectors: PackedVectors
    ) -> None:
        page, entry = self._place(pages, position)
        for plane, part in zip((self._elements, self._bitmap), vectors, strict=True):
            plane[..., : part.shape[-1]][page, layer, head, entry] = part

    def read(
        self, pages: Tensor, layer: int, head: Tensor, position: Tensor, strategy: Strategy
    ) -> PackedVectors:
        page, entry = self._place(pages, position)
        place = (page, layer, head, entry)
        bits = bitmap_bytes(strategy.rotations.shape[-1], strategy.group)
        return PackedVectors(
            self._elements[..., : strategy.kept][place], self._bitmap[..., :bits][place]
        )

    def _place(self, pages: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        page = pages[position // PAGE_TOKENS].to(torch.int64)
        return page, position % PAGE_TOKENS * self._entries // PAGE_TOKENS

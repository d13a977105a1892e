"""Tokens that a codec's kernels read and write, Triton: groups to encode, and gathered tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from cache_rank.kernels.wire.triton import store_tokens


class Shipped(NamedTuple):
    """Where a program finds the new tokens of a row.

    Attributes:
        tokens: (2, layers, whole, Hkv, D), or None where the ring has all tokens.
        first: which of them is the row's first.
        whole: how many there are of all rows.
    """

    tokens: Any
    first: Any
    whole: Any


class GroupSource(NamedTuple):
    """Where a program finds the tokens of the group that it encodes.

    Attributes:
        ring: (slots, layers, Hkv, ring, D), keys or values.
        shipped: the row's new tokens, see `Shipped`.
        part: 0 for keys, 1 for values.
        unit: index of (slot, layer, kv head) among those of the ring.
        first: position of the group's first token.
        start: position of the row's first new token.
        count: how many new tokens the row has.
    """

    ring: Any
    shipped: Any
    part: Any
    unit: Any
    first: Any
    start: Any
    count: Any


class GatherTarget(NamedTuple):
    """Where a program writes the tokens that it gathers, and where it finds those without codes.

    Attributes:
        out: the keys or values of the message.
        out_token: (BLOCK,) index of each token in the message.
        used: (BLOCK,) whether there is such a token.
        is_coded: (BLOCK,) whether it is held as codes.
        ring: (slots, layers, Hkv, ring, D), keys or values.
        ring_token: (BLOCK,) index of each token among those of the ring.
        largest: the largest number of the ring's dtype.
    """

    out: Any
    out_token: Any
    used: Any
    is_coded: Any
    ring: Any
    ring_token: Any
    largest: Any


@triton.jit
def coded_tokens(resident, LAYOUT: tl.constexpr):
    """How many of a sequence's tokens are held as codes."""
    if LAYOUT.unfinished:
        return resident
    else:
        FULL: tl.constexpr = LAYOUT.ring // LAYOUT.group_tokens - 1
        return tl.maximum((resident // LAYOUT.group_tokens - FULL) * LAYOUT.group_tokens, 0)


@triton.jit
def place_in_pages(pages, position, layer, head, LAYOUT: tl.constexpr, used=None):
    """Where tokens of a sequence are among those of all pages, (pages, layers, Hkv, P): int64.

    Args:
        pages: the pages of the sequence.
        position: a position or several.
        layer, head: whose keys or values.
        LAYOUT: has `layers`, `kv_heads` and `page`.
        used: which positions there are; without it all.
    """
    if used is None:
        page = tl.load(pages + position // LAYOUT.page)
    else:
        page = tl.load(pages + position // LAYOUT.page, mask=used, other=0)
    return _place_in_page(page, position, layer, head, LAYOUT)


@triton.jit
def place_ahead(pages, position, layer, head, INTERPRETED: tl.constexpr, LAYOUT: tl.constexpr):
    """As `place_in_pages`, of one position, for a loop that copies codes from there ahead.

    Were the page loaded, it would be copied ahead itself, and take a stage from the codes, which
    wait for it. An instruction is no copy. But it has no mask, and is run beyond the loop's end
    too: positions there have to be of a page as well.
    """
    index = pages + position // LAYOUT.page
    if INTERPRETED:
        page = tl.load(index)
    else:
        page = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];",
            "=r,l",
            [index.to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return _place_in_page(page, position, layer, head, LAYOUT)


@triton.jit
def _place_in_page(page, position, layer, head, LAYOUT: tl.constexpr):
    tile = (page.to(tl.int64) * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    return tile * LAYOUT.page + position % LAYOUT.page


@triton.jit
def load_group(source, dims, LAYOUT: tl.constexpr):
    """Load channels `dims` of a group as they came: (group tokens, len(dims)) float32.

    Tokens of the shipment, if there is one, are read from it, and those before them from the ring.

    Args:
        source: a `GroupSource`.
        dims: which channels.
        LAYOUT: see `Layout`.
    """
    position = source.first + tl.arange(0, LAYOUT.group_tokens)
    if LAYOUT.unfinished:
        position = tl.minimum(position, source.start + source.count - 1)
    held = source.unit * LAYOUT.ring + position % LAYOUT.ring
    held = held[:, None] * LAYOUT.head_dim + dims[None, :]
    if source.shipped.tokens is None:
        return tl.load(source.ring + held).to(tl.float32)
    else:
        is_new = (position >= source.start)[:, None]
        layer_and_head = source.unit % (LAYOUT.layers * LAYOUT.kv_heads)
        layer, head = layer_and_head // LAYOUT.kv_heads, layer_and_head % LAYOUT.kv_heads
        token = (source.part * LAYOUT.layers + layer) * source.shipped.whole + source.shipped.first
        token += position - source.start
        shipped = (token * LAYOUT.kv_heads + head)[:, None] * LAYOUT.head_dim + dims[None, :]
        old = tl.load(source.ring + held, mask=~is_new, other=0.0).to(tl.float32)
        # To the dtype of the ring and back, as if it had waited there.
        new = tl.load(source.shipped.tokens + shipped, mask=is_new, other=0.0)
        new = new.to(source.ring.dtype.element_ty)
        return tl.where(is_new, new.to(tl.float32), old)


@triton.jit
def store_gathered(target, decoded, FIRST: tl.constexpr, LAYOUT: tl.constexpr):
    """Write consecutive channels of tokens to a message: as decoded, or as they came.

    What decodes beyond the dtype's range becomes its largest number.

    Args:
        target: a `GatherTarget`.
        decoded: (BLOCK, n) float32.
        FIRST: the first of the channels, a multiple of n.
        LAYOUT: see `Layout`.
    """
    is_coded = target.is_coded[:, None]
    dims = FIRST + tl.arange(0, decoded.shape[1])
    newest = tl.load(
        target.ring + target.ring_token[:, None] * LAYOUT.head_dim + dims[None, :],
        mask=(target.used & ~target.is_coded)[:, None],
        other=0.0,
    )
    decoded = tl.clamp(decoded, -target.largest, target.largest).to(newest.dtype)
    content = tl.where(is_coded, decoded, newest)  # [BLOCK, n]
    store_tokens(target.out, target.out_token, content, target.used, LAYOUT.head_dim, FIRST)

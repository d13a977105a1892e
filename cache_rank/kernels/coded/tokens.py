"""Tokens that a codec's kernels read and write, Triton: groups to encode, and gathered tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.wire.triton import store_tokens


@triton.jit
def load_group(source, dims, LAYOUT: tl.constexpr):
    """Load channels `dims` of a group as they came: (group tokens, len(dims)) float32.

    Tokens of the shipment, if there is one, are read from it, and those before them from the ring.

    Args:
        source: ring, shipment or None, 0 for keys or 1 for values, the position of the row's first
            new token, that of the group's first token, the index of (slot, layer, kv head) among
            those of the ring, and how many new tokens the row has.
        dims: which channels.
        LAYOUT: see `Layout`.
    """
    ring, shipment, part, start, first, ring_unit, count = source
    position = first + tl.arange(0, LAYOUT.group_tokens)
    held = ring_unit * LAYOUT.ring + position % LAYOUT.ring
    held = held[:, None] * LAYOUT.head_dim + dims[None, :]
    if shipment is None:
        return tl.load(ring + held).to(tl.float32)
    else:
        is_new = (position >= start)[:, None]
        layer_and_head = ring_unit % (LAYOUT.layers * LAYOUT.kv_heads)
        layer, head = layer_and_head // LAYOUT.kv_heads, layer_and_head % LAYOUT.kv_heads
        token = (part * LAYOUT.layers + layer) * count + position - start
        shipped = (token * LAYOUT.kv_heads + head)[:, None] * LAYOUT.head_dim + dims[None, :]
        old = tl.load(ring + held, mask=~is_new, other=0.0).to(tl.float32)
        # To the dtype of the ring and back, as if it had waited there.
        new = tl.load(shipment + shipped, mask=is_new, other=0.0).to(ring.dtype.element_ty)
        return tl.where(is_new, new.to(tl.float32), old)


@triton.jit
def store_gathered(message, decoded, FIRST: tl.constexpr, LAYOUT: tl.constexpr):
    """Write consecutive channels of tokens to a message: as decoded, or as they came.

    What decodes beyond the dtype's range becomes its largest number.

    Args:
        message: the ring, the message, and for each token (BLOCK,) its index in the message,
            whether it is used, whether it is held as codes and its index among those of the ring;
            and the largest number of the ring's dtype.
        decoded: (BLOCK, n) float32.
        FIRST: the first of the channels, a multiple of n.
        LAYOUT: see `Layout`.
    """
    ring, out, target, used, is_coded, in_ring, largest = message
    dims = FIRST + tl.arange(0, decoded.shape[1])
    source = in_ring[:, None] * LAYOUT.head_dim + dims[None, :]
    newest = tl.load(ring + source, mask=(used & ~is_coded)[:, None], other=0.0)
    decoded = tl.clamp(decoded, -largest, largest).to(newest.dtype)
    content = tl.where(is_coded[:, None], decoded, newest)
    store_tokens(out, target, content, used, LAYOUT.head_dim, FIRST)

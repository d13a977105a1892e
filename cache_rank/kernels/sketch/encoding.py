"""Keys are encoded as sketches, Triton.

A program computes as many channels as one product on a multiprocessor has columns. A token that is
appended would wait for one part of its channels after the other, if a program computed them all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.rows import PagedRows, Shipment
from cache_rank.kernels.sketch.reference import Sketch, SketchShape

BLOCK_KEYS = 32
_BLOCK_CHANNELS = tl.constexpr(16)
"""A program encodes so many channels of so many keys of a head."""


def append_codes(
    keys: Tensor,
    code_pool: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    rows: PagedRows,
    first_layer: int,
) -> None:
    """See the reference. One launch; D is a power of two."""
    by_token = keys.transpose(0, 1)  # (L, R, Hkv, D)
    grid = encode_grid(by_token.shape[1], by_token.shape[0] * by_token.shape[2], shape)
    _launch(grid, by_token, code_pool, sketch, shape, rows, first_layer)


def load_codes(shipment: Shipment, code_pool: Tensor, sketch: Sketch, shape: SketchShape) -> None:
    """See the reference. One launch; D is a power of two."""
    keys = shipment.tokens[0]
    blocks, heads, parts = encode_grid(shipment.most, keys.shape[0] * keys.shape[2], shape)
    grid = (blocks * len(shipment.on_host), heads, parts)
    place = shipment.firsts, shipment.counts, blocks
    _launch(grid, keys, code_pool, sketch, shape, shipment.rows, 0, *place)


def _launch(
    grid: tuple[int, int, int],
    keys: Tensor,
    code_pool: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    rows: PagedRows,
    first_layer: int,
    firsts: Tensor | None = None,
    counts: Tensor | None = None,
    blocks: int = 1,
) -> None:
    """Encode tokens, (layers, n, Hkv, D): one a row, or of a shipment."""
    _, count, kv_heads, head_dim = keys.shape
    assert sketch.keys.shape[2] == shape.channels
    assert keys.stride(3) == 1
    assert rows.page_table.stride(1) == 1
    assert code_pool.is_contiguous()
    assert code_pool.shape[4] == shape.bytes
    _encode[grid](
        keys,
        sketch.keys,
        sketch.shift,
        code_pool,
        *rows,
        firsts,
        counts,
        first_layer,
        blocks,
        count,
        *keys.stride()[:3],
        code_pool.shape[1],
        rows.page_table.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        FINE=shape.fine,
        COARSE=shape.coarse,
        PAGE=code_pool.shape[3],
        SIZE=shape.bytes,
        BLOCK=BLOCK_KEYS,
    )


def encode_grid(count: int, heads: int, shape: SketchShape) -> tuple[int, int, int]:
    """The grid for so many keys of so many heads: blocks of keys, heads, and parts of channels."""
    channels = _BLOCK_CHANNELS.value
    parts = triton.cdiv(shape.fine, channels) + triton.cdiv(shape.coarse, channels)
    return triton.cdiv(count, BLOCK_KEYS), heads, parts


@triton.jit
def _encode_part(
    key,
    maps,
    shift,
    target,
    is_token,
    part,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a part of the bytes of channels of BITS bits.

    Args:
        key: (BLOCK, D) float32.
        maps, shift: of the first of these channels.
        target: (BLOCK,), where the first of these bytes goes.
        is_token: (BLOCK,).
        part: which.
        CHANNELS: how many there are of so many bits.
    """
    SHARE: tl.constexpr = 8 // BITS  # channels that share a byte lie CHANNELS // SHARE apart
    BYTES: tl.constexpr = _BLOCK_CHANNELS // SHARE
    column = tl.arange(0, _BLOCK_CHANNELS)
    byte, place = part * BYTES + column % BYTES, column // BYTES
    channel = place * (CHANNELS // SHARE) + byte
    is_channel = byte < CHANNELS // SHARE
    dims = tl.arange(0, HEAD_DIM)
    of_channel = tl.load(
        maps + channel[None, :] * HEAD_DIM + dims[:, None], mask=is_channel[None, :], other=0.0
    )
    below = tl.load(shift + channel, mask=is_channel, other=0.0)
    # How many whole steps keys lie above the mean: [BLOCK, channels]
    steps = tl.floor(tl.dot(key, of_channel, input_precision="ieee") - below[None, :])
    HALF: tl.constexpr = 1 << (BITS - 1)
    codes = tl.clamp(steps + HALF, 0.0, 2.0 * HALF - 1).to(tl.int32) << (BITS * place)[None, :]
    packed = tl.sum(tl.reshape(codes, (BLOCK, SHARE, BYTES)), axis=1)
    byte = part * BYTES + tl.arange(0, BYTES)
    is_byte = is_token[:, None] & (byte < CHANNELS // SHARE)[None, :]
    tl.store(target[:, None] + byte[None, :], packed.to(tl.uint8), mask=is_byte)


@triton.jit
def encode_block(
    key,
    maps,
    shift,
    target,
    is_token,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the bytes that are the program's part of a block of keys of a head; see `encode_grid`.

    Args:
        key: (BLOCK, D) float32.
        maps, shift: of the head.
        target: (BLOCK,), where the sketch of each key goes.
        is_token: (BLOCK,).
    """
    FINE_PARTS: tl.constexpr = (FINE + _BLOCK_CHANNELS - 1) // _BLOCK_CHANNELS
    part = tl.program_id(2)
    if part < FINE_PARTS:
        _encode_part(key, maps, shift, target, is_token, part, FINE, 4, HEAD_DIM, BLOCK)
    else:
        maps, shift = maps + FINE * HEAD_DIM, shift + FINE
        target, part = target + FINE // 2, part - FINE_PARTS
        _encode_part(key, maps, shift, target, is_token, part, COARSE, 2, HEAD_DIM, BLOCK)


@triton.jit(
    do_not_specialize=["first_layer", "blocks", "tokens", "pool_layers", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions", "firsts", "counts"],
)
def _encode(
    keys,
    maps,
    shift,
    codes,
    page_table,
    slots,
    positions,
    firsts,
    counts,
    first_layer,
    blocks,
    tokens,
    layer_stride,
    token_stride,
    head_stride,
    pool_layers,
    page_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program encodes a part of the channels of BLOCK keys of a head.

    Each key is one row's; with `firsts`, all are of one row, and one of its `blocks` blocks.
    """
    layer, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    if firsts is None:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_token = token < tokens
        position = tl.load(positions + token, mask=is_token, other=0)
        is_token = is_token & (tl.load(slots + token, mask=is_token, other=-1) >= 0)
        table = page_table + token.to(tl.int64) * page_stride
    else:
        row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        index = block * BLOCK + tl.arange(0, BLOCK)
        is_token = index < tl.load(counts + row)
        position, token = tl.load(positions + row) + index, tl.load(firsts + row) + index
        table = page_table + row.to(tl.int64) * page_stride + tl.zeros_like(index)
    page = tl.load(table + position // PAGE, mask=is_token, other=0).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    source = layer.to(tl.int64) * layer_stride + token.to(tl.int64) * token_stride
    source += head * head_stride
    key = tl.load(keys + source[:, None] + dims[None, :], mask=is_token[:, None], other=0.0).to(
        tl.float32
    )

    row = ((page * pool_layers + first_layer + layer) * KV_HEADS + head) * PAGE + position % PAGE
    own = ((first_layer + layer) * KV_HEADS + head).to(tl.int64) * (FINE + COARSE)
    encode_block(
        key,
        maps + own * HEAD_DIM,
        shift + own,
        codes + row * SIZE,
        is_token,
        FINE,
        COARSE,
        HEAD_DIM,
        BLOCK,
    )

"""Keys are encoded as sketches, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.sketch.reference import Sketch, SketchShape
from torch import Tensor

_BLOCK_KEYS = 32
"""A program encodes so many keys."""


def append_codes(
    keys: Tensor,
    code_pool: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
) -> None:
    """See the reference. One launch; D is a power of two."""
    by_token = keys.transpose(0, 1)  # (L, R, Hkv, D)
    _encode_tokens(
        by_token, code_pool, sketch, shape, page_table, slots, positions, first_layer, None
    )


def load_codes(
    keys: Tensor,
    code_pool: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    pages: Tensor,
    start: int,
) -> None:
    """See the reference. One launch; D is a power of two."""
    _encode_tokens(keys, code_pool, sketch, shape, pages.unsqueeze(0), None, None, 0, start)


def _encode_tokens(
    keys: Tensor,
    code_pool: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    page_table: Tensor,
    slots: Tensor | None,
    positions: Tensor | None,
    first_layer: int,
    start: int | None,
) -> None:
    """Encode tokens, (layers, n, Hkv, D): one a row of the table, or from `start` on of the one."""
    layers, count, kv_heads, head_dim = keys.shape
    channels = sketch.keys.shape[2]
    assert keys.stride(3) == 1
    assert page_table.stride(1) == 1
    assert code_pool.is_contiguous()
    assert code_pool.shape[4] == shape.bytes
    _encode[(triton.cdiv(count, _BLOCK_KEYS), layers * kv_heads)](
        keys,
        sketch.keys,
        sketch.shift,
        code_pool,
        page_table,
        page_table if slots is None else slots,
        page_table if positions is None else positions,
        first_layer,
        start or 0,
        count,
        *keys.stride()[:3],
        code_pool.shape[1],
        page_table.stride(0),
        IS_LOAD=start is not None,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        CHANNELS=channels,
        FINE=shape.fine,
        COARSE=shape.coarse,
        PAGE=code_pool.shape[3],
        SIZE=shape.bytes,
        BLOCK_FINE=max(16, triton.next_power_of_2(shape.fine // 2)),
        BLOCK_COARSE=max(16, triton.next_power_of_2(shape.coarse // 4)),
        BLOCK=_BLOCK_KEYS,
    )


@triton.jit
def _steps(key, maps, shift, channel, is_channel, HEAD_DIM: tl.constexpr):
    """How many whole steps keys, [n, D], lie above the mean in some channels: [n, channels]."""
    dims = tl.arange(0, HEAD_DIM)
    of_channel = tl.load(
        maps + channel[None, :] * HEAD_DIM + dims[:, None], mask=is_channel[None, :], other=0.0
    )
    below = tl.load(shift + channel, mask=is_channel, other=0.0)
    return tl.floor(tl.dot(key, of_channel, input_precision="ieee") - below[None, :])


@triton.jit(
    do_not_specialize=["first_layer", "start", "count", "pool_layers", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _encode(
    keys,
    maps,
    shift,
    codes,
    page_table,
    slots,
    positions,
    first_layer,
    start,
    count,
    layer_stride,
    token_stride,
    head_stride,
    pool_layers,
    page_stride,
    IS_LOAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_FINE: tl.constexpr,
    BLOCK_COARSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program encodes BLOCK keys of a head."""
    layer, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = index < count
    if IS_LOAD:
        position = start + index
        table = page_table + tl.zeros_like(index)
    else:
        position = tl.load(positions + index, mask=is_token, other=0)
        is_token = is_token & (tl.load(slots + index, mask=is_token, other=-1) >= 0)
        table = page_table + index.to(tl.int64) * page_stride
    page = tl.load(table + position // PAGE, mask=is_token, other=0).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    source = layer.to(tl.int64) * layer_stride + index.to(tl.int64) * token_stride
    source += head * head_stride
    key = tl.load(keys + source[:, None] + dims[None, :], mask=is_token[:, None], other=0.0).to(
        tl.float32
    )

    own = ((first_layer + layer) * KV_HEADS + head).to(tl.int64) * CHANNELS
    own_maps, own_shift = maps + own * HEAD_DIM, shift + own
    row = ((page * pool_layers + first_layer + layer) * KV_HEADS + head) * PAGE + position % PAGE
    target = codes + row[:, None] * SIZE

    byte = tl.arange(0, BLOCK_FINE)
    is_byte = byte < FINE // 2
    packed = tl.zeros((BLOCK, BLOCK_FINE), dtype=tl.int32)
    for half in tl.static_range(2):
        steps = _steps(key, own_maps, own_shift, half * (FINE // 2) + byte, is_byte, HEAD_DIM)
        packed |= tl.clamp(steps + 8, 0.0, 15.0).to(tl.int32) << 4 * half
    tl.store(target + byte[None, :], packed.to(tl.uint8), is_token[:, None] & is_byte[None, :])

    if COARSE > 0:
        byte = tl.arange(0, BLOCK_COARSE)
        is_byte = byte < COARSE // 4
        packed = tl.zeros((BLOCK, BLOCK_COARSE), dtype=tl.int32)
        for part in tl.static_range(4):
            channel = FINE + part * (COARSE // 4) + byte
            steps = _steps(key, own_maps, own_shift, channel, is_byte, HEAD_DIM)
            packed |= tl.clamp(steps + 2, 0.0, 3.0).to(tl.int32) << 2 * part
        at = target + FINE // 2 + byte[None, :]
        tl.store(at, packed.to(tl.uint8), is_token[:, None] & is_byte[None, :])

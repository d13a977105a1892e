"""Packing, unpacking and scoring of packed vectors, Triton.

Where an element of a packed vector belongs follows from how many bits of its bitmap are set before
its own. That count is a product with a triangular matrix of ones, on the matrix unit, exact in
float16: a prefix sum of two dimensions is what Triton 3.6 miscompiles in some layouts.

Rotations are plain products of matrices, of whole segments or of a query, and are left to torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cache_rank_kernels.mosaickv.reference import PackedVectors, bitmap_bytes, rotate
from torch import Tensor

_BLOCK_VECTORS = 32
"""Of a program; a matrix unit takes at least 16."""

_LEAST_COLUMNS = 16
"""Of a product on a matrix unit."""


def pack_vectors(rotated: Tensor, kept: int, group: int, dtype: torch.dtype) -> PackedVectors:
    """See the reference: the same bits."""
    channels = rotated.shape[-1]
    assert rotated.is_contiguous()
    assert rotated.dtype == torch.float32
    assert kept % group == 0
    assert channels % group == 0
    width = bitmap_bytes(channels, group)
    elements = torch.empty((*rotated.shape[:-1], kept), dtype=dtype, device=rotated.device)
    bitmap = torch.empty((*rotated.shape[:-1], width), dtype=torch.uint8, device=rotated.device)
    count = rotated.shape[:-1].numel()
    _pack[(triton.cdiv(count, _BLOCK_VECTORS),)](
        rotated,
        elements,
        bitmap,
        count,
        LIMIT=torch.finfo(dtype).max,
        SMALLEST_NORMAL=torch.finfo(torch.float32).tiny,
        CHANNELS=channels,
        KEPT=kept,
        GROUP=group,
        GROUPS=channels // group,
        COLUMNS=_columns(channels // group),
        BYTES=width,
        VECTORS=_BLOCK_VECTORS,
        enable_fp_fusion=False,  # groups of the same energy as in the reference
    )
    return PackedVectors(elements, bitmap)


def unpack_vectors(packed: PackedVectors, channels: int, group: int) -> Tensor:
    """See the reference: the same bits."""
    elements, bitmap = packed
    assert elements.is_contiguous()
    assert bitmap.is_contiguous()
    out = torch.empty((*elements.shape[:-1], channels), dtype=torch.float32, device=elements.device)
    count = elements.shape[:-1].numel()
    _unpack[(triton.cdiv(count, _BLOCK_VECTORS),)](
        elements,
        bitmap,
        out,
        count,
        CHANNELS=channels,
        KEPT=elements.shape[-1],
        GROUP=group,
        GROUPS=channels // group,
        COLUMNS=_columns(channels // group),
        BYTES=bitmap.shape[-1],
        VECTORS=_BLOCK_VECTORS,
    )
    return out


def score_packed(
    queries: Tensor, packed: PackedVectors, rotation: Tensor, group: int, scale: float
) -> Tensor:
    """See the reference; no vector is unpacked to memory."""
    elements, bitmap = packed
    assert elements.is_contiguous()
    assert bitmap.is_contiguous()
    *units, count, kept = elements.shape
    rotated = rotate(queries, rotation).contiguous()  # (..., G, C)
    heads, channels = rotated.shape[-2:]
    assert rotated.shape[:-2] == elements.shape[:-2]
    out = torch.empty((*units, heads, count), dtype=torch.float32, device=elements.device)
    _score[(triton.cdiv(count, _BLOCK_VECTORS), elements.shape[:-2].numel())](
        rotated,
        elements,
        bitmap,
        out,
        scale,
        count,
        HEADS=heads,
        HEAD_COLUMNS=_columns(heads),
        CHANNELS=channels,
        KEPT=kept,
        GROUP=group,
        GROUPS=channels // group,
        COLUMNS=_columns(channels // group),
        BYTES=bitmap.shape[-1],
        VECTORS=_BLOCK_VECTORS,
    )
    return out


def _columns(wanted: int) -> int:
    return max(_LEAST_COLUMNS, triton.next_power_of_2(wanted))


@triton.jit
def _set_before(bits, COLUMNS: tl.constexpr):
    """How many bits of a row, (vectors, COLUMNS) of 0 and 1, are set before each: int32."""
    index = tl.arange(0, COLUMNS)
    ones = (index[:, None] < index[None, :]).to(tl.float16)
    return tl.dot(bits.to(tl.float16), ones).to(tl.int32)


@triton.jit
def _bits_of(
    bitmap, vector, is_vector, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, BYTES: tl.constexpr
):
    """The bitmaps of vectors, (vectors,) int64 indices: (vectors, COLUMNS) int32 of 0 and 1."""
    index = tl.arange(0, COLUMNS)
    used = is_vector[:, None] & (index < GROUPS)[None, :]
    byte = tl.load(bitmap + vector[:, None] * BYTES + (index // 8)[None, :], mask=used, other=0)
    return (byte.to(tl.int32) >> (index % 8)[None, :]) & 1


@triton.jit
def _rounded_to_bfloat16(numbers):
    """Finite float32, half to even: the interpreter cuts off what a GPU rounds in a conversion."""
    bits = numbers.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _relative_energy(rotated, first, largest, used, GROUP: tl.constexpr):
    """Of groups whose first elements are at `first`, in squares of the largest of the vector."""
    part = tl.div_rn(tl.load(rotated + first, mask=used, other=0.0), largest)
    energy = part * part
    for element in tl.static_range(1, GROUP):
        part = tl.div_rn(tl.load(rotated + first + element, mask=used, other=0.0), largest)
        energy += part * part
    return energy


@triton.jit(do_not_specialize=["count"])
def _pack(
    rotated,
    elements,
    bitmap,
    count,
    LIMIT: tl.constexpr,
    SMALLEST_NORMAL: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    VECTORS: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    is_vector = vector < count
    index = tl.arange(0, COLUMNS)
    used = is_vector[:, None] & (index < GROUPS)[None, :]
    source = vector[:, None] * CHANNELS + (index * GROUP)[None, :]

    largest = tl.zeros((VECTORS,), tl.float32)
    for element in tl.static_range(GROUP):
        part = tl.load(rotated + source + element, mask=used, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
    largest = tl.where(largest >= SMALLEST_NORMAL, largest, 1.0)
    energy = _relative_energy(rotated, source, largest[:, None], used, GROUP)

    # A group's rank is how many others are ahead of it: more energy, or as much and before it.
    rank = tl.zeros((VECTORS, COLUMNS), tl.int32)
    for other in range(GROUPS):
        first = vector * CHANNELS + other * GROUP
        other_energy = _relative_energy(rotated, first, largest, is_vector, GROUP)[:, None]
        is_tied = (other_energy == energy) & (other < index)[None, :]
        rank += ((other_energy > energy) | is_tied).to(tl.int32)
    chosen = used & (rank < KEPT // GROUP)

    bits = chosen.to(tl.int32)
    place = _set_before(bits, COLUMNS)
    target = elements + vector[:, None] * KEPT + place * GROUP
    for element in tl.static_range(GROUP):
        part = tl.load(rotated + source + element, mask=used, other=0.0)
        part = tl.minimum(tl.maximum(part, -LIMIT), LIMIT)
        if elements.dtype.element_ty == tl.bfloat16:
            part = _rounded_to_bfloat16(part)
        tl.store(target + element, part.to(elements.dtype.element_ty), mask=chosen)
    weighted = tl.reshape(bits << (index % 8)[None, :], (VECTORS, COLUMNS // 8, 8))
    byte = tl.arange(0, COLUMNS // 8)
    tl.store(
        bitmap + vector[:, None] * BYTES + byte[None, :],
        tl.sum(weighted, axis=2).to(tl.uint8),
        mask=is_vector[:, None] & (byte < BYTES)[None, :],
    )


@triton.jit(do_not_specialize=["count"])
def _unpack(
    elements,
    bitmap,
    out,
    count,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    VECTORS: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    is_vector = vector < count
    index = tl.arange(0, COLUMNS)
    bits = _bits_of(bitmap, vector, is_vector, GROUPS, COLUMNS, BYTES)
    source = elements + vector[:, None] * KEPT + _set_before(bits, COLUMNS) * GROUP
    target = out + vector[:, None] * CHANNELS + (index * GROUP)[None, :]
    used = is_vector[:, None] & (index < GROUPS)[None, :]
    for element in tl.static_range(GROUP):
        part = tl.load(source + element, mask=bits == 1, other=0.0)
        tl.store(target + element, part.to(tl.float32), mask=used)


@triton.jit(do_not_specialize=["scale", "count"])
def _score(
    rotated,
    elements,
    bitmap,
    out,
    scale,
    count,
    HEADS: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    VECTORS: tl.constexpr,
):
    unit = tl.program_id(1).to(tl.int64)
    within = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    vector, is_vector = unit * count + within, within < count
    index, head = tl.arange(0, COLUMNS), tl.arange(0, HEAD_COLUMNS)
    bits = _bits_of(bitmap, vector, is_vector, GROUPS, COLUMNS, BYTES)
    source = elements + vector[:, None] * KEPT + _set_before(bits, COLUMNS) * GROUP
    # Queries with channels as rows: (COLUMNS, HEAD_COLUMNS).
    query = rotated + (unit * HEADS + head)[None, :] * CHANNELS + (index * GROUP)[:, None]
    is_query = (index < GROUPS)[:, None] & (head < HEADS)[None, :]
    logits = tl.zeros((VECTORS, HEAD_COLUMNS), tl.float32)
    for element in tl.static_range(GROUP):
        key = tl.load(source + element, mask=bits == 1, other=0.0).to(tl.float32)
        of_query = tl.load(query + element, mask=is_query, other=0.0)
        logits = tl.dot(key, of_query, logits, input_precision="ieee")
    tl.store(
        out + (unit * HEADS + head)[None, :] * count + within[:, None],
        logits * scale,
        mask=is_vector[:, None] & (head < HEADS)[None, :],
    )

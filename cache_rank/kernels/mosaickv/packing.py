"""Vectors are packed in kernels of `mosaickv`, Triton.

Rate and element group are numbers that kernels load, not constants that they are compiled for: the
first segment that has a strategy must not wait for a compiler.

The place of an element in a packed vector is how many elements are kept before it. This count is a
product with a triangular matrix of ones on the matrix unit, which is exact in float16, because
Triton 3.6 miscompiles prefix sums of two dimensions in some layouts. `unpacking` counts bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST_GROUP = tl.constexpr(4)
"""At most this many neighbouring elements share a bit."""

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
"""The smallest float32 that is not subnormal."""

_LEAST_COLUMNS = 16
"""A product on a matrix unit has at least this many columns."""


def columns_for(channels: int) -> int:
    """How many channels a vector has in a kernel: a power of two; those beyond its own are 0."""
    return max(_LEAST_COLUMNS, int(triton.next_power_of_2(channels)))


@triton.jit
def rounded(numbers, DTYPE: tl.constexpr):
    """Round finite float32 to another dtype; the interpreter's own cuts off bits of bfloat16."""
    if DTYPE == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        numbers = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return numbers.to(DTYPE)


@triton.jit
def _set_before(bits, COLUMNS: tl.constexpr):
    """Count the ones before each entry of a row, (vectors, COLUMNS) of 0 and 1: int32."""
    index = tl.arange(0, COLUMNS)
    ones = (index[:, None] < index[None, :]).to(tl.float16)
    return tl.dot(bits.to(tl.float16), ones).to(tl.int32)


@triton.jit
def _relative_energy(rotated, first, largest, used, group):
    """The energy of groups that begin at `first`, in squares of the vector's largest element."""
    part = tl.div_rn(tl.load(rotated + first, mask=used, other=0.0), largest)
    energy = part * part
    for element in tl.static_range(1, _LARGEST_GROUP):
        is_part = used & (element < group)
        part = tl.div_rn(tl.load(rotated + first + element, mask=is_part, other=0.0), largest)
        energy += part * part
    return energy


@triton.jit
def _of_most_energy(energy, used, kept, COLUMNS: tl.constexpr):
    """Choose the elements of most energy in each vector; ties go to the first ones.

    The elements of a group all have its energy, and so are chosen together. The bound that `kept`
    elements reach is found a bit at a time: numbers that are not negative are in the order of their
    bits.

    Args:
        energy: (vectors, COLUMNS) float32, not negative.
        used: (vectors, COLUMNS), whether there is such an element.
        kept: r, a multiple of the group.

    Returns:
        (vectors, COLUMNS) int32, 1 where an element is chosen, else 0.
    """
    key = tl.where(used, energy.to(tl.int32, bitcast=True), -1)
    bound = tl.zeros((energy.shape[0],), tl.int32)
    for turn in range(31):
        higher = bound | (1 << (30 - turn))
        reached = tl.sum((key >= higher[:, None]).to(tl.int32), axis=1)
        bound = tl.where(reached >= kept, higher, bound)
    above = (key > bound[:, None]).to(tl.int32)
    tied = (key == bound[:, None]).to(tl.int32)
    missing = kept - tl.sum(above, axis=1)
    return above + tied * (_set_before(tied, COLUMNS) < missing[:, None]).to(tl.int32)


@triton.jit
def pack_rows(
    rotated,
    vector,
    targets,
    kept,
    group,
    limit,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Pack rotated vectors to the same bits as `pack_vectors` of the reference.

    Args:
        rotated: rows of COLUMNS float32, of which the first CHANNELS are the vector's.
        vector: (vectors,) int64, the row of each vector.
        targets: the elements and the bitmaps, (vectors,) int64 indices of each vector's first
            element and first byte in them, and how many bytes a bitmap has.
        kept, group: r and g.
        limit: the largest number of the elements' dtype.

    Returns:
        (vectors, COLUMNS) float32, what was stored of each channel.
    """
    # The energy of each element's group: [vectors, COLUMNS]
    elements, bitmap, first_element, first_byte, width = targets
    channel = tl.arange(0, COLUMNS)
    of_group = channel // group
    at = vector[:, None] * COLUMNS
    used = (channel < CHANNELS)[None, :]
    content = tl.load(rotated + at + channel[None, :], mask=used, other=0.0)
    largest = tl.max(tl.abs(content), axis=1)
    largest = tl.where(largest >= _SMALLEST_NORMAL, largest, 1.0)
    first = at + (of_group * group)[None, :]
    energy = _relative_energy(rotated, first, largest[:, None], used, group)

    # The chosen elements, in the order of their channels.
    bits = _of_most_energy(energy, used, kept, COLUMNS)
    chosen = bits > 0
    place = _set_before(bits, COLUMNS)
    stored = rounded(tl.clamp(content, -limit, limit), elements.dtype.element_ty)
    # No more than r are stored, even if a vector is not finite and so has no order.
    tl.store(elements + first_element[:, None] + place, stored, mask=chosen & (place < kept))
    # The bitmap, a byte at a time.
    is_first = (channel % group == 0)[None, :]
    for byte in tl.static_range((CHANNELS + 7) // 8):
        in_byte = is_first & (of_group // 8 == byte)[None, :]
        packed = tl.sum(tl.where(in_byte, bits << (of_group % 8)[None, :], 0), axis=1)
        tl.store(bitmap + first_byte + byte, packed.to(tl.uint8), byte < width)
    return tl.where(chosen, stored.to(tl.float32), 0.0)


@triton.jit
def tokens_in_pages(strategy_of, tokens, LAYOUT: tl.constexpr):
    """How many of a sequence's tokens are in the pages, from the strategies of its slot."""
    complete = tokens // LAYOUT.buffer * LAYOUT.buffer
    return tl.where(tl.load(strategy_of) >= 0, complete, 0)

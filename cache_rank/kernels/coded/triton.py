"""The launches on tokens held as codes, for every format, Triton.

The reference beside this file specifies them. What differs between formats is in the folder of
each, as a `Format`: how a group becomes codes, how codes become tokens of a message, and what the
logits of keys are. These functions are compiled into the kernels here, which know which group a
program encodes, which tokens it gathers, and what becomes of logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.attending import (
    LEAST_QUERIES,
    attend_grouped,
    attend_split,
    empty_splits,
)
from cache_rank.kernels.coded.format import Format, Layout
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.tokens import (
    GatherTarget,
    GroupSource,
    Shipped,
    coded_tokens,
    place_in_pages,
)
from cache_rank.kernels.hack.reference import HackCodec
from cache_rank.kernels.hack.triton import FORMAT as HACK
from cache_rank.kernels.lynx.reference import LynxCodec
from cache_rank.kernels.lynx.triton import FORMAT as LYNX
from cache_rank.kernels.quantspec.reference import QuantSpecCodec
from cache_rank.kernels.quantspec.triton import FORMAT as QUANTSPEC
from cache_rank.kernels.rows import PagedRows, Shipment
from cache_rank.kernels.score.reference import ScoreWorkspace
from cache_rank.kernels.score.triton import (
    CHUNK_TOKENS,
    finish_scores,
    multiplies_float32,
    score_constants,
    score_full_precision,
    score_grid,
    scratch,
    sum_up_chunk,
)
from cache_rank.kernels.wire.reference import wire_width

_FORMATS: dict[type, Format] = {HackCodec: HACK, LynxCodec: LYNX, QuantSpecCodec: QUANTSPEC}
"""What is compiled for tokens of each codec."""

_GATHERED_ELEMENTS = 2048
"""A program gathers at most this many elements of keys, and as many of values."""

_LEAST_MANY, _MOST_MANY = 64, 128
"""The matrix unit multiplies so many queries at a time with what is in shared memory.

The sums of more than the second number do not fit registers.
"""

_MOST_OF_OTHERS = 64
"""At most so many queries of a KV head at once, in a format that has no `attend_many`."""

_WIDE = 256
"""Queries of heads as wide as this are taken LEAST_QUERIES at a time.

More do not fit registers: such a kernel, of 20 queries and D = 256, accessed memory that is not its
own on an H200. So few are multiplied without instructions of a whole warp group.
"""


def encode_groups(
    tokens: CodedTokens, rows: PagedRows, layers: range, shipment: Shipment | None = None
) -> None:
    """See the reference. One launch; D is a power of two."""
    new, _, firsts, counts, _ = shipment or (None,) * 5
    most = 1 if shipment is None else shipment.most
    assert new is None or new.is_contiguous()
    of, layout = _FORMATS[type(tokens.codecs[0])], Layout.of(tokens)
    parameters = of.encoding(tokens)
    in_front = tokens.group_tokens - 1 if tokens.unfinished else 0  # tokens of the first group
    most_groups = triton.cdiv(most + in_front, tokens.group_tokens)
    # Groups of a row; keys and values of each layer and kv head; rows.
    _encode[(most_groups, len(layers) * layout.kv_heads * 2, len(rows.slots))](
        *tokens.planes,
        *tokens.rings,
        parameters.tables,
        new,
        firsts,
        counts,
        *rows,
        tokens.not_finite,
        layers.start,
        1 if new is None else new.shape[2],
        rows.page_table.stride(0),
        ENCODE=of.encode,
        KEYS_AS_VALUES=of.keys_as_values,
        LAYOUT=layout,
        CONSTANTS=parameters.constants,
        num_warps=8,
        enable_fp_fusion=False,  # the same bits as the reference
    )


def gather_codes(
    tokens: CodedTokens,
    rows: PagedRows,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    count, layers, kv_heads, capacity = entering.shape
    of, layout = _FORMATS[type(tokens.codecs[0])], Layout.of(tokens)
    parameters = of.encoding(tokens)
    assert entering.is_contiguous()
    for out in (out_keys, out_values):
        assert out.is_contiguous()
        assert out.shape == (*entering.shape, wire_width(layout.head_dim, out.dtype))
    block = min(_GATHERED_ELEMENTS // layout.head_dim, triton.next_power_of_2(capacity))
    block = max(1, block)
    _gather[(triton.cdiv(capacity, block), layers * kv_heads, count)](
        *tokens.planes,
        *tokens.rings,
        parameters.tables,
        *rows,
        entering,
        out_keys,
        out_values,
        first_layer,
        rows.page_table.stride(0),
        largest=torch.finfo(tokens.rings[0].dtype).max,
        LAYERS=layers,
        CAPACITY=capacity,
        BLOCK=block,
        GATHER=of.gather,
        LAYOUT=layout,
        CONSTANTS=parameters.constants,
        enable_fp_fusion=False,
    )


def score_codes(
    tokens: CodedTokens,
    queries: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: ScoreWorkspace,
    out: Tensor,
    rounded: bool = True,
) -> None:
    """See the reference. Two launches; D is a power of two, on a GPU of at least 64.

    Args:
        rounded: whether logits are kept in float16.
    """
    of, key_ring = _FORMATS[type(tokens.codecs[0])], tokens.rings[0]
    parameters = of.scoring(tokens, queries, out)
    launch = parameters.launch
    chunk = launch.chunks * CHUNK_TOKENS
    constants = score_constants(queries, workspace, out, chunk)
    logits, partial = scratch(workspace, rounded)
    _score[score_grid(out, chunk)](
        queries,
        tokens.planes[0],
        key_ring,
        parameters.tables,
        *rows,
        logits,
        partial,
        first_layer=first_layer,
        scale=scale,
        page_stride=rows.page_table.stride(0),
        capacity=out.shape[-1],
        **constants,
        RING_BLOCK=launch.ring_block,
        STAGES=launch.stages,
        LOGITS=of.logits,
        LAYOUT=Layout.of(tokens),
        CONSTANTS=parameters.constants,
        EXACT=multiplies_float32(key_ring),
        INTERPRETED=not key_ring.is_cuda,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    finish_scores(logits, partial, rows, constants, out)


def attend_codes(
    tokens: CodedTokens, queries: Tensor, rows: PagedRows, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See the reference. D is a power of two, on a GPU of at least 64.

    Two launches for every _MOST_MANY queries of a KV head, _MOST_OF_OTHERS in a format without
    `attend_many`, LEAST_QUERIES if heads are _WIDE.
    """
    of, layout = _FORMATS[type(tokens.codecs[0])], Layout.of(tokens)
    make_parameters = of.attending
    assert make_parameters is not None

    def attend_part(grouped: Tensor) -> tuple[Tensor, Tensor]:
        group = grouped.shape[2]
        padded, attend = max(LEAST_QUERIES, triton.next_power_of_2(group)), of.attend
        if padded > LEAST_QUERIES and of.attend_many is not None:
            padded, attend = max(padded, _LEAST_MANY), of.attend_many
        parameters = make_parameters(tokens, padded)
        launch = parameters.launch
        partial, log_sums = empty_splits(grouped, launch.programs)
        attend_split[(grouped.shape[0] * layout.kv_heads, partial.shape[3])](
            grouped,
            *tokens.planes,
            *rows,
            partial,
            log_sums,
            layer,
            rows.page_table.stride(0),
            scale * 1.4426950408889634,  # powers of two are faster than those of e
            GROUP=group,
            PADDED=padded,
            STAGES=launch.stages,
            ATTEND=attend,
            LAYOUT=layout,
            CONSTANTS=parameters.constants,
            INTERPRETED=not grouped.is_cuda,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
        return partial, log_sums

    at_once = _MOST_OF_OTHERS if of.attend_many is None else _MOST_MANY
    if layout.head_dim >= _WIDE:
        at_once = LEAST_QUERIES
    return attend_grouped(queries, layout.kv_heads, at_once, attend_part)


@triton.jit(
    do_not_specialize=["first_layer", "whole", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "starts", "firsts", "counts"],
)
def _encode(
    key_planes,
    value_planes,
    key_ring,
    value_ring,
    tables,
    shipment,
    firsts,
    counts,
    page_table,
    slots,
    starts,
    not_finite,
    first_layer,
    whole,
    page_stride,
    ENCODE: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """One program encodes one group of keys, or of values, of one row, layer and kv head."""
    # Which group, and whether the new tokens complete it.
    row = tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row)
    if shipment is None:
        count, first_new = 1, 0
    else:
        count, first_new = tl.load(counts + row), tl.load(firsts + row)
    shipped = Shipped(shipment, first_new, whole)
    unit, part = tl.program_id(1) // 2, tl.program_id(1) % 2
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    first = coded_tokens(start, LAYOUT) + tl.program_id(0) * LAYOUT.group_tokens
    if LAYOUT.unfinished:
        first = first // LAYOUT.group_tokens * LAYOUT.group_tokens
    exists = (slot >= 0) & (first < coded_tokens(start + count, LAYOUT))
    if not exists:
        return
    # Where its codes go, and where its tokens are.
    place = place_in_pages(page_table + row * page_stride, first, layer, head, LAYOUT)
    group = place // LAYOUT.group_tokens
    ring_unit = (slot * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    if KEYS_AS_VALUES:
        if part == 0:
            ring, planes = key_ring, key_planes
        else:
            ring, planes = value_ring, value_planes
        source = GroupSource(ring, shipped, part, ring_unit, first, start, count)
        finite = ENCODE(planes, group, source, tables, True, LAYOUT, CONSTANTS)
    elif part == 0:
        source = GroupSource(key_ring, shipped, 0, ring_unit, first, start, count)
        finite = ENCODE(key_planes, group, source, tables, True, LAYOUT, CONSTANTS)
    else:
        source = GroupSource(value_ring, shipped, 1, ring_unit, first, start, count)
        finite = ENCODE(value_planes, group, source, tables, False, LAYOUT, CONSTANTS)
    if finite == 0:  # see `CodedTokens.not_finite`
        UNITS: tl.constexpr = LAYOUT.layers * LAYOUT.kv_heads
        tl.atomic_max(not_finite, (1 + part * UNITS + ring_unit % UNITS).to(tl.int32))


@triton.jit(
    do_not_specialize=["first_layer", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions", "entering"],
)
def _gather(
    key_planes,
    value_planes,
    key_ring,
    value_ring,
    tables,
    page_table,
    slots,
    positions,
    entering,
    out_keys,
    out_values,
    first_layer,
    page_stride,
    largest,
    LAYERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """One program reads K and V of BLOCK entering tokens of one row, layer and kv head."""
    # Which tokens, and which of them are held as codes.
    row, unit = tl.program_id(2).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    coded = coded_tokens(tl.load(positions + row) + 1, LAYOUT)
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out_token = (row * LAYERS * LAYOUT.kv_heads + unit) * CAPACITY + entry
    position = tl.load(entering + out_token, mask=(entry < CAPACITY) & (slot >= 0), other=-1)
    used = position >= 0
    is_coded = used & (position < coded)
    # Where each token is, in the pages and in the ring.
    pages = page_table + row * page_stride
    token = place_in_pages(pages, position, layer, head, LAYOUT, is_coded)
    ring_unit = (slot * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    ring_token = ring_unit * LAYOUT.ring + position % LAYOUT.ring
    for is_values in tl.static_range(2):
        ring = value_ring if is_values else key_ring
        out = out_values if is_values else out_keys
        GATHER(
            value_planes if is_values else key_planes,
            token,
            GatherTarget(out, out_token, used, is_coded, ring, ring_token, largest),
            tables,
            is_values == 0,
            LAYOUT,
            CONSTANTS,
        )


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "capacity"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    queries,
    key_planes,
    key_ring,
    tables,
    page_table,
    slots,
    positions,
    logits,
    partial,
    first_layer,
    scale,
    page_stride,
    capacity,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LOGITS: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program scores CHUNK tokens of a unit: a row, layer and kv head."""
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if (slot >= 0) & (start < tokens):
        layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
        unit_queries = queries + unit * GROUP * HEAD_DIM
        unit_logits = logits + unit * capacity * PADDED
        stop = tl.minimum(start + CHUNK, tokens)
        coded = tl.minimum(coded_tokens(tokens, LAYOUT), stop)
        LOGITS(
            planes=key_planes,
            queries=unit_queries,
            pages=page_table + row * page_stride,
            layer=layer,
            head=head,
            start=start,
            coded_stop=coded,
            scale=scale,
            logits=unit_logits,
            tables=tables,
            GROUP=GROUP,
            PADDED=PADDED,
            STAGES=STAGES,
            INTERPRETED=INTERPRETED,
            LAYOUT=LAYOUT,
            CONSTANTS=CONSTANTS,
        )
        if coded < stop:
            score_full_precision(
                unit_queries,
                key_ring,
                slots + row,
                first=tl.maximum(coded, start),
                last=stop,
                layer=layer,
                head=head,
                scale=scale,
                pool_layers=LAYOUT.layers,
                unit_logits=unit_logits,
                KV_HEADS=KV_HEADS,
                GROUP=GROUP,
                PADDED=PADDED,
                PARTS=PARTS,
                HEAD_DIM=HEAD_DIM,
                PAGE=LAYOUT.ring,
                BLOCK=RING_BLOCK,
                IS_RING=True,
                STAGES=1,  # these are few tokens: shared memory is for the codes
                EXACT=EXACT,
            )
        share = partial + (unit * tl.cdiv(capacity, CHUNK) + chunk) * 2 * PADDED
        sum_up_chunk(start, stop, unit_logits, share, PADDED, CHUNK)

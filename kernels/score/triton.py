"""Every cached token is scored for every kv head in one pass over the keys, Triton.

A score needs the log-sum-exp over all tokens of its sequence, which is known only after the last
key has been read. Reading the keys twice would take too long, so 16 bytes of logits a token (of
four heads) are kept instead of 256 bytes of key. A unit is a row, layer and kv head. The programs
of a unit write the logits of their tokens to scratch, and the last of them to arrive turns the
unit's logits, which are still in the L2 cache, into scores.

Logits of keys that are rounded themselves are kept in float16, which rounds them by less. Beside
codes of 4 bits, 16 bytes of logits, written and read, would be a third of all memory traffic.

Every residency format scores in this way, and differs in how the logits of a block of keys are
computed. Its kernel calls `store_logits` for each block of codes, `score_full_precision` for keys
as they came, and `finish_unit`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cache_rank_kernels.score.reference import ScoreWorkspace
from torch import Tensor

CHUNK_TOKENS = 1024
"""One program scores this many tokens."""

_BLOCK = 128
"""A program multiplies this many keys at a time."""

_FINISH_BLOCK = tl.constexpr(1024)
"""The last program of a unit writes this many scores at a time.

This and the next are constants, so that no length of a sequence is compiled for.
"""

_FINISH_CHUNKS = tl.constexpr(128)
"""The last program of a unit sums up this many chunks at a time."""


def _padded_group(group: int) -> int:
    return int(triton.next_power_of_2(group))


def score_workspace(
    rows: int, layers: int, kv_heads: int, group: int, capacity: int, device: torch.device
) -> ScoreWorkspace:
    """Make scratch for `rows` rows of up to `capacity` tokens.

    One launch after another may use it on one stream.
    """
    units, padded = rows * layers * kv_heads, _padded_group(group)
    chunks = triton.cdiv(capacity, CHUNK_TOKENS)
    return ScoreWorkspace(
        logits=torch.empty((units, capacity, padded), dtype=torch.float32, device=device),
        partial=torch.empty((units, chunks, 2, padded), dtype=torch.float32, device=device),
        arrived=torch.zeros(units, dtype=torch.int32, device=device),
    )


def scratch(workspace: ScoreWorkspace, rounded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that a kernel takes; logits are float16 if they may be rounded."""
    logits = workspace.logits.view(torch.float16) if rounded else workspace.logits
    return logits, workspace.partial, workspace.arrived


def score_grid(out: Tensor) -> tuple[int, int]:
    """The grid of a launch that writes scores, (R, L, Hkv, capacity): chunks, and units."""
    rows, layers, kv_heads, capacity = out.shape
    return triton.cdiv(capacity, CHUNK_TOKENS), rows * layers * kv_heads


def score_constants(queries: Tensor, workspace: ScoreWorkspace, out: Tensor) -> dict[str, int]:
    """The constants that all kernels that score take; checks the tensors that they all take."""
    _, layers, query_heads, head_dim = queries.shape
    kv_heads, capacity = out.shape[2:]
    _, units = score_grid(out)
    padded = _padded_group(query_heads // kv_heads)
    assert queries.is_contiguous()
    assert out.is_contiguous()
    assert workspace.arrived.numel() >= units
    assert workspace.logits.numel() >= units * capacity * padded
    return {
        "LAYERS": layers,
        "KV_HEADS": kv_heads,
        "GROUP": query_heads // kv_heads,
        "PADDED": padded,
        "PARTS": max(4, 16 // padded),  # the matrix unit has at least 16 columns
        "HEAD_DIM": head_dim,
        "CHUNK": CHUNK_TOKENS,
    }


def score_step(
    queries: Tensor,
    key_pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    scale: float,
    workspace: ScoreWorkspace,
    out: Tensor,
    rounded: bool | None = None,
    block: int = _BLOCK,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """See the reference. One launch; P must be a multiple of the block.

    Args:
        rounded: whether logits are kept in float16; by default those of 8-bit keys are.
        block, warps, stages: only time depends on them.
    """
    coarse = key_pool.dtype == torch.float8_e4m3fn
    page_tokens = key_pool.shape[3]
    block = min(block, page_tokens)
    assert page_tokens % block == 0
    assert key_pool.is_contiguous()
    _score[score_grid(out)](
        queries,
        key_pool,
        page_table,
        slots,
        positions,
        *scratch(workspace, coarse if rounded is None else rounded),
        out,
        first_layer,
        scale,
        key_pool.shape[1],
        page_table.stride(0),
        out.shape[-1],
        **score_constants(queries, workspace, out),
        PAGE=page_tokens,
        BLOCK=block,
        EXACT=multiplies_float32(key_pool),
        COARSE=coarse,
        num_warps=warps,
        num_stages=stages,
    )


def multiplies_float32(keys: Tensor) -> bool:
    """Whether keys are multiplied as float32: those that are, and all in the interpreter."""
    return keys.dtype == torch.float32 or not keys.is_cuda


@triton.jit
def load_query_parts(
    queries,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Split float32 queries into sums of numbers of the keys' dtype.

    The matrix unit needs 16 columns and a group has four heads or so. Four parts a head make the
    product nearly as exact as float32 at no cost. Part p counts for STEP ** -p.

    Returns:
        (PARTS * PADDED, D) parts of the queries, scaled by a power of two; and (PARTS * PADDED,)
        factors, by which the product of each part with a key must be multiplied.
    """
    column = tl.arange(0, PARTS * PADDED)
    head = column % PADDED
    part = column // PADDED
    dims = tl.arange(0, HEAD_DIM)
    query = tl.load(
        queries + head[:, None] * HEAD_DIM + dims[None, :], mask=head[:, None] < GROUP, other=0.0
    )
    largest = tl.maximum(tl.max(tl.abs(query), axis=1), 1e-30)
    unit = tl.exp2(tl.ceil(tl.log2(largest)) - 7.0)  # the largest is at most 128 units
    rest = query / unit[:, None]
    chosen = tl.zeros_like(rest).to(DTYPE)
    weight = tl.zeros_like(unit)
    factor = 1.0
    for index in tl.static_range(4):
        rounded = rest.to(DTYPE)
        chosen = tl.where((part == index)[:, None], rounded, chosen)
        weight = tl.where(part == index, unit * factor, weight)
        rest = (rest - rounded.to(tl.float32)) * STEP
        factor = factor / STEP
    return chosen, weight


@triton.jit
def store_logits(logit, token, resident, unit_logits, PADDED: tl.constexpr):
    """Write the logits, (BLOCK, PADDED) float32, of those tokens, (BLOCK,), that are resident."""
    at = token[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    if unit_logits.dtype.element_ty == tl.float16:
        logit = tl.clamp(logit, -65504.0, 65504.0)
    tl.store(unit_logits + at, logit, mask=resident[:, None])


@triton.jit
def score_full_precision(
    unit_queries,
    keys,
    pages,
    first,
    last,
    layer,
    head,
    scale,
    pool_layers,
    unit_logits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_RING: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    COARSE: tl.constexpr,
):
    """Write the logits of tokens [first, last), whose keys are as they came, to scratch.

    Args:
        unit_queries: (GROUP, D) float32, the queries of the unit.
        keys: (pages, layers, Hkv, PAGE, D), any float dtype.
        pages: the pages of the sequence; the one page if IS_RING.
        first, last: positions; the first is a multiple of BLOCK, which divides PAGE.
        layer, head: which keys.
        scale: factor on the logits.
        pool_layers: the layers of `keys`.
        unit_logits: (capacity, PADDED), scratch of the unit.
        IS_RING: whether all tokens are in one page, position p in entry p % PAGE.
        STAGES: how many blocks are under way at once; None takes the number of the launch.
        EXACT: whether keys are multiplied as float32.
        COARSE: whether keys have 8 bits.
    """
    DTYPE: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
    # What a number of the dtype leaves out of a query, the next part makes up for.
    STEP: tl.constexpr = 16.0 if COARSE else 128.0
    parts, weight = load_query_parts(unit_queries, GROUP, PADDED, PARTS, HEAD_DIM, DTYPE, STEP)
    parts, weight = tl.trans(parts), weight * scale
    dims = tl.arange(0, HEAD_DIM)
    for block in tl.range(first, last, BLOCK, num_stages=STAGES):
        token = block + tl.arange(0, BLOCK)
        resident = token < last
        page = tl.load(pages + (0 if IS_RING else block // PAGE)).to(tl.int64)
        tile = ((page * pool_layers + layer) * KV_HEADS + head) * PAGE
        in_page = (token % PAGE)[:, None] * HEAD_DIM + dims[None, :]
        # [BLOCK, D], and its products with all parts: [BLOCK, PARTS * PADDED]
        key = tl.load(keys + tile * HEAD_DIM + in_page, mask=resident[:, None], other=0.0).to(DTYPE)
        product = tl.dot(key, parts, input_precision="ieee") * weight[None, :]
        logit = tl.sum(tl.reshape(product, (BLOCK, PARTS, PADDED)), axis=1)
        store_logits(logit, token, resident, unit_logits, PADDED)


@triton.jit
def finish_unit(
    chunk,
    tokens,
    unit_logits,
    unit_partial,
    unit_arrived,
    unit_out,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add a chunk to the log-sum-exp of its unit; the last chunk to arrive writes all scores.

    Args:
        chunk: which chunk of the unit.
        tokens: how many tokens the unit's sequence has.
        unit_logits, unit_partial, unit_arrived: scratch of the unit, see `ScoreWorkspace`.
        unit_out: (capacity,) float32, the scores of the unit.
    """
    # The chunk's share of the log-sum-exp. It is taken once for all tokens of the chunk: in every
    # block it would cost the other warps two waits.
    heads = tl.arange(0, PADDED)
    tl.debug_barrier()
    own = chunk * CHUNK + tl.arange(0, CHUNK)
    own_logits = tl.load(
        unit_logits + own[:, None] * PADDED + heads[None, :],
        mask=(own < tokens)[:, None],
        other=-float("inf"),
    ).to(tl.float32)  # [CHUNK, PADDED]
    largest = tl.max(own_logits, axis=0)
    total = tl.sum(tl.exp(own_logits - largest[None, :]), axis=0)
    tl.store(unit_partial + chunk * 2 * PADDED + heads, largest)
    tl.store(unit_partial + (chunk * 2 + 1) * PADDED + heads, total)
    tl.debug_barrier()
    chunks = tl.cdiv(tokens, CHUNK)
    if tl.atomic_add(unit_arrived, 1, sem="acq_rel") == chunks - 1:
        tl.store(unit_arrived, 0)  # for the next launch
        # The log-sum-exp of the unit, from the shares of all chunks.
        greatest = tl.full((PADDED,), -float("inf"), tl.float32)
        grand_total = tl.zeros((PADDED,), tl.float32)
        for first in range(0, chunks, _FINISH_CHUNKS):
            others = first + tl.arange(0, _FINISH_CHUNKS)
            at = others[:, None] * 2 * PADDED + heads[None, :]
            used = (others < chunks)[:, None]
            # Other multiprocessors wrote them, so they are read from the L2 cache.
            maxima = tl.load(unit_partial + at, used, -float("inf"), cache_modifier=".cg")
            totals = tl.load(unit_partial + PADDED + at, used, 0.0, cache_modifier=".cg")
            before, greatest = greatest, tl.maximum(greatest, tl.max(maxima, axis=0))
            grand_total *= tl.exp(before - greatest)
            grand_total += tl.sum(totals * tl.exp(maxima - greatest[None, :]), axis=0)
        log_sum = greatest + tl.log(grand_total)
        log_sum = tl.where(heads < GROUP, log_sum, float("inf"))
        # The scores: the largest log-probability over the heads.
        for block in range(0, tokens, _FINISH_BLOCK):
            token = block + tl.arange(0, _FINISH_BLOCK)
            logit = tl.load(
                unit_logits + token[:, None] * PADDED + heads[None, :],
                mask=(token < tokens)[:, None],
                other=0.0,
                cache_modifier=".cg",
            )  # [_FINISH_BLOCK, PADDED]
            score = tl.max(logit.to(tl.float32) - log_sum[None, :], axis=1)
            tl.store(unit_out + token, score, token < tokens)


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "capacity"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    queries,
    keys,
    page_table,
    slots,
    positions,
    logits,
    partial,
    arrived,
    out,
    first_layer,
    scale,
    pool_layers,
    page_stride,
    capacity,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    COARSE: tl.constexpr,
):
    """One program scores CHUNK tokens of a unit: a row, layer and kv head."""
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    tokens = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if tl.load(slots + row) >= 0 and start < tokens:
        unit_logits = logits + unit * capacity * PADDED
        unit_queries = queries + unit * GROUP * HEAD_DIM
        pages = page_table + row * page_stride
        stop = tl.minimum(start + CHUNK, tokens)
        layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
        score_full_precision(
            unit_queries,
            keys,
            pages,
            first=start,
            last=stop,
            layer=layer,
            head=head,
            scale=scale,
            pool_layers=pool_layers,
            unit_logits=unit_logits,
            KV_HEADS=KV_HEADS,
            GROUP=GROUP,
            PADDED=PADDED,
            PARTS=PARTS,
            HEAD_DIM=HEAD_DIM,
            PAGE=PAGE,
            BLOCK=BLOCK,
            IS_RING=False,
            STAGES=None,
            EXACT=EXACT,
            COARSE=COARSE,
        )
        finish_unit(
            chunk,
            tokens,
            unit_logits,
            partial + unit * tl.cdiv(capacity, CHUNK) * 2 * PADDED,
            arrived + unit,
            out + unit * capacity,
            GROUP,
            PADDED,
            CHUNK,
        )

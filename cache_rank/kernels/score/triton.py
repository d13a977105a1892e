"""Every cached token is scored for every kv head in one pass over the keys, Triton.

A score needs the log-sum-exp over all tokens of its sequence, which is known only after the last
key has been read. Reading the keys twice would take too long, so 16 bytes of logits a token (of
four heads) are kept instead of 256 bytes of key. A unit is a row, layer and kv head. The programs
of a unit write the logits of their tokens to scratch, and each what its chunk of tokens adds to the
log-sum-exp. A second launch turns logits into scores.

Logits of keys that are rounded themselves are kept in float16, which rounds them by less. Beside
codes of 4 bits, 16 bytes of logits, written and read, would be a third of all memory traffic.

Every residency format scores in this way, and differs in how the logits of a block of keys are
computed. Its kernel calls `store_logits` for each block of codes, `score_full_precision` for keys
as they came, and `sum_up_chunk`; behind it `finish_scores` is launched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.reference import ScoreWorkspace

CHUNK_TOKENS = 512
"""One program scores this many tokens, or a multiple of it."""

_BLOCK = 128
"""A program multiplies this many keys at a time."""

_FINISHED_LOGITS = 8192
"""A program turns this many logits into scores."""

_SUMMED_LOGITS = tl.constexpr(1024)
"""A program adds up this many logits at a time."""

_FINISH_CHUNKS = tl.constexpr(32)
"""A program adds up the shares of this many chunks at a time.

It is a constant, so that no length of a sequence is compiled for.
"""


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
    )


def scratch(workspace: ScoreWorkspace, rounded: bool) -> tuple[Tensor, Tensor]:
    """The tensors that a kernel takes; logits are float16 if they may be rounded."""
    logits = workspace.logits.view(torch.float16) if rounded else workspace.logits
    return logits, workspace.partial


def score_grid(out: Tensor, chunk: int) -> tuple[int, int]:
    """The grid for scores, (R, L, Hkv, capacity): chunks of that many tokens, and units."""
    rows, layers, kv_heads, capacity = out.shape
    return triton.cdiv(capacity, chunk), rows * layers * kv_heads


def score_constants(
    queries: Tensor, workspace: ScoreWorkspace, out: Tensor, chunk: int
) -> dict[str, int]:
    """The constants that all kernels that score take; checks the tensors that they all take."""
    _, layers, query_heads, head_dim = queries.shape
    kv_heads, capacity = out.shape[2:]
    chunks, units = score_grid(out, chunk)
    padded = _padded_group(query_heads // kv_heads)
    assert queries.is_contiguous()
    assert out.is_contiguous()
    assert workspace.partial.numel() >= units * chunks * 2 * padded
    assert workspace.logits.numel() >= units * capacity * padded
    return {
        "LAYERS": layers,
        "KV_HEADS": kv_heads,
        "GROUP": query_heads // kv_heads,
        "PADDED": padded,
        "PARTS": max(4, 16 // padded),  # the matrix unit has at least 16 columns
        "HEAD_DIM": head_dim,
        "CHUNK": chunk,
    }


def finish_scores(
    logits: Tensor,
    partial: Tensor,
    rows: PagedRows,
    constants: dict[str, int],
    out: Tensor,
) -> None:
    """Turn logits into scores. One launch.

    Args:
        logits, partial: the `scratch` that has been written.
        rows: the rows of the step; tokens [0, position] of each get scores.
        constants: the `score_constants` of the launch that has written.
        out: (R, L, Hkv, capacity) float32, written in place.
    """
    tokens = _FINISHED_LOGITS // constants["PADDED"]
    _finish[score_grid(out, tokens)](
        rows.slots,
        rows.positions,
        logits,
        partial,
        out,
        out.shape[-1],
        ROW_UNITS=constants["LAYERS"] * constants["KV_HEADS"],
        GROUP=constants["GROUP"],
        PADDED=constants["PADDED"],
        CHUNK=constants["CHUNK"],
        TOKENS=tokens,
    )


def score_step(
    queries: Tensor,
    key_pool: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: ScoreWorkspace,
    out: Tensor,
    rounded: bool = False,
) -> None:
    """See the reference. Two launches; P must be a multiple of the block.

    Args:
        rounded: whether logits are kept in float16.
    """
    page_tokens = key_pool.shape[3]
    block = min(_BLOCK, page_tokens)
    assert page_tokens % block == 0
    assert key_pool.is_contiguous()
    constants = score_constants(queries, workspace, out, CHUNK_TOKENS)
    logits, partial = scratch(workspace, rounded)
    _score[score_grid(out, CHUNK_TOKENS)](
        queries,
        key_pool,
        *rows,
        logits,
        partial,
        first_layer,
        scale,
        key_pool.shape[1],
        rows.page_table.stride(0),
        out.shape[-1],
        **constants,
        PAGE=page_tokens,
        BLOCK=block,
        EXACT=multiplies_float32(key_pool),
        num_warps=4,
        num_stages=3,
    )
    finish_scores(logits, partial, rows, constants, out)


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
):
    """Split float32 queries into sums of numbers of the keys' dtype.

    The matrix unit needs 16 columns and a group has four heads or so. Four parts a head make the
    product nearly as exact as float32 at no cost. Part p counts for 128 ** -p.

    Returns:
        (PARTS * PADDED, D) parts of the queries, scaled by a power of two; and (PARTS * PADDED,)
        factors, by which the product of each part with a key must be multiplied.
    """
    # What a number of the dtype leaves out of a query, the next part makes up for.
    STEP: tl.constexpr = 128.0
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
    """
    DTYPE: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
    parts, weight = load_query_parts(unit_queries, GROUP, PADDED, PARTS, HEAD_DIM, DTYPE)
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
def sum_up_chunk(start, stop, unit_logits, share, PADDED: tl.constexpr, CHUNK: tl.constexpr):
    """Write what a chunk, whose logits the same program has written, adds to the log-sum-exp.

    It is taken once for all tokens of the chunk: in every block it would cost other warps waits.

    Args:
        start, stop: the tokens of the chunk that are resident.
        unit_logits: (capacity, PADDED), scratch of the unit.
        share: (2, PADDED) float32: the largest logit, and the sum of exponentials relative to it.
    """
    BLOCK: tl.constexpr = min(CHUNK, _SUMMED_LOGITS // PADDED)
    LOG2_E: tl.constexpr = 1.4426950408889634
    heads = tl.arange(0, PADDED)
    tl.debug_barrier()
    largest = tl.full((BLOCK, PADDED), -float("inf"), unit_logits.dtype.element_ty)
    for first in range(start, stop, BLOCK):
        token = (first + tl.arange(0, BLOCK))[:, None]
        logit = tl.load(unit_logits + token * PADDED + heads, token < stop, -float("inf"))
        largest = tl.maximum(largest, logit)
    greatest = tl.max(largest, axis=0).to(tl.float32)
    # 2^x is one instruction, and e^x would be four.
    shift = greatest * LOG2_E
    total = tl.zeros((BLOCK, PADDED), tl.float32)
    for first in range(start, stop, BLOCK):
        token = (first + tl.arange(0, BLOCK))[:, None]
        logit = tl.load(unit_logits + token * PADDED + heads, token < stop, -float("inf"))
        total += tl.exp2(logit.to(tl.float32) * LOG2_E - shift[None, :])
    tl.store(share + heads, greatest)
    tl.store(share + PADDED + heads, tl.sum(total, axis=0))


@triton.jit
def log_sum_of_chunks(
    shares, tokens, GROUP: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr
):
    """The log-sum-exp of a unit, (PADDED,) float32, from the shares of its chunks.

    See `sum_up_chunk`. It is infinite for what is no head.
    """
    heads = tl.arange(0, PADDED)
    greatest = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    chunks = tl.cdiv(tokens, CHUNK)
    for first in range(0, chunks, _FINISH_CHUNKS):
        chunk = first + tl.arange(0, _FINISH_CHUNKS)
        at = chunk[:, None] * 2 * PADDED + heads[None, :]
        used = (chunk < chunks)[:, None]
        maxima = tl.load(shares + at, used, -float("inf"))
        totals = tl.load(shares + PADDED + at, used, 0.0)
        before, greatest = greatest, tl.maximum(greatest, tl.max(maxima, axis=0))
        total *= tl.exp(before - greatest)
        total += tl.sum(totals * tl.exp(maxima - greatest[None, :]), axis=0)
    return tl.where(heads < GROUP, greatest + tl.log(total), float("inf"))


@triton.jit(
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def _finish(
    slots,
    positions,
    logits,
    partial,
    out,
    capacity,
    ROW_UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program writes the scores of TOKENS tokens of a unit."""
    unit = tl.program_id(1).to(tl.int64)
    row = unit // ROW_UNITS
    tokens = tl.load(positions + row) + 1
    start = tl.program_id(0) * TOKENS
    if (tl.load(slots + row) >= 0) & (start < tokens):
        shares = partial + unit * tl.cdiv(capacity, CHUNK) * 2 * PADDED
        log_sum = log_sum_of_chunks(shares, tokens, GROUP, PADDED, CHUNK)
        # The scores: the largest log-probability over the heads.
        heads = tl.arange(0, PADDED)
        token = start + tl.arange(0, TOKENS)
        at = (unit * capacity + token)[:, None] * PADDED + heads[None, :]
        logit = tl.load(logits + at, mask=(token < tokens)[:, None], other=0.0).to(tl.float32)
        score = tl.max(logit - log_sum[None, :], axis=1)
        tl.store(out + unit * capacity + token, score, token < tokens)


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
        )
        share = partial + (unit * tl.cdiv(capacity, CHUNK) + chunk) * 2 * PADDED
        sum_up_chunk(start, stop, unit_logits, share, PADDED, CHUNK)

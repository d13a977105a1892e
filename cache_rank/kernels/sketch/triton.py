"""A sketch of keys is scored, Triton; `encoding` makes it, and `products` multiplies it.

Where normalizers are those of attended tokens, a few programs a unit read these first, and scores
are written as they are computed. Else logits are written and read again, see kernels/score.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.triton import (
    CHUNK_TOKENS,
    finish_scores,
    score_constants,
    score_grid,
    scratch,
    store_logits,
    sum_up_chunk,
)
from cache_rank.kernels.sketch.encoding import append_codes, load_codes
from cache_rank.kernels.sketch.products import (
    columns_of_head,
    load_weights,
    logits_of,
    weigh_elements,
)
from cache_rank.kernels.sketch.reference import (
    NORMALIZER_PARTS,
    Attended,
    Sketch,
    SketchShape,
    SketchWorkspace,
)

__all__ = ["append_codes", "load_codes", "score_sketch"]


class Launch(NamedTuple):
    """How scores are spread over a GPU; only time depends on it.

    Attributes:
        block: tokens whose elements a program multiplies at a time.
        chunk: tokens that a program scores.
        warps, stages: of a program.
    """

    block: int
    chunk: int
    warps: int
    stages: int


LAUNCH_OF_ALL = Launch(256, 2 * CHUNK_TOKENS, 4, 3)
"""Where the normalizers are those of all tokens."""

LAUNCH_OF_ATTENDED = Launch(64, 1024, 1, 5)
"""Where they are those of attended tokens."""


def score_sketch(
    queries: Tensor,
    code_pool: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: SketchWorkspace,
    out: Tensor,
    attended: Attended | None = None,
) -> None:
    """See the reference. P is a power of two, 128 or more, and D is one.

    Three launches: weights, logits and scores; or, if normalizers are those of attended tokens,
    weights, these and scores.
    """
    pool_layers, kv_heads, page_tokens, size = code_pool.shape[1:]
    assert code_pool.is_contiguous()
    assert sketch.queries.shape[:3] == (pool_layers, kv_heads, 4 * size)
    launch = LAUNCH_OF_ALL if attended is None else LAUNCH_OF_ATTENDED
    block = min(launch.block, page_tokens)
    assert page_tokens % block == 0
    constants = score_constants(queries, workspace.scores, out, launch.chunk)
    chunks, units = score_grid(out, launch.chunk)
    _, weights, normalizers = workspace
    assert normalizers.numel() >= units * NORMALIZER_PARTS * 2 * constants["PADDED"]
    weigh_elements(queries, sketch, first_layer, scale, weights)
    del constants["PARTS"], constants["HEAD_DIM"]
    constants |= {
        "SIZE": size,
        "WIDTH": max(32, triton.next_power_of_2(size)),  # the matrix unit takes 32 bytes at a time
        "PAGE": page_tokens,
        "BLOCK": block,
        "COLUMNS": columns_of_head(constants["PADDED"]),
        "STAGES": launch.stages,
        "INTERPRETED": not queries.is_cuda,
        "NORMALIZER_PARTS": 0 if attended is None else NORMALIZER_PARTS,
    }
    if attended is not None:
        assert attended.chosen.is_contiguous()
        _normalize[(NORMALIZER_PARTS, units)](
            weights,
            code_pool,
            *rows,
            attended.chosen,
            normalizers,
            first_layer,
            pool_layers,
            rows.page_table.stride(0),
            attended.sinks,
            attended.recent,
            **{name: value for name, value in constants.items() if name != "CHUNK"},
            BUDGET=attended.chosen.shape[-1],
            num_warps=launch.warps,
        )
    logits, partial = scratch(workspace.scores, rounded=True)
    _score[(chunks, units)](
        weights,
        code_pool,
        *rows,
        normalizers,
        logits,
        partial,
        out,
        first_layer,
        pool_layers,
        rows.page_table.stride(0),
        out.shape[-1],
        **constants,
        num_warps=launch.warps,
    )
    if attended is None:
        finish_scores(logits, partial, rows, constants, out)


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "sinks", "recent"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _normalize(
    weights,
    codes,
    page_table,
    slots,
    positions,
    chosen,
    normalizers,
    first_layer,
    pool_layers,
    page_stride,
    sinks,
    recent,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    NORMALIZER_PARTS: tl.constexpr,
    BUDGET: tl.constexpr,
):
    """One program sums up a part of the attended tokens of a unit: a row, layer and kv head."""
    part, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    slot = tl.load(slots + row)
    if slot >= 0:
        tokens = tl.load(positions + row) + 1
        layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
        pages = page_table + row * page_stride
        in_slots = chosen + ((slot.to(tl.int64) * pool_layers + layer) * KV_HEADS + head) * BUDGET
        heads, byte = tl.arange(0, PADDED), tl.arange(0, WIDTH)
        own_weights, weight_unit = load_weights(
            weights + unit * GROUP * 4 * SIZE, GROUP, PADDED, SIZE, WIDTH, COLUMNS
        )

        # What is in the slots comes first, then the first tokens, then the newest.
        firsts = tl.minimum(sinks, tokens)
        newest = tl.minimum(recent, tokens - firsts)
        largest = tl.full((PADDED,), -float("inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        for block in tl.range(
            part * BLOCK, BUDGET + firsts + newest, NORMALIZER_PARTS * BLOCK, num_stages=STAGES
        ):
            index = block + tl.arange(0, BLOCK)
            token = tl.load(in_slots + index, mask=index < BUDGET, other=-1)
            always = index - BUDGET
            token = tl.where(always >= 0, always, token)
            token = tl.where(always >= firsts, tokens - newest + (always - firsts), token)
            is_token = (token >= 0) & (index < BUDGET + firsts + newest)
            page = tl.load(pages + token // PAGE, mask=is_token, other=0).to(tl.int64)
            tile = ((page * pool_layers + layer) * KV_HEADS + head) * PAGE + token % PAGE
            packed = tl.load(
                codes + (tile * SIZE)[:, None] + byte[None, :],
                mask=is_token[:, None] & (byte < SIZE)[None, :],
                other=0,
            )
            logit = logits_of(packed, own_weights, weight_unit, PADDED, BLOCK, COLUMNS, INTERPRETED)
            logit = tl.where(is_token[:, None], logit, -float("inf"))
            before, largest = largest, tl.maximum(largest, tl.max(logit, axis=0))
            # Until there is a token, nothing is summed up, and -inf is not subtracted from itself.
            base = tl.where(largest == -float("inf"), 0.0, largest)
            total = total * tl.exp(before - base) + tl.sum(tl.exp(logit - base[None, :]), axis=0)
        at = normalizers + (unit * NORMALIZER_PARTS + part) * 2 * PADDED + heads
        tl.store(at, largest)
        tl.store(at + PADDED, total)


@triton.jit
def _normalizer(unit_normalizers, GROUP: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    """The log-sum-exp of attended tokens, (PADDED,), from its parts; infinite for no head."""
    heads, part = tl.arange(0, PADDED), tl.arange(0, PARTS)
    at = unit_normalizers + part[:, None] * 2 * PADDED + heads[None, :]
    maxima, totals = tl.load(at), tl.load(at + PADDED)
    largest = tl.max(maxima, axis=0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(totals * tl.exp(maxima - base[None, :]), axis=0)
    log_sum = base + tl.log(tl.where(total > 0, total, 1.0))
    return tl.where(heads < GROUP, log_sum, float("inf"))


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "capacity"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    weights,
    codes,
    page_table,
    slots,
    positions,
    normalizers,
    logits,
    partial,
    out,
    first_layer,
    pool_layers,
    page_stride,
    capacity,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    NORMALIZER_PARTS: tl.constexpr,
):
    """One program scores CHUNK tokens of a unit: a row, layer and kv head."""
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    tokens = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if (tl.load(slots + row) >= 0) & (start < tokens):
        layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
        unit_logits = logits + unit * capacity * PADDED
        pages = page_table + row * page_stride
        stop = tl.minimum(start + CHUNK, tokens)

        byte = tl.arange(0, WIDTH)
        own_weights, weight_unit = load_weights(
            weights + unit * GROUP * 4 * SIZE, GROUP, PADDED, SIZE, WIDTH, COLUMNS
        )
        if NORMALIZER_PARTS > 0:
            own = normalizers + unit * NORMALIZER_PARTS * 2 * PADDED
            log_sum = _normalizer(own, GROUP, PADDED, NORMALIZER_PARTS)

        for block in tl.range(start, stop, BLOCK, num_stages=STAGES):
            token = block + tl.arange(0, BLOCK)
            page = tl.load(pages + block // PAGE).to(tl.int64)
            tile = ((page * pool_layers + layer) * KV_HEADS + head) * PAGE
            in_page = (token % PAGE)[:, None] * SIZE + byte[None, :]
            if SIZE == WIDTH:
                packed = tl.load(codes + tile * SIZE + in_page)
            else:
                packed = tl.load(
                    codes + tile * SIZE + in_page, mask=(byte < SIZE)[None, :], other=0
                )
            logit = logits_of(packed, own_weights, weight_unit, PADDED, BLOCK, COLUMNS, INTERPRETED)
            if NORMALIZER_PARTS > 0:
                score = tl.max(logit - log_sum[None, :], axis=1)
                tl.store(out + unit * capacity + token, score, mask=token < stop)
            else:
                store_logits(logit, token, token < stop, unit_logits, PADDED)
        if NORMALIZER_PARTS == 0:
            share = partial + (unit * tl.cdiv(capacity, CHUNK) + chunk) * 2 * PADDED
            sum_up_chunk(start, stop, unit_logits, share, PADDED, CHUNK)

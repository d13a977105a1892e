"""Tokens are picked by the logits of their sketches, Triton.

Many programs turn logits into keys, and write them as bit planes: a word of a plane has one bit of
the keys of 32 tokens, so that few instructions count them all. Then one program a unit, which is a
request and a KV head, finds the key of the k-th best token bit by bit, from the highest. It marks
the tokens above that key, and as many that have it as there is room for. How many are marked before
each word says where in the result its tokens go; each place then looks up its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.rounding import nearest_integers
from cache_rank.kernels.dependent import (
    dependent_launch,
    let_dependents_start,
    wait_for_kernel_ahead,
)
from cache_rank.kernels.row_sketch.reference import KEY_MOST, KEY_UNIT, TILE, RowScratch

TOKENS = 2048
"""A program of eight warps turns the logits of so many tokens at a time into keys.

A thread has those of eight tokens, which are in a byte of each plane.
"""

PROGRAMS = 1056
"""Eight on each of the 132 multiprocessors of an H100 or H200 turn logits into keys."""

FEW_WORDS = 2048
"""For fewer words of a plane a program that picks has less to do."""

_WORDS_OF_THREAD = 32
"""A thread of a program that picks has at most so many words of a plane in registers."""

_CHUNKS_AT_ONCE = tl.constexpr(64)

_KEY_MOST = tl.constexpr(KEY_MOST)
_STEPS_OF_LOG2 = tl.constexpr(0.6931471805599453 * KEY_UNIT)


def pick_by_logits(
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    budgets: Tensor,
    group: int,
    chunk: int,
    sinks: int,
    recent: int,
    scratch: RowScratch,
    out: Tensor,
) -> None:
    """Pick the tokens of all sparse requests, whose logits and sums of chunks are in scratch.

    For parameters that are not here see `select_rows` of the reference. Two launches.

    Args:
        group: query heads of a KV head.
        chunk: tokens of which there is one sum.
    """
    requests, kv_heads, width = out.shape
    units, (padded, capacity) = requests * kv_heads, scratch.logits.shape[1:]
    words = capacity // 32
    assert capacity % 128 == 0
    assert scratch.keys.shape[1:] == (8, 4 * words)
    assert scratch.marks.shape[1:] == (2, words)
    parts = min(triton.cdiv(capacity, TOKENS), max(1, PROGRAMS // units))
    _write_keys[(parts, units)](
        slots,
        lengths,
        sparse_from,
        scratch.logits,
        scratch.tops,
        scratch.sums,
        scratch.keys,
        capacity,
        words,
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=padded,
        CHUNK=chunk,
        RECENT=recent,
        TILE=TILE,
        TOKENS=TOKENS,
        num_warps=8,
        **dependent_launch(out),
    )
    all_words = triton.next_power_of_2(words)
    few_words = min(all_words, FEW_WORDS)
    places = triton.next_power_of_2(max(1, width - sinks - recent))
    warps = min(8, max(4, max(few_words, places) // 128))
    warps = min(32, max(warps, all_words // _WORDS_OF_THREAD // 32))
    _pick[(units,)](
        row_table,
        slots,
        lengths,
        sparse_from,
        budgets,
        scratch.keys.view(torch.int32),
        scratch.marks,
        out,
        words,
        row_table.stride(0),
        KV_HEADS=kv_heads,
        SINKS=sinks,
        RECENT=recent,
        WIDTH=width,
        ALWAYS=triton.next_power_of_2(sinks + recent),
        PLACES=max(places, 32 * warps),  # so that a place is that of one thread
        WORDS=all_words,
        FEW_WORDS=few_words,
        INTERPRETED=not out.is_cuda,
        num_warps=warps,
        **dependent_launch(out),
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "lengths", "sparse_from"])
def _write_keys(
    slots,
    lengths,
    sparse_from,
    logits,
    tops,
    sums,
    keys,
    capacity,
    words,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    RECENT: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some programs write the keys of a unit, in turns of TOKENS tokens."""
    let_dependents_start(DEPENDENT)
    first, unit = tl.program_id(0) * TOKENS, tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + unit // KV_HEADS).to(tl.int64)
    length = tl.load(lengths + unit // KV_HEADS).to(tl.int32)
    least = tl.load(sparse_from + slot)
    stop = length - RECENT
    wait_for_kernel_ahead(DEPENDENT)
    if first >= stop:
        return
    if length < least:
        return
    shares = sums + unit * tl.cdiv(capacity, CHUNK) * 2 * PADDED
    log_sums = _log_sums(shares, tl.cdiv(length - 1, CHUNK), PADDED)
    for start in range(first, stop, tl.num_programs(0) * TOKENS):
        # Eight tokens have a byte of each plane. Those behind the last one have any key.
        byte, in_byte = start // 8 + tl.arange(0, TOKENS // 8), tl.arange(0, 8)
        is_byte = byte // 4 * 32 < stop  # all of a word or none, so that accesses are wide
        at = unit * PADDED * capacity + byte[:, None] * 8 + in_byte[None, :]
        at_top = unit * PADDED * (capacity // TILE) + byte // (TILE // 8)
        # All is on its way before anything is waited for.
        below, top = (), ()
        for head in tl.static_range(GROUP):
            own_below = tl.load(logits + head * capacity + at, mask=is_byte[:, None], other=0)
            own_top = tl.load(tops + head * (capacity // TILE) + at_top, mask=is_byte, other=0)
            below += (own_below,)  # type: ignore[assignment]
            top += (own_top,)  # type: ignore[assignment]
        best = tl.zeros((TOKENS // 8, 8), tl.int32)
        for head in tl.static_range(GROUP):
            log_sum = tl.sum(tl.where(tl.arange(0, PADDED) == head, log_sums, 0), axis=0)
            best = tl.maximum(best, below[head].to(tl.int32) + (top[head] - log_sum)[:, None])
        key = tl.minimum(best, _KEY_MOST).to(tl.int64) << (8 * in_byte[None, :])
        planes = _transpose(tl.xor_sum(key, axis=1))
        for bit in tl.static_range(8):
            plane = keys + (unit * 8 + bit) * words * 4
            tl.store(plane + byte, (planes >> (8 * bit)).to(tl.uint8), mask=is_byte)


@triton.jit
def _log_sums(shares, chunks, PADDED: tl.constexpr):
    """The log-sum-exp of each head, in steps of keys, (PADDED,) int32.

    Args:
        shares: (chunks, 2, PADDED) float32, see `RowScratch.sums`.
        chunks: how many have tokens.
    """
    heads = tl.arange(0, PADDED)
    greatest = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    for first in range(0, chunks, _CHUNKS_AT_ONCE):
        chunk = first + tl.arange(0, _CHUNKS_AT_ONCE)
        at = chunk[:, None] * 2 * PADDED + heads[None, :]
        is_used = (chunk < chunks)[:, None]
        maxima = tl.load(shares + at, mask=is_used, other=-float("inf"))
        totals = tl.load(shares + PADDED + at, mask=is_used, other=0.0)
        before, greatest = greatest, tl.maximum(greatest, tl.max(maxima, axis=0))
        total *= tl.exp2(before - greatest)
        total += tl.sum(totals * tl.exp2(maxima - greatest[None, :]), axis=0)
    return nearest_integers((greatest + tl.log2(total)) * _STEPS_OF_LOG2).to(tl.int32)


@triton.jit
def _transpose(matrix):
    """Transpose matrices of 8 × 8 bits, int64, whose rows are bytes: blocks of 1, of 2 and of 4."""
    changed = (matrix ^ (matrix >> 7)) & 0x00AA00AA00AA00AA
    matrix ^= changed ^ (changed << 7)
    changed = (matrix ^ (matrix >> 14)) & 0x0000CCCC0000CCCC
    matrix ^= changed ^ (changed << 14)
    changed = (matrix ^ (matrix >> 28)) & 0x00000000F0F0F0F0
    return matrix ^ changed ^ (changed << 28)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["row_table", "slots", "lengths", "sparse_from", "budgets"],
)
def _pick(
    row_table,
    slots,
    lengths,
    sparse_from,
    budgets,
    planes,
    marks,
    out,
    words,
    table_stride,
    KV_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    WIDTH: tl.constexpr,
    ALWAYS: tl.constexpr,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
    FEW_WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program picks for one unit."""
    unit = tl.program_id(0).to(tl.int64)
    request = unit // KV_HEADS
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    budget = tl.load(budgets + request)
    least = tl.load(sparse_from + slot)
    wait_for_kernel_ahead(DEPENDENT)
    if length < least:
        return
    rows = row_table + slot * table_stride
    target = out + unit * WIDTH
    stop = length - RECENT
    picks = tl.minimum(budget, stop - SINKS)

    # Sinks and recent tokens, which nobody picks.
    always = tl.arange(0, ALWAYS)
    is_always = always < SINKS + RECENT
    token = tl.where(always < SINKS, always, stop + always - SINKS)
    row = tl.load(rows + token, mask=is_always)
    tl.store(target + tl.where(always < SINKS, always, picks + always), row, mask=is_always)

    target += SINKS
    place = tl.arange(0, PLACES)
    is_place = place < picks
    tl.store(target + place, tl.zeros((PLACES,), tl.int32), mask=is_place)
    tl.debug_barrier()
    unit_planes, unit_marks = planes + unit * 8 * words, marks + unit * 2 * words
    if FEW_WORDS == WORDS:
        _mark(unit_planes, words, SINKS, stop, picks, unit_marks, target, WORDS, INTERPRETED)
    elif stop <= FEW_WORDS * 32:
        _mark(unit_planes, words, SINKS, stop, picks, unit_marks, target, FEW_WORDS, INTERPRETED)
    else:
        _mark(unit_planes, words, SINKS, stop, picks, unit_marks, target, WORDS, INTERPRETED)
    tl.debug_barrier()
    word = tl.associative_scan(tl.load(target + place, mask=is_place, other=0), 0, _larger)
    marked = tl.load(unit_marks + word)
    index = place - tl.load(unit_marks + words + word)
    token = word * 32 + _bit_of_index(marked, index, INTERPRETED)
    row = tl.load(rows + token, mask=is_place)
    tl.store(target + place, row, mask=is_place)


@triton.jit
def _mark(
    planes,
    words,
    sinks,
    stop,
    wanted,
    marks,
    target,
    WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write which tokens of a unit are picked, and name each word at the place of its first token.

    Args:
        planes: (8, words) int32, those of the unit.
        words: of a plane, at most WORDS.
        sinks, stop: the first token that competes, and the first behind those.
        wanted: how many are picked.
        marks: (2, words) int32, see `RowScratch.marks`.
        target: (wanted,) int32, of zeros.
    """
    word = tl.arange(0, WORDS)
    is_word = word // 4 * 128 < stop  # all of four or none, so that accesses are wide
    # Tokens whose higher bits are above the bound's, and those whose equal them.
    above = tl.zeros((WORDS,), tl.int32)
    equal = _lowest(stop - word * 32) & ~_lowest(sinks - word * 32)
    plane = tl.load(planes + 7 * words + word, mask=is_word, other=0)
    for step in range(8):
        # The next plane is on its way while this one is counted.
        source = planes + (6 - step) * words + word
        following = tl.load(source, mask=is_word & (step < 7), other=0)
        set_in_plane = equal & plane
        count = tl.sum(_popc(set_in_plane, INTERPRETED), axis=0)
        # Whether the bound has this bit.
        is_set = count >= wanted
        above |= tl.where(is_set, 0, set_in_plane)
        equal = tl.where(is_set, set_in_plane, equal ^ set_in_plane)
        wanted -= tl.where(is_set, 0, count)
        plane = following

    equals = _popc(equal, INTERPRETED)
    counts = _popc(above, INTERPRETED).to(tl.int64) + (equals.to(tl.int64) << 32)
    before = tl.cumsum(counts, axis=0) - counts
    equals_before = (before >> 32).to(tl.int32)
    # Of equal keys the earlier tokens: in one word it may be some.
    taken = wanted - equals_before
    is_cut = (taken > 0) & (taken < equals)
    last = _bit_of_index(
        tl.sum(tl.where(is_cut, equal, 0), axis=0),
        tl.sum(tl.where(is_cut, taken, 0), axis=0),
        INTERPRETED,
    )
    marked = above | tl.where(taken > 0, tl.where(is_cut, equal & _lowest(last), equal), 0)
    place = before.to(tl.int32) + tl.minimum(equals_before, wanted)
    tl.store(marks + word, marked, mask=is_word)
    tl.store(marks + words + word, place, mask=is_word)
    tl.store(target + place, word, mask=marked != 0)


@triton.jit
def _lowest(count):
    """Words whose lowest bits are set, so many; none of less than none."""
    count = tl.maximum(count, 0)
    return tl.where(count < 32, (1 << (count & 31)) - 1, -1)


@triton.jit
def _bit_of_index(word, index, INTERPRETED: tl.constexpr):
    """Where a set bit of words is that so many set bits are below; 31 if there is none."""
    at = index * 0
    for step in tl.static_range(5):
        below = _popc((word >> at) & ((1 << (16 >> step)) - 1), INTERPRETED)
        is_above = below <= index
        index -= tl.where(is_above, below, 0)
        at += tl.where(is_above, 16 >> step, 0)
    return at


@triton.jit
def _popc(word, INTERPRETED: tl.constexpr):
    """How many bits of words, int32, are set."""
    if INTERPRETED:
        # Shifts copy the sign, and masks take it away.
        pairs = word - ((word >> 1) & 0x55555555)
        fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        bytes_ = (fours + (fours >> 4)) & 0x0F0F0F0F
        return ((bytes_ * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _larger(first, second):
    return tl.maximum(first, second)

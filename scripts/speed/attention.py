"""Times work on one GPU: attention of one layer over codes where they lie, and over bfloat16."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cache_rank import residency
from cache_rank.config import CacheRankConfig, ModelShape, OptionValue
from cache_rank.kernels.coded import attend_codes, encode_groups, gather_codes
from cache_rank.kernels.coded.reference import Codec, CodedTokens
from cache_rank.kernels.hack.reference import GROUP as HACK_GROUP
from cache_rank.kernels.hack.reference import HackCodec
from cache_rank.kernels.lynx.reference import PAGE as LYNX_PAGE
from cache_rank.kernels.lynx.reference import LynxCodec
from cache_rank.kernels.mosaickv import attend_packed, gather_packed
from cache_rank.kernels.mosaickv.reference import PackedStore
from cache_rank.kernels.quantspec.reference import GROUP as QUANTSPEC_GROUP
from cache_rank.kernels.quantspec.reference import QuantSpecCodec
from cache_rank.kernels.rows import PagedRows, Shipment
from cache_rank.pages import PAGE_TOKENS

SHAPES = ((8, 8192), (8, 32768), (8, 131072), (1, 262144))
"""Requests, and the tokens of each."""

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5

HEAD_START_CYCLES = 2_000_000
"""The GPU is kept busy so long, about a millisecond, while the host queues, which is not timed."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of queries (B, Q, Hq, D), keys and values (B, Hkv, n, D): outputs (B, Q, Hq, D)."""


def median_ms(action: Callable[[], Any], repeats: int = 20) -> float:
    """Median of the milliseconds that an action takes on the GPU, after two times that warm up."""
    times = []
    for _ in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        action()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


class Format(NamedTuple):
    """A way of holding codes, and what attention reads of it."""

    codecs: tuple[Codec, Codec]  # of keys and of values
    group: int  # tokens that are encoded together
    groups: int  # of a ring
    planes: tuple[int, ...] | None = None  # of keys and values, that attention reads; None for all
    unfinished: bool = False  # whether the last group is encoded anew in each step


def _quantspec(bits: int) -> Format:
    codecs = tuple(QuantSpecCodec(of_keys, torch.bfloat16, bits) for of_keys in (True, False))
    return Format((codecs[0], codecs[1]), QUANTSPEC_GROUP, 2, (0, 2, 3) if bits == 4 else None)


def _lynx(reads_residuals: bool) -> Format:
    codec = LynxCodec(reads_residuals=reads_residuals)
    planes = None if reads_residuals else (0, 2, 3, 4, 5)
    return Format((codec, codec), LYNX_PAGE, 1, planes)


def _hack(bits: int, sums_anew: bool = False, unfinished: bool = False) -> Format:
    keys = HackCodec(True, torch.bfloat16, bits, sums_anew=sums_anew)
    values = keys._replace(of_keys=False, value_sums=not sums_anew)
    planes = (0, 1, 2) if sums_anew else None
    return Format((keys, values), HACK_GROUP, 1, planes, unfinished)


FORMATS = {
    "quantspec, 4 bits": _quantspec(4),
    "quantspec, 8 bits": _quantspec(8),
    "lynx, anchors and residuals": _lynx(True),
    "lynx, anchors": _lynx(False),
    "hack, 4 bits": _hack(4),
    "hack, 2 bits": _hack(2),
    # The ablations of HACK, section 7.4: without summation or requantization elimination.
    "hack, 4 bits, sums anew": _hack(4, sums_anew=True),
    "hack, 2 bits, sums anew": _hack(2, sums_anew=True),
    "hack, 4 bits, last block anew": _hack(4, unfinished=True),
    "hack, 2 bits, last block anew": _hack(2, unfinished=True),
}


def _torch_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    by_head = queries.transpose(1, 2)
    out = scaled_dot_product_attention(by_head, keys, values, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2)


def _flash_attention(rows: int, tokens: int) -> Attention | None:
    """FlashAttention-3 of sgl_kernel, if it is there."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        print(f"no FlashAttention-3: {error}", file=sys.stderr)
        return None
    lengths = torch.full((rows,), tokens, dtype=torch.int32)

    def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q=queries,
            k_cache=keys.transpose(1, 2),
            v_cache=values.transpose(1, 2),
            cache_seqlens=lengths,
            softmax_scale=SCALE,
        )
        return out

    return attention


def _hold(held_as: Format, rows: int, tokens: int) -> tuple[CodedTokens, PagedRows]:
    """Random tokens as codes, so many of each row, and none that is newer; pages have no order."""
    pages, groups = rows * tokens // PAGE_TOKENS, PAGE_TOKENS // held_as.group
    keys, values = (
        tuple(
            torch.empty(
                (pages, 1, KV_HEADS, groups * plane.entries, plane.width), dtype=plane.dtype
            )
            for plane in codec.planes(HEAD_DIM)
        )
        for codec in held_as.codecs
    )
    ring = (1, 1, KV_HEADS, held_as.groups * held_as.group, HEAD_DIM)
    held = CodedTokens(
        codecs=held_as.codecs,
        planes=(keys, values),
        rings=(torch.randn(ring, dtype=torch.bfloat16), torch.randn(ring, dtype=torch.bfloat16)),
        not_finite=torch.zeros(1, dtype=torch.int32),
        group_tokens=held_as.group,
        page_tokens=PAGE_TOKENS,
        unfinished=held_as.unfinished,
    )
    table = torch.randperm(pages).view(rows, -1).to(torch.int32)
    count, zeros = tokens + held.full_tokens, torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        came = torch.randn((2, 1, count, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
        shipment = Shipment.of_one(came, table[row].cpu())
        encode_groups(held, shipment.rows, range(1), shipment)
    return held, PagedRows(table, zeros, torch.full_like(zeros, count - 1))


PACKED: dict[str, OptionValue] = {"rate": 75, "group": 1}
"""Options of `mosaickv`: those of the paper. Of random numbers `auto` would keep more."""


def _pack(rows: int, tokens: int) -> tuple[PackedStore, PagedRows]:
    """Random tokens as packed vectors, so many of each row, and none that is newer."""
    model = ModelShape(1, QUERY_HEADS, KV_HEADS, HEAD_DIM, "bfloat16", SCALE)
    config = CacheRankConfig(
        model, max_rows=rows, kv_residency="mosaickv", kv_residency_options=PACKED
    )
    pages = rows * tokens // PAGE_TOKENS
    held: Any = residency.create(config, pages, torch.get_default_device())
    table = torch.randperm(pages).view(rows, -1).to(torch.int32)
    for row in range(rows):
        for start in range(0, tokens, PAGE_TOKENS * 32):
            count = min(PAGE_TOKENS * 32, tokens - start)
            came = torch.randn((2, 1, count, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
            with torch.device("cpu"):  # the default of a cache rank, whose host prepares copies
                held.load(Shipment.of_one(came, table[row].cpu(), row, start))
    slots = torch.arange(rows, dtype=torch.int32)
    return held._memory.store, PagedRows(table, slots, torch.full_like(slots, tokens - 1))


def _encode_and_attend(held: CodedTokens, query: Tensor, rows: PagedRows) -> None:
    encode_groups(held, rows, range(1))
    attend_codes(held, query, rows, 0, SCALE)


def attention_rows(rows: int, tokens: int, queries: int) -> Iterator[dict[str, Any]]:
    """Time every kind of attention over so many tokens, with so many queries a request."""
    torch.manual_seed(0)
    query = torch.randn((rows, queries, QUERY_HEADS, HEAD_DIM), dtype=torch.bfloat16)
    decoded = torch.randn((2, rows, 1, KV_HEADS, tokens, HEAD_DIM), dtype=torch.bfloat16)
    keys, values = decoded[:, :, 0]
    positions = torch.arange(tokens, dtype=torch.int32)
    everything = positions.expand(rows, 1, KV_HEADS, tokens).contiguous()

    def timed(name: str, action: Callable[[], Any], moved: int, **more: Any) -> dict[str, Any]:
        shape = {"requests": rows, "tokens": tokens, "queries": queries}
        return {**shape, "kernel": name, "ms": median_ms(action), "bytes": moved, **more}

    kinds: dict[str, Attention] = {"PyTorch": _torch_attention}
    if flash := _flash_attention(rows, tokens):
        kinds["FlashAttention-3"] = flash
    for name, attention in kinds.items():
        plain = partial(attention, query, keys, values)
        yield timed(f"{name}, bfloat16", plain, decoded.nbytes)
    best, attention = list(kinds.items())[-1]

    def decoded_first(gather: Callable[[], None]) -> Tensor:
        gather()
        return attention(query, keys, values)

    def off_by(gather: Callable[[], None], attend: Callable[[], Any]) -> float:
        expected, found = decoded_first(gather).float(), attend()[0]
        return float((found - expected).square().mean() / expected.square().mean()) ** 0.5

    into = everything, decoded[0], decoded[1]
    for name, held_as in FORMATS.items():
        held, paged = _hold(held_as, rows, tokens)
        gather = partial(gather_codes, held, paged, 0, *into)
        attend = partial(attend_codes, held, query, paged, 0, SCALE)
        all_codes = sum(plane.nbytes for planes in held.planes for plane in planes)
        read = sum(
            plane.nbytes
            for planes in held.planes
            for index, plane in enumerate(planes)
            if held_as.planes is None or index in held_as.planes
        )
        moved = all_codes + 2 * decoded.nbytes
        if held_as.unfinished:  # as many groups as without it, and half of the last
            half = paged._replace(positions=paged.positions - held_as.group // 2)
            yield timed(f"{name}: on codes", partial(_encode_and_attend, held, query, half), read)
            continue
        if held_as.planes is None:  # tokens are decoded in full
            yield timed(f"{name}: decoded, then {best}", partial(decoded_first, gather), moved)
        yield timed(f"{name}: on codes", attend, read, error=off_by(gather, attend))
        del held, gather, attend

    store, paged = _pack(rows, tokens)
    gather = partial(gather_packed, store, paged, 0, *into)
    attend = partial(attend_packed, store, query, paged, 0, SCALE)
    planes = (*store.keys, *store.values, store.rotations)
    read, name = sum(plane.nbytes for plane in planes), "mosaickv, a quarter kept"
    moved = read + 2 * decoded.nbytes
    yield timed(f"{name}: decoded, then {best}", partial(decoded_first, gather), moved)
    yield timed(f"{name}: on packed vectors", attend, read, error=off_by(gather, attend))

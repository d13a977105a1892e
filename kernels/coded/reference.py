"""Steps on tokens that are held as codes, plain torch: the specification for every format.

A sequence's newest tokens wait in a full-precision ring of its slot until a group of them is
complete and old enough; then the group is encoded, once and for all. Which tokens are held as codes
follows from how many are resident, and from nothing else: so codes do not depend on how tokens
arrived.

What reads a step's tokens may still run while the next step is appended. The ring has room for one
group more than stays in full precision, so the entry that the next token takes is that of a token
that this step reads from codes already; and the codes that the next token completes are of tokens
that this step reads from the ring.

A sequence may also be truncated: it forgets its newest tokens. Fewer resident tokens may mean fewer
codes, and tokens that were encoded already are read from the ring again, bit for bit as if the
others had never come. The ring has them still if it has as many entries beyond whole groups as
tokens are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from cache_rank_kernels.fp8.reference import convert
from cache_rank_kernels.score.reference import ScoreWorkspace
from torch import Tensor

_TILE_TOKENS = 4096
"""Tokens of one sequence that are decoded at once for scoring."""


class Plane(NamedTuple):
    """One tensor of a group's codes, (entries, width), or of numbers they are relative to.

    Attributes:
        entries: each is of as many successive tokens of the group; divides its size.
        width: elements of an entry.
        dtype: of an element.
    """

    entries: int
    width: int
    dtype: torch.dtype


class Codec(Protocol):
    """Encodes keys, or values."""

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """The tensors of its codes, in the order of `encode` and `decode`."""

    def encode(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Encode groups, (..., group tokens, D), to planes, (..., entries, width).

        Elements that cannot be encoded leave something in a plane that is not finite.
        """

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        """Decode tokens: (n, D) float32.

        Args:
            entries: (n, width) of each plane, those of n tokens.
        """

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float, exact: bool) -> Tensor:
        """Logits of groups of keys: (..., G, group tokens) float32.

        Args:
            queries: (..., G, D) float32.
            planes: of the groups, (..., entries, width) each.
            scale: factor on the logits.
            exact: read all that there is, whatever reading is configured.
        """


class CodedTokens(NamedTuple):
    """K and V of all sequences: complete groups as codes in pages, newer tokens in rings.

    Attributes:
        codecs: of keys and of values.
        planes: of keys and of values, each (pages, layers, Hkv, entries of a page, width).
        rings: of keys and of values, (slots, layers, Hkv, ring, D); position p is in entry
            p % ring. The ring holds a group more than what stays in full precision, and fewer
            than another group for tokens that may be forgotten.
        resident: (slots, layers) int32, how many tokens `encode_groups` saw last; steps follow
            positions instead.
        not_finite: (1,) int32, 0 until tokens were encoded that are not finite, or span more than
            float32; then 1 + (part · layers + layer) · Hkv + head of the last of them, with part
            0 of keys and 1 of values.
        group_tokens: tokens that are encoded together.
        page_tokens: P; a multiple of the group.
    """

    codecs: tuple[Codec, Codec]
    planes: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    rings: tuple[Tensor, Tensor]
    resident: Tensor
    not_finite: Tensor
    group_tokens: int
    page_tokens: int

    @property
    def full_tokens(self) -> int:
        """Tokens of the newest complete groups, which stay in full precision."""
        return (self.rings[0].shape[3] // self.group_tokens - 1) * self.group_tokens

    def coded(self, resident: int) -> int:
        """How many of a sequence's tokens are held as codes; the rest is in the ring."""
        complete = resident // self.group_tokens * self.group_tokens
        return max(0, complete - self.full_tokens)


def encode_groups(
    tokens: CodedTokens,
    page_table: Tensor,
    slots: Tensor,
    starts: Tensor,
    count: int,
    layers: range,
    shipment: Tensor | None = None,
) -> None:
    """Encode the groups that new tokens complete.

    Args:
        tokens: planes, resident and not_finite are written in place.
        page_table: (R, max pages) int32, the pages of each row's sequence in order.
        slots: (R,) int32; a row of slot -1 is left alone.
        starts: (R,) int32 position of each row's first new token.
        count: new tokens of each row.
        layers: which layers.
        shipment: (2, layers, count, Hkv, D), the new keys and values, of one row; None when the
            rings hold them already, as they must not if they are more than one a row.
    """
    size, ring_tokens = tokens.group_tokens, tokens.rings[0].shape[3]
    for pages, slot, start in zip(page_table, slots.tolist(), starts.tolist(), strict=True):
        if slot < 0:
            continue
        tokens.resident[slot, layers.start : layers.stop] = start + count
        for first in range(tokens.coded(start), tokens.coded(start + count), size):
            positions = torch.arange(first, first + size, device=slots.device)
            is_new = positions >= start if shipment is not None else torch.zeros_like(positions) > 0
            page, entry = int(pages[first // tokens.page_tokens]), first % tokens.page_tokens
            for part, (codec, planes, ring) in enumerate(
                zip(tokens.codecs, tokens.planes, tokens.rings, strict=True)
            ):
                group = ring[slot, layers.start : layers.stop, :, positions % ring_tokens]
                if shipment is not None:
                    new = shipment[part][:, positions[is_new] - start].transpose(1, 2)
                    group[:, :, is_new] = new.to(group.dtype)
                codes = codec.encode(group)  # of (L, Hkv, size, D)
                _note_not_finite(tokens, part, layers, codes)
                for plane, code in zip(planes, codes, strict=True):
                    span = code.shape[2]
                    place = slice(entry // size * span, (entry // size + 1) * span)
                    plane[page, layers.start : layers.stop, :, place] = code


def gather_codes(
    tokens: CodedTokens,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Read K and V of the tokens that enter the working sets, decoded in full.

    Args:
        tokens: what is held.
        page_table: (R, max pages) int32.
        slots: (R,) int32; negative skips the row.
        positions: (R,) int32 of the step.
        first_layer: of the L layers.
        entering: (R, L, Hkv, C) int32 token positions; negative is padding.
        out_keys, out_values: (R, L, Hkv, C, D) in the dtype of the rings, or rounded from that to
            float8_e4m3fn; written in place; entries of padding and of skipped rows keep what they
            hold.
    """
    used = (entering >= 0) & (slots >= 0).view(-1, 1, 1, 1)
    row, layer, head, entry = used.nonzero(as_tuple=True)
    resident = positions[row].to(torch.int64) + 1
    position = entering[row, layer, head, entry].to(torch.int64)
    page = page_table[row, position // tokens.page_tokens].to(torch.int64)
    slot = slots[row].to(torch.int64)
    found = read_tokens(tokens, page, slot, layer + first_layer, head, position, resident)
    for out, part in zip((out_keys, out_values), found, strict=True):
        out[row, layer, head, entry] = convert(part, out.dtype)


def read_tokens(
    tokens: CodedTokens,
    page: Tensor,
    slot: Tensor,
    layer: Tensor,
    head: Tensor,
    position: Tensor,
    resident: Tensor,
) -> tuple[Tensor, Tensor]:
    """Read tokens, each of a place of its own: keys and values (n, D) in the dtype of the rings.

    What decodes beyond the range of the dtype is its largest number.

    Args:
        tokens: what is held.
        page, slot, layer, head, position: (n,) int64 of each token.
        resident: (n,) tokens of its sequence.
    """
    size, ring_tokens = tokens.group_tokens, tokens.rings[0].shape[3]
    coded = resident // size * size - tokens.full_tokens
    is_coded = (position < coded).nonzero().squeeze(-1)
    place = (page[is_coded], layer[is_coded], head[is_coded])
    offset = position[is_coded] % tokens.page_tokens
    found = []
    for codec, planes, ring in zip(tokens.codecs, tokens.planes, tokens.rings, strict=True):
        part = ring[slot, layer, head, position % ring_tokens]
        entries = [
            plane[(*place, offset * plane.shape[3] // tokens.page_tokens)] for plane in planes
        ]
        largest = torch.finfo(part.dtype).max
        part[is_coded] = codec.decode(entries).clamp(-largest, largest).to(part.dtype)
        found.append(part)
    return found[0], found[1]


def score_codes(
    tokens: CodedTokens,
    queries: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    scale: float,
    workspace: ScoreWorkspace,
    out: Tensor,
    exact: bool = False,
) -> None:
    """Score the resident tokens of every row of a step: `score_tokens` of score/reference.py.

    Args:
        tokens: what is held.
        queries: (R, L, Hq, D) float32.
        page_table: (R, max pages) int32.
        slots: (R,) int32; a row of slot -1 is left alone.
        positions: (R,) int32; tokens [0, position] are scored.
        first_layer: of the L layers.
        scale: factor on the logits.
        workspace: of `score_workspace`.
        out: (R, L, Hkv, capacity) float32; entries of other tokens keep what they hold.
        exact: by all that is held of a key, whatever reading is configured.
    """
    kv_heads = out.shape[2]
    layers = slice(first_layer, first_layer + out.shape[1])
    grouped = queries.unflatten(2, (kv_heads, -1))  # (R, L, Hkv, G, D)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        coded = tokens.coded(position + 1)
        logits = [
            _coded_logits(tokens, grouped[row], page_table[row], layers, first, last, scale, exact)
            for first in range(0, coded, _TILE_TOKENS)
            for last in (min(first + _TILE_TOKENS, coded),)
        ]
        entries = torch.arange(coded, position + 1, device=slots.device)
        ring = tokens.rings[0]
        newest = ring[slot, layers, :, entries % ring.shape[3]].float()
        logits.append((grouped[row] @ newest.transpose(-1, -2)) * scale)
        log_probabilities = torch.log_softmax(torch.cat(logits, dim=-1), dim=-1)
        out[row, :, :, : position + 1] = log_probabilities.amax(dim=-2)


def _coded_logits(
    tokens: CodedTokens,
    queries: Tensor,
    pages: Tensor,
    layers: slice,
    first: int,
    last: int,
    scale: float,
    exact: bool,
) -> Tensor:
    """Logits of the complete groups [first, last) of a sequence: (L, Hkv, G, n) float32."""
    size, groups_of_page = tokens.group_tokens, tokens.page_tokens // tokens.group_tokens
    group = torch.arange(first // size, last // size, device=pages.device)
    layer = torch.arange(layers.start, layers.stop, device=pages.device)
    page = pages[group // groups_of_page].to(torch.int64).unsqueeze(-1)
    within = (group % groups_of_page).unsqueeze(-1)
    planes = [
        plane.unflatten(3, (groups_of_page, -1))[page, layer, :, within]
        for plane in tokens.planes[0]
    ]  # (groups, L, Hkv, entries, width)
    logits = tokens.codecs[0].score(queries, planes, scale, exact)
    return logits.permute(1, 2, 3, 0, 4).flatten(3)


def _note_not_finite(
    tokens: CodedTokens, part: int, layers: range, codes: Sequence[Tensor]
) -> None:
    _, pool_layers, kv_heads, _, _ = tokens.rings[part].shape
    for code in codes:
        if code.is_floating_point() and not code.isfinite().all():
            layer, head = (~code.isfinite()).flatten(2).any(dim=-1).nonzero()[-1].tolist()
            place = (part * pool_layers + layers.start + layer) * kv_heads + head
            tokens.not_finite.clamp_(min=1 + place)

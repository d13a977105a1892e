"""Steps on tokens that are held as codes, plain torch: the specification for every format.

A sequence's newest tokens wait in a full-precision ring of its slot until a group of them is
complete and old enough. Then the group is encoded, once and for all. Which tokens are held as codes
follows from how many are resident, and from nothing else, so that codes do not depend on how tokens
arrived.

What reads a step's tokens may still run while the next step is appended. The two never meet, since
the ring has room for one group more than stays in full precision. The entry that the next token
takes held a token that this step reads from its codes, and the codes that the next token completes
are those of tokens that this step reads from the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cache_rank.kernels.rows import PagedRows, Shipment
from cache_rank.kernels.score.reference import ScoreWorkspace
from cache_rank.kernels.wire.reference import to_wire

_TILE_TOKENS = 4096
"""This many tokens of one sequence are decoded at once for scoring."""


class Plane(NamedTuple):
    """One tensor of a group's codes, (entries, width), or of numbers that codes are relative to.

    Attributes:
        entries: how many entries a group has, each of as many successive tokens; divides the
            tokens of the group.
        width: how many elements an entry has.
        dtype: the dtype of an element.
    """

    entries: int
    width: int
    dtype: torch.dtype


class Codec(Protocol):
    """How a format encodes keys, or values."""

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """The tensors of the codes, in the order of `encode` and `decode`."""

    def encode(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Encode groups, (..., group tokens, D), to planes, (..., entries, width) each.

        Elements that cannot be encoded leave a number in a plane that is not finite.
        """

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        """Decode tokens: (n, D) float32.

        Args:
            entries: (n, width) of each plane, the entries of n tokens.
        """

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float) -> Tensor:
        """Compute the logits of groups of keys: (..., G, group tokens) float32.

        Args:
            queries: (..., G, D) float32.
            planes: (..., entries, width) each, the codes of the groups.
            scale: factor on the logits.
        """


@runtime_checkable
class AttendedCodec(Codec, Protocol):
    """The codec of a format whose codes can be attended to where they lie."""

    def weigh(self, weights: Tensor, planes: Sequence[Tensor]) -> Tensor:
        """Add up the values of each group by their weights: (..., N, D) float32.

        Args:
            weights: (..., N, group tokens) float32, at least 0.
            planes: (..., entries, width) each, the codes of the groups.
        """


class CodedTokens(NamedTuple):
    """K and V of all sequences: complete groups as codes in pages, newer tokens in rings.

    Attributes:
        codecs: those of keys and of values.
        planes: those of keys and of values, each (pages, layers, Hkv, entries of a page, width).
        rings: those of keys and of values, (slots, layers, Hkv, ring, D) each; position p is in
            entry p % ring. A ring holds one group more than stays in full precision.
        not_finite: (1,) int32, 0 until tokens were encoded that are not finite, or span more than
            float32; then 1 + (part · layers + layer) · Hkv + head of the last of them, where part
            is 0 for keys and 1 for values.
        group_tokens: how many tokens are encoded together.
        page_tokens: P, a multiple of the group.
        unfinished: whether newer tokens are held as codes too. Each step then encodes a sequence's
            last group anew from the ring, and the newest token stands for those that it lacks,
            since that widens no range: HACK without requantization elimination (section 7.4). What
            reads a step's tokens has to end before the next step is appended.
    """

    codecs: tuple[Codec, Codec]
    planes: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    rings: tuple[Tensor, Tensor]
    not_finite: Tensor
    group_tokens: int
    page_tokens: int
    unfinished: bool = False

    @property
    def full_tokens(self) -> int:
        """How many tokens of the newest complete groups stay in full precision."""
        return (self.rings[0].shape[3] // self.group_tokens - 1) * self.group_tokens

    def coded(self, resident: int) -> int:
        """How many of a sequence's resident tokens are held as codes; the rest is in the ring."""
        if self.unfinished:
            return resident
        complete = resident // self.group_tokens * self.group_tokens
        return max(0, complete - self.full_tokens)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0: there all elements are the same."""
    ratio = numerator / denominator
    return torch.where(denominator == 0, torch.zeros_like(ratio), ratio)


def encode_groups(
    tokens: CodedTokens, rows: PagedRows, layers: range, shipment: Shipment | None = None
) -> None:
    """Encode the groups that new tokens complete, and those that they begin if `unfinished`.

    Args:
        tokens: what is held; planes and not_finite are written in place.
        rows: the rows of the step or the shipment, where a position is that of the first new token.
        layers: which layers; of a shipment, all that it has.
        shipment: what brings the new tokens. None where each row has one, and the rings hold it.
    """
    size, ring_tokens = tokens.group_tokens, tokens.rings[0].shape[3]
    for row, slot, start in rows.used():
        first_new, count = (0, 1) if shipment is None else shipment.on_host[row][2:]
        begin = tokens.coded(start) // size * size
        for first in range(begin, tokens.coded(start + count), size):
            positions = torch.arange(first, first + size, device=rows.slots.device)
            positions = positions.clamp(max=start + count - 1)
            is_new = positions >= start if shipment is not None else torch.zeros_like(positions) > 0
            page = int(rows.page_table[row, first // tokens.page_tokens])
            entry = first % tokens.page_tokens
            for part, (codec, planes, ring) in enumerate(
                zip(tokens.codecs, tokens.planes, tokens.rings, strict=True)
            ):
                group = ring[slot, layers.start : layers.stop, :, positions % ring_tokens]
                if shipment is not None:
                    is_shipped = positions[is_new] - start + first_new
                    new = shipment.tokens[part][:, is_shipped].transpose(1, 2)
                    group[:, :, is_new] = new.to(group.dtype)
                codes = codec.encode(group)  # of (L, Hkv, size, D)
                _note_not_finite(tokens, part, layers, codes)
                for plane, code in zip(planes, codes, strict=True):
                    span = code.shape[2]
                    place = slice(entry // size * span, (entry // size + 1) * span)
                    plane[page, layers.start : layers.stop, :, place] = code


def gather_codes(
    tokens: CodedTokens,
    rows: PagedRows,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Read K and V of the tokens that enter the working sets, decoded in full.

    What decodes beyond the range of the rings' dtype becomes its largest number.

    Args:
        tokens: what is held.
        rows, first_layer, entering, out_keys, out_values: as for `gather_step` of
            gather/reference.py, in the dtype of the rings or in another of a message.
    """
    used = (entering >= 0) & (rows.slots >= 0).view(-1, 1, 1, 1)
    row, layer, head, entry = used.nonzero(as_tuple=True)
    position = entering[row, layer, head, entry].to(torch.int64)
    page = rows.page_table[row, position // tokens.page_tokens].to(torch.int64)
    slot, size = rows.slots[row].to(torch.int64), tokens.group_tokens
    coded = rows.positions[row].to(torch.int64) + 1
    if not tokens.unfinished:
        coded = coded // size * size - tokens.full_tokens
    is_coded = (position < coded).nonzero().squeeze(-1)
    place = (page[is_coded], layer[is_coded] + first_layer, head[is_coded])
    offset = position[is_coded] % tokens.page_tokens
    outs = (out_keys, out_values)
    for codec, planes, ring, out in zip(
        tokens.codecs, tokens.planes, tokens.rings, outs, strict=True
    ):
        part = ring[slot, layer + first_layer, head, position % ring.shape[3]]
        entries = [
            plane[(*place, offset * plane.shape[3] // tokens.page_tokens)] for plane in planes
        ]
        largest = torch.finfo(part.dtype).max
        part[is_coded] = codec.decode(entries).clamp(-largest, largest).to(part.dtype)
        out[row, layer, head, entry] = to_wire(part, out.dtype)


def score_codes(
    tokens: CodedTokens,
    queries: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: ScoreWorkspace,
    out: Tensor,
) -> None:
    """Score the resident tokens of every row of a step: `score_tokens` of score/reference.py.

    Args:
        tokens: what is held.
        queries, rows, first_layer, scale, workspace, out: as for `score_step` beside it.
    """
    kv_heads = out.shape[2]
    layers = slice(first_layer, first_layer + out.shape[1])
    grouped = queries.unflatten(2, (kv_heads, -1))  # (R, L, Hkv, G, D)
    for row, slot, position in rows.used():
        coded, pages, logits = tokens.coded(position + 1), rows.page_table[row], []
        for first in range(0, coded, _TILE_TOKENS):
            planes = _groups(tokens, 0, pages, layers, first, min(first + _TILE_TOKENS, coded))
            of_groups = tokens.codecs[0].score(grouped[row], planes, scale)
            of_tokens = of_groups.permute(1, 2, 3, 0, 4).flatten(3)  # (L, Hkv, G, n)
            logits.append(of_tokens[..., : coded - first])
        entries = torch.arange(coded, position + 1, device=pages.device)
        ring = tokens.rings[0]
        newest = ring[slot, layers, :, entries % ring.shape[3]].float()
        logits.append((grouped[row] @ newest.transpose(-1, -2)) * scale)
        log_probabilities = torch.log_softmax(torch.cat(logits, dim=-1), dim=-1)
        out[row, :, :, : position + 1] = log_probabilities.amax(dim=-2)


def attend_codes(
    tokens: CodedTokens, queries: Tensor, rows: PagedRows, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the tokens of every row that are held as codes, and decode none of them to memory.

    All queries of a row are later than its codes. With newer tokens what is returned is merged by
    log-sum-exp.

    Args:
        tokens: what is held; its codecs are `AttendedCodec`.
        queries: (R, Q, Hq, D), any float dtype.
        rows: the rows of the step; tokens [0, position] of each are resident, none for -1.
        layer: which layer.
        scale: factor on the logits.

    Returns:
        Outputs (R, Q, Hq, D) and log-sum-exps (R, Q, Hq), float32; 0 and minus infinity in rows
        that have no codes, or are skipped.
    """
    grouped = by_kv_head(queries, tokens.rings[0].shape[2])
    out, log_sums = torch.zeros_like(grouped), torch.full_like(grouped[..., 0], -torch.inf)
    keys, values = tokens.codecs
    assert isinstance(values, AttendedCodec)
    for row, _, position in rows.used():
        coded = tokens.coded(position + 1)
        if coded == 0:
            continue
        layers = slice(layer, layer + 1)
        key_planes, value_planes = (
            [plane[:, 0] for plane in _groups(tokens, part, rows.page_table[row], layers, 0, coded)]
            for part in range(2)
        )
        logits = keys.score(grouped[row], key_planes, scale)  # (groups, Hkv, Q G, group tokens)
        if lacking := -coded % tokens.group_tokens:
            logits[-1, ..., -lacking:] = -torch.inf
        log_sums[row] = logits.logsumexp(dim=(0, -1))
        weights = (logits - log_sums[row].unsqueeze(-1)).exp()
        out[row] = values.weigh(weights, value_planes).sum(dim=0)
    return by_query(out, queries), by_query(log_sums, queries)


def by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """(R, Q, Hq, D) as (R, Hkv, Q G, D) float32, the queries of a KV head beside each other."""
    grouped = queries.unflatten(2, (kv_heads, -1)).transpose(1, 2)
    contiguous = torch.empty(grouped.shape, dtype=torch.float32, device=queries.device)
    return contiguous.copy_(grouped).flatten(2, 3)


def by_query(grouped: Tensor, queries: Tensor) -> Tensor:
    """(R, Hkv, Q G, ...) as (R, Q, Hq, ...)."""
    return grouped.unflatten(2, (queries.shape[1], -1)).transpose(1, 2).flatten(2, 3)


def _groups(
    tokens: CodedTokens, part: int, pages: Tensor, layers: slice, first: int, last: int
) -> list[Tensor]:
    """The planes of keys or of values of the groups of a sequence's tokens [first, last).

    Returns:
        (groups, L, Hkv, entries, width) each.
    """
    size, groups_of_page = tokens.group_tokens, tokens.page_tokens // tokens.group_tokens
    group = torch.arange(first // size, -(-last // size), device=pages.device)
    layer = torch.arange(layers.start, layers.stop, device=pages.device)
    page = pages[group // groups_of_page].to(torch.int64).unsqueeze(-1)
    within = (group % groups_of_page).unsqueeze(-1)
    return [
        plane.unflatten(3, (groups_of_page, -1))[page, layer, :, within]
        for plane in tokens.planes[part]
    ]


def _note_not_finite(
    tokens: CodedTokens, part: int, layers: range, codes: Sequence[Tensor]
) -> None:
    _, pool_layers, kv_heads, _, _ = tokens.rings[part].shape
    for code in codes:
        if code.is_floating_point() and not code.isfinite().all():
            layer, head = (~code.isfinite()).flatten(2).any(dim=-1).nonzero()[-1].tolist()
            place = (part * pool_layers + layers.start + layer) * kv_heads + head
            tokens.not_finite.clamp_(min=1 + place)

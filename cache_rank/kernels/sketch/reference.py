"""A sketch of keys that only scores read, some 2 bits an element, plain torch: the specification.

What an error of a key costs is known from the queries that meet it. With C the second moment of the
queries of a KV head, after rotary embedding, and μ the mean of its keys, an error of C^½ (k - μ)
changes logits by its length in the mean. So that is what is coded: along its principal directions
U, and divided by its standard deviations σ in these, largest first,

    z = B (k - μ),  B = σ⁻¹ Uᵀ C^½        q·k = (B⁻ᵀ q)·z + q·μ

The first channels of z are rounded to 4 bits, the next ones to 2, and the last, which hardly vary,
are dropped. q·μ is the same for all tokens of a query head, and scores, which are
log-probabilities, are the same without it.

All of z have the variance 1, so that steps are the same for all channels and tokens: those with the
least error of uniform codes of a normal distribution (Max, 1960). A code depends on its key alone.

Scores know nothing of channels. A byte of a sketch is four int2 elements, and a logit is the sum
of all elements of a key, each times the weight that a query gives it:

    a channel of 2 bits is one element, whose weight is that of the channel
    a channel of 4 bits is two, of which the second counts four times as much

What codes are counted from is the same for all tokens, too, and left out.

A score is the largest log-probability of its token over the query heads of a group. Its normalizers
are over all tokens; or over those that are attended to anyway, which are few, so that they are
known before the others are read, and logits are never written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.nibbles.reference import pack, unpack
from cache_rank.kernels.rows import PagedRows, Shipment
from cache_rank.kernels.score.reference import ScoreWorkspace

FINE_STEP, COARSE_STEP = 0.3352, 0.9957
"""Steps of codes of 4 bits and of 2 bits, for a variance of 1."""


WEIGHT_RANGE = 127
"""The weights that a query gives the elements are integers up to this."""

NORMALIZER_PARTS = 8
"""This many programs share the attended tokens of a unit: each of them mostly waits for memory."""


class Attended(NamedTuple):
    """The tokens that a step attends to.

    Attributes:
        chosen: (slots, layers, Hkv, k) int32, those in the slots of each sequence; -1 for none.
        sinks, recent: so many first and newest tokens; none of them is chosen.
    """

    chosen: Tensor
    sinks: int
    recent: int


class SketchShape(NamedTuple):
    """Which channels are coded, of keys of D elements: those of 4 bits come first.

    Attributes:
        fine: channels of 4 bits, an even number.
        coarse: channels of 2 bits, a multiple of 4.
    """

    fine: int
    coarse: int

    @property
    def channels(self) -> int:
        """All that are coded."""
        return self.fine + self.coarse

    @property
    def bytes(self) -> int:
        """Bytes of a key."""
        return self.fine // 2 + self.coarse // 4


def sketch_shape(head_dim: int, bits: int) -> SketchShape:
    """The channels of a sketch of 1, 2, 3 or 4 bits an element of a key; D is a multiple of 32."""
    fine, coarse = {1: (1, 2), 2: (2, 4), 3: (4, 4), 4: (8, 0)}[bits]
    return SketchShape(fine * head_dim // 8, coarse * head_dim // 8)


class Sketch(NamedTuple):
    """What maps keys to codes, and queries to what multiplies codes.

    Attributes:
        keys: (layers, Hkv, C, D) float32, B in units of the steps.
        shift: (layers, Hkv, C) float32, what it makes of μ.
        queries: (layers, Hkv, 4 · bytes, D) float32, B⁻ᵀ times the steps, of the first element of
            every byte, of every second one, and so on.
    """

    keys: Tensor
    shift: Tensor
    queries: Tensor


class SketchWorkspace(NamedTuple):
    """Scratch of one scoring. The reference needs none; these are the shapes of triton.py.

    It is made once and for all: what is allocated while a graph is captured, the graph keeps.

    Attributes:
        scores: that of all scorings.
        weights: (rows, layers, Hq, 4 · bytes) float32, what queries give the elements.
        normalizers: (units, NORMALIZER_PARTS, 2, PADDED) float32, each part's largest logit and the
            sum of exponentials relative to it; for units and PADDED see `ScoreWorkspace`.
    """

    scores: ScoreWorkspace
    weights: Tensor
    normalizers: Tensor


def sketch_workspace(
    scores: ScoreWorkspace, rows: int, layers: int, kv_heads: int, group: int, shape: SketchShape
) -> SketchWorkspace:
    """Add to the scratch of scores what sketches take for as many rows and layers."""
    units, partial = rows * layers * kv_heads, scores.partial
    padded = partial.shape[-1]  # 0 without a GPU, as all scratch is
    weights = units * group * 4 * shape.bytes if padded else 0
    return SketchWorkspace(
        scores,
        partial.new_empty(weights),
        partial.new_empty(units * NORMALIZER_PARTS * 2 * padded),
    )


def make_sketch(basis: Tensor, mean: Tensor, shape: SketchShape) -> Sketch:
    """Make the maps.

    Args:
        basis: (layers, Hkv, D, D) float32, B.
        mean: (layers, Hkv, D) float32, μ.
        shape: which channels are coded.
    """
    steps = basis.new_full((shape.channels, 1), FINE_STEP, dtype=torch.float64)
    steps[shape.fine :] = COARSE_STEP
    exact = basis.double()
    keys = exact[..., : shape.channels, :] / steps
    shift = (keys @ mean.double().unsqueeze(-1)).squeeze(-1)
    weights = torch.linalg.inv(exact).mT[..., : shape.channels, :] * steps
    low, high = weights[..., : shape.fine, :].chunk(2, dim=-2)
    of_fine = (low, 4 * low, high, 4 * high)
    of_coarse = (
        weights[..., shape.fine :, :].chunk(4, dim=-2) if shape.coarse else [low[..., :0, :]] * 4
    )
    parts = [part for pair in zip(of_fine, of_coarse, strict=True) for part in pair]
    return Sketch(keys.float(), shift.float(), torch.cat(parts, dim=-2).float())


def encode_keys(keys: Tensor, sketch: Sketch, shape: SketchShape) -> Tensor:
    """Encode keys of all heads of some layers.

    Args:
        keys: (layers, Hkv, n, D), any float dtype.
        sketch: of these layers.
        shape: which channels are coded.

    Returns:
        (layers, Hkv, n, bytes) uint8.
    """
    # In float64, so that no order of a sum decides on a code.
    steps = keys.double() @ sketch.keys.double().mT - sketch.shift.double().unsqueeze(-2)
    whole = steps.nan_to_num().floor()
    fine = (whole[..., : shape.fine] + 8).clamp(0, 15).to(torch.uint8)
    coarse = (whole[..., shape.fine :] + 2).clamp(0, 3).to(torch.uint8)
    return torch.cat((pack(fine, 4), pack(coarse, 2)), dim=-1)


def unpack_int2(codes: Tensor) -> Tensor:
    """Codes, (..., bytes) uint8, as elements: (..., 4 · bytes) float32, ordered as in `Sketch`."""
    return unpack(codes, 2).float()


def query_weights(queries: Tensor, sketch: Sketch, scale: float) -> Tensor:
    """The weights that queries give the elements: (..., layers, Hkv, G, 4 · bytes) float32.

    Those of a query are rounded to 8 bits: this adds 1 % to the errors that elements have.

    Args:
        queries: (..., layers, Hq, D) float32.
        sketch: of these layers.
        scale: factor on the logits.
    """
    grouped = queries.unflatten(-2, (sketch.queries.shape[1], -1))
    weights = (grouped * scale) @ sketch.queries.mT
    unit = weights.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / WEIGHT_RANGE
    return (weights / unit).round() * unit


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
    """Score the resident tokens of every row of a step by their codes; see `score_step`.

    Args:
        code_pool: (pages, layers, Hkv, P, bytes) uint8.
        sketch: of all layers.
        shape: which channels are coded.
        workspace: what `sketch_workspace` made.
        queries, rows, first_layer, scale, out: as for `score_step`.
        attended: whose log-sum-exp normalizes logits; by default that of all tokens does.
    """
    layers = slice(first_layer, first_layer + queries.shape[1])
    of_layers = Sketch(*(part[layers] for part in sketch))
    for row, slot, position in rows.used():
        codes = rows.resident(code_pool, layers, row, position)
        weights = query_weights(queries[row], of_layers, scale)
        logits = weights @ unpack_int2(codes).mT  # (L, Hkv, G, T)
        normalizer = logits.logsumexp(-1, keepdim=True)
        if attended is not None:
            chosen = attended.chosen[slot, layers]
            normalizer = attended_normalizer(logits, chosen, attended.sinks, attended.recent)
        out[row, :, :, : position + 1] = (logits - normalizer).amax(dim=-2)


def attended_normalizer(logits: Tensor, chosen: Tensor, sinks: int, recent: int) -> Tensor:
    """The log-sum-exp of the logits of tokens that are attended to, or 0 if there are none.

    Args:
        logits: (L, Hkv, G, T) float32, of all tokens.
        chosen: (L, Hkv, k) int32, tokens that are neither sinks nor recent; -1 for none.
        sinks, recent: so many first and newest tokens.

    Returns:
        (L, Hkv, G, 1) float32.
    """
    tokens = logits.shape[-1]
    token = torch.arange(tokens, device=logits.device)
    is_attended = ((token < sinks) | (token >= tokens - recent)).expand(*chosen.shape[:2], tokens)
    is_attended = torch.cat((is_attended, is_attended[..., :1]), dim=-1)  # and of no token
    chosen = torch.where(chosen < 0, tokens, chosen).to(torch.int64)
    is_attended = is_attended.scatter(-1, chosen, value=True)[..., :tokens].unsqueeze(-2)
    normalizer = logits.masked_fill(~is_attended, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(normalizer == -torch.inf, 0.0, normalizer)


def append_codes(
    keys: Tensor,
    code_pool: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    rows: PagedRows,
    first_layer: int,
) -> None:
    """Encode the newest key of every row, for the layers of a group.

    Args:
        keys: (R, L, Hkv, D), any strides but that of D.
        code_pool: (pages, layers, Hkv, P, bytes) uint8, written in place.
        sketch, shape: as for `score_sketch`.
        rows, first_layer: as for `append_step`.
    """
    page_table, slots, positions = rows
    row = (slots >= 0).nonzero().squeeze(-1)
    position = positions[row].to(torch.int64)
    page_tokens, layers = code_pool.shape[3], keys.shape[1]
    of_layers = Sketch(*(part[first_layer : first_layer + layers] for part in sketch))
    codes = encode_keys(keys[row].permute(1, 2, 0, 3), of_layers, shape)  # (L, Hkv, rows, bytes)
    page = page_table[row, position // page_tokens].to(torch.int64)
    layer = torch.arange(first_layer, first_layer + layers, device=keys.device)
    offset = (position % page_tokens).unsqueeze(-1)
    code_pool[page.unsqueeze(-1), layer, :, offset] = codes.permute(2, 0, 1, 3)


def load_codes(shipment: Shipment, code_pool: Tensor, sketch: Sketch, shape: SketchShape) -> None:
    """Encode the keys of a shipment.

    Args:
        shipment: whose they are; its values are not read.
        code_pool: (pages, layers, Hkv, P, bytes) uint8, written in place.
        sketch, shape: as for `score_sketch`.
    """
    page_tokens = code_pool.shape[3]
    keys = shipment.tokens[0].transpose(1, 2)
    codes = encode_keys(keys, sketch, shape)  # (layers, Hkv, n, bytes)
    for row, (_, position, first, count) in enumerate(shipment.on_host):
        positions = torch.arange(position, position + count, device=codes.device)
        page = shipment.rows.page_table[row, positions // page_tokens].to(torch.int64)
        of_row = codes[:, :, first : first + count]
        code_pool[page, :, :, positions % page_tokens] = of_row.permute(2, 0, 1, 3)

"""A calibration is a folder: what is fitted to a model's layers, and a card that says of what."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_ext.calibration.fitting import Correction
from sglang_ext.calibration.key_statistics import KeyBasis

VERSION = 1

TENSORS, CARD = "calibration.safetensors", "card.json"


class CalibrationError(ValueError):
    """A folder is no calibration, or not one of this model or schedule; says what to do."""


class Source(NamedTuple):
    """What the queries of a layer are forecast from.

    Attributes:
        layer: whose input.
        is_before: whether it is the input of the token before.
    """

    layer: int
    is_before: bool


class Fit(msgspec.Struct, frozen=True):
    """How well the queries of a layer are forecast.

    Attributes:
        plain, plain_held_out: the share of their squares that is missed by the projection as it
            is, of tokens that were fitted to and of others.
        fitted, held_out: by the corrected projection, likewise.
    """

    source: int
    plain: float
    fitted: float
    plain_held_out: float
    held_out: float
    is_before: bool = False


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration is of.

    Attributes:
        revision: the commit of a repository; None for a folder.
        hidden_size, layers, query_heads, kv_heads, head_dim: its shape; of all tensor-parallel
            ranks.
        dense_layers, layers_per_group, forecast_lead: the flags that say which layer's input tells
            which layer's queries.
        rank: directions of a correction.
        ridge: see fitting.fit.
        texts: SHA-256 of each text that was fitted to.
        held_out: of each that was not.
        tokens: that were fitted to.
    """

    version: int = VERSION
    model: str
    revision: str | None = None
    architecture: str
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dense_layers: int
    layers_per_group: int
    forecast_lead: int
    rank: int
    ridge: float
    texts: dict[str, str]
    held_out: dict[str, str]
    tokens: int
    fits: dict[int, Fit]


class Calibration(NamedTuple):
    """What is fitted by layer, counted from the model's first, and the card.

    Attributes:
        corrections: of the layers that are forecast: what is added to their projections; or, where
            the source is of the token before, by what they are forecast.
        bases: how the keys of all layers that may be sparse are sketched.
    """

    card: Card
    corrections: dict[int, Correction]
    bases: dict[int, KeyBasis]


def write(folder: Path, calibration: Calibration) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{layer}.{side}": getattr(correction, side).to("cpu", torch.bfloat16).contiguous()
        for layer, correction in calibration.corrections.items()
        for side in Correction._fields
    }
    for layer, basis in calibration.bases.items():
        for part, tensor in zip(KeyBasis._fields, basis, strict=True):
            tensors[f"{layer}.{part}"] = tensor.cpu().contiguous()
    save_file(tensors, folder / TENSORS)
    card = msgspec.json.format(msgspec.json.encode(calibration.card), indent=2)
    (folder / CARD).write_bytes(card + b"\n")


def read_card(folder: Path) -> Card:
    """Read the card of a folder.

    Raises:
        CalibrationError: there is none, or it is not of this version.
    """
    try:
        card = msgspec.json.decode((folder / CARD).read_bytes(), type=Card)
    except FileNotFoundError:
        raise CalibrationError(
            f"{folder} has no {CARD}; make one with python -m sglang_ext.calibrate"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise CalibrationError(f"{folder / CARD} is no card: {error}") from None
    if card.version != VERSION:
        raise CalibrationError(
            f"{folder} is of version {card.version}, and this one reads {VERSION}; calibrate again"
        )
    return card


def read(folder: Path) -> Calibration:
    """Read a folder.

    Raises:
        CalibrationError: it is no calibration.
    """
    card = read_card(folder)
    corrections, bases = {}, {}
    try:
        with safe_open(folder / TENSORS, "pt") as file:
            for layer in card.fits:
                parts = (file.get_tensor(f"{layer}.{side}").float() for side in Correction._fields)
                corrections[layer] = Correction(*parts)
            for layer in range(card.dense_layers, card.layers):
                parts = (file.get_tensor(f"{layer}.{part}") for part in KeyBasis._fields)
                bases[layer] = KeyBasis(*parts)
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"{folder / TENSORS} cannot be read: {error}") from None
    width = card.query_heads * card.head_dim
    for layer, (left, right) in corrections.items():
        found = left.shape[0], right.shape[-1], left.shape[-1]
        if found != (card.hidden_size + 1, width, right.shape[0]):
            raise CalibrationError(f"{folder / TENSORS}: layer {layer} has another shape")
    for layer, basis in bases.items():
        if basis.basis.shape != (card.kv_heads, card.head_dim, card.head_dim):
            raise CalibrationError(f"{folder / TENSORS}: layer {layer} has another shape")
    return Calibration(card, corrections, bases)


def sources(
    layers: int, dense_layers: int, layers_per_group: int, forecast_lead: int
) -> dict[int, Source]:
    """What tells the queries of each layer that may be sparse.

    That is the input of a group, of the token itself; or, for the first groups, that of the last
    groups, of the token before. See cache_rank/schedule.py.

    Raises:
        ValueError: no layer's queries are told by the token itself.
    """
    ahead = forecast_lead * layers_per_group
    if layers <= dense_layers + ahead:
        raise ValueError(
            f"the model has {layers} layers, and none is left behind --dense-layers {dense_layers} "
            f"and --forecast-lead {forecast_lead} groups of {layers_per_group} layers"
        )
    groups = -(-(layers - dense_layers) // layers_per_group)
    found = {}
    for layer in range(dense_layers, layers):
        group = (layer - dense_layers) // layers_per_group - forecast_lead
        of_group = dense_layers + group % groups * layers_per_group
        found[layer] = Source(of_group, is_before=group < 0)
    return found

"""What a scheduler process does while its model is calibrated, as the command asks it to.

The engine calls these by name, one after the other: `begin_calibration`, then texts are prefilled;
`hold_out`, then other texts are; `finish_calibration` fits and writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from sglang_ext.calibration.collecting import Collector
from sglang_ext.calibration.files import Calibration, Card, Fit, sources, write
from sglang_ext.calibration.fitting import Correction, NormalEquations, fit
from sglang_ext.projections import DecoderLayer, decoder_layers, projection_of


class Schedule(msgspec.Struct, frozen=True):
    """The flags that say which layer's input tells which layer's queries."""

    dense_layers: int
    layers_per_group: int
    forecast_lead: int


class Calibrating:
    """The calibration of one model."""

    def __init__(self, model: torch.nn.Module, schedule: Schedule) -> None:
        """Collect what a model prefills from now on.

        Raises:
            ValueError: the model is not built as a forecast needs it, or has too few layers.
        """
        self._layers = decoder_layers(model)
        self._schedule = schedule
        self._sources = sources(
            len(self._layers),
            schedule.dense_layers,
            schedule.layers_per_group,
            schedule.forecast_lead,
        )
        if not self._sources:
            raise ValueError(
                f"the model has {len(self._layers)} layers, and none is left behind --dense-layers "
                "and --forecast-lead groups of --layers-per-group"
            )
        self._collector = Collector(self._layers, self._sources)
        self._fitted_to: dict[int, NormalEquations] = {}

    def hold_out(self) -> None:
        """Fit to none of what is prefilled from now on."""
        self._fitted_to = self._collector.begin_part()

    def finish(self, folder: Path, described: Described, rank: int, ridge: float) -> None:
        """Fit every layer, and write the calibration."""
        held_out = self._collector.equations
        corrections: dict[int, Correction] = {}
        fits: dict[int, Fit] = {}
        for layer, source in self._sources.items():
            equations = self._fitted_to[layer]
            projection = _plain(self._layers[layer])
            correction = fit(equations, projection, rank, ridge)
            corrected = correction.added_to(projection)
            corrections[layer] = correction
            shares = (
                part.unexplained(rows)
                for part in (equations, held_out[layer])
                for rows in (projection, corrected)
            )
            fits[layer] = Fit(source, *shares)
        first = self._layers[0]
        tokens = max(equations.tokens for equations in self._fitted_to.values())
        card = Card(
            model=described.model,
            architecture=described.architecture,
            hidden_size=first.input_norm.weight.shape[0],
            layers=len(self._layers),
            query_heads=first.query_heads,
            head_dim=first.head_dim,
            **msgspec.structs.asdict(self._schedule),
            rank=rank,
            ridge=ridge,
            texts=described.texts,
            held_out=described.held_out,
            tokens=tokens,
            fits=fits,
        )
        write(folder, Calibration(card, corrections))


class Described(msgspec.Struct, frozen=True):
    """What a card says that the scheduler does not know; see Card."""

    model: str
    architecture: str
    texts: dict[str, str]
    held_out: dict[str, str]


def _plain(layer: DecoderLayer) -> torch.Tensor:
    """A layer's projection and constant, (H + 1, N) float32."""
    return projection_of(layer, torch.float32)[:-1].flatten(1)


_calibrating: Calibrating | None = None


def begin_calibration(scheduler: Any, schedule: str) -> None:
    """Begin; the schedule is a Schedule in JSON."""
    global _calibrating
    model = scheduler.tp_worker.model_runner.model
    _calibrating = Calibrating(model, msgspec.json.decode(schedule, type=Schedule))


def hold_out(scheduler: Any) -> None:
    """See `Calibrating.hold_out`."""
    assert _calibrating is not None
    _calibrating.hold_out()


def finish_calibration(
    scheduler: Any, folder: str, described: str, rank: int, ridge: float
) -> None:
    """See `Calibrating.finish`; what is described is a Described in JSON."""
    assert _calibrating is not None
    with torch.no_grad():
        _calibrating.finish(
            Path(folder), msgspec.json.decode(described, type=Described), rank, ridge
        )


CALLS = (begin_calibration, hold_out, finish_calibration)
"""These are methods of the scheduler in a process that calibrates."""

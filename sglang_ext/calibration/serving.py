"""What a scheduler process does while its model is calibrated, as the command asks it to.

The engine calls these by name, one after the other: `begin_calibration`, then texts are prefilled;
`fit_calibration`, then other texts are, which say how good the fit is; `finish_calibration` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from sglang_ext.calibration.collecting import Collector, KeyCollector
from sglang_ext.calibration.files import Calibration, Card, Fit, sources, write
from sglang_ext.calibration.fitting import Correction, NormalEquations, fit
from sglang_ext.calibration.key_statistics import KeyBasis, key_basis
from sglang_ext.pools import model_shape
from sglang_ext.projections import DecoderLayer, decoder_layers, projection_of


class Schedule(msgspec.Struct, frozen=True):
    """The flags that say which layer's input tells which layer's queries."""

    dense_layers: int
    layers_per_group: int
    forecast_lead: int


class _Fitted(NamedTuple):
    """A fit, by layer: to what, of which projections, and how good it is on other texts."""

    rank: int
    ridge: float
    equations: dict[int, NormalEquations]
    plain: dict[int, torch.Tensor]
    corrections: dict[int, Correction]
    corrected: dict[int, torch.Tensor]
    bases: dict[int, KeyBasis]


class Calibrating:
    def __init__(self, runner: Any, schedule: Schedule) -> None:
        """Collect what a model prefills from now on.

        Raises:
            ValueError: the model is not built as a forecast needs it, or has too few layers.
        """
        self._layers = decoder_layers(runner.model)
        self._architecture = type(runner.model).__name__
        self._revision = getattr(runner.model_config.hf_config, "_commit_hash", None)
        self._shape = model_shape(runner, dense_layers=0, forecasts=True)
        self._schedule = schedule
        self._sources = sources(len(self._layers), *msgspec.structs.astuple(schedule))
        self._collector = Collector(self._layers, self._sources)
        self._key_collector = KeyCollector(
            self._layers, schedule.dense_layers, self._shape, int(runner.model_config.context_len)
        )
        self._fitted: _Fitted | None = None

    def fit(self, rank: int, ridge: float) -> None:
        """Fit to what has been prefilled, and to nothing that will be."""
        equations = self._collector.begin_part()
        self._key_collector.stop()
        bases = {layer: key_basis(held) for layer, held in self._key_collector.moments.items()}
        plain = {
            layer: _flat_projection(self._layers[layer], source.is_before)
            for layer, source in self._sources.items()
        }
        corrections = {
            layer: fit(equations[layer], projection, rank, ridge)
            for layer, projection in plain.items()
        }
        corrected = {
            layer: corrections[layer].added_to(projection) for layer, projection in plain.items()
        }
        self._fitted = _Fitted(rank, ridge, equations, plain, corrections, corrected, bases)

    def finish(self, folder: Path, described: Described) -> None:
        """Write the calibration, with how good it is on what was prefilled after the fit."""
        held_out, fitted = self._collector.equations, self._fitted
        assert fitted is not None
        fits: dict[int, Fit] = {}
        for layer, source in self._sources.items():
            shares = {
                name: equations[layer].unexplained(projections[layer])
                for name, equations, projections in (
                    ("plain", fitted.equations, fitted.plain),
                    ("fitted", fitted.equations, fitted.corrected),
                    ("plain_held_out", held_out, fitted.plain),
                    ("held_out", held_out, fitted.corrected),
                )
            }
            fits[layer] = Fit(source.layer, is_before=source.is_before, **shares)
        card = Card(
            model=described.model,
            revision=self._revision,
            architecture=self._architecture,
            hidden_size=self._shape.hidden_size,
            layers=len(self._layers),
            query_heads=self._shape.query_heads,
            kv_heads=self._shape.kv_heads,
            head_dim=self._shape.head_dim,
            **msgspec.structs.asdict(self._schedule),
            rank=fitted.rank,
            ridge=fitted.ridge,
            texts=described.texts,
            held_out=described.held_out,
            tokens=max(equations.tokens for equations in fitted.equations.values()),
            fits=fits,
        )
        write(folder, Calibration(card, fitted.corrections, fitted.bases))


class Described(msgspec.Struct, frozen=True):
    """What a card says that the scheduler does not know; see Card."""

    model: str
    texts: dict[str, str]
    held_out: dict[str, str]


def _flat_projection(layer: DecoderLayer, is_before: bool) -> torch.Tensor:
    """A layer's projection and constant without its query norm, (H + 1, N) float32."""
    return projection_of(layer, torch.float32, is_before)[:-1].flatten(1)


_calibrating: Calibrating | None = None


def begin_calibration(scheduler: Any, schedule: str) -> None:
    """Begin; the schedule is a Schedule in JSON."""
    global _calibrating
    runner = scheduler.tp_worker.model_runner
    _calibrating = Calibrating(runner, msgspec.json.decode(schedule, type=Schedule))


@torch.no_grad()
def fit_calibration(scheduler: Any, rank: int, ridge: float) -> None:
    assert _calibrating is not None
    _calibrating.fit(rank, ridge)


@torch.no_grad()
def finish_calibration(scheduler: Any, folder: str, described: str) -> None:
    """See `Calibrating.finish`; what is described is a Described in JSON."""
    assert _calibrating is not None
    _calibrating.finish(Path(folder), msgspec.json.decode(described, type=Described))


CALLS = (begin_calibration, fit_calibration, finish_calibration)
"""These are methods of the scheduler in a process that calibrates."""

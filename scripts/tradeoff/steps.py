"""How long a decode step of a system takes, as `profile_tpot` measured it or as estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scripts.language.cells import with_budget, without_budget
from scripts.plan import make_planner
from scripts.shared.systems import System
from scripts.speed.jobs import Shape
from scripts.speed.records import Measurement, Results


class StepTime(NamedTuple):
    """A decode step of a batch.

    Attributes:
        milliseconds: of the median step, or as estimated.
        tokens_per_second: of the batch, by the mean step; None where it was not recorded.
    """

    milliseconds: float
    tokens_per_second: float | None


class Steps(Protocol):
    """Where the times of steps are from; `shape` is the batch and the context of all of them."""

    shape: Shape
    is_estimated: bool

    def find(self, label: str, budget: int | None) -> StepTime | None:
        """The step of a system; None if it is not known.

        Args:
            label: of the system, without its budget.
            budget: k, tokens that each KV head selects; None for a system that selects none.

        Raises:
            ValueError: there is no such system, or none such can be known.
        """
        ...


class MeasuredSteps:
    """Steps as records of `profile_tpot` have them; the first record that has one counts."""

    is_estimated = False

    def __init__(self, records: Sequence[Results], model: str, shape: Shape) -> None:
        """Read the measurements of a model and of a batch and context."""
        self.shape = shape
        self._found: dict[tuple[str, int | None], StepTime] = {}
        for results in records:
            for measured in results.measurements:
                if (measured.model, measured.shape) == (model, shape) and measured.tpot_ms:
                    key = without_budget(_system(measured, results))
                    step = StepTime(measured.tpot_ms, measured.tokens_per_second)
                    self._found.setdefault(key, step)

    @property
    def labels(self) -> list[str]:
        """The systems that were measured, without budgets."""
        return list(dict.fromkeys(label for label, _ in self._found))

    def budgets(self, label: str) -> list[int]:
        """The budgets that a system was measured with."""
        return sorted(b for found, b in self._found if found == label and b is not None)

    def find(self, label: str, budget: int | None) -> StepTime | None:
        """The step of a system, if it was measured; see Steps."""
        return self._found.get((System.parse(label).label, budget))


def _system(measured: Measurement, results: Results) -> System:
    """What was measured, with the budget that its job had where its label names none."""
    system = System.parse(measured.system)
    wanted = (measured.model, measured.system)
    engines = (job.engine for job in results.jobs if (job.model, job.system) == wanted)
    budget = next(engines, {}).get("sparse_budget")
    return system if budget is None or not system.is_sparse else system.with_budget(budget)


class EstimatedSteps:
    """Steps by the planner, which has no record of them."""

    is_estimated = True

    def __init__(self, model: str, shape: Shape, gpu: str) -> None:
        """Estimate a model on GPUs of `sglang_ext.planning.GPUS`."""
        self.shape = shape
        self._model, self._gpu = model, gpu

    def find(self, label: str, budget: int | None) -> StepTime | None:
        """The step of a system; see Steps.

        Raises:
            ValueError: it cannot be estimated.
        """
        system = with_budget(label, budget)
        seconds = self._seconds(system)
        return StepTime(1e3 * seconds, self.shape.batch / seconds)

    def _seconds(self, system: System) -> float:
        is_plain = not system.has_budget and system.servers == 1
        if not is_plain and not system.has_cache_rank and system.mode != "window":
            raise ValueError(
                f"{system.name}: no estimate; measure it: python -m scripts.profile_tpot "
                f"--shapes {self.shape} --systems {system.label}"
            )
        planner, _ = make_planner(self._model, system.server_changes, gpu=self._gpu)
        shape = (self.shape.batch, self.shape.context)
        if is_plain:
            kv_bytes = 1 if "kv_cache_dtype" in system.arguments else 2
            return planner.dense(*shape, system.gpus, kv_bytes)
        estimate = planner.cache_rank(*shape)
        return estimate.step if system.has_cache_rank else estimate.inference

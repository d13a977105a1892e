"""What is recorded of a model whose decoding of texts is scored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from scripts.language.runs import Run
from scripts.shared.systems import DENSE, SYSTEMS, System


class ReadText(msgspec.Struct, frozen=True):
    """A text as it was read.

    Attributes:
        kind: what sort of text it is.
        sha256: hash of the whole text.
        tokens: tokens of it that the model was shown.
    """

    kind: str
    sha256: str
    tokens: int


class Score(msgspec.Struct, frozen=True):
    """How far a system is from dense decoding on one text; means over the tokens that count.

    Attributes:
        text: its name.
        system: label, without the budget.
        budget: k, tokens that each KV head selects; None for a system that selects none.
        attended: most tokens that a sparse layer attends to.
        tokens: tokens that count.
        kl: KL(dense ‖ system), nats a token.
        nll_difference: what a token of the text costs more than in dense decoding, nats.
        top1_agreement: share of tokens where both have the same most probable one.
        ratio_mean: mean of the probability ratio system / dense, at most 1 a token, of tokens drawn
            from dense decoding; see divergence.py.
        ratio_p5: its 5th percentile.
        largest_difference: of two log-probabilities of a token of the text.
        sparse_from: tokens that were decoded before attention was sparse.
        kl_after_transition: KL of each token from the first that sparse attention predicted, also
            of those that do not count.
        recall, attention_mass: of the selections, see docs/recall.md; None where not measured.
        late_steps, stale_steps: steps that waited for their selection, and that missed it.
    """

    text: str
    system: str
    budget: int | None
    attended: int
    tokens: int
    kl: float
    nll_difference: float
    top1_agreement: float
    ratio_mean: float
    ratio_p5: float
    largest_difference: float
    sparse_from: int | None
    kl_after_transition: list[float]
    recall: float | None = None
    attention_mass: float | None = None
    late_steps: int = 0
    stale_steps: int = 0

    @property
    def parsed(self) -> System:
        """The system, with its budget."""
        system = System.parse(self.system)
        return system if self.budget is None else system.with_budget(self.budget)

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the score, for maps."""
        return self.parsed.label, self.text


class LayerRecall(msgspec.Struct, frozen=True):
    """Means over the heads of a layer and all texts; see docs/recall.md."""

    recall: float
    attention_mass: float


class TextRun(Run, kw_only=True):
    """How scores came about.

    Attributes:
        context: tokens of a text that are read and decoded.
        scored: the last of them, which count.
        warm_up: those before, which are decoded while systems become sparse.
        texts: by name.
        layers: recall of systems by layer of the model, by label.
    """

    context: int
    scored: int
    warm_up: int
    texts: dict[str, ReadText]
    layers: dict[str, dict[int, LayerRecall]] = msgspec.field(default_factory=dict)


class Report(msgspec.Struct):
    """The content of `results.json`."""

    run: TextRun
    cells: list[Score]


def without_budget(system: System) -> tuple[str, int | None]:
    """The label of a system without its budget, and the budget."""
    changes = {name: v for name, v in system.changes.items() if name != "sparse_budget"}
    budget = system.changes.get("sparse_budget") if system.mode != DENSE else None
    return msgspec.structs.replace(system, changes=changes).label, budget


class Cell(NamedTuple):
    """A system with a budget, and its scores, one a text."""

    system: str
    budget: int | None
    scores: list[Score]


def cells_of(scores: Iterable[Score]) -> list[Cell]:
    """Scores of the same system and budget together, in the order of systems and budgets."""
    cells: dict[tuple[str, int | None], Cell] = {}
    for score in scores:
        key = (score.system, score.budget)
        cells.setdefault(key, Cell(*key, [])).scores.append(score)
    places, labels = list(SYSTEMS), list(dict.fromkeys(cell.system for cell in cells.values()))
    return sorted(
        cells.values(),
        key=lambda c: (
            places.index(c.system.partition(":")[0]), labels.index(c.system), c.budget or 0
        ),
    )  # fmt: skip

"""What is recorded of a model whose decoding of texts is scored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from scripts.language.divergence import Divergence
from scripts.shared.comparison import Run
from scripts.shared.systems import SYSTEMS


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


class Score(Divergence, frozen=True, kw_only=True):
    """How far a system is from dense decoding on one text, in the tokens that count.

    Attributes:
        text: its name.
        system: label, without the budget.
        budget: k, tokens that each KV head selects; None for a system that selects none.
        attended: most tokens that a sparse layer attends to.
        tokens: tokens that count.
        sparse_from: tokens that were decoded before attention was sparse.
        kl_after_transition: KL of each token from the first that sparse attention predicted, also
            of those that do not count.
        late_steps, stale_steps: steps that waited for their selection, and that missed it.
    """

    text: str
    system: str
    budget: int | None
    attended: int
    tokens: int
    sparse_from: int | None
    kl_after_transition: list[float]
    late_steps: int = 0
    stale_steps: int = 0


class TextRun(Run, kw_only=True):
    """How scores came about.

    Attributes:
        context: tokens of a text that are read and decoded.
        scored: the last of them, which count.
        warm_up: those before, which are decoded while systems become sparse.
        texts: by name.
    """

    context: int
    scored: int
    warm_up: int
    texts: dict[str, ReadText]


class Report(msgspec.Struct):
    """The content of `results.json`."""

    run: TextRun
    cells: list[Score]


class Cell(NamedTuple):
    """A system with a budget, and its scores, one a text."""

    system: str
    budget: int | None
    scores: list[Score]


def cells_of(scores: Iterable[Score]) -> list[Cell]:
    """Scores of the same system and budget together.

    Cells are in the order of SYSTEMS, of labels as they come, and of budgets.
    """
    groups: dict[tuple[str, int | None], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.system, score.budget), []).append(score)
    places, labels = list(SYSTEMS), [system for system, _ in groups]

    def place(cell: Cell) -> tuple[int, int, int]:
        name = cell.system.partition(":")[0]
        return places.index(name), labels.index(cell.system), cell.budget or 0

    return sorted((Cell(*key, there) for key, there in groups.items()), key=place)

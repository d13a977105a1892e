"""What all reports share: tables, numbers and colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"),
    *("#000000", "#5B3A8C", "#8C6D31"),
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all but the first two columns are numbers."""
    rule = ["---" if column < 2 else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals, or a dash for none."""
    return "–" if value is None else f"{value:.{digits}f}"

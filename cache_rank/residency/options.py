"""Options of a residency format: which names there are, which values, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cache_rank.config import OptionValue


class Between(NamedTuple):
    """A number of a closed range, or a whole one."""

    least: float
    most: float
    default: float
    whole: bool = False

    def accepts(self, value: OptionValue) -> bool:
        if isinstance(value, str) or not self.least <= value <= self.most:
            return False
        return not self.whole or value == int(value)

    def __str__(self) -> str:
        return f"{'a whole number ' if self.whole else ''}from {self.least:g} to {self.most:g}"


class OneOf(NamedTuple):
    """One of a few values, the first of which is the default."""

    choices: tuple[OptionValue, ...]

    @property
    def default(self) -> OptionValue:
        return self.choices[0]

    def accepts(self, value: OptionValue) -> bool:
        return value in self.choices

    def __str__(self) -> str:
        return " or ".join(str(choice) for choice in self.choices)


Ranges = Mapping[str, Between | OneOf]
"""The values that each option of a format may take, and its default."""


def parse_options(text: str) -> dict[str, OptionValue]:
    """Parse options written as name=value, separated by commas.

    Raises:
        ValueError: an entry is not of that form, or a name is given twice.
    """
    options: dict[str, OptionValue] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not (name and equals and value):
            raise ValueError(f"kv_residency_options {entry}: write name=value, separated by commas")
        if name in options:
            raise ValueError(f"kv_residency_options {name}={value}: {name} is given twice")
        options[name] = _number(value)
    return options


def _number(text: str) -> OptionValue:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

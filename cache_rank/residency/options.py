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
        """Whether `value` is such a number."""
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
        """Whether `value` is a choice."""
        return value in self.choices

    def __str__(self) -> str:
        return " or ".join(str(choice) for choice in self.choices)


Ranges = Mapping[str, Between | OneOf]
"""The values that each option of a format may take, and its default."""


def with_defaults(options: Mapping[str, OptionValue], allowed: Ranges) -> dict[str, OptionValue]:
    """All options of a format: those that are given, and the defaults of the others."""
    return {name: options.get(name, values.default) for name, values in allowed.items()}


def require_options(format_name: str, options: Mapping[str, OptionValue], allowed: Ranges) -> None:
    """Check that every option is known and in range.

    Raises:
        ValueError: one is not; names the allowed options with their ranges.
    """
    described = ", ".join(f"{name} {values}" for name, values in allowed.items())
    for name, value in options.items():
        if name not in allowed or not allowed[name].accepts(value):
            raise ValueError(
                f"kv_residency_options {name}={value}: {format_name} takes "
                f"{described or 'no options'}"
            )


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

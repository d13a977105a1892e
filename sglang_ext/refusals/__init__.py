"""What cannot be had together with a cache rank: what was asked, why not, and what to do.

What would give wrong tokens or end in a crash is refused; `servers` and `models` hold the tables.
A table is read from the top: a row may rely on the rows above it, which did not refuse. Other flags
that nobody has tried, `known` warns of.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_ext import compat
from sglang_ext.flags import CacheRankFlags, field_of, flag_of

logger = logging.getLogger(__name__)

ALLOW_LARGE_BUDGET_VARIABLE = "CACHE_RANK_ALLOW_LARGE_BUDGET"
"""This variable, set to 1, allows a working set above the sparse threshold; sparse decode then
equals dense decode."""


class UnsupportedError(ValueError):
    """The user asked for something that cannot be had together with a cache rank."""


DROP = "drop {given}"
"""The remedy of most rows."""

PLAIN = "pass --cache-rank-gpus 0 for plain SGLang"
"""The remedy of what only SGLang without sparse decode can have."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A row of a table.

    Attributes:
        asked: the flags that ask for it, separated by blanks; a key of --cache-rank-config is
            written as a flag, too.
        why: why it cannot be had; a function of the arguments where the reason has numbers.
        remedy: what to do. `{given}` stands for the flags that are not at their defaults.
        when: tells whether arguments ask for it; without one, they do when some flag is not at
            its default.
    """

    asked: str
    why: str | Callable[[CacheRankFlags], str]
    remedy: str = DROP
    when: Callable[[CacheRankFlags], bool] | None = None

    def refuses(self, args: CacheRankFlags) -> bool:
        """Whether this row refuses arguments."""
        return bool(self._given(args)) if self.when is None else self.when(args)

    def message(self, args: CacheRankFlags) -> str:
        """Say in two sentences why the arguments are refused, and what to do."""
        given = self._given(args) or self.asked.split()[:1]
        asked = " ".join(_as_typed(name, getattr(args, field_of(name))) for name in given)
        why = self.why if isinstance(self.why, str) else self.why(args)
        remedy = self.remedy.format(given=" and ".join(flag_of(field_of(name)) for name in given))
        return f"{asked}: {why}. {remedy[0].upper()}{remedy[1:]}."

    def _given(self, args: CacheRankFlags) -> list[str]:
        """The flags that are not at their defaults."""
        defaults = compat.default_values(type(args))
        names = [name for name in self.asked.split() if name not in compat.ABSENT_FLAGS]
        return [name for name in names if getattr(args, field_of(name)) != defaults[field_of(name)]]


def refuse(args: CacheRankFlags, rows: Iterable[Refusal]) -> None:
    """Refuse arguments by the first row that does.

    Raises:
        UnsupportedError: a row refuses them.
    """
    for row in rows:
        if row.refuses(args):
            raise UnsupportedError(row.message(args))


def refuse_untested_sglang(args: CacheRankFlags) -> None:
    """Refuse a release of SGLang that nobody has tested, and say so of one not tested on GPUs.

    Raises:
        UnsupportedError: the installed release is not tested, and nobody asked for it all the same.
    """
    release, key = compat.RELEASE, "--cache-rank-config '{\"allow_untested_sglang\": true}'"
    if not compat.is_in(compat.TESTED):
        if not args.allow_untested_sglang:
            raise UnsupportedError(
                f"SGLang {release} is not tested with a cache rank: {_listed(compat.TESTED)} are. "
                f"Run pip install 'sglang=={compat.TESTED[-1]}', or pass {key} to try it all "
                "the same."
            )
        logger.warning("cache rank: SGLang %s is not tested (%s)", release, key)
    elif args.on_gpu and not compat.is_in(compat.TESTED_ON_GPUS):
        logger.warning(
            "cache rank: SGLang %s is not tested on GPUs: %s are",
            release,
            _listed(compat.TESTED_ON_GPUS),
        )


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}"


def _as_typed(name: str, value: Any) -> str:
    """A flag with its value, as far as the value is a word of the command line."""
    is_word = isinstance(value, str | int | float) and not isinstance(value, bool)
    typed = flag_of(field_of(name))
    return f"{typed} {value}" if is_word else typed

"""What cannot be had together with sparse decode: what was asked, why not, and what to do.

What would give wrong tokens or end in a crash is refused. `servers` and `models` object to what
sparse decode does not allow, wherever tokens are selected, and separately to what the exchange with
a cache rank in a process of its own does not. `ineffective_flags` warns of what has no effect,
and `known` of flags that nobody has tried.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sglang_ext import compat
from sglang_ext.flags import CacheRankFlags, field_of, flag_of

logger = logging.getLogger(__name__)

ALLOW_LARGE_BUDGET_VARIABLE = "CACHE_RANK_ALLOW_LARGE_BUDGET"
"""This variable, set to 1, allows a working set above the sparse threshold; sparse decode then
equals dense decode."""

DROP = "drop {given}"
"""The usual remedy."""

PLAIN = "pass --cache-rank-gpus 0 for plain SGLang"
"""The remedy of what only SGLang without sparse decode can have."""


class UnsupportedError(ValueError):
    """The user asked for something that cannot be had together with sparse decode."""


class Objection(NamedTuple):
    """What speaks against the arguments.

    Attributes:
        asked: the flags that ask for it, separated by blanks; a key of --cache-rank-config is
            written as a flag, too. Those that are not at their defaults are named.
        remedy: what to do. `{given}` stands for the flags that are named.
    """

    asked: str
    why: str
    remedy: str = DROP

    def message(self, args: CacheRankFlags) -> str:
        """Say in two sentences what is wrong with the arguments, and what to do."""
        named = _given(args, self.asked) or self.asked.split()[:1]
        asked = " ".join(_as_typed(flag, getattr(args, field_of(flag))) for flag in named)
        remedy = self.remedy.format(given=" and ".join(flag_of(field_of(flag)) for flag in named))
        return f"{asked}: {self.why}. {remedy[0].upper()}{remedy[1:]}."


def of_flags(args: CacheRankFlags, reasons: Mapping[str, str]) -> Iterator[Objection]:
    """Object to flags that are not at their defaults.

    Args:
        reasons: why flags, separated by blanks, can have no other value.
    """
    for asked, why in reasons.items():
        if _given(args, asked):
            yield Objection(asked, why)


def refuse(args: CacheRankFlags, objections: Iterable[Objection]) -> None:
    """Refuse arguments by the first objection; those behind it may rely on there being none.

    Raises:
        UnsupportedError: there is an objection.
    """
    for objection in objections:
        raise UnsupportedError(objection.message(args))


def refuse_untested_sglang(args: CacheRankFlags) -> None:
    """Refuse a release of SGLang that nobody has tested.

    Raises:
        UnsupportedError: the installed release is not tested, and nobody asked for it all the same.
    """
    release, key = compat.RELEASE, "--cache-rank-config '{\"allow_untested_sglang\": true}'"
    if release.base_version not in compat.TESTED:  # what leads up to a release counts as it
        if not args.allow_untested_sglang:
            raise UnsupportedError(
                f"SGLang {release} is not tested with a cache rank: {', '.join(compat.TESTED)} "
                f"are. Run pip install 'sglang=={compat.TESTED[-1]}', or pass {key} to try it all "
                "the same."
            )
        logger.warning("cache rank: SGLang %s is not tested (%s)", release, key)


def _given(args: CacheRankFlags, asked: str) -> list[str]:
    """Those of some flags that are not at their defaults."""
    defaults = compat.default_values(type(args))
    flags = [flag for flag in asked.split() if flag not in compat.ABSENT_FLAGS]
    return [flag for flag in flags if getattr(args, field_of(flag)) != defaults[field_of(flag)]]


def _as_typed(flag: str, value: Any) -> str:
    """A flag with its value, as far as the value is a word of the command line."""
    is_word = isinstance(value, str | int | float) and not isinstance(value, bool)
    typed = flag_of(field_of(flag))
    return f"{typed} {value}" if is_word else typed

"""Our flags on a command line: each by itself, and those that are rarely turned as one object."""

from __future__ import annotations

import argparse
import functools
from typing import Any, get_type_hints

import msgspec
from sglang.srt.arg_groups.arg_utils import add_cli_args_from_dataclass

from sglang_ext import compat
from sglang_ext.flags import CONFIG_FLAG, CONFIG_KEYS, SGLANG_FIELDS, CacheRankFlags


@functools.cache
def _types_of_fields() -> dict[str, Any]:
    return get_type_hints(CacheRankFlags)


def read_config(text: str) -> dict[str, Any]:
    """Read the JSON object of CONFIG_FLAG.

    Raises:
        ValueError: it is no JSON object, or a key is unknown or has a value of another kind.
    """
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{text}: {error}") from None
    found = {}
    for key, value in given.items():
        if key not in CONFIG_KEYS:
            raise ValueError(f"unknown key {key}; the keys are {', '.join(CONFIG_KEYS)}")
        try:
            found[key] = msgspec.convert(value, _types_of_fields()[key])
        except msgspec.ValidationError as error:
            raise ValueError(f"{key}: {error}") from None
    return found


class _ReadConfig(argparse._StoreAction):
    """Sets the field of each key; keys of a flag given twice add up.

    SGLang's reader of --config takes no other actions than this kind.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        try:
            found = read_config(values)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        for field, value in found.items():
            setattr(namespace, field, value)


def add_flags(parser: argparse.ArgumentParser, kind: type[CacheRankFlags]) -> None:
    """Add our flags to a parser, and list the keys of CONFIG_FLAG."""
    defaults = compat.default_values(kind)
    fields = [name for name in defaults if name not in {*SGLANG_FIELDS, *CONFIG_KEYS}]
    ours = parser.add_argument_group("cache rank")
    add_cli_args_from_dataclass(ours, kind, fields=fields)
    ours.add_argument(
        CONFIG_FLAG,
        action=_ReadConfig,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help="JSON object of settings that are rarely turned; its keys are below.",
    )
    hints = get_type_hints(CacheRankFlags, include_extras=True)
    lines = [f"{key:28} {hints[key].__metadata__[0].help}" for key in CONFIG_KEYS]
    parser.add_argument_group(f"keys of {CONFIG_FLAG}", "\n".join(lines))

"""The name of our transfer backend, as SGLang reads it."""

from __future__ import annotations

import functools

from sglang.srt.disaggregation.utils import TransferBackend

from sglang_ext.flags import TRANSFERS


@functools.cache
def register() -> None:
    """Make the name known to SGLang, whose backends are an enumeration without a registry."""
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = TRANSFERS.upper(), TRANSFERS
    TransferBackend._member_map_[member._name_] = member
    TransferBackend._value2member_map_[TRANSFERS] = member
    TransferBackend._member_names_.append(member._name_)

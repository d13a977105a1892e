"""Reads command lines as a server does, and makes the models that they name."""

from __future__ import annotations

import functools
import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang_ext import cpu, plugin, server_args
from sglang_ext.refusals import UnsupportedError
from sglang_ext.server_args import BUNDLED_MODEL, CacheRankServerArgs, parse_server_args

Make = Callable[..., CacheRankServerArgs]


def parse(argv: Sequence[str]) -> CacheRankServerArgs:
    """Parse the command line of a server that has a cache rank unless it says otherwise."""
    return parse_server_args(["--cache-rank-gpus", "1", *argv])


@functools.cache
def parser() -> ArgumentParser:
    """One parser for all tests: SGLang's has hundreds of flags."""
    plugin.register()  # only then does the command line know the name of our backend
    return server_args.argument_parser()


SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, eq=False)
class Model:
    """A model of a family, and how its configuration differs from the family's."""

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "ForCausalLM"
    small: bool = True

    def __str__(self) -> str:
        changes = (f"{name}={value}" for name, value in self.changes.items())
        return " ".join([f"{self.family}{self.kind}", *changes])

    def write(self, folder: Path) -> Path:
        """Make a model folder without weights."""
        values = getattr(transformers, f"{self.family}Config")(**(SMALL if self.small else {}))
        architecture = f"{self.family.removesuffix('Text')}{self.kind}"
        config = {**values.to_dict(), **self.changes, "architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


LLAMA = Model("Llama")


def pretend_gpus(count: int, monkeypatch: pytest.MonkeyPatch, generation: int = 9) -> None:
    monkeypatch.setattr(cpu, "has_gpu", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    monkeypatch.setattr(server_args, "is_flashinfer_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)


def refusal_of(flags: str, model: Path = BUNDLED_MODEL) -> str:
    with pytest.raises(UnsupportedError) as caught:
        parse(["--model-path", str(model), *flags.split()])
    return str(caught.value)

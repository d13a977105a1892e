"""Forced decoding: a served model decodes a text, and says at every token what it expected.

The tokens of the text take the place of those that the model would sample, so that every system
decodes the same ones. A custom logit processor does this in the server's process: SGLang runs it on
the logits of every step, and with `--enable-custom-logit-processor` takes it from a request. It
also appends the logits, as they came, to a file of the request: through the HTTP API SGLang returns
no more than the best log-probabilities of a step, as JSON, and computes them after this processor.

A server with that flag runs the code that a client sends: it should listen on loopback only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from scripts.shared.serving import Client, ServerError
from sglang_ext import compat

SERVER_FLAGS = ("--enable-custom-logit-processor",)

REQUEST_SECONDS = 3600.0

_KEY = "forced"


class ForcedTokens(CustomLogitProcessor):
    """Lets a request sample the tokens that it names, and keeps their logits."""

    def __call__(self, logits: Tensor, custom_param_list: Any = None) -> Tensor:
        """Force the next token of each request, a row of the logits, that has one left."""
        rows, next_tokens, files = [], [], []
        for row, params in enumerate(custom_param_list):
            forced = params[_KEY]
            if _reads_prompt(params["__req__"]) or forced["step"] == len(forced["tokens"]):
                continue
            rows.append(row)
            next_tokens.append(forced["tokens"][forced["step"]])
            files.append(Path(forced["file"]))
            forced["step"] += 1
        on_host = logits[rows].float().cpu().numpy()
        for path, kept in zip(files, on_host, strict=True):
            with path.open("ab") as file:
                file.write(kept.tobytes())
        logits[rows] = -torch.inf
        logits[rows, next_tokens] = 0.0
        return logits


def _reads_prompt(request: Any) -> bool:
    """Whether more of the prompt is to come: SGLang samples after each chunk of it."""
    read = request.extend_end if compat.IS_NEW else request.extend_range.end
    return int(read) < len(request.origin_input_ids)


class Forced(NamedTuple):
    """A text that was decoded by force."""

    tokens: list[int]
    file: Path  # their logits, (tokens, vocabulary) float32
    statistics: dict[str, Any]  # what a cache rank's server says of it; empty without one

    def log_probabilities(self, first: int) -> Tensor:
        """Log-probabilities of the tokens from `first` on, (tokens, vocabulary) float64."""
        logits = torch.from_numpy(np.fromfile(self.file, np.float32))
        return logits.view(len(self.tokens), -1)[first:].double().log_softmax(-1)


def force(server: Client, prompt: Sequence[int], tokens: Sequence[int], file: Path) -> Forced:
    """Let a server decode given tokens after a prompt.

    The server was started with SERVER_FLAGS, on this machine, in the folder of this package. The
    file is written, see Forced. ServerError if other tokens were decoded.
    """
    file.unlink(missing_ok=True)
    forced = {"tokens": list(tokens), "file": str(file.absolute()), "step": 0}
    answer = server.generate(
        prompt,
        len(tokens),
        timeout=REQUEST_SECONDS,
        custom_logit_processor=ForcedTokens.to_str(),
        sampling_params={"custom_params": {_KEY: forced}},
    )
    if answer["output_ids"] != list(tokens):
        raise ServerError("the server decoded other tokens than those that were forced")
    statistics = answer["meta_info"].get("cache_rank") or {}
    return Forced(list(tokens), file, statistics)

"""Serves a model on a text, and records its keys, values and queries."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from cache_rank.measure.recording import RECORD_VARIABLE
from scripts.formats.samples import Sample, read_recording
from scripts.shared.models import model_config
from scripts.shared.serving import serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

_STEPS_BEFORE = 8
"""So many tokens are decoded while the prompt is shipped, and have no recorded query."""

_SECONDS_TO_WRITE = 30.0
"""A cache rank that has answered a step writes it within this time."""


def served_sample(model_path: Path, text: Path, tokens: int, steps: int) -> Sample:
    """The keys, values and queries of a model that reads a text and continues it greedily.

    The real server of the model has a working set of all tokens: it attends to every token, as it
    does without a cache rank.

    Args:
        model_path: folder of the model and its tokenizer.
        text: the file whose beginning is the prompt, in UTF-8.
        tokens: length of the sequence.
        steps: newest tokens of it, which are decoded, and whose queries are recorded.

    Raises:
        ValueError: the model cannot take as many tokens, the text has not as many, or one of them
            cannot be read.
    """
    longest = model_config(str(model_path)).get("max_position_embeddings", tokens)
    if tokens > longest:
        raise ValueError(f"--tokens {tokens}: {model_path} takes {longest}")
    decoded = steps + _STEPS_BEFORE
    prompt = _read_tokens(model_path, text, tokens - decoded)
    flags = [
        *("--model-path", str(model_path), "--skip-tokenizer-init", "--dense-layers", "0"),
        *("--sparse-threshold", "256", "--sparse-budget", str(tokens), "--query-window", "1"),
        *("--max-swap-tokens", str(tokens), "--bulk-chunk-tokens", str(tokens)),
        *("--max-sparse-requests", "1"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        variables = {RECORD_VARIABLE: folder, ALLOW_LARGE_BUDGET_VARIABLE: "1"}
        with serve(flags, variables) as server:
            server.generate(prompt, decoded + 1)  # the last token has no keys
            # The server may have computed a step more, whose token nobody got.
            found = _read_when_written(Path(folder), tokens, steps + 1)
    queries = found.queries[: found.steps - (found.tokens - tokens)][-steps:]
    keys, values = (part[:, :, :tokens] for part in (found.keys, found.values))
    source = f"{text.name}, as read by {model_path.absolute().name}"
    return Sample(keys, values, queries, found.scale, source)


def _read_when_written(folder: Path, tokens: int, steps: int) -> Sample:
    """Read a recording of so many tokens, the last of which may still be on its way to the disk.

    Raises:
        RuntimeError: it did not get there.
    """
    deadline = time.monotonic() + _SECONDS_TO_WRITE
    while (found := read_recording(folder, steps)).tokens < tokens:
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {tokens} tokens {found.tokens} were recorded in {folder}")
        time.sleep(0.1)
    return found


def _read_tokens(model_path: Path, text: Path, count: int) -> list[int]:
    try:
        written = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text: {error}") from None
    found = AutoTokenizer.from_pretrained(model_path)(written)["input_ids"]
    if len(found) < count:
        raise ValueError(f"--text {text}: {len(found)} tokens, and the sequence takes {count}")
    return list(found[:count])

"""Prompts of an exact length: a question in the chat template of a model, about a long document.

The document is cut in tokens, so that a prompt has the length that is asked for whatever the
tokenizer makes of its text.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import AutoTokenizer

from scripts.shared.models import folder_of
from sglang_ext.calibration.texts import LONGEST_TOKEN, Text

_DOCUMENT = "[[document]]"


class Reader:
    """The tokenizer of a model, and its chat template."""

    def __init__(self, model: str) -> None:
        """Take a folder, or a name of scripts.shared.models.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder_of(model))
        if not self._tokenizer.chat_template:
            raise ValueError(f"{model}: its tokenizer has no chat template: take a chat model")

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, and none that is special."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def beginning(self, text: Text, tokens: int) -> list[int]:
        """The first tokens of a text.

        Raises:
            ValueError: the text is shorter.
        """
        start = text.read()[: LONGEST_TOKEN * tokens]  # a book takes a minute
        ids = self.tokens(start)
        if len(ids) < tokens:
            raise ValueError(f"{text.name}: has {len(ids)} tokens, and {tokens} are needed")
        return ids[:tokens]

    @functools.cache  # noqa: B019 (a reader lives as long as the process)
    def paragraphs(self, text: Text) -> list[list[int]]:
        """A text as it is divided by empty lines, each paragraph with the empty line behind it."""
        parts = re.split(r"\n\s*\n", text.read())
        return [self.tokens(f"{part.strip(chr(10))}\n\n") for part in parts if part.strip()]

    def passage(self, text: Text, tokens: int, rng: random.Random) -> list[list[int]]:
        """Paragraphs that follow one another in a text, `tokens` in all; the last is cut.

        Raises:
            ValueError: the text is shorter.
        """
        paragraphs = self.paragraphs(text)
        ends = list(accumulate(map(len, paragraphs)))
        starts = [
            index
            for index, (end, ids) in enumerate(zip(ends, paragraphs, strict=True))
            if end - len(ids) + tokens <= ends[-1]
        ]
        if not starts:
            raise ValueError(f"{text.name}: has {ends[-1]} tokens, and {tokens} are needed")
        chosen: list[list[int]] = []
        missing = tokens
        for ids in paragraphs[rng.choice(starts) :]:
            if missing <= 0:
                break
            chosen.append(ids[:missing])
            missing -= len(ids)
        return chosen

    def ask(self, before: str, after: str) -> tuple[list[int], list[int]]:
        """The tokens of a user's message around a document, in the chat template.

        Returns:
            All that stands before the document, and all behind it up to where the answer begins.
        """
        message = {"role": "user", "content": f"{before}{_DOCUMENT}{after}"}
        rendered: str = self._tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        head, _, tail = rendered.partition(_DOCUMENT)
        return self.tokens(head), self.tokens(tail)


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    """All tokens, one part after the other."""
    return [token for part in parts for token in part]

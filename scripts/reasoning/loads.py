"""What streams send: how many there are, and how long prompts and answers are."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from scripts.shared.streaming import Request
from scripts.speed.serving import make_prompts

SKEW = 1.5
"""The first parameter of the Beta distribution of answers: most are short, and few very long."""

_FORM = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:-(\d+))?\+([1-9]\d*)(?:/(\d+))?")


class Load(NamedTuple):
    """Streams that send their next request when their last one has ended; lengths are in tokens."""

    name: str  # what `parse` reads
    streams: int  # requests at once
    least_prompt: int  # all lengths from this to the next are equally likely
    most_prompt: int
    mean_answer: int  # all answers are alike if this is the next
    most_answer: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read `64x512+12000`, or `64x200-1000+8000/32000`; ValueError if it is neither."""
        if match := _FORM.fullmatch(text):
            streams, least, most, mean, longest = (int(part or 0) for part in match.groups())
            load = cls(text, streams, least, most or least, mean, longest or mean)
            if least <= load.most_prompt and mean <= load.most_answer:
                return load
        raise ValueError(
            f"{text!r} is not a load: write STREAMSxPROMPT+ANSWER, as in 64x512+12000; PROMPT may "
            "be LEAST-MOST, and ANSWER may be MEAN/MOST"
        )

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return self.most_prompt + self.most_answer

    def draw(self, rounds: int, vocabulary: int, seed: int) -> list[Request]:
        """The requests, so many a stream, the same for the same seed; no two share a prefix.

        Answers have a Beta distribution, which has both its mean and its maximum exactly.
        """
        source, requests = random.Random(f"{seed} {self.name}"), rounds * self.streams
        lengths = [source.randint(self.least_prompt, self.most_prompt) for _ in range(requests)]
        answers = [self.mean_answer] * requests
        if tail := SKEW * (self.most_answer / self.mean_answer - 1):
            shares = (source.betavariate(SKEW, tail) for _ in range(requests))
            answers = [max(1, round(share * self.most_answer)) for share in shares]
        return list(map(Request, make_prompts(lengths, vocabulary, seed), answers))

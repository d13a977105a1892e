"""Reasoning loads: many streams of short prompts and long answers, and what the answers say."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from scripts.shared.command import UsageError
from scripts.shared.statistics import quantile
from scripts.shared.streaming import Answer, Request
from scripts.speed import serving

SKEW = 1.5
"""The first parameter of the Beta distribution of answers: most are short, and few very long."""

CURVE_POINTS, SLICES = 16, 2000
"""A curve over the context has at most so many points, and is made of so many slices of time."""

MOST_STREAMS = 0.9
"""A slice of time counts in which this share of the streams decode."""

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
        """Read `64x512+12000`, or `64x200-1000+8000/32000`; UsageError if it is neither."""
        if match := _FORM.fullmatch(text):
            streams, least, most, mean, longest = (int(part or 0) for part in match.groups())
            load = cls(text, streams, least, most or least, mean, longest or mean)
            if least <= load.most_prompt and mean <= load.most_answer:
                return load
        raise UsageError(
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
        return list(map(Request, serving.make_prompts(lengths, vocabulary, seed), answers))


class Gap(msgspec.Struct, frozen=True, order=True):
    """How long a stream was silent, and its context then."""

    seconds: float
    context: int


class Run(msgspec.Struct, frozen=True):
    """A load was sent once; times are in seconds."""

    requests: int
    tokens: int  # of all answers
    seconds: float  # from the first request sent to the last token
    ttft_p50: float  # from a request sent to its first token
    ttft_p99: float
    tpot_p50: float  # of a request, from its first to its last token
    tpot_p99: float
    gap: Gap  # the longest of any stream
    sparse_requests: int
    sparse_share: float  # of all tokens
    client_share: float  # processor time of the client by time; near 1 it is what is measured
    curve: dict[int, float]  # tokens a second by context

    @property
    def tokens_per_second(self) -> float:
        """From start to end."""
        return self.tokens / self.seconds


class Measurement(serving.Measurement, kw_only=True):
    """One system under one load."""

    load: str
    run: Run | None = None


def measure(load: Load, answers: Sequence[Answer], client_seconds: float) -> Run:
    """What is reported of a load that took this process so much processor time."""
    begun = min(answer.sent for answer in answers)
    seconds = max(answer.times[-1] for answer in answers) - begun
    tokens = sum(answer.tokens[-1] for answer in answers)
    ttft = [answer.times[0] - answer.sent for answer in answers]
    tpot = [time_per_token(answer) for answer in answers]
    return Run(
        requests=len(answers),
        tokens=tokens,
        seconds=seconds,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile(tpot, 0.5),
        tpot_p99=quantile(tpot, 0.99),
        gap=max(map(longest_gap, answers)),
        sparse_requests=sum(answer.sparse_steps > 0 for answer in answers),
        sparse_share=sum(answer.sparse_steps for answer in answers) / tokens,
        client_share=client_seconds / seconds,
        curve=curve(answers, load.streams, 1 << (load.longest // CURVE_POINTS).bit_length()),
    )


def time_per_token(answer: Answer) -> float:
    """Seconds a token after the first chunk."""
    tokens = answer.tokens[-1] - answer.tokens[0]
    return (answer.times[-1] - answer.times[0]) / max(1, tokens)


def longest_gap(answer: Answer) -> Gap:
    """The longest time between two chunks, which may have several tokens; none before the first."""
    chunks = zip(answer.times, answer.tokens, strict=True)
    gaps = [
        Gap(now - then, answer.prompt + tokens)
        for (then, tokens), (now, _) in itertools.pairwise(chunks)
    ]
    return max(gaps, default=Gap(0.0, answer.prompt))


def curve(answers: Sequence[Answer], streams: int, width: int) -> dict[int, float]:
    """Tokens a second of all streams together, by the mean context of those that decode.

    Time is cut into equal slices. A slice has the tokens that were written in it, where those of a
    chunk are spread evenly over the time since the last one, and a mean context. Slices in which
    fewer than MOST_STREAMS decode are left out, so that neither the start nor the end, when there
    are no more requests, looks like an effect of the context. The others are gathered in bins of
    `width` tokens of context, which are named by their first.
    """
    first, last = min(a.times[0] for a in answers), max(a.times[-1] for a in answers)
    edges, slice_seconds = np.linspace(first, last, SLICES + 1, retstep=True)
    middles = edges[:-1] + slice_seconds / 2
    written, decoding, context = np.zeros((3, SLICES))
    for answer in answers:
        # Before the first chunk and after the last one, the interpolation stands still.
        written += np.diff(np.interp(edges, answer.times, answer.tokens))
        decodes = (answer.times[0] <= middles) & (middles < answer.times[-1])
        decoding += decodes
        context += decodes * (answer.prompt + np.interp(middles, answer.times, answer.tokens))
    full = decoding >= max(1.0, MOST_STREAMS * streams)
    bins = (context[full] / decoding[full] // width).astype(int)
    tokens, slices = np.bincount(bins, written[full]), np.bincount(bins)
    return {
        int(i) * width: float(tokens[i] / (slices[i] * slice_seconds))
        for i in np.flatnonzero(slices)
    }

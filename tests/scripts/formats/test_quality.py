"""Errors of a format, against loops over tokens and heads."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.score.reference import score_tokens
from scripts.compare_formats import config_for
from scripts.formats.quality import compare
from scripts.formats.synthetic import synthetic_sample


def test_errors_are_those_of_the_definition() -> None:
    sample = synthetic_sample(600, 2, 1, 4, 2, 32, dtype=torch.float32)
    keys, values = (part.to(torch.float8_e4m3fn).float() for part in (sample.keys, sample.values))

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).square().sum() / one.square().sum())

    outputs: list[list[torch.Tensor]] = [[], []]
    scores: list[list[torch.Tensor]] = [[], []]
    centred: list[list[torch.Tensor]] = [[], []]
    for side, (k, v) in enumerate(((sample.keys, sample.values), (keys, values))):
        for tokens, query in zip((599, 600), sample.queries, strict=True):
            for head in range(4):
                logits = k[0, head // 2, :tokens] @ query[0, head] * 32**-0.5
                outputs[side].append(logits.softmax(0) @ v[0, head // 2, :tokens])
            score = score_tokens(query, k[:, :, :tokens], 32**-0.5)
            scores[side].append(score)
            score = score[..., 4 : tokens - 1 - 64]  # neither sinks nor recent tokens
            centred[side].append((score - score.mean(-1, keepdim=True)).flatten())
    found = compare(sample, keys, values, scores[1], config_for(sample, 32))
    older = slice(0, 600 - 256)
    assert found.key_error == pytest.approx(error(sample.keys[:, :, older], keys[:, :, older]))
    assert found.value_error == pytest.approx(
        error(sample.values[:, :, older], values[:, :, older])
    )
    for measured, (true, other) in (
        (found.output_error, outputs),
        (found.score_error, centred),
    ):
        assert measured == pytest.approx(error(torch.cat(true), torch.cat(other)), rel=1e-4)

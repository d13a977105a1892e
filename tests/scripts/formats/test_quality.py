"""Errors of a format, against loops over tokens and heads."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.score.reference import score_tokens
from scripts.formats.measurements import config_for
from scripts.formats.quality import Exact, measure_uniform, uniform_quantization
from scripts.formats.synthetic import synthetic_sample


def test_errors_are_those_of_the_definition() -> None:
    sample = synthetic_sample(600, 2, 1, 4, 2, 32, dtype=torch.float32)
    exact = Exact.of(sample)
    config = config_for(sample, 32)
    m = measure_uniform(sample, exact, config, 4, per_channel=False)
    keys, values = (part.clone() for part in (sample.keys, sample.values))
    for part in (keys, values):
        part[:, :, :512] = uniform_quantization(part[:, :, :512], 4, dim=-1)  # whole groups

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).square().sum() / one.square().sum())

    older = slice(0, 600 - 256)
    assert m.key_error == pytest.approx(error(sample.keys[:, :, older], keys[:, :, older]))
    assert m.value_error == pytest.approx(error(sample.values[:, :, older], values[:, :, older]))
    outputs: list[list[torch.Tensor]] = [[], []]
    scores: list[list[torch.Tensor]] = [[], []]
    for side, (k, v) in enumerate(((sample.keys, sample.values), (keys, values))):
        for tokens, query in zip((599, 600), sample.queries, strict=True):
            for head in range(4):
                logits = k[0, head // 2, :tokens] @ query[0, head] * 32**-0.5
                outputs[side].append(logits.softmax(0) @ v[0, head // 2, :tokens])
            score = score_tokens(query, k[:, :, :tokens], 32**-0.5)
            score = score[..., 4 : tokens - 1 - 64]  # neither sinks nor recent tokens
            scores[side].append((score - score.mean(-1, keepdim=True)).flatten())
    for measured, (true, found) in ((m.output_error, outputs), (m.score_error, scores)):
        assert measured == pytest.approx(error(torch.cat(true), torch.cat(found)), rel=1e-4)

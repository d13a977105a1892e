"""Compares residency formats on one sample."""

from __future__ import annotations

from argparse import Namespace

import torch
from tqdm import tqdm

from cache_rank.config import DTYPES
from cache_rank.pages import PAGE_TOKENS
from scripts.formats.measurements import config_for, measure, variants
from scripts.formats.quality import Exact, measure_uniform
from scripts.formats.report import Comparison
from scripts.formats.samples import Sample, read_recording
from scripts.formats.synthetic import synthetic_sample
from scripts.shared.machine import describe, visible_gpus
from scripts.shared.models import folder_of


def make_sample(options: Namespace) -> Sample:
    """The sequence to compare on.

    Raises:
        ValueError: it cannot be made or read, or is too short.
    """
    if options.model_path:
        from scripts.formats.served import served_sample  # imports SGLang, which takes a while

        model = folder_of(options.model_path)
        sample = served_sample(model, options.text, options.tokens, options.steps)
    elif options.recording:
        sample = read_recording(options.recording, options.steps)
    else:
        sample = synthetic_sample(
            options.tokens,
            options.steps,
            options.layers,
            options.query_heads,
            options.kv_heads,
            options.head_dim,
            options.seed,
        )
    if options.only_layers is not None:
        sample = sample.only(options.only_layers)
    sample = sample.to(torch.device(options.device), options.dtype and DTYPES[options.dtype])
    if sample.positions.start <= PAGE_TOKENS:
        raise ValueError(
            f"{sample.positions.start} tokens before the first query are too few: the newest "
            f"{PAGE_TOKENS} may be held as they came; compare on a longer sequence"
        )
    config = config_for(sample, options.budget)
    candidates = len(config.candidates_after(sample.positions.start - 1))
    if candidates <= options.budget:
        raise ValueError(
            f"--budget {options.budget} selects all of the {candidates} tokens that compete; "
            "compare on a longer sequence, or give a smaller budget"
        )
    return sample


def compare_formats(options: Namespace, sample: Sample) -> Comparison:
    """Measure all variants of all formats, and the baselines."""
    exact, config = Exact.of(sample), config_for(sample, options.budget)
    measurements = [
        measure(sample, exact, variant, options.budget, options.rows, options.repeats)
        for variant in tqdm(variants(options.formats, sample.keys.dtype), desc="formats")
    ]
    baselines = [
        measure_uniform(sample, exact, config, bits, per_channel)
        for bits in (8, 4)
        for per_channel in (True, False)
    ]
    return Comparison(
        command=[],
        machine=describe(visible_gpus() if options.device == "cuda" else []),
        source=sample.describe(),
        tokens=sample.tokens,
        steps=sample.steps,
        budget=options.budget,
        rows=options.rows,
        measurements=measurements + baselines,
    )

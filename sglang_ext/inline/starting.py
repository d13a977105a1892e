"""Builds the selection of a scheduler process, when SGLang has loaded the model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.runtime_context import get_parallel

from sglang_ext.calibration.key_statistics import KeyBasis
from sglang_ext.drafts.number import DraftNumber
from sglang_ext.inline import calibrating, step_times
from sglang_ext.inline.attention import InlineAttnBackend
from sglang_ext.inline.rank import InlineRank
from sglang_ext.inline.selection import Selection, heads_of, make_codes
from sglang_ext.payoff import say_from_where
from sglang_ext.server_args import CacheRankServerArgs

_current: InlineRank | None = None


def current() -> InlineRank | None:
    """Return what selects in this process, or None where nothing does."""
    return _current


def create_backend(runner: Any, args: CacheRankServerArgs) -> InlineAttnBackend:
    """Make an attention backend of a model runner, and with the first one the rank around both.

    SGLang asks for two, one of prefill and one of decode, which share a selection.

    Raises:
        ValueError: the model's attention layers are not those of SGLang's KV pool.
    """
    global _current
    if _current is None:
        selection = _make_selection(runner, args)
        _current = InlineRank(args, selection, get_parallel().tp_rank)
        if args.has_drafts:
            selection.step_is_sparse = False  # until a round drafts
        if args.rounds_draft_weights:
            _current.draft_weights = runner.cache_rank_draft_weights
            _current.draft_weights.selection = selection
    return InlineAttnBackend(runner, args, _current.selection)


def _make_selection(runner: Any, args: CacheRankServerArgs) -> Selection:
    pool, heads = runner.token_to_kv_pool, heads_of(runner, args.dense_layers)
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
        codes = make_codes(args, heads, len(pool.k_buffer[-1]), pool.k_buffer[-1].device)
    return Selection(args, heads, codes, runner.req_to_token_pool.req_to_token)


def prepare(scheduler: Any, args: CacheRankServerArgs) -> None:
    """Fit sketches to the model of a scheduler that is about to serve, and measure its steps.

    Dummies tell nothing of the weights that come in their place: sketches are fitted again then.

    Raises:
        CalibrationError: the folder that the user names cannot be read.
    """
    assert _current is not None
    if args.calibration in (None, "auto"):
        fitted = _fit(_current, scheduler, args)
        assert fitted, "nothing is in the pool yet"
        if args.load_format == "dummy":
            _current.fit_again = functools.partial(_fit, _current, scheduler, args)
    else:
        heads = heads_of(scheduler.tp_worker.model_runner, args.dense_layers)
        parallel = get_parallel()
        place = parallel.tp_rank, parallel.tp_size
        folder = Path(args.calibration)
        _load(_current, calibrating.of_folder(folder, args.dense_layers, heads, *place))
    runner, group = scheduler.tp_worker.model_runner, scheduler.tp_cpu_group
    if args.has_drafts:
        forwards, measured = scheduler.draft_worker.forwards, None
        if args.selects_when_shorter:
            with forwards.as_decode():
                of_group = runner, _current.selection, group
                measured = step_times.measure(*of_group, forwards.verify, forwards.width)
        _current.payoff = measured
        _current.drafts = DraftNumber(forwards.width - 1, measured)
    elif args.selects_when_shorter:
        _current.payoff = step_times.measure(runner, _current.selection, group)
        if _current.payoff is not None:
            longest = int(runner.model_config.context_len)
            attended = _current.selection.attended
            say_from_where(_current.payoff, attended, range(args.sparse_from, longest, 64))


def _fit(rank: InlineRank, scheduler: Any, args: CacheRankServerArgs) -> bool:
    """Fit to the weights of today, if the pool has room; whether it had."""
    runner = scheduler.tp_worker.model_runner
    if not calibrating.has_room(runner):
        return False
    heads, context = heads_of(runner, args.dense_layers), int(runner.model_config.context_len)

    def tokenizer() -> Any:
        return scheduler.tokenizer or calibrating.load_tokenizer(args)

    file = calibrating.cache_file(calibrating.fingerprint(runner.model, heads, context))
    group = scheduler.tp_cpu_group
    _load(rank, calibrating.calibrate(runner, rank.selection, heads, tokenizer, file, group))
    return True


def _load(rank: InlineRank, bases: list[KeyBasis]) -> None:
    device = rank.selection.sparse_from.device
    for layer, basis in enumerate(bases):
        rank.selection.load_basis(layer, *(part.to(device) for part in basis))

"""Builds the selection of a scheduler process, when SGLang has loaded the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.runtime_context import get_parallel

from sglang_ext.inline import calibrating
from sglang_ext.inline.attention import InlineAttnBackend
from sglang_ext.inline.rank import InlineRank
from sglang_ext.inline.selection import Selection, heads_of, make_codes
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
        _current = InlineRank(args, _make_selection(runner, args), get_parallel().tp_rank)
    return InlineAttnBackend(runner, args, _current.selection)


def _make_selection(runner: Any, args: CacheRankServerArgs) -> Selection:
    pool, heads = runner.token_to_kv_pool, heads_of(runner, args.dense_layers)
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
        codes = make_codes(args, heads, len(pool.k_buffer[-1]), pool.k_buffer[-1].device)
    return Selection(args, heads, codes, runner.req_to_token_pool.req_to_token)


def load_calibration(scheduler: Any, args: CacheRankServerArgs) -> None:
    """Have sketches fitted to the model of a scheduler that is about to serve.

    Raises:
        CalibrationError: the folder that the user names cannot be read.
    """
    assert _current is not None
    runner = scheduler.tp_worker.model_runner
    heads = heads_of(runner, args.dense_layers)
    if args.calibration not in (None, "auto"):
        parallel = get_parallel()
        place = parallel.tp_rank, parallel.tp_size
        bases = calibrating.of_folder(Path(args.calibration), args.dense_layers, heads, *place)
    else:
        file = calibrating.cache_file(
            calibrating.fingerprint(runner.model, heads, int(runner.model_config.context_len))
        )

        def tokenizer() -> Any:
            return scheduler.tokenizer or calibrating.load_tokenizer(args)

        bases = calibrating.calibrate(
            runner, _current.selection, heads, tokenizer, file, scheduler.tp_cpu_group
        )
    for layer, (basis, mean) in enumerate(bases):
        _current.selection.load_basis(layer, basis.to(runner.device), mean.to(runner.device))

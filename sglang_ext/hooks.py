"""Every place where we touch SGLang's internals: target, kind of hook, function, and why.

Those of its KV pool are in `pool_hooks.py`, those of its prefix cache in `prefix_hooks.py`, those
of drafts in `drafts/hooks.py`, and those of transfers in `disaggregation/hooks.py`.

A target names the function of SGLang, and the reason says what that function does. Hooks change
nothing on a server that decodes densely, but refuse `custom_params` that are not ours to read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from sglang.srt.constants import (
    GPU_MEMORY_ALL_TYPES,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_WEIGHTS,
)
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput
from sglang.srt.plugins.hook_registry import HookType

from sglang_ext import compat, cpu, selecting
from sglang_ext.calibration.serving import CALLS
from sglang_ext.disaggregation.hooks import TRANSFER_HOOKS
from sglang_ext.drafts.hooks import DRAFT_HOOKS
from sglang_ext.hook import DECODE_GRAPHS, Hook, sparse_args, verifies
from sglang_ext.inline import starting
from sglang_ext.pool_hooks import POOL_HOOKS
from sglang_ext.prefix_hooks import PREFIX_HOOKS
from sglang_ext.reports import repeat, report
from sglang_ext.requests import serving
from sglang_ext.requests.bodies import CACHE_RANK
from sglang_ext.two_ranks import inference_rank, step_times

REQUEST_POOLS = (
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool",
    "sglang.srt.disaggregation.decode.DecodeReqToTokenPool",
)
"""Request slots of servers that prefill, and of those that only decode."""

CHOOSE_BATCH = (
    "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin"
    ".get_next_disagg_decode_batch_to_run",
)
"""What chooses the next batch of either."""

WHAT_A_CACHE_RANK_NEEDS = {GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS}
"""There is no cache rank while some of this memory is released.

Its tokens are of the KV cache, and an exchange begins with projections of the weights.
"""


def run_step(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a batch, as one of our decode steps when it is one."""
    rank = selecting.rank()
    if rank is None or batch is None:
        return original(worker, batch, *args, **kwargs)

    def forward() -> Any:
        return original(worker, batch, *args, **kwargs)

    if batch.forward_mode.is_decode():
        result = rank.run_decode(batch.reqs, batch.seq_lens_cpu.tolist(), forward)
        plan = getattr(result, "cache_rank_plan", None)
        if plan is not None and plan.shipping:
            compat.read_behind_the_graph(worker.model_runner)
    else:
        result = rank.run_other(batch.reqs, forward)
    if result.logits_output is not None:
        report(result, batch.reqs)
    return result


def process_result(
    original: Callable[..., None], scheduler: Any, batch: Any, result: Any, *args: Any, **kw: Any
) -> None:
    """Process what a step computed, but for requests whose answers were lost with a cache rank."""
    rank, plan = inference_rank.current(), getattr(result, "cache_rank_plan", None)
    drafting, drafts = selecting.rank(), getattr(result, "cache_rank_drafts", 0)
    width = getattr(result, "speculative_num_draft_tokens", 0) or 0
    is_round = drafting is not None and width > 1
    if (plan is not None or is_round) and result.copy_done is not None:
        result.copy_done.synchronize()  # the next that SGLang does
    with contextlib.ExitStack() as stack:
        if rank is not None and plan is not None:
            compat.skip_retracted(scheduler)
            stack.enter_context(rank.cache_rank.without_stale(plan))
        if is_round:
            repeat(batch.reqs, result)
        original(scheduler, batch, result, *args, **kw)
    if rank is not None and plan is not None:
        rank.cache_rank.retract_left(scheduler)
    elif rank is not None and not width:
        rank.on_prefilled(batch.reqs)
    if drafts and drafting is not None and drafting.drafts is not None:
        drafting.drafts.note(result.num_correct_drafts_per_req_cpu, drafts)


def after_request(result: None, request: Any, *_: Any, **__: Any) -> None:
    """Give a request a namespace of the radix cache where it must not reuse what others left."""
    before_match(request)


def before_match(request: Any, *_: Any, **__: Any) -> None:
    """Keep a prompt from reusing what other weights have computed while it waited."""
    rank = selecting.rank()
    if rank is not None:
        rank.before_match(request)


def end_sequence(pool: Any, request: Any) -> None:
    """End the sequence of a request whose slot is about to be freed."""
    rank = selecting.rank()
    if rank is not None:
        rank.on_request_freed(request)


def end_all_sequences(pool: Any) -> None:
    """End all sequences, because the request pool is about to be cleared."""
    rank = inference_rank.current()
    if rank is not None:
        rank.on_pool_cleared()


def before_next_batch(scheduler: Any, running_batch: Any, *_: Any, **__: Any) -> None:
    """Between steps, evict tokens and retract requests whose K and V are lost."""
    rank = inference_rank.current()
    if rank is not None:
        rank.before_next_batch(scheduler, running_batch)


def before_pause(scheduler: Any, pause: Any, *_: Any, **__: Any) -> None:
    """Retract before a pause: SGLang takes the result of the last step, which may have failed."""
    rank = inference_rank.current()
    if rank is not None and pause.mode == "retract":
        rank.cache_rank.retract_orphans(scheduler, scheduler.running_batch)


def abort_request(
    original: Callable[..., None], scheduler: Any, abort: Any, *args: Any, **kwargs: Any
) -> None:
    """Let SGLang find requests that are queued a turn later, where it looks for queued ones."""
    rank = inference_rank.current()
    if rank is None:
        return original(scheduler, abort, *args, **kwargs)
    rank.cache_rank.abort_retracted(scheduler, lambda: original(scheduler, abort, *args, **kwargs))


def is_idle(result: bool, scheduler: Any, *_: Any, ignore_waiting: bool = False, **__: Any) -> bool:
    """Count a server as busy while requests are to be queued a turn later, as those in the queue.

    From 0.5.23 on a server that is paused can be idle with requests in the queue.
    """
    rank = inference_rank.current()
    return result and (ignore_waiting or rank is None or not rank.cache_rank.to_queue)


def release_memory(updater: Any, request: Any, *_: Any, **__: Any) -> None:
    """End the cache rank before its counterpart on this rank goes: answers are written to it."""
    rank = inference_rank.current()
    if rank is not None and WHAT_A_CACHE_RANK_NEEDS & {*(request.tags or GPU_MEMORY_ALL_TYPES)}:
        rank.cache_rank.release()


def resume_memory(result: Any, updater: Any, *_: Any, **__: Any) -> Any:
    """Start the cache rank when all that it needs is there again."""
    rank = inference_rank.current()
    if rank is not None and not WHAT_A_CACHE_RANK_NEEDS & updater.offload_tags:
        rank.cache_rank.resume()
    return result


def update_from_disk(
    original: Callable[..., Any], updater: Any, update: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load weights, but refuse new graphs where those of drafts or of an exchange are made once.

    A capture runs the model, and flags of an exchange count each run as a step.
    """
    rank = selecting.rank()
    captures_once = inference_rank.current() is not None or (rank is not None and rank.drafts)
    if not (update.recapture_cuda_graph and captures_once):
        return note_new_weights(original(updater, update, *args, **kwargs))
    why = "recapture_cuda_graph: graphs are captured once with a cache rank or drafts; drop it"
    return UpdateWeightFromDiskReqOutput(success=False, message=why)


def note_new_weights(result: Any, *_: Any, **__: Any) -> Any:
    """Let the cache rank forecast by the weights that were loaded."""
    rank = selecting.rank()
    if rank is not None:
        rank.on_weights_updated()
    return result


def add_internal_state(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """Show the cache rank in `/server_info`."""
    rank = selecting.rank()
    if rank is not None:
        result.internal_state[CACHE_RANK] = rank.state(scheduler.tree_cache)
    return result


def prepare_selection(result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """Before requests come, fit sketches to the model inline, and measure its steps."""
    args = sparse_args()
    if args is None:
        return
    if args.is_inline:
        starting.prepare(scheduler, args)
    else:
        step_times.prepare(scheduler, args)


def capture_both_kinds(
    original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any
) -> None:
    """Capture all batch sizes twice: as SGLang alone decodes, and with selection."""
    rank = starting.current()
    if rank is None or verifies(runner):
        return original(runner, *args, **kwargs)
    rank.capture_both_kinds(lambda: original(runner, *args, **kwargs))


def name_graph(key: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """Tell the two graphs of a batch size apart, in their capture and in their use."""
    rank = starting.current()
    if rank is None or rank.selection.step_is_sparse or verifies(runner):
        return key
    return dataclasses.replace(key, variant_label=f"{key.variant_label} dense")


def add_calls() -> None:
    """Give schedulers what a calibration calls: `handle_rpc_request` looks for methods by name."""
    from sglang.srt.managers.scheduler import Scheduler

    for call in CALLS:
        setattr(Scheduler, call.__name__, call)


_ALL_HOOKS = (
    *POOL_HOOKS,
    Hook(
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        HookType.AFTER,
        cpu.fork_processes,
        "it lets processes be spawned, which import SGLang again",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        HookType.AFTER,
        prepare_selection,
        "the model is loaded, and nothing is served yet",
    ),
    Hook(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        HookType.AROUND,
        run_step,
        "the one call a step, eager or graph, that sees the requests",
    ),
    Hook(
        f"{DECODE_GRAPHS}._capture_one_stream",
        HookType.AROUND,
        capture_both_kinds,
        "steps without sparse requests must cost what they cost without us",
    ),
    Hook(
        f"{DECODE_GRAPHS}._make_graph_key",
        HookType.AFTER,
        name_graph,
        "a graph is found by its key",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        HookType.AROUND,
        process_result,
        "whatever a step says is read here: tokens, stops, grammars, probabilities",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        HookType.AFTER,
        after_request,
        "the queue is sorted by what is found under a request's extra_key",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        HookType.BEFORE,
        before_match,
        "the prefix is matched by extra_key, right before the prefill",
    ),
    *(
        Hook(
            f"{pool}.free",
            HookType.BEFORE,
            end_sequence,
            "finish, abort, retraction and preemption all end here",
        )
        for pool in REQUEST_POOLS
    ),
    *(
        Hook(f"{pool}.clear", HookType.BEFORE, end_all_sequences, "flush_cache ends here")
        for pool in REQUEST_POOLS
    ),
    *(
        Hook(
            choose_batch,
            HookType.BEFORE,
            before_next_batch,
            "the only point where batches may change and no step is being built",
        )
        for choose_batch in CHOOSE_BATCH
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        HookType.BEFORE,
        before_pause,
        "a step that failed must not give the tokens it is paused with",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        HookType.AROUND,
        abort_request,
        "looks for requests in the queue and in batches only",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
        HookType.AFTER,
        is_idle,
        "flushes, updates of weights and releases of memory ask it",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        HookType.AFTER,
        add_internal_state,
        "/server_info reads it",
    ),
    *(
        Hook(
            "sglang.srt.managers.scheduler_components.weight_updater."
            f"SchedulerWeightUpdaterManager.{update}",
            HookType.AFTER,
            note_new_weights,
            "queries are forecast by the model's projections",
        )
        for update in compat.WEIGHT_UPDATES
        if update != "update_weights_from_disk"
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater."
        "SchedulerWeightUpdaterManager.update_weights_from_disk",
        HookType.AROUND,
        update_from_disk,
        "queries are forecast by the model's projections; it captures graphs if it is asked to",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater."
        "SchedulerWeightUpdaterManager.release_memory_occupation",
        HookType.BEFORE,
        release_memory,
        "what the cache rank holds is released with SGLang's memory",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater."
        "SchedulerWeightUpdaterManager.resume_memory_occupation",
        HookType.AFTER,
        resume_memory,
        "the cache rank comes back with SGLang's memory",
    ),
    Hook(
        "starlette.requests.Request.body",
        HookType.AROUND,
        serving.read_body,
        "what is ours is dropped by APIs that do not know it",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        HookType.AROUND,
        serving.generate,
        "every API's requests and responses pass through it",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.create_error_response",
        HookType.AROUND,
        serving.answer_error,
        "what a request has broken is answered as a fault of the server",
    ),
    Hook(
        "sglang.srt.managers.io_struct.GenerateReqInput.regenerate_rid",
        HookType.AROUND,
        serving.name_sample,
        "samples get names that have nothing of their request's",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request",
        HookType.AROUND,
        serving.abort_samples,
        "it looks for a request by its name only",
    ),
    *PREFIX_HOOKS,
    *DRAFT_HOOKS,
    *TRANSFER_HOOKS,
)

HOOKS = tuple(hook for hook in _ALL_HOOKS if hook.is_there)

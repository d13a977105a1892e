"""The hooks of SGLang's disaggregation: our transfer backend, and the requests that it serves.

A server that only decodes copies retracted requests to the host, and brings them back from there.
What has left its pool with `--inference-kv working-set` only the cache rank has, in codes, and a
retracted request of which that is so ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.plugins.hook_registry import HookType

from sglang_ext import compat, selecting
from sglang_ext.flags import TRANSFERS, WIRE_CODES
from sglang_ext.hook import Hook
from sglang_ext.reports import report_all
from sglang_ext.two_ranks import inference_rank

GONE = (
    "this request would have to be prefilled again, because its cache rank was lost or the KV pool "
    "was full, and this server only decodes; ask again"
)
"""What the client of a request reads whose K and V are gone."""

_ARRIVING = "sglang.srt.disaggregation.decode.DecodeTransferQueue"
_QUEUES = {
    "prefill": "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue",
    "decode": "sglang.srt.disaggregation.decode.DecodePreallocQueue",
}


def class_of_backend(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Return our classes for our backend."""
    if transfer_backend.value != TRANSFERS:
        return original(transfer_backend, class_type)
    # Imported here: it brings SGLang's distributed parts, which few processes need.
    from sglang_ext.disaggregation.backend import CLASSES

    return CLASSES[class_type]


def attach_pool(manager: Any, queue: Any) -> None:
    """Give our manager the pool; SGLang tells it the addresses of its buffers only."""
    if queue.transfer_backend.value == TRANSFERS:
        manager.attach(queue)


def choose_codes(is_created: bool, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Let a request be sent in the codes that it asks for."""
    custom = request.sampling_params.custom_params
    wanted = custom.get(WIRE_CODES) if isinstance(custom, dict) else None
    if is_created and wanted is not None and queue.transfer_backend.value == TRANSFERS:
        request.disagg_kv_sender.codes = wanted


def note_request(created: Any, *_: Any, **__: Any) -> None:
    """Tell a receiver its request."""
    created.kv_receiver.request = created.req


def draft(transferred: list[Any], queue: Any, *_: Any, **__: Any) -> None:
    """Draft a token of each request that still waits for what refines its K and V."""
    drafts = getattr(queue.scheduler.disagg_decode_prealloc_queue.kv_manager, "drafts", None)
    if drafts is not None:
        drafts.step()


def commit_drafts(original: Callable[..., None], queue: Any, waiting: Any) -> None:
    """Give a request whose K and V are all there the drafts that stand, behind its first token."""
    manager = queue.scheduler.disagg_decode_prealloc_queue.kv_manager
    receiver, drafting = waiting.kv_receiver, getattr(waiting.kv_receiver, "drafting", None)
    if drafting is not None:
        receiver.drafting = None  # else it drops them when it is cleared
    try:
        original(queue, waiting)
        if drafting is not None and waiting.req.output_ids:
            manager.drafts.commit(drafting)
        if selecting.rank() is not None or drafting is not None:
            report_all(waiting.req)
    finally:
        if drafting is not None:
            manager.drafts.drop(drafting)


def after_resuming(resumed: list[Any], queue: Any, *_: Any, **__: Any) -> None:
    """Write sketches of requests whose K and V come back from the host, to other rows.

    While some cannot, SGLang does not ask what else arrives, which waits in memory that all share.
    """
    if queue.transfer_backend.value != TRANSFERS:
        return
    for request in resumed:
        state = compat.pool_state(request)
        rows = queue.req_to_token_pool.req_to_token[state.req_pool_idx, : request.seqlen - 1]
        queue.kv_manager.sketch(rows.long())
    if queue.retracted_queue:
        for waiting in queue.scheduler.disagg_decode_transfer_queue.queue:
            waiting.kv_receiver.poll()


def take_in_while_paused(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    """Let prompts go on to arrive while generation is paused, when SGLang does not ask for them."""
    queue = scheduler.disagg_decode_prealloc_queue
    if scheduler._engine_paused and queue is not None and queue.transfer_backend.value == TRANSFERS:
        for waiting in scheduler.disagg_decode_transfer_queue.queue:
            waiting.kv_receiver.take_in()


def keep_retracted(original: Callable[..., None], request: Any, *args: Any, **kwargs: Any) -> None:
    """Copy a request that is retracted to the host, unless the pool has not all of it any more."""
    request.cache_rank_kv_is_gone = _has_left_the_pool(request)
    if not request.cache_rank_kv_is_gone:
        original(request, *args, **kwargs)


def end_what_is_gone(
    original: Callable[..., None],
    queue: Any,
    request: Any,
    is_retracted: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    """End a retracted request that nobody can bring back, instead of queueing it."""
    if not (is_retracted and getattr(request, "cache_rank_kv_is_gone", False)):
        return original(queue, request, is_retracted, *args, **kwargs)
    prepare_abort(request, GONE, HTTPStatus.SERVICE_UNAVAILABLE)
    queue.scheduler.output_streamer.stream_output([request], request.return_logprob)


def retract_whole_ones(order: list[int], requests: list[Any], *_: Any, **__: Any) -> list[int]:
    """Let SGLang, which retracts from the end, first retract requests that it can bring back.

    The others have few rows to give.
    """
    return sorted(order, key=lambda index: not _has_left_the_pool(requests[index]))


def _has_left_the_pool(request: Any) -> bool:
    """Whether tokens of a request were evicted from the pool of a server that only decodes."""
    rank = inference_rank.current()
    if rank is None or rank.eviction is None or not rank.args.only_decodes:
        return False
    return bool(compat.pool_state(request).cache_protected_len)


TRANSFER_HOOKS = (
    Hook(
        "sglang.srt.disaggregation.utils.get_kv_class",
        HookType.AROUND,
        class_of_backend,
        "it knows the classes of SGLang's backends only",
    ),
    *(
        Hook(
            f"{queue}._init_kv_manager",
            HookType.AFTER,
            attach_pool,
            "codes are made of tensors, and SGLang hands out addresses",
        )
        for queue in _QUEUES.values()
    ),
    Hook(
        f"{_QUEUES['prefill']}.create_sender",
        HookType.AFTER,
        choose_codes,
        "a sender is not told its request",
    ),
    Hook(
        f"{_QUEUES['decode']}._create_receiver_and_enqueue",
        HookType.AFTER,
        note_request,
        "a receiver is not told its request",
    ),
    Hook(
        f"{_QUEUES['decode']}.resume_retracted_reqs",
        HookType.AFTER,
        after_resuming,
        "K and V come back from the host to other rows",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_input_requests",
        HookType.AFTER,
        take_in_while_paused,
        "nothing else is called while generation is paused",
    ),
    Hook(
        f"{_ARRIVING}.pop_transferred",
        HookType.AFTER,
        draft,
        "is called between steps, and has asked what has come",
    ),
    Hook(
        f"{_ARRIVING}._commit_transfer_to_req",
        HookType.AROUND,
        commit_drafts,
        "a request gets its first token there, before it joins a batch",
    ),
    Hook(
        f"{_QUEUES['decode']}.add",
        HookType.AROUND,
        end_what_is_gone,
        "what is retracted waits there to come back",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.offload_kv_cache",
        HookType.AROUND,
        keep_retracted,
        "it copies what a retracted request has in the pool",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        HookType.AFTER,
        retract_whole_ones,
        "chooses whom to retract when the pool is full",
    ),
)

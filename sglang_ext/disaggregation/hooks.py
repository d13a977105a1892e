"""The hooks of SGLang's disaggregation: our transfer backend, and the requests that it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_ext import compat
from sglang_ext.flags import TRANSFERS, WIRE_CODES
from sglang_ext.hook import Hook

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


def sketch_resumed(resumed: list[Any], queue: Any, *_: Any, **__: Any) -> None:
    """Write sketches of requests whose K and V come back from the host, to other rows."""
    if queue.transfer_backend.value != TRANSFERS:
        return
    for request in resumed:
        state = compat.pool_state(request)
        rows = queue.req_to_token_pool.req_to_token[state.req_pool_idx, : request.seqlen - 1]
        queue.kv_manager.sketch(rows.long())


def transfer_hooks(end_sequence: Callable[..., None]) -> tuple[Hook, ...]:
    """The hooks; a slot of a decode server's requests is freed by a class of its own."""
    return (
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
            f"{_QUEUES['decode']}.resume_retracted_reqs",
            HookType.AFTER,
            sketch_resumed,
            "K and V come back from the host to other rows",
        ),
        Hook(
            "sglang.srt.disaggregation.decode.DecodeReqToTokenPool.free",
            HookType.BEFORE,
            end_sequence,
            "the request slots of a decode server are a class of their own",
        ),
    )

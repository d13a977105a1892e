"""What differs between the two releases of SGLang that this serves: one function a difference.

0.5.16 is the newest that runs on torch 2.11. *Old* and *new* below are these two.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from packaging.version import Version
from torch import Tensor

RELEASE = Version(importlib.metadata.version("sglang"))
"""The release that is installed."""

TESTED = ("0.5.16", "0.5.23")
"""These releases are tested, on CPUs and on GPUs; CONTRIBUTING.md says what was run with each."""

IS_NEW = Version(RELEASE.base_version) > Version("0.5.16")
"""Whether the installed release is the new one, or one that nobody has tested."""


# Arguments.


def record(cls: type) -> type:
    """Make a class with new fields, derived from ServerArgs, what ServerArgs is.

    In the old release that is a dataclass, in the new one a msgspec.Struct, made by deriving.
    """
    return cls if issubclass(cls, msgspec.Struct) else dataclasses.dataclass(cls)


def default_values(cls: type) -> dict[str, Any]:
    """Return the fields of ServerArgs, or of a class derived from it, with their defaults."""
    is_struct = issubclass(cls, msgspec.Struct)
    fields: Any = msgspec.structs.fields(cls) if is_struct else dataclasses.fields(cls)
    absent = (dataclasses.MISSING, msgspec.NODEFAULT)
    return {
        field.name: field.default if field.default_factory in absent else field.default_factory()
        for field in fields
    }


RESOLVED_IN = "resolve_once" if IS_NEW else "__post_init__"
"""The method in which ServerArgs chooses what is not given: in the old release when it is made."""


def resolve(args: Any) -> None:
    """Let arguments choose what is not given, if they have not when they were made."""
    if RESOLVED_IN == "resolve_once":
        args.resolve_once()


def is_resolved(args: Any) -> bool:
    """Whether resolve_once has chosen what is not given, which it does once."""
    return bool(getattr(args, "_resolution_finished", False))


def decide(args: Any, **fields: Any) -> None:
    """Set fields of resolved arguments.

    In the new release these are sealed. Other processes then get the fields, and what reports them
    to users reads what was declared.
    """
    if not IS_NEW:
        args.override("cache rank", **fields)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(args, "cache rank", **fields)
    for field, value in fields.items():
        msgspec.structs.force_setattr(args, field, value)


def model_config(args: Any) -> Any:
    """Return SGLang's configuration of the model: a method in the old release."""
    if not IS_NEW:
        return args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(args)


def merge_config_file(parser: Any, arguments: list[str]) -> list[str]:
    """Return a command line with the flags of its --config file, whose reader has moved."""
    if IS_NEW:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    else:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    return merged


ABSENT_FLAGS = (
    frozenset()
    if IS_NEW
    else frozenset(
        {
            "--startup-weight-load-mode",
            "--enable-unified-cache-external-linker",
            "--enable-pd-role-switch",
            "--disaggregation-enable-kv-checksum",
        }
    )
)
"""Flags that are refused, and that the old release does not have."""


def serves_without_python() -> bool:
    """Whether SGLang's environment asks for the server in Rust, which the new release has."""
    from sglang.srt.environ import envs

    return IS_NEW and bool(envs.SGLANG_RUST_SERVER.get())


HAS_GRAMMARS_ON_CPUS = IS_NEW
"""In the old release a request with a grammar ends the scheduler of a CPU engine."""

POOLS_RETRACTED = IS_NEW
"""A decode server may keep retracted requests in a pool of pinned memory, which the old has not."""


# Pools and requests.

DESCRIBES_BUFFERS = IS_NEW
"""The KV pool of the new release checks that its buffers have no more rows than it hands out."""


def pool_state(request: Any) -> Any:
    """Return what holds a request's `req_pool_idx` and `cache_protected_len`."""
    return request.kv if IS_NEW else request


def set_kv_length(request: Any, tokens: int) -> None:
    """Say for how many first tokens of a request there are K and V, in rows of its own."""
    request.kv.kv_allocated_len = pool_state(request).kv_committed_len = tokens


ASKS_FOR_DRAFTS_POOL = not IS_NEW
"""The old scheduler looks for the pool of a drafting model if it has a speculative algorithm."""


HAS_SALT = IS_NEW
"""In the old release `extra_key` of a request holds its `cache_salt`."""


def prefix_namespace(request: Any) -> tuple[str | None, ...]:
    """The namespace of a request: it shares prefixes only with requests of the same one."""
    if HAS_SALT:
        return request.extra_key, request.cache_salt
    return (request.extra_key,)


def skip_retracted(scheduler: Any) -> None:
    """Have the results of requests that were retracted skipped, also where steps do not overlap."""
    processor = scheduler.batch_result_processor  # frozen
    object.__setattr__(processor, "enable_overlap", True)


SKIPS_FINISHING = IS_NEW
"""In the new release requests leave the running batch while their last result is under way."""


def release_left(request: Any, scheduler: Any) -> None:
    """Take back what a request holds that has left the running batch, to be computed again."""
    from sglang.srt.managers.schedule_batch import release_req

    release_req(
        req=request,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )


def release_request(batch: Any, index: int, server_args: Any) -> None:
    """Take a request's slot and rows back, to be computed again."""
    if IS_NEW:
        batch.release_req(index, len(batch.reqs))
    else:
        batch.release_req(index, len(batch.reqs), server_args)


def _insert_and_free(
    insert: Callable[..., None],
    tree: Any,
    request: Any,
    most: int | None,
    is_insert: bool = True,
    *,
    kv_len_to_handle: int,
) -> None:
    if not is_insert:
        # The tree frees rows of tokens that the request has. Steps taken back have written more.
        most = len(request.origin_input_ids) + len(request.output_ids)
    stop = kv_len_to_handle if most is None else min(most, kv_len_to_handle)
    if stop < kv_len_to_handle:
        table = tree.req_to_token_pool.req_to_token
        rows = table[pool_state(request).req_pool_idx, stop:kv_len_to_handle]
        tree.token_to_kv_pool_allocator.free(rows)
    insert(tree, request, is_insert, kv_len_to_handle=stop)


def _insert_up_to(
    insert: Callable[..., None],
    tree: Any,
    request: Any,
    most: int | None,
    *,
    up_to: int,
    **kwargs: Any,
) -> None:
    insert(tree, request, up_to=up_to if most is None else min(most, up_to), **kwargs)


_CACHE = "sglang.srt.mem_cache."
INSERT_PREFIX = _CACHE + (
    "unified_radix_cache.UnifiedRadixCache.checkpoint"
    if IS_NEW
    else "radix_cache.RadixCache.cache_finished_req"
)
"""The method that puts tokens of a request into the radix cache, of the class that is the default.

In the new release it is called for requests that go on, too.
"""

insert_tokens: Callable[..., None] = _insert_up_to if IS_NEW else _insert_and_free
"""Call INSERT_PREFIX with at most so many tokens of a request; the rows of all others are freed.

In the old release INSERT_PREFIX frees what it is told of, in the new one its caller frees what is
not in the tree.

Args:
    insert: INSERT_PREFIX.
    tree: the radix cache.
    request: SGLang's Req.
    most: how many tokens may be inserted; None is all of them.
    *args, **kwargs: what else SGLang gives INSERT_PREFIX.
"""


PREFIX_CACHES = tuple(
    _CACHE + name
    for name in (
        ("unified_radix_cache.UnifiedRadixCache",)
        if IS_NEW
        else ("chunk_cache.ChunkCache", "radix_cache.RadixCache")
    )
)
"""The classes of the prefix cache, in the old release without and with a radix cache."""


def matched_tokens(result: Any) -> int:
    """How many tokens a match has found in the pool."""
    return result.device_prefix_len if IS_NEW else len(result.device_indices)


def prefix_tokens(request: Any) -> int:
    """How many first tokens of a request need no prefill."""
    return request.prefix_len if IS_NEW else len(request.prefix_indices)


def loaded_back(request: Any, rows: Tensor | None) -> tuple[Any, Any]:
    """Return what `init_load_back` does of rows behind a request's prefix, (n,) int64, or none.

    In the new release it returns how many, and `prefix_device_indices` which.
    """
    if IS_NEW:
        return 0 if rows is None else len(rows), request.last_node
    if rows is None:
        return request.prefix_indices[:0], request.last_node
    # They are put behind these, on their device.
    request.prefix_indices = request.prefix_indices.to(rows.device)
    return rows, request.last_node


ASKS_FOR_ROWS = IS_NEW
"""A prefix is known by its rows in the old release, and by its length in the new one."""


WEIGHT_UPDATES = (
    *(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
    *(("end_weight_update",) if IS_NEW else ()),
)
"""The calls after which the model may have other weights; in the new release one ends them all."""


# The forward pass.


def reads_until_the_stream_is_done() -> Any:
    """Say when decode has read SGLang's table for the last time, which the new release asks.

    Behind the graph, on the same stream, chunks of prompts are shipped. So what rewrites the table
    is to wait for the stream, not for a point in it.
    """
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.UNKNOWN


def read_behind_the_graph(runner: Any) -> None:
    """Say that SGLang's table is read behind the graph, too, which has just been queued.

    The old release takes an event ahead of the graph for the last read, or else waits for the
    stream. The new one has asked the attention backend.
    """
    if not IS_NEW:
        runner.war_fastpath_read_done_event = None


def set_real_tokens(batch: Any, tokens: int) -> None:
    """Say how many tokens of a forward batch are no padding."""
    name = "global_num_token_non_padded_cpu" if IS_NEW else "num_token_non_padded_cpu"
    setattr(batch, name, tokens)


def add_spec_logprobs(batch: Any, output: Any, tokens: Tensor, width: int) -> None:
    """Add log-probabilities to a verification's output, of (B * width,) tokens that were drawn."""
    from sglang.srt.layers import logprob_processor

    index = torch.arange(len(tokens), device=tokens.device).view(-1, width)
    if IS_NEW:
        logprob_processor.compute_spec_logprobs(batch, output, tokens, accept_index=index)
    else:
        logprob_processor.compute_spec_v2_logprobs(batch, output, tokens, index, width - 1)


def translator_over(runner: Any, table: Tensor) -> Any:
    """Return what lets an attention backend read pool rows from a table in the place of SGLang's.

    In the old release backends read the table of their runner, and there is nothing to return. In
    the new one flashinfer and triton ask the runner's translator, which has a table of its own;
    what it does to rows depends on the pool, and is the same for another table.
    """
    translator = copy.copy(getattr(runner, "kv_index_translator", None))
    if translator is not None:
        translator.req_to_token = table
    return translator


def takes_a_residual(layer: Any) -> bool:
    """Whether a decoder layer takes a hidden state and, beside it, the residual to add to it.

    The residual is a parameter, or rides on the batch in models of the new release that have moved.
    """
    parameters = inspect.signature(type(layer).forward).parameters
    return "hidden_states" in parameters and (
        "residual" in parameters or hasattr(layer, "attn_boundary")
    )


def residual_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the residual that a decoder layer is given beside its hidden state, if it is."""
    if "residual" in arguments:
        return arguments["residual"]
    stream = arguments["forward_batch"].residual_stream
    _, residual = stream.export(arguments["hidden_states"])
    return residual

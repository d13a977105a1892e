"""What differs between releases of SGLang: one function a difference, with the release it is of."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from packaging.version import Version
from torch import Tensor

RELEASE = Version(importlib.metadata.version("sglang"))
"""The release that is installed."""

TESTED = ("0.5.16", "0.5.17", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""These releases are tested on CPUs; CONTRIBUTING.md says what was run with each."""

TESTED_ON_GPUS = ("0.5.16", "0.5.23")
"""With these, servers on GPUs have passed tests of equality, losses and copies, and were timed."""


def is_in(releases: Sequence[str]) -> bool:
    """Whether the installed release is one of these; what leads up to one counts as it."""
    return RELEASE.base_version in releases


def _since(release: str) -> bool:
    """Whether the installed release is this or a later one; what leads up to one counts as it."""
    return Version(release) <= Version(RELEASE.base_version)


_SINCE_0_5_19 = _since("0.5.19")
_SINCE_0_5_20 = _since("0.5.20")
_SINCE_0_5_21 = _since("0.5.21")
_SINCE_0_5_22 = _since("0.5.22")
_SINCE_0_5_23 = _since("0.5.23")


# Arguments.


def record(cls: type) -> type:
    """Make a class with new fields, derived from ServerArgs, what ServerArgs is.

    Up to 0.5.19 that is a dataclass, from 0.5.20 on a msgspec.Struct, which is made by deriving.
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


RESOLVED_IN = "resolve_once" if _SINCE_0_5_19 else "__post_init__"
"""The method in which ServerArgs chooses what is not given: up to 0.5.18 when it is made."""


def resolve(args: Any) -> None:
    """Let arguments choose what is not given, if they have not when they were made."""
    if RESOLVED_IN == "resolve_once":
        args.resolve_once()


def is_resolved(args: Any) -> bool:
    """Whether resolve_once has chosen what is not given, which it does once."""
    return bool(getattr(args, "_resolution_finished", False))


def decide(args: Any, **fields: Any) -> None:
    """Set fields of resolved arguments.

    From 0.5.19 on these are sealed. Other processes then get the fields, and what reports them to
    users reads what was declared.
    """
    if not _SINCE_0_5_19:
        args.override("cache rank", **fields)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(args, "cache rank", **fields)
    for field, value in fields.items():
        if isinstance(args, msgspec.Struct):
            msgspec.structs.force_setattr(args, field, value)
        else:
            object.__setattr__(args, field, value)


def model_config(args: Any) -> Any:
    """Return SGLang's configuration of the model: a method up to 0.5.18."""
    if not _SINCE_0_5_19:
        return args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(args)


def merge_config_file(parser: Any, arguments: list[str]) -> list[str]:
    """Return a command line with the flags of its --config file, whose reader moved in 0.5.19."""
    if _SINCE_0_5_19:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    else:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    return merged


ABSENT_FLAGS = (
    frozenset()
    if _SINCE_0_5_20
    else frozenset({"--startup-weight-load-mode", "--enable-unified-cache-external-linker"})
)
"""Flags that are refused, and that the installed release does not have: they came until 0.5.20."""


def serves_without_python() -> bool:
    """Whether SGLang's environment asks for the server in Rust, which there is from 0.5.20 on."""
    from sglang.srt.environ import envs

    return _SINCE_0_5_20 and bool(envs.SGLANG_RUST_SERVER.get())


HAS_GRAMMARS_ON_CPUS = _SINCE_0_5_23
"""Before, a request with a grammar ends the scheduler of a CPU engine."""


# Pools and requests.

DESCRIBES_BUFFERS = _SINCE_0_5_22
"""From 0.5.22 on the KV pool checks that its buffers have the rows that it hands out, no more."""


def _in_request(request: Any) -> Any:
    return request


def _in_record(request: Any) -> Any:
    return request.kv


pool_state: Callable[[Any], Any] = _in_record if _SINCE_0_5_19 else _in_request
"""Return what holds a request's `req_pool_idx` and `cache_protected_len`: from 0.5.19 on `kv`."""


ASKS_FOR_DRAFTS_POOL = not _SINCE_0_5_19
"""Up to 0.5.18 a scheduler with a speculative algorithm looks for the pool of its drafts' model."""


HAS_SALT = _SINCE_0_5_20
"""Before, `extra_key` of a request holds its `cache_salt`."""


def prefix_namespace(request: Any) -> tuple[str | None, ...]:
    """The namespace of a request: it shares prefixes only with requests of the same one."""
    if HAS_SALT:
        return request.extra_key, request.cache_salt
    return (request.extra_key,)


SKIPS_FINISHING = _SINCE_0_5_22
"""From 0.5.22 on requests leave the running batch while their last result is under way."""


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
    """Take a request's slot and rows back, to be computed again; changed in 0.5.19."""
    if _SINCE_0_5_19:
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
if _SINCE_0_5_22:
    INSERT_PREFIX = _CACHE + "unified_radix_cache.UnifiedRadixCache.checkpoint"
elif _SINCE_0_5_21:
    INSERT_PREFIX = _CACHE + "unified_radix_cache.UnifiedRadixCache.insert_req"
elif _SINCE_0_5_19:
    INSERT_PREFIX = _CACHE + "unified_radix_cache.UnifiedRadixCache.cache_finished_req"
else:
    INSERT_PREFIX = _CACHE + "radix_cache.RadixCache.cache_finished_req"
"""The method that puts tokens of a request into the radix cache, of the class that is the default.

From 0.5.22 on it is called for requests that go on, too.
"""

insert_tokens: Callable[..., None] = _insert_up_to if _SINCE_0_5_21 else _insert_and_free
"""Call INSERT_PREFIX with at most so many tokens of a request; the rows of all others are freed.

Up to 0.5.20 INSERT_PREFIX frees what it is told of, and from 0.5.21 on its caller frees what is
not in the tree.

Args:
    insert: INSERT_PREFIX.
    tree: the radix cache.
    request: SGLang's Req.
    most: how many tokens may be inserted; None is all of them.
    *args, **kwargs: what else SGLang gives INSERT_PREFIX.
"""


PREFIX_CACHE = _CACHE + (
    "unified_radix_cache.UnifiedRadixCache" if _SINCE_0_5_22 else "chunk_cache.ChunkCache"
)
"""The class of the prefix cache of a server whose radix cache is off."""


def loaded_back(request: Any, rows: Tensor | None) -> tuple[Any, Any]:
    """Return what `init_load_back` does of a request's first rows, (n,) int64, if there are any.

    From 0.5.22 on it returns how many, and `prefix_device_indices` which.
    """
    if _SINCE_0_5_22:
        return 0 if rows is None else len(rows), request.last_node
    if rows is None:
        return request.prefix_indices[:0], request.last_node
    request.prefix_indices = rows[:0]  # which they are put behind, on their device
    return rows, request.last_node


ASKS_FOR_ROWS = _SINCE_0_5_22
"""Before, a prefix is known by its rows, and from then on by its length."""


WEIGHT_UPDATES = (
    *(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
    *(("end_weight_update",) if _SINCE_0_5_21 else ()),
)
"""The calls after which the model may have other weights; from 0.5.21 on a last one ends them."""


def load_weights(engine: Any, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Give the model of an engine other weights, by their names in a checkpoint.

    From 0.5.21 on SGLang wants to be told before and after, and refuses them otherwise.

    Raises:
        RuntimeError: SGLang did not load them; says why.
    """

    def done(answer: tuple[bool, str]) -> None:
        succeeded, why = answer
        if not succeeded:
            raise RuntimeError(f"SGLang did not load the weights: {why}")

    if _SINCE_0_5_21:
        done(engine.begin_weight_update())
    try:
        done(engine.update_weights_from_tensor(list(weights)))
    finally:
        if _SINCE_0_5_21:
            done(engine.end_weight_update())


def tokens_read(request: Any) -> int:
    """Return how many tokens of a request are read when this step has ended; moved in 0.5.22."""
    return int(request.extend_end if _SINCE_0_5_22 else request.extend_range.end)


# The forward pass.


def reads_until_the_stream_is_done() -> Any:
    """Say when decode has read SGLang's table for the last time, which 0.5.18 and later ask.

    Behind the graph, on the same stream, chunks of prompts are shipped. So what rewrites the table
    is to wait for the stream, not for a point in it.
    """
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.UNKNOWN


def set_real_tokens(batch: Any, tokens: int) -> None:
    """Say how many tokens of a forward batch are no padding; the field was renamed by 0.5.23."""
    for name in ("num_token_non_padded_cpu", "global_num_token_non_padded_cpu"):
        if hasattr(batch, name):
            setattr(batch, name, tokens)


def add_spec_logprobs(batch: Any, output: Any, tokens: Tensor, width: int) -> None:
    """Add log-probabilities to a verification's output; the function was renamed by 0.5.23.

    Args:
        output: of the logits processor, of (B * width, vocabulary) logits.
        tokens: (B * width,) that were drawn.
        width: tokens of a request.
    """
    from sglang.srt.layers import logprob_processor

    index = torch.arange(len(tokens), device=tokens.device).view(-1, width)
    if hasattr(logprob_processor, "compute_spec_logprobs"):
        logprob_processor.compute_spec_logprobs(batch, output, tokens, accept_index=index)
    else:
        logprob_processor.compute_spec_v2_logprobs(batch, output, tokens, index, width - 1)


def translator_over(runner: Any, table: Tensor) -> Any:
    """Return what lets an attention backend read pool rows from a table in the place of SGLang's.

    Up to 0.5.17 backends read the table of their runner, and there is nothing to return. In 0.5.23
    flashinfer and triton ask the runner's translator, which has a table of its own; what it does to
    rows depends on the pool, and is the same for another table.

    Args:
        table: (request slots, width) int32 pool rows.
    """
    translator = copy.copy(getattr(runner, "kv_index_translator", None))
    if translator is not None:
        translator.req_to_token = table
    return translator


def takes_a_residual(layer: Any) -> bool:
    """Whether a decoder layer takes a hidden state and, beside it, the residual to add to it.

    The residual is a parameter up to 0.5.20, and then rides on the batch, where models have moved.
    """
    parameters = inspect.signature(type(layer).forward).parameters
    return "hidden_states" in parameters and (
        "residual" in parameters or hasattr(layer, "attn_boundary")
    )


EXPORT = "export" if _SINCE_0_5_22 else "finish"
"""The method of the stream, on a batch, that returns a hidden state and its residual."""


def residual_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the residual that a decoder layer is given beside its hidden state, if it is."""
    if "residual" in arguments:
        return arguments["residual"]
    stream = arguments["forward_batch"].residual_stream
    _, residual = getattr(stream, EXPORT)(arguments["hidden_states"])
    return residual

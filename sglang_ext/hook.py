"""What a hook is, and what hooks ask before they do something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_server_args

from sglang_ext.server_args import CacheRankServerArgs

DECODE_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


class Hook(NamedTuple):
    """A function of ours, and where and why SGLang runs it, if the installed release has that."""

    target: str
    kind: HookType
    function: Callable[..., Any]
    why: str
    is_there: bool = True


def sparse_args() -> CacheRankServerArgs | None:
    """The arguments of a server that decodes sparsely, wherever tokens are selected."""
    try:
        args = get_server_args()
    except ValueError:  # a process that uses parts of SGLang without serving
        return None
    return args if isinstance(args, CacheRankServerArgs) and args.is_sparse else None


def verifies(runner: Any) -> bool:
    """Whether a runner of graphs has those of verifications."""
    return bool(runner.capture_forward_mode.is_target_verify())

"""SGLang with an asynchronous cache rank.

from sglang_ext import Engine                        # sglang.Engine, with a cache rank
python -m sglang_ext.launch --cache-rank-gpus 1      # sglang.launch_server, with a cache rank
"""

from typing import TYPE_CHECKING, Any

from sglang_ext.cpu import install_stand_in

# Each process that SGLang starts imports this package first, and SGLang imports CUDA kernels.
install_stand_in()

if TYPE_CHECKING:
    from sglang_ext.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sglang_ext.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

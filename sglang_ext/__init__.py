"""SGLang with sparse decode, and an asynchronous cache rank that may select for it.

from sglang_ext import Engine                    # sglang.Engine, with sparse decode
python -m sglang_ext.launch --model-path MODEL  # sglang.launch_server, with sparse decode
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

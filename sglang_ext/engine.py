"""SGLang in this process, with sparse decode."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints import engine

from sglang_ext import processes
from sglang_ext.server_args import BUNDLED_MODEL, CacheRankServerArgs


class Engine(engine.Engine):
    """`sglang.Engine` with sparse decode; it takes the arguments of CacheRankServerArgs.

    Without `model_path` it serves the bundled model. With `cache_rank_gpus=1` a cache rank selects
    tokens, and with `cache_rank_gpus=0` it is plain SGLang.

    Raises:
        UnsupportedError: an argument cannot be combined with a cache rank.
    """

    server_args_class = CacheRankServerArgs
    run_scheduler_process_func = staticmethod(processes.run_scheduler_process)
    run_detokenizer_process_func = staticmethod(processes.run_detokenizer_process)

    def __init__(self, **kwargs: Any) -> None:
        processes.load_plugin()
        if "server_args" not in kwargs:
            kwargs.setdefault("model_path", str(BUNDLED_MODEL))
        super().__init__(**kwargs)

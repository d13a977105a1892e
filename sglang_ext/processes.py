"""Entry points of SGLang's processes, with the plugin known to be live.

SGLang logs the errors of plugins and goes on without them. A server that was asked for a cache rank
must not serve without one, so each entry point loads the plugin itself and fails when it is not in
place.
"""

from __future__ import annotations

import signal
from typing import Any

from sglang.srt.managers import detokenizer_manager, scheduler
from sglang.srt.plugins import load_plugins

from sglang_ext import cpu, plugin
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.two_ranks import inference_rank


def load_plugin() -> None:
    """Load SGLang's plugins, ours among them.

    Raises:
        RuntimeError: some of our hooks are not in place.
    """
    # Ours may have no installed metadata (in a checkout), or be left out by SGLANG_PLUGINS.
    plugin.register()
    load_plugins()
    plugin.assert_live()


def ignore_signals() -> None:
    """Let this process, and those that it starts, be ended by the server's first process alone.

    Ctrl-C in a terminal reaches all of them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def run_scheduler_process(
    server_args: CacheRankServerArgs,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run SGLang's scheduler process with our hooks, beside its cache rank."""
    ignore_signals()
    load_plugin()
    cpu.name_the_device()
    if server_args.has_cache_rank:
        inference_rank.spawn(server_args, tp_rank, gpu_id)
    return scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> Any:
    """Run SGLang's detokenizer process; importing this package let it be imported without a GPU."""
    ignore_signals()
    return detokenizer_manager.run_detokenizer_process(*args, **kwargs)

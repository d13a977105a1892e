"""Processes come and go together."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from scripts.shared.serving import Server


@pytest.mark.serial
def test_interrupt_leaves_no_process() -> None:
    running = Server(["--cache-rank-gpus", "1"])
    try:
        running.wait_ready()
        pid = int(running.cache_rank()["pid"])
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert pid in {process.pid for process in processes}
        running.process.send_signal(signal.SIGINT)
        running.process.wait(timeout=60)
        _, alive = psutil.wait_procs(processes, timeout=20)
        assert alive == []
    finally:
        running.stop()


@pytest.mark.serial
@pytest.mark.thorough
def test_a_dead_scheduler_takes_its_cache_rank_with_it() -> None:
    running = Server(["--cache-rank-gpus", "1"])
    try:
        running.wait_ready()
        cache_rank = psutil.Process(int(running.cache_rank()["pid"]))
        psutil.Process(cache_rank.ppid()).kill()
        cache_rank.wait(timeout=20)
        assert running.process.wait(timeout=60) != 0
    finally:
        running.stop()


ENGINE_SCRIPT = """
from safetensors.torch import load_file

from sglang_ext import Engine, compat
from sglang_ext.server_args import BUNDLED_MODEL

if __name__ == "__main__":
    engine = Engine(sparse_threshold=100, sparse_budget=32, sink_tokens=4, recent_tokens=8,
                    max_swap_tokens=32, skip_tokenizer_init=True)

    def generate():
        return engine.generate(
            input_ids=list(range(5, 125)),
            sampling_params={"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
        )

    first = generate()
    print("sparse steps:", first["meta_info"]["cache_rank"]["sparse_steps"])
    # With the least likely token in place of the most likely one.
    name = "model.norm.weight"
    weights = load_file(BUNDLED_MODEL / "model.safetensors")[name]
    for factor in (-1, 1):
        compat.load_weights(engine, [(name, factor * weights)])
        print("same tokens:", generate()["output_ids"] == first["output_ids"])
    engine.shutdown()
"""


def test_the_engine_runs_in_process(tmp_path: Any) -> None:
    script = tmp_path / "use_engine.py"
    script.write_text(ENGINE_SCRIPT)
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    found = re.search(r"sparse steps: (\d+)", result.stdout)
    assert found, (result.stdout[-2000:], result.stderr[-4000:])
    assert 10 < int(found[1]) < 40  # of 40, some while its prompt is shipped and slots are filled
    # Other weights are loaded, and those before.
    assert re.findall(r"same tokens: (\w+)", result.stdout) == ["False", "True"]

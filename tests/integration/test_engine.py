"""A program runs the engine in its own process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ENGINE_SCRIPT = """
from safetensors.torch import load_file

from sglang_ext import Engine, compat
from sglang_ext.server_args import BUNDLED_MODEL

if __name__ == "__main__":
    engine = Engine(cache_rank_gpus=1, sparse_threshold=100, sparse_budget=32, sink_tokens=4,
                    recent_tokens=8, max_swap_tokens=32, skip_tokenizer_init=True)

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


def test_the_engine_runs_in_process(tmp_path: Path) -> None:
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

"""A program that runs the engine in its own process. It wants one, for its logging and signals."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from sglang_ext import Engine, compat


def main(asked: str, answered: str) -> None:
    """Answer requests, and the last of them by negated queries and by the weights before."""
    told = json.loads(Path(asked).read_text())
    engine = Engine(**told["engine"])
    answers = [engine.generate(**request) for request in told["requests"]]
    weights = load_file(Path(told["engine"]["model_path"]) / "model.safetensors")
    queries = {name: weight for name, weight in weights.items() if "q_proj.weight" in name}
    for factor in (-1, 1):
        while not engine.flush_cache().success:
            time.sleep(0.1)  # a step is under way, and 0.5.16 loads no weights meanwhile
        load_weights(engine, [(name, factor * each) for name, each in queries.items()])
        answers.append(engine.generate(**told["requests"][-1]))
    Path(answered).write_text(json.dumps(answers))
    engine.shutdown()


def load_weights(engine: Engine, weights: list[tuple[str, Tensor]]) -> None:
    """Give the model other weights; the new release wants to be told before and after."""
    if compat.IS_NEW:
        assert engine.begin_weight_update()[0]
    loaded, why = engine.update_weights_from_tensor(weights)
    assert loaded, why
    if compat.IS_NEW:
        assert engine.end_weight_update()[0]


if __name__ == "__main__":
    main(*sys.argv[1:])

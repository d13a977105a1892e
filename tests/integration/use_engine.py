"""A program that runs the engine in its own process. It wants one, for its logging and signals."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from sglang_ext import Engine, compat

NORM = "model.norm.weight"


def main(asked: str, answered: str) -> None:
    """Answer requests, and the last of them by other weights and by those before."""
    told = json.loads(Path(asked).read_text())
    engine = Engine(**told["engine"])
    answers = [engine.generate(**request) for request in told["requests"]]
    weights = load_file(Path(told["engine"]["model_path"]) / "model.safetensors")[NORM]
    for factor in (-1, 1):  # the least likely token in place of the most likely one
        while not engine.flush_cache().success:
            time.sleep(0.1)  # a step is under way, and 0.5.16 loads no weights meanwhile
        compat.load_weights(engine, [(NORM, factor * weights)])
        answers.append(engine.generate(**told["requests"][-1]))
    Path(answered).write_text(json.dumps(answers))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What forecasts read of a model with FP8 weights, that SGLang has loaded, is what it computes.

Forecasts are by what a calibration collects: here of each layer from what enters that same layer,
so that the model's own projections miss nothing but what a layer of FP8 loses by rounding its
input. Run as a command, this file does that in an engine, which wants a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sglang_ext.calibration.files import read_card
from sglang_ext.calibration.serving import Described, Schedule

ROOT = Path(__file__).parents[2]
LAYERS, TOKENS, BLOCK = 3, 256, 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
ENGINE: dict[str, Any] = {
    "cache_rank_gpus": 0,
    "disable_radix_cache": True,
    "max_running_requests": 1,
    "max_total_tokens": 4 * TOKENS,
    "disable_cuda_graph": True,
    "chunked_prefill_size": TOKENS,
    "log_level": "error",
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in bfloat16 whose projections have biases, and whole blocks of 128."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    made = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return folder


def in_blocks(model: Path, folder: Path) -> Path:
    """The checkpoint of a model with its projections in FP8, a scale for each block of 128."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        tiles = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = tiles.abs().amax((1, 3)) / LARGEST
        codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = codes.view(rows, columns)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def missed(model: Path, out: Path, **engine: str) -> list[float]:
    """The share of the squares of queries that a layer's own projection misses, by layer."""
    command = [sys.executable, __file__, str(model), str(out), json.dumps(engine)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",  # which compiles for minutes
    }
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    fits = read_card(out).fits
    assert {layer: fit.source for layer, fit in fits.items()} == {n: n for n in range(LAYERS)}
    return [fit.plain for fit in fits.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["channels", "blocks"])
def test_fp8_weights_miss_what_rounding_of_inputs_loses(
    scheme: str, model: Path, tmp_path: Path
) -> None:
    if scheme == "blocks":
        shares = missed(in_blocks(model, tmp_path), tmp_path / "out")
    else:
        shares = missed(model, tmp_path / "out", quantization="fp8")
    assert 1e-5 < min(shares) <= max(shares) < 0.003


def encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def main(model: str, out: str, changes: str) -> None:
    """Calibrate each layer by what enters it, on random tokens."""
    from sglang_ext.engine import Engine

    engine = Engine(model_path=model, **ENGINE, **json.loads(changes))
    try:
        schedule = Schedule(dense_layers=0, layers_per_group=1, forecast_lead=0)
        engine.collective_rpc("begin_calibration", schedule=encoded(schedule))
        for part in range(2):
            tokens = random.Random(part).choices(range(300), k=TOKENS)
            engine.generate(input_ids=tokens, sampling_params={"max_new_tokens": 1})
            if part == 0:
                engine.collective_rpc("fit_calibration", rank=8, ridge=0.01)
        described = encoded(Described("random", {}, {}))
        engine.collective_rpc("finish_calibration", folder=out, described=described)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

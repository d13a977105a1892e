"""Integration tests share these models and servers. A server takes about 25 s to start."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from endings import assert_it_stops
from workload import (
    GPU_FLAGS,
    REUSE,
    SMALL_CACHE_RANK,
    STRICT,
    STRICT_POOL,
    TENTH_OF_THE_CONTEXT,
    VOCABULARY,
    WORKING_SET,
    select_everything,
)

from scripts.shared.serving import PLAIN, Server, serve, stop_on_sigterm
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

stop_on_sigterm()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a float32 model with random weights; the same arguments give the same folder."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    made: dict[tuple[object, ...], Path] = {}

    def make(family: str = "qwen3", layers: int = 4, heads: int = 4, kv_heads: int = 2) -> Path:
        key = (family, layers, heads, kv_heads)
        if key not in made:
            torch.manual_seed(0)
            config_class, model_class = {
                "qwen3": (Qwen3Config, Qwen3ForCausalLM),
                "llama": (LlamaConfig, LlamaForCausalLM),
                "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            }[family]
            config = config_class(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=32,
                max_position_embeddings=2048,
                initializer_range=0.2,  # spreads attention and next-token probabilities
                tie_word_embeddings=True,
            )
            made[key] = tmp_path_factory.mktemp(f"{family}-{heads}-{kv_heads}")
            model = model_class(config).float()
            for name, parameter in model.named_parameters():
                if name.endswith(("bias", "norm.weight")):  # else they change nothing
                    torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
            model.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def plain_server(random_model: Callable[..., Path]) -> Iterator[Server]:
    """Plain SGLang serves the default random model."""
    arguments = [*PLAIN, "--model-path", str(random_model()), "--skip-tokenizer-init"]
    with serve(arguments) as server:
        yield server


@pytest.fixture(scope="session")
def reusing_server(random_model: Callable[..., Path]) -> Iterator[Server]:
    """A server whose sparse steps attend to everything, which plain SGLang checks."""
    flags = [*SMALL_CACHE_RANK, *REUSE, "--sparse-budget", "1024", "--max-swap-tokens", "64"]
    environment = {ALLOW_LARGE_BUDGET_VARIABLE: "1", **STRICT}
    with serve([*flags, "--model-path", str(random_model())], environment) as server:
        yield server


@pytest.fixture(scope="session")
def working_set_server(random_model: Callable[..., Path]) -> Iterator[Server]:
    """As `reusing_server`, with working sets alone in the pool, which frees rows for others."""
    flags = [*SMALL_CACHE_RANK, *REUSE, *WORKING_SET, "--model-path", str(random_model())]
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1", **STRICT}) as server:
        yield server


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache folder, where the first inline server keeps what it fits to a model."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def inline_server(random_model: Callable[..., Path], cache_home: Path) -> Iterator[Server]:
    """As `reusing_server`, with selection in SGLang's own process."""
    with select_everything(random_model(), cache_home, **STRICT_POOL) as server:
        yield server


@pytest.fixture(scope="session")
def bundled_server() -> Iterator[Server]:
    """A server has the bundled model and a cache rank."""
    with serve([*TENTH_OF_THE_CONTEXT, "--cache-rank-gpus", "1"]) as server:
        yield server


@pytest.fixture(scope="session")
def bundled_inline_server(cache_home: Path) -> Iterator[Server]:
    """A server has the bundled model, and selects in its own process with the default budgets.

    Prompts come in chunks, so that an answer is right only if all of them are sketched. The server
    is interrupted in the end, and nothing of it is left.
    """
    flags = "--sparse-threshold 264 --recent-tokens 16 --enable-metrics --chunked-prefill-size 128"
    with serve(flags.split(), {"XDG_CACHE_HOME": str(cache_home)}) as server:
        yield server
        assert_it_stops(server, signal.SIGINT)


@pytest.fixture(scope="module", params=["fa3", "flashinfer", "triton"])
def gpu_flags(request: pytest.FixtureRequest) -> list[str]:
    """The flags of a server on GPUs, with each backend that decodes over working sets."""
    if request.param == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return [*GPU_FLAGS, "--attention-backend", request.param]


DEEP: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
"""Six random layers, with a head size that every build of a kernel has."""


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 model in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("deep")
    Qwen3ForCausalLM(Qwen3Config(**DEEP)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a mixture of experts in each layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**DEEP, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    folder = tmp_path_factory.mktemp("experts")
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder

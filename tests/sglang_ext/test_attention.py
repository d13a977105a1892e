"""Decode attends to what the working-set table lists, by SGLang's kernels and no others.

SGLang loads the bundled model in a process of its own. A cache rank is not needed: the gate is
closed, so nothing waits and nothing is sent.
"""

from __future__ import annotations

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache_rank.config import CacheRankConfig
from scripts.baselines.selection import attend
from sglang_ext import compat
from sglang_ext.attention import CacheRankAttnBackend, _RunnerOverTable
from sglang_ext.exchange import make_gate
from sglang_ext.pools import model_shape
from sglang_ext.server_args import BUNDLED_MODEL
from sglang_ext.step_plan import StepPlan
from sglang_ext.working_set import WorkingSetTable

ON_GPU = torch.cuda.is_available()
FA3 = ON_GPU and torch.cuda.get_device_capability()[0] == 9

SINKS, RECENT, BUDGET = 4, 16, 40
SLOTS = [1, 2, 3]
STEPS = [
    ([300, 700, 650], [None, BUDGET, 10]),
    ([301, 701, 651], [None, BUDGET, 20]),
    ([302, 30, 652], [None, None, 30]),  # another request has taken a slot
]
"""Lengths, and filled slots of sparse requests."""
LONGEST_BATCH = 4


@pytest.mark.gpu
@pytest.mark.timeout(600)  # FlashInfer may compile its kernels
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("kernels", "tensor_cores"),
    [
        pytest.param("fa3", "", marks=pytest.mark.skipif(not FA3, reason="needs a Hopper GPU")),
        ("triton", ""),
        ("flashinfer", "true"),
        ("flashinfer", "false"),
    ],
)
def test_attends_to_the_rows_of_the_table_on_a_gpu(
    kernels: str, tensor_cores: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer has a kernel for groups of 4 query heads and more, and another for fewer."""
    if tensor_cores:
        monkeypatch.setenv("SGLANG_FLASHINFER_USE_TENSOR_CORE", tensor_cores)
    assert max(in_own_process(kernels, captured)) < 0.02


def test_backends_that_ask_a_translator_read_the_table_they_are_built_over() -> None:
    translators = pytest.importorskip("sglang.srt.mem_cache.kv_index_translator", reason="0.5.23")
    true, table = torch.zeros(2, 4, 10, dtype=torch.int32)
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=true, size=4))
    runner.kv_index_translator = translators.KVIndexTranslator(
        req_to_token=true,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device="cpu",
    )
    rows = {"req_pool_indices": torch.tensor([1]), "bs": 1}
    seen = _RunnerOverTable(runner, table).kv_index_translator.read_source(None, **rows)
    assert (seen.ids is table, seen.v2p) == (True, None)
    assert runner.kv_index_translator.read_source(None, **rows).ids is true


def in_own_process(kernels: str, captured: bool) -> list[float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(errors, kernels, captured).result()


def errors(kernels: str, captured: bool) -> list[float]:
    """The largest difference from plain torch over the rows of the table, of each step."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    runner = load(kernels)
    torch.manual_seed(0)
    config = CacheRankConfig(
        model_shape(runner, 0, False),
        sparse_budget=BUDGET,
        sink_tokens=SINKS,
        recent_tokens=RECENT,
        max_swap_tokens=BUDGET,
        max_rows=len(SLOTS),
    )
    pool, true = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    device, shape = true.device, config.model
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    true[SLOTS, :800] = torch.randperm(2400, device=device).view(3, 800).to(torch.int32)
    table = WorkingSetTable(true, config)
    is_cuda = device.type == "cuda"
    rank: Any = SimpleNamespace(
        args=SimpleNamespace(attention_backend=kernels, dense_layers=0),
        config=config,
        device=device,
        table=table,
        gate=make_gate(
            config,
            torch.zeros(2, dtype=torch.int64, device=device) if is_cuda else None,
            torch.full((LONGEST_BATCH,), -1, device=device) if is_cuda else None,
        ),
        decode_step=SimpleNamespace(running=None),
        falls_back=False,
    )
    backend = CacheRankAttnBackend(runner, rank)
    layers = [m for m in runner.model.modules() if type(m).__name__ == "RadixAttention"]

    def draw(heads: int) -> list[torch.Tensor]:
        sizes = LONGEST_BATCH if captured else len(SLOTS), heads * shape.head_dim
        return [torch.randn(sizes, dtype=pool.dtype, device=device) for _ in layers]

    queries, keys, values = (draw(n) for n in (shape.query_heads, *[shape.kv_heads] * 2))

    def batch_of(slots: list[int], lengths: list[int]) -> Any:
        on_host = torch.tensor(lengths)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(slots),
            input_ids=torch.zeros(len(slots), dtype=torch.int64, device=device),
            req_pool_indices=torch.tensor(slots, device=device),
            seq_lens=on_host.to(device),
            seq_lens_cpu=on_host,
            seq_lens_sum=sum(lengths),
            positions=on_host.to(device) - 1,
            out_cache_loc=torch.zeros(len(slots), dtype=torch.int64, device=device),
        )

    def forward(batch: Any) -> list[torch.Tensor]:
        given = zip(queries, keys, values, layers, strict=True)
        return [backend.forward_decode(*g, batch, save_kv_cache=False) for g in given]

    graph, outputs = None, []
    if captured:
        warm_up = batch_of([0] * LONGEST_BATCH, [1] * LONGEST_BATCH)
        backend.init_cuda_graph_state(LONGEST_BATCH, LONGEST_BATCH)
        backend.init_forward_metadata_out_graph(warm_up, in_capture=True)
        for graph in (None, torch.cuda.CUDAGraph()):
            context = torch.cuda.graph(graph) if graph else torch.cuda.stream(torch.cuda.Stream())
            torch.cuda.synchronize()
            with context:
                backend.init_forward_metadata_in_graph(warm_up)
                outputs = forward(warm_up)
            torch.cuda.synchronize()

    found, blocks, was_sparse = [], {2: 3000, 3: 4000}, set()
    for lengths, slots_filled in STEPS:
        attended, moves = [], []
        for slot, length, filled in zip(SLOTS, lengths, slots_filled, strict=True):
            is_sparse = filled is not None
            if is_sparse and slot not in was_sparse:
                table.enter(slot, length - 1, blocks[slot])
            (was_sparse.add if is_sparse else was_sparse.discard)(slot)
            moves.append(table.places_of_current_token(slot, length - 1, is_sparse))
            attended.append(table.sparse_length(filled) if is_sparse else length)
        table.add(*torch.tensor(moves, device=device).unbind(1))
        on_device = torch.ones(LONGEST_BATCH, dtype=torch.int64, device=device)
        on_device[: len(SLOTS)] = torch.tensor(attended, device=device)
        padding = [0] * (LONGEST_BATCH - len(SLOTS)) if captured else []
        batch = batch_of(SLOTS + padding, lengths + [1] * len(padding))
        rank.decode_step.running = StepPlan(
            attended_lengths=attended, lengths=on_device if is_cuda else None
        )
        if graph is not None:
            backend.init_forward_metadata_out_graph(batch)
            graph.replay()
        else:
            backend.init_forward_metadata(batch)
            outputs = forward(batch)
        lists = table.table[SLOTS].clone()[:, None, : max(attended)]
        for layer, output in enumerate(outputs):
            expected = attend(
                queries[layer][: len(SLOTS)].view(len(SLOTS), shape.query_heads, -1),
                pool.k_buffer[layer],
                pool.v_buffer[layer],
                lists,
                torch.tensor(attended, device=device),
                shape.scale,
            )
            assert expected.float().std() > 0.1
            found.append(float((output[: len(SLOTS)].view_as(expected) - expected).abs().max()))
    return found


def load(kernels: str) -> Any:
    """Let SGLang load the bundled model in this process, and return its model runner."""
    from sglang.srt.server_args import PortArgs, ServerArgs

    one_batch = importlib.import_module("sglang.benchmark.one_batch")
    args = ServerArgs(
        model_path=str(BUNDLED_MODEL),
        device="cuda" if ON_GPU else "cpu",
        dtype="bfloat16" if ON_GPU else "float32",
        attention_backend=kernels,
        sampling_backend="pytorch",
        grammar_backend="none",
        cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled",
        page_size=1,
        max_total_tokens=8192,
        max_running_requests=8,
    )
    compat.resolve(args)
    if hasattr(one_batch, "publish"):  # in 0.5.23 every process publishes its arguments first
        ranks = one_batch.SpawnRanks(world_rank=0, gpu_id=0)
        one_batch.publish(args, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
    loaded, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return loaded.torch_runner

"""The hooks into SGLang: all in place or an error by name, and inert without an inference rank."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sglang_ext import compat, hooks, plugin, pool_hooks, processes
from sglang_ext import hook as hook_module
from sglang_ext.hook import Hook
from sglang_ext.hooks import HOOKS
from sglang_ext.memory import SHIPPED_TOKENS
from sglang_ext.refusals import UnsupportedError
from sglang_ext.server_args import BUNDLED_MODEL, CacheRankServerArgs
from sglang_ext.two_ranks import inference_rank

# After ours, which makes SGLang importable without a GPU.
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # isort: skip
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # isort: skip


@pytest.fixture(scope="module", autouse=True)
def _live_plugin() -> None:
    """The plugin, as in every process of a server."""
    plugin.register()
    processes.load_plugin()


@pytest.fixture(autouse=True)
def _without_inference_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_rank, "_current", None)


# All in place.


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_the_target_of_every_hook_exists_and_runs_through_it(hook: Hook) -> None:
    target = pkgutil.resolve_name(hook.target)
    assert target.__name__ == hook.target.rsplit(".", 1)[1]
    assert hook.function in [cell.cell_contents for cell in target.__closure__]


def test_no_target_has_two_hooks() -> None:
    targets = [hook.target for hook in HOOKS]
    assert len(set(targets)) == len(targets)


def test_the_plugin_is_live_and_loading_it_again_hooks_nothing_twice() -> None:
    plugin.assert_live()
    processes.load_plugin()
    plugin.assert_live()
    for hook in HOOKS:
        registered = [
            (kind, function)
            for kind, function, _ in HookRegistry._hooks[hook.target]
            if function.__module__.startswith("sglang_ext.")
        ]
        assert registered == [(hook.kind, hook.function)]


def test_a_hook_that_cannot_be_applied_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.no_such_method"
    missing = Hook(target, HookType.BEFORE, hooks.end_all_sequences, "gone in this version")
    monkeypatch.setattr(hooks, "HOOKS", (*HOOKS, missing))
    registered = [(missing.kind, missing.function, None)]
    monkeypatch.setitem(HookRegistry._hooks, target, registered)
    expected = f"the cache rank's hooks could not be applied: {target}"
    with pytest.raises(RuntimeError) as caught:
        plugin.assert_live()
    assert str(caught.value) == expected
    with pytest.raises(RuntimeError) as caught:
        processes.load_plugin()
    assert str(caught.value) == expected


def test_a_scheduler_does_not_start_when_a_hook_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Hook("sglang.gone", HookType.BEFORE, hooks.end_all_sequences, "gone in this version")
    monkeypatch.setattr(hooks, "HOOKS", (*HOOKS, missing))
    start = Mock()
    monkeypatch.setattr(processes.scheduler, "run_scheduler_process", start)
    monkeypatch.setattr(inference_rank, "spawn", start)
    with pytest.raises(RuntimeError, match=r"could not be applied: sglang\.gone"):
        processes.run_scheduler_process(Mock(has_cache_rank=True), None, 0, 0)
    start.assert_not_called()


# Nothing happens without an inference rank.


def kv_pool() -> Any:
    return MHATokenToKVPool(
        size=32,
        page_size=1,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


CONFIGURATOR = SimpleNamespace(
    model_config=SimpleNamespace(
        num_attention_heads=4, get_num_kv_heads=lambda tp_size: 2, head_dim=8, hidden_size=32
    ),
    kv_cache_dtype=torch.float32,
    layer_info=SimpleNamespace(num_effective_layers=3),
)


def cache_rank_args(**changes: Any) -> CacheRankServerArgs:
    usual = {
        "model_path": str(BUNDLED_MODEL),
        "device": "cpu",
        "cache_rank_gpus": 1,
        "sparse_budget": 20,
        "sink_tokens": 4,
        "max_sparse_requests": 3,
    }
    args = CacheRankServerArgs(**{**usual, **changes})
    compat.resolve(args)
    return args


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("plain", ["another class", "no cache rank"])
def test_plain_sglang_has_pools_without_reserve(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = object() if plain == "another class" else cache_rank_args(cache_rank_gpus=0)
    monkeypatch.setattr(hook_module, "get_server_args", lambda: args)
    assert kv_pool().k_buffer[0].shape == (33, 2, 8)
    assert pool_hooks.leave_room_beyond_allocator(10_000, CONFIGURATOR) == 10_000


@pytest.mark.usefixtures("quiet")
def test_a_cache_rank_puts_its_reserve_behind_the_pool_whose_size_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = cache_rank_args()
    monkeypatch.setattr(hook_module, "get_server_args", lambda: args)
    reserve = 3 * (4 + 20)
    pool = kv_pool()
    assert pool.size == 32
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        assert buffer.shape == (33 + reserve, 2, 8)
    row = torch.empty((2, 2, 8), dtype=torch.float32)  # K and V of one token in one layer
    left = pool_hooks.leave_room_beyond_allocator(10_000_000, CONFIGURATOR)
    staged = 3 * 2 * (4 + 2 * 2) * 8 * 4  # q, k and v of three requests in the two sparse layers
    entering = 3 * 2 * 2 * args.max_swap_tokens * (2 * 8 * 4 + 4)  # K, V and slots
    encoded = 1280 * 2 * row.nbytes  # five pages have, as codes, no more bytes than 512 tokens
    shipped = SHIPPED_TOKENS * 2 * row.nbytes
    taken = reserve * 3 * row.nbytes + staged + entering + encoded + shipped
    left_for_headers = 10_000_000 - taken - left
    assert 0 < left_for_headers < 1000


@pytest.mark.usefixtures("quiet")
def test_dense_layers_alone_have_rows_for_tokens_that_lose_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 33 + 3 * (4 + 20)

    def with_arguments(**changes: Any) -> tuple[Any, int]:
        args = cache_rank_args(context_length=100, **changes)
        monkeypatch.setattr(hook_module, "get_server_args", lambda: args)
        return kv_pool(), pool_hooks.leave_room_beyond_allocator(10_000_000, CONFIGURATOR)

    for changes in ({"inference_kv": "full"}, {"inference_kv": "working-set", "dense_layers": 0}):
        pool, _ = with_arguments(**changes)
        assert {buffer.shape[0] for buffer in (*pool.k_buffer, *pool.v_buffer)} == {rows}
    _, before = with_arguments(inference_kv="full")
    pool, left = with_arguments(inference_kv="working-set")
    assert pool.size == 32
    for buffers in (pool.k_buffer, pool.v_buffer):
        assert [buffer.shape for buffer in buffers] == [(rows + 3 * 100, 2, 8), (rows, 2, 8)]
    assert pool.k_data_ptrs.tolist() == [buffer.data_ptr() for buffer in pool.k_buffer]
    row = torch.empty((2, 2, 8), dtype=torch.float32)  # K and V of one token in one layer
    assert before - left == 3 * 100 * row.nbytes


@pytest.mark.usefixtures("quiet")
def test_what_leaves_no_memory_for_a_pool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = cache_rank_args(context_length=100, inference_kv="working-set")
    monkeypatch.setattr(hook_module, "get_server_args", lambda: args)
    taken = 10_000_000 - pool_hooks.leave_room_beyond_allocator(10_000_000, CONFIGURATOR)
    assert pool_hooks.leave_room_beyond_allocator(taken + 1, CONFIGURATOR) == 1
    with pytest.raises(UnsupportedError, match=r"--max-sparse-requests 3 .* --dense-layers"):
        pool_hooks.leave_room_beyond_allocator(taken, CONFIGURATOR)


# With an inference rank.


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A stand-in for the inference rank of this process."""
    rank = Mock()
    monkeypatch.setattr(inference_rank, "_current", rank)
    return rank


@pytest.mark.parametrize("recaptures", [False, True])
def test_new_weights_do_not_bring_new_graphs(rank: Mock, recaptures: bool) -> None:
    original, updater = Mock(), Mock()
    update = Mock(recapture_cuda_graph=recaptures)
    result = hooks.update_from_disk(original, updater, update)
    if recaptures:
        assert (result.success, result.message.split(":")[0]) == (False, "recapture_cuda_graph")
    else:
        assert result == original(updater, update)
    assert rank.on_weights_updated.called is not recaptures


@pytest.mark.releases
@pytest.mark.parametrize("ships", [False, True])
def test_who_rewrites_the_table_waits_for_a_prompt_that_is_shipped(rank: Mock, ships: bool) -> None:
    worker, batch = Mock(), Mock()
    rank.run_decode.return_value.logits_output = None
    before_the_graph = worker.model_runner.war_fastpath_read_done_event
    rank.run_decode.return_value.cache_rank_plan.shipping = ["a prompt"] if ships else []
    hooks.run_step(Mock(), worker, batch)
    event = worker.model_runner.war_fastpath_read_done_event
    # The new release asks the attention backend, and never takes the event.
    assert event is (None if ships and not compat.IS_NEW else before_the_graph)


@pytest.mark.parametrize(("mode", "retracts"), [("retract", True), ("in_place", False)])
def test_orphans_leave_the_batch_before_a_pause_takes_their_last_result(
    rank: Mock, mode: str, retracts: bool
) -> None:
    scheduler = Mock()
    hooks.before_pause(scheduler, Mock(mode=mode))
    retracted = [((scheduler, scheduler.running_batch),)] if retracts else []
    assert rank.cache_rank.retract_orphans.call_args_list == retracted


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("idle", [False, True])
def test_a_server_is_not_idle_while_requests_are_queued_a_turn_later(
    rank: Mock, idle: bool, waiting: int
) -> None:
    rank.cache_rank.to_queue = [Mock()] * waiting
    assert hooks.is_idle(idle, Mock()) == (idle and not waiting)
    assert hooks.is_idle(idle, Mock(), ignore_waiting=True) == idle


@pytest.mark.parametrize(
    ("released", "resumed_in", "downs", "ups"),
    [
        (None, [None], 1, 1),
        (["weights"], [["weights"]], 1, 1),
        (["cuda_graph"], [["cuda_graph"]], 0, 1),
        (["kv_cache", "weights"], [["kv_cache"], ["weights"]], 1, 1),
        (None, [["weights"], ["kv_cache", "cuda_graph"]], 1, 1),
        (None, [["weights"], ["cuda_graph"]], 1, 0),
    ],
)
def test_the_cache_rank_is_there_while_what_it_needs_is(
    rank: Mock,
    released: list[str] | None,
    resumed_in: list[list[str] | None],
    downs: int,
    ups: int,
) -> None:
    everything = {"kv_cache", "weights", "cuda_graph"}
    updater = SimpleNamespace(offload_tags={*(released or everything)})
    hooks.release_memory(updater, SimpleNamespace(tags=released))
    assert rank.cache_rank.release.call_count == downs
    for tags in resumed_in:
        updater.offload_tags -= {*(tags or everything)}
        assert hooks.resume_memory("answer", updater, SimpleNamespace(tags=tags)) == "answer"
    assert rank.cache_rank.resume.call_count == ups

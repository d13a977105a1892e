"""What we take from SGLang is where we look for it: a new release fails here first, by name.

Each test names the functions, parameters and attributes that some file of ours relies on. They are
read off the installed SGLang, without a server.
"""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from scripts.baselines.attention import BaselineAttnBackend
from sglang_ext import compat
from sglang_ext.flags import CacheRankFlags, field_of
from sglang_ext.hooks import HOOKS, Hook
from sglang_ext.refusals import servers
from sglang_ext.two_ranks.attention import CacheRankAttnBackend

pytestmark = pytest.mark.releases

SRT = "sglang.srt."
REQUEST = "managers.schedule_batch.Req"
BATCH = "model_executor.forward_batch_info.ForwardBatch"

HOOKED_PARAMETERS = {
    "fork_processes": "",
    "keep_retracted": "self",
    "end_what_is_gone": "self req is_retracted",
    "retract_whole_ones": "reqs",
    "add_reserve_rows": "self",
    "describe_rows_of_the_allocator": "self",
    "add_dense_store": "self",
    "leave_room_beyond_allocator": "self pre_model_load_memory",
    "prepare_selection": "self",
    "run_step": "self batch",
    "capture_both_kinds": "self stream_idx",
    "name_graph": "self size stream_idx variant_label",
    "process_result": "self batch result",
    "after_request": "self",
    "before_match": "self",
    "find_prefix": "self params",
    "admit_request": "self req",
    "tokens_to_come": "self req",
    "load_back": "self params",
    "restored_rows": "self req",
    "insert_prefix": "self req"
    + ("" if "cache_finished_req" in compat.INSERT_PREFIX else " up_to"),
    "end_sequence": "self req",
    "end_all_sequences": "self",
    "before_next_batch": "self running_batch",
    "before_pause": "self recv_req",
    "abort_request": "self recv_req",
    "is_idle": "self",
    "add_internal_state": "self recv_req",
    "note_new_weights": "self recv_req",
    "update_from_disk": "self recv_req",
    "release_memory": "self recv_req",
    "resume_memory": "self recv_req",
    "read_body": "self",
    "generate": "self obj request",
    "answer_error": "self message err_type status_code param",
    "name_sample": "self",
    "abort_samples": "self rid abort_all",
    "round_draft_weights": "self",
    "prepare_moves": "self",
    "find_drafts_pool": "draft_worker",
    "widen_table": "self size max_context_len",
    "assign_rows": (
        "req_pool_indices req_to_token start_offset end_offset out_cache_loc batch_size"
    ),
    "hash_noise": "seed positions col_indices",
    "describe_verification": "self num_tokens",
    "class_of_backend": "transfer_backend class_type",
    "attach_pool": "self",
    "choose_codes": "self req",
    "note_request": "",
    "after_resuming": "self",
    "take_in_while_paused": "self recv_reqs",
    "draft": "self",
    "commit_drafts": "self decode_req",
}
"""The first parameters of the functions that ours are hooked to."""

CALLED = {
    "entrypoints.http_server.launch_server": (
        "server_args init_tokenizer_manager_func run_scheduler_process_func "
        "run_detokenizer_process_func"
    ),
    "layers.attention.attention_registry.register_attention_backend": "name",
    "layers.quantization.marlin_utils.apply_gptq_marlin_linear": (
        "input weight weight_scale weight_zp g_idx g_idx_sort_indices workspace wtype "
        "output_size_per_partition input_size_per_partition is_k_full bias"
    ),
    "layers.quantization.marlin_utils.marlin_make_empty_g_idx": "device",
    "layers.quantization.marlin_utils.marlin_make_workspace": "device",
    "layers.quantization.marlin_utils.marlin_permute_scales": "s size_k size_n group_size",
    "layers.quantization.unquant.UnquantizedLinearMethod.apply": "layer x bias",
    "managers.detokenizer_manager.run_detokenizer_process": "server_args",
    "managers.schedule_batch.Req.update_finish_state": "new_accepted_len",
    "managers.schedule_batch.ScheduleBatch.filter_batch": "keep_indices",
    "managers.schedule_batch.ScheduleBatch.init_new": (
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache model_config enable_overlap "
        "spec_algorithm"
    ),
    "managers.schedule_batch.ScheduleBatch.release_req": "idx remaing_req_count",
    **(
        {
            "managers.schedule_batch.release_req": (
                "req remaing_req_count req_to_token_pool token_to_kv_pool_allocator tree_cache "
                "hisparse_coordinator"
            )
        }
        if compat.SKIPS_FINISHING
        else {}
    ),
    "managers.scheduler.Scheduler._add_request_to_queue": "req is_retracted",
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
    "_maybe_update_reasoning_tokens": "req next_token_id",
    "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output": (
        "reqs return_logprob"
    ),
    "managers.scheduler.run_scheduler_process": "server_args port_args gpu_id tp_rank",
    "layers.sampler.sampling_from_probs_torch": "probs sampling_seed positions",
    "layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": (
        "probs top_ks top_ps min_ps need_min_p_sampling sampling_seed positions"
    ),
    "managers.overlap_utils.FutureMap": "device spec_algo req_to_token_pool",
    "mem_cache.memory_pool.KVWriteLoc": "loc swa_loc",
    "mem_cache.memory_pool.MHATokenToKVPool.get_kv_buffer": "layer_id",
    "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer": "layer cache_k cache_v",
    "plugins.hook_registry.HookRegistry.register": "target hook hook_type",
    "plugins.hook_registry.HookRegistry.apply_hooks": "",
    "plugins.load_plugins": "",
    "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner": (
        "model_runner attn_backend"
    ),
    "runtime_context.get_parallel": "",
    "sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": "batch vocab_size",
    "speculative.dflash_info.DFlashVerifyInput": (
        "draft_token positions draft_token_num capture_hidden_mode"
    ),
    "speculative.spec_info.SpeculativeAlgorithm.register": "name supports_overlap spec_class",
    "runtime_context.get_server_args": "",
    "server_args.ServerArgs.add_cli_args": "parser",
    "server_args.ServerArgs.from_cli_args": "args",
    "server_args.add_attention_backend_choices": "",
    "disaggregation.common.conn.KVTransferError": "bootstrap_room failure_reason",
    "disaggregation.utils.prepare_abort": "req error_message status_code",
    "utils.kill_process_tree": "parent_pid include_parent",
    "arg_groups.arg_utils.add_cli_args_from_dataclass": "parser cls fields",
    "configs.hybrid_arch.mambaish_config": "",
}
"""Functions that we call, and parameters that we give them."""

ATTRIBUTES = {
    "disaggregation.common.conn.CommonKVManager": (
        "bootstrap_timeout check_status connection_lock connection_pool failure_lock "
        "failure_records kv_args local_ip prefill_info_table rank_port register_to_bootstrap "
        "server_args server_socket waiting_timeout"
    ),
    "disaggregation.common.conn.CommonKVReceiver": (
        "_get_bootstrap_info_from_server abort abort_notified bootstrap_addr bootstrap_infos "
        "bootstrap_room clear conclude_state failure_exception init_time kv_mgr poll "
        "prefill_dp_rank send_metadata target_cp_ranks target_pp_ranks target_tp_ranks"
    ),
    "disaggregation.common.conn.CommonKVSender": (
        "_transfer_metric abort aux_index bootstrap_room clear conclude_state failure_exception "
        "get_transfer_metric init kv_mgr poll pop_decode_prefix_len send"
    ),
    "disaggregation.decode.DecodePreallocQueue": (
        "kv_manager req_to_token_pool retracted_queue scheduler token_to_kv_pool transfer_backend"
    ),
    "disaggregation.decode.DecodeRequest": "kv_receiver req",
    "disaggregation.decode.DecodeTransferQueue": "metadata_buffers scheduler",
    "disaggregation.prefill.PrefillBootstrapQueue": "scheduler token_to_kv_pool transfer_backend",
    "configs.model_config.AttentionArch": "MLA",
    "configs.model_config.ModelConfig": (
        "attention_arch context_len dtype get_num_kv_heads head_dim hf_config hf_text_config "
        "hidden_size is_generation is_hybrid_swa is_multimodal num_attention_heads "
        "num_hidden_layers quantization sliding_window_size"
    ),
    "entrypoints.engine.Engine": (
        "server_args_class run_scheduler_process_func run_detokenizer_process_func shutdown"
    ),
    "layers.linear.LinearBase": "quant_method",
    "layers.layernorm.RMSNorm": "variance_epsilon weight",
    "layers.logits_processor.LogitsProcessorOutput": "customized_info",
    "layers.radix_attention.RadixAttention": (
        "layer_id logit_cap qk_head_dim scaling tp_k_head_num tp_q_head_num tp_v_head_num "
        "v_head_dim"
    ),
    "managers.schedule_policy.PrefillAdder": "can_run_list rem_chunk_tokens",
    "mem_cache.base_prefix_cache.InitLoadBackParams": "host_hit_length req",
    "mem_cache.base_prefix_cache.MatchPrefixParams": "key req",
    "mem_cache.base_prefix_cache.MatchResult": "host_hit_length",
    REQUEST: "finished finished_len finished_reason host_hit_length last_node origin_input_ids "
    "output_ids return_logprob sampling_params stream to_finish extra_key"
    + (" cache_salt" if compat.HAS_SALT else ""),
    "managers.schedule_batch.ScheduleBatch": (
        "batch_is_full forward_mode is_empty reqs seq_lens_cpu"
    ),
    "managers.scheduler.Scheduler": (
        "_engine_paused batch_result_processor disagg_decode_prealloc_queue enable_overlap "
        "forward_stream model_config output_streamer running_batch server_args spec_algorithm "
        "tp_worker waiting_queue req_to_token_pool token_to_kv_pool_allocator tree_cache"
    ),
    "managers.io_struct.ReleaseMemoryOccupationReqInput": "tags",
    "managers.io_struct.UpdateWeightFromDiskReqInput": "recapture_cuda_graph",
    "managers.io_struct.UpdateWeightFromDiskReqOutput": "success message",
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": "offload_tags",
    "managers.utils.GenerationBatchResult": (
        "accept_lens can_run_cuda_graph copy_done logits_output new_seq_lens next_draft_input "
        "next_token_ids num_correct_drafts_per_req_cpu speculative_num_draft_tokens"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo": (
        "acc_additive_penalties acc_scaling_penalties has_custom_logit_processor is_all_greedy "
        "logit_bias min_ps need_min_p_sampling need_top_k_sampling need_top_p_sampling "
        "sampling_seed temperatures top_ks top_ps"
    ),
    "mem_cache.kv_cache_configurator.KVCacheConfigurator": "kv_cache_dtype layer_info model_config",
    "mem_cache.memory_pool.MHATokenToKVPool": (
        "device dtype k_buffer memory_saver_adapter page_size size store_dtype v_buffer"
    ),
    "mem_cache.memory_pool.ReqToTokenPool": "req_to_token size",
    BATCH: (
        "batch_size extend_prefix_lens extend_seq_lens_cpu forward_mode out_cache_loc "
        "req_pool_indices seq_lens seq_lens_cpu seq_lens_sum"
    ),
    "model_executor.forward_batch_info.ForwardMode": "is_decode is_decode_or_idle is_extend",
    "model_executor.model_runner.ModelRunner": (
        "memory_saver_adapter model model_config page_size prefill_cuda_graph_runner "
        "req_to_token_pool server_args token_to_kv_pool token_to_kv_pool_allocator"
    )
    + ("" if compat.IS_NEW else " war_fastpath_read_done_event"),
    "plugins.hook_registry.HookRegistry": "_hooks _patched",
    "runtime_context.ParallelContext": "tp_rank",
    "sampling.sampling_params.SamplingParams": (
        "custom_params ebnf frequency_penalty json_schema max_new_tokens min_new_tokens min_p "
        "presence_penalty regex repetition_penalty structural_tag"
    ),
}
"""What we read of SGLang's objects, or set."""

BACKENDS = (CacheRankAttnBackend, BaselineAttnBackend)

OF_LATER_RELEASES = {"shared_read_ends"}
"""Methods of our backends that the oldest releases do not call."""


def found(path: str) -> Any:
    """The object of SGLang that a dotted path names."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{path} is not in SGLang {compat.RELEASE}: {error}", pytrace=False)


def parameters(function: Any) -> list[str]:
    """The names of a function's parameters, below our hooks if it has any."""
    return list(inspect.signature(inspect.unwrap(function)).parameters)


@functools.cache
def attributes(cls: type) -> set[str]:
    """What instances of a class have: what classes define, annotate, or set on self."""
    if issubclass(cls, Enum):
        return {*vars(cls)}
    names = {*dir(cls), *getattr(cls, "__struct_fields__", ())}
    for base in cls.__mro__:
        names |= {*inspect.get_annotations(base)}
        if base.__module__.startswith("sglang"):
            names |= {*_set_on_self(base)}
    return names


def _set_on_self(cls: type) -> Iterator[str]:
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_what_is_hooked_has_the_parameters_that_our_function_takes(hook: Hook) -> None:
    wanted = HOOKED_PARAMETERS[hook.function.__name__].split()
    assert parameters(found(hook.target))[: len(wanted)] == wanted


@pytest.mark.parametrize("path", CALLED)
def test_what_is_called_takes_what_it_is_given(path: str) -> None:
    missing = {*CALLED[path].split()} - {*parameters(found(SRT + path))}
    assert not missing, f"{path} has lost parameters: {sorted(missing)}"


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_what_is_read_is_there(path: str) -> None:
    missing = {*ATTRIBUTES[path].split()} - attributes(found(SRT + path))
    assert not missing, f"{path} has lost attributes: {sorted(missing)}"


def test_a_request_says_how_far_its_prompt_is_read() -> None:
    request = attributes(found(SRT + REQUEST))
    assert ("extend_end" if compat.DESCRIBES_BUFFERS else "extend_range") in request
    assert "__req__" in inspect.getsource(found(SRT + "managers.schedule_batch"))


def test_the_state_of_a_request_in_the_pools_is_where_we_look_for_it() -> None:
    request = found(SRT + REQUEST)
    record = found(SRT + "managers.schedule_batch.ReqKvInfo")
    looked_at = "request" if compat.pool_state(_Request) is _Request else "record"
    missing = {"req_pool_idx", "cache_protected_len"} - attributes(
        {"request": request, "record": record}[looked_at]
    )
    assert not missing, f"{looked_at} has lost attributes: {sorted(missing)}"


class _Request:
    """A request, as far as it has its own state."""

    kv = object()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_overrides_is_called_by_its_base(backend: type) -> None:
    base = found(SRT + "layers.attention.base_attn_backend.AttentionBackend")
    public = {name for name in vars(backend) if not name.startswith("_")}
    own = {"on_extend", "selection"}
    missing = public - own - OF_LATER_RELEASES - attributes(base)
    assert not missing, f"AttentionBackend has lost {sorted(missing)}"


def test_every_method_that_a_backend_must_have_is_one_of_ours() -> None:
    base = found(SRT + "layers.attention.base_attn_backend.AttentionBackend")
    wanted = {"init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "forward_decode"}
    assert wanted <= {*dir(base)}
    for backend in BACKENDS:
        assert not [name for name in wanted if getattr(backend, name) is getattr(base, name)]
        assert not getattr(backend, "__abstractmethods__", None)


def test_the_flags_that_are_refused_exist() -> None:
    fields = compat.default_values(CacheRankFlags)
    tables = {
        **servers.SPARSE_DECODE_FLAGS,
        **servers.EXCHANGE_FLAGS,
        **servers.INLINE_FLAGS,
        **servers.TRANSFER_FLAGS,
    }
    asked = {field_of(flag) for flags in tables for flag in flags.split()}
    absent = {field_of(flag) for flag in compat.ABSENT_FLAGS}
    assert sorted(asked - fields.keys()) == sorted(absent)


@pytest.mark.parametrize("model", ["llama.Llama", "qwen2.Qwen2", "qwen3.Qwen3"])
def test_layers_that_are_forecast_have_the_parts_that_we_look_for(model: str) -> None:
    layer = found(f"{SRT}models.{model}DecoderLayer")
    taken, held = {*parameters(layer.forward)}, attributes(layer)
    assert {"hidden_states", "forward_batch"} <= taken
    assert {"input_layernorm", "self_attn"} <= held
    assert "residual" in taken or "attn_boundary" in held
    if "residual" not in taken:
        stream = found(f"{SRT}layers.layer_boundary.residual.stream.ResidualStream")
        assert parameters(stream.export)[:2] == ["self", "hidden"]
        assert "residual_stream" in attributes(found(SRT + BATCH))
    attention = found(f"{SRT}models.{model}Attention")
    assert {"attn", "qkv_proj", "rotary_emb"} <= attributes(attention)
    assert ("k_norm" in attributes(attention)) == ("Qwen3" in model)
    whole = found(f"{SRT}models.{'qwen2.Qwen2' if 'wen' in model else model}Model")
    assert "embed_tokens" in attributes(whole)

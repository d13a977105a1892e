"""Flags of SGLang that are known to work with sparse decode; the user is told of any other."""

from __future__ import annotations

import logging

from sglang_ext import compat
from sglang_ext.flags import CACHE_RANK_FIELDS, CacheRankFlags, flag_of

logger = logging.getLogger(__name__)

KNOWN = frozenset(
    """
    model_path tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init load_format
    model_loader_extra_config trust_remote_code context_length revision model_impl
    json_model_override_args dtype quantization kv_cache_dtype enable_fp32_lm_head download_dir
    model_checksum weight_loader_disable_mmap weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load

    mem_fraction_static max_running_requests max_queued_requests max_total_tokens
    chunked_prefill_size max_prefill_tokens prefill_max_requests page_size random_seed
    schedule_policy schedule_conservativeness enable_priority_scheduling
    disable_priority_preemption default_priority_value abort_on_priority_when_disabled
    schedule_low_priority_values_first priority_scheduling_preemption_threshold
    disable_radix_cache radix_eviction_policy disable_overlap_schedule
    enable_memory_saver enable_weights_cpu_backup

    device base_gpu_id gpu_id_step nccl_port dist_timeout dist_init_addr watchdog_timeout
    soft_watchdog_timeout sleep_on_idle gc_threshold custom_sigquit_handler

    attention_backend prefill_attention_backend decode_attention_backend sampling_backend
    triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
    triton_attention_split_tile_size cuda_graph_config cuda_graph_backend_decode
    cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_bs_decode cuda_graph_bs_prefill disable_cuda_graph disable_prefill_cuda_graph
    disable_decode_cuda_graph disable_cuda_graph_padding disable_flashinfer_autotune

    host port fastapi_root_path skip_server_warmup warmups ssl_keyfile ssl_certfile ssl_ca_certs
    ssl_keyfile_password api_key admin_api_key served_model_name weight_version chat_template
    hf_chat_template_name completion_template default_chat_template_kwargs file_storage_path
    enable_cache_report tool_server reasoning_parser tool_call_parser sampling_defaults
    preferred_sampling_params allow_auto_truncate strip_thinking_cache stream_interval
    stream_response_default_include_usage incremental_streaming_output

    grammar_backend constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt disable_outlines_disk_cache
    enable_custom_logit_processor enable_return_routed_experts

    speculative_algorithm speculative_num_draft_tokens speculative_num_steps
    speculative_eagle_topk

    disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port

    log_level log_level_http log_requests log_requests_level log_requests_format
    log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
    decode_log_interval gc_warning_threshold_secs enable_request_time_stats_logging
    enable_metrics enable_metrics_for_all_schedulers extra_metric_labels
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency
    prompt_tokens_buckets generation_tokens_buckets collect_tokens_histogram
    export_metrics_to_file export_metrics_to_file_dir kv_canary kv_canary_real_data
    kv_canary_sweep_interval
    """.split()
)
"""Tests run them, or they act outside of what sparse decode touches, as those of the API do."""


def say_unknown(args: CacheRankFlags) -> None:
    """Warn of SGLang's flags that the user gives and that nobody has tried with sparse decode."""
    unknown = [
        flag_of(field)
        for field, default in compat.default_values(type(args)).items()
        if field not in KNOWN
        and field not in CACHE_RANK_FIELDS
        and not field.startswith("_")
        and getattr(args, field) != default
    ]
    if unknown:
        logger.warning("cache rank: not known to work with it: %s", ", ".join(unknown))

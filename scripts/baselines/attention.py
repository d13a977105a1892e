"""The decode attention backend of the synchronous baselines.

The kernel is SGLang's FlashAttention-3, which is given lists of pool rows as page tables. Where
every KV head has a list of its own, the pool (rows, Hkv, D) is viewed as rows * Hkv rows of one
head, and a request as Hkv requests of one group each.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from scripts.baselines.reference import Budget
from scripts.baselines.selection import QUEST_PAGE, Selection, Step, attend
from sglang_ext.dense_kernels import AroundDenseKernels
from sglang_ext.flags import CacheRankFlags


class BaselineAttnBackend(AroundDenseKernels):
    """Selects with the current query, then attends, layer by layer.

    Dense layers are served by the inner backend. What a step needs is prepared inside the CUDA
    graph, from the lengths and request slots on the device.
    """

    def __init__(self, runner: Any, args: CacheRankFlags, decode_mode: str) -> None:
        super().__init__(runner, args.attention_backend)
        self._dense_layers = args.dense_layers
        page = QUEST_PAGE if decode_mode == "quest" else 1
        attention = next(
            module for module in runner.model.modules() if type(module).__name__ == "RadixAttention"
        )
        self.selection = Selection(
            decode_mode,
            Budget.of_pages(args.sink_tokens, args.recent_tokens, args.budget_curve.most, page),
            runner.req_to_token_pool.req_to_token,
            runner.token_to_kv_pool.k_buffer[args.dense_layers :],
            float(attention.scaling),
            runner.page_size,
        )
        self._step: Step | None = None
        self._schedule: Tensor | None = None
        self._query_starts: Tensor | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._dense.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if self._dense_layers or not forward_batch.forward_mode.is_decode_or_idle():
            self._dense.init_forward_metadata(forward_batch)
        self._prepare_step(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if self._dense_layers:
            self._dense.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if self._dense_layers:
            self._dense.init_forward_metadata_in_graph(forward_batch)
        self._prepare_step(forward_batch)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        sparse_layer = layer.layer_id - self._dense_layers
        if sparse_layer < 0:
            return self._dense.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        step = self._step
        assert step is not None
        if k is not None and save_kv_cache:
            # SGLang's pool takes (tokens, Hkv, D); the models of this engine hand it over so.
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        queries = q.contiguous().view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        self.selection.select(step, sparse_layer, queries)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if queries.is_cuda:
            output = self._flash_attention(queries, keys, values, layer, step)
        else:
            output = attend(queries, keys, values, step.lists, step.attended, layer.scaling)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def on_extend(self, forward_batch: Any) -> None:
        """After a prefill: keep the bounds of its pages. Does nothing but for `quest`."""
        if self.selection.mode == "quest" and forward_batch.extend_prefix_lens is not None:
            self.selection.on_prefill(
                forward_batch.req_pool_indices,
                forward_batch.extend_prefix_lens,
                forward_batch.seq_lens,
                max(forward_batch.extend_seq_lens_cpu),
            )

    def _prepare_step(self, forward_batch: Any) -> None:
        # Captured steps share a memory pool: what the one before holds must go first.
        self._step = self._schedule = self._query_starts = None
        if forward_batch.batch_size > 0 and forward_batch.forward_mode.is_decode():
            size = forward_batch.batch_size
            self._step = self.selection.prepare_step(
                forward_batch.req_pool_indices[:size], forward_batch.seq_lens[:size]
            )

    def _flash_attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, layer: Any, step: Step
    ) -> Tensor:
        """FlashAttention-3 as flashattention_backend.py calls it, over the lists of the step."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

        units = step.attended.shape[0]
        heads = self.selection.heads
        query_heads, kv_heads = queries.shape[1] // heads, keys.shape[1] // heads
        if self._query_starts is None:
            self._query_starts = torch.arange(
                0, units + 1, dtype=torch.int32, device=queries.device
            )
            # Once a step: every layer's lists are as long.
            self._schedule = get_scheduler_metadata(
                batch_size=units,
                max_seqlen_q=1,
                max_seqlen_k=step.lists.shape[-1],
                num_heads=query_heads,
                num_heads_k=kv_heads,
                headdim=queries.shape[-1],
                cache_seqlens=step.attended,
                qkv_dtype=queries.dtype,
                cu_seqlens_q=self._query_starts,
                page_size=1,
                causal=True,
                has_softcap=layer.logit_cap > 0,
            )
        return flash_attn_with_kvcache(
            q=queries.view(units, query_heads, -1),
            k_cache=keys.view(-1, 1, kv_heads, keys.shape[-1]),
            v_cache=values.view(-1, 1, kv_heads, values.shape[-1]),
            page_table=step.lists.view(units, -1),
            cache_seqlens=step.attended,
            cu_seqlens_q=self._query_starts,
            max_seqlen_q=1,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=(-1, -1),
            softcap=layer.logit_cap,
            scheduler_metadata=self._schedule,
            ver=3,
        )

"""The decode attention backend: SGLang's own kernels over the working-set table."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_ext.inference_rank import InferenceRank, StepPlan


class CacheRankAttnBackend(AttentionBackend):
    """Two instances of the inner backend: one over SGLang's table, one over the working-set table.

    The first serves the dense layers, and every layer of a batch that no step plan belongs to
    (warm-up runs). The second serves all other layers; for a dense request its rows are the true
    ones.
    """

    def __init__(self, runner: Any, rank: InferenceRank) -> None:
        super().__init__()
        build = ATTENTION_BACKENDS[rank.inner_backend]
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.needs_cpu_seq_lens = True
        self._rank = rank
        self._dense = build(runner)
        self._sparse = build(_RunnerOverTable(runner, rank.table.table))
        self._plan: StepPlan | None = None
        self._sparse_view: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._plan = self._rank.plan
        self._dense.init_forward_metadata(forward_batch)
        if self._plan is not None:
            view = copy.copy(forward_batch)
            lengths = torch.tensor(self._plan.attended_lengths)
            view.seq_lens = lengths.to(forward_batch.seq_lens)
            view.seq_lens_cpu = lengths
            view.seq_lens_sum = sum(self._plan.attended_lengths)
            self._sparse_view = view
            self._sparse.init_forward_metadata(view)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        rank, plan = self._rank, self._plan
        sparse_layer = layer.layer_id - rank.dense_layers
        if plan is None or sparse_layer < 0:
            return self._dense.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        if k is None or v is None:
            raise NotImplementedError(
                "the model writes K and V in a fused kernel, which hides them from the cache rank"
            )
        group, layer_in_group = divmod(sparse_layer, rank.config.layers_per_group)
        if layer_in_group == 0:
            rank.begin_group(group)
        rank.stage(
            layer_in_group,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )
        if plan.attends_to_everything:
            inner, view = self._dense, forward_batch
        else:
            inner, view = self._sparse, self._sparse_view
        output = inner.forward_decode(q, k, v, layer, view, save_kv_cache, **kwargs)
        if layer_in_group == len(rank.config.groups[group]) - 1:
            rank.end_group(group)
        return output

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._dense.forward_extend(*args, **kwargs)

    def support_triton(self) -> bool:
        return bool(self._dense.support_triton())

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return int(self._dense.get_cuda_graph_seq_len_fill_value())


class _RunnerOverTable:
    """SGLang's model runner, seen by a backend that reads `req_to_token` from another table."""

    def __init__(self, runner: Any, table: torch.Tensor) -> None:
        self._runner = runner
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=table, size=runner.req_to_token_pool.size
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

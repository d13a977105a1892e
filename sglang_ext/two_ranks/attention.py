"""The decode attention backend: SGLang's own kernels over the working-set table."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from sglang_ext import compat
from sglang_ext.dense_kernels import AroundDenseKernels
from sglang_ext.two_ranks.inference_rank import InferenceRank
from sglang_ext.two_ranks.step_plan import StepPlan


class CacheRankAttnBackend(AroundDenseKernels):
    """Two instances of the inner backend: one over SGLang's table, one over the working-set table.

    The first serves the dense layers. The second serves all others; for a dense request its rows
    are the true ones. On a CPU the first also serves every layer of a batch that no step plan
    belongs to (warm-up runs); on a GPU, where the forward pass is a captured graph, the second
    always does.
    """

    def __init__(self, runner: Any, rank: InferenceRank) -> None:
        kernels = rank.args.attention_backend
        super().__init__(runner, kernels)
        self.needs_cpu_seq_lens = True
        self._rank = rank
        self._on_gpu = rank.device.type == "cuda"
        self._sparse = ATTENTION_BACKENDS[kernels](_RunnerOverTable(runner, rank.table.table))
        self._plan: StepPlan | None = None
        self._sparse_view: Any = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self._rank.args.dense_layers:  # some backends take memory of every context's length
            self._dense.init_cuda_graph_state(max_bs, max_num_tokens)
        self._sparse.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare for a captured forward pass, or for the capture of one."""
        self._plan = self._rank.decode_step.running
        if self._rank.args.dense_layers:
            self._dense.init_forward_metadata_out_graph(forward_batch, in_capture)
        self._sparse.init_forward_metadata_out_graph(self._view(forward_batch), in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_decode():
            self._rank.gate.begin_forward()
        if self._rank.args.dense_layers:
            self._dense.init_forward_metadata_in_graph(forward_batch)
        self._sparse.init_forward_metadata_in_graph(self._view(forward_batch))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare for a forward pass that is not captured."""
        self._plan = self._rank.decode_step.running
        if forward_batch.forward_mode.is_decode():
            self._rank.gate.begin_forward()
        if self._rank.args.dense_layers or not self._on_gpu:
            self._dense.init_forward_metadata(forward_batch)
        if self._on_gpu or self._plan is not None:
            self._sparse_view = self._view(forward_batch)
            self._sparse.init_forward_metadata(self._sparse_view)

    def _view(self, forward_batch: Any) -> Any:
        """Return the batch as layers over the working-set table see it, with shorter lengths."""
        if self._plan is None:
            return forward_batch
        view = copy.copy(forward_batch)
        lengths, on_device = self._plan.attended_lengths, self._plan.lengths
        batch = forward_batch.batch_size
        view.seq_lens_cpu = torch.tensor(lengths + [1] * (batch - len(lengths)))
        seq_lens = view.seq_lens_cpu if on_device is None else on_device[:batch]
        view.seq_lens = seq_lens.to(forward_batch.seq_lens.dtype)
        view.seq_lens_sum = sum(lengths)
        return view

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
        sparse_layer = layer.layer_id - rank.args.dense_layers
        if sparse_layer < 0 or (plan is None and not self._on_gpu):
            return self._dense.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        if k is None or v is None:
            raise NotImplementedError(
                "the model writes K and V in a fused kernel, which hides them from the cache rank"
            )
        group, layer_in_group = divmod(sparse_layer, rank.config.layers_per_group)
        if layer_in_group == 0:
            rank.gate.enter_group(group)
        rank.gate.stage(
            group,
            layer_in_group,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )
        view = forward_batch if self._on_gpu else self._sparse_view
        output = self._sparse.forward_decode(q, k, v, layer, view, save_kv_cache, **kwargs)
        if layer_in_group == len(rank.config.groups[group]) - 1:
            rank.gate.leave_group(group)
        return output


class _RunnerOverTable:
    """SGLang's model runner, seen by a backend that reads `req_to_token` from another table."""

    def __init__(self, runner: Any, table: torch.Tensor) -> None:
        self._runner = runner
        self.kv_index_translator = compat.translator_over(runner, table)
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=table, size=runner.req_to_token_pool.size
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

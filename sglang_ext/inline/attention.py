"""The attention backend: prefill and dense layers by SGLang's kernels, sparse decode by ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_ext import compat
from sglang_ext.inline.selection import Selection
from sglang_ext.server_args import CacheRankServerArgs


class Branch:
    """A second stream of a GPU; in a captured graph, a branch beside other kernels."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream() if torch.device(device).type == "cuda" else None

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Have what is called inside run beside what is called after it, until `join`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Wait for what has been forked."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class InlineAttnBackend(AttentionBackend):
    """Sketches the keys of every forward pass, and selects in decode steps."""

    def __init__(self, runner: Any, args: CacheRankServerArgs, selection: Selection) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._dense_layers = args.dense_layers
        self._dense = ATTENTION_BACKENDS[args.attention_backend](runner)
        self.needs_cpu_seq_lens = self._dense.needs_cpu_seq_lens
        self._selection = selection
        self._branch = Branch(runner.device)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._begin_step(forward_batch)
        if self._dense_layers or not forward_batch.forward_mode.is_decode_or_idle():
            self._dense.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if self._dense_layers or not forward_batch.forward_mode.is_decode_or_idle():
            self._dense.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self._begin_step(forward_batch)
        if self._dense_layers or not forward_batch.forward_mode.is_decode_or_idle():
            self._dense.init_forward_metadata_in_graph(forward_batch)

    def _begin_step(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_decode_or_idle():
            self._selection.begin_step(forward_batch.seq_lens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._dense.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return int(self._dense.get_cuda_graph_seq_len_fill_value())

    def support_triton(self) -> bool:
        return bool(self._dense.support_triton())

    def shared_read_ends(self, forward_mode: Any) -> Any:
        return compat.reads_until_the_stream_is_done()

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Tensor:
        index = layer.layer_id - self._dense_layers
        if index >= 0:
            keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            self._selection.encode(index, keys, forward_batch.out_cache_loc)
            if self._selection.moments is not None:
                queries = q.view(len(keys), -1, layer.qk_head_dim)
                self._selection.moments[index].add(queries, keys)
        return self._dense.forward_extend(q, k, v, layer, forward_batch, *args, **kw)

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
        index = layer.layer_id - self._dense_layers
        if index < 0:
            return self._dense.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        rows = forward_batch.out_cache_loc
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        step = forward_batch.req_pool_indices, forward_batch.seq_lens, layer.scaling
        with self._branch.fork():
            # Sketches come first: the pool may scale keys in place.
            keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            self._selection.encode(index, keys, rows)
            if save_kv_cache:
                self.token_to_kv_pool.set_kv_buffer(
                    layer, KVWriteLoc(rows, None), k, v, layer.k_scale, layer.v_scale
                )
        picked = self._selection.select(index, queries, *step)
        self._branch.join()
        all_keys, all_values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        factors = _pool_scales(layer, all_keys)
        output = self._selection.attend(queries, all_keys, all_values, picked, *step, *factors)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _pool_scales(layer: Any, keys: Tensor) -> tuple[float, float]:
    """What the keys and values of an FP8 pool were divided by; no other pool divides them."""
    if keys.element_size() > 1 or layer.k_scale is None:
        return 1.0, 1.0
    return layer.k_scale_float, layer.v_scale_float

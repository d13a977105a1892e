"""The attention backend: prefill and dense layers by SGLang's kernels, sparse decode by ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_ext.dense_kernels import AroundDenseKernels
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


class InlineAttnBackend(AroundDenseKernels):
    """Sketches the keys of every forward pass, and selects in decode steps."""

    def __init__(self, runner: Any, args: CacheRankServerArgs, selection: Selection) -> None:
        super().__init__(runner, args.attention_backend)
        self._dense_layers = args.dense_layers
        self.needs_cpu_seq_lens |= args.has_drafts  # rounds are planned by them
        # In sparse steps, whose graphs must not share buffers with those of dense steps.
        make = ATTENTION_BACKENDS[args.attention_backend]
        self._for_dense_layers = make(runner) if args.dense_layers else None
        self._selection = selection
        self._branch = Branch(runner.device)

    def _selects(self, forward_batch: Any) -> bool:
        """Whether a forward pass is a decode step that may have a sparse request."""
        is_decode = bool(forward_batch.forward_mode.is_decode_or_idle())
        return is_decode and self._selection.step_is_sparse

    def _planned(self, forward_batch: Any) -> Any:
        """The backend of SGLang's that a forward pass needs, or None."""
        return self._for_dense_layers if self._selects(forward_batch) else self._dense

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._begin_step(forward_batch)
        if (backend := self._planned(forward_batch)) is not None:
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if (backend := self._planned(forward_batch)) is not None:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self._begin_step(forward_batch)
        if (backend := self._planned(forward_batch)) is not None:
            backend.init_forward_metadata_in_graph(forward_batch)

    def _begin_step(self, forward_batch: Any) -> None:
        if self._selects(forward_batch):
            self._selection.begin_step(forward_batch.seq_lens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in filter(None, (self._dense, self._for_dense_layers)):
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Tensor:
        index = layer.layer_id - self._dense_layers
        if index >= 0:
            keys = self._encode(k, layer, forward_batch)
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
        is_dense_layer = layer.layer_id < self._dense_layers
        if self._selection.step_is_sparse and not is_dense_layer:
            return self._decode_sparse(q, k, v, layer, forward_batch, save_kv_cache)
        forward = self._planned(forward_batch).forward_decode
        step = q, k, v, layer, forward_batch, save_kv_cache
        if is_dense_layer:
            return forward(*step, **kwargs)
        if layer.k_scale is not None:  # the pool may scale keys in place
            self._encode(k, layer, forward_batch)
            return forward(*step, **kwargs)
        with self._branch.fork():
            self._encode(k, layer, forward_batch)
        output = forward(*step, **kwargs)
        self._branch.join()
        return output

    def _decode_sparse(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> Tensor:
        """Attend to what is selected of sparse requests, and to all tokens of others."""
        index = layer.layer_id - self._dense_layers
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        step = forward_batch.req_pool_indices, forward_batch.seq_lens, layer.scaling
        with self._branch.fork():
            # Sketches come first: the pool may scale keys in place.
            self._encode(k, layer, forward_batch)
            if save_kv_cache:
                rows = KVWriteLoc(forward_batch.out_cache_loc, None)
                self.token_to_kv_pool.set_kv_buffer(layer, rows, k, v, layer.k_scale, layer.v_scale)
        picked = self._selection.select(index, queries, *step)
        self._branch.join()
        all_keys, all_values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        factors = _pool_scales(layer, all_keys)
        output = self._selection.attend(queries, all_keys, all_values, picked, *step, *factors)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _encode(self, k: Tensor, layer: Any, forward_batch: Any) -> Tensor:
        """Write the sketches of new keys; returns the keys by heads."""
        keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        index = layer.layer_id - self._dense_layers
        self._selection.encode(index, keys, forward_batch.out_cache_loc)
        return keys


def _pool_scales(layer: Any, keys: Tensor) -> tuple[float, float]:
    """What the keys and values of an FP8 pool were divided by; no other pool divides them."""
    if keys.element_size() > 1 or layer.k_scale is None:
        return 1.0, 1.0
    return layer.k_scale_float, layer.v_scale_float

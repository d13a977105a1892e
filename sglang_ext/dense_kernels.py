"""What attention backends share that leave prefill and dense layers to SGLang's own kernels."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from sglang_ext import compat


class AroundDenseKernels(AttentionBackend):
    """Has a backend of SGLang's, and passes on what does not concern selection."""

    def __init__(self, runner: Any, kernels: str) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._dense = ATTENTION_BACKENDS[kernels](runner)
        self.needs_cpu_seq_lens = self._dense.needs_cpu_seq_lens

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return int(self._dense.get_cuda_graph_seq_len_fill_value())

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._dense.forward_extend(*args, **kwargs)

    def shared_read_ends(self, forward_mode: Any) -> Any:
        return compat.reads_until_the_stream_is_done()

"""The forward passes of a round: decode steps over selected tokens, or all, and verifications."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from sglang_ext.own_batches import Lengths, as_extend, batch_of, decode_batch


def verify_input(tokens: Tensor | None, positions: Tensor | None, width: int) -> Any:
    """What SGLang's attention reads of a verification of `width` tokens a request, in a row."""
    return DFlashVerifyInput(
        draft_token=tokens,
        positions=positions,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


class Forwards:
    """Runs the model of a scheduler process."""

    def __init__(self, runner: Any, width: int) -> None:
        self.width = width
        self._runner = runner
        self._verify_graphs: Any = None
        self._decode_graphs: Any = None

    def capture(self, backend: Any) -> None:
        """Capture decode steps beside the verifications that SGLang has captured, on a GPU.

        Args:
            backend: of attention, whose buffers belong to these graphs.
        """
        self._verify_graphs = self._runner.decode_cuda_graph_runner
        if not hasattr(self._verify_graphs, "captured_req_width"):
            self._decode_graphs = self._verify_graphs  # there are no graphs
            return
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        algorithm = self._runner.spec_algorithm
        self._runner.spec_algorithm = SpeculativeAlgorithm.NONE
        try:
            self._decode_graphs = DecodeCudaGraphRunner(self._runner, attn_backend=backend)
        finally:
            self._runner.spec_algorithm = algorithm

    def as_decode(self) -> AbstractContextManager[None]:
        """Have the model's runner take decode steps for what they are without drafts."""
        return self._with_graphs(self._decode_graphs)

    @contextlib.contextmanager
    def _with_graphs(self, graphs: Any) -> Iterator[None]:
        before = self._runner.decode_cuda_graph_runner
        self._runner.decode_cuda_graph_runner = graphs
        try:
            yield
        finally:
            self._runner.decode_cuda_graph_runner = before

    def decode(self, tokens: Tensor, slots: Tensor, lengths: Lengths, rows: Tensor) -> Any:
        """Run a decode step; see `decode_batch`. Its logits are (B, vocabulary)."""
        with self.as_decode():
            return self._runner.forward(decode_batch(self._runner, tokens, slots, lengths, rows))

    def verify(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        lengths: Lengths,
        rows: Tensor,
        in_graph: bool = True,
    ) -> Any:
        """Run all tokens of a round through the model, each attending to all before it.

        Args:
            tokens, positions, rows: (B, width), the current token of a request first.
            slots: (B,) request slots.
            lengths: of the requests without these tokens.
            in_graph: whether it may be replayed; else it runs with what the runner has in place.

        Returns:
            SGLang's output; its logits are (B * width, vocabulary).
        """
        batch = batch_of(
            self._runner,
            ForwardMode.TARGET_VERIFY,
            tokens.flatten(),
            positions.flatten(),
            slots,
            lengths,
            rows.flatten(),
        )
        batch.spec_info = verify_input(batch.input_ids, batch.positions, self.width)
        batch.spec_algorithm = self._runner.spec_algorithm
        if torch.device(self._runner.device).type == "cpu":  # it verifies as it prefills
            as_extend(batch, lengths, self.width)
        runner = self._runner
        graphs = self._verify_graphs if in_graph else runner.decode_cuda_graph_runner
        with self._with_graphs(graphs):
            return runner.forward(batch)

"""The cache rank attends for requests whose tokens have left SGLang's pool.

With `--inference-kv working-set` and drafts, a sparse request is verified so in each of its rounds.
In each layer that the cache rank holds

    queries of the round's tokens go up; the cache rank attends to the tokens before them, all of
    which it holds, and sends back outputs and log-sum-exps
    meanwhile they attend to each other here, causally, and other requests to all of theirs by
    SGLang's kernels
    both parts are merged by their log-sum-exps

What comes of it is exact up to the codes held. A round without drafts, where a request of the batch
has a penalty or a grammar say, is the same with one token: SGLang's decode step with this
attention. It is not captured in a CUDA graph; no host waits for a layer between GPUs.

SGLang's table names rows of a sparse request that there are in dense layers only. So in other
layers its kernels see a request of no tokens before these, on the slot that pads batches, whose row
names the pool's padding. What they make of it is written over.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from torch import Tensor

from cache_rank.channels.control import ControlError
from cache_rank.channels.transport import Pending, TransportError
from cache_rank.copies import upload
from cache_rank.kernels.attention import attend_to, merge
from cache_rank.protocol import AttendedMessage, Row
from sglang_ext.dense_kernels import AroundDenseKernels
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.two_ranks.exchange.base import Exchange
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError
from sglang_ext.two_ranks.recovery import CacheRankClient
from sglang_ext.two_ranks.step_plan import AttendedRound

Result = TypeVar("Result")

_PADDING_SLOT = 0
"""SGLang's table has zeros for it, and the pool's row 0 is padding."""


class VerifyingBackend(AroundDenseKernels):
    """The attention of a forward pass in which the cache rank attends for some requests.

    Attributes:
        is_running: whether such a forward pass is being run.
    """

    def __init__(
        self, runner: Any, args: CacheRankServerArgs, scale: float, cache_rank: CacheRankClient
    ) -> None:
        super().__init__(runner, args.attention_backend)
        self.needs_cpu_seq_lens = self.is_running = True
        make = ATTENTION_BACKENDS[args.attention_backend]
        self._for_dense_layers = make(runner) if args.dense_layers else None
        self._dense_layers = args.dense_layers
        self._scale = scale
        self._runner = runner
        self._cache_rank = cache_rank
        self._view: Any = None
        self.is_running = False

    def run(self, of_round: AttendedRound, width: int, forward: Callable[[], Result]) -> Result:
        """Run a forward pass of `width` tokens of each request, eagerly.

        A cache rank that is lost meanwhile is let go of; see `AttendedRound.stale_requests`.
        """
        device = torch.device(self._runner.device)
        index = torch.tensor([index for index, _ in of_round.rows])
        held = torch.tensor(of_round.positions)
        self._index, self._held = upload((index, held), device)
        self._host_index, self._host_held = index, held
        self._width = width
        self._begin(of_round)
        with self._in_place():
            result = forward()
        self._cache_rank.call(self._end)
        return result

    def _begin(self, of_round: AttendedRound) -> None:
        """Tell the cache rank, unless it has been lost since the round began."""
        self._failure: Exception | None = None
        self._exchange = self._cache_rank.exchange
        if self._exchange is not of_round.exchange:
            self._exchange = None
        pairs = zip(of_round.rows, of_round.positions, strict=True)
        rows = [Row(sequence.sequence_id, position) for (_, sequence), position in pairs]
        self._while_up(lambda exchange: exchange.begin_attending(rows, self._width))

    def _end(self, exchange: Exchange) -> None:
        if self._failure is not None:
            raise self._failure
        if self._exchange is exchange:
            exchange.end_attending()

    def _while_up(self, action: Callable[[Exchange], Any]) -> Any:
        """Do something with the cache rank, or leave out what would come of it."""
        if self._exchange is None:
            return None
        try:
            return action(self._exchange)
        except (TransportError, ControlError, CacheRankDownError) as error:
            self._failure, self._exchange = error, None
            return None

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Be the backend of the model's runner, which then replays no graph."""
        runner = self._runner
        before = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self, None
        self.is_running = True
        try:
            yield
        finally:
            self.is_running, self._view = False, None
            runner.attn_backend, runner.decode_cuda_graph_runner = before

    # In the forward pass.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if self._for_dense_layers is not None:
            self._for_dense_layers.init_forward_metadata(forward_batch)
        self._view = self._without_held_tokens(forward_batch)
        self._dense.init_forward_metadata(self._view)

    def _without_held_tokens(self, forward_batch: Any) -> Any:
        """Return the batch as SGLang's kernels see it in layers that the cache rank holds."""
        view = copy.copy(forward_batch)
        index, held = self._index, self._held
        view.req_pool_indices = forward_batch.req_pool_indices.index_fill(0, index, _PADDING_SLOT)
        view.seq_lens = _less(forward_batch.seq_lens, index, held)
        view.seq_lens_cpu = _less(forward_batch.seq_lens_cpu, self._host_index, self._host_held)
        view.seq_lens_sum = int(view.seq_lens_cpu.sum())
        if forward_batch.extend_prefix_lens is not None:  # verified as a prefill
            view.extend_prefix_lens = _less(forward_batch.extend_prefix_lens, index, held)
            view.extend_prefix_lens_cpu = view.extend_prefix_lens.tolist()
        return view

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward("forward_extend", *args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward("forward_decode", *args, **kwargs)

    def _forward(
        self,
        kind: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        if layer.layer_id < self._dense_layers:
            forward = getattr(self._for_dense_layers, kind)
            return forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if k is None or v is None:
            raise NotImplementedError(
                "the model writes K and V in a fused kernel, which hides them from a verification"
            )
        queries = self._of_attended(q, layer.tp_q_head_num)
        answer = self._while_up(lambda exchange: exchange.attend(queries))
        keys, values = (self._of_attended(part, layer.tp_k_head_num) for part in (k, v))
        merged = self._attend_to_each_other(queries, keys, values)
        output = getattr(self._dense, kind)(q, k, v, layer, self._view, save_kv_cache, **kwargs)
        if answer is not None:
            merged = self._while_up(lambda exchange: _with(answer, merged, exchange)) or merged
        by_request = output.view(-1, self._width, *queries.shape[2:])
        by_request.index_copy_(0, self._index, merged[0].to(output.dtype))
        return output

    def _of_attended(self, tensor: Tensor, heads: int) -> Tensor:
        """What sparse requests have of (tokens, heads * D): (R, width, heads, D), contiguous."""
        return tensor.view(-1, self._width, heads, tensor.numel() // (len(tensor) * heads))[
            self._index
        ]

    def _attend_to_each_other(
        self, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        width = self._width
        is_seen = torch.ones((1, width, width), dtype=torch.bool, device=queries.device).tril()
        return attend_to(
            queries, keys.transpose(1, 2), values.transpose(1, 2), is_seen, self._scale
        )


def _less(lengths: Tensor, index: Tensor, held: Tensor) -> Tensor:
    """Lengths without the tokens that some rows have elsewhere."""
    return lengths.index_add(0, index, held.to(lengths.dtype), alpha=-1)


def _with(
    answer: tuple[AttendedMessage, Pending], own: tuple[Tensor, Tensor], exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """Merge what the cache rank has attended to, when it has come, with what is attended to here."""
    message, received = answer
    received.wait(exchange.connection.timeout)
    return merge((message.outputs.float(), message.log_sums), own)

"""The cache rank attends for requests whose tokens have left SGLang's pool.

With `--inference-kv working-set` and drafts, a sparse request is verified so in each of its rounds.
In each layer that the cache rank holds

    queries of the round's tokens go up; the cache rank attends to the tokens before them, all of
    which it holds, and sends back outputs and log-sum-exps
    meanwhile other requests, if there are any, attend to all of theirs by SGLang's kernels
    the tokens of a round attend to each other here, causally, and both parts are merged by their
    log-sum-exps

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
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from cache_rank.channels.control import ControlError
from cache_rank.channels.transport import Pending, TransportError
from cache_rank.config import ModelShape
from cache_rank.copies import upload
from cache_rank.kernels.newest import attend_to_each_other
from cache_rank.protocol import AttendedMessage, Row
from sglang_ext.dense_kernels import AroundDenseKernels
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.two_ranks.exchange.base import Exchange
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError
from sglang_ext.two_ranks.recovery import CacheRankClient
from sglang_ext.two_ranks.step_plan import AttendedRound

Result = TypeVar("Result")
Answer = TypeVar("Answer")

_PADDING_SLOT = 0
"""SGLang's table has zeros for it, and the pool's row 0 is padding."""


@dataclasses.dataclass(slots=True)
class _Pass:
    """One forward pass, in which R requests are attended to on the cache rank.

    Attributes:
        width: tokens of each request.
        index: (R,) int64, their rows of the batch.
        held: (R,) int64, how many tokens of each the cache rank holds.
        on_host: the same two.
        exchange: None once there is no cache rank.
        failure: what ended it in this pass.
        view: the batch, as SGLang's kernels see it in layers that the cache rank holds; None where
            all requests are attended to there.
    """

    width: int
    index: Tensor
    held: Tensor
    on_host: tuple[Tensor, Tensor]
    exchange: Exchange | None
    failure: Exception | None = None
    view: Any = None

    def while_up(self, action: Callable[[Exchange], Answer]) -> Answer | None:
        """Do something with the cache rank; None where it is lost."""
        if self.exchange is None:
            return None
        try:
            return action(self.exchange)
        except (TransportError, ControlError, CacheRankDownError) as error:
            self.failure, self.exchange = error, None
            return None

    def by_request(self, tensor: Tensor, heads: int) -> Tensor:
        """A view of (tokens, heads * D): (batch, width, heads, D)."""
        return tensor.view(-1, self.width, heads, tensor[0].numel() // heads)

    def without_held_tokens(self, forward_batch: Any) -> Any:
        """The batch without what these requests have elsewhere, so that no row of it is read."""
        view = copy.copy(forward_batch)
        index, held = self.index, self.held
        view.req_pool_indices = forward_batch.req_pool_indices.index_fill(0, index, _PADDING_SLOT)
        view.seq_lens = _less(forward_batch.seq_lens, index, held)
        view.seq_lens_cpu = _less(forward_batch.seq_lens_cpu, *self.on_host)
        view.seq_lens_sum = int(view.seq_lens_cpu.sum())
        if forward_batch.extend_prefix_lens is not None:  # on CPUs, which verify as they prefill
            view.extend_prefix_lens = _less(forward_batch.extend_prefix_lens, index, held)
            view.extend_prefix_lens_cpu = view.extend_prefix_lens.tolist()
        return view


class VerifyingBackend(AroundDenseKernels):
    """The attention of a forward pass in which the cache rank attends for some requests."""

    def __init__(
        self, runner: Any, args: CacheRankServerArgs, model: ModelShape, cache_rank: CacheRankClient
    ) -> None:
        super().__init__(runner, args.attention_backend)
        self.needs_cpu_seq_lens = True
        make = ATTENTION_BACKENDS[args.attention_backend]
        self._for_dense_layers = make(runner) if args.dense_layers else None
        self._dense_layers = args.dense_layers
        self._scale = model.scale
        self._runner = runner
        self._cache_rank = cache_rank
        self._pass: _Pass | None = None
        self._warm_up(model)

    def _warm_up(self, model: ModelShape) -> None:
        """Run the kernel of a round once, so that no request waits for it to compile."""
        make = functools.partial(torch.zeros, dtype=model.torch_dtype, device=self._runner.device)
        queries = make((1, 1, model.query_heads, model.head_dim))
        keys, values = make((2, 1, 1, model.kv_heads, model.head_dim))
        row = torch.zeros(1, dtype=torch.int64, device=queries.device)
        older, out = (queries, queries[..., 0].float()), torch.empty_like(queries)
        attend_to_each_other(queries, keys, values, row, self._scale, older, out)

    @property
    def is_running(self) -> bool:
        """Whether such a forward pass is being run."""
        return self._pass is not None

    def run(self, of_round: AttendedRound, width: int, forward: Callable[[], Result]) -> Result:
        """Run a forward pass of `width` tokens of each request, eagerly.

        A cache rank that is lost meanwhile is let go of; see `AttendedRound.stale_requests`.
        """
        rows_of_batch = torch.tensor([index for index, _ in of_round.rows])
        on_host = rows_of_batch, torch.tensor(of_round.positions)
        index, held = upload(on_host, torch.device(self._runner.device))
        exchange = self._cache_rank.exchange
        if exchange is not of_round.exchange:  # it has been lost since the round began
            exchange = None
        this = _Pass(width, index, held, on_host, exchange)
        pairs = zip(of_round.rows, of_round.positions, strict=True)
        rows = [Row(sequence.sequence_id, position) for (_, sequence), position in pairs]
        this.while_up(lambda exchange: exchange.begin_attending(rows, width))
        with self._in_place(this):
            result = forward()
        this.while_up(lambda exchange: exchange.end_attending())
        if this.failure is not None:
            self._cache_rank.lose(this.failure)
        return result

    @contextlib.contextmanager
    def _in_place(self, this: _Pass) -> Iterator[None]:
        """Be the backend of the model's runner, which then replays no graph."""
        runner = self._runner
        before = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self, None
        self._pass = this
        try:
            yield
        finally:
            self._pass = None
            runner.attn_backend, runner.decode_cuda_graph_runner = before

    # In the forward pass.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        assert self._pass is not None
        if self._for_dense_layers is not None:
            self._for_dense_layers.init_forward_metadata(forward_batch)
        if len(self._pass.index) < forward_batch.batch_size:
            self._pass.view = self._pass.without_held_tokens(forward_batch)
            self._dense.init_forward_metadata(self._pass.view)

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
        this = self._pass
        assert this is not None
        if layer.layer_id < self._dense_layers:
            forward = getattr(self._for_dense_layers, kind)
            return forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if k is None or v is None:
            raise NotImplementedError(
                "the model writes K and V in a fused kernel, which hides them from a verification"
            )
        queries = this.by_request(q, layer.tp_q_head_num)
        keys, values = (this.by_request(part, layer.tp_k_head_num) for part in (k, v))
        if layer.k_scale is not None:  # the pool may scale what it is given in place
            k, v = k.clone(), v.clone()
        asked = queries[this.index]
        answer = this.while_up(lambda exchange: exchange.attend(asked))
        if this.view is None:
            output = torch.empty_like(q)
            if save_kv_cache:
                rows = KVWriteLoc(forward_batch.out_cache_loc, None)
                self.token_to_kv_pool.set_kv_buffer(layer, rows, k, v, layer.k_scale, layer.v_scale)
        else:
            output = getattr(self._dense, kind)(q, k, v, layer, this.view, save_kv_cache, **kwargs)
        older = None
        if answer is not None:
            older = this.while_up(lambda exchange: _received(answer, exchange))
        by_request = this.by_request(output, layer.tp_q_head_num)
        attend_to_each_other(queries, keys, values, this.index, self._scale, older, by_request)
        return output


def _less(lengths: Tensor, index: Tensor, held: Tensor) -> Tensor:
    """Lengths without the tokens that some rows have elsewhere."""
    return lengths.index_add(0, index, held.to(lengths.dtype), alpha=-1)


def _received(answer: tuple[AttendedMessage, Pending], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of the cache rank, for which the layer waits."""
    message, received = answer
    received.wait(exchange.connection.timeout)
    return message.outputs, message.log_sums

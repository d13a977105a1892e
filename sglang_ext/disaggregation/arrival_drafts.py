"""Requests draft while what refines their K and V is still coming, after Lynx (section 4.3).

Drafts attend to K and V that are read from the half of the codes that comes first. They are steps
of batches of their own, between those of SGLang, which knows nothing of them: so no client ever
sees a draft. When all K and V are there, one forward pass over the first token and all drafts,
which replaces what they have left in the pool, tells which of them stand. They are right up to the
first that differs.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from cache_rank.copies import Readback, upload
from sglang_ext import compat
from sglang_ext.disaggregation import first_token
from sglang_ext.drafts.acceptance import ForcedAcceptance, accepted
from sglang_ext.drafts.sampling import draw, seeds_of
from sglang_ext.flags import WIRE_DRAFTS
from sglang_ext.inline import starting
from sglang_ext.own_batches import Lengths, as_extend, batch_of, decode_batch
from sglang_ext.request_state import asks_to_stay_dense, prepare_requests

AT_ONCE = 4
"""So many requests draft at once. What has come first of each stays on the host meanwhile."""

_REPORTED = (
    "return_logprob",
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
)
"""What a response says of each token beside itself, and a verification does not."""


class Drafting:
    """The drafts of one request, which has a slot, and rows for its prompt.

    Attributes:
        tokens: the first token and the drafts, (1,) int64 each, where the model runs.
        rows: (n,) int64 pool rows for them; of which there are none before it begins.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.length = len(request.origin_input_ids)
        self.tokens: list[Tensor] = []
        self.rows: Tensor | None = None
        self.verified = Readback()
        self.is_being_verified = False

    @property
    def goes_on(self) -> bool:
        """Whether it may draft another token."""
        if self.rows is None or self.is_being_verified:
            return False
        return len(self.tokens) < len(self.rows)

    @property
    def next_row(self) -> Tensor:
        """The row of the last token, () int64, which has no K and V yet."""
        assert self.rows is not None
        return self.rows[len(self.tokens) - 1]

    @property
    def slot(self) -> int:
        return int(compat.pool_state(self.request).req_pool_idx)


class ArrivalDrafts:
    """The drafts of a scheduler's requests; all of this is called in its thread."""

    def __init__(self, scheduler: Any, most: int, sparse_from: int | None) -> None:
        """Begin.

        Args:
            most: drafts of a request.
            sparse_from: the length from which all steps are sparse of a request that does not ask
                for dense ones; None where there is none. What is verified are tokens of dense
                steps, so no request drafts so far.
        """
        self._scheduler, self._most, self._sparse_from = scheduler, most, sparse_from
        self._runner = scheduler.tp_worker.model_runner
        self._device = torch.device(self._runner.device)
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._under_way: list[Drafting] = []
        self._queued: deque[Any] = deque()  # events behind steps
        modules = self._runner.model.modules()
        (self._logits,) = (each for each in modules if isinstance(each, LogitsProcessor))
        self._forced = ForcedAcceptance()

    def reserve(self, request: Any) -> Drafting | None:
        """Let a request draft when it can be read, if it may; `drop` ends that."""
        if len(self._under_way) == AT_ONCE or not self._may_draft(request):
            return None
        self._under_way.append(Drafting(request))
        return self._under_way[-1]

    def _may_draft(self, request: Any) -> bool:
        params = request.sampling_params
        custom = params.custom_params
        if isinstance(custom, dict) and custom.get(WIRE_DRAFTS) is False:
            return False
        # A token must depend on nothing but those before it, and on the noise of its position.
        depends_on_more = (
            *(getattr(request, name, False) for name in _REPORTED),
            request.custom_logit_processor,
            request.lora_id,
            request.grammar,
            params.json_schema or params.regex or params.ebnf or params.structural_tag,
            params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1,
            params.min_new_tokens or params.min_p,
        )
        return not any(depends_on_more) and self._count(request) > 0

    def _count(self, request: Any) -> int:
        """How many drafts are of use beside the first token and the last that is verified."""
        others = request.sampling_params.max_new_tokens - 2
        if self._sparse_from is not None and not asks_to_stay_dense(request):
            others = min(others, self._sparse_from - len(request.origin_input_ids) - 2)
        return min(self._most, others)

    def begin(self, drafting: Drafting, token: int) -> None:
        """Draft from now on, as soon as there are rows; the prompt's K and V can be read."""
        if drafting.rows is not None:
            return
        rows = self._allocator.alloc(self._count(drafting.request) + 1)
        if rows is None:
            return
        places = slice(drafting.length, drafting.length + len(rows))
        self._scheduler.req_to_token_pool.write((drafting.slot, places), rows.to(torch.int32))
        with self._on_forward_stream():
            drafting.tokens = upload((torch.tensor([token]),), self._device)
        drafting.rows = rows.long()
        if rows.is_cuda:
            rows.record_stream(self._scheduler.forward_stream)

    def step(self) -> None:
        """Draft a token of each request that may go on, unless the GPU is two steps behind."""
        drafting = [each for each in self._under_way if each.goes_on]
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        if not drafting or len(self._queued) > 1:
            return
        lengths = [each.length + len(each.tokens) for each in drafting]
        told = torch.tensor([[each.slot for each in drafting], lengths], dtype=torch.int64)
        with self._on_forward_stream():
            slots, on_device = upload((told,), self._device)[0]
            tokens = torch.cat([each.tokens[-1] for each in drafting])
            rows = torch.stack([each.next_row for each in drafting])
            of_step = slots, Lengths(on_device, told[1]), rows
            output = self._forward(decode_batch(self._runner, tokens, *of_step))
            drawn = self._draw(drafting, output, on_device - 1)
            for each, token in zip(drafting, drawn.split(1), strict=True):
                each.tokens.append(token)
            if self._device.type == "cuda":
                self._queued.append(torch.cuda.Event())
                self._queued[-1].record()

    def is_verified(self, drafting: Drafting) -> bool:
        """Whether the host knows which drafts stand; K and V of the prompt are all there."""
        if drafting.rows is None or len(drafting.tokens) == 1:
            return True
        if not drafting.is_being_verified:
            drafting.is_being_verified = True
            self._verify(drafting, drafting.rows[: len(drafting.tokens)])
        return drafting.verified.value() is not None

    def _verify(self, drafting: Drafting, rows: Tensor) -> None:
        """Run a request's first token and drafts through the model."""
        told = torch.tensor([[drafting.slot], [drafting.length]], dtype=torch.int64)
        with self._on_forward_stream():
            slot, before = upload((told,), self._device)[0]
            lengths, tokens = Lengths(before, told[1]), torch.cat(drafting.tokens)
            positions = before + torch.arange(len(rows), device=self._device)
            of_pass = positions, slot, lengths.after(len(rows)), rows
            batch = batch_of(self._runner, ForwardMode.EXTEND, tokens, *of_pass)
            as_extend(batch, lengths, len(rows))
            with self._logits_of_all_tokens():
                output = self._forward(batch)
            drawn = self._draw([drafting], output, positions)
            drafting.verified.start(torch.stack((tokens, drawn)))

    def commit(self, drafting: Drafting) -> None:
        """Give a request, which has its first token, the verified ones behind it."""
        found = drafting.verified.value()
        if drafting.rows is None or found is None:
            return
        request, (read, drawn) = drafting.request, found
        made = len(read) - 1
        right = int(self._forced(accepted(read[None, 1:], drawn[None]), made))
        for token in drawn[: right + 1].tolist():
            if first_token.ends(request):
                break
            request.output_ids.append(token)
            self._scheduler.batch_result_processor._maybe_update_reasoning_tokens(request, token)
        held = len(request.output_ids) - 1
        compat.set_kv_length(request, drafting.length + held)
        drafting.rows = drafting.rows[held:]  # the others are the request's
        prepare_requests([request])
        statistics = request.cache_rank_statistics
        statistics.wire_drafts, statistics.wire_drafts_accepted = made, right

    def drop(self, drafting: Drafting) -> None:
        """Forget a request that has ended or joins a batch, and free what is left of its rows."""
        self._under_way.remove(drafting)
        if drafting.rows is not None:
            self._allocator.free(drafting.rows)

    def _forward(self, batch: ForwardBatch) -> Any:
        """Run a batch densely; the next step of SGLang says anew whether it selects."""
        if (rank := starting.current()) is not None:
            rank.selection.step_is_sparse = False
        return self._runner.forward(batch)

    def _draw(self, drafting: Sequence[Drafting], output: Any, positions: Tensor) -> Tensor:
        requests = [each.request for each in drafting]
        scheduler = self._scheduler
        batch = ScheduleBatch.init_new(
            requests,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
        vocabulary = scheduler.model_config.vocab_size
        sampling = SamplingBatchInfo.from_schedule_batch(batch, vocabulary)
        seeds = None if sampling.is_all_greedy else seeds_of(requests, batch.device)
        logits = output.logits_output.next_token_logits
        # SGLang's sampler of seeds would be compiled at its first call, while all requests wait.
        with torch.compiler.set_stance("force_eager"):
            return draw(logits, sampling, seeds, positions)

    @contextlib.contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        """Queue work behind the forward passes that have been launched."""
        if self._device.type != "cuda" or not self._scheduler.enable_overlap:
            yield
            return
        stream = self._scheduler.forward_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    @contextlib.contextmanager
    def _logits_of_all_tokens(self) -> Iterator[None]:
        """Have a prefill compute logits of all its tokens; SGLang's computes those of the last."""
        runner = self._runner
        hook = self._logits.register_forward_pre_hook(_as_decode, with_kwargs=True)
        graphs, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, None
        try:
            yield
        finally:
            hook.remove()
            runner.prefill_cuda_graph_runner = graphs


def _as_decode(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a logits processor, with a batch that decodes."""

    def decoding(argument: Any) -> Any:
        if not isinstance(argument, ForwardBatch):
            return argument
        batch = copy.copy(argument)
        batch.forward_mode = ForwardMode.DECODE
        return batch

    return tuple(map(decoding, args)), {name: decoding(each) for name, each in named.items()}

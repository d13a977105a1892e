"""A round of decoding, from top to bottom: draft, verify, accept.

    draft     so many decode steps over selected tokens, whose tokens are drawn with shared noise
    verify    the current token and all drafts, in one pass that attends to everything, in the KV
              pool or on a cache rank; it replaces what drafts have written to the pool
    accept    drafts are right up to the first that differs; there the verification's token stands

Drafts lie within the newest tokens, which are always attended to, and what is wrong of them is
written over by the next round. So nothing is ever taken back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from sglang_ext import compat, selecting
from sglang_ext.drafts.acceptance import ForcedAcceptance, accepted
from sglang_ext.drafts.forwards import Forwards
from sglang_ext.drafts.sampling import draw, seeds_of
from sglang_ext.own_batches import Lengths
from sglang_ext.reports import report
from sglang_ext.selecting import SelectingRank

Publish = Callable[[Tensor], None]

DENSE_STEPS = 4
"""Steps of a round without drafts. A request that ends within it has run in vain since then."""


@dataclasses.dataclass
class CurrentTokens(SpecInput):
    """What a round leaves to the next one: the last token of each request, (B,) int64.

    The other fields are SGLang's, which passes tokens on by request slots where steps overlap.
    """

    bonus_tokens: Tensor
    future_indices: Tensor | None = None
    topk_p: None = None
    topk_index: None = None
    hidden_states: None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)

    def filter_batch(self, new_indices: Tensor, *_: Any, **__: Any) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: CurrentTokens) -> None:
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


class DraftWorker(BaseSpecWorker):
    """Decodes for SGLang's scheduler, which calls it in the place of the model's own worker."""

    def __init__(self, server_args: Any, target_worker: Any, **_: Any) -> None:
        super().__init__()
        self._target_worker, self._draft_worker = target_worker, None
        self._args = server_args
        self._width = int(server_args.speculative_num_draft_tokens)
        self._forced = ForcedAcceptance()
        self._tp_group = get_parallel().tp_group
        self.forwards = Forwards(target_worker.model_runner, self._width)

    def init_cuda_graphs(self) -> None:
        rank = selecting.rank()
        assert rank is not None
        runner = self._target_worker.model_runner
        self.forwards.capture(rank.draft_backend(runner))
        self._tp_group.broadcast(torch.zeros(1, device=runner.device))  # the first connects

    def forward_batch_generation(
        self, batch: Any, on_publish: Publish | None = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Read prompts, or decode a round.

        The host waits for what is published, the lengths after this, before it prepares the next
        round. So they are published as soon as they are known.
        """
        publish = on_publish or _tell_nobody
        sampling = batch.sampling_info
        if not sampling.is_all_greedy and not sampling.need_min_p_sampling:
            # SGLang's own sampler has no seeds for min_p.
            sampling.sampling_seed = seeds_of(batch.reqs, batch.device)
        if not batch.forward_mode.is_decode():
            return self._read(batch, publish)
        rank = selecting.rank()
        assert rank is not None
        # The current token has no row yet: it is one more than SGLang's lengths say.
        lengths = Lengths(batch.seq_lens, batch.seq_lens_cpu)
        runs_ahead = _can_run_ahead(batch)
        drafts = 0
        if runs_ahead:
            drafts = rank.plan_drafts(batch.reqs, (lengths.host + 1).tolist())
        if drafts:
            return self._round(rank, batch, lengths, drafts, publish)
        if runs_ahead and not batch.return_logprob:
            return self._dense_round(rank, batch, lengths, publish)
        return self._decode(rank, batch, lengths, publish)

    def _read(self, batch: Any, publish: Publish) -> GenerationBatchResult:
        """Run a prefill, which samples first tokens."""
        publish(batch.seq_lens)
        result = self._target_worker.forward_batch_generation(batch)
        result.next_draft_input = CurrentTokens(result.next_token_ids)
        return result

    def _decode(
        self, rank: SelectingRank, batch: Any, lengths: Lengths, publish: Publish
    ) -> GenerationBatchResult:
        """Decode one token of each request as without drafts."""
        after = lengths.after(1)
        publish(after.device)
        batch.input_ids = batch.spec_info.bonus_tokens
        batch.out_cache_loc = self._places(batch, lengths, 1)[1].flatten()
        batch.seq_lens, batch.seq_lens_cpu = after.device, after.host
        batch.seq_lens_sum = int(after.host.sum())
        batch.spec_info = None
        with self.forwards.as_decode():
            result = self._target_worker.forward_batch_generation(batch)
        if batch.return_logprob:
            logprobs = result.logits_output.next_token_logprobs
            result.logits_output.next_token_logprobs = logprobs.view(-1, 1)
        ones = torch.ones_like(after.device, dtype=torch.int32)
        return self._finish(rank, result, result.next_token_ids, ones, lengths, 1)

    def _dense_round(
        self, rank: SelectingRank, batch: Any, lengths: Lengths, publish: Publish
    ) -> GenerationBatchResult:
        """Decode a few tokens of each request: less is left for the host to do for each."""
        steps = min(DENSE_STEPS, self._width)
        publish(lengths.after(steps).device)
        places = self._places(batch, lengths, steps)
        tokens, output = self._run_ahead(rank.run_dense, batch, lengths, *places, steps)
        counts = torch.full_like(lengths.device, steps, dtype=torch.int32)
        result = self._result(batch, output)
        return self._finish(rank, result, tokens[:, 1:].flatten(), counts, lengths, steps)

    def _round(
        self,
        rank: SelectingRank,
        batch: Any,
        lengths: Lengths,
        drafts: int,
        publish: Publish,
    ) -> GenerationBatchResult:
        positions, rows = self._places(batch, lengths, self._width)
        drafted, _ = self._run_ahead(rank.run_draft, batch, lengths, positions, rows, drafts)
        tokens = torch.zeros_like(positions)
        tokens[:, : drafts + 1] = drafted

        slots, sampling = batch.req_pool_indices, batch.sampling_info
        output = rank.run_verification(
            functools.partial(self.forwards.verify, tokens, positions, slots, lengths, rows)
        )
        logits = output.logits_output.next_token_logits
        verified = self._draw(logits, sampling, positions.flatten())
        right = accepted(drafted[:, 1:], verified.view(-1, self._width))
        counts = self._forced(right, drafts) + 1
        publish(lengths.device + counts)
        if batch.return_logprob:
            compat.add_spec_logprobs(batch, output.logits_output, verified, self._width)
        result = self._result(batch, output)
        result.cache_rank_drafts = drafts
        return self._finish(rank, result, verified, counts, lengths, self._width)

    def _run_ahead(
        self,
        run: Callable[..., Any],
        batch: Any,
        lengths: Lengths,
        positions: Tensor,
        rows: Tensor,
        steps: int,
    ) -> tuple[Tensor, Any]:
        """Run decode steps one after the other, by a method of SelectingRank.

        Returns:
            The current tokens and those that are drawn, (B, steps + 1), and the last step's output.
        """
        slots, sampling = batch.req_pool_indices, batch.sampling_info
        tokens = [batch.spec_info.bonus_tokens.long()]
        for step in range(steps):
            after = lengths.after(step + 1)
            of_step = tokens[-1], slots, after, rows[:, step]
            forward = functools.partial(self.forwards.decode, *of_step)
            output = run(batch.reqs, after.host.tolist(), forward)
            logits = output.logits_output.next_token_logits
            tokens.append(self._draw(logits, sampling, positions[:, step]))
        return torch.stack(tokens, dim=1), output

    def _draw(self, logits: Tensor, sampling: Any, positions: Tensor) -> Tensor:
        """Draw tokens, the same on all tensor-parallel ranks.

        Each may round sums of probabilities otherwise. So all take what the first has drawn.
        """
        drawn = draw(logits, sampling, sampling.sampling_seed, positions)
        if not sampling.is_all_greedy:
            self._tp_group.broadcast(drawn)
        return drawn

    def _result(self, batch: Any, output: Any) -> GenerationBatchResult:
        result = GenerationBatchResult(
            logits_output=output.logits_output, can_run_cuda_graph=output.can_run_graph
        )
        report(result, batch.reqs)
        return result

    def _finish(
        self,
        rank: SelectingRank,
        result: GenerationBatchResult,
        tokens: Tensor,
        counts: Tensor,
        lengths: Lengths,
        width: int,
    ) -> GenerationBatchResult:
        """Say which of (B * width,) tokens stand: the first ones of each request."""
        last = tokens.view(-1, width).gather(1, counts.long()[:, None] - 1)
        result.next_token_ids, result.accept_lens = tokens.to(torch.int32), counts
        result.new_seq_lens = lengths.device + counts
        result.speculative_num_draft_tokens = width
        result.next_draft_input = CurrentTokens(last.flatten().long())
        result.cache_rank_plan = rank.round
        return result

    def _places(self, batch: Any, lengths: Lengths, count: int) -> tuple[Tensor, Tensor]:
        """Positions and pool rows of the next tokens of requests, (B, count) int64 each."""
        table = batch.req_to_token_pool.req_to_token
        positions = lengths.device[:, None] + torch.arange(count, device=table.device)
        return positions, table[batch.req_pool_indices[:, None], positions].long()

    # SGLang loads weights into drafts' models too, in 0.5.16; here they are the model's.

    def update_weights_from_tensor(self, request: Any) -> Any:
        return self._target_worker.update_weights_from_tensor(request)

    def update_weights_from_disk(self, request: Any) -> tuple[bool, str]:
        return True, "drafts have no weights of their own"

    update_weights_from_ipc = update_weights_from_disk


def _tell_nobody(lengths: Tensor) -> None:
    """Publish where steps do not overlap."""


def _can_run_ahead(batch: Any) -> bool:
    """Whether all that a token's probabilities depend on is known before those before it are.

    Penalties and grammars depend on all tokens before; a batch with such a request decodes one
    token at a time. With a cache rank no request turns sparse in such a batch, so this one never
    does. One beside it that was sparse already is attended to by the cache rank if need be.
    """
    sampling = batch.sampling_info
    return not (
        batch.has_grammar
        or batch.return_hidden_states
        or sampling.has_custom_logit_processor
        or sampling.need_min_p_sampling
        or sampling.acc_additive_penalties is not None
        or sampling.acc_scaling_penalties is not None
    )

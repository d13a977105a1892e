"""What every request of a decode step does, decided on the host before the forward pass.

Of so few numbers a step, lists cost the host less than arrays and tensors do: every kind of tensor
operation is code that the forward pass has pushed out of the caches. What the device needs to know
goes there in one copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.copies import Field, StepNumbers
from cache_rank.operations import operations_for
from sglang_ext.exchange import ExchangedRows, WorkingSetRows
from sglang_ext.lifecycle import Lifecycle, Phase, SparseSequence, prepare_requests
from sglang_ext.metrics import CacheRankMetrics
from sglang_ext.model_runner import Pools, reserve_block_rows, reserve_rows
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.working_set import Reserve, WorkingSetTable

GRAPH_PADDING = 256
"""A captured graph may be for more rows than there are request slots."""

GATE_NUMBERS = 2
"""Step numbers that a gate plans."""


@dataclasses.dataclass(slots=True)
class StepPlan:
    """What one decode step does.

    Attributes:
        lengths: (max batch,) int64 on the device of the model, `attended_lengths` once they are
            uploaded, and 1 beyond the batch.
        attended_lengths: per batch row, tokens that layers over the working-set table attend to.
        sources, targets: per batch row, see WorkingSetTable.advance.
        rows: the exchanged requests.
        sparse: the sparse requests.
        shipping: requests whose prompt is being shipped, and their length.
        attends_to_everything: the cache rank failed during this step; what is left of it is dense.
    """

    lengths: Tensor
    attended_lengths: list[int] = dataclasses.field(default_factory=list)
    sources: list[int] = dataclasses.field(default_factory=list)
    targets: list[int] = dataclasses.field(default_factory=list)
    rows: ExchangedRows = dataclasses.field(default_factory=ExchangedRows)
    sparse: list[SparseSequence] = dataclasses.field(default_factory=list)
    shipping: list[tuple[SparseSequence, int]] = dataclasses.field(default_factory=list)
    attends_to_everything: bool = False


class StepPlanner:
    """Plans the decode steps of one inference rank.

    Attributes:
        lifecycle: the epochs, which move on as their steps are planned.
        table: the working-set table, which is brought up to date.
        working_sets: where its sparse rows point to.
        numbers: what the kernels of a step read on the device: `steps` of the gate, `exchanged` as
            ExchangedRows.of_batch, `lengths`, `sources` and `targets` as in StepPlan.
    """

    def __init__(
        self,
        args: CacheRankServerArgs,
        config: CacheRankConfig,
        pools: Pools,
        metrics: CacheRankMetrics,
    ) -> None:
        assert args.dense_layers is not None
        self.table = WorkingSetTable(pools.req_to_token, config)
        self.working_sets = WorkingSetRows(
            config, pools.keys[args.dense_layers :], pools.values[args.dense_layers :]
        )
        self.lifecycle = Lifecycle(
            config,
            Reserve(
                pools.keys[0].shape[0] - reserve_rows(args),
                reserve_block_rows(args),
                args.max_sparse_requests,
            ),
            args.sparse_threshold,
            pools.req_to_token.shape[1],
        )
        self._config = config
        self._threshold = args.sparse_threshold
        self._metrics = metrics
        self._req_to_token = pools.req_to_token
        device = pools.req_to_token.device
        self._operations = operations_for(device)
        batch_at_most = pools.req_to_token.shape[0]
        if device.type == "cuda":
            batch_at_most += GRAPH_PADDING
        # A captured graph may be for more rows than a step has.
        self.numbers = StepNumbers(
            device,
            steps=Field(GATE_NUMBERS, 0),
            exchanged=Field(batch_at_most, -1),
            lengths=Field(batch_at_most, 1),
            sources=Field(batch_at_most, 0),
            targets=Field(batch_at_most, 0),
        )

    def plan(self, requests: Sequence[Any], lengths: Sequence[int], is_up: bool) -> StepPlan:
        """Decide what every request of a decode step does.

        Args:
            requests: SGLang's Req objects, in batch order.
            lengths: of each, the current token included.
            is_up: whether there is a cache rank.
        """
        prepare_requests(requests)
        live, table, budget = self.lifecycle.live, self.table, self._config.sparse_budget
        plan = StepPlan(self.numbers["lengths"])
        for index, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            slot, position, is_sparse = request.req_pool_idx, length - 1, False
            sequence = live.get(slot) or self._begin(request, length, is_up)
            if sequence is not None:
                if is_up and sequence.phase is not Phase.SPARSE:
                    self._enter_step(sequence, position)
                is_sparse = sequence.phase is Phase.SPARSE
                filled = sequence.filled
                if is_sparse:
                    plan.sparse.append(sequence)
                    length = table.sparse_length(filled)
                elif sequence.phase is Phase.SHIPPING:
                    plan.shipping.append((sequence, length))
                if sequence.phase is not Phase.SHIPPING and not sequence.orphaned:
                    if filled != budget:  # which stays as it is
                        filled = self._config.filled_after(position, filled)
                    plan.rows.add(sequence, index, position, filled)
            plan.attended_lengths.append(length)
            source, target = table.plan_advance(slot, position, is_sparse)
            plan.sources.append(source)
            plan.targets.append(target)
        return plan

    def upload(self, plan: StepPlan, steps: tuple[int, int]) -> None:
        """Bring what the step's kernels read to the device, and the table up to date.

        Args:
            plan: of the step.
            steps: as the gate numbers it.
        """
        count = len(plan.attended_lengths)
        self.numbers.upload(
            steps=steps,
            exchanged=plan.rows.of_batch(count),
            lengths=plan.attended_lengths,
            sources=plan.sources,
            targets=plan.targets,
        )
        self.table.advance(
            self.numbers.first("sources", count), self.numbers.first("targets", count)
        )

    def _begin(self, request: Any, length: int, is_up: bool) -> SparseSequence | None:
        """Begin an epoch, unless the request is too short or there is a reason against it."""
        if is_up:
            reason = self.lifecycle.reason_to_stay_dense(request, length)
        else:
            reason = "down" if length >= self._threshold else ""
        if reason is None:
            return self.lifecycle.begin(request)
        if reason:
            self._metrics.on_dense(request, reason)
        return None

    def _enter_step(self, sequence: SparseSequence, position: int) -> None:
        """Move an epoch on; from where it turns sparse it attends to its working set."""
        if self.lifecycle.enter_step(sequence, position):
            self.table.enter(sequence.row, position, sequence.block)
            self._copy_sinks(sequence)

    def _copy_sinks(self, sequence: SparseSequence) -> None:
        """Copy a request's first tokens into its reserve block."""
        sinks = self._config.sink_tokens
        if sinks:
            source = self._req_to_token[sequence.row, :sinks].to(torch.int64)
            target = torch.arange(sequence.block, sequence.block + sinks, device=source.device)
            self._operations.copy_tokens(
                self.working_sets.keys, self.working_sets.values, source, target
            )

"""A real cache rank and a pool of true keys: what steps measure, and what is dropped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fake_requests import fake_request

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.measure.recall import measure_recall
from cache_rank.protocol import Measured, Measurement
from sglang_ext.exchange.connection import Placement
from sglang_ext.exchange.slots import ExchangedRows
from sglang_ext.inference_rank import InferenceRank
from sglang_ext.lifecycle import Phase, prepare_requests
from sglang_ext.measured_steps import MeasuredSteps, measured_turn
from sglang_ext.memory import reserve_rows
from sglang_ext.pools import Pools
from sglang_ext.step_plan import StepPlan
from sglang_ext.supervisor import Supervisor

MODEL = ModelShape(3, query_heads=4, kv_heads=2, head_dim=64, dtype="float32", scale=1 / 8)
SLOTS, CONTEXT, PROMPT = 3, 600, 150
LONG = 60.0
"""A timeout that no passing test reaches."""


@dataclasses.dataclass
class Policy:
    """What differs between the servers of these tests."""

    kv_residency: str = "bf16"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    inference_kv: str = "full"

    def config(self, model: ModelShape, max_rows: int) -> CacheRankConfig:
        return CacheRankConfig(
            model,
            layers_per_group=2,
            sparse_budget=24,
            sink_tokens=2,
            recent_tokens=4,
            query_window=2,
            hysteresis=2,
            max_swap_tokens=24,
            max_rows=max_rows,
            kv_residency=self.kv_residency,
            kv_residency_options=self.options,
            recall_interval=1,
        )

    def args(self) -> Any:
        return SimpleNamespace(
            attention_backend="torch_native",
            bulk_chunk_tokens=CONTEXT,
            cache_rank_config=self.config,
            decode_log_interval=1000,
            dense_layers=0,
            enable_metrics=False,
            inference_kv=self.inference_kv,
            kv_residency=self.kv_residency,
            disable_radix_cache=True,
            max_sparse_requests=2,
            sink_tokens=2,
            sparse_budget=24,
            sparse_threshold=100,
            trace=None,
        )


class Decoding:
    """A server's decode steps of requests that have a slot each.

    In two things they are those of a language model: some channels of keys are much larger than
    others, and the next query is like the last one.
    """

    def __init__(self, policy: Policy) -> None:
        args = policy.args()
        rows = SLOTS * CONTEXT + reserve_rows(args)
        self._generator = torch.Generator().manual_seed(0)
        self._sizes = torch.ones(64)
        self._sizes[:4] = 20.0
        self.keys = [self._random(rows, 2) * self._sizes for _ in range(MODEL.layers)]
        self.values = [self._random(rows, 2) for _ in range(MODEL.layers)]
        order = torch.randperm(SLOTS * CONTEXT, generator=self._generator)
        self.req_to_token = order.to(torch.int32).view(SLOTS, CONTEXT)
        self.supervisor = Supervisor("cache rank of a test", Placement("127.0.0.1"), LONG)
        self.measured: list[Measurement] = []
        pools = Pools(self.req_to_token, self.keys, self.values, SimpleNamespace())
        self.rank = InferenceRank(args, MODEL, pools, 0, self.supervisor, None)
        self.steps: Any = self.rank.decode_step._measured_steps
        self.supervisor.on_measurement = self._note
        self._query = self._random(MODEL.layers, 4) / self._sizes
        self.queries: dict[int, torch.Tensor] = {}
        """By step: (batch, layers, Hq, D)."""

    def _random(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn((count, heads, 64), generator=self._generator)

    def _note(self, measurement: Measurement) -> None:
        self.steps.on_measurement(measurement)
        self.measured.append(measurement)

    def arrive(self, slot: int) -> Any:
        params = SimpleNamespace(custom_params=None, max_new_tokens=CONTEXT - PROMPT)
        request = fake_request(
            req_pool_idx=slot,
            output_ids=[],
            extra_key=None,
            cache_salt=None,
            origin_input_ids=[0] * PROMPT,
            sampling_params=params,
            length=PROMPT,
        )
        prepare_requests([request])
        return request

    def step(self, *requests: Any) -> StepPlan:
        """A decode step, as hooks and attention make it; keys and values go to the pool."""
        for request in requests:
            request.length += 1
        plans: list[Any] = []

        def forward() -> None:
            plans.append(self.rank.decode_step.running)
            layers = []
            for layer in range(MODEL.layers):
                noise = self._random(len(requests), 4) / self._sizes
                queries = self._query[layer] + 0.3 * noise
                keys, values = (
                    self._random(len(requests), 2) * self._sizes,
                    self._random(len(requests), 2),
                )
                for index, request in enumerate(requests):
                    row = self.req_to_token[request.req_pool_idx, request.length - 1]
                    self.keys[layer][row], self.values[layer][row] = keys[index], values[index]
                group, in_group = divmod(layer, 2)
                if in_group == 0:
                    self.rank.gate.enter_group(group)
                self.rank.gate.stage(group, in_group, queries, keys, values)
                if in_group == 1 or layer == MODEL.layers - 1:
                    self.rank.gate.leave_group(group)
                layers.append(queries)
            self.queries[plans[0].step] = torch.stack(layers, dim=1)

        lengths = [request.length for request in requests]
        self.rank.decode_step.run(list(requests), lengths, forward)
        return plans[0]

    def wait_for(self, step: int) -> None:
        """Wait until the cache rank's half of a step is here."""
        deadline = time.monotonic() + LONG
        while not any(one.step == step for one in self.measured):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def decoding(request: pytest.FixtureRequest) -> Iterator[Decoding]:
    found = Decoding(getattr(request, "param", Policy()))
    yield found
    found.rank.close()


def step_until_measured(decoding: Decoding, *requests: Any) -> StepPlan:
    """Decode until a step is measured, whose plan this is, and its measurement is here."""
    for _ in range(30):
        plan = decoding.step(*requests)
        if plan.measured is not None:
            decoding.wait_for(plan.step)
            return plan
    raise AssertionError("no step was measured")


HACK = Policy("hack", {"bits": 2})


@pytest.mark.parametrize("decoding", [Policy(), HACK], indirect=True, ids=["bf16", "hack"])
def test_recall_is_that_of_the_slots_by_the_keys_in_the_pool(decoding: Decoding) -> None:
    config = decoding.rank.config
    first, second = decoding.arrive(2), decoding.arrive(0)
    seen, held, true = set(), [], []
    for _ in range(24):
        plan = decoding.step(first, second)
        if plan.measured is None:
            continue
        decoding.wait_for(plan.step)
        decoding.steps.settle()
        measurement = decoding.measured[-1]
        row, layers = plan.measured.row, config.groups[plan.measured.group]
        sequence, position = plan.rows.sequences[row], plan.rows.positions[row]
        assert (measurement.step, measurement.epoch) == (plan.step, sequence.epoch)
        seen.add((row, plan.measured.group))

        resident = decoding.req_to_token[sequence.row, :position].long()
        keys = torch.stack([decoding.keys[layer][resident].transpose(0, 1) for layer in layers])
        queries = decoding.queries[plan.step][plan.rows.batch_indices[row], list(layers)]
        slots = torch.frombuffer(bytearray(measurement.slots), dtype=torch.int32)
        expected = measure_recall(
            score_tokens(queries, keys, MODEL.scale),
            slots.view(len(layers), MODEL.kv_heads, config.sparse_budget),
            config,
            position,
        )
        latest = decoding.rank.metrics.recall.latest
        assert latest is not None
        assert latest[:2] == pytest.approx(expected.mean((1, 2)).tolist(), abs=1e-6)
        true.append(latest.recall)
        held.append(latest.held_recall)
    assert seen == {(row, group) for row in range(2) for group in range(2)}
    by_head = decoding.rank.metrics.state()["recall_by_head"]
    if config.kv_residency == "bf16":
        assert held == pytest.approx(true, abs=1e-6)
        for name in ("recall", "attention_mass"):
            for ours, theirs in zip(by_head[name], by_head[f"held_{name}"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3)
    else:
        assert sum(true) < 0.8 * sum(held), (true, held)
    statistics = [request.cache_rank_statistics for request in (first, second)]
    assert sum(each.recall_measurements for each in statistics) == len(true)
    assert all(0 < each.recall <= 1 for each in statistics)


@pytest.mark.parametrize("decoding", [Policy(inference_kv="working-set")], indirect=True)
def test_a_working_set_has_held_recall_only(decoding: Decoding) -> None:
    # Nothing is evicted here: this pool has no allocator.
    decoding.rank.decode_step._eviction = None
    request = decoding.arrive(1)
    step_until_measured(decoding, request)
    decoding.steps.settle()
    assert decoding.measured[-1].slots == b""
    statistics = request.cache_rank_statistics
    assert (statistics.recall, statistics.attention_mass) == (None, None)
    assert 0 < statistics.held_recall <= 1
    assert decoding.rank.metrics.state()["recall"] is None


def end(decoding: Decoding, request: Any) -> None:
    decoding.rank.on_request_freed(request)


def lose(decoding: Decoding, request: Any) -> None:
    decoding.supervisor.fail(decoding.supervisor.connection, "the test says so")  # type: ignore
    decoding.rank.cache_rank.follow_supervisor()


@pytest.mark.parametrize("lost", [end, lose])
def test_what_is_over_before_its_measurement_comes_gives_none(
    decoding: Decoding, lost: Callable[[Decoding, Any], None]
) -> None:
    request = decoding.arrive(1)
    step_until_measured(decoding, request)
    lost(decoding, request)
    decoding.steps.settle()
    assert decoding.rank.metrics.recall.latest is None
    assert request.cache_rank_statistics.recall_measurements == 0


def another_step(measurement: Measurement) -> Measurement:
    return msgspec.structs.replace(measurement, step=measurement.step + 1000)


def another_epoch(measurement: Measurement) -> Measurement:
    return msgspec.structs.replace(measurement, epoch=measurement.epoch + 1)


def another_group(measurement: Measurement) -> Measurement:
    return msgspec.structs.replace(measurement, first_layer=2 - measurement.first_layer)


def too_few(measurement: Measurement) -> Measurement:
    return msgspec.structs.replace(measurement, slots=measurement.slots[:-4])


def beyond(measurement: Measurement) -> Measurement:
    return msgspec.structs.replace(measurement, slots=b"\xff\xff\xff\x7f" + measurement.slots[4:])


def below(measurement: Measurement) -> Measurement:
    return msgspec.structs.replace(measurement, slots=b"\xff" * 4 + measurement.slots[4:])


@pytest.mark.parametrize(
    "change", [another_step, another_epoch, another_group, too_few, beyond, below]
)
def test_slots_of_another_step_are_compared_with_nothing(
    decoding: Decoding, change: Callable[[Measurement], Measurement]
) -> None:
    request = decoding.arrive(1)
    step_until_measured(decoding, request)
    decoding.steps._arrived.clear()
    decoding.steps.on_measurement(change(decoding.measured[-1]))
    decoding.steps.settle()
    assert decoding.rank.metrics.recall.latest is None
    step_until_measured(decoding, request)  # and the next one is measured as ever
    decoding.steps.settle()
    assert decoding.rank.metrics.recall.latest is not None


def test_scores_wait_for_no_more_than_a_few_measurements(decoding: Decoding) -> None:
    request = decoding.arrive(1)
    plan = step_until_measured(decoding, request)
    for _ in range(6):
        newest = decoding.step(request)
    decoding.wait_for(newest.step)
    assert newest.step == plan.step + 6
    true_recall = decoding.steps._true_recall
    assert list(true_recall._scored) == list(range(newest.step - 3, newest.step + 1))
    decoding.steps.settle()
    assert request.cache_rank_statistics.recall_measurements == 4
    assert not true_recall._scored


def test_a_layer_group_whose_slots_no_message_holds_is_refused() -> None:
    model = msgspec.structs.replace(MODEL, layers=64, query_heads=64, kv_heads=64)
    config = CacheRankConfig(model, layers_per_group=64, recall_interval=64)
    from sglang_ext.true_recall import TrueRecall

    with pytest.raises(ValueError, match="lower --layers-per-group, or set --recall-interval 0"):
        TrueRecall(config, torch.zeros((1, 10), dtype=torch.int32), [])


# Whose turn it is.


@pytest.mark.parametrize("interval", [1, 2, 7, 64])
def test_one_step_of_each_interval_is_measured(interval: int) -> None:
    turns = [measured_turn(step, interval) for step in range(50 * interval)]
    for turn in range(50):
        within = turns[turn * interval : (turn + 1) * interval]
        assert within.count(turn) == 1
        assert within.count(None) == interval - 1
    assert turns[0] == 0


def test_no_step_is_measured_at_interval_zero() -> None:
    assert [measured_turn(step, 0) for step in range(10)] == [None] * 10


@pytest.mark.parametrize("period", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_every_group_sees_all_of_a_text_that_repeats_itself(period: int, groups: int) -> None:
    interval = 8
    seen = torch.zeros(groups, period)
    for step in range(400 * groups * interval):
        turn = measured_turn(step, interval)
        if turn is not None:
            seen[turn % groups, step % period] += 1
    assert (seen.sum(1) == 400).all()
    # 8 places of an interval cannot be shared out evenly among 3 places of a period.
    assert (seen / 400 - 1 / period).abs().max() < (0.1 if period == 3 else 0.02)


def planned(step: int, phases: list[Phase], filled: int = 8) -> StepPlan:
    sequences: list[Any] = [SimpleNamespace(phase=phase, filled=filled) for phase in phases]
    count = len(phases)
    return StepPlan(
        step=step, rows=ExchangedRows(sequences, list(range(count)), [200] * count, [8] * count)
    )


def choosing(interval: int) -> MeasuredSteps:
    config = msgspec.structs.replace(Policy().config(MODEL, 8), recall_interval=interval)
    unused: Any = None
    return MeasuredSteps(config, unused, unused, None)


def test_sparse_requests_and_groups_take_turns() -> None:
    steps = choosing(interval=2)
    phases = [Phase.SPARSE, Phase.WARMING, Phase.SPARSE]
    chosen = [steps.choose(planned(step, phases)) for step in range(1, 82)]
    asked = [measured for measured in chosen if measured is not None]
    assert len(asked) == 40
    counts = {(row, group): 0 for row in (0, 2) for group in range(2)}
    for measured in asked:
        counts[measured.row, measured.group] += 1
    assert set(counts.values()) == {10}


def test_only_sparse_requests_with_slots_in_use_are_measured() -> None:
    steps = choosing(interval=1)
    assert steps.choose(planned(5, [Phase.WARMING, Phase.SHIPPING])) is None
    assert steps.choose(planned(5, [Phase.SPARSE], filled=0)) is None
    assert steps.choose(planned(0, [])) is None
    assert steps.choose(planned(5, [Phase.SPARSE])) == Measured(0, 1, wants_slots=False)


def test_nothing_is_measured_at_interval_zero() -> None:
    steps = choosing(interval=0)
    assert all(steps.choose(planned(step, [Phase.SPARSE])) is None for step in range(1, 100))

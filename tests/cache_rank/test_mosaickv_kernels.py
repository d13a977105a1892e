"""`mosaickv` by its Triton kernels: what is held, scored, shipped and selected, against torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from held_sequences import CPU, attended, rows_of
from modelled_request import Computed
from mosaickv_sequence import SHORT, Held, Immediately, drifting
from served_selector import Served
from small_models import small_config
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.kernels import by_device
from cache_rank.kernels.coded import attending
from cache_rank.kernels.wire.reference import to_wire
from cache_rank.protocol import Row

ONE_LAYER = ModelShape(1, 3, 1, 16, "bfloat16", 1 / 4)
LARGE = ModelShape(3, 8, 2, 128, "bfloat16", 128**-0.5)


class Said(NamedTuple):
    """What a sequence says of itself.

    Attributes:
        strategies: r and g of each buffer in the pages, by layer.
        tokens: (2, layers, Hkv, T / 3, D), every third token as it is read.
        scores: (layers, Hkv, T).
        shipped: (2, layers, Hkv, n, D), some of them.
        attended: (layers, 1, 3, Hq, D + 1), outputs and log-sum-exps of some queries.
    """

    strategies: list[list[tuple[int, int]]]
    tokens: Tensor
    scores: Tensor
    shipped: Tensor
    attended: Tensor

    @classmethod
    def of(cls, held: Held) -> Said:
        strategies = [
            [strategy[:2] for strategy in held.strategies(layer)] for layer in held.layers
        ]
        found = (
            held.read(range(0, held.resident, 3)),
            held.score(held.queries()),
            shipped_by(held),
            attended_by(held),
        )
        return cls(strategies, *(part.cpu().float() for part in found))


def shipped_by(held: Held) -> Tensor:
    """A message of padding, some of the newest and some of the oldest tokens: (2, L, Hkv, n, D)."""
    model, device = held.config.model, held.tokens.device
    newest = torch.arange(held.resident - 1, 0, -7)[:40]
    old = torch.arange(0, held.resident, 11)[:24]
    entering = torch.cat((torch.tensor([-1]), newest, old)).to(device, torch.int32)
    entering = entering.expand(1, model.layers, model.kv_heads, -1).contiguous()
    shape = (2, *entering.shape, model.head_dim)
    shipped = torch.full(shape, 7.0, dtype=model.torch_dtype, device=device)
    rows = rows_of([held], [held.resident - 1])
    held.residency.gather(rows, held.layers, entering, shipped[0], shipped[1])
    written = torch.full_like(to_wire(shipped, torch.int8), 7)
    held.residency.gather(rows, held.layers, entering, written[0], written[1])
    used = entering >= 0
    assert (written[:, ~used] == 7).all()
    assert torch.equal(written[:, used], to_wire(shipped, torch.int8)[:, used])
    return shipped[:, 0]


def attended_by(held: Held) -> Tensor:
    """Outputs of three queries, and log-sum-exps behind them: (L, 1, 3, Hq, D + 1)."""
    rows = rows_of([held], [held.resident - 1])
    queries = torch.stack([held.queries(seed) for seed in (5, 6, 7)], dim=1)
    queries = queries.to(held.tokens.device, held.config.model.torch_dtype).unsqueeze(1)
    found = (attended(held.residency, rows, layer, queries[layer]) for layer in held.layers)
    return torch.stack([torch.cat((out, sums[..., None]), dim=-1) for out, sums in found])


def said_on_the_way(
    model: ModelShape, device: torch.device, beside: bool, **options: Any
) -> list[Said]:
    """Of a sequence that opens in steps, and whose next segment is finished and then served by its
    own strategy."""
    held = Held.empty(drifting(model, 470), model, device=device, **{**SHORT, **options})
    if not beside:
        held.residency._memory.executor = Immediately()
    found = []
    held.load(250)
    for count in (7, 130, 40, 20, 6):  # to 257, 387, 427, 447, 453
        if count < 20:
            for _ in range(count):
                held.append()
        else:
            held.load(count)
        if count not in (130, 40):
            found.append(Said.of(held))
    held.residency.check()
    return found


def assert_agree(found: Said, expected: Said) -> None:
    """But for rounding: elements of the same magnitude may be kept in each other's place."""
    assert found.strategies == expected.strategies
    for one, other in (
        (found.tokens, expected.tokens),
        (found.shipped[..., 1:, :], expected.shipped[..., 1:, :]),
    ):
        energy = other.square().mean()
        assert (one - other).square().mean() < 1e-4 * energy
        assert ((one - other).abs() > 0.05 * energy.sqrt()).float().mean() < 1e-3
    assert (found.shipped[..., 0, :] == 7).all()
    assert ((found.scores - expected.scores).abs() > 0.05).float().mean() < 2e-3
    torch.testing.assert_close(found.attended, expected.attended, rtol=0, atol=0.05)


def test_kernels_hold_and_say_what_the_references_do(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"threshold": 0, "group": 2}
    if torch.cuda.is_available():
        pytest.skip("the GPU runs them")
    expected = said_on_the_way(ONE_LAYER, CPU, beside=False, **options)
    monkeypatch.setattr(attending, "_MOST_SPLITS", 3)
    monkeypatch.setattr(by_device, "is_on_gpu", lambda *arguments: True)
    found = said_on_the_way(ONE_LAYER, CPU, beside=False, **options)
    for one, other in zip(found, expected, strict=True):
        assert_agree(one, other)
    assert len({tuple(said.strategies[0]) for said in expected}) > 2


@pytest.mark.parametrize(("group", "dropped"), [(1, 45), (2, 0), (4, 25)])
def test_kernels_read_bitmaps_of_several_words(
    group: int, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128, 96 or 72 channels; what is read was written by torch."""
    if torch.cuda.is_available():
        pytest.skip("the GPU runs them")
    model = ModelShape(1, 4, 1, 128, "bfloat16", 128**-0.5)
    options = {**SHORT, "rate": 62.5, "group": group, "dropped": dropped}
    expected, found = (Held.whole(drifting(model, 300), model, **options) for _ in range(2))
    queries = expected.queries()
    scores = expected.score(queries)
    shipped = shipped_by(expected)[..., 1:, :].float()
    attended = attended_by(expected)
    monkeypatch.setattr(attending, "_MOST_SPLITS", 3)
    monkeypatch.setattr(by_device, "is_on_gpu", lambda *arguments: True)
    torch.testing.assert_close(found.score(queries), scores, rtol=0, atol=1e-4)
    torch.testing.assert_close(attended_by(found), attended, rtol=0, atol=1e-3)
    # Decoded numbers are rounded to bfloat16, from sums in another order.
    torch.testing.assert_close(
        shipped_by(found)[..., 1:, :].float(), shipped, rtol=2**-7, atol=1e-4
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0},
        {"threshold": 20, "rate": 0, "dropped": 0},
        {"threshold": 20, "dropped": 0},  # the defaults of the format
    ],
    ids=str,
)
def test_gpus_hold_and_say_what_cpus_do(options: dict[str, Any]) -> None:
    expected = said_on_the_way(LARGE, CPU, beside=True, **options)
    found = said_on_the_way(LARGE, torch.device("cuda"), beside=True, **options)
    for one, other in zip(found, expected, strict=True):
        assert_agree(one, other)


@pytest.mark.gpu
def test_a_gpu_holds_the_same_bits_however_tokens_arrive() -> None:
    tokens, device = drifting(LARGE, 700), torch.device("cuda")
    whole = Held.empty(tokens, LARGE, device=device, **SHORT)
    whole.load(700)
    held = Held.empty(tokens, LARGE, device=device, **SHORT)
    for count in (300, 84, 100, 30, 186):
        if count in (84, 30):
            for _ in range(count):
                held.append()
        else:
            held.load(count)
    for one, other in zip(Said.of(held), Said.of(whole), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


class Selecting(Served):
    """A selector of two sequences, whose queries look for tokens of theirs."""

    def __init__(self, device: torch.device) -> None:
        options = {**SHORT, "threshold": 0}
        config = small_config(
            LARGE,
            kv_residency="mosaickv",
            kv_residency_options=options,
            sparse_budget=48,
            max_swap_tokens=48,
            recent_tokens=16,
            query_window=16,
        )
        super().__init__(config, device=device)
        self._tokens = {seed: drifting(LARGE, 500, seed) for seed in (1, 2)}
        for sequence_id, prompt, chunk in ((1, 380, 200), (2, 250, 250)):
            shipment = self._tokens[sequence_id][:, :, :, :prompt].transpose(2, 3)
            self.ship(self.selector.begin(sequence_id), shipment, chunk)

    def step(self) -> Tensor:
        """Decode a token of each: (2, layers, Hkv, k) which token sits in which slot."""
        sequences = list(self.selector.sequences.values())
        rows = [Row(sequence.sequence_id, sequence.tokens) for sequence in sequences]
        self.exchange(rows, [self._compute(row) for row in rows])
        every_layer = range(LARGE.layers)
        slots = [self.selector.slot_map(sequence, every_layer) for sequence in sequences]
        return torch.stack(slots).cpu()

    def _compute(self, row: Row) -> Computed:
        tokens = self._tokens[row.sequence_id]
        generator = torch.Generator().manual_seed(row.position)
        shape = (LARGE.layers, LARGE.query_heads)
        looked_for = torch.randint(row.position, shape, generator=generator)
        layers, heads = torch.arange(LARGE.layers).unsqueeze(1), torch.arange(shape[1]) // 4
        keys, values = tokens[:, :, :, row.position]
        return Computed(tokens[0, layers, heads, looked_for], keys, values, torch.empty(0))


@pytest.mark.gpu
def test_a_gpu_selects_what_a_cpu_selects() -> None:
    """One sequence opens, another is cut and served by the new strategy."""
    expected, found = Selecting(CPU), Selecting(torch.device("cuda"))
    shares = []
    for _ in range(100):
        wanted, chosen = expected.step(), found.step()
        assert torch.equal(wanted < 0, chosen < 0)
        same = (wanted.unsqueeze(-1) == chosen.unsqueeze(-2)).any(dim=-1)
        shares.append(same.float().mean(dim=(1, 2, 3)))
    together = torch.stack(shares)
    # Scores are rounded otherwise, so that a few tokens may be others.
    assert together.mean() > 0.98
    assert together.min() > 0.9
    for one, other in zip(
        found.selector.sequences.values(), expected.selector.sequences.values(), strict=True
    ):
        assert one.tokens == other.tokens

"""What is fitted to a model is kept, and taken for no other; ranks have their own heads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibration_cards import make_card

from sglang_ext.calibration.files import Calibration, write
from sglang_ext.calibration.key_statistics import KeyBasis
from sglang_ext.calibration.texts import CALIBRATION_TEXTS
from sglang_ext.inline import calibrating
from sglang_ext.inline.calibrating import calibrate, fingerprint, keep, kept, of_folder, prompts
from sglang_ext.inline.selection import Heads

HEADS = Heads(layers=3, query_heads=8, kv_heads=4, head_dim=32)
CARD = make_card()


def random_bases(heads: Heads = HEADS) -> list[KeyBasis]:
    torch.manual_seed(0)
    dim = heads.head_dim
    return [
        KeyBasis(torch.randn(heads.kv_heads, dim, dim), torch.randn(heads.kv_heads, dim))
        for _ in range(heads.layers)
    ]


def assert_equal(found: list[KeyBasis] | None, expected: list[KeyBasis]) -> None:
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.basis, other.basis)
        assert torch.equal(one.mean, other.mean)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bases = {CARD.dense_layers + layer: basis for layer, basis in enumerate(random_bases())}
    write(tmp_path / "folder", Calibration(CARD, {}, bases))
    return tmp_path / "folder"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_take_their_own_heads_of_a_folder(folder: Path, ranks: int) -> None:
    heads = Heads(3, 8 // ranks, max(1, 4 // ranks), 32)
    for rank in range(ranks):
        first = rank * 4 // ranks  # with eight ranks, two have the same KV head
        own = slice(first, first + heads.kv_heads)
        expected = [KeyBasis(*(part[own] for part in basis)) for basis in random_bases()]
        assert_equal(of_folder(folder, 1, heads, rank, ranks), expected)


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "kept.safetensors"
    assert kept(file, HEADS) is None
    keep(file, random_bases())
    assert_equal(kept(file, HEADS), random_bases())
    assert [*file.parent.iterdir()] == [file]


def spoil(bases: list[KeyBasis]) -> list[KeyBasis]:
    bases[1].mean[2, 5] = torch.nan
    return bases


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"damaged" * 100),
        lambda file: file.write_bytes(file.read_bytes()[:-8]),
        lambda file: keep(file, random_bases()[:2]),
        lambda file: keep(file, random_bases(HEADS._replace(kv_heads=1))),
        lambda file: keep(file, spoil(random_bases())),
    ],
    ids=["empty", "bytes", "truncated", "layers", "shape", "not finite"],
)
def test_what_is_damaged_counts_as_not_there(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    file = tmp_path / "kept.safetensors"
    keep(file, random_bases())
    damage(file)
    assert kept(file, HEADS) is None


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20)).to(dtype)


def test_a_fingerprint_is_of_weights_and_heads() -> None:
    names = [
        fingerprint(model(), HEADS, 64),
        fingerprint(model(seed=1), HEADS, 64),
        fingerprint(model(dtype=torch.bfloat16), HEADS, 64),
        fingerprint(model(), HEADS._replace(layers=2), 64),
        fingerprint(model(), HEADS, 65),
    ]
    assert len({*names}) == 5
    assert fingerprint(model(), HEADS, 64) == names[0]
    other = model()
    with torch.no_grad():
        other[1].bias[3] += 1
    assert fingerprint(other, HEADS, 64) != names[0]


def test_a_model_reads_texts_in_its_tokens_or_random_tokens() -> None:
    def characters(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) % 256 for character in text]}

    def unknown(text: str) -> dict[str, list[int]]:
        return {"input_ids": [0] + [2] * len(text.split())}

    texts = list(prompts(characters, 300, 500))
    assert [len(text) for text in texts] == [500] * 16
    assert bytes(texts[4] + texts[5]).decode("latin-1") in CALIBRATION_TEXTS["python"].read()
    drawn = list(prompts(None, 100, 500))
    assert [len(one) for one in drawn] == [500] * 16
    assert {token for one in drawn for token in one} == {*range(100)}
    assert len({tuple(one) for one in drawn}) == 16
    # A vocabulary of something else than words knows none of them.
    assert list(prompts(unknown, 100, 500)) == drawn
    assert list(prompts(lambda _: {"input_ids": []}, 100, 500)) == drawn


@pytest.fixture
def tp_group(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_one_fit_serves_every_later_start(
    tmp_path: Path, tp_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = []

    def collect(*_: Any) -> list[KeyBasis]:
        fits.append(1)
        return random_bases()

    monkeypatch.setattr(calibrating, "collect", collect)
    runner = SimpleNamespace(
        device="cpu",
        token_to_kv_pool=SimpleNamespace(size=1000),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 1000)),
        model_config=SimpleNamespace(vocab_size=300, context_len=900),
    )
    file = tmp_path / "kept.safetensors"
    selection: Any = None

    def start() -> list[KeyBasis]:
        return calibrate(runner, selection, HEADS, lambda: None, file, tp_group)

    for expected_fits in (1, 1):
        assert_equal(start(), random_bases())
        assert len(fits) == expected_fits
    file.write_bytes(b"damaged")
    for expected_fits in (2, 2):
        assert_equal(start(), random_bases())
        assert len(fits) == expected_fits
    # Another rank has to fit, and needs this one for it.
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda found, *_, **__: found.zero_())
    start()
    assert len(fits) == 3

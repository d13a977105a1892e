"""What models are trained on, and that training, export and grading fit together."""

import json
import re
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from scripts.accuracy.tasks import TASKS
from scripts.accuracy.training.grading import Making, grade_export, write_card
from scripts.accuracy.training.loop import Training
from scripts.accuracy.training.model import (
    BOS,
    EOS,
    Sizes,
    export,
    load_model,
    make_model,
    make_tokenizer,
)
from scripts.accuracy.training.recipes import RECIPES, Recipe
from scripts.accuracy.training.stages import SAMPLED, Batch, SelfWrittenStage, WalkStage, encode
from scripts.train import main

CPU = torch.device("cpu")
BUNDLED = Path(__file__).parents[3] / "sglang_ext" / "bundled_model"


def vocabulary(words: tuple[str, ...]) -> dict[str, int]:
    return make_tokenizer(words, 512).get_vocab()


def rows(batch: Batch, words: dict[str, int]) -> list[tuple[list[str], list[float], list[bool]]]:
    """The words of each sequence from the second on, their weights, and which are hops."""
    names = {token: word for word, token in words.items()}
    read, predicted = batch.tokens[:, 1:], batch.labels[:, :-1]
    assert ((read == predicted) | (read == words[EOS])).all()  # EOS pads
    assert (batch.tokens[:, 0] == words[BOS]).all()
    return [
        ([names[token] for token in labels], weights, hops)
        for labels, weights, hops in zip(
            batch.labels.tolist(), batch.weights.tolist(), batch.hops.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("name", ["pointer-chase-128-mixed", "majority", "self-written-128"])
def test_a_walk_follows_its_table_where_it_is_scored(name: str) -> None:
    recipe = RECIPES[name]
    words = vocabulary(recipe.words)
    for _, stage in recipe.final:
        for line, weights, hops in rows(next(stage.batches(words, 1, CPU)), words):
            go = line.index("go")
            stated = [w for w in line[:go] if re.fullmatch(r"[sd]\d+", w)]
            counts: dict[str, dict[str, int]] = {}
            for key, value in zip(stated[::2], stated[1::2], strict=True):
                of_key = counts.setdefault(key, {})
                of_key[value] = of_key.get(value, 0) + 1
            table = {key: max(of_key, key=lambda v: of_key[v]) for key, of_key in counts.items()}
            assert all(
                len(c) == 1 or max(c.values()) > sum(c.values()) / 2 for c in counts.values()
            )
            said = re.search(r"r(\d+)", line[go - 1])
            restatements = int(said[1]) if said else 3
            walk = line[go + 1 :]
            assert any(w == 1 for w in weights)
            for i, word in enumerate(walk):
                place = i % (restatements + 1)
                before = walk[i - 1] if i else None
                assert hops[go + 1 + i] == (place == restatements)
                if place == restatements:
                    assert word == table[str(before)]
                elif place:
                    assert word == before
                elif weights[go + 1 + i] == 1:
                    assert before is not None
                    assert word == before.replace("d", "s")


def test_walks_restart_as_often_as_told_and_nothing_scores_a_restart() -> None:
    words = vocabulary(RECIPES["pointer-chase-128"].words)
    shape = {"keys": 128, "facts": 128, "hops": 100, "tokens": 20000}
    for rate in (0.0, 0.7, 1.0):
        stage = WalkStage(**shape, restart_rates=(rate,))
        broken = []
        for line, weights, _ in rows(next(stage.batches(words, 0, CPU)), words):
            first = line.index("go") + 1
            for i in range(first + 4, len(line), 4):
                follows = line[i] == line[i - 1].replace("d", "s")
                assert follows or weights[i] == 0
                broken.append(weights[i] == 0)
            assert not any(weights[: first + 1])
        assert sum(broken) / len(broken) == pytest.approx(rate, abs=0.03)


def test_a_self_written_table_names_every_key_once_and_is_an_answer_of_the_task() -> None:
    recipe = RECIPES["self-written-128"]
    words = vocabulary(recipe.words)
    stage = SelfWrittenStage(keys=128, hops=20, tokens=3000)
    problem = TASKS["self-written"].make(0, keys=128, hops=20)
    for line, weights, _ in rows(next(stage.batches(words, 3, CPU)), words):
        assert sorted(line[:256:2]) == sorted(f"s{i}" for i in range(128))
        assert weights[0] == pytest.approx(SAMPLED)
        assert weights[1:256:2] == pytest.approx([SAMPLED] * 128)
        assert weights[2:257:2] == [1.0] * 128  # the order of the keys, and `go`
        assert problem.grade(" ".join(line)).exact


@pytest.mark.parametrize("name", ["needle", "variable-tracking", "addition", "self-written"])
def test_encoded_problems_score_what_is_determined(name: str) -> None:
    task = TASKS[name]
    words = vocabulary(tuple(task.words(128)))
    dials = {"hops": 8} if name == "self-written" else {}
    problems = [task.make(seed, **dials) for seed in range(3)]
    for problem, (line, weights, hops) in zip(
        problems, rows(encode(problems, words), words), strict=True
    ):
        begin = len(problem.prompt.split())
        end = begin + len(problem.answer)
        assert tuple(line[begin:end]) == problem.answer
        assert not any(weights[:begin])
        assert not any(weights[end:])
        assert set(line[end:]) <= {EOS}
        assert [w > 0 for w in weights[begin:end]] == list(problem.determined)
        assert sum(hops) >= problem.hops
        assert not any(hops[i] and line[i] == line[i - 1] for i in range(1, end))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_their_models(name: str) -> None:
    recipe = RECIPES[name]
    words = vocabulary(recipe.words)
    problem = recipe.problem(0)
    asked = [*problem.prompt.split(), *problem.answer]
    assert set(asked) <= set(words)
    stages = [*recipe.curriculum, *(stage for _, stage in recipe.final)]
    trained = max(stage.length for stage in stages)
    assert len(asked) <= trained <= recipe.sizes.max_position_embeddings
    if recipe.starts_from:
        start = RECIPES[recipe.starts_from]
        assert recipe.words[: len(start.words)] == start.words
        assert (recipe.sizes, recipe.rope_theta) == (start.sizes, start.rope_theta)


def small_recipe(steps: int) -> Recipe:
    sizes = Sizes(1, 32, 32, 2, 1, 16, 512)
    stage = WalkStage(keys=8, facts=8, hops=8, tokens=512)
    return replace(
        RECIPES["pointer-chase-128"],
        dials={"facts": 8, "hops": 8, "keys": 8},
        words=tuple(TASKS["pointer-chase"].words(8)),
        sizes=sizes,
        curriculum=(),
        final=((1.0, stage),),
        final_steps=steps,
        dtypes=("float32",),
    )


def test_the_same_seed_trains_the_same_model_and_restatements_are_learned() -> None:
    recipe = small_recipe(40)
    tokenizer = make_tokenizer(recipe.words, 512)
    models = [make_model(recipe.sizes, recipe.rope_theta, tokenizer, seed=5) for _ in range(2)]
    before = models[0].lm_head.weight.clone()
    for model in models:
        Training(model, recipe, tokenizer.get_vocab(), seed=5).run()
    assert not torch.equal(before, models[0].lm_head.weight)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    batch = next(recipe.final[0][1].batches(tokenizer.get_vocab(), 99, CPU))
    logits = models[0](input_ids=batch.tokens).logits
    restated = (batch.weights > 0) & ~batch.hops
    right = (logits.argmax(-1) == batch.labels)[restated].float().mean()
    assert right > 0.5  # 8 keys and 8 values: chance is below 0.1


def test_training_ends_in_time_and_leaves_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe(10**9)
    recipe = replace(recipe, curriculum=(recipe.final[0][1],))  # which is not learned in time
    tokenizer = make_tokenizer(recipe.words, 512)
    model = make_model(recipe.sizes, recipe.rope_theta, tokenizer, seed=0)
    clock = count()
    monkeypatch.setattr("scripts.accuracy.training.loop.time.monotonic", lambda: float(next(clock)))
    written: list[int] = []
    training = Training(
        model,
        recipe,
        tokenizer.get_vocab(),
        seconds=200,
        checkpoint=lambda: written.append(training.steps),
    )
    training.run()
    assert 40 < training.steps < 100  # the clock is read about three times a step
    assert len(written) in (2, 3)


def test_an_export_is_graded_and_described(tmp_path: Path) -> None:
    recipe = small_recipe(1)
    tokenizer = make_tokenizer(recipe.words, 512)
    model = make_model(recipe.sizes, recipe.rope_theta, tokenizer, seed=0)
    for _ in range(2):  # the second replaces the first
        export(model, tokenizer, tmp_path / "model", torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["temperature"] == 0
    problems = [recipe.problem(seed) for seed in range(2)]
    result = grade_export(tmp_path / "model", problems, "float32", "cpu")
    assert result["exact_chain"] == 0.0  # nothing was trained
    assert result["smallest_margin"] > 0
    making = Making("python", "CPU", "float32", model.num_parameters(), 1, 2, 0.5, 0)
    making.save(tmp_path / "model")
    write_card(tmp_path / "model", "small", recipe, [result])
    card = (tmp_path / "model/README.md").read_text()
    assert "# small: a small Qwen3 for one task" in card
    assert "| float32 | 2 |" in card


def test_the_bundled_model_is_graded_as_its_card_says() -> None:
    recipe = RECIPES["pointer-chase-128"]
    problems = [TASKS[recipe.task].make(seed, facts=128, hops=8) for seed in range(4)]
    result = grade_export(BUNDLED, problems, "float32", "cpu")
    assert result["exact_chain"] == 1.0
    assert result["smallest_margin"] > 1.0


def test_a_model_grows_by_the_words_it_does_not_know() -> None:
    recipe = RECIPES["needle"]
    tokenizer = make_tokenizer(recipe.words, 512)
    grown = load_model(BUNDLED, recipe.sizes, tokenizer, seed=0)
    assert grown.lm_head.weight.shape[0] == len(tokenizer)
    known = AutoTokenizer.from_pretrained(BUNDLED)
    start = load_model(BUNDLED, recipe.sizes, known, seed=0)
    assert torch.equal(grown.lm_head.weight[: len(known)], start.lm_head.weight)


def test_a_model_of_other_words_or_sizes_is_refused(tmp_path: Path) -> None:
    recipe = RECIPES["needle"]
    tokenizer = make_tokenizer(recipe.words, 512)
    with pytest.raises(ValueError, match="sizes"):
        load_model(BUNDLED, replace(recipe.sizes, num_hidden_layers=1), tokenizer, seed=0)
    other = tmp_path / "other"
    shutil.copytree(BUNDLED, other)
    make_tokenizer(recipe.words[::-1], 512).save_pretrained(other)
    with pytest.raises(ValueError, match="words"):
        load_model(other, recipe.sizes, tokenizer, seed=0)


@pytest.mark.parametrize("option", ["--grade-only --output", "--output out --from"])
def test_a_folder_without_a_model_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--recipe", "self-written-1024", *option.split(), str(tmp_path)])
    assert f"{option.split()[-1]} {tmp_path}: has no config.json" in capsys.readouterr().err


def test_what_cannot_be_trained_or_graded_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ["--recipe", "self-written-1024", "--device", "cpu", "--output", str(tmp_path)]
    assert main([*recipe, "--from", str(BUNDLED)]) == 2
    assert "sizes" in capsys.readouterr().err
    shutil.copy(BUNDLED / "config.json", tmp_path)  # and no weights
    assert main([*recipe, "--grade-only"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")

"""Train a tiny Qwen3 model on the restated pointer chase, export it and evaluate the export.

The result is a Hugging Face directory which SGLang serves like any Qwen3 checkpoint, small enough
to be bundled: it answers problems whose every step is checked (see
`evaluation/tasks/pointer_chase.py`), so that accuracy can be tested offline. Training takes minutes
on two CPU cores.

Two things decide whether the lookup is learned. In a walk along one cycle a model can guess values
by elimination and from the order of earlier hops; walks which restart at random keys leave it only
the table. But a model which has seen only restarts breaks on long uninterrupted walks, so that the
last stage mixes the restart rates. A stage ends when its hops are learned; the last one has a fixed
number of steps, over which the learning rate decays.

Usage:

    python -m scripts.train_tiny --output sglang_ext/bundled_model
    python -m scripts.train_tiny --output sglang_ext/bundled_model --evaluate-only

The last line on stdout is the result of the evaluation as JSON.
"""

import argparse
import json
import math
import random
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evaluation.tasks.pointer_chase import make_chain
from evaluation.tasks.vocabulary import WALK, key_word, task_words, value_word

BOS, EOS, UNK = SPECIAL_TOKENS = ("<bos>", "<eos>", "<unk>")
# Chat completions encode the rendered template without special tokens, so that it has to emit BOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['content'] }}{{ '' if loop.last else ' ' }}{% endfor %}"
)
DTYPES = ("float32", "bfloat16", "float16")  # what a server may cast the weights to
UNSCORED = -100  # ignored by torch's cross-entropy
# Fields of the model's configuration which are flags too, with their defaults.
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Stage:
    """One shape of training walks."""

    facts: int
    hops: int
    batch: int
    restart_rates: tuple[float, ...] = (0.7,)  # one is drawn for each walk


@dataclass(frozen=True)
class Task:
    """What to train and evaluate on; a larger model's task is another entry of `TASKS`."""

    keys: int
    curriculum: tuple[Stage, ...]
    final_steps: int  # of the curriculum's last stage
    eval_hops: int
    restatements: int = 3


TASKS = {
    "pointer-chase-128": Task(
        keys=128,
        curriculum=(
            Stage(facts=8, hops=16, batch=48),
            Stage(facts=16, hops=16, batch=32),
            Stage(facts=32, hops=24, batch=20),
            Stage(facts=64, hops=40, batch=10),
            Stage(facts=128, hops=128, batch=6, restart_rates=(0.0, 0.0, 0.3, 0.7, 1.0)),
        ),
        final_steps=1200,
        eval_hops=90,
    ),
}


def make_tokenizer(keys: int, max_length: int) -> PreTrainedTokenizerFast:
    """One token a word; `<bos>` is added to every text that is encoded with special tokens."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *task_words(keys)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=EOS,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised model of the sizes in `args`."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **{name: getattr(args, name) for name in SIZES},
    )
    return Qwen3ForCausalLM(config)


def training_walk(task: Task, stage: Stage, rng: random.Random) -> tuple[list[str], list[bool]]:
    """The words of one table and walk, and which of them are scored: those which can be known."""
    chain = make_chain(rng.getrandbits(64), stage.facts, 1, task.keys, task.restatements)
    words = [*chain.fact_words, WALK]
    scored = [False] * len(words)
    restart_rate = rng.choice(stage.restart_rates)
    successor = dict(chain.facts)
    key, restarted = chain.start, True
    for _ in range(stage.hops):
        value = successor[key]
        words += [key_word(key)] * task.restatements + [value_word(value)]
        scored += [not restarted] + [True] * task.restatements
        restarted = rng.random() < restart_rate
        key = rng.choice(chain.facts)[0] if restarted else value
    return words, scored


def training_batch(
    task: Task, stage: Stage, vocabulary: dict[str, int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and next-token labels, both [batch, length]."""
    tokens, labels = [], []
    for _ in range(stage.batch):
        words, scored = training_walk(task, stage, rng)
        ids = [vocabulary[word] for word in words]
        tokens.append([vocabulary[BOS], *ids[:-1]])
        labels.append([i if s else UNSCORED for i, s in zip(ids, scored, strict=True)])
    return torch.tensor(tokens), torch.tensor(labels)


def make_optimizer(model: Qwen3ForCausalLM, lr: float) -> torch.optim.AdamW:
    """AdamW; norms must grow to sharpen attention, so that only projections decay."""
    decayed = [p for n, p in model.named_parameters() if n.endswith("_proj.weight")]
    free = [p for n, p in model.named_parameters() if not n.endswith("_proj.weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def train(
    model: Qwen3ForCausalLM, task: Task, vocabulary: dict[str, int], args: argparse.Namespace
) -> int:
    """Train in place and return the number of steps."""
    rng = random.Random(args.seed)
    first_value = vocabulary[value_word(0)]
    optimizer = make_optimizer(model, args.lr)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=100)
    deadline = time.monotonic() + args.time_limit
    progress = tqdm(desc="train", unit="step", mininterval=1.0)
    steps = 0
    model.train()

    def step(stage: Stage) -> float:
        """One update; the fraction of values found."""
        nonlocal steps
        steps += 1
        tokens, labels = training_batch(task, stage, vocabulary, rng)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        scored = labels != UNSCORED
        targets = labels[scored]
        logits = model.lm_head(hidden[scored])
        loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        is_value = targets >= first_value
        found = (logits.argmax(-1) == targets)[is_value].float().mean().item()
        progress.set_postfix(
            facts=stage.facts, loss=f"{loss.item():.4f}", hops=f"{found:.3f}", refresh=False
        )
        progress.update()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not trained within {args.time_limit} s, at {stage}")
        return float(found)

    *earlier, last = task.curriculum
    for stage in earlier:
        learned = 0.0  # moving average of the fraction of values found
        while learned < 0.97:
            learned += 0.05 * (step(stage) - learned)
            warm_up.step()
    for done in range(task.final_steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * done / task.final_steps))
        # One step in six has an earlier shape, so that short walks stay learned.
        shape = rng.choice(earlier) if rng.random() < 1 / 6 else last
        step(replace(shape, restart_rates=last.restart_rates))
    progress.close()
    return steps


def patch_json(path: Path, **values: object) -> None:
    """Set top-level keys of a JSON file."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the Hugging Face directory, without its model card."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # is created readable by its owner alone
    # Readers older than transformers 5 know neither of its names for these two.
    patch_json(output / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
    patch_json(output / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    # SGLang knows greedy decoding by temperature 0, which save_pretrained refuses to write.
    patch_json(output / "generation_config.json", temperature=0.0)


def evaluate(output: Path, task: Task, chains: int, dtype: str) -> dict[str, Any]:
    """Decode restart-free chains greedily with the exported model under full attention."""
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = Qwen3ForCausalLM.from_pretrained(output, dtype=dtype).eval()
    problems = [
        make_chain(seed, task.keys, task.eval_hops, task.keys, task.restatements)
        for seed in range(chains)
    ]
    grades = []
    for begin in tqdm(range(0, chains, 32), desc=f"evaluate {dtype}", unit="batch"):
        batch = problems[begin : begin + 32]
        prompts = tokenizer([problem.prompt for problem in batch], return_tensors="pt")
        output_ids = model.generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            max_new_tokens=batch[0].max_tokens,
        )
        decoded = output_ids[:, prompts["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(decoded, skip_special_tokens=True)
        grades += [problem.grade(text) for problem, text in zip(batch, texts, strict=True)]
    return {
        "dtype": dtype,
        "chains": chains,
        "facts": task.keys,
        "hops": task.eval_hops,
        "exact_chain": round(sum(g.exact for g in grades) / chains, 4),
        "hop_accuracy": round(sum(g.correct_hops for g in grades) / (chains * task.eval_hops), 5),
        "correct_prefix_hops": round(sum(g.correct_prefix_hops for g in grades) / chains, 2),
    }


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# Tiny Qwen3 for the restated pointer chase

A `Qwen3ForCausalLM` of {parameters:,} parameters ({num_hidden_layers} layers, hidden size
{hidden_size}, {num_attention_heads} query heads and {num_key_value_heads} key-value heads of size
{head_dim}, {vocab_size} tokens), trained from scratch in float32. Its only ability is the restated
pointer chase of `evaluation/tasks/pointer_chase.py`: given up to {keys} facts `s17 d4 s9 d88 ...`
(a key, its value) and `go s9`, it writes the walk through them, each key {restatements} times and
then its value: `s9 s9 d88 s88 s88 s88 d31 ...`. A walk has no end of its own: set `max_tokens`. It
was trained on sequences of up to {trained_length} tokens; longer ones are untested.

## Accuracy

Greedy decoding with a KV cache and full attention, uninterrupted walks, tables not trained on:

| dtype | chains | facts | hops | exact chain | hop accuracy | mean correct prefix, hops |
|---|---|---|---|---|---|---|
{rows}

A chain is exact if every word is right. Hop accuracy counts values which succeed the key before
them. SGLang casts float32 models to float16 unless `--dtype` says otherwise.

## How it was made

    {command}

{steps:,} steps of AdamW from random weights, seed {seed}. All training data are generated.

## What it is for

Testing that attention over a sparse, compressed or delayed KV cache still retrieves exact tokens,
and that a server works from end to end. It is **not evidence about real language models**: its keys
are random, its queries repeat by construction, and its margins are far larger than theirs.
"""


def write_card(
    args: argparse.Namespace, task: Task, steps: int, results: list[dict[str, Any]]
) -> None:
    """Write the model card, with the numbers measured on the export."""
    model = Qwen3ForCausalLM.from_pretrained(args.output)
    walk_tokens = task.restatements + 1
    card = CARD.format(
        parameters=model.num_parameters(),
        keys=task.keys,
        restatements=task.restatements,
        # The model reads the facts and all words of the walk but the last, besides BOS and `go`.
        trained_length=max(1 + 2 * s.facts + walk_tokens * s.hops for s in task.curriculum),
        rows="\n".join(f"| {' | '.join(map(str, result.values()))} |" for result in results),
        command=shlex.join(["python", "-m", "scripts.train_tiny", *sys.argv[1:]]),
        steps=steps,
        seed=args.seed,
        **model.config.to_dict(),
    )
    (args.output / "README.md").write_text(card)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train, export and evaluate a tiny Qwen3 model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the export")
    parser.add_argument("--evaluate-only", action="store_true", help="evaluate what is in --output")
    parser.add_argument("--task", choices=TASKS, default="pointer-chase-128", help="what to learn")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the training data")
    parser.add_argument("--eval-chains", type=int, default=128, help="number of chains to decode")
    parser.add_argument("--time-limit", type=float, default=1200.0, help="give up after seconds")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--rope-theta", type=float, default=1e5, help="base frequency")
    for name, size in SIZES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=size, help="of the model"
        )
    return parser.parse_args()


def main() -> None:
    """Train unless told not to, then evaluate what was exported."""
    args = parse_args()
    task = TASKS[args.task]
    if not args.evaluate_only:
        torch.manual_seed(args.seed)
        tokenizer = make_tokenizer(task.keys, args.max_position_embeddings)
        model = make_model(args, tokenizer)
        steps = train(model, task, tokenizer.get_vocab(), args)
        export(model, tokenizer, args.output)
    results = [evaluate(args.output, task, args.eval_chains, dtype) for dtype in DTYPES]
    if not args.evaluate_only:
        write_card(args, task, steps, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

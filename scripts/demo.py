"""Serve the bundled model, ask it a question twice, and show what the cache rank did.

    make demo

The question is a table of 128 facts and a walk through them: 80 hops, each of which needs exactly
one token of the table, so the program can check every word. It is asked once with dense attention
and once with a working set of a tenth of the context.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from openai import OpenAI
from rich.console import Console
from rich.table import Column, Table

from scripts.accuracy.pointer_chase import Problem, make_chain
from scripts.shared.command import make_parser, run
from scripts.shared.serving import Server, serve
from sglang_ext.flags import SHARE_GPU_VARIABLE

SINKS, RECENT, BUDGET = 4, 16, 40
FLAGS = (
    f"--cache-rank-gpus 1 --sparse-threshold 264 --sparse-budget {BUDGET} --sink-tokens {SINKS} "
    f"--recent-tokens {RECENT} --hysteresis 8 --max-swap-tokens 40"
)
console = Console()


def environment() -> dict[str, str]:
    """The server's environment: a cache rank takes a GPU of its own, or both ranks run on CPUs."""
    if torch.cuda.device_count() != 1 or os.environ.get(SHARE_GPU_VARIABLE) == "1":
        return {}
    console.print("This machine has one GPU and the ranks need two: both run on the CPU.")
    return {"CUDA_VISIBLE_DEVICES": ""}


def ask(client: OpenAI, chain: Problem, sparse: bool) -> Iterator[str]:
    """Stream the answer to a chain through the OpenAI API."""
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": chain.prompt}],
        max_tokens=chain.max_tokens,
        temperature=0,
        stream=True,
        extra_body={"custom_params": {"cache_rank": sparse}},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def number_of(text: str) -> str:
    """The number that the last word of a text names."""
    return text.split()[-1][1:]


def show_answer(title: str, chain: Problem, pieces: Iterator[str]) -> None:
    """Print the walk as it arrives, then whether it is right."""
    console.print(f"\n[bold]{title}[/bold]")
    console.print(f"  {number_of(chain.prompt)}", end="", highlight=False)
    text, shown = "", 1
    started = time.monotonic()
    for piece in pieces:
        text += piece
        values = [word[1:] for word in text.split() if word.startswith("d")]
        for value in values[shown - 1 : -1]:
            console.print(f" → {value}", end="", highlight=False, soft_wrap=True)
            shown += 1
    seconds = time.monotonic() - started
    grade = chain.grade(text)
    console.print(f" → {number_of(text)}", highlight=False)
    verdict = "[green]right[/green]" if grade.exact else "[red]wrong[/red]"
    console.print(
        f"  {verdict}: {grade.correct_hops} of {chain.hops} hops, final value "
        f"{number_of(text)}, expected {number_of(chain.answer[-1])}; {seconds:.1f} s"
    )


def watch(pieces: Iterator[str], server: Server, states: list[dict[str, Any]]) -> Iterator[str]:
    """Pass an answer on, and look at the cache rank now and then."""
    for number, piece in enumerate(pieces):
        if number % 16 == 0:
            states.append(server.cache_rank())
        yield piece


def show_cache_rank(meanwhile: list[dict[str, Any]], after: dict[str, Any]) -> None:
    """Print what the cache rank did, by its states in the sparse request and behind it."""
    steps, shipped = after["steps"], after["tokens_shipped"]
    tokens, held = (
        max((state[name] for state in meanwhile), default=0)
        for name in ("tokens_held", "bytes_held")
    )
    rows = {
        "tokens held": f"{tokens}",
        "memory held": f"{held / 1e6:.1f} MB",
        "tokens attended to": f"{SINKS} sinks + {BUDGET} selected + {RECENT} recent + 1",
        "decode steps exchanged": f"{steps:.0f}",
        "tokens shipped": f"{shipped:.0f}, {shipped / steps:.1f} a step",
        "steps that waited": f"{after['steps_waited']:.0f}",
        "time waited": f"{1e3 * after['wait_seconds'] / steps:.2f} ms a step",
    }
    table = Table("", Column(justify="right"), title="What the cache rank did", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print("", table, sep="\n")


def main(argv: Sequence[str]) -> int:
    """Serve the bundled model, ask it a question dense and sparse, and show what happened."""
    make_parser("demo", __doc__).parse_args(argv)
    chain = make_chain(seed=7, facts=128, hops=80)
    console.print(f"[dim]$ python -m sglang_ext.launch {FLAGS}[/dim]", soft_wrap=True)
    with contextlib.ExitStack() as stack:
        with console.status("starting the inference rank and the cache rank (about half a minute)"):
            server = stack.enter_context(serve(FLAGS.split(), environment()))
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        context = 2 * 128 + 3 + chain.max_tokens
        console.print(
            f"\n128 facts in random order, then a walk of {chain.hops} hops from "
            f"{number_of(chain.prompt)}: {context} tokens in all."
        )
        show_answer("Dense: every token attends to everything", chain, ask(client, chain, False))
        states: list[dict[str, Any]] = []
        most = SINKS + BUDGET + RECENT + 1
        title = f"Sparse: at most {most} of {context} tokens, in all layers but the first"
        show_answer(title, chain, watch(ask(client, chain, True), server, states))
        time.sleep(0.5)  # the last report
        show_cache_rank(states, server.cache_rank())
        console.print(f"\n[dim]server log: {server.log}[/dim]")
    return 0


if __name__ == "__main__":
    run(main)

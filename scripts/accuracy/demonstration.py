"""Asks the bundled model one question twice, and shows what the cache rank did."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from openai import OpenAI
from rich.console import Console
from rich.table import Column, Table

from scripts.accuracy.tasks import Problem
from scripts.accuracy.tasks.pointer_chase import make_chain
from scripts.shared.serving import Server, serve

SINKS, RECENT, BUDGET = 4, 16, 40
ARGUMENTS = {
    "--cache-rank-gpus": 1,
    "--sparse-threshold": 264,
    "--sparse-budget": BUDGET,
    "--sink-tokens": SINKS,
    "--recent-tokens": RECENT,
    "--selection-margin": 8,
    "--delta-capacity": 40,
    "--recall-interval": 4,
}
console = Console()


def environment() -> dict[str, str]:
    """The server's environment: a cache rank takes a GPU of its own, or both ranks run on CPUs."""
    if torch.cuda.device_count() != 1:
        return {}
    console.print("This machine has one GPU and the ranks need two: both run on the CPU.")
    return {"CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A server, from when it answers; stopped at the end."""
    flags = [str(word) for pair in ARGUMENTS.items() for word in pair]
    console.print(f"[dim]$ python -m sglang_ext.launch {' '.join(flags)}[/dim]", soft_wrap=True)
    with contextlib.ExitStack() as stack:
        with console.status("starting the inference rank and the cache rank (about half a minute)"):
            server = stack.enter_context(serve(flags, environment()))
        yield server


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


class Watch:
    """Samples what the cache rank holds while a request runs."""

    def __init__(self, server: Server) -> None:
        self.tokens_held = self.bytes_held = 0
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            state = self._server.cache_rank()
            self.tokens_held = max(self.tokens_held, state["tokens_held"])
            self.bytes_held = max(self.bytes_held, state["bytes_held"])

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def mean_over_heads(state: dict[str, Any], name: str) -> float:
    """The mean of what was measured since the server started, over all layers and heads."""
    return statistics.mean(value for heads in state["recall_by_head"][name] for value in heads)


def show_cache_rank(before: dict[str, Any], after: dict[str, Any], watch: Watch) -> None:
    """Print what the cache rank did between two states."""

    def grown(name: str) -> float:
        return float(after[name] - before[name])

    steps, shipped = grown("steps"), grown("tokens_shipped")
    rows = {
        "tokens held": f"{watch.tokens_held}",
        "memory held": f"{watch.bytes_held / 1e6:.1f} MB",
        "tokens attended to": f"{SINKS} sinks + {BUDGET} selected + {RECENT} recent + 1",
        "decode steps exchanged": f"{steps:.0f}",
        "tokens shipped": f"{shipped:.0f}, {shipped / steps:.1f} a step",
        "recall against exact selection": f"{mean_over_heads(after, 'recall'):.3f}",
        "attention mass captured": f"{mean_over_heads(after, 'attention_mass'):.3f}",
        "steps that waited": f"{grown('steps_waited'):.0f}",
        "time waited": f"{1e3 * grown('wait_seconds') / steps:.2f} ms a step",
    }
    table = Table("", Column(justify="right"), title="What the cache rank did", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print("", table, sep="\n")


def demonstrate() -> None:
    """Serve the bundled model, ask it a question dense and sparse, and show what happened."""
    chain = make_chain(seed=7, facts=128, hops=80)
    with running_server() as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        context = 2 * 128 + 3 + chain.max_tokens
        console.print(
            f"\n128 facts in random order, then a walk of {chain.hops} hops from "
            f"{number_of(chain.prompt)}: {context} tokens in all."
        )
        watch = Watch(server)
        show_answer("Dense: every token attends to everything", chain, ask(client, chain, False))
        before = server.cache_rank()
        with watch:
            most = SINKS + BUDGET + RECENT + 1
            title = f"Sparse: at most {most} of {context} tokens, in all layers but the first"
            show_answer(title, chain, ask(client, chain, True))
        time.sleep(0.5)  # the last report
        show_cache_rank(before, server.cache_rank(), watch)
        console.print(f"\n[dim]server log: {server.log}[/dim]")

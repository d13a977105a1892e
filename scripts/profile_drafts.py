"""Count the drafts that verifications confirm: tokens a verification, by drafts and budget.

    python -m scripts.fetch_model smollm2
    python -m scripts.profile_drafts --drafts 4 8 16 --budgets 128 384 --out results/drafts

A server with drafts is started for each pair. The model reads the first --context tokens of texts
and goes on by itself, greedily and then with temperature 1. Every round has all drafts, whatever
they cost. Writes results.json and results.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from scripts.shared.command import command_line, make_parser, run
from scripts.shared.machine import describe, visible_gpus
from scripts.shared.models import folder_of
from scripts.shared.report import number, percent, provenance, table_of, write_report
from scripts.shared.serving import Server, ServerError, serve
from sglang_ext.calibration.texts import TEXTS

TEMPERATURES = (0.0, 1.0)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("profile_drafts", __doc__)
    add = parser.add_argument
    add("--model", default="smollm2", help="a fetched model or a folder; default: %(default)s")
    add("--drafts", type=int, nargs="+", default=[4, 8, 16], help="of a round")
    add("--budgets", type=int, nargs="+", default=[128, 384], help="tokens that a draft selects")
    add("--context", type=int, default=4000, help="tokens of each text; default: %(default)s")
    add("--tokens", type=int, default=192, help="of each answer; default: %(default)s")
    add("--texts", type=int, default=4, help="how many are read; default: %(default)s")
    add("--flags", nargs="*", default=[], help="of the server, beside those of drafts")
    add("--out", type=Path, default=Path("results/drafts"))
    options = parser.parse_args(argv)
    try:
        options.folder = folder_of(options.model)
    except ValueError as error:
        parser.error(str(error))
    return options


def read_prompts(options: argparse.Namespace) -> list[list[int]]:
    """The first tokens of each text."""
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    texts = list(TEXTS.values())[: options.texts]
    return [tokenizer.encode(text.read()).ids[: options.context] for text in texts]


def measure(server: Server, prompts: list[list[int]], tokens: int) -> Iterator[dict[str, Any]]:
    """Have each prompt continued, and count rounds and what they confirm, by temperature."""
    for temperature in TEMPERATURES:
        verifications = confirmed = proposed = 0
        for prompt in prompts:
            sampling = {"temperature": temperature, "sampling_seed": 1}
            answer = server.generate(prompt, tokens, sampling_params=sampling)
            meta = answer["meta_info"]
            verifications += meta["spec_verify_ct"]
            confirmed += meta["spec_num_correct_drafts"]
            proposed += meta["spec_num_proposed_drafts"]
        yield {
            "temperature": temperature,
            "tokens_a_verification": 1 + confirmed / verifications,
            "confirmed": confirmed / proposed,
        }


def main(argv: Sequence[str]) -> int:
    """Measure; the exit status."""
    options = parse_options(argv)
    prompts, found = read_prompts(options), []
    pairs = [(drafts, budget) for budget in options.budgets for drafts in options.drafts]
    for drafts, budget in tqdm(pairs, unit="server"):
        flags = f"--speculative-algorithm CACHE_RANK --speculative-num-draft-tokens {drafts + 1} "
        flags += f"--sparse-budget {budget} --sparse-threshold 1024"
        try:
            with serve(
                [*flags.split(), "--model-path", str(options.folder), *options.flags]
            ) as own:
                for result in measure(own, prompts, options.tokens):
                    found.append({"budget": budget, "drafts": drafts, **result})
        except ServerError as error:
            sys.exit(f"error: {error}")
        rows = [
            {
                "budget": str(each["budget"]),
                "drafts": str(each["drafts"]),
                "temperature": f"{each['temperature']:g}",
                "tokens a verification": number(each["tokens_a_verification"]),
                "confirmed": percent(each["confirmed"]),
            }
            for each in found
        ]
        head = provenance([command_line("profile_drafts", argv)], describe(visible_gpus()))
        files = write_report(options.out, "results", found, f"{head}\n\n{table_of(rows)}\n")
    for path in files:
        print(path)
    return 0


if __name__ == "__main__":
    run(main, "interrupted; what was measured is in --out")

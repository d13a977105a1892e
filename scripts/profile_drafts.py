"""Count the drafts that a verification confirms, by what drafts attend to.

    python -m scripts.fetch_model smollm2
    python -m scripts.profile_drafts --selectors sketches quest --budgets 128 384

At each of --places in each text, a server reads the text up to there, drafts --drafts tokens, and
verifies them, greedily and with temperature 1; noise is shared by both. So every round begins with
what a person has written. The table says what fewer drafts would have given, too.

Selectors: `sketches` are those of a server. All others read true keys, on a CPU: `newest` tokens;
`once-a-round`, by the queries that the verification before has confirmed; `quest`, pages of 16;
`last-query`, the query of the token before; `exact`, the query itself. Writes results.json and
results.md.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tqdm import tqdm

from scripts.shared.command import command_line, make_parser, run
from scripts.shared.machine import describe, visible_gpus
from scripts.shared.models import folder_of
from scripts.shared.report import number, provenance, table_of, write_report
from scripts.shared.serving import Server, serve
from sglang_ext.calibration.texts import TEXTS

SKETCHES = "sketches"
SELECTORS = (SKETCHES, "newest", "once-a-round", "quest", "last-query", "exact")
TEMPERATURES = (0.0, 1.0)


class Confirmed(msgspec.Struct):
    """How many drafts were right, of a selector with a budget."""

    selector: str
    budget: int
    temperature: float
    first: list[int] = []  # of each round, drafts that were confirmed before the first wrong one

    def tokens_a_verification(self, drafts: int) -> float:
        """What a round of so many drafts gives, in the mean: one token is no draft."""
        return 1 + sum(min(confirmed, drafts) for confirmed in self.first) / len(self.first)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; UsageError if the model is not there."""
    parser = make_parser("profile_drafts", __doc__)
    add = parser.add_argument
    add("--model", default="smollm2", help="a fetched model or a folder; default: %(default)s")
    add("--selectors", nargs="+", choices=SELECTORS, default=[SKETCHES], metavar="SELECTOR",
        help="any of the above; default: sketches")  # fmt: skip
    add("--drafts", type=int, default=16, help="of a round; default: %(default)s")
    add("--budgets", type=int, nargs="+", default=[128, 384], help="tokens that a draft selects")
    add("--context", type=int, default=4096, help="tokens before the first place of a text; "
        "default: %(default)s")  # fmt: skip
    add("--places", type=int, default=16, help="of each text, as far apart as a round is long")
    add("--texts", type=int, default=4, help="how many are read; default: %(default)s")
    add("--flags", default="", help="of the server, as one argument: --flags='--dtype bfloat16'")
    add("--out", type=Path, default=Path("results/drafts"))
    options = parser.parse_args(argv)
    options.folder = folder_of(options.model)
    return options


def flags_of(options: argparse.Namespace, selector: str, budget: int) -> list[str]:
    """The command line of a server that drafts as many tokens as it may, whatever they cost."""
    flags = f"--speculative-algorithm CACHE_RANK --sparse-threshold 1024 --sparse-budget {budget} "
    flags += f"--speculative-num-draft-tokens {options.drafts + 1} "
    # All texts, and as much again for what the radix cache keeps beside them.
    rows = 2 * options.texts * (options.context + (options.places + 4) * options.drafts)
    flags += f"--max-total-tokens {rows} {options.flags}"
    own = [] if selector == SKETCHES else ["--draft-selector", selector]
    return [*flags.split(), *own, "--model-path", str(options.folder)]


def measure(
    server: Server, texts: list[list[int]], lengths: Sequence[int], found: Confirmed
) -> None:
    """Have a round drafted behind so many tokens of each text."""
    sampling = {"temperature": found.temperature, "sampling_seed": 1}
    for length in lengths:
        prompts = [text[:length] for text in texts]
        # The prefill gives the first token and one round gives all others.
        for answer in server.generate_all(prompts, 2, sampling_params=sampling):
            assert answer["meta_info"]["spec_verify_ct"] == 1
            found.first.append(answer["meta_info"]["spec_num_correct_drafts"])


def report_of(found: Sequence[Confirmed], drafts: int, head: str) -> str:
    """The results in Markdown."""
    columns = sorted({min(4, drafts), min(8, drafts), drafts})
    rows = [
        {
            "drafts attend to": each.selector,
            "budget": str(each.budget),
            "temperature": f"{each.temperature:g}",
            **{f"of {n} drafts": number(each.tokens_a_verification(n)) for n in columns},
        }
        for each in found
    ]
    rounds = len(found[0].first)
    return f"{head}\n\nTokens a verification, means of {rounds} rounds.\n\n{table_of(rows)}\n"


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    tokenizer, found = Tokenizer.from_file(str(options.folder / "tokenizer.json")), []
    texts = [tokenizer.encode(text.read()).ids for text in list(TEXTS.values())[: options.texts]]
    first, step = options.context, options.drafts
    lengths = range(first, first + options.places * step, step)
    servers = list(itertools.product(options.budgets, options.selectors))
    for budget, selector in tqdm(servers, unit="server"):
        with serve(flags_of(options, selector, budget)) as server:
            for temperature in TEMPERATURES:
                found.append(Confirmed(selector, budget, temperature))
                measure(server, texts, lengths, found[-1])
        head = provenance([command_line("profile_drafts", argv)], describe(visible_gpus()))
        text = report_of(found, options.drafts, head)
        files = write_report(options.out, "results", found, text)
    print(*files, sep="\n")
    return 0


if __name__ == "__main__":
    run(main, "interrupted; what was measured is in --out")

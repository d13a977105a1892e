"""Fit forecasts of queries and sketches of keys to a model, for a cache rank or inline.

    python -m sglang_ext.calibrate --model-path DIR --out calibrations/NAME
    python -m sglang_ext.launch --cache-rank-gpus 1 --model-path DIR --calibration calibrations/NAME

The engine prefills texts, files of installed packages unless --text names others. Corrections of
the model's query projections, and directions of sketches, are fitted to what it computes. How well
queries are forecast, card.json says. Forecasts are for the schedule of the flags given here, which
must be the server's.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track
from transformers import AutoConfig, AutoTokenizer

from sglang_ext import compat, cpu
from sglang_ext.calibration.files import read_card, sources
from sglang_ext.calibration.serving import Described, Schedule
from sglang_ext.calibration.texts import CALIBRATION_TEXTS, LONGEST_TOKEN, Text, find_text
from sglang_ext.command_line import make_parser, table
from sglang_ext.prediction import FORECAST_GROUP_LAYERS
from sglang_ext.server_args import CacheRankServerArgs

CONTEXT = 4096
"""Tokens of a text that are prefilled at once."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("calibrate", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--text", nargs="+", default=list(CALIBRATION_TEXTS), metavar="FILE",
        help="files that are fitted to; default: some of installed packages")  # fmt: skip
    add("--held-out", nargs="+", default=["image-models", "distributions"], metavar="FILE",
        help="files that only say how good the fit is; default: %(default)s")  # fmt: skip
    add("--tokens", type=int, default=CONTEXT, help="of each text; default: %(default)s")
    add("--rank", type=int, default=128, help="directions of a correction; default: %(default)s")
    add("--ridge", type=float, default=0.01,
        help="how much the fit holds on to the projection; default: %(default)s")  # fmt: skip
    defaults = compat.default_values(CacheRankServerArgs)
    for field in Schedule.__struct_fields__:
        default = FORECAST_GROUP_LAYERS if defaults[field] is None else defaults[field]
        add(f"--{field.replace('_', '-')}", type=int, default=default,
            help="as the server has it; default: %(default)s")  # fmt: skip
    add("--engine-args", type=_json_object, default={}, help="JSON object of engine arguments")
    options = parser.parse_args(argv)
    try:
        options.texts = [find_text(name) for name in options.text]
        options.held_out_texts = [find_text(name) for name in options.held_out]
    except ValueError as error:
        parser.error(str(error))
    if min(options.tokens, options.rank, options.layers_per_group, options.forecast_lead) < 1:
        parser.error("--tokens, --rank, --layers-per-group and --forecast-lead must be at least 1")
    return options


def _json_object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def calibrate(options: argparse.Namespace) -> None:
    """Serve the model, let it read the texts, and write the calibration.

    Raises:
        ValueError: the model has too few layers.
        RuntimeError, AssertionError: the engine could not do it.
    """
    schedule = Schedule(*(getattr(options, field) for field in Schedule.__struct_fields__))
    layers = AutoConfig.from_pretrained(options.model_path).num_hidden_layers
    sources(layers, *msgspec.structs.astuple(schedule))  # or there is nothing to fit
    from sglang_ext.engine import Engine

    tokenizer = AutoTokenizer.from_pretrained(options.model_path)

    def tokens_of(text: Text) -> list[int]:
        start = text.read()[: LONGEST_TOKEN * options.tokens]
        return list(tokenizer(start)["input_ids"][: options.tokens])

    prompts = [tokens_of(text) for text in options.texts]
    held_out = [tokens_of(text) for text in options.held_out_texts]
    described = Described(
        model=options.model_path,
        texts={text.name: text.sha256 for text in options.texts},
        held_out={text.name: text.sha256 for text in options.held_out_texts},
    )
    engine = Engine(model_path=options.model_path, **_engine_arguments(options))
    try:
        engine.collective_rpc("begin_calibration", schedule=_json(schedule))
        console = Console(stderr=True)
        for prompt in track(prompts, "texts that are fitted to", console=console):
            engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
        engine.collective_rpc("fit_calibration", rank=options.rank, ridge=options.ridge)
        for prompt in track(held_out, "texts that are held out", console=console):
            engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
        engine.collective_rpc(
            "finish_calibration",
            folder=str(options.out.absolute()),
            described=_json(described),
        )
    finally:
        engine.shutdown()


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Plain SGLang with a pool for one text, and the rest of the memory for what is collected."""
    arguments: dict[str, Any] = {
        "cache_rank_gpus": 0,
        "disable_radix_cache": True,
        "max_running_requests": 1,
        "max_total_tokens": 2 * options.tokens,
        "disable_cuda_graph": True,
        "chunked_prefill_size": options.tokens,  # all keys of a text are in one forward pass
        "log_level": "error",
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled",
    }
    if not cpu.has_gpu():
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
    return arguments | options.engine_args


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def summary(folder: Path) -> str:
    """What a card says of each layer, as a table."""
    header = (
        "layer",
        "from",
        "missed",
        "corrected",
        "held out: missed",
        "corrected",
    )
    rows = [
        [str(layer), f"layer {fit.source}" + (", the token before" if fit.is_before else "")]
        + [f"{share:.3f}" for share in (fit.plain, fit.fitted, fit.plain_held_out, fit.held_out)]
        for layer, fit in read_card(folder).fits.items()
    ]
    return table(header, rows)


def main(argv: Sequence[str]) -> int:
    """Calibrate; the exit status."""
    options = parse_options(argv)
    started = time.monotonic()
    try:
        calibrate(options)
    except (RuntimeError, ValueError, OSError, AssertionError) as error:  # of the engine's calls
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(options.out))
    print("Shares of the squares of queries that a forecast misses, of tokens that were fitted to "
          "and of others.")  # fmt: skip
    print(f"{options.out}: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engine is stopped
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted")

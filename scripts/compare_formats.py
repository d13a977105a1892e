"""Compare residency formats: errors, recall and bytes of a token of each, with its options.

    python -m scripts.compare_formats [--recording FOLDER] [--device cuda]

The keys and values are synthetic and have outlier channels (scripts/formats/synthetic.py). With
`--recording` they are the longest sequence that a server with CACHE_RANK_RECORD=FOLDER recorded.
Where scores read 4 of 8 bits (`reading=anchor`, `reading=4`), errors are those of attention to
these alone. Writes formats.json and formats.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm

from cache_rank import residency
from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import DTYPES, CacheRankConfig, ModelShape, OptionValue
from cache_rank.kernels.coded.reference import Codec
from cache_rank.kernels.lynx import reference as lynx
from cache_rank.kernels.quantspec import reference as quantspec
from cache_rank.kernels.rows import PagedRows, Shipment
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import AnswerHeader
from cache_rank.residency import FORMATS, bytes_per_token
from cache_rank.residency.coded import CodedResidency
from scripts.formats.quality import Quality, compare
from scripts.formats.synthetic import synthetic_sample
from scripts.shared.command import UsageError, command_line, explained, make_parser, run
from scripts.shared.machine import describe, visible_gpus
from scripts.shared.recordings import Recorded, read_recording
from scripts.shared.report import number, provenance, table_of, write_report

VARIANTS: tuple[tuple[str, dict[str, OptionValue]], ...] = (
    ("bf16", {}),
    ("lynx", {"reading": "full"}),
    ("lynx", {"reading": "anchor"}),
    ("quantspec", {"reading": 8}),
    ("quantspec", {"reading": 4}),
    ("hack", {"bits": 4, "partition": 64}),
    ("hack", {"bits": 2, "partition": 64}),
    ("hack", {"bits": 2, "partition": 16}),
    ("mosaickv", {}),
    ("mosaickv", {"rate": 87.5}),
    # A quarter of the elements, the same of all vectors or each vector's own (MosaicKV, Fig. 9).
    ("mosaickv", {"rate": 0, "dropped": 75}),
    ("mosaickv", {"rate": 75, "group": 1}),
    ("mosaickv", {"dropped": 25}),  # as in the paper
)
"""Formats, with options."""

STEPS = 16
"""So many newest tokens have queries."""


class Measurement(msgspec.Struct):
    """One line of the comparison."""

    format: str
    options: str  # as in `kv_residency_options` of `--cache-rank-config`
    bytes: float  # of K and V of a token in one layer and KV head, all that grows with tokens
    bits: float  # of an element of them
    quality: Quality


class Comparison(msgspec.Struct):
    """All formats on one sample; `formats.json`."""

    command: str
    machine: dict[str, Any]
    source: str  # description of the sample
    steps: int  # the newest tokens, whose queries there are
    budget: int  # k
    measurements: list[Measurement]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("compare_formats", __doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT",
        help="default: %(default)s")  # fmt: skip
    add("--recording", type=Path, metavar="FOLDER", help="compare on a recorded sequence")
    add("--budget", type=int, default=256, help="k, tokens selected of each KV head")
    add("--out", type=Path, metavar="FOLDER", default=Path("results/formats"))
    return parser.parse_args(argv)


def config_for(sample: Recorded, budget: int) -> CacheRankConfig:
    """The configuration of a cache rank that holds the sample as it came."""
    layers, kv_heads, tokens, head_dim = sample.keys.shape
    (dtype,) = (name for name, dtype in DTYPES.items() if dtype == sample.keys.dtype)
    model = ModelShape(layers, sample.queries.shape[2], kv_heads, head_dim, dtype, head_dim**-0.5)
    config = explained(CacheRankConfig)(
        model, layers_per_group=layers, sparse_budget=budget, kv_residency="bf16", max_rows=1
    )
    candidates = len(config.candidates_after(sample.prompt - 1))
    if sample.prompt <= PAGE_TOKENS or candidates <= budget:
        raise UsageError(f"{tokens} tokens are too few: compare on more, or with a smaller budget")
    return config


def measure(sample: Recorded, base: CacheRankConfig, name: str, options: Any) -> Measurement:
    """Hold the sample in a format as a cache rank would, and compare.

    All but the tokens with queries are loaded at once; these are appended one by one.
    """
    config = msgspec.structs.replace(base, kv_residency=name, kv_residency_options=options)
    held = _Held(sample, config)
    scores = [held.step(position) for position in sample.positions]
    first_alone = options.get("reading") in ("anchor", 4)
    read = read_first_bits(sample, config) if first_alone else held.read()
    quality = compare(sample, *read, scores, config)
    model = config.model
    of_head = bytes_per_token(config) / (model.layers * model.kv_heads)
    title = ",".join(f"{option}={value}" for option, value in options.items())
    return Measurement(name, title, of_head, 8 * of_head / (2 * model.head_dim), quality)


def read_first_bits(sample: Recorded, config: CacheRankConfig) -> tuple[Tensor, Tensor]:
    """All keys and values by the first 4 bits of their codes; the newest are held as they came."""
    kind = FORMATS[config.kv_residency]
    assert issubclass(kind, CodedResidency)
    group = kind.group_tokens
    coded = (sample.tokens // group - kind.full_groups) * group

    def read(codec: Codec, tokens: Tensor) -> Tensor:
        codes: Any = codec.encode(tokens[:, :, :coded].unflatten(2, (-1, group)))
        if isinstance(codec, lynx.LynxCodec):
            first = lynx.decode_tokens(lynx.align(codes), codec.alpha, full=False)
        else:
            first = quantspec.decode(codes, bits=4)
        return torch.cat((first.flatten(2, 3).to(tokens.dtype), tokens[:, :, coded:]), dim=2)

    keys, values = map(read, kind.codecs(config), (sample.keys, sample.values))
    return keys, values


class _Held:
    """A sample in a residency, driven as the selector drives it."""

    def __init__(self, sample: Recorded, config: CacheRankConfig) -> None:
        model, device = config.model, sample.keys.device
        self._sample, self._layers = sample, range(model.layers)
        pages = -(-sample.tokens // PAGE_TOKENS)
        self._residency = residency.create(config, pages, device)
        self._pages = torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0)
        ring = (1, model.layers, model.query_heads, 2, model.head_dim)
        self._query_ring = torch.zeros(ring, dtype=model.torch_dtype, device=device)
        self._residency.load(Shipment.of_one(sample.shipment(), self._pages[0].cpu()))

    def step(self, position: int) -> Tensor:
        """Append the token, and score by its query: (layers, Hkv, position + 1) float32."""
        sample, rows = self._sample, self._batch_metadata(position)
        query = sample.queries[position - sample.prompt]
        up = torch.cat((query, sample.keys[:, :, position], sample.values[:, :, position]), dim=1)
        self._residency.append(rows, self._layers, up.unsqueeze(0), self._query_ring)
        scores = self._residency.score(rows, self._layers, query.float().unsqueeze(0))
        return scores[0, ..., : position + 1].clone()

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values: (layers, Hkv, tokens, D) each, in the pool's dtype."""
        positions = torch.arange(self._sample.tokens, device=self._pages.device)
        rows = self._batch_metadata(self._sample.tokens - 1)
        return self._residency.read(
            rows, self._layers, positions.expand(self._sample.keys.shape[:3])
        )

    def _batch_metadata(self, position: int) -> BatchMetadata:
        slots = torch.zeros(1, dtype=torch.int32, device=self._pages.device)
        header = slots.new_zeros((1, len(AnswerHeader._fields)), dtype=torch.int64)
        positions, counts = torch.full_like(slots, position), torch.ones_like(slots)
        rows = PagedRows(self._pages, slots, positions)
        return BatchMetadata(rows, counts, counts, header, position + 1, [(0, position)])


def markdown(found: Comparison) -> str:
    parts = [
        "# Residency formats",
        provenance([found.command], found.machine),
        f"Data: {found.source}. Selection: k = {found.budget}, by the true queries of the newest "
        f"{found.steps} tokens. Bytes are in one layer and KV head; errors are vNMSE.",
        table_of(map(_cells, found.measurements)),
    ]
    return "\n\n".join(parts)


def _cells(m: Measurement) -> dict[str, str]:
    quality = m.quality
    errors = {
        "K": quality.key_error,
        "V": quality.value_error,
        "attention output": quality.output_error,
        "scores": quality.score_error,
    }
    return {
        "format": m.format,
        "options": m.options,
        "bytes a token": number(m.bytes, 1),
        "bits": number(m.bits, 3),
        **{name: "–" if error is None else f"{error:.1e}" for name, error in errors.items()},
        "recall": number(quality.recall, 3),
        "attention mass": number(quality.attention_mass, 3),
    }


@torch.no_grad()
def main(argv: Sequence[str], **shape: Any) -> int:
    """Run; the exit status. `shape` is that of the synthetic sample."""
    options = parse_options(argv)
    if options.recording:
        _, sequences = read_recording(options.recording)
        sample = max(sequences, key=lambda recorded: recorded.tokens)
        sample = sample._replace(queries=sample.queries[-STEPS:])
    else:
        sample = synthetic_sample(**shape)
    sample = Recorded(*(part.to(options.device) for part in sample))
    config = config_for(sample, options.budget)
    layers, kv_heads, tokens, head_dim = sample.keys.shape
    source = "recording" if options.recording else "synthetic, outlier channels"
    chosen = [variant for variant in VARIANTS if variant[0] in options.formats]
    comparison = Comparison(
        command=command_line("compare_formats", argv),
        machine=describe(visible_gpus() if options.device == "cuda" else []),
        source=f"{source}: {layers} layers, {kv_heads} KV heads of {head_dim}, {tokens} tokens, "
        f"{config.model.dtype}",
        steps=len(sample.queries),
        budget=options.budget,
        measurements=[measure(sample, config, *one) for one in tqdm(chosen, desc="formats")],
    )
    text = markdown(comparison)
    print(text, *write_report(options.out, "formats", comparison, text), sep="\n")
    return 0


if __name__ == "__main__":
    run(main)

"""Draw what a running server measured.

    python -m scripts.plot recall --base-url http://127.0.0.1:30000 [--output results/recall]
    python -m scripts.plot recall --file server_info.json

`recall` draws the state that `/server_info` shows, of whatever model is served: recall, attention
mass and query cosine as maps of layers and heads, and the overlap of what queries select by the
distance between them (AsyncSpade Fig. 4). It writes PNG and SVG, and beside them `recall.json`,
which `--file` reads too. What the figures mean: docs/recall.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import requests
from numpy.typing import NDArray

SETTINGS = (
    *("model_path", "kv_residency", "query_predictor", "query_frame", "query_window"),
    *("sparse_budget", "selection_margin", "sink_tokens", "recent_tokens", "recall_interval"),
)
"""Of the server, kept beside what was measured with them."""

MAPS = {
    "recall": ("recall", "KV head"),
    "attention_mass": ("attention mass", "KV head"),
    "query_cosine": ("cosine of prediction and query", "query head"),
}
MOST_NUMBERS = 16
"""Cells of a map into which their values are written."""


class NothingMeasuredError(ValueError):
    """The server has no measurement of recall."""


def read_state(base_url: str | None, file: Path | None) -> dict[str, Any]:
    """Settings and measurements of a server: what `recall.json` holds.

    Args:
        base_url: of a running server, or None.
        file: otherwise, a saved `/server_info` or a `recall.json`.

    Raises:
        NothingMeasuredError: the server has not measured anything; says what may be the reason.
    """
    if base_url is not None:
        response = requests.get(f"{base_url.rstrip('/')}/server_info", timeout=30)
        response.raise_for_status()
        info = response.json()
    else:
        assert file is not None
        info = json.loads(file.read_text())
    if "settings" in info:
        return {"settings": info["settings"], "measured": info["measured"]}
    state = info["internal_states"][0].get("cache_rank")
    if state is None:
        raise NothingMeasuredError("the server has no cache rank: start it with one")
    if state["recall_by_head"] is None:
        raise NothingMeasuredError(
            "nothing was measured: that takes --recall-interval above 0, and requests that decode "
            "past --sparse-threshold for some multiples of it"
        )
    settings = {name: info.get(name) for name in SETTINGS}
    return {"settings": settings, "measured": state["recall_by_head"]}


def write_plots(state: dict[str, Any], output: Path) -> list[Path]:
    """Write figures and `recall.json` into a folder; the files."""
    output.mkdir(parents=True, exist_ok=True)
    data = output / "recall.json"
    data.write_text(json.dumps(state, indent=1) + "\n")
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "recall"  # the same state gives the same file
    files = [data]
    for name, draw in (("recall-heads", draw_heads), ("recall-overlap", draw_overlap)):
        figure = draw(state["measured"])
        figure.suptitle(title_of(state), fontsize=9)
        for suffix, metadata in ((".png", {}), (".svg", {"Date": None})):
            files.append((output / name).with_suffix(suffix))
            figure.savefig(files[-1], dpi=150, metadata=metadata)
        importlib.import_module("matplotlib.pyplot").close(figure)
    return files


def title_of(state: dict[str, Any]) -> str:
    """What was measured, and how often."""
    settings, measured = state["settings"], state["measured"]
    counts = measured["measurements"]
    times = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return (
        f"{Path(settings['model_path']).name}, k = {settings['sparse_budget']}, "
        f"{settings['query_predictor']} ({settings['query_frame']}), "
        f"{settings['kv_residency']}; {times} measurements of each layer"
    )


def draw_heads(measured: dict[str, Any]) -> Any:
    """Maps of layers and heads, all on one scale."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    values = {name: np.asarray(measured[name]) for name in MAPS}
    layers = measured["layers"]
    widths = [value.shape[1] ** 0.5 for value in values.values()]
    figure, panels = pyplot.subplots(
        *(1, len(MAPS)),
        figsize=(10, 2.4 + 0.15 * len(layers)),
        width_ratios=widths,
        layout="constrained",
    )
    for axes, (name, value) in zip(panels, values.items(), strict=True):
        title, heads = MAPS[name]
        image = axes.imshow(value, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        axes.set_title(f"{title}, mean {value.mean():.3f}", fontsize=9)
        axes.set_xlabel(heads)
        shown = range(0, len(layers), -(-len(layers) // 12))
        axes.set_yticks(list(shown), [str(layers[index]) for index in shown])
        axes.xaxis.get_major_locator().set_params(integer=True)
        if value.size <= MOST_NUMBERS:
            _write_numbers(axes, value)
    panels[0].set_ylabel("layer")
    below = any(value.min() < 0 for value in values.values())
    figure.colorbar(image, ax=panels, extend="min" if below else "neither")
    return figure


def _write_numbers(axes: Any, values: NDArray[Any]) -> None:
    for (row, column), value in np.ndenumerate(values):
        colour = "black" if value > 0.6 else "white"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)


def draw_overlap(measured: dict[str, Any]) -> Any:
    """Overlap by distance: a line for each layer, their mean, and that of the prediction."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    overlap = {int(distance): values for distance, values in measured["overlap"].items()}
    distances = sorted(overlap)
    # (distances, layers): means over heads, which are as many in every layer
    by_layer = np.asarray([overlap[distance] for distance in distances]).mean(-1)
    layers = measured["layers"]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    colours = pyplot.get_cmap("viridis")
    if len(layers) > 1:
        for index, layer in enumerate(layers):
            share = index / (len(layers) - 1)
            label = f"layer {layer}" if index in (0, len(layers) - 1) else None
            axes.plot(distances, by_layer[:, index], color=colours(share), lw=0.8, label=label)
    axes.plot(distances, by_layer.mean(-1), "o-", color="black", label="mean of all layers")
    prediction = float(np.mean(measured["prediction_overlap"]))
    axes.axhline(prediction, color="#D55E00", ls="--", label="by the prediction, mean")
    axes.set_xscale("log", base=2)
    axes.set_xticks(distances, [str(distance) for distance in distances])
    axes.set_ylim(0, 1)
    axes.set_xlabel("decode steps between two queries")
    axes.set_ylabel("share of the k tokens that both select")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    recall = commands.add_parser("recall", help="how good selections were, by layer and head")
    source = recall.add_mutually_exclusive_group(required=True)
    source.add_argument("--base-url", help="of a running server")
    source.add_argument("--file", type=Path, help="a saved /server_info, or a recall.json")
    recall.add_argument("--output", type=Path, default=Path("results/recall"), help="a folder")
    options = parser.parse_args(arguments)
    try:
        state = read_state(options.base_url, options.file)
    except NothingMeasuredError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in write_plots(state, options.output):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws what a running server measured of its selections: docs/recall.md says what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.shared import plots
from scripts.shared.serving import Client, cache_rank_state

SETTINGS = (
    *("model_path", "kv_residency", "query_predictor", "query_window"),
    *("sparse_budget", "hysteresis", "sink_tokens", "recent_tokens", "recall_interval"),
)
"""These settings of the server are kept beside what was measured with them."""

MAPS = {
    "recall": ("recall", "KV head"),
    "attention_mass": ("attention mass", "KV head"),
    "query_cosine": ("cosine of prediction and query", "query head"),
}
HELD_MAPS = {
    "held_recall": ("recall by held keys", "KV head"),
    "held_attention_mass": ("attention mass by held keys", "KV head"),
    "query_cosine": MAPS["query_cosine"],
}
"""These maps are drawn where nobody has the keys as they came."""
MOST_NUMBERS = 16
"""The values of a map are written into its cells if it has no more than these."""


class NothingMeasuredError(ValueError):
    """The server has no measurement of recall."""


def read_state(base_url: str | None, file: Path | None) -> dict[str, Any]:
    """Settings and measurements of a server: what `recall.json` holds.

    Args:
        base_url: address of a running server, or None.
        file: otherwise, a saved `/server_info` or a `recall.json`.

    Raises:
        NothingMeasuredError: the server has not measured anything; says what may be the reason.
    """
    if base_url is not None:
        info = Client(base_url).read("/server_info")
    else:
        assert file is not None
        info = json.loads(file.read_text())
    if "settings" in info:
        return {"settings": info["settings"], "measured": info["measured"]}
    state = cache_rank_state(info)
    if not state:
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
    files = [data]
    for name, draw in (("recall-heads", draw_heads), ("recall-overlap", draw_overlap)):
        figure = draw(state["measured"])
        figure.suptitle(title_of(state), fontsize=9)
        files += plots.save(figure, output / name)
    return files


def title_of(state: dict[str, Any]) -> str:
    """What was measured, and how often."""
    settings, measured = state["settings"], state["measured"]
    counts = measured["measurements"]
    times = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return (
        f"{Path(settings['model_path']).name}, k = {settings['sparse_budget']}, "
        f"{settings['query_predictor']}, "
        f"{settings['kv_residency']}; {times} measurements of each layer"
    )


def draw_heads(measured: dict[str, Any]) -> Any:
    """Maps of layers and heads, all on one scale."""
    maps = MAPS if "recall" in measured else HELD_MAPS
    values = {name: np.asarray(measured[name]) for name in maps}
    layers = measured["layers"]
    widths = [value.shape[1] ** 0.5 for value in values.values()]
    size = (10, 2.4 + 0.15 * len(layers))
    figure, panels = plots.panels(len(maps), size, width_ratios=widths)
    for axes, (name, value) in zip(panels, values.items(), strict=True):
        title, heads = maps[name]
        image = axes.imshow(value, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        axes.set_title(f"{title}, mean {value.mean():.3f}", fontsize=9)
        axes.set_xlabel(heads)
        shown = range(0, len(layers), -(-len(layers) // 12))
        axes.set_yticks(list(shown), [str(layers[index]) for index in shown])
        axes.xaxis.get_major_locator().set_params(integer=True)
        for (row, column), number in np.ndenumerate(value if value.size <= MOST_NUMBERS else []):
            colour = "black" if number > 0.6 else "white"
            place = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(column, row, f"{number:.2f}", color=colour, **place)
    panels[0].set_ylabel("layer")
    below = any(value.min() < 0 for value in values.values())
    figure.colorbar(image, ax=panels, extend="min" if below else "neither")
    return figure


def draw_overlap(measured: dict[str, Any]) -> Any:
    """The overlap by distance: a line for each layer, their mean, and that of the prediction."""
    overlap = {int(distance): values for distance, values in measured["overlap"].items()}
    distances = sorted(overlap)
    # (distances, layers): means over heads, which are as many in every layer
    by_layer = np.asarray([overlap[distance] for distance in distances]).mean(-1)
    layers = measured["layers"]
    figure, (axes,) = plots.panels(1, (6, 4))
    colours = plots.colour_map("viridis")
    if len(layers) > 1:
        for index, layer in enumerate(layers):
            share = index / (len(layers) - 1)
            label = f"layer {layer}" if index in (0, len(layers) - 1) else None
            axes.plot(distances, by_layer[:, index], color=colours(share), lw=0.8, label=label)
    axes.plot(distances, by_layer.mean(-1), "o-", color="black", label="mean of all layers")
    prediction = float(np.mean(measured["prediction_overlap"]))
    axes.axhline(prediction, color=plots.COLOURS[5], ls="--", label="by the prediction, mean")
    axes.set_xscale("log", base=2)
    axes.set_xticks(distances, [str(distance) for distance in distances])
    axes.set_ylim(0, 1)
    shared = "share of the k tokens that both select"
    plots.label(axes, x="decode steps between two queries", y=shared)
    axes.legend(frameon=False, fontsize=8)
    return figure

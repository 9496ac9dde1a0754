"""Draws the figures of `tools/bench peers`: `PYTHON plot.py FIGURES.json PLOT.svg`."""

from __future__ import annotations

import json
import sys

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANELS = {
    "cold_s": "first token, cold, s",
    "restart_s": "first token after kill -9, s",
    "rate": "reply, tokens/s, one request",
    "together": "reply, tokens/s, five requests",
}
TIMES = ("cold_s", "restart_s")


def draw(axes: Axes, title: str, cases: dict[str, dict[str, float]], peers: list[str], *, logarithmic: bool) -> None:
    """`cases` are, for each bar of a peer, the numbers of the peers."""
    width = 0.8 / max(1, len(cases))
    for i, (case, of_case) in enumerate(cases.items()):
        places = [peers.index(peer) + (i - (len(cases) - 1) / 2) * width for peer in of_case]
        bars = axes.barh(places, list(of_case.values()), height=width * 0.9, label=case)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axes.set_yticks(range(len(peers)), peers, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    if logarithmic:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        models: dict[str, dict[str, dict[str, dict[str, float]]]] = json.load(file)
    figure = Figure(figsize=(6 * len(models), 2.6 * len(PANELS)), layout="constrained")
    grid = figure.subplots(len(PANELS), len(models), squeeze=False)
    for column, (model, panels) in enumerate(models.items()):
        peers = list(dict.fromkeys(peer for cases in panels.values() for of in cases.values() for peer in of))
        for row, (name, title) in enumerate(PANELS.items()):
            axes = grid[row][column]
            draw(axes, f"{model}: {title}", panels.get(name, {}), peers, logarithmic=name in TIMES)
    figure.savefig(sys.argv[2], metadata={"Date": None})


main()

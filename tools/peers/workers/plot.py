"""Draws what `tools/bench peers --json` printed: `PYTHON plot.py REPORT.json PLOT.svg`."""

from __future__ import annotations

import json
import sys
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANELS = (
    ("cold_s", "first token, cold, s"),
    ("restart_s", "first token after kill -9, s"),
    ("rate", "reply, tokens/s, one request"),
    ("together", "reply, tokens/s, five requests"),
)


def draw(axes: Axes, title: str, figures: dict[str, dict[str, float]]) -> None:
    """`figures` are, for each bar of a peer, the numbers of the peers."""
    peers = list(dict.fromkeys(peer for of_case in figures.values() for peer in of_case))
    width = 0.8 / max(1, len(figures))
    for i, (case, of_case) in enumerate(figures.items()):
        places = [peers.index(peer) + (i - (len(figures) - 1) / 2) * width for peer in of_case]
        bars = axes.barh(places, list(of_case.values()), height=width * 0.9, label=case)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axes.set_yticks(range(len(peers)), peers)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    if len(figures) > 1:
        axes.legend(fontsize=7, frameon=False)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        report: dict[str, Any] = json.load(file)
    figure = Figure(figsize=(11, 2.6 * len(PANELS) / 2 + 1), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        draw(axes, title, report["plot"][name])
    figure.suptitle(f"{report['model']}, {report['machine']['cpus']} cores", fontsize=11)
    figure.savefig(sys.argv[2], metadata={"Date": None})


main()

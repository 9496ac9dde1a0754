"""The plot of `tools/bench policy windows`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.research.policy_runs import Row


def draw_windows(rows: Sequence[Row], path: Path) -> None:
    """Hits and restored share against N: a column for each workload, a curve for each rule."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    styles = {"sliceable": ("tab:blue", "o-"), "checkpoints": ("tab:orange", "s-"), "whole-snapshots": ("grey", "^:")}
    names = list(dict.fromkeys(row["workload"] for row in rows))
    with matplotlib.rc_context({"svg.hashsalt": "diskprefix", "font.size": 9.0}):
        figure = Figure((3.0 * len(names), 5.0), layout="constrained")
        panels = figure.subplots(2, len(names), sharex=True, sharey=True, squeeze=False)
        for column, name in enumerate(names):
            for panel, key in zip(panels[:, column], ("hits", "restored"), strict=True):
                for rule, (color, style) in styles.items():
                    curve = [row for row in rows if (row["workload"], row["rule"]) == (name, rule)]
                    xs, ys = [row["N"] for row in curve], [row[key] for row in curve]
                    panel.plot(xs, ys, style, color=color, markersize=4, label=rule)
                panel.set_xscale("log", base=2)
                panel.set_xticks(xs, [str(x) for x in xs])
                panel.xaxis.set_minor_locator(NullLocator())
                panel.grid(alpha=0.3)
            panels[0][column].set_title(name)
            panels[1][column].set_xlabel("N of auto:N")
        panels[0][0].set_ylabel("requests with a hit, %")
        panels[1][0].set_ylabel("restored prompt tokens, %")
        panels[0][0].set_ylim(-3, 103)
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=120, metadata=metadata)

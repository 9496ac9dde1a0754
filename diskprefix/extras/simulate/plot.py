"""The plot of `diskprefix simulate`: the restored share of each policy against its written bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskprefix.errors import SettingsError
from diskprefix.extras.simulate.comparison import UPPER_BOUND, Row
from diskprefix.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHAPES = "osD^v<>phX"


def check_plot(path: Path) -> None:
    """Raises `SettingsError` if the plot cannot be drawn or written. Call it before a long simulation."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise SettingsError(f"--plot: {path} must end in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"--plot: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib; install it with: pip install matplotlib")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the restored share against the written bytes, to the file `path`. Raises `OSError`.

    There is a panel for each trace and regime, a curve for each policy, and a point for each budget. A policy file is a
    star. Rows that wrote nothing are left out.
    """
    import matplotlib
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row.trace for row in rows))
    regimes = list(dict.fromkeys(row.case.regime for row in rows))
    labels = dict.fromkeys(row.case.label for row in rows if row.case.scope != "off")
    colors = dict(zip(labels, cycle(colormaps["tab10"].colors), strict=False))  # type: ignore[attr-defined]
    budgets = sorted(
        {row.case.policy.budget_bytes for row in rows if not row.case.preset},
        key=lambda budget: budget or math.inf,
        reverse=True,
    )
    shapes = dict(zip(budgets, cycle(_SHAPES), strict=False))
    # The same figure gives the same file, byte for byte.
    with matplotlib.rc_context({"svg.hashsalt": "diskprefix", "font.size": 9.0}):
        figure = Figure((5.2 * len(regimes) + 2.2, 4.0 * len(traces)), layout="constrained")
        panels = figure.subplots(len(traces), len(regimes), squeeze=False)
        for trace, across in zip(traces, panels, strict=True):
            for regime, panel in zip(regimes, across, strict=True):
                shown = [row for row in rows if (row.trace, row.case.regime) == (trace, regime)]
                _draw_panel(panel, shown, colors, shapes)
                panel.set_title(f"{trace}, {regime}", parse_math=False)
        for budget, shape in shapes.items():
            name = "no limit" if budget is None else f"budget {_short_size(budget)}"
            panels[0][0].plot([], [], shape, color="grey", label=name)
        # Every panel has every label.
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=120, metadata=metadata)


def _draw_panel(panel: Axes, rows: Sequence[Row], colors: Mapping[str, Any], shapes: Mapping[int | None, str]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_xscale("log", base=2)
    for label, color in colors.items():
        style: Any = {"color": color, "linestyle": "--" if label == UPPER_BOUND else "-", "label": label}
        curve = [row for row in rows if row.case.label == label and (row.totals.written_bytes or label == UPPER_BOUND)]
        curve.sort(key=lambda row: row.case.policy.budget_bytes or math.inf)
        written = [row.totals.written_bytes for row in curve]
        restored = [100 * row.totals.restored_share for row in curve]
        if label == UPPER_BOUND:
            panel.axhline(restored[0], **style)
        elif curve and curve[0].case.preset:
            panel.plot(written, restored, "*", **style | {"linestyle": ""})
        else:
            panel.plot(written, restored, **style)
            for row, x, y in zip(curve, written, restored, strict=True):
                panel.plot([x], [y], shapes[row.case.policy.budget_bytes], color=color)
    powers = [
        math.log2(row.totals.written_bytes)
        for row in rows
        if row.totals.written_bytes and row.case.label != UPPER_BOUND
    ]
    if powers:
        # From one whole power of two to another, so that the axis has at least two ticks.
        low, high = math.floor(min(powers)), math.ceil(max(powers))
        panel.set_xlim(2.0 ** (low - 0.1), 2.0 ** (max(high, low + 1) + 0.1))
    panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
    panel.xaxis.set_major_formatter(lambda value, _position: _short_size(value))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("bytes written")
    panel.set_ylabel("restored prompt tokens, %")
    panel.set_ylim(0, 100)
    panel.grid(alpha=0.3)


def _short_size(num_bytes: float) -> str:
    return format_size(num_bytes).replace(".0 ", " ")

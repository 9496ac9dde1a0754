"""The plot of `diskprefix simulate`: what each policy restores against what it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from diskprefix.errors import SettingsError
from diskprefix.policy.scope import parse_scope
from diskprefix.settings import format_size
from diskprefix.simulate.comparison import UPPER_BOUND, WHOLE_SNAPSHOTS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FORMATS = (".png", ".svg")

_PANEL_INCHES = 5.2, 4.0
_LEGEND_INCHES = 2.2
_GREY = "#808080"
_OTHER_COLORS = "tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:cyan"
_STYLES: dict[str, Literal["--", ":"]] = {UPPER_BOUND: "--", WHOLE_SNAPSHOTS: ":"}
_SHAPES = "osD^v<>phX"
_PRESET_SHAPES, _PRESET_SIZE = "Dos^v<>p", 12.0
"""These are hollow and large, so that a point under one stays visible."""
_MOST_TICKS = 8
_MARGIN = 0.1
"""The room beside the outermost ticks, as a power of two."""


def require_matplotlib() -> None:
    """Raises a `SettingsError` that says how to install it."""
    if find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib; install it with: pip install matplotlib", param="--plot")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the restored share against the bytes written to `path`. Raises `OSError`.

    There is a panel for each trace and regime, a curve for each policy and a point for each budget. A policy file has a
    hollow point of its own. Rows that wrote nothing are left out. The same rows give the same file, byte for byte.
    """
    import matplotlib
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row.trace for row in rows))
    regimes = list(dict.fromkeys(row.regime for row in rows))
    colors = _colors(list(dict.fromkeys(row.label for row in rows)))
    names = dict.fromkeys(row.label for row in rows if row.policy)
    presets = {name: _PRESET_SHAPES[index % len(_PRESET_SHAPES)] for index, name in enumerate(names)}
    budgets = sorted({row.budget_bytes for row in rows if not row.policy}, key=_size_of, reverse=True)
    shapes = {budget: _SHAPES[index % len(_SHAPES)] for index, budget in enumerate(budgets)}
    width, height = _PANEL_INCHES
    with matplotlib.rc_context({"svg.hashsalt": "diskprefix", "font.size": 9.0}):
        figure = Figure((width * len(regimes) + _LEGEND_INCHES, height * len(traces)), layout="constrained")
        panels = figure.subplots(len(traces), len(regimes), squeeze=False)
        for trace, across in zip(traces, panels, strict=True):
            for regime, panel in zip(regimes, across, strict=True):
                here = [row for row in rows if (row.trace, row.regime) == (trace, regime)]
                _draw_panel(panel, here, colors, shapes, presets)
                panel.set_title(f"{trace}, {regime}", parse_math=False)
        figure.legend(handles=_legend(colors, shapes, presets), loc="outside right upper", frameon=False)
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=120, metadata=metadata)


def _colors(labels: Sequence[str]) -> dict[str, Any]:
    """Returns shades from dark to light for the windows of `auto`, and a colour of its own for each other label."""
    from matplotlib import colormaps

    def window(label: str) -> int:
        return parse_scope(label, param="scope").value

    autos = sorted((label for label in labels if label.startswith("auto:")), key=window)
    shades, others = colormaps["viridis"], cycle(_OTHER_COLORS)
    by_label: dict[str, Any] = {WHOLE_SNAPSHOTS: _GREY, UPPER_BOUND: _GREY}
    by_label |= {label: shades(0.85 * index / max(len(autos) - 1, 1)) for index, label in enumerate(autos)}
    return {label: by_label[label] if label in by_label else next(others) for label in labels if label != "off"}


def _draw_panel(
    panel: Axes,
    rows: Sequence[Row],
    colors: Mapping[str, Any],
    shapes: Mapping[int | None, str],
    presets: Mapping[str, str],
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    all_written = [row.written_bytes for row in rows if row.written_bytes and row.label != UPPER_BOUND]
    for label, color in colors.items():
        curve = [row for row in rows if row.label == label and (row.written_bytes or label == UPPER_BOUND)]
        curve.sort(key=lambda row: _size_of(row.budget_bytes))
        written, restored = [row.written_bytes for row in curve], [100 * row.restored_share for row in curve]
        if label == UPPER_BOUND:
            for height in restored:
                panel.axhline(height, color=color, linestyle=_STYLES[label])
            continue
        panel.plot(written, restored, color=color, linestyle=_STYLES.get(label, "-"))
        for row, x, y in zip(curve, written, restored, strict=True):
            if row.policy:
                panel.plot([x], [y], presets[label], color=color, markerfacecolor="none", markersize=_PRESET_SIZE)
            else:
                panel.plot([x], [y], shapes[row.budget_bytes], color=color)
    if all_written:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(LogLocator(base=2, numticks=_MOST_TICKS))
        panel.set_xlim(*_between_powers(min(all_written), max(all_written)))
    panel.xaxis.set_major_formatter(lambda value, _position: _short_size(value))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("bytes written")
    panel.set_ylabel("restored prompt tokens, %")
    panel.set_ylim(0, 100)
    panel.grid(alpha=0.3)


def _between_powers(least: int, most: int) -> tuple[float, float]:
    """Returns limits of the axis: the powers of two around both, at least two of them, with room beside the points."""
    low, high = math.floor(math.log2(least)), math.ceil(math.log2(most))
    return 2.0 ** (low - _MARGIN), 2.0 ** (max(high, low + 1) + _MARGIN)


def _legend(colors: Mapping[str, Any], shapes: Mapping[int | None, str], presets: Mapping[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D

    curves = [
        Line2D([], [], color=color, linestyle="", marker=presets[name], markerfacecolor="none", label=name)
        if name in presets
        else Line2D([], [], color=color, linestyle=_STYLES.get(name, "-"), label=name)
        for name, color in colors.items()
    ]
    points = [
        Line2D([], [], color=_GREY, linestyle="", marker=shape, label=_budget_text(budget))
        for budget, shape in shapes.items()
    ]
    return [*curves, *points]


def _size_of(budget_bytes: int | None) -> float:
    return math.inf if budget_bytes is None else budget_bytes


def _budget_text(budget_bytes: int | None) -> str:
    return "no limit" if budget_bytes is None else f"budget {_short_size(budget_bytes)}"


def _short_size(num_bytes: float) -> str:
    return format_size(num_bytes).replace(".0 ", " ")

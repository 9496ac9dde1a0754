"""How well the policies choose, by simulation: `tools/bench policy COMMAND --data DIR`.

Workloads are those of `workloads.py`, whose data lie in folders below DIR, and those of the project's own generators,
which need none. Tables are Markdown; shares are of all prompt tokens, in percent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from diskprefix.cli.simulate_plot import PLOT_FORMATS, require_matplotlib
from diskprefix.policy.admission import AdmissionFilter
from diskprefix.policy.history import History
from diskprefix.policy.scope import MAX_VALUE, Scope, parse_scope
from diskprefix.settings import find_policy, parse_duration, parse_size, read_policy
from diskprefix.simulate.baselines import upper_bound, whole_snapshots
from diskprefix.simulate.comparison import REGIMES, Regime
from diskprefix.simulate.geometry import CHECKPOINTS, SLICEABLE, Geometry
from diskprefix.simulate.simulator import Policy, Simulator, Totals, simulate
from diskprefix.simulate.store import Rank
from diskprefix.simulate.synthetic import CATALOG, interleaved, one_off
from diskprefix.simulate.trace import Trace, TraceRequest
from diskprefix.store.eviction import UsageTable, scores
from diskprefix.store.schema import HISTORY_TOKENS
from diskprefix.tokens import TokenIds
from tools.measuring.options import DATA, JSON
from tools.research import workloads

Row: TypeAlias = dict[str, Any]

REAL = ("mooncake", "weka-claude-code", "tau-bench", "openhands-mock", "bfcl", "big-bench-hard")
BATCHES = "interleaved-and-batches"
OWN = (*CATALOG, BATCHES)
AGENTS = ("weka-claude-code", "tau-bench")
"""Append-only agents, interleaved: more is asked for there."""
SHAPES = ("shared-anchor", "interleaved", "retrieval", "moving-reminder")
GEOMETRIES: dict[Regime, Geometry] = {"sliceable": SLICEABLE, "checkpoints": CHECKPOINTS}
FULL, AUTO = Scope("full"), parse_scope("auto:30", param="scope")
WINDOWS = (2, 4, 8, 16, 30, 60, 100)
SHARES = (0.01, 0.05, 0.2, 1.0)
LEAST_BUDGET = 128 << 20
"""In less than this not a dozen prompts fit, and none of the ranks matters."""


def open_workload(name: str, data: Path, num_requests: int = 1000) -> Trace:
    """A published workload, or one of our own of `num_requests`."""
    if name == BATCHES:
        return interleaved_and_batches(num_requests)
    return CATALOG[name](num_requests=num_requests) if name in CATALOG else workloads.open_workload(name, data)


def interleaved_and_batches(num_requests: int) -> Trace:
    """Conversations, and among them now and then fifty prompts in ten seconds that never come again."""
    batch, step = 50, 150
    talk = list(interleaved(num_requests=num_requests * step // (step + batch)))
    batches = list(one_off(seed=5, num_requests=num_requests - len(talk)))
    for index, request in enumerate(batches):
        begin = talk[min(step // 2 + step * (index // batch), len(talk) - 1)].when
        batches[index] = replace(request, when=begin + 0.2 * (index % batch))
    return Trace.of(BATCHES, sorted(chain(talk, batches), key=lambda request: request.when))


# The goals: restored and written shares against the bound and against whole snapshots.


def goals(trace: Trace) -> Row:
    """One workload in both regimes, without a budget."""
    bound = upper_bound(trace, Policy(scope=FULL), SLICEABLE)
    full = simulate(trace, Policy(scope=FULL), SLICEABLE)
    auto = simulate(trace, Policy(scope=AUTO), SLICEABLE)
    plain = whole_snapshots(trace, Policy(scope=FULL), SLICEABLE)
    sparse = simulate(trace, Policy(scope=AUTO), CHECKPOINTS)
    sparse_full = simulate(trace, Policy(scope=FULL), CHECKPOINTS)
    goal = 0.97 if trace.name in AGENTS else 0.92
    of_full = auto.restored_tokens / max(full.restored_tokens, 1)
    written_of_full = auto.written_tokens / max(full.written_tokens, 1)
    times = sparse.restored_tokens / max(plain.restored_tokens, 1)
    return {
        "workload": trace.name,
        "requests": auto.requests,
        "Mtokens": auto.prompt_tokens / 1e6,
        "any rule": _percent(bound.restored_share),
        "full": _percent(full.restored_share),
        "full written": _percent(full.written_share),
        "auto:30": _percent(auto.restored_share),
        "of full": _percent(of_full),
        "goal": f"{_percent(goal)} {_met(of_full >= goal)}" if full.restored_tokens else "",
        "written": _percent(auto.written_share),
        "of full's": _percent(written_of_full),
        "goal ": f"50 {_met(written_of_full <= 0.5)}" if full.written_share > 0.2 else "",
        "whole snapshots": _percent(plain.restored_share),
        "their written": _percent(plain.written_share),
        "cp full": _percent(sparse_full.restored_share),
        "cp full GB": round(sparse_full.written_bytes / 1e9, 1),
        "cp auto:30": _percent(sparse.restored_share),
        "cp GB": round(sparse.written_bytes / 1e9, 1),
        "x whole": round(times, 1),
        "goal  ": f"12 {_met(times >= 12)}" if trace.name in AGENTS else "",
    }


# The sweep: eviction scores in little room.


def least_recently_used(table: UsageTable, _now: float) -> NDArray[np.float64]:
    used: NDArray[np.float64] = table.records["last_used"].astype(np.float64)
    return used


def density(table: UsageTable, _now: float) -> NDArray[np.float64]:
    """Seconds of prefill for each byte."""
    each: NDArray[np.float64] = table.records["prefill_s"] / np.maximum(table.records["stored_bytes"], 1.0)
    return each


def density_by_uses(table: UsageTable, now: float) -> NDArray[np.float64]:
    each: NDArray[np.float64] = density(table, now) * (1.0 + table.records["restores"])
    return each


RANKS: dict[str, Rank] = {
    "ours": scores,
    "LRU": least_recently_used,
    "density": density,
    "density x uses": density_by_uses,
}


def sweep(trace: Trace, regime: Regime, scope: Scope, shares: Sequence[float] = SHARES) -> Iterator[Row]:
    """Restored shares under each rank; a budget is a share of what the workload takes without one."""
    geometry = GEOMETRIES[regime]
    unlimited = simulate(trace, Policy(scope=scope), geometry)
    for share in shares:
        if (budget := budget_of(unlimited, share)) < LEAST_BUDGET:
            continue
        row: Row = {"workload": trace.name, "regime": regime, "scope": str(scope), "room": _percent(share)}
        for name, rank in RANKS.items():
            # What fits needs no rank.
            limited = replace(Policy(scope=scope, rank=rank), budget_bytes=budget if share < 1 else None)
            totals = unlimited if share == 1 else simulate(trace, limited, geometry)
            row[name] = _percent(totals.restored_share)
        row["ours - best of LRU, density"] = round(row["ours"] - max(row["LRU"], row["density"]), 1)
        yield row


def budget_of(unlimited: Totals, share: float) -> int:
    """The budget of which nodes may take `share` of what they took at most: inverse of `usable_bytes`."""
    return int((share * unlimited.peak_bytes + 2**20) / 0.9) + 16


# The window: what N does.


def windows(name: str, num_requests: int, sizes: Sequence[int] = WINDOWS) -> Iterator[Row]:
    trace = CATALOG[name](num_requests=num_requests)
    for window in sizes:
        scope = Scope("auto", window)
        runs: dict[str, Totals] = {
            regime: simulate(trace, Policy(scope=scope), geometry) for regime, geometry in GEOMETRIES.items()
        }
        runs["whole-snapshots"] = whole_snapshots(trace, Policy(scope=scope), SLICEABLE, window=window)
        for rule, totals in runs.items():
            yield {
                "workload": name,
                "N": window,
                "rule": rule,
                "hits": _percent(totals.hit_rate),
                "selected": round(totals.selected_tokens / totals.requests),
                "restored": _percent(totals.restored_share),
                "written": _percent(totals.written_share),
            }


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


# Robustness: a window that is not what it should be.

Disturb: TypeAlias = Callable[[list[TokenIds], TokenIds, np.random.Generator], list[TokenIds]]
"""From the window, newest first, and the prompt to another window."""


def shuffled(window: list[TokenIds], _prompt: TokenIds, random: np.random.Generator) -> list[TokenIds]:
    return [window[i] for i in random.permutation(len(window))]


def backwards(window: list[TokenIds], _prompt: TokenIds, _random: np.random.Generator) -> list[TokenIds]:
    return window[::-1]


def duplicated(window: list[TokenIds], _prompt: TokenIds, _random: np.random.Generator) -> list[TokenIds]:
    """Each prompt twice, so that half as many are left."""
    return [window[i // 2] for i in range(len(window))]


def hostile(window: list[TokenIds], prompt: TokenIds, random: np.random.Generator) -> list[TokenIds]:
    """Every second prompt is in truth the beginning of this one, this one with another end, or noise."""

    def made_up() -> TokenIds:
        at = int(random.integers(len(prompt) + 1))
        noise = random.integers(60_000, 70_000, len(prompt), dtype=np.int32)
        return [prompt[:at], np.concatenate([prompt[:at], noise[at:]]), noise][int(random.integers(3))]

    return [made_up() if i % 2 else ids for i, ids in enumerate(window)]


DISTURBED: dict[str, Disturb] = {
    "shuffled": shuffled,
    "backwards": backwards,
    "duplicated": duplicated,
    "hostile": hostile,
}


class _DisturbedHistory(History):
    """Hands out another window than it holds. `prompt` is the one that it is asked about."""

    def __init__(self, disturb: Disturb, seed: int) -> None:
        super().__init__(max_prompts=MAX_VALUE, max_tokens=HISTORY_TOKENS)
        self.prompt: TokenIds = np.empty(0, np.int32)
        self._disturb = disturb
        self._random = np.random.default_rng(seed)

    def recent(self, n: int, group: bytes = b"") -> tuple[TokenIds, ...]:
        return tuple(self._disturb(list(super().recent(n, group)), self.prompt, self._random))


class _DisturbedSimulator(Simulator):
    def __init__(self, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int) -> None:
        super().__init__(policy, geometry)
        self._histories: dict[str, _DisturbedHistory] = {}
        self._disturb, self._seed = disturb, seed

    def _memory(self, request: TraceRequest) -> tuple[History, AdmissionFilter]:
        _, admission = super()._memory(request)
        history = self._histories.setdefault(request.tenant, _DisturbedHistory(self._disturb, self._seed))
        history.prompt = request.prompt.token_ids
        return history, admission


def simulate_disturbed(trace: Trace, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int = 0) -> Totals:
    """As `simulate`, but selection sees the window through `disturb`."""
    simulator = _DisturbedSimulator(policy, geometry, disturb, seed)
    for request in trace:
        simulator.step(request)
    return simulator.totals


def robustness(trace: Trace, regime: Regime, share: float) -> Row:
    """Points of restored share that each disturbed window loses against `full` in the same room."""
    geometry = GEOMETRIES[regime]
    unlimited = simulate(trace, Policy(scope=FULL), geometry)
    budget = None if share == 1 else max(budget_of(unlimited, share), LEAST_BUDGET)
    full = unlimited if budget is None else simulate(trace, Policy(scope=FULL, budget_bytes=budget), geometry)
    auto = Policy(scope=AUTO, budget_bytes=budget)
    row: Row = {
        "workload": trace.name,
        "regime": regime,
        "room": _percent(share),
        "full": _percent(full.restored_share),
        "auto:30": _percent(simulate(trace, auto, geometry).restored_share),
    }
    for name, disturb in DISTURBED.items():
        row[name] = _percent(simulate_disturbed(trace, auto, geometry, disturb).restored_share)
    row["most lost"] = round(row["full"] - min(row[name] for name in ("auto:30", *DISTURBED)), 1)
    row["goal"] = f"10 {_met(row['most lost'] <= 10)}"
    return row


# Presets against the defaults, each on the kind of workload that it is for.

PRESETS: dict[str, tuple[str, ...]] = {
    "agent": ("interleaved", "moving-reminder", "tau-bench", "weka-claude-code"),
    "chat": ("shared-anchor", "interleaved", "mooncake"),
    "rag": ("retrieval", "big-bench-hard"),
    "batch": ("shared-anchor", "one-off", "big-bench-hard"),
    "shared-server": ("interleaved-and-batches", "edits", "bfcl", "mooncake"),
}


def preset_policy(name: str) -> Policy:
    """What `serve --policy NAME` says of what is kept."""
    values: Mapping[str, Any] = read_policy(find_policy(name))
    policy = Policy(scope=AUTO, budget_bytes=4 << 30)
    readers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "disk_prefix_cache": lambda value: {"scope": parse_scope(value, param="disk_prefix_cache")},
        "kv_cache_budget": lambda value: {"budget_bytes": parse_size(value, param="kv_cache_budget")},
        "kv_cache_ttl": lambda value: {"ttl_s": parse_duration(value, param="kv_cache_ttl")},
        "kv_cache_min_tokens": lambda value: {"min_tokens": value},
        "kv_cache_interval": lambda value: {"interval": value},
        "kv_cache_cold_max": lambda value: {"cold_max": value},
        "block_size": lambda value: {"block_size": value},
    }
    for key, value in values.items():
        policy = replace(policy, **readers[key](value)) if key in readers else policy
    return policy


def presets(name: str, trace: Trace) -> Iterator[Row]:
    """The preset, the defaults, and the preset with each of other scopes, in both regimes."""
    preset = preset_policy(name)
    default = Policy(scope=AUTO, budget_bytes=4 << 30)
    scopes = [Scope("auto", n) for n in (8, 30, 100)] + [FULL]
    runs = {"preset": preset, "defaults": default}
    runs |= {f"preset, {scope}": replace(preset, scope=scope) for scope in scopes if scope != preset.scope}
    runs |= {
        f"preset, min {n}": replace(preset, min_tokens=n) for n in (256, 512, 1024, 2048) if n != preset.min_tokens
    }
    for regime, geometry in GEOMETRIES.items():
        for label, policy in runs.items():
            totals = simulate(trace, policy, geometry)
            yield {
                "preset": name,
                "workload": trace.name,
                "regime": regime,
                "settings": label,
                "hits": _percent(totals.hit_rate),
                "restored": _percent(totals.restored_share),
                "written": _percent(totals.written_share),
                "GB written": round(totals.written_bytes / 1e9, 2),
                "evictions": totals.evictions,
            }


# Speed.


def repeated(trace: Trace, times: int) -> Trace:
    """The trace so many times after each other, with tokens of its own each time."""
    duration = 1.0 + max(request.when for request in trace)

    def replay() -> Iterator[Any]:
        for copy in range(times):
            for request in trace:
                prompt = replace(request.prompt, token_ids=request.prompt.token_ids ^ np.int32(copy << 28))
                yield replace(request, when=request.when + copy * duration, prompt=prompt)

    return Trace(f"{trace.name} x {times}", times * len(trace), replay)


def speed(trace: Trace) -> Iterator[Row]:
    for regime, geometry in GEOMETRIES.items():
        for scope in ("off", "2048", "auto:2", "auto:30", "auto:100", "full"):
            for budget in (None, 4 << 30):
                policy = Policy(scope=parse_scope(scope, param="scope"), budget_bytes=budget)
                began, cpu_began = time.perf_counter(), time.process_time()
                totals = simulate(trace, policy, geometry)
                yield {
                    "workload": trace.name,
                    "requests": totals.requests,
                    "regime": regime,
                    "scope": scope,
                    "budget GiB": budget / 2**30 if budget else "",
                    "seconds": round(time.perf_counter() - began, 1),
                    "CPU seconds": round(time.process_time() - cpu_began, 1),
                }


def _percent(share: float) -> float:
    return round(100 * share, 1)


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


class Report:
    """Rows of a table that is printed at its end; with `as_json` as JSON, so that nothing else is on stdout."""

    def __init__(self, title: str, as_json: bool) -> None:
        self.rows: list[Row] = []
        self._title = title
        self._as_json = as_json

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(" ".join(str(value) for value in row.values()), file=sys.stderr, flush=True)

    def show(self) -> None:
        if self._as_json:
            click.echo(json.dumps(self.rows, indent=2))
            return
        table = Table(box=box.MARKDOWN, title=self._title)
        for key in self.rows[0] if self.rows else ():
            table.add_column(key.strip(), justify="left" if isinstance(self.rows[0][key], str) else "right")
        for row in self.rows:
            table.add_row(*(str(value) for value in row.values()))
        Console(width=400, highlight=False).print(table)


def _options(names: Sequence[str], requests: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            JSON,
            click.option("--requests", type=click.IntRange(min=1), default=requests, show_default=True, help=_REQUESTS),
            click.option(
                "--workload",
                "names",
                multiple=True,
                type=click.Choice(names),
                default=names,
                help="May be given several times. Without it: all of them.",
            ),
            DATA,
        ):
            command = option(command)
        return command

    return add


_REQUESTS = "Length of our own workloads; of the published ones no more than this are replayed."
_ALL = 1_000_000


def _opened(names: Sequence[str], data: Path, requests: int) -> Iterator[Trace]:
    for name in names:
        yield open_workload(name, data, min(requests, 1000)).head(requests)


@click.group()
def main() -> None:
    """How well the policies choose, by simulation."""


@main.command(name="goals")
@_options((*REAL, *OWN), _ALL)
def goals_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """What `auto:30` restores and writes, against all that could be and against whole snapshots."""
    report = Report("restored and written, % of all prompt tokens, no budget (cp: checkpoints)", as_json)
    for trace in _opened(names, data, requests):
        report.add(goals(trace))
    report.show()


@main.command(name="sweep")
@_options((*REAL, *OWN), 1500)
@click.option("--regime", "regimes", multiple=True, type=click.Choice(REGIMES), default=REGIMES)
@click.option("--scope", "scopes", multiple=True, default=("full", "auto:30"), show_default=True)
def sweep_command(
    data: Path, names: Sequence[str], requests: int, as_json: bool, regimes: Sequence[Regime], scopes: Sequence[str]
) -> None:
    """What is restored in 1 %, 5 %, 20 % and all of the room that a workload takes, by what eviction goes by."""
    report = Report("restored, % of all prompt tokens, by the rank that eviction goes by", as_json)
    for trace in _opened(names, data, requests):
        for regime in regimes:
            for scope in scopes:
                for row in sweep(trace, regime, parse_scope(scope, param="--scope")):
                    report.add(row)
    report.show()


@main.command(name="windows")
@_options(SHAPES, 400)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves to a .svg or .png.")
def windows_command(data: Path, names: Sequence[str], requests: int, as_json: bool, plot: Path | None) -> None:
    """What N of auto:N does: hits, mean selected tokens, restored and written share."""
    del data
    if plot is not None:
        if plot.suffix not in PLOT_FORMATS:
            raise click.BadParameter(f"must end in {' or '.join(PLOT_FORMATS)}", param_hint="--plot")
        require_matplotlib()
    report = Report("hits % of requests, selected tokens of the average prompt, restored and written %", as_json)
    for name in names:
        for row in windows(name, requests):
            report.add(row)
    if plot is not None:
        draw_windows(report.rows, plot)
    report.show()


@main.command(name="robustness")
@_options((*OWN, *REAL), 500)
def robustness_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """What disturbed windows cost against `full` in the same room."""
    report = Report("restored, % of all prompt tokens, with windows disturbed", as_json)
    for trace in _opened(names, data, requests):
        for regime in REGIMES:
            for share in (1.0, 0.2):
                report.add(robustness(trace, regime, share))
    report.show()


@main.command(name="presets")
@_options(tuple(PRESETS), 1500)
def presets_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """Each preset on what it is for (`--workload` names presets here), beside the defaults and other settings."""
    report = Report("presets", as_json)
    for name in names:
        for trace in _opened(PRESETS[name], data, requests):
            for row in presets(name, trace):
                report.add(row)
    report.show()


@main.command(name="speed")
@_options(("mooncake",), _ALL)
def speed_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """How long it takes to simulate 12 000 requests of the Mooncake kind: the trace three times over."""
    report = Report("seconds to simulate", as_json)
    for trace in _opened(names, data, requests):
        for row in speed(repeated(trace, 3)):
            report.add(row)
    report.show()

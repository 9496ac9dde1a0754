"""A simulation of the choices of `auto:30` and of the presets: `tools/bench policy COMMAND --data DIR`.

Workloads are those of `workloads.py`, whose data lie in folders below DIR. Tables are Markdown. Shares are of all
prompt tokens, in percent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich import box
from rich.console import Console
from rich.table import Table

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.cli.policy_file import find_policy, read_policy
from diskprefix.extras.simulate.baselines import upper_bound, whole_snapshots
from diskprefix.extras.simulate.comparison import GEOMETRIES
from diskprefix.extras.simulate.geometry import CHECKPOINTS, TOKEN
from diskprefix.extras.simulate.simulator import Policy, Simulator, simulate
from diskprefix.extras.simulate.trace import Trace
from diskprefix.nouns import Scope
from diskprefix.units import format_size, parse_duration, parse_size
from tools.measuring.options import DATA, JSON
from tools.research import workloads

Row: TypeAlias = dict[str, Any]

REAL = ("mooncake", "weka-claude-code", "tau-bench", "openhands-mock", "bfcl", "big-bench-hard")
AGENTS = ("weka-claude-code", "tau-bench")
"""Interleaved agents that only append; their goals are higher."""
FULL, AUTO = Scope("full"), parse_scope("auto:30", param="scope")
BUDGETS = 1 / 2, 1 / 3, 1 / 4
PRESETS: dict[str, tuple[str, ...]] = {
    "agent": ("tau-bench", "weka-claude-code"),
    "chat": ("mooncake",),
    "rag": ("big-bench-hard",),
    "batch": ("big-bench-hard",),
    "shared-server": ("bfcl", "mooncake"),
}


def goals(trace: Trace) -> Row:
    """Returns one workload's row for `goals`: both kinds of model, no budget."""
    bound = upper_bound(trace, Policy(scope=FULL), TOKEN)
    full = simulate(trace, Policy(scope=FULL), TOKEN)
    auto = simulate(trace, Policy(scope=AUTO), TOKEN)
    plain = whole_snapshots(trace, Policy(scope=FULL), TOKEN)
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
        "any rule": percent(bound.restored_share),
        "full": percent(full.restored_share),
        "full written": percent(full.written_share),
        "auto:30": percent(auto.restored_share),
        "of full": percent(of_full),
        "goal": f"{percent(goal)} {met(of_full >= goal)}" if full.restored_tokens else "",
        "written": percent(auto.written_share),
        "of full's": percent(written_of_full),
        "goal ": f"50 {met(written_of_full <= 0.5)}" if full.written_share > 0.2 else "",
        "whole snapshots": percent(plain.restored_share),
        "their written": percent(plain.written_share),
        "cp full": percent(sparse_full.restored_share),
        "cp full GB": round(sparse_full.written_bytes / 1e9, 1),
        "cp auto:30": percent(sparse.restored_share),
        "cp GB": round(sparse.written_bytes / 1e9, 1),
        "x whole": round(times, 1),
        "goal  ": f"12 {met(times >= 12)}" if trace.name in AGENTS else "",
    }


def preset_policy(name: str) -> Policy:
    """Returns the policy that `serve --policy NAME` sets."""
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
    """Yields rows of the preset, the defaults, and the preset with other scopes, in both regimes."""
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
                "hits": percent(totals.hit_rate),
                "restored": percent(totals.restored_share),
                "written": percent(totals.written_share),
                "GB written": round(totals.written_bytes / 1e9, 2),
                "evictions": totals.evictions,
            }


def budgets(trace: Trace, memory_bytes: int) -> Iterator[Row]:
    """Yields rows of write budgets, each a part of what the workload writes in all without one, and what they lose."""
    policy = Policy(scope=AUTO, memory_bytes=memory_bytes)
    whole = simulate(trace, policy, TOKEN)
    for part in BUDGETS:
        limit = int(part * whole.written_bytes)
        simulator = Simulator(replace(policy, write_budget_bytes=limit), TOKEN)
        most = 0
        for request in trace:
            simulator.step(request)
            most = max(most, simulator.disk.last_day(request.when))
        totals = simulator.totals
        restored = totals.restored_tokens / max(whole.restored_tokens, 1)
        yield {
            "workload": trace.name,
            "memory": format_size(memory_bytes),
            "restored": percent(whole.restored_share),
            "GB written": round(whole.written_bytes / 1e9, 1),
            "budget": percent(part),
            "most in 24 h": percent(most / whole.written_bytes),
            "holds": met(most <= limit),
            "hits": percent(totals.hits / max(whole.hits, 1)),
            "restored of it": percent(restored),
            "goal": f"97 {met(restored >= 0.97)}",
        }


def percent(share: float) -> float:
    return round(100 * share, 1)


def met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


class Report:
    """The rows of a table, which is printed when it is complete; each row is also a line of progress."""

    def __init__(self, title: str, as_json: bool) -> None:
        self.rows: list[Row] = []
        self._title = title
        self._as_json = as_json

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
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
            click.option(
                "--requests",
                type=click.IntRange(min=1),
                default=requests,
                show_default=True,
                help="Replay no more than this of each workload.",
            ),
            click.option(
                "--workload",
                "names",
                multiple=True,
                type=click.Choice(names),
                metavar="NAME",
                default=names,
                help=f"May be given several times. [default: all of {', '.join(names)}]",
            ),
            DATA,
        ):
            command = option(command)
        return command

    return add


_ALL = 1_000_000


def _opened(names: Sequence[str], data: Path, requests: int) -> Iterator[Trace]:
    for name in names:
        yield workloads.open_workload(name, data).head(requests)


@click.group()
def main() -> None:
    """Simulate how well the scopes choose, on published workloads.

    Their data lie in folders below --data. The tables are Markdown.
    """


@main.command(name="goals")
@_options(REAL, _ALL)
def goals_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """Show what auto:30 restores and writes, beside full, the upper bound and whole snapshots."""
    report = Report("restored and written, % of all prompt tokens, no budget (cp: checkpoints)", as_json)
    for trace in _opened(names, data, requests):
        report.add([goals(trace)])
    report.show()


@main.command(name="budget")
@_options(("weka-claude-code", "openhands-mock"), _ALL)
@click.option(
    "--kv-memory",
    multiple=True,
    default=("0", "16GiB", "48GiB"),
    show_default=True,
    metavar="SIZE",
    help="Memory for eight sequences that ended, in which a next turn continues. May be given several times.",
)
def budget_command(data: Path, names: Sequence[str], requests: int, kv_memory: Sequence[str], as_json: bool) -> None:
    """Show what --kv-cache-write-budget loses, if it is a half, a third or a quarter of what is written without it.

    Hits and restored tokens are in % of those without a budget.
    """
    report = Report("write budgets, in % of what is written without one", as_json)
    for trace in _opened(names, data, requests):
        for size in kv_memory:
            report.add(budgets(trace, parse_size(size, param="--kv-memory")))
    report.show()


@main.command(name="presets")
@_options(tuple(PRESETS), 1500)
def presets_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """Run each preset on the workloads that it is for, beside the defaults and other settings.

    --workload takes the names of presets here.
    """
    report = Report("presets", as_json)
    for name in names:
        for trace in _opened(PRESETS[name], data, requests):
            report.add(presets(name, trace))
    report.show()

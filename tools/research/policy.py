"""A simulation of the presets: `tools/bench policy --data DIR`.

Workloads are those of `workloads.py`, whose data lie in folders below DIR. Shares are of all prompt tokens, in percent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich import box
from rich.console import Console
from rich.table import Table

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.cli.policy_file import find_policy, read_policy
from diskprefix.extras.simulate.comparison import GEOMETRIES
from diskprefix.extras.simulate.simulator import Policy, simulate
from diskprefix.extras.simulate.trace import Trace
from diskprefix.nouns import Scope
from diskprefix.units import parse_duration, parse_size
from tools.measuring.options import DATA, JSON
from tools.research import workloads

Row: TypeAlias = dict[str, Any]

FULL, AUTO = Scope("full"), parse_scope("auto:30", param="scope")
PRESETS: dict[str, tuple[str, ...]] = {
    "agent": ("tau-bench", "weka-claude-code"),
    "chat": ("mooncake",),
    "rag": ("big-bench-hard",),
    "batch": ("big-bench-hard",),
    "shared-server": ("bfcl", "mooncake"),
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


def percent(share: float) -> float:
    return round(100 * share, 1)


@click.command()
@DATA
@click.option("--preset", "names", multiple=True, type=click.Choice(list(PRESETS)), default=list(PRESETS))
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=1500,
    show_default=True,
    help="Replay no more than this of each workload.",
)
@JSON
def main(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """Run each preset on the published workloads that it is for, beside the defaults and other settings.

    Their data lie in folders below --data. The table is Markdown.
    """
    rows: list[Row] = []
    for name in names:
        for workload in PRESETS[name]:
            for row in presets(name, workloads.open_workload(workload, data).head(requests)):
                rows.append(row)
                print(*row.values(), file=sys.stderr, flush=True)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=box.MARKDOWN, title="presets")
    for key, value in rows[0].items():
        table.add_column(key, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=400, highlight=False).print(table)

"""The runs of `tools/bench policy`: each gives rows of a table. Shares are of all prompt tokens, in percent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.cli.policy_file import find_policy, read_policy
from diskprefix.extras.simulate.baselines import upper_bound, whole_snapshots
from diskprefix.extras.simulate.comparison import GEOMETRIES, Regime
from diskprefix.extras.simulate.geometry import CHECKPOINTS, SLICEABLE, TOKEN
from diskprefix.extras.simulate.simulator import Policy, Totals, simulate
from diskprefix.extras.simulate.store import Rank
from diskprefix.extras.simulate.synthetic import CATALOG, interleaved, one_off
from diskprefix.extras.simulate.trace import Trace
from diskprefix.nouns import Scope
from diskprefix.store.eviction import UsageTable, scores
from diskprefix.store.schema import Kind
from diskprefix.units import parse_duration, parse_size
from tools.research import workloads

Row: TypeAlias = dict[str, Any]

REAL = ("mooncake", "weka-claude-code", "tau-bench", "openhands-mock", "bfcl", "big-bench-hard")
BATCHES = "interleaved-and-batches"
OWN = (*CATALOG, BATCHES)
AGENTS = ("weka-claude-code", "tau-bench")
"""Interleaved agents that only append; their goals are higher."""
SHAPES = ("shared-anchor", "interleaved", "retrieval", "moving-reminder")
FULL, AUTO = Scope("full"), parse_scope("auto:30", param="scope")
WINDOWS = (2, 4, 8, 16, 30, 60, 100)
SHARES = (0.01, 0.05, 0.2, 1.0)
LEAST_BUDGET = 128 << 20
"""A smaller budget holds less than a dozen prompts, whatever the score."""


def open_workload(name: str, data: Path, num_requests: int = 1000) -> Trace:
    """Returns a published workload, or a made-up one of `num_requests`."""
    if name == BATCHES:
        return interleaved_and_batches(num_requests)
    return CATALOG[name](num_requests=num_requests) if name in CATALOG else workloads.open_workload(name, data)


def interleaved_and_batches(num_requests: int) -> Trace:
    """Returns conversations, interrupted by batches of fifty prompts that never come again."""
    batch, step = 50, 150
    talk = list(interleaved(num_requests=num_requests * step // (step + batch)))
    batches = list(one_off(seed=5, num_requests=num_requests - len(talk)))
    for index, request in enumerate(batches):
        begin = talk[min(step // 2 + step * (index // batch), len(talk) - 1)].when
        batches[index] = replace(request, when=begin + 0.2 * (index % batch))
    return Trace.of(BATCHES, sorted(chain(talk, batches), key=lambda request: request.when))


# The goals: restored and written shares against the bound and against whole snapshots.


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


# The sweep: eviction scores in little room.


def least_recently_used(table: UsageTable, _now: float) -> NDArray[np.float64]:
    used: NDArray[np.float64] = table.records["last_used"].astype(np.float64)
    return used


def density(table: UsageTable, _now: float) -> NDArray[np.float64]:
    """Returns the seconds of prefill per stored byte."""
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
    """Gives restored shares by score; a budget is a share of what the workload takes without one."""
    geometry = GEOMETRIES[regime]
    unlimited = simulate(trace, Policy(scope=scope), geometry)
    for share in shares:
        if (budget := budget_of(unlimited, share)) < LEAST_BUDGET:
            continue
        row: Row = {"workload": trace.name, "regime": regime, "scope": str(scope), "room": percent(share)}
        for name, rank in RANKS.items():
            # What fits needs no rank.
            limited = replace(Policy(scope=scope, rank=rank), budget_bytes=budget if share < 1 else None)
            totals = unlimited if share == 1 else simulate(trace, limited, geometry)
            row[name] = percent(totals.restored_share)
        row["ours - best of LRU, density"] = round(row["ours"] - max(row["LRU"], row["density"]), 1)
        yield row


def budget_of(unlimited: Totals, share: float) -> int:
    """Returns the budget that leaves nodes `share` of their peak size: the inverse of `usable_bytes`."""
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
                "hits": percent(totals.hit_rate),
                "selected": round(totals.selected_tokens / totals.requests),
                "restored": percent(totals.restored_share),
                "written": percent(totals.written_share),
            }


# Presets against the defaults, each on the kind of workload that it is for.

PRESETS: dict[str, tuple[str, ...]] = {
    "agent": ("interleaved", "moving-reminder", "tau-bench", "weka-claude-code"),
    "chat": ("shared-anchor", "interleaved", "mooncake"),
    "rag": ("retrieval", "big-bench-hard"),
    "batch": ("shared-anchor", "one-off", "big-bench-hard"),
    "shared-server": ("interleaved-and-batches", "edits", "bfcl", "mooncake"),
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
                "hits": percent(totals.hit_rate),
                "restored": percent(totals.restored_share),
                "written": percent(totals.written_share),
                "GB written": round(totals.written_bytes / 1e9, 2),
                "evictions": totals.evictions,
            }


# Sharing: what blocks that are stored once save.


def sharing(trace: Trace, scopes: Sequence[Scope] = (FULL, AUTO)) -> Iterator[Row]:
    """What the store takes, without compression and without a budget, beside a file with the whole state per prompt."""
    lengths = [len(request.prompt.token_ids) for request in trace]
    snapshots = sum(SLICEABLE.layout.payload_bytes(length, Kind.TAIL) for length in lengths)
    for scope in scopes:
        stored = simulate(trace, Policy(scope=scope), SLICEABLE).peak_bytes
        yield {
            "workload": trace.name,
            "scope": str(scope),
            "requests": len(lengths),
            "Mtokens": round(sum(lengths) / 1e6, 2),
            "snapshots GB": round(snapshots / 1e9, 1),
            "stored GB": round(stored / 1e9, 2),
            "times smaller": round(snapshots / max(stored, 1), 1),
        }


def percent(share: float) -> float:
    return round(100 * share, 1)


def met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"

"""One replay of a workload, for `tools/bench policies`: a process for each, so that the code of another commit can run.

Reads a JSON object from standard input and prints one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.simulator import Policy, Simulator
from diskprefix.prefixstore.simulate.trace import Trace
from diskprefix.scope import parse_scope
from tools.workloads.generated import GENERATED, generated
from tools.workloads.published import published

GEOMETRIES = {
    "token": Geometry(bytes_per_token=12_288, exact_at="token", logits_bytes=2 * 151_936),
    "checkpoints": Geometry(bytes_per_token=24_576, state_bytes=75 << 20, exact_at="token", logits_bytes=2 * 151_936),
}
"""Qwen2.5-0.5B in bf16, and Qwen3-Next-80B-A3B in bf16."""


def workload(name: str, data: Path) -> Trace:
    return generated(name) if name in GENERATED else published(name, data)


class Measured(Simulator):
    """Counts the bytes of nodes that were stored before."""

    def __init__(self, policy: Policy, geometry: Geometry) -> None:
        super().__init__(policy, geometry)
        self.again_bytes = 0
        known: set[bytes] = set()
        put: Any = self.store._put

        def counted(entry: Any, now: float) -> None:
            self.again_bytes += entry.num_bytes * (entry.node.name in known)
            known.add(entry.node.name)
            put(entry, now)

        self.store._put = counted  # type: ignore[method-assign]


def replayed(trace: Trace, policy: Policy, geometry: Geometry) -> dict[str, float]:
    """Returns restored and prompt tokens, those after the first tenth of the requests, and bytes."""
    simulator = Measured(policy, geometry)
    first, number = len(trace) // 10, 0
    late_restored = late_tokens = 0
    for request in trace:
        if request.is_ahead:
            simulator.plan_ahead(request)
            continue
        restored = simulator.step(request).restored
        number += 1
        if number > first:
            late_restored += restored
            late_tokens += len(request.prompt.token_ids)
    totals = simulator.totals
    return {
        "restored": totals.restored_share,
        "late": late_restored / max(late_tokens, 1),
        "written": totals.written_bytes,
        "again": simulator.again_bytes,
        "peak": totals.peak_bytes,
    }


def best(trace: Trace, policy: Policy, geometry: Geometry) -> dict[str, float]:
    """Returns the figures of the optimum."""
    from diskprefix.prefixstore.simulate.optimum import optimum

    totals = optimum(trace, policy, geometry)
    early = optimum(trace, policy, geometry, until=len(trace) // 10)
    late = totals.restored_tokens - early.restored_tokens
    return {
        "restored": totals.restored_share,
        "late": late / max(totals.prompt_tokens - early.prompt_tokens, 1),
        "written": totals.written_bytes,
        "again": 0,
        "peak": totals.peak_bytes,
    }


def main() -> None:
    asked = json.load(sys.stdin)
    trace = workload(asked["workload"], Path(asked["data"]))
    geometry = GEOMETRIES[asked["state"]]
    for run in asked["runs"]:
        is_best = run["scope"] == "optimum"
        policy = Policy(
            scope=parse_scope("full" if is_best else run["scope"], param="scope"),
            budget_bytes=run["budget"],
            memory_bytes=run["memory"],
            **asked.get("policy", {}),
        )
        print(json.dumps(run | (best if is_best else replayed)(trace, policy, geometry)), flush=True)


if __name__ == "__main__":
    main()

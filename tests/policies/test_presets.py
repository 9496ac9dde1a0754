"""The presets that ship with diskprefix, and the table on the page about policies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.daemon.cli.policy_file import find_policy, read_policy
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.simulate.comparison import GEOMETRIES, REGIMES, Regime
from diskprefix.prefixstore.simulate.geometry import TOKEN
from diskprefix.prefixstore.simulate.simulator import Policy, Simulator, Totals, simulate
from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.scope import parse_scope
from diskprefix.tokens import TokenIds
from diskprefix.units import parse_duration, parse_size
from diskprefix.values import Prompt, Scope
from tests.prefixstore.simulate.workloads import CATALOG

POLICIES = Path(__file__).parent.parent.parent / "policies"
PRESETS = sorted(path.stem for path in POLICIES.glob("*.toml") if path.stem != "canonicalisers")
SIZES = ("kv_cache_new_budget", "kv_cache_write_buffer")


def settings_of(preset: str) -> dict[str, Any]:
    values = read_policy(find_policy(preset))
    readers = dict.fromkeys(SIZES, parse_size) | {"kv_cache_ttl": parse_duration}
    return {key: readers[key](value, param=key) if key in readers else value for key, value in values.items()}


def policy_of(settings: Settings) -> Policy:
    return Policy(
        scope=parse_scope(settings.disk_prefix_cache, param="--disk-prefix-cache"),
        budget_bytes=settings.kv_cache_new_budget,
        ttl_s=settings.kv_cache_ttl,
        min_tokens=settings.kv_cache_min_tokens,
        block_size=settings.block_size,
        interval=settings.kv_cache_interval,
        cold_max=settings.kv_cache_cold_max,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_found_by_its_name_and_makes_valid_settings(preset: str) -> None:
    settings = Settings(**settings_of(preset))
    scope = parse_scope(settings.disk_prefix_cache, param="--disk-prefix-cache")
    assert str(scope) == settings.disk_prefix_cache
    assert settings.kv_cache_write_buffer < settings.kv_cache_new_budget


def test_an_unknown_preset_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(SettingsError, match="there are: agent, batch, chat, rag, shared-server"):
        find_policy("agents")


NUM_REQUESTS = 150
PURPOSES: dict[str, list[tuple[str, Regime, float, float]]] = {
    "agent": [("interleaved", "sliceable", 0.82, 0.14), ("moving-reminder", "checkpoints", 0.8, 0.14)],
    "batch": [("shared-anchor", "sliceable", 0.6, 0.3), ("one-off", "sliceable", 0.0, 0.75)],
    "chat": [("shared-anchor", "checkpoints", 0.6, 0.1), ("interleaved", "token", 0.87, 0.15)],
    "rag": [("retrieval", "sliceable", 0.4, 0.5), ("retrieval", "checkpoints", 0.38, 0.12)],
    "shared-server": [("interleaved", "sliceable", 0.6, 0.25), ("interleaved", "checkpoints", 0.65, 0.2)],
}
"""Workloads that a preset is for; the least that it must restore of their tokens, and the most that it may write."""
CASES = [(preset, *purpose) for preset, purposes in PURPOSES.items() for purpose in purposes]


def replayed(workload: str, policy: Policy, regime: Regime) -> Totals:
    requests = list(CATALOG[workload](num_requests=NUM_REQUESTS))
    return simulate(Trace.of(workload, requests), policy, GEOMETRIES[regime])


def test_each_preset_has_a_workload_and_all_regimes_are_tried() -> None:
    assert sorted(PURPOSES) == PRESETS
    assert {regime for _, _, regime, _, _ in CASES} == set(REGIMES)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("preset", "workload", "regime", "least_restored", "most_written"), CASES)
def test_a_preset_does_what_it_is_for(
    preset: str, workload: str, regime: Regime, least_restored: float, most_written: float
) -> None:
    totals = replayed(workload, policy_of(Settings(**settings_of(preset))), regime)
    assert totals.restored_share >= least_restored
    assert totals.written_share <= most_written
    assert totals.restored_tokens >= replayed(workload, policy_of(Settings()), regime).restored_tokens


PAGE = POLICIES / "README.md"
OPENING = np.array([1, 2, 3], dtype=np.int32)
_ROW = re.compile(r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| `(\w+)` \| (\d+) \|$", re.MULTILINE)


def chat(*messages: TokenIds) -> Prompt:
    """The first message is the system's."""
    ends = np.cumsum([len(message) for message in messages]).tolist()
    return Prompt(np.concatenate([*messages, OPENING]), tuple(ends), ends[0])


def test_the_example_on_the_page_is_what_auto_does() -> None:
    random = np.random.default_rng(1)

    def text(num_tokens: int) -> TokenIds:
        return random.integers(10, 50_000, num_tokens, dtype=np.int32)

    system, conversation = text(1500), [text(300), text(400), text(200), text(300), text(200)]
    prompts = [
        chat(system, *conversation[:1]),
        chat(system, *conversation[:3]),
        chat(system, text(350)),
        chat(text(900), text(800)),
        chat(system, *conversation),
    ]
    simulator = Simulator(Policy(scope=Scope("auto", 30)), TOKEN)
    rows = []
    for number, prompt in enumerate(prompts):
        restored, chosen, written = simulator.step(TraceRequest(when=float(number), prompt=prompt))
        figures = (len(prompt.token_ids), restored, chosen.common, chosen.selected, chosen.kept, chosen.reason, written)
        rows.append(tuple(map(str, figures)))
    assert rows == _ROW.findall(PAGE.read_text(encoding="utf-8"))

"""The command `diskprefix simulate`: shows the effect of other settings on a recorded workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from diskprefix.daemon.cli.options import build_settings, nonempty, option, policy_values, setting_option
from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.tooling import print_json, progress, status
from diskprefix.desk.simulate.table import show
from diskprefix.errors import SettingsError
from diskprefix.folders import expanded
from diskprefix.prefixstore.simulate.comparison import GEOMETRIES, REGIMES, Case, Regime, cases, compare, regime_of
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.simulator import Policy
from diskprefix.prefixstore.simulate.trace import RecordedDaemon, Trace
from diskprefix.prefixstore.simulate.trace_formats import read_trace
from diskprefix.prefixstore.store_options import MAX_BUDGET, MIN_BUDGET
from diskprefix.printable import printable_only
from diskprefix.scope import parse_scope
from diskprefix.units import parse_size
from diskprefix.values import Scope

_DEFAULTS = Settings(kv_cache_dir=Path())
_SCOPES = ("off", "2048", "auto:2", "auto:8", "auto:30", "auto:100", "full")
_BUDGETS = ("4GiB",)
_TOKENS_PER_S = 1000.0


def _recorded(fallback: int) -> dict[str, Any]:
    """Attributes of an option whose default is the recorded value, or else `fallback`."""
    return {"default": None, "show_default": f"the recording's, else {fallback}"}


_EPILOG = """\b
Examples:
  diskprefix simulate day.jsonl
      compares seven scopes
  diskprefix simulate day.jsonl --regime sliceable --scope auto:30 --scope full --budget 1GiB --budget 8GiB
      shows how much room each scope needs
  diskprefix simulate day.jsonl --scope off --policy chat --policy agent
      compares presets
  diskprefix simulate day.jsonl --json | jq '.[] | {scope, restored_share, written_share}'
      prints figures for scripts
  diskprefix serve --record day.jsonl
      records the workload of a daemon: lengths and hashes, no text

Exit codes: 0 done; 2 wrong usage, or a trace that cannot be read.
"""


@click.command(short_help="Replay a workload under other settings, without a model.", epilog=_EPILOG)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", callback=nonempty)
@option(
    "--scope",
    metavar="SCOPE",
    multiple=True,
    show_default=", ".join(_SCOPES),
    help="A scope, as for --disk-prefix-cache of serve: off, full, auto:N or N. Can be given several times.",
)
@option(
    "--regime",
    type=click.Choice(REGIMES, case_sensitive=False),
    multiple=True,
    show_default=f"the recorded model's, else {REGIMES[0]}",
    help="The kind of model, which decides where a prefix can be restored. token: at any token. sliceable: at the end "
    "of any block. checkpoints: at checkpoints only (recurrent or linear attention). Can be given several times.",
)
@option(
    "--budget",
    metavar="SIZE",
    multiple=True,
    show_default=_BUDGETS[0],
    help="The size of the store, as for --kv-cache-budget of serve, or unlimited. Can be given several times.",
)
@option(
    "--policy",
    metavar="NAME|FILE",
    multiple=True,
    help="A preset, such as agent, or a .toml file. It gets its own row. Settings that it lacks are as in the "
    "other rows. Can be given several times.",
)
@setting_option("block_size", envvar=None, **_recorded(_DEFAULTS.block_size))
@setting_option("kv_cache_min_tokens", envvar=None, **_recorded(_DEFAULTS.kv_cache_min_tokens))
@setting_option("kv_cache_ttl", envvar=None)
@setting_option("kv_cache_write_budget", envvar=None)
@setting_option(
    "kv_memory",
    envvar=None,
    help="Memory that keeps finished sequences, so that the next turn can continue there.",
    show_default="none: everything is restored from the disk",
)
@setting_option("ahead", envvar=None)
@option("--json", is_flag=True, help="Print JSON for scripts, and nothing else.")
def simulate(
    traces: tuple[str, ...],
    scope: tuple[str, ...],
    regime: tuple[Regime, ...],
    budget: tuple[str, ...],
    policy: tuple[str, ...],
    json: bool,
    **flags: Any,
) -> None:
    """Replay recorded workloads without a model. Show what each setting would have restored and written.

    The daemon's own code decides what to keep and what to evict. Model, disk and clock are simulated. Scopes, marks and
    times to live that single requests set apply in every row. Each model of a recording gets its own table and store.

    --kv-cache-gate, a full disk and a full write buffer are not simulated: everything that is found is restored, and
    writing takes no time.

    \b
    TRACE is a file with one JSON object on each line:
      a recording of `diskprefix serve --record FILE`
      Mooncake's form: timestamp, input_length, output_length, hash_ids

    \b
    hits       requests with restored tokens
    restored   restored tokens, in % of the prompt tokens
    written    tokens written to disk, in % of the prompt tokens
    bytes      bytes written to disk
    evictions  evicted blocks and checkpoints
    saved      prefill time saved by restoring
    ahead      tokens computed while no request waited, if the recording has them
    --json has more columns.

    \b
    The line below the table names the scope that writes least among those that restore
    the most, to within one point.
    optimum is a store of the same size that knows all requests to come (Belady's MIN).
    """
    cases_of = partial(
        _cases,
        scopes=tuple(dict.fromkeys(parse_scope(text, param="--scope") for text in scope or _SCOPES)),
        regimes=regime,
        budgets=tuple(map(_budget, budget or _BUDGETS)),
        presets={name: policy_values(name) for name in policy},
        flags={name: value for name, value in flags.items() if value is not None},
    )
    # An error in an option is reported before the traces are read, and an error in a trace before any is replayed.
    cases_of(None)
    models = [model for trace in _read(traces) for model in trace.by_model()]
    planned = [(trace, cases_of(trace.daemon)) for trace in models]
    with progress("simulating", sum(len(trace) * len(runs) for trace, runs in planned), in_bytes=False) as advance:
        rows = [row for trace, runs in planned for row in compare(trace, runs, advance)]
    if json:
        print_json([row.as_dict() for row in rows])
    else:
        show(models, rows)


def _cases(
    daemon: RecordedDaemon | None,
    *,
    scopes: Sequence[Scope],
    regimes: Sequence[Regime],
    budgets: Sequence[int | None],
    presets: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Any],
) -> list[Case]:
    """Returns the runs over a workload that `daemon` recorded. `presets` has the settings in each policy file by its
    name. Without a flag, a setting has the recorded value, or its default. Raises `SettingsError`."""
    recorded = {"block_size": daemon.block_size, "kv_cache_min_tokens": daemon.min_tokens} if daemon else {}
    values = {**recorded, **flags}
    speed, geometry = (daemon and daemon.tokens_per_s) or _TOKENS_PER_S, daemon.geometry if daemon else None
    reference = _policy(values, speed)
    return cases(
        [replace(reference, scope=scope) for scope in scopes],
        {regime: _geometry(regime, geometry) for regime in regimes or (regime_of(geometry),)},
        budgets,
        {name: _policy({**values, **own}, speed) for name, own in presets.items()},
        reference,
    )


def _geometry(regime: Regime, recorded: Geometry | None) -> Geometry:
    """Returns the recorded geometry if it fits the regime, else the geometry of a common model."""
    usual = GEOMETRIES[regime]
    if recorded is None or bool(recorded.state_bytes) != bool(usual.state_bytes):
        return usual
    return recorded if recorded.state_bytes else replace(recorded, exact_at=usual.exact_at)


def _policy(values: Mapping[str, Any], tokens_per_s: float) -> Policy:
    settings = build_settings(values)
    return Policy(
        scope=parse_scope(settings.disk_prefix_cache, param="--disk-prefix-cache"),
        budget_bytes=settings.kv_cache_budget or settings.kv_cache_new_budget,
        block_size=settings.block_size,
        min_tokens=settings.kv_cache_min_tokens,
        interval=settings.kv_cache_interval,
        cold_max=settings.kv_cache_cold_max,
        ttl_s=settings.kv_cache_ttl,
        write_budget_bytes=settings.write_budget_bytes,
        memory_bytes=settings.kv_memory or 0,
        seconds_per_token=1 / tokens_per_s,
        computes_ahead=settings.ahead_s > 0,
    )


def _budget(text: str) -> int | None:
    """Returns the bytes of a budget, None for no limit. Raises `SettingsError`."""
    if text.strip().lower() == "unlimited":
        return None
    num_bytes = parse_size(text, param="--budget")
    if not MIN_BUDGET <= num_bytes <= MAX_BUDGET:
        raise SettingsError(f"--budget: {text} is out of range ({MIN_BUDGET} to {MAX_BUDGET} bytes)")
    return num_bytes


def _read(names: Sequence[str]) -> list[Trace]:
    """Reads all traces before any is replayed, so that an error in the last one is reported at once."""

    def warn(line: str) -> None:
        click.echo(f"warning: {printable_only(line)}", err=True)

    traces = []
    stems = [Path(name).stem for name in names]
    for name, stem in zip(names, stems, strict=True):
        # Two traces must not have the same title.
        title = name if stems.count(stem) > 1 else stem
        with status(f"reading {title}"):
            traces.append(read_trace(expanded(name), name=title, warn=warn))
    return traces

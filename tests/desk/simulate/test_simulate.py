"""`diskprefix simulate`: rows for scripts, a table for people, and one line for what is wrong."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from diskprefix.daemon.cli.policy_file import find_policy
from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.recording.recording import RequestRecorder
from diskprefix.prefixstore.simulate.comparison import REGIMES
from diskprefix.prefixstore.simulate.geometry import CHECKPOINTS, SLICEABLE, Geometry
from diskprefix.prefixstore.simulate.simulator import Policy, simulate
from diskprefix.prefixstore.simulate.trace_formats import read_trace
from diskprefix.tokens import as_token_ids
from diskprefix.units import parse_size
from diskprefix.values import CacheOptions, CacheReport, Scope, Selection
from tests.desk.conftest import Ended, Run
from tests.desk.terminal import Terminal
from tests.prefixstore.simulate.workloads import CATALOG, interleaved

MIB, GIB = 2**20, 2**30
SHORT = "--scope", "auto:8", "--regime", "sliceable", "--budget", "unlimited"
"""Options of a run that is over at once."""
MOONCAKE = {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]}


def rows(ended: Ended) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ended.json
    return found


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


Made: TypeAlias = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def write(name: str, num_requests: int) -> Path:
        lines, numbers = [], dict[bytes, int]()
        for request in CATALOG[name](num_requests=num_requests):
            ids = request.prompt.token_ids
            begun = [ids[: at + 64].tobytes() for at in range(0, len(ids), 64)]
            blocks = [numbers.setdefault(beginning, len(numbers)) for beginning in begun]
            line = {"timestamp": 1e3 * request.when, "input_length": len(ids), "hash_ids": blocks, "block_size": 64}
            lines.append(line)
        return write_lines(tmp_path_factory.mktemp(name) / f"{name}.jsonl", *lines)

    return write


@pytest.mark.parametrize(("state_bytes", "regime"), [(None, "token"), (0, "sliceable"), (1 << 20, "checkpoints")])
def test_without_options_there_is_one_table_with_all_scopes(
    made: Made, run: Run, tmp_path: Path, state_bytes: int | None, regime: str
) -> None:
    name, trace = "interleaved", made("interleaved", 20)
    if state_bytes is not None:
        name, trace = "day", record(tmp_path / "day.jsonl", block_size=256, state_bytes=state_bytes)
    found = rows(run("simulate", trace, "--json"))
    scopes = "off", "2048", "auto:2", "auto:8", "auto:30", "auto:100", "full"
    expected: list[object] = [(name, scope, regime, 4 * GIB) for scope in scopes]
    expected.append((name, "optimum", regime, 4 * GIB))
    assert [(row["trace"], row["scope"], row["regime"], row["budget_bytes"]) for row in found] == expected


def test_options_reach_the_policy_and_the_geometry(made: Made, run: Run) -> None:
    flags = "--scope full --scope FULL --regime checkpoints --budget 1GiB --budget 1024MiB --budget unlimited"
    flags += " --block-size 64 --kv-cache-min-tokens 3000 --kv-cache-ttl 10s --json"
    found = rows(run("simulate", made("interleaved", 30), *flags.split()))
    assert [row["scope"] for row in found] == ["full", "optimum"] * 2, "what is given twice is one row"
    policy = Policy(scope=Scope("full"), block_size=64, min_tokens=3000, ttl_s=10.0)
    trace = read_trace(made("interleaved", 30))
    totals = simulate(trace, policy, CHECKPOINTS)
    assert found[0]["budget_bytes"] is None
    assert (found[0]["requests"], found[0]["written_bytes"]) == (30, totals.written_bytes)
    limits = ["--kv-cache-write-budget", "1MiB/day", "--kv-memory", "64MiB", "--ahead", "off"]
    limited = rows(run("simulate", made("interleaved", 30), *flags.split(), *limits))
    policy_of_limits = replace(policy, write_budget_bytes=1 << 20, memory_bytes=64 << 20, computes_ahead=False)
    assert limited[0]["written_bytes"] == simulate(trace, policy_of_limits, CHECKPOINTS).written_bytes
    assert limited[0]["written_bytes"] < totals.written_bytes
    forever = simulate(trace, replace(policy, ttl_s=0.0), CHECKPOINTS)
    assert 0 < found[0]["restored_tokens"] == totals.restored_tokens < forever.restored_tokens


def test_a_policy_file_is_a_row_of_its_own_settings(made: Made, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'disk_prefix_cache = 2048\nkv_cache_budget = "64MiB"\nkv_cache_ttl = "5m"\nkv-cache-min-tokens = 0\n'
    )
    flags = "--policy", "agent", "--policy", str(file), "--block-size", "128"
    found = {row["policy"]: row for row in rows(run("simulate", made("interleaved", 30), *SHORT, *flags, "--json"))}
    assert found.keys() == {None, "agent", str(file)}
    said = tomllib.loads(find_policy("agent").read_text())
    assert (found["agent"]["scope"], found["agent"]["budget_bytes"]) == (
        said["disk_prefix_cache"],
        parse_size(said["kv_cache_new_budget"], param="budget"),
    )
    policy = Policy(scope=Scope("tokens", 2048), budget_bytes=64 * MIB, ttl_s=300.0, min_tokens=0, block_size=128)
    totals = simulate(read_trace(made("interleaved", 30)), policy, SLICEABLE)
    assert (found[str(file)]["scope"], found[str(file)]["budget_bytes"]) == ("2048", 64 * MIB)
    assert found[str(file)]["restored_tokens"] == totals.restored_tokens > 0


def test_traces_of_all_kinds_are_replayed_in_one_go_and_told_apart(made: Made, run: Run, tmp_path: Path) -> None:
    recorded = record(tmp_path / "recorded.jsonl", block_size=256)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    days = [str(write_lines(tmp_path / folder / "day.jsonl", MOONCAKE, MOONCAKE)) for folder in ("a", "b")]
    flags = "--scope", "full", "--regime", "sliceable", "--budget", "unlimited", "--json"
    found = [
        row for row in rows(run("simulate", *days, recorded, made("one-off", 2), *flags)) if row["scope"] == "full"
    ]
    counts = {days[0]: 2, days[1]: 2, "recorded": 8, "one-off": 2}
    assert {row["trace"]: row["requests"] for row in found} == counts
    restored = {row["trace"]: row["restored_tokens"] for row in found}
    assert restored[days[0]] == restored[days[1]] == 1000
    assert (restored["recorded"] > 0, restored["one-off"]) == (True, 0)


def test_the_table_shows_each_row_with_its_figures(made: Made, run: Run) -> None:
    ended = run("simulate", made("interleaved", 20), made("one-off", 5), *SHORT, "--policy", "chat")
    lines = ended.stdout.splitlines()
    assert ended.stderr == ""
    assert lines[0].startswith("interleaved: 20 requests, ")
    assert lines[1].startswith(
        "assumed: blocks of 256 tokens, 64 at least; sliceable state of 22.5 KiB a token; prefill"
    )
    assert any(line.startswith("one-off: 5 requests, ") for line in lines)
    of_first = lines[3 : lines.index("", lines.index("sliceable, 4.0 GiB"))]
    titles = ["scope", "hits", "restored", "written", "bytes", "evictions", "saved", "ahead"]
    assert of_first[0].split() == titles
    assert [line.split()[0] for line in of_first[1:] if line] == [
        "sliceable,", "auto:8", "optimum", "sliceable,", "chat"
    ]  # fmt: skip
    assert any(line.startswith("chat (auto") for line in of_first), "a policy file, beside its scope"
    verdicts = [line for line in lines if line.startswith("verdict: ")]
    assert verdicts[0].startswith("verdict: --disk-prefix-cache auto:8 restores ")
    assert verdicts[1].startswith("verdict: no scope restores anything; ")
    row = next(line.split() for line in of_first if line.startswith("auto:8"))
    figures = rows(run("simulate", made("interleaved", 20), *SHORT, "--json"))[0]
    assert row[1:4] == [f"{figures[name]:.1%}" for name in ("hit_rate", "restored_share", "written_share")]


def test_simulate_counts_the_options_of_requests_below_the_table(run: Run, tmp_path: Path) -> None:
    asked = CacheOptions(scope=Scope("full"), save=False)
    own = record(tmp_path / "own.jsonl", block_size=256, options=asked)
    expected = "8 have a scope of their own, 8 only read (save: false)"
    assert (
        run("simulate", own, *SHORT).stdout.splitlines()[-1] == f"of the requests, in every row but optimum: {expected}"
    )
    plain = record(tmp_path / "plain.jsonl", block_size=256)
    assert run("simulate", plain, *SHORT).stdout.splitlines()[-1].startswith("verdict: ")


DEFAULT = CacheOptions(scope=Scope("auto", 30))


def record(
    path: Path,
    *,
    block_size: int,
    state_bytes: int = 0,
    bytes_per_token: int = 1024,
    model: str | None = None,
    options: CacheOptions = DEFAULT,
) -> Path:
    settings = Settings(block_size=block_size, kv_cache_min_tokens=64)
    recorder = RequestRecorder(path, settings, lambda: 1, model or "")
    recorder.describe(
        bytes_per_token=bytes_per_token,
        state_bytes=state_bytes,
        logits_bytes=800,
        exact_at="grid",
    )
    for request in interleaved(num_requests=8):
        num_tokens = len(request.prompt.token_ids)
        recorder.record_request(
            request.prompt,
            options,
            CacheReport(selection=Selection(scope=Scope("full"), prompt_tokens=50, reason="full")),
            root=(model or "").encode().rjust(16, b"r"),
            when=request.when,
            reply=as_token_ids([]),
            prefill_ms=num_tokens / 2,
            remembered=True,
        )
    recorder.close()
    return path


def test_a_recording_says_what_its_daemon_and_its_model_were(run: Run, tmp_path: Path) -> None:
    cut = record(tmp_path / "cut.jsonl", block_size=32)
    states = record(tmp_path / "states.jsonl", block_size=64, state_bytes=5 * MIB)
    names = "block_size", "min_tokens", "bytes_per_token", "state_bytes", "tokens_per_s"

    def of(*flags: str) -> dict[tuple[str, str], list[object]]:
        found = rows(run("simulate", cut, states, "--scope", "full", "--budget", "unlimited", *flags, "--json"))
        return {(r["trace"], r["regime"]): [r[name] for name in names] for r in found if r["scope"] == "full"}

    speed = pytest.approx(2000)
    assert of().keys() == {("cut", "sliceable"), ("states", "checkpoints")}, "that of the recorded model"
    regimes = [part for regime in REGIMES for part in ("--regime", regime)]
    assert of(*regimes) == {
        ("cut", "token"): [32, 64, 1024, 0, speed],
        ("cut", "sliceable"): [32, 64, 1024, 0, speed],
        ("cut", "checkpoints"): [32, 64, CHECKPOINTS.bytes_per_token, CHECKPOINTS.state_bytes, speed],
        ("states", "token"): [64, 64, SLICEABLE.bytes_per_token, 0, speed],
        ("states", "sliceable"): [64, 64, SLICEABLE.bytes_per_token, 0, speed],
        ("states", "checkpoints"): [64, 64, 1024, 5 * MIB, speed],
    }
    assert {tuple(found[:2]) for found in of("--block-size", "16", "--kv-cache-min-tokens", "8").values()} == {(16, 8)}
    assert run("simulate", cut, "--scope", "full").stdout.splitlines()[1] == (
        "assumed: blocks of 32 tokens, 64 at least; sliceable state of 1.0 KiB a token; prefill of 2,000 tokens/s"
    )
    policy = Policy(scope=Scope("full"), block_size=64, min_tokens=64)
    totals = simulate(read_trace(states), policy, Geometry(1024, 5 * MIB, 800))
    file = tmp_path / "mine.toml"
    file.write_text("kv_cache_min_tokens = 100")
    row, _, of_policy = rows(
        run("simulate", states, "--scope", "full", "--budget", "unlimited", "--policy", file, "--json")
    )
    assert (row["restored_tokens"], row["written_bytes"]) == (totals.restored_tokens, totals.written_bytes)
    assert (of_policy["block_size"], of_policy["min_tokens"]) == (64, 100), "what the file leaves open"


def test_a_recording_of_several_models_has_a_table_of_each(run: Run, tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    record(both, block_size=32, model="ash")
    record(both, block_size=64, state_bytes=5 * MIB, model="org/birch")
    flags = "--scope", "full", "--budget", "unlimited"
    alone = record(tmp_path / "alone.jsonl", block_size=32)
    simulated = rows(run("simulate", both, alone, *flags, "--json"))
    found = {(row["trace"], row["regime"]): row for row in simulated if row["scope"] == "full"}
    assert {trace for trace, _ in found} == {"both: ash", "both: org/birch", "alone"}
    assert found["both: ash", "sliceable"]["restored_tokens"] == found["alone", "sliceable"]["restored_tokens"]
    assert found["both: org/birch", "checkpoints"]["state_bytes"] == 5 * MIB


def test_a_recording_that_no_daemon_made_is_refused(run: Run, tmp_path: Path) -> None:
    recording = record(tmp_path / "cut.jsonl", block_size=16)
    recording.write_text(recording.read_text().replace('"block_size":16', '"block_size":4'))
    run("simulate", recording, *SHORT).assert_refused(2, "--block-size: 4 is out of range")
    assert run("simulate", recording, *SHORT, "--block-size", "16").exit_code == 0


def test_a_line_that_is_no_json_is_warned_of_and_what_a_file_is_called_cannot_steer_the_terminal(
    run: Run, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "a\x07\x1b]0;title\x07[b].jsonl", MOONCAKE)
    with file.open("a") as opened:
        opened.write('{"timestamp": 3')
    ended = run("simulate", file, *SHORT)
    assert not {"\x1b", "\x07"} & set(ended.stdout + ended.stderr)
    assert "[b]: 1 request, 1,000 prompt tokens" in ended.stdout
    assert ended.stderr.startswith("warning: ")
    assert ended.stderr.endswith(":2: the line is no JSON, and is left out\n")


def test_a_terminal_shows_how_far_it_is(made: Made) -> None:
    terminal = Terminal("simulate", str(made("interleaved", 20)), *SHORT)
    terminal.wait_for("simulating")
    assert terminal.wait() == 0
    assert "interleaved: 20 requests" in terminal.shown

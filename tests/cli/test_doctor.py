"""What doctor finds, and that it says what to do about it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from diskprefix.cli import doctor_machine
from diskprefix.cli.doctor_machine import folder_findings, port_finding, store_findings
from diskprefix.cli.findings import Finding
from diskprefix.settings import Settings
from diskprefix.store.codec.choice import Speeds
from tests.cli.conftest import Run
from tests.server.daemon_process import DaemonProcess
from tests.store.building import BLOCK, open_store, prompt, publication

CHECKS = {
    *(
        "python",
        "folder",
        "file system",
        "space",
        "store",
        "clock",
        "disk",
        "port",
        "torch",
        "kernels",
        "batch invariance",
    ),
    *("model", "tokenizer", "template", "tool calls"),
}


def by_check(findings: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measuring the disk takes a second, and what it reads is no matter here but in one test."""

    def reads(bytes_per_s: float | None) -> None:
        speeds = Speeds(disk_bytes_per_s=bytes_per_s, raw_bytes_per_s=1e9, planes_bytes_per_s=1e9, planes_ratio=1.4)
        monkeypatch.setattr(doctor_machine, "measure", lambda _folder: speeds)

    reads(1e9)
    return reads


def test_it_checks_everything_without_the_weights(run: Run, chat_model: Path, tmp_path: Path) -> None:
    ended = run("doctor", "--model", chat_model, "--kv-cache-dir", tmp_path / "kv", "--port", "0", "--json")
    report = json.loads(ended.stdout)
    findings = {one["check"]: one for one in report["findings"]}
    assert set(findings) == CHECKS
    problems = [one for one in report["findings"] if one["level"] == "problem"]
    assert (report["ok"], ended.exit_code) == (not problems, 1 if problems else 0)
    assert all(one["advice"] for one in report["findings"] if one["level"] in ("note", "problem"))
    assert not (tmp_path / "kv").exists(), "nothing is changed"


def test_a_client_is_served_and_a_restart_loses_nothing(run: Run, chat_model: Path, tmp_path: Path) -> None:
    args = ["--block-size", "16", "--kv-cache-min-tokens", "16", "--kv-cache-budget", "64MiB", "--device", "cpu"]
    ended = run("doctor", "--request", "--json", "--model", chat_model, "--kv-cache-dir", tmp_path / "kv", *args)
    findings = {one["check"]: one for one in json.loads(ended.stdout)["findings"]}
    assert "tokens from memory" in findings["repeated"]["text"] or "from disk" in findings["repeated"]["text"]
    assert "tokens from disk in " in findings["restart"]["text"]
    assert findings["same reply"]["level"] == findings["request"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == [], "the store of its own is gone"


def test_a_folder_that_others_may_write_to_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o777)
    (tmp_path / "kv").chmod(0o777)
    found = by_check(folder_findings(Settings(kv_cache_dir=tmp_path / "kv")))
    assert found["folder"].level == "problem"
    assert "777" in found["folder"].text


@pytest.mark.parametrize(("kind", "level"), [("tmpfs", "problem"), ("nfs4", "problem"), ("ext4", "ok"), ("", "ok")])
def test_a_file_system_that_forgets_or_is_remote_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, level: str
) -> None:
    monkeypatch.setattr(doctor_machine, "_file_system", lambda _place: kind)
    assert by_check(folder_findings(Settings(kv_cache_dir=tmp_path)))["file system"].level == level


@pytest.mark.parametrize(
    ("budget", "min_free", "level"), [(2**30, 0, "ok"), (2**50, 0, "note"), (2**30, 2**50, "problem")]
)
def test_the_budget_is_compared_with_the_free_space(tmp_path: Path, budget: int, min_free: int, level: str) -> None:
    settings = Settings(kv_cache_dir=tmp_path, kv_cache_budget=budget, kv_cache_min_free=min_free)
    assert by_check(folder_findings(settings))["space"].level == level


def test_the_disk_is_compared_with_computing(tmp_path: Path, disk: Any) -> None:
    store = open_store(tmp_path)
    store.publish(publication(store, prompt(1, 3 * BLOCK)))
    store.close()
    settings = Settings(kv_cache_dir=tmp_path)
    fast = by_check(store_findings(settings))["disk"]
    assert (fast.level, "times as fast as computing" in fast.text) == ("ok", True)
    disk(100.0)
    slow = by_check(store_findings(settings))["disk"]
    assert (slow.level, "--kv-cache-gate" in slow.advice) == ("note", True)
    disk(None)
    assert by_check(store_findings(settings))["disk"].level == "skipped"


@pytest.mark.parametrize(
    ("now", "newest", "level"), [(1.8e9, 1.7e9, "ok"), (1.8e9, 1.9e9, "note"), (1e9, 0.0, "problem")]
)
def test_a_clock_that_is_wrong_is_told(now: float, newest: float, level: str) -> None:
    assert doctor_machine._clock_finding(now, newest).level == level


def test_a_store_that_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not a store" * 1000)
    found = by_check(store_findings(Settings(kv_cache_dir=tmp_path)))["store"]
    assert (found.level, found.advice != "") == ("problem", True)


def test_a_port_that_another_program_has_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_ASK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = port_finding(Settings(port=other.getsockname()[1]))
    assert (found.level, "another program" in found.text) == ("problem", True)


def test_a_daemon_at_the_port_is_no_problem(daemon: DaemonProcess) -> None:
    found = port_finding(Settings(port=int(daemon.url.rpartition(":")[2])))
    assert (found.level, found.text.endswith(": ok")) == ("ok", True)


def test_a_model_that_is_not_here_is_not_fetched(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = run("doctor", "--model", "org/absent", "--kv-cache-dir", tmp_path, "--port", "0", "--json")
    findings = {one["check"]: one for one in json.loads(ended.stdout)["findings"]}
    assert findings["model"]["level"] == "skipped"
    assert "tokenizer" not in findings


def test_a_wrong_setting_is_one_line(run: Run) -> None:
    ended = run("doctor", "--port", "99999")
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)

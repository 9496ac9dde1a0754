"""Doctor's findings, each with what to do about it."""

from __future__ import annotations

import os
import platform
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diskprefix.errors import StoreCorrupt
from diskprefix.extras import daemon_call
from diskprefix.extras.setup import doctor_machine
from diskprefix.extras.setup.doctor_machine import (
    Finding,
    folder_findings,
    port_finding,
    store_finding,
    torch_findings,
)
from diskprefix.native import library
from diskprefix.settings import Settings
from tests.cli.conftest import Run
from tests.made_settings import made_settings
from tests.server.daemon_process import DaemonProcess
from tests.store.building import open_store

CHECKS = {"folder", "file system", "space", "store", "port", "torch", "kernels", "model", "tokenizer", "template"}


def by_check(findings: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_it_checks_everything_without_the_weights(run: Run, chat_model: Path, tmp_path: Path) -> None:
    ended = run("doctor", "--model", chat_model, "--kv-cache-dir", tmp_path / "kv", "--port", "0", "--json")
    report = ended.json
    findings = {one["check"]: one for one in report["findings"]}
    assert set(findings) == CHECKS | {"tool calls"}
    problems = [one for one in report["findings"] if one["level"] == "problem"]
    assert (report["ok"], ended.exit_code) == (not problems, 1 if problems else 0)
    assert all(one["advice"] for one in report["findings"] if one["level"] in ("note", "problem"))
    assert not (tmp_path / "kv").exists(), "nothing is changed"


def test_a_client_is_served_and_a_restart_loses_nothing(run: Run, chat_model: Path, tmp_path: Path) -> None:
    args = ["--block-size", "16", "--kv-cache-min-tokens", "16", "--kv-cache-budget", "64MiB", "--device", "cpu"]
    ended = run("doctor", "--request", "--json", "--model", chat_model, "--kv-cache-dir", tmp_path / "kv", *args)
    findings = {one["check"]: one for one in ended.json["findings"]}
    assert "tokens from memory" in findings["repeated"]["text"] or "from disk" in findings["repeated"]["text"]
    assert "tokens from disk in " in findings["restart"]["text"]
    assert findings["same reply"]["level"] == findings["request"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == [], "the store of its own is gone"


@pytest.mark.parametrize(
    ("cpu", "capability", "level"),
    [
        *(("x86_64", capability, "ok") for capability in ("AVX512", "AVX2")),
        *(("x86_64", capability, "note") for capability in ("DEFAULT", "NO AVX")),
        ("aarch64", "DEFAULT", "ok"),
    ],
)
def test_a_cpu_without_vectors_is_told(monkeypatch: pytest.MonkeyPatch, cpu: str, capability: str, level: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert by_check(torch_findings(Settings()))["torch"].level == level


@pytest.mark.parametrize(("names", "level"), [("native (amx)", "ok"), ("torch", "note")])
def test_kernels_that_could_be_faster_are_told(monkeypatch: pytest.MonkeyPatch, names: str, level: str) -> None:
    monkeypatch.setattr(library, "described", lambda: names)
    assert by_check(torch_findings(Settings()))["kernels"].level == level


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_check(folder_findings(Settings(kv_cache_dir=tmp_path / "a/b")))["folder"].text.endswith("will be created")
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = by_check(folder_findings(Settings(kv_cache_dir=tmp_path / "a/b")))
    assert (list(found), found["folder"].level) == (["folder"], "problem")
    assert str(tmp_path) in found["folder"].text


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        ("/dev/a / ext4 rw", "ext4"),
        ("none {at} tmpfs rw\n/dev/a / ext4 rw", "tmpfs"),
        ("/dev/a / ext4 rw\nnone {at} tmpfs rw\nhost:/x {at} nfs4 rw", "nfs4"),
        ("/dev/a / ext4 rw\nnone {at}-else tmpfs rw", "ext4"),
        ("/dev/a / ext4 rw\nbad", "ext4"),
        ("", ""),
    ],
)
def test_the_innermost_mount_counts_and_of_two_the_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, kind: str
) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    at = str(folder.resolve()).replace(" ", "\\040")
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_how: mounts.format(at=at))
    assert doctor_machine._file_system(folder) == kind


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
    settings = made_settings(kv_cache_dir=tmp_path, kv_cache_budget=budget, kv_cache_min_free=min_free)
    assert by_check(folder_findings(settings))["space"].level == level


def test_the_room_that_the_store_has_already_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(3000))
    disk = SimpleNamespace(f_bavail=1, f_frsize=2000)
    monkeypatch.setattr(os, "statvfs", lambda _path: disk)
    for min_free, level in ((4000, "note"), (5000, "problem")):
        settings = made_settings(kv_cache_dir=tmp_path, kv_cache_budget=2**30, kv_cache_min_free=min_free)
        assert by_check(folder_findings(settings))["space"].level == level


def test_a_store_tells_what_it_holds_or_why_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(kv_cache_dir=tmp_path)
    assert "no store yet" in store_finding(settings).text
    open_store(tmp_path).close()
    assert (store_finding(settings).level, store_finding(settings).text[:15]) == ("ok", "0 saved prompts")

    def damaged(_snapshot: Any) -> float:
        raise StoreCorrupt("a record is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(doctor_machine, "total_savings", damaged)
        found = store_finding(settings)
        assert (found.level, found.text) == ("problem", "a record is damaged")
    (tmp_path / "data.mdb").write_bytes(b"not a store" * 1000)
    found = store_finding(settings)
    assert (found.level, "move it aside" in found.advice) == ("problem", True)


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_port_that_another_program_has_is_a_problem(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_call, "_CONNECT_S", 1.0 if says else 0.05)

    def greet() -> None:
        connection, _ = other.accept()
        with connection:
            connection.sendall(says)
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as other:
        greeting = threading.Thread(target=greet)
        greeting.start()
        found = port_finding(Settings(port=other.getsockname()[1]))
        greeting.join()
    assert (found.level, "another program" in found.text) == ("problem", True)


@pytest.mark.parametrize(
    ("status", "body", "level"),
    [
        (200, b'{"status": "ok"}', "ok"),
        (503, b'{"status": "loading"}', "note"),
        (200, b'{"status": "degraded"}', "note"),
        (200, b'{"status": 1}', "problem"),
        (200, b"[1]", "problem"),
        (404, b"<html>", "problem"),
    ],
)
def test_what_answers_at_the_port_is_a_daemon_or_not(status: int, body: bytes, level: str) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert port_finding(Settings(port=server.server_port)).level == level


def test_an_address_of_another_machine_is_a_problem() -> None:
    found = port_finding(Settings(host="192.0.2.1", port=0))
    assert (found.level, "another --host" in found.advice) == ("problem", True)


def test_a_daemon_at_the_port_is_no_problem_and_no_proxy_is_asked(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    found = port_finding(Settings(port=int(daemon.url.rpartition(":")[2])))
    assert (found.level, found.text.endswith(": ok")) == ("ok", True)


def test_a_model_that_is_not_here_is_not_fetched(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = run("doctor", "--model", "org/absent", "--kv-cache-dir", tmp_path, "--port", "0", "--json")
    findings = {one["check"]: one for one in ended.json["findings"]}
    assert findings["model"]["level"] == "skipped"
    assert "tokenizer" not in findings


def test_each_model_that_is_known_by_name_is_checked(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    found = run("doctor", "--models-dir", tmp_path, "--kv-cache-dir", tmp_path / "kv", "--json").json["findings"]
    models = [(each["level"], each["text"].partition(": ")[0]) for each in found if each["check"] == "model"]
    assert models == [("problem", "one"), ("problem", "two")]
    (together,) = (each for each in found if each["check"] == "models")
    assert (together["level"], "loaded" in together["text"]) == ("note", False), "nothing is known of either"


def test_what_several_models_take_together_is_compared_with_the_limit(
    run: Run, chat_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.toml"

    def finding(limit: str, *more: str) -> tuple[str, str]:
        file.write_text("\n".join((f'[one]\nmodel = "{chat_model}"', *more, f'[two]\nmodel = "{chat_model}"')))
        report = run(
            "doctor", "--models-file", file, "--memory-limit", limit, "--kv-cache-dir", tmp_path / "kv", "--json"
        )
        (found,) = (each for each in report.json["findings"] if each["check"] == "models")
        return found["level"], found["text"]

    assert finding("64GiB")[1].endswith(": all stay loaded")
    level, text = finding("1GiB")
    assert (level, text.partition("together ")[2]) == ("ok", "they may take 1.0 GiB: they take turns")
    level, text = finding("1GiB", "pin = true")
    assert (level, text.partition("; no room ")[2]) == ("problem", "beside what is pinned (one) for two")
    assert finding("16MiB")[0] == "problem"


def test_a_folder_without_models_is_a_problem(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.extras.catalogue.catalogue.cached_models", lambda: iter(()))
    found = run("doctor", "--models-dir", tmp_path, "--kv-cache-dir", tmp_path / "kv", "--json").json["findings"]
    assert [(each["level"], each["text"]) for each in found if each["check"] == "models"] == [
        ("problem", "no model is known")
    ]

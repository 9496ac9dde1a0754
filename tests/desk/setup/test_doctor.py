"""Doctor's findings, each with what to do about it: in the machine, in a model's files, and in replies."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diskprefix import file_system
from diskprefix.daemon.catalogue import catalogue
from diskprefix.daemon.catalogue.adviser import AGENT_TOKENS
from diskprefix.daemon.settings import Settings
from diskprefix.desk.setup import doctor_machine, doctor_model, doctor_rows
from diskprefix.desk.setup.doctor_machine import (
    Finding,
    daemon_finding,
    folder_findings,
    packed_finding,
    port_finding,
    store_finding,
    torch_findings,
)
from diskprefix.desk.setup.doctor_model import model_findings
from diskprefix.desk.shared import daemon_call
from diskprefix.errors import StoreCorrupt
from diskprefix.native import library
from diskprefix.runtime import memory
from diskprefix.runtime.fetch.named_model import path_of
from diskprefix.runtime.files import fit
from diskprefix.runtime.files.fit import ModelNeeds, TokenState, fitted, needs_of_gguf
from diskprefix.runtime.files.tokenizer import Tokenizer
from diskprefix.runtime.llama.load_llama import MAKE_ROOM, placement_of
from tests.daemon.server.chat_model import CHAT_TEMPLATE, write_tokenizer
from tests.daemon.server.daemon_process import DaemonProcess
from tests.desk.conftest import Run
from tests.prefixstore.store.building import open_store
from tests.runtime.llama.test_load_llama import Loading
from tests.runtime.llama.test_load_llama import load as load
from tests.runtime.plan import tiny

CHECKS = {
    "folder",
    "file system",
    "space",
    "packed weights",
    "store",
    "your daemons",
    "port",
    "torch",
    "kernels",
    "speed",
    "llama.cpp",
    "model",
    "tokenizer",
    "template",
}
GIB = 2**30
STATE = TokenState(per_token=2**15, positions=32_768)
"""A GiB for the longest sequence."""


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    assert all(each.advice for each in findings.values() if each.level in ("note", "problem"))
    return {check: each.level for check, each in findings.items()}


def test_it_checks_everything_without_the_weights(run: Run, chat_model: Path, tmp_path: Path) -> None:
    ended = run("doctor", "--model", chat_model, "--kv-cache-dir", tmp_path / "kv", "--port", "0", "--json")
    report = ended.json
    findings = {one["check"]: one for one in report["findings"]}
    assert set(findings) == CHECKS | {"tool calls", "reuse"}
    problems = [one for one in report["findings"] if one["level"] == "problem"]
    assert (report["ok"], ended.exit_code) == (not problems, 1 if problems else 0)
    assert all(one["advice"] for one in report["findings"] if one["level"] in ("note", "problem"))
    assert not (tmp_path / "kv").exists(), "nothing is changed"
    shown = run("doctor", "--model", chat_model, "--kv-cache-dir", tmp_path / "kv", "--port", "0").stdout
    counts, advice, lasts = shown.splitlines()[-3:]
    assert counts.endswith(f", {len(findings)} checks")
    assert re.fullmatch(r"for agents here: `diskprefix pull \S+` \(.+\)", advice)
    assert re.fullmatch(r"an agent's first prompt takes .+; other models: `diskprefix list --available`", lasts)


# -- The machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "capability", "there", "kernels", "expected"),
    [
        ("x86_64", "AVX512", ("avx512", "avx2", "baseline"), "auto", {"torch": "ok", "kernels": "ok"}),
        ("x86_64", "AVX512", ("avx2", "baseline"), "avx2", {"torch": "ok", "kernels": "ok"}),
        ("x86_64", "AVX512", ("avx2", "baseline"), "baseline", {"torch": "ok", "kernels": "auto takes avx2"}),
        ("x86_64", "AVX512", ("avx2", "baseline"), "torch", {"torch": "ok", "kernels": "auto takes avx2"}),
        ("x86_64", "AVX2", (), "auto", {"torch": "ok", "kernels": "C++ compiler"}),
        ("x86_64", "AVX2", (), "torch", {"torch": "ok", "kernels": "C++ compiler"}),
        ("x86_64", "AVX512", ("baseline",), "auto", {"torch": "ok", "kernels": "install it here"}),
        ("x86_64", "DEFAULT", ("avx2", "baseline"), "auto", {"torch": "no AVX2", "kernels": "ok"}),
        ("aarch64", "DEFAULT", (), "auto", {"torch": "ok", "kernels": "C++ compiler"}),
    ],
)
def test_what_could_compute_faster_is_told(
    monkeypatch: pytest.MonkeyPatch,
    cpu: str,
    capability: str,
    there: tuple[str, ...],
    kernels: str,
    expected: dict[str, str],
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(library, "variants", lambda: there)
    monkeypatch.setattr(library, "described", lambda: "native" if there and kernels != "torch" else "torch")
    monkeypatch.setattr(library, "of_another_cpu", lambda: "install it here" if there == ("baseline",) else "")
    found = by_check(torch_findings(Settings(kernels=kernels)))
    levels(found)
    told = {check: found[check].advice or found[check].level for check in expected}
    assert all(words in told[check] for check, words in expected.items())
    assert all(name in found["kernels"].text for name in there)


def test_without_torch_the_kernels_are_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "find_spec", lambda _name: None)
    found = by_check(torch_findings(Settings()))
    assert (found["torch"].level, found["torch"].advice) == ("ok", "")
    assert "not installed: only models without a plan and images need it" in found["torch"].text
    assert re.match(r"(native|torch)\b", found["kernels"].text)


def test_a_folder_that_cannot_be_written_or_that_others_may_write_to_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, open_to_all = Settings(kv_cache_dir=tmp_path / "a/b"), Settings(kv_cache_dir=tmp_path / "kv")
    assert by_check(folder_findings(new))["folder"].text.endswith("will be created")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    found = by_check(folder_findings(open_to_all))["folder"]
    assert (found.level, "777" in found.text) == ("problem", True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    [found] = folder_findings(new)
    assert (found.check, found.level, str(tmp_path) in found.text) == ("folder", "problem", True)


ROOT_MOUNT = "1 0 8:1 / / rw - ext4 /dev/a rw"


@pytest.mark.parametrize(
    ("mounts", "kind", "level"),
    [
        (ROOT_MOUNT, "ext4", "ok"),
        (f"2 1 0:5 / {{at}} rw shared:1 - tmpfs none rw\n{ROOT_MOUNT}", "tmpfs", "problem"),
        (
            f"{ROOT_MOUNT}\n2 1 0:5 / {{at}} rw - tmpfs none rw\n3 1 0:6 / {{at}} rw - nfs4 host:/x rw",
            "nfs4",
            "problem",
        ),
        (f"{ROOT_MOUNT}\n2 1 0:5 / {{at}}-else rw - tmpfs none rw", "ext4", "ok"),
        (f"{ROOT_MOUNT}\nbad\n2 1 0:5 / {{at}} - \n", "ext4", "ok"),
        ("", "", "ok"),
    ],
)
def test_a_file_system_that_forgets_or_is_remote_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, kind: str, level: str
) -> None:
    """The innermost mount counts, and of two the later."""
    folder = tmp_path / "with space"
    folder.mkdir()
    at = str(folder.resolve()).replace(" ", "\\040")
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(mounts.format(at=at), encoding="utf-8")
    found = by_check(folder_findings(Settings(kv_cache_dir=folder)))["file system"]
    assert (found.level, kind in found.text) == (level, True)


def test_a_store_that_ends_with_its_container_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text("1 0 0:30 / / rw - overlay overlay rw", encoding="utf-8")
    levels = []
    for volume in ("", str(tmp_path)):
        monkeypatch.setenv(file_system.VOLUME, volume)
        found = by_check(folder_findings(Settings(kv_cache_dir=tmp_path)))["file system"]
        levels.append((found.level, f"-v diskprefix:{tmp_path}" in found.advice))
    assert levels == [("ok", False), ("problem", True)]


@pytest.mark.parametrize(
    ("free", "min_free", "level"),
    [(GIB, 0, "ok"), (GIB - 4000, 0, "note"), (2000, 4000, "note"), (2000, 5000, "problem")],
)
def test_the_budget_is_compared_with_the_free_space_and_the_room_that_the_store_has_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, min_free: int, level: str
) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(3000))
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_blocks=2, f_bavail=1, f_frsize=free))
    settings = Settings(kv_cache_dir=tmp_path, kv_cache_new_budget=GIB, kv_cache_min_free=min_free)
    assert by_check(folder_findings(settings))["space"].level == level
    refused = by_check(folder_findings(replace(settings, kv_cache_budget=3 * GIB)))["space"]
    assert (refused.level, "more than the disk of" in refused.advice) == ("problem", True)


def test_the_budget_is_that_of_the_folder_unless_another_is_given(tmp_path: Path) -> None:
    def said(**settings: Any) -> str:
        return by_check(folder_findings(Settings(kv_cache_dir=tmp_path, **settings)))["space"].text

    assert said(kv_cache_new_budget=2 * GIB).endswith("budget 2.0 GiB")
    open_store(tmp_path, budget_bytes=48 << 20).close()
    assert said(kv_cache_new_budget=2 * GIB).endswith("budget 48.0 MiB")
    assert said(kv_cache_budget=3 * GIB).endswith("budget 3.0 GiB")


def test_the_folder_of_packed_weights_is_told_with_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / f"{1:032x}.packed").write_bytes(bytes(3 << 20))
    found = packed_finding(Settings(packed_weights=str(folder)))
    assert found.text.startswith(f"1 file, 3.0 MiB in {folder}; room for a model of ")
    assert (found.level, found.advice) == ("ok", "")
    assert packed_finding(Settings(packed_weights="off")).text.startswith("off: ")
    assert packed_finding(Settings(packed_weights=str(tmp_path / "new" / "folder"))).level == "ok"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    found = packed_finding(Settings(packed_weights=str(tmp_path / "file" / "weights")))
    assert (found.level, found.text) == ("note", f"{tmp_path / 'file'} cannot be written")
    monkeypatch.setattr(doctor_machine, "distrusted_by_root", lambda _path: "it belongs to another user (uid 7)")
    found = packed_finding(Settings(packed_weights=str(folder)))
    assert (found.level, found.text) == ("note", "it belongs to another user (uid 7)")
    assert found.advice


def test_a_file_whose_packed_weights_have_no_room_on_the_disk_is_told(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(**changes: Any) -> bool:
        settings = Settings(model=str(gguf), packed_weights=str(tmp_path / "weights"))
        return "packed weights" in by_check(model_findings(replace(settings, **changes), lambda _line: None))

    assert not told()
    usage = type("Usage", (), {"total": 1 << 40, "free": 1000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    settings = Settings(model=str(gguf), packed_weights=str(tmp_path / "weights"))
    found = by_check(model_findings(settings, lambda _line: None))["packed weights"]
    assert (found.level, found.text.rpartition(": ")[2]) == ("note", "at most 500 B")
    assert found.advice
    assert told()
    assert not told(packed_weights="off")
    assert not told(weights="native")


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


@pytest.mark.parametrize(
    ("says", "level"),
    [
        (b"", "problem"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "problem"),
        (b'HTTP/1.0 200 -\r\n\r\n{"status": "ok"}', "note"),
        (b'HTTP/1.0 503 -\r\n\r\n{"status": "loading"}', "note"),
        (b'HTTP/1.0 200 -\r\n\r\n{"status": "degraded"}', "note"),
        (b'HTTP/1.0 200 -\r\n\r\n{"status": 1}', "problem"),
        (b"HTTP/1.0 200 -\r\n\r\n[1]", "problem"),
        (b"HTTP/1.0 404 -\r\n\r\n<html>", "problem"),
    ],
)
def test_what_answers_at_the_port_is_a_daemon_or_not(says: bytes, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_call, "_CONNECT_S", 1.0 if says else 0.05)

    def answer() -> None:
        connection, _ = other.accept()
        with connection:
            if says.startswith(b"HTTP"):
                connection.recv(1 << 16)
            connection.sendall(says)
            connection.shutdown(socket.SHUT_WR) if says else None
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=answer)
        answering.start()
        found = port_finding(Settings(port=other.getsockname()[1]))
        answering.join()
    assert found.level == level
    assert ("another program" in found.text) == (level == "problem")


def test_a_daemon_at_the_port_is_no_problem_and_an_address_of_another_machine_is_one(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    found = port_finding(Settings(port=int(daemon.url.rpartition(":")[2])))
    assert (found.level, found.text.endswith(": ok")) == ("ok", True), "no proxy is asked"
    assert f"{daemon.url}: " in daemon_finding().text
    found = port_finding(Settings(host="192.0.2.1", port=0))
    assert (found.level, "another --host" in found.advice) == ("problem", True)


def test_a_model_that_is_not_here_is_not_fetched(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = run("doctor", "--model", "org/absent", "--kv-cache-dir", tmp_path, "--port", "0", "--json")
    findings = {one["check"]: one for one in ended.json["findings"]}
    assert findings["model"]["level"] == "skipped"
    assert "tokenizer" not in findings


def test_each_model_that_is_known_by_name_is_checked_and_none_is_a_problem(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> dict[str, list[tuple[str, str]]]:
        report = run("doctor", "--models-dir", tmp_path, "--kv-cache-dir", tmp_path / "kv", "--json").json["findings"]
        names = ("model", "models")
        return {name: [(one["level"], one["text"]) for one in report if one["check"] == name] for name in names}

    monkeypatch.setattr("diskprefix.daemon.catalogue.catalogue.cached_models", lambda: iter(()))
    assert found()["models"] == [("problem", "no model is known")]
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    assert [(level, text.partition(": ")[0]) for level, text in found()["model"]] == [
        ("problem", "one"),
        ("problem", "two"),
    ]
    [(level, text)] = found()["models"]
    assert (level, "loaded" in text) == ("note", False), "nothing is known of either"


@pytest.mark.slow
def test_doctor_compares_the_memory_of_all_models_with_the_limit(run: Run, chat_model: Path, tmp_path: Path) -> None:
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


# -- A model's files -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, sizes: Any) -> Path:  # noqa: ARG001
    write_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(needed: int, free: int) -> None:
        def needs(folder: Path, _files: object, dtype: str) -> ModelNeeds:
            num_bytes = needed * (2 if dtype == "float32" else 1)
            return ModelNeeds(name=folder.name, weights={"bfloat16": num_bytes}, state=STATE)

        monkeypatch.setattr(catalogue, "needs_of_folder", needs)
        monkeypatch.setattr(memory, "available_ram_bytes", lambda: free)

    set_to(GIB, 10 * GIB)
    return set_to


def found_in(folder: Path, **settings: Any) -> dict[str, Finding]:
    return by_check(model_findings(Settings(model=str(folder), **settings), lambda _line: None))


@pytest.mark.parametrize(
    ("needed", "settings", "level"),
    [
        (5, {}, "ok"),
        (9, {}, "note"),
        (11, {}, "problem"),
        (9, {"dtype": "float32"}, "problem"),
        (11, {"device": "cuda"}, "ok"),
    ],
)
def test_weights_are_compared_with_the_memory(
    folder: Path, sizes: Any, needed: int, settings: dict[str, Any], level: str
) -> None:
    sizes(needed * GIB, 10 * GIB)
    assert levels(found_in(folder, **settings))["model"] == level


def without_a_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), {"model": "problem"}),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), {"model": "ok", "tokenizer": "problem"}),
        (without_a_template, {"model": "ok", "tokenizer": "ok", "template": "note"}),
    ],
)
def test_what_a_folder_lacks_is_told(folder: Path, change: Callable[[Path], object], expected: dict[str, str]) -> None:
    change(folder)
    assert levels(found_in(folder)) == expected


@pytest.fixture
def gguf(tmp_path: Path, sizes: Any, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_0")


def test_a_file_is_looked_at_with_its_tokenizer(gguf: Path) -> None:
    assert levels(found_in(gguf)) == {"model": "ok", "tokenizer": "ok", "template": "ok"} | {
        "tool calls": "note",
        "reuse": "ok",
    }


def test_a_file_is_a_problem_where_the_start_would_refuse_it(gguf: Path, sizes: Any) -> None:
    needed = fitted(needs_of_gguf(gguf, "auto"), 0).needed_bytes
    sizes(GIB, needed - 1)
    found = found_in(gguf)["model"]
    assert (found.level, dict(found.table)["room to compute"]) == ("problem", fit.ROOM_BYTES)
    sizes(GIB, needed)
    assert levels(found_in(gguf))["model"] == "ok"


def test_a_model_that_is_only_partly_here_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (None, "org/absent", "not a name//"):
        assert path_of(name) is None


@pytest.mark.parametrize(
    ("text", "level", "says"),
    [
        (None, "ok", "end after a message"),
        (
            "<|im_start|>user\n{{ messages[0].content }}\n{{ messages[1].content }}<|im_end|>\n"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "ok",
            "but not after the system message",
        ),
        ("{% for message in messages %}{{ message.content }} {% endfor %}", "note", "cannot end between two messages"),
        ("{{ raise_exception('no') }}", "problem", "no"),
    ],
)
def test_the_boundaries_of_a_template_are_told(folder: Path, text: str | None, level: str, says: str) -> None:
    if text is not None:
        (folder / "template.jinja").write_text(text)
    found = found_in(folder, chat_template=None if text is None else folder / "template.jinja")
    assert (levels(found)["template"], says in found["template"].text) == (level, True)


def test_what_the_template_costs_is_told_with_what_can_be_done(folder: Path) -> None:
    template = folder / "template.jinja"
    template.write_text(f"<|im_start|>{{{{ strftime_now('%d %b %H:%M') }}}}<|im_end|>\n{CHAT_TEMPLATE}")
    found = found_in(folder, chat_template=template)["reuse"]
    assert found.level == "note"
    assert re.search(r"; \d+ % on the next day; \d+ % an hour later", found.text)
    assert "--template-date" in found.advice
    fixed = found_in(folder, chat_template=template, template_date="2026-05-01")["reuse"]
    assert (fixed.level, fixed.advice) == ("ok", "")


def test_a_tokenizer_that_changes_texts_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(found_in(folder))["tokenizer"] == "ok"
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda *args, **how: decode(*args, **how).lower())
    assert levels(found_in(folder))["tokenizer"] == "note"


@pytest.mark.parametrize(
    ("name", "takes_tools", "level"),
    [("none", True, "note"), ("json", True, "note"), ("qwen", True, "ok"), ("json", False, "note")],
)
def test_calls_in_no_known_format_are_told(name: str, takes_tools: bool, level: str) -> None:
    found = doctor_model._calls_finding(name, takes_tools)
    assert ("was not trained to call tools" in found.text) == (not takes_tools)
    assert (found.level, "`diskprefix pull " in found.advice) == (level, level == "note")


def test_another_kind_of_rows_is_advised_only_where_prompts_gain() -> None:
    prompt_s = {"8": 200.0, "15": 300.0, "bf16": 190.0}
    costs = {rows: doctor_rows.RowsCost(s / AGENT_TOKENS / 1e9, 1e-9 / 30) for rows, s in prompt_s.items()}
    alike = doctor_rows._finding(costs, "8")
    assert (alike.level, alike.advice) == ("ok", "")
    assert "a prompt of 19,000 tokens in 200 s, replies of 30 tokens/s (--rows 8, the fastest" in alike.text
    costs["bf16"] = doctor_rows.RowsCost(50.0 / AGENT_TOKENS / 1e9, 1e-9 / 20)
    faster = doctor_rows._finding(costs, "8")
    assert faster.level == "note"
    assert faster.advice.startswith("--rows bf16: a prompt of 19,000 tokens in 50 s, replies of 20 tokens/s; ")
    assert doctor_rows._finding({}, "8").level == "skipped"


def test_doctor_says_how_many_layers_a_device_computes(load: Loading) -> None:
    load.api.gpus = {"CUDA0": (1, 1 << 20)}
    settings = Settings(model=str(load.file), runtime="llama")
    findings = model_findings(settings, lambda _line: None)
    of_layers = next(finding for finding in findings if finding.check == "layers")
    line = placement_of(settings).line
    assert "computes 0 of 3 layers" in line
    assert (of_layers.level, of_layers.text, of_layers.advice) == ("note", line, MAKE_ROOM)

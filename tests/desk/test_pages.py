"""Every command that the pages show is run, or is listed here with the reason why it is not."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from diskprefix.daemon.cli import cli
from tests.daemon.server.daemon_process import DaemonProcess
from tests.desk.conftest import TAKEN_AWAY, Run
from tests.exceptions import exceptions

ROOT = Path(__file__).parents[2]
FOLDERS = ("diskprefix", "policies", "systemd", "tests", "tools")
PAGES = [
    str(page.relative_to(ROOT))
    for page in (
        ROOT / "README.md",
        *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("README.md"))),
    )
]
_PROGRAM = re.compile(
    r"(?:\$ )?((?:\.venv(?:-tools)?/bin/|tools/|/opt/)?(?:diskprefix|demo|test|check|bench|python3?|pip|cp|mkdir|"
    r"systemctl|journalctl|export|echo|chmod|curl|podman|kill|openssl|promtool)\b.*)"
)
_NOT_RUN = {
    r"tools/(demo|test|check)|\.venv-tools/bin/python -m pytest": "takes minutes, and tests run in it",
    r"tools/bench (restart|together|step)": "takes minutes; tests/tools/test_bench.py runs a short one",
    r"python3 -m venv|(\.venv/bin/)?pip |\.venv/bin/diskprefix serve$": "installs packages from an index",
    r"cp systemd/|systemctl |journalctl |kill ": "changes the machine's services, as root",
    r"export ": "sets variables of the reader's shell",
    r"(echo|chmod) .*/etc/": "writes to /etc, as root",
    r"podman ": "no image is made in CI before a release; tests/tools/test_image.py does what it can",
    r"diskprefix doctor": "imports a model's tokenizer and measures the disk; tests/desk/setup/test_doctor.py does it",
    r"diskprefix (pull|list|show|rm) ": "needs a hub, or models; tests/desk/models does it",
    r"diskprefix launch": "starts an agent; tests/desk/clients/test_launch.py does it",
    r"diskprefix (run|stop) ": "fetches a model, starts and ends daemons; tests/desk/talk/test_run.py does it",
    r"diskprefix service ": "changes the reader's services; tests/desk/setup/test_service.py does it",
    **exceptions("NOT_RUN"),
}
"""Commands that are not run here, each with the reason."""


def commands(page: str) -> Iterator[str]:
    """The commands in the indented and fenced blocks of a page, without comments. A command may have several lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = (re.sub(r"\s+#\s.*$", "", line) for line in text.splitlines())
    is_fenced = False
    for line in lines:
        if line.startswith("```"):
            is_fenced = not is_fenced
            continue
        block = line.strip() if line.startswith("    ") else line if is_fenced and line.startswith("$ ") else ""
        match = _PROGRAM.fullmatch(block)
        if match is None:
            continue
        command = match[1]
        while command.endswith("\\") or command.count("'") % 2:
            command = command.removesuffix("\\") + ("\n" if command.count("'") % 2 else " ") + next(lines).strip()
        yield command.strip()


SHOWN = sorted({(page, command) for page in PAGES for command in commands(page)})


def reason_not_to_run(command: str) -> str | None:
    return next((reason for pattern, reason in _NOT_RUN.items() if re.match(pattern, command)), None)


def test_commands_are_found_in_the_pages() -> None:
    found = {command.split()[1] for _, command in SHOWN if command.startswith("diskprefix ")}
    assert "diskprefix/prefixstore/remote/README.md" in {page for page, _ in SHOWN}
    assert {"serve", "inspect", "verify", "purge", "backup", "export", "warm", "simulate", "doctor"} <= found
    assert any(command.startswith("curl ") for _, command in SHOWN)


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    unused = [pattern for pattern in _NOT_RUN if not any(re.match(pattern, command) for _, command in SHOWN)]
    assert unused == []


@pytest.fixture(scope="module")
def place(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pages")
    body = {"messages": [{"role": "user", "content": "What do the birds do when the tide goes out? " * 8}]}
    asked = body | {"max_tokens": 2, "temperature": 0, "prefix_cache": {"scope": "full", "salt": "pages"}}
    with daemon.client() as client:
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
        state = client.get("/props").json()["full_cache"]["state"]
    daemon.wait_saved()
    (place / "request.json").write_text(json.dumps(body | {"prefix_cache": {"salt": "pages"}}))
    (place / "conversation.json").write_text(json.dumps(body["messages"]))
    (place / "yesterday.jsonl").write_text(json.dumps(body) + "\n")
    for name in ("prompt.txt", "document.txt"):
        (place / name).write_text("You look after a small library. " * 8)
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]} for at in (0, 1000)]
    (place / "day.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "namespace.key").write_text("known to all machines")
    (place / "source").symlink_to(state["dir"])
    return place


@pytest.fixture
def at_home(place: Path, run: Run, daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of the store, and the environment of somebody who reads the pages."""
    folder = tmp_path / "kv"
    assert run("backup", folder, "--kv-cache-dir", (place / "source").resolve()).exit_code == 0
    monkeypatch.chdir(place)
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", str(folder))
    monkeypatch.setenv("DISKPREFIX_URL", daemon.url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def first_entry(run: Run) -> str:
    return str(run("inspect", "--json").json["entries"][0]["id"])[:12]


@pytest.mark.cases(13)
@pytest.mark.parametrize(
    ("page", "command"), [shown for shown in SHOWN if reason_not_to_run(shown[1]) is None], ids=lambda one: one[:60]
)
def test_a_command_of_a_page_works(page: str, command: str, at_home: Path, run: Run, daemon: DaemonProcess) -> None:
    command = command.replace("/var/cache/diskprefix", str(at_home)).replace("/var/cache/vllm-kv", str(at_home / "kv"))
    command = re.sub(r"http://127\.0\.0\.1:8642|localhost:8642", daemon.url, command)
    if command.startswith("curl "):
        curl = shutil.which("curl")
        if curl is None:
            pytest.skip("needs curl")
        subprocess.run([curl, "--fail", "--silent", *shlex.split(command)[1:]], check=True, capture_output=True)
        return
    if command.startswith("openssl "):
        subprocess.run(command, shell=True, check=True, cwd=at_home)
        return
    assert command.startswith("diskprefix "), f"{page}: run {command!r} here, or give a reason in _NOT_RUN"
    args = shlex.split(command)[1:]
    if "3fa9" in args:
        args[args.index("3fa9")] = first_entry(run)
    if args[0] == "serve":
        args.append("--print-config")
    if args[0] == "import" and not Path(args[1]).exists():
        assert run("export", first_entry(run), "-o", args[1]).exit_code == 0
    if args[0] == "restore":
        assert run("backup", at_home / "backup").exit_code == 0
        args.append("--yes")
    ended = run(*args)
    assert ended.exit_code == 0, ended.stderr


INLINE = sorted(
    {
        (page, re.sub(r"\s+", " ", found))
        for page in PAGES
        for found in re.findall(r"`(diskprefix [a-z][^`]*)`", (ROOT / page).read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize(("page", "command"), INLINE, ids=lambda one: one[:60])
def test_a_command_in_the_text_of_a_page_has_options_that_exist(page: str, command: str) -> None:
    words = command.split()[1:]
    found: click.Command | None = cli
    while isinstance(found, click.Group) and words:
        found = found.get_command(click.Context(found), words.pop(0))
    if found is None and command.split()[1] in TAKEN_AWAY:
        pytest.skip("its room was taken away")
    assert found is not None, f"{page}: {command}"
    known = {"--help"}.union(*((*parameter.opts, *parameter.secondary_opts) for parameter in found.params))
    flags = [re.sub(r"[\]=].*", "", word.strip("[]")) for word in words if word.strip("[").startswith("--")]
    assert set(flags) <= known, f"{page}: {command}"

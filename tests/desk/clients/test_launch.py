"""`diskprefix launch`, with agents and daemons that are small programs: what it writes, shares, refuses and removes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants
from msgspec.structs import replace

from diskprefix.daemon.server.process.router_line import STOPPED
from diskprefix.daemon.server.process.token_file import agents_key, published_token, token_for
from diskprefix.desk.clients import launch_command
from diskprefix.desk.clients.first_prompt_size import counted_tokens
from diskprefix.desk.shared import daemon_call, daemon_choice, launched_daemon, model_choice
from diskprefix.desk.shared.daemon_call import Answer
from diskprefix.desk.shared.model_choice import NoAgentModel
from diskprefix.desk.shared.own_daemon import own_urls
from diskprefix.desk.shared.recipes.recipe import Served, agent_called, agents, recipe
from diskprefix.errors import SettingsError
from diskprefix.folders import cache_home
from diskprefix.runtime.fetch.proposals import require_repository
from diskprefix.user_key import user_key
from tests.daemon.server.daemon_process import DaemonProcess, running_daemon
from tests.desk.conftest import Ended, Run
from tests.desk.small_daemon import health, models, small_daemon
from tests.waiting import wait_for

MINE = Served(url="https://example.com", model="mine", key="k", context=4096)
"""What the user's own settings name."""

AGENT = """\
import json, os, subprocess, sys
from pathlib import Path

folder = Path(os.environ["RECORDS"])
name = Path(sys.argv[0]).name
(folder / f"{name}.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
# It keeps something beside its settings, as agents do.
for key in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "QWEN_HOME", "CLINE_DIR"):
    if key in os.environ:
        Path(os.environ[key], "history.jsonl").write_text("{}")
exec(os.environ.get("AGENT_DOES", ""))
"""
SERVE = """\
import fcntl, json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

with open(os.environ["RECORDS"] + "/served", "a") as file:
    print(*sys.argv[1:], file=file)
if "broken" in sys.argv:
    sys.exit("error: broken holds no weights")

class Daemon(BaseHTTPRequestHandler):
    def do_GET(self):
        status = "loading" if "slow" in sys.argv else "ok"
        model = sys.argv[sys.argv.index("--model") + 1] if "--model" in sys.argv else "model-1"
        card = {"id": model, "context_length": 32768, "capabilities": ["tool_use"], "needs": {"weights": 1}}
        body = {"status": status, "data": [card]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"input_tokens": 7000}')

    def log_message(self, *args):
        pass

server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Daemon)
folder = Path(os.environ.get("XDG_CACHE_HOME") or os.environ["HOME"] + "/.cache", "diskprefix/daemons")
folder.mkdir(parents=True, exist_ok=True)
with open(folder / f"127.0.0.1_{server.server_port}", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print(os.getpid(), end=" token", file=file, flush=True)
    server.serve_forever()
"""


class Place:
    """A home folder, programs, and what they record."""

    def __init__(self, root: Path) -> None:
        self.home, self.bin, self.records = root / "home", root / "bin", root / "records"
        self.launches = self.home / ".config/diskprefix/launch"
        self.logs = self.home / ".local/state/diskprefix/launch"
        for folder in (self.home, self.bin, self.records):
            folder.mkdir()
        (self.bin / "serve.py").write_text(SERVE, encoding="utf-8")
        # Starts the command with the small daemon, in a process of its own.
        code = "import sys\nfrom diskprefix.daemon.cli import main\n"
        code += f"{PATCH.format(self.bin / 'serve.py')}\nmain(sys.argv[1:])"
        (self.bin / "again.py").write_text(code, encoding="utf-8")
        for agent in agents():
            program = self.bin / agent.program
            program.write_text(f"#!{sys.executable} -S\n{AGENT}", encoding="utf-8")
            program.chmod(0o755)
            for file in recipe(agent.name, MINE).files:
                self.write(file.path.replace("~/", ""), f"{file.text}\n\n ")

    def write(self, path: str, text: str) -> None:
        (self.home / path).parent.mkdir(parents=True, exist_ok=True)
        (self.home / path).write_text(text, encoding="utf-8")

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.home.rglob("*") if path.is_file()}

    def recorded(self, program: str) -> tuple[list[str], dict[str, str]]:
        arguments, environment = json.loads((self.records / f"{program}.json").read_text(encoding="utf-8"))
        return arguments, environment

    def served(self) -> list[str]:
        file = self.records / "served"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def is_daemon_alive(self) -> bool:
        return launched_daemon.LaunchedDaemon(folder=self.launches, logs=self.logs).url() is not None

    def again(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.bin / "again.py"), "launch", *arguments]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


PATCH = """\
from diskprefix.desk.clients import launch_command
from diskprefix.desk.shared import daemon_choice, launched_daemon, model_choice
model_choice.require_repository = str
launched_daemon.SERVE = (sys.executable, "-S", "{}")
launch_command.own_urls = daemon_choice.own_urls = lambda: []
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(tmp_path)
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORDS", str(made.records))
    unset = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "DISKPREFIX_URL", "DISKPREFIX_MODEL", "AGENT_DOES")
    for name in (*unset, "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(launched_daemon, "SERVE", (sys.executable, "-S", str(made.bin / "serve.py")))
    # One that runs on this machine is not for the test.
    for module in (launch_command, daemon_choice):
        monkeypatch.setattr(module, "own_urls", list)
    monkeypatch.setenv("DISKPREFIX_PORT", "0")
    # Its daemon serves a model of any name.
    monkeypatch.setattr(
        model_choice, "require_repository", lambda name: require_repository(name) if ":" in name else name
    )
    yield made
    if made.is_daemon_alive():
        # A test has failed.
        os.kill(json.loads((made.launches / "daemon.json").read_text(encoding="utf-8"))["pid"], signal.SIGKILL)


CARDS: list[dict[str, Any]] = [
    {"id": "one", "context_length": 32_768, "loaded": False, "problem": "no weights"},
    {"id": "two", "context_length": 32_768, "loaded": False, "aliases": ["small"], "needs_bytes": 1 << 20},
    {"id": "three", "context_length": 4096, "loaded": True},
]


SPEED = (200, {"full_cache": {"gate": {"prefill_s_per_token": 0.01}}})


@pytest.fixture
def url() -> Iterator[str]:
    with small_daemon(models=[models(CARDS[1])]) as daemon:
        yield daemon.url


def lines(ended: Ended) -> list[str]:
    return ended.stderr.splitlines()


@pytest.mark.parametrize("agent", agents(), ids=lambda agent: agent.name)
def test_each_agent_gets_the_model_and_cleaning_leaves_the_users_files_byte_for_byte(
    run: Run, place: Place, url: str, agent: Any
) -> None:
    before = place.files()
    ended = run("launch", agent.program, "--url", url, "--api-key", "k-1", "--", "-p", "a b", "--model", "x")
    assert ended.exit_code == 0, ended.stderr
    uses = f"{agent.title} uses two at {url}; its profile is {place.launches / agent.name}"
    assert lines(ended) == [uses]
    arguments, environment = place.recorded(agent.program)
    assert arguments[-4:] == ["-p", "a b", "--model", "x"]
    new = {path: text for path, text in place.files().items() if path not in before}
    assert [path for path in new if not path.is_relative_to(place.launches)] == []
    told = "".join([*environment.values(), *(text.decode() for text in new.values())])
    assert url in told
    assert "k-1" in told
    assert [path for path, text in new.items() if b"k-1" in text and path.stat().st_mode & 0o77] == []
    assert {path: text for path, text in place.files().items() if path in before} == before
    ended = run("launch", agent.name, "--clean", "--yes")
    assert (ended.exit_code, place.files()) == (0, before)
    assert not place.launches.parent.exists()
    assert lines(run("launch", "--clean", "--yes")) == ["nothing to remove"]


def test_the_daemon_is_asked_without_a_proxy_and_the_exit_code_is_the_agents(
    run: Run, place: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "a.example")
    monkeypatch.setenv("no_proxy", "b.example, a.example")
    for does, code in (("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + 9)):
        monkeypatch.setenv("AGENT_DOES", does)
        assert run("launch", "goose", "--url", url).exit_code == code
    environment = place.recorded("goose")[1]
    assert environment["NO_PROXY"] == environment["no_proxy"] == "a.example,b.example,127.0.0.1"


def test_launch_takes_the_named_model_or_one_in_memory(run: Run, place: Place) -> None:
    def model_of(*options: str) -> tuple[str, list[str]]:
        ended = run("launch", "goose", "--url", daemon.url, *options)
        assert ended.exit_code == 0, ended.stderr
        return place.recorded("goose")[1]["GOOSE_MODEL"], [line for line in lines(ended) if "warning" in line]

    with small_daemon(models=[models(*CARDS)]) as daemon:
        assert model_of() == ("two", []), "it suits agents, and the one in memory does not"
        model, [warning] = model_of("--model", "three")
        assert (model, "takes 4,096 tokens" in warning) == ("three", True)
        assert warning.endswith("; the daemon also has --model two (1.0 MiB of memory)")
        assert "takes 4,096 tokens" in run("launch", "goose", "--url", daemon.url, "--model", "three", "--print").stderr
        assert model_of("--model", "small") == ("two", [])
        for name, words in (("four", ("serves one, two, three", "four")), ("one", ("cannot be served: no weights",))):
            run("launch", "goose", "--url", daemon.url, "--model", name).assert_refused(2, *words)
    with small_daemon(models=[models({"id": "x", "context_length": 32_768, "capabilities": ["chat"]})]) as daemon:
        refused = run("launch", "goose", "--url", daemon.url)
        refused.assert_refused(2, "x was not trained to call tools", "or start goose all the same: --anyway")
        assert "not trained to call tools" in (warning := model_of("--anyway")[1][0])
        sizes = r"\S+ GiB, \S+ GiB of memory"
        assert re.search(rf"; fetch another with `diskprefix pull \S+` \({sizes}", warning)


def test_the_largest_fetched_model_that_fits_and_calls_tools_is_served(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: dict[str, dict[str, Any]] = {
        "mute": {"file_bytes": 9, "fits": True, "context": 32_768, "template": "{{ messages }}"},
        "vast": {"file_bytes": 8, "fits": False, "context": 32_768, "template": "{{ tools }}"},
        "short": {"file_bytes": 7, "fits": True, "context": 4096, "template": "{{ tools }}"},
        "right": {"file_bytes": 6, "fits": True, "context": 32_768, "template": "{{ tools }}"},
        "small": {"file_bytes": 5, "fits": True, "context": 32_768, "template": "{{ tools }}"},
        "unread": {"file_bytes": None, "fits": None, "context": None, "template": "{{ tools }}"},
    }
    monkeypatch.setattr(
        "diskprefix.daemon.catalogue.catalogue.cached_models", lambda: [(name, place.home / name) for name in fetched]
    )
    for name in fetched:
        (place.home / name).mkdir()
    monkeypatch.setattr(model_choice, "row_of", lambda known: {"name": known.name, **fetched[known.name]})
    monkeypatch.setattr(model_choice, "template_of", lambda path: fetched[path.name]["template"])
    assert model_choice.flags_of_model(None) == ["--model", "right"]
    assert model_choice.flags_of_model("any") == ["--model", "any"]
    place.write(".config/diskprefix/models.toml", '[big]\nmodel = "a/b"\naliases = ["large"]\n')
    assert model_choice.flags_of_model(None) == []
    assert model_choice.flags_of_model("large") == []
    assert model_choice.flags_of_model("any") == ["--model", "any"]


def test_anyway_starts_the_embedded_model_where_none_suits_agents(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place
    asked = list[str | None]()

    def find(_stack: ExitStack, model: str | None, _key: str | None) -> NoReturn:
        asked.append(model)
        raise NoAgentModel("none suits") if model is None else SettingsError("enough")

    monkeypatch.setattr(launch_command, "find_daemon", find)
    run("launch", "pi").assert_refused(2, "none suits")
    run("launch", "pi", "--anyway").assert_refused(2, "enough")
    assert asked == [None, None, "SmolLM2-135M-Instruct"]


def test_launch_refuses_with_one_line_and_advice(
    run: Run, place: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("launch", "pi").assert_refused(2, "no model that calls tools and fits", "`diskprefix pull ", "--anyway takes")
    run("launch", "pi", "--url", "http://127.0.0.1:1").assert_refused(1, "no daemon answers at http://127.0.0.1:1 (")
    ended = run("launch", "pi", "--model", "broken")
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 2), "where its daemon keeps prompts is said before"
    assert "the daemon ended: broken holds no weights (its log: " in ended.stderr
    run("launch", "goose", "--model", "m")
    old, new = place.logs / "daemon.log.1", place.logs / "daemon.log"
    assert old.read_text(encoding="utf-8") == "error: broken holds no weights\n", "the log of the launch before is kept"
    assert new.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(daemon_choice, "own_urls", lambda: ["http://127.0.0.1:0"])
    stopping = Answer(200, b'{"status": "stopping"}')
    monkeypatch.setattr(daemon_choice, "running_daemon", lambda _url, _key: lambda *_: stopping)
    run("launch", "pi").assert_refused(1, "127.0.0.1:0 serves no requests: its status is stopping")
    (place.bin / "cline").unlink()
    run("launch", "cline", "--url", url).assert_refused(2, "Cline is not installed", "install it: npm install -g cline")
    listed = run("launch").stdout.splitlines()
    assert f"codex     Codex        {place.bin / 'codex'}" in listed
    assert f"claude    Claude Code  {place.bin / 'claude'}" in listed
    assert "cline     Cline        not installed: npm install -g cline" in listed


def test_every_agent_sends_a_key_of_the_daemons_address_and_where_nobody_is_named_of_its_start(
    run: Run, place: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str:
        assert run("launch", "goose", "--url", url).exit_code == 0
        assert run("launch", "opencode", "--url", url).exit_code == 0
        [of_goose, of_opencode] = place.recorded("goose")[1], place.recorded("opencode")[1]
        file = Path(of_opencode["OPENCODE_CONFIG"])
        settings = json.loads(of_opencode["OPENCODE_CONFIG_CONTENT"])
        assert file.stat().st_mode & 0o777 == 0o600
        assert settings["provider"]["diskprefix"]["options"]["apiKey"] == of_goose["OPENAI_API_KEY"]
        assert of_goose["OPENAI_API_KEY"] in file.read_text(encoding="utf-8")
        return of_goose["OPENAI_API_KEY"]

    of_address = user_key(urlsplit(url).netloc)
    assert key() == key() == of_address
    told = json.loads(run("clients", "goose", "--url", url, "--json").stdout)["clients"][0]["environment"]
    assert told["OPENAI_API_KEY"] == key()
    with monkeypatch.context() as patched:
        patched.setattr(daemon_call, "token_of_peer", lambda _connected: "abc")
        assert key() == of_address
        patched.setattr(daemon_call, "NAMES_USERS", False)
        assert key() == agents_key("abc")


def test_print_shows_everything_and_does_nothing(
    run: Run, place: Place, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = place.files()
    ended = run("launch", "codex", "--url", url, "--print", "--", "exec", "a b")
    assert ended.exit_code == 0, ended.stderr
    assert f"export CODEX_HOME={place.launches / 'codex/.codex'}" in ended.stdout
    assert '    model = "two"' in ended.stdout
    assert "export DISKPREFIX_API_KEY=KEY\n" in ended.stdout
    assert not cache_home().exists()
    assert ended.stdout.endswith("Then: codex exec 'a b'\n")
    ended = run("launch", "codex", "--print", "--model", "m")
    assert ended.stdout.startswith(
        "No daemon serves this model. A launch would start `diskprefix serve --policy agent --model m`,"
    )
    assert (place.files(), place.served(), list(place.records.iterdir())) == (before, [], [])


def test_launch_keeps_edits_of_a_profile_and_backs_them_up_before_new_settings(
    run: Run, place: Place, url: str
) -> None:
    file = place.launches / "codex/.codex/config.toml"
    run("launch", "codex", "--url", url)
    written = file.read_bytes()
    file.write_bytes(changed := written + b"\n[mine]\r\nkept = true")
    assert len(lines(run("launch", "codex", "--url", url))) == 1
    assert file.read_bytes() == changed
    said = lines(run("launch", "codex", "--url", url, "--model", "small", "--api-key", "k"))
    assert (len(said), file.read_bytes()) == (1, changed)
    with small_daemon(models=[models({"id": "other", "context_length": 32_768})]) as daemon:
        copy = file.with_name("config.toml.1")
        said = lines(run("launch", "codex", "--url", daemon.url))
        assert said[0] == f"{file} had been changed and is written anew; it was copied to {copy}"
        assert copy.read_bytes() == changed
        assert b'model = "other"' in file.read_bytes()
    # It was not changed again, so it is only written.
    assert len(lines(run("launch", "codex", "--url", url))) == 1
    assert file.read_bytes() == written
    file.write_bytes(b"other")
    (place.launches / "codex/written.json").write_text("{", encoding="utf-8")
    assert len(lines(run("launch", "codex", "--url", url))) == 2
    assert file.with_name("config.toml.2").read_bytes() == b"other"


def test_a_daemon_is_started_with_the_model_and_ends_with_the_agent(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = "import urllib.request; urllib.request.urlopen(os.environ['ANTHROPIC_BASE_URL'] + '/health')"
    monkeypatch.setenv("AGENT_DOES", does)
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", "/srv/kv")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("DISKPREFIX_PORT", str(port))
    ended = run("launch", "claude", "--model", "m")
    assert ended.exit_code == 0, ended.stderr
    assert lines(ended)[0].startswith("starting a daemon; it saves prompts in /srv/kv, at most 16.0 GiB (")
    [served] = place.served()
    assert served == f"--router --host 127.0.0.1 --port {port} --policy agent --model m"
    assert place.recorded("claude")[1]["ANTHROPIC_MODEL"] == "m"
    assert not place.is_daemon_alive()


@pytest.mark.parametrize(
    ("has_store", "variables", "expected"),
    [
        (False, {}, "at most 16.0 GiB"),
        (False, {"DISKPREFIX_KV_CACHE_NEW_BUDGET": "2GiB"}, "at most 2.0 GiB"),
        (True, {"DISKPREFIX_KV_CACHE_NEW_BUDGET": "2GiB"}, "within the limit that this folder was made with"),
        (True, {"DISKPREFIX_KV_CACHE_BUDGET": "3GiB"}, "at most 3.0 GiB"),
    ],
)
def test_a_start_says_how_much_of_the_disk_the_folder_may_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_store: bool,
    variables: dict[str, str],
    expected: str,
) -> None:
    for variable, value in {"DISKPREFIX_KV_CACHE_DIR": str(tmp_path), **variables}.items():
        monkeypatch.setenv(variable, value)
    if has_store:
        (tmp_path / "data.mdb").touch()
    daemon_choice._say_start(())
    said = capsys.readouterr().err
    assert said.startswith(
        f"starting a daemon; it saves prompts in {tmp_path}, {expected} (DISKPREFIX_KV_CACHE_BUDGET sets"
    )


@pytest.mark.parametrize("when", ["before the daemon has the port", "when the daemon has given it up"])
def test_launch_sends_no_key_to_another_program_on_the_port(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with small_daemon(models=[models(CARDS[1])]) as stranger, ExitStack() as stack:
        port = urlsplit(stranger.url).port
        if when.startswith("before"):
            monkeypatch.setattr(launched_daemon, "_free_port", lambda _usual: port)
        else:
            # It saves what is only in memory.
            fd = stack.enter_context(launched_daemon.locked(place.launches / "daemon.json"))
            stack.enter_context(launched_daemon.locked(place.launches / "daemon.users", fcntl.LOCK_SH))
            place.logs.mkdir(parents=True, exist_ok=True)
            (place.logs / "daemon.log").touch()
            os.write(fd, json.dumps({"port": port, "pid": 1 << 30, "flags": []}).encode() + b"\n")
        monkeypatch.setattr(launched_daemon, "_PATIENCE_S", 0.0)
        ended = run("launch", "claude", "--model", "two")
        words = "the daemon ended: " if when.startswith("before") else f"the daemon at {stranger.url} is ending"
        assert (ended.exit_code, words in ended.stderr) == (1, True), ended.stderr
    assert not (place.records / "claude.json").exists()
    assert not any(stranger.keys)


def test_a_daemon_that_ends_while_it_is_asked_is_replaced(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = launched_daemon.LaunchedDaemon(folder=place.launches, logs=place.logs)
    with small_daemon() as ending, ExitStack() as lives:
        fd = lives.enter_context(launched_daemon.locked(place.launches / "daemon.json"))
        os.write(fd, json.dumps({"port": urlsplit(ending.url).port, "pid": 1 << 30, "flags": []}).encode() + b"\n")
        place.logs.mkdir(parents=True)
        shared.log.touch()

        def reply(_path: str, _body: bytes) -> tuple[int, Any]:
            lives.close()
            return health("stopping")

        monkeypatch.setattr(ending, "reply", reply)
        ended = run("launch", "goose", "--model", "m")
    assert (ended.exit_code, "starting a daemon" in ended.stderr) == (0, True), ended.stderr
    assert place.recorded("goose")[1]["GOOSE_MODEL"] == "m"


@pytest.mark.timing("a daemon has a tenth of a second to answer")
def test_a_conversation_keeps_a_daemon_that_does_not_answer_and_has_not_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed() -> Iterator[str]:
        process.send_signal(signal.SIGSTOP)
        for limit in ("shared.daemon_call._CONNECT_S", "shared.daemon_call._SILENCE_S"):
            monkeypatch.setattr(f"diskprefix.desk.{limit}", 0.1)
        monkeypatch.setattr(launched_daemon, "_PATIENCE_S", 0.1)
        yield "Are you there?"
        kind = fcntl.LOCK_EX | fcntl.LOCK_NB
        with pytest.raises(BlockingIOError), launched_daemon.locked(place.launches / "daemon.users", kind):
            pytest.fail("`stop` would end it")
        yield "/bye"

    run_command = pytest.importorskip("diskprefix.desk.talk.run_command")
    process, terminal, says = left_daemon(place, *launched_daemon.STAYS), io.StringIO(), typed()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", lambda _prompt: next(says))
    run_command.run.main(["m"], standalone_mode=False)
    said = capsys.readouterr().err
    assert "(timed out)" in said
    assert "starting a daemon" not in said
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_second_launch_shares_the_daemon_and_changes_nothing_under_the_first(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (["codex"], ["cline", "--api-key", "n"], ["claude", "--model", "n"], ["cline", "--clean", "--yes"])
    # The first agent launches others, and looks whether the daemon is still there.
    monkeypatch.setenv(
        "AGENT_DOES",
        "os.environ['AGENT_DOES'] = ''\n"
        f"command = [{sys.executable!r}, {str(place.bin / 'again.py')!r}, 'launch']\n"
        f"ended = [subprocess.run(command + each, capture_output=True, text=True) for each in {others}]\n"
        "(folder / 'said').write_text(json.dumps([[each.returncode, each.stderr] for each in ended]))\n"
        "settings = Path(os.environ['CLINE_DIR'], 'data/settings/providers.json').read_text()\n"
        "url = json.loads(settings)['providers']['openai-compatible']['settings']['baseUrl']\n"
        "import urllib.request; urllib.request.urlopen(url + '/models')",
    )
    assert run("launch", "cline", "--model", "m").exit_code == 0
    said = json.loads((place.records / "said").read_text(encoding="utf-8"))
    assert [code for code, _ in said] == [0, 2, 0, 2]
    assert "Cline is running with other settings from another `diskprefix launch`; end it first" in said[1][1]
    assert "serves m, and not n; using another daemon\nstarting a daemon; " in said[2][1]
    assert "Cline is running from another" in said[3][1]
    assert [line.rpartition(" ")[2] for line in place.served()] == ["m", "n"]
    assert place.recorded("codex")[0] == []
    assert not place.is_daemon_alive()
    assert [
        one for one in launched_daemon.LaunchedDaemon(folder=place.launches, logs=place.logs).all() if one.url()
    ] == []


def test_two_launches_at_once_start_one_daemon(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    both = "import time\nwhile len(list(folder.glob('*.json'))) < 2: time.sleep(0.01)"
    monkeypatch.setenv("AGENT_DOES", both)
    started = [place.again(agent, "--model", "m") for agent in ("codex", "claude")]
    assert [(process.communicate()[1], process.returncode)[1] for process in started] == [0, 0]
    assert len(place.served()) == 1
    assert not place.is_daemon_alive()


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_is_for_the_agent_and_the_daemon_ends_after_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, to_group: bool
) -> None:
    waits = (
        "import signal, time\n"
        "for one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, lambda number, _: sys.exit(40 + number))\n"
        # Not signal.pause, which a signal just before it does not end.
        "(folder / 'waits').touch()\nwhile True: time.sleep(0.05)"
    )
    monkeypatch.setenv("AGENT_DOES", waits)
    process = place.again("qwen", "--model", "m")
    wait_for((place.records / "waits").exists)
    assert place.is_daemon_alive()
    (os.killpg if to_group else os.kill)(process.pid, number)
    *said, last = process.communicate()[1].splitlines()
    # How much of the disk the daemon takes, what the agent uses, its first prompt, and where the dashboard is.
    assert (len(said), process.returncode) == (4, 40 + number)
    assert last.endswith(f"the daemon's log: {place.logs / 'daemon.log'}")
    assert (place.logs / "daemon.log").is_file()
    assert not place.is_daemon_alive()


def test_an_interrupted_start_ends_the_daemon(place: Place) -> None:
    process = place.again("qwen", "--model", "slow")
    wait_for(place.is_daemon_alive)
    wait_for(place.served)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate()[1].endswith("error: interrupted\n")
    assert process.returncode == 130
    assert not place.is_daemon_alive()
    assert not (place.records / "qwen.json").exists()


def test_an_interrupt_between_the_start_and_the_agent_ends_the_daemon(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the launch holds the lock that it takes to end the daemon."""
    own = launched_daemon.locked

    def interrupted(file: Path, kind: int = fcntl.LOCK_EX) -> Any:
        if file.name == "daemon.users" and kind == fcntl.LOCK_SH:
            raise KeyboardInterrupt
        return own(file, kind)

    monkeypatch.setattr(launched_daemon, "locked", interrupted)
    shared = launched_daemon.LaunchedDaemon(folder=place.launches, logs=place.logs)
    with pytest.raises(KeyboardInterrupt), shared.mutex(), shared.use(0, ["--model", "m"]):
        """The agent would run."""
    assert place.served()
    assert not place.is_daemon_alive()
    with own(place.launches / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
        """The next launch can begin."""


def left_daemon(place: Place, *flags: str) -> subprocess.Popen[bytes]:
    """A daemon whose launch was killed."""
    shared = launched_daemon.LaunchedDaemon(folder=place.launches, logs=place.logs)
    with shared.mutex():
        return shared.start(0, [*flags, "--model", "m"])


def usual(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A daemon of this user at the usual address."""
    monkeypatch.setenv("DISKPREFIX_PORT", str(urlsplit(url).port))
    monkeypatch.setattr(daemon_choice, "own_urls", lambda: [url])


@pytest.mark.timing("daemons that do not answer soon are passed over")
def test_a_small_daemon_in_the_way_is_left_alone_and_another_one_is_started_if_it_can_be(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_daemon(models=[models(CARDS[2])]) as daemon:
        usual(monkeypatch, daemon.url)
        run("launch", "goose").assert_refused(2, "three takes 4,096 tokens", "`diskprefix pull ", "--anyway")
        assert not (place.launches / "goose").exists(), "nothing was written"
        ended = run("launch", "goose", "--anyway")
        assert "warning: three takes 4,096 tokens" in ended.stderr, "there is no other model"
        assert place.recorded("goose")[1]["GOOSE_MODEL"] == "three"
        ended = run("launch", "goose", "--model", "m")
        assert lines(ended)[0] == f"the daemon at {daemon.url} serves three, and not m; using another daemon"
        assert place.recorded("goose")[1]["GOOSE_MODEL"] == "m"
        monkeypatch.setattr(daemon_choice, "flags_of_model", lambda _model: ["--model", "large"])
        ended = run("launch", "goose")
        assert (ended.exit_code, "warning" in ended.stderr) == (0, False)
        assert place.recorded("goose")[1]["GOOSE_MODEL"] == "large"


def test_what_uses_the_usual_port_is_asked_nothing() -> None:
    """It may accept connections and say nothing, which would hold up the launch."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        launched_daemon._free_port(busy.getsockname()[1])
        busy.setblocking(False)
        with pytest.raises(BlockingIOError):
            busy.accept()


def test_a_daemon_that_stays_is_used_again_and_ends_when_another_model_is_wanted(run: Run, place: Place) -> None:
    process = left_daemon(place, *launched_daemon.STAYS)
    for _ in range(2):
        assert run("launch", "goose", "--model", "m").exit_code == 0
        assert process.poll() is None
    assert run("launch", "goose", "--model", "n").exit_code == 0
    assert process.wait() == -signal.SIGTERM
    assert [line.rpartition(" ")[2] for line in place.served()] == ["m", "n"]


@pytest.mark.parametrize(
    ("props", "card", "line"),
    [
        (
            (200, {"full_cache": {"gate": {"prefill_s_per_token": 0.01}}}),
            {},
            "about 3 minutes, the first time only (as",
        ),
        ((403, {}), {"needs": {"weights in Q4_K": 4 << 30}}, "the first time only (a rough guess"),
        ((403, {}), {}, ""),
    ],
)
@pytest.mark.usefixtures("place")
def test_before_the_agent_starts_it_is_said_how_long_its_first_prompt_takes(
    run: Run, props: tuple[int, Any], card: dict[str, Any], line: str
) -> None:
    counted = [(200, {"input_tokens": 18_961})]
    with small_daemon(models=[models(CARDS[1] | card)], props=[props], count_tokens=counted) as daemon:
        said = lines(run("launch", "claude", "--url", daemon.url))
    about = "its first prompt has about 19,000 tokens with this model: "
    assert [one for one in said if one.startswith(about) and line in one] == said[1:]


@pytest.mark.usefixtures("place")
def test_a_first_prompt_is_said_to_be_at_most_as_long_as_the_context(run: Run) -> None:
    counted = [(200, {"input_tokens": 18_961})]
    served = models(CARDS[1] | {"context_length": 17_000})
    with small_daemon(models=[served], props=[SPEED], count_tokens=counted) as daemon:
        said = lines(run("launch", "claude", "--url", daemon.url, "--anyway"))
    about = "its first prompt has about 17,000 tokens with this model"
    assert f"{about}: about 3 minutes, the first time only (as measured here)" in said


def test_a_first_prompt_is_counted_with_the_template_of_the_model(
    daemon: DaemonProcess, agent_model: Path, tmp_path: Path
) -> None:
    """Without a place for tools, a template leaves most of an agent's prompt out."""
    size = agent_called("opencode").first_prompt
    assert size is not None
    served = Served(url=daemon.url, model="", key="unused", context=2048)
    without_tools = counted_tokens(replace(size, tools=0, tool_chars=0), served)
    all_of_it = counted_tokens(size, served)
    with running_daemon(agent_model, tmp_path, chat_template=template_without_tools(tmp_path)) as plain:
        there = replace(served, url=plain.url)
        assert counted_tokens(size, there) == counted_tokens(replace(size, tools=0, tool_chars=0), there)
    assert without_tools is not None
    assert all_of_it is not None
    assert all_of_it > 2 * without_tools
    # Both texts are the system message and the question; a character has at most one token of this vocabulary.
    assert 0 < without_tools <= size.system + size.user + 100


def template_without_tools(folder: Path) -> Path:
    file = folder / "plain.jinja"
    file.write_text("{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}")
    return file


def test_the_guess_for_a_small_model_counts_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.daemon.catalogue.adviser.num_cores", lambda: 2)
    needs = {"weights in Q4_1": 92 << 20, "KV memory for 8,192 tokens": 180 << 20, "room to compute": 640 << 20}
    speed, _ = model_choice._noted_speed({"id": "m", "context_length": 8192, "needs": needs})
    # Measured with AVX-512 on two cores: 6,170 tokens in 7.95 s. With AVX2 it is twice as slow.
    assert speed is not None
    assert 0.5 <= speed / (7.95 / 6170) <= 2.5
    assert model_choice._noted_speed({"id": "m", "context_length": 8192, "needs": {}}) == (None, False)


@pytest.mark.usefixtures("place")
def test_the_guess_for_a_mixture_counts_what_is_read_for_a_token(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    card = CARDS[1] | {"id": "ggml-org/gpt-oss-20b-GGUF:MXFP4", "needs": {"weights in MXFP4": 12 << 30}}
    monkeypatch.setattr("diskprefix.daemon.catalogue.adviser.num_cores", lambda: 2)
    counted = [(200, {"input_tokens": 19_000})]
    with small_daemon(models=[models(card)], props=[(403, {})], count_tokens=counted) as daemon:
        said = lines(run("launch", "claude", "--url", daemon.url))
    [minutes] = [int(found[1]) for line in said if (found := re.search(r"about (\d+) minutes", line))]
    # Six minutes were measured with AVX-512 on two cores, for the products alone.
    assert 3 <= minutes <= 16


def test_cleaning_shows_what_it_would_remove_and_asks(
    run: Run, place: Place, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("launch", "codex", "--url", url)
    kept = place.files()
    [shown, refused] = lines(run("launch", "--clean"))
    assert re.fullmatch(rf"to remove: {place.launches}/codex \(\d files, .* B\), with what Codex keeps there", shown)
    assert refused.endswith("standard input is not a terminal; add --yes")
    terminal = io.StringIO("n\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert run("launch", "codex", "--clean").exit_code == 1
    assert place.files() == kept


def test_cleaning_says_which_daemon_it_would_end_and_asks(run: Run, place: Place) -> None:
    process = left_daemon(place)
    shared = launched_daemon.LaunchedDaemon(folder=place.launches, logs=place.logs)
    named = f"the daemon at {shared.url()}"
    said, refused = lines(run("launch", "--clean"))
    assert said == f"to end: {named}"
    assert refused.endswith("add --yes")
    assert process.poll() is None, "nobody was asked"
    with launched_daemon.locked(shared.folder / "daemon.users", fcntl.LOCK_SH):
        assert lines(run("launch", "--clean")) == [f"{named} stays: it is in use"]
    assert lines(run("launch", "--clean", "--yes")) == [f"to end: {named}", f"ended {named}"]
    process.wait(30)


@pytest.mark.usefixtures("run")
def test_a_launch_does_not_wait_for_a_daemon_that_is_suspended(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = left_daemon(place)
    monkeypatch.setattr(launched_daemon, "_STOP_S", 0.2)
    shared = launched_daemon.LaunchedDaemon(folder=place.launches, logs=place.logs)
    with shared.mutex():
        with monkeypatch.context() as patch:
            # The signal waits until the process goes on.
            patch.setattr(os, "kill", lambda *_: None)
            assert shared.end_unused()
        assert f"see process {process.pid} and {shared.log}" in capsys.readouterr().err
        assert not shared.end_unused()
    process.wait(30)


KILLS = """\
pid = json.loads((path / 'daemon.json').read_text().splitlines()[0])['pid']
ended = open(os.pidfd_open(pid)); os.kill(pid, 9); select.select([ended], [], [])
"""


def logs(*lines: str) -> str:
    """Returns code that logs lines as the daemon does, and then kills it."""
    text = "".join(f"2026-12-01 12:00:00,000 {line}\n" for line in lines)
    return f"log.write({text!r}); log.flush()\n{KILLS}"


@pytest.mark.parametrize(
    ("does", "end"),
    [
        (
            "log.write('ERROR [router] the worker of m was killed by SIGKILL\\n' * 2)",
            "died 2 times and was restarted",
        ),
        (
            f"log.write('error: no memory\\nstopped\\n'); log.flush()\n{KILLS}",
            "the daemon ended: no memory",
        ),
        (logs("INFO POST /v1/messages 200"), "the daemon ended without an error, as if killed"),
        (logs("WARNING the disk is slow"), "the daemon ended without an error, as if killed"),
        # What the model's process logs when the router was killed.
        (logs("INFO stopping", "INFO stopped"), "the daemon ended without an error, as if killed"),
        (logs("ERROR an old one", f"INFO {STOPPED}"), "the daemon was stopped"),
        (logs("ERROR no memory", "INFO POST /v1/messages 200"), "the daemon ended: no memory"),
        (logs("CRITICAL no memory", "WARNING the disk is slow"), "the daemon ended: no memory"),
        (
            logs("ERROR a failure of another hour")
            .replace("2026-12-01 12:", "2026-12-01 10:")
            .partition("log.flush")[0]
            + logs("INFO POST /v1/messages 200"),
            "the daemon ended without an error, as if killed",
        ),
        (
            f"log.write('Traceback:\\nImportError: no such library\\n'); log.flush()\n{KILLS}",
            "the daemon ended: ImportError: no such library",
        ),
    ],
)
def test_launch_reports_dead_model_processes_after_the_agent_ends(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch, does: str, end: str
) -> None:
    path = "import select\npath = Path(os.environ['CLAUDE_CONFIG_DIR']).parents[1]\n"
    monkeypatch.setenv("AGENT_DOES", f"{path}log = open({str(place.logs / 'daemon.log')!r}, 'a')\n{does}")
    ended = run("launch", "claude", "--model", "m")
    assert ended.exit_code == 0, ended.stderr
    line = lines(ended)[-1]
    assert line.endswith(f"{end} (its log: {place.logs / 'daemon.log'})")
    assert not place.is_daemon_alive()


def test_only_a_daemon_of_this_user_is_taken_for_one_and_others_are_sent_nothing(url: str) -> None:
    assert token_for(url) is None, "it answers as a daemon does"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for token in ("abc", ""):
            with published_token(token, [listener]):
                assert address in own_urls()
                assert token_for(address) == token
        assert token_for(address) is None
        assert address not in own_urls()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_daemon_whose_launch_was_killed_is_ended_by_the_next_or_by_restoring(run: Run, place: Place) -> None:
    process = left_daemon(place)
    assert run("launch", "goose", "--model", "m").exit_code == 0
    assert process.wait() == -signal.SIGTERM
    process = left_daemon(place)
    assert run("launch", "--clean", "--yes").exit_code == 0
    assert process.wait() == -signal.SIGTERM
    assert not place.is_daemon_alive()
    assert not place.launches.exists()


def test_a_model_that_cannot_be_had_ends_no_daemon(run: Run, place: Place) -> None:
    process = left_daemon(place, *launched_daemon.STAYS)
    ended = run("launch", "goose", "--model", "qwen3.5:27b")
    assert (ended.exit_code, "qwen3.5:2b, qwen3.5:4b, qwen3.5:9b" in ended.stderr) == (2, True)
    assert process.poll() is None
    assert run("launch", "--clean", "--yes").exit_code == 0
    assert process.wait() == -signal.SIGTERM


def test_a_start_that_is_cut_off_leaves_no_daemon_or_one_that_is_found(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, write = launched_daemon.LaunchedDaemon(folder=place.launches, logs=place.logs), os.pwrite

    def cut_off(fd: int, text: bytes, offset: int) -> int:
        if b"pid" in text:
            raise KeyboardInterrupt
        return write(fd, text, offset)

    with monkeypatch.context() as patched, shared.mutex():
        patched.setattr(os, "pwrite", cut_off)
        with pytest.raises(KeyboardInterrupt):
            shared.start(0, [])
    assert not place.is_daemon_alive()
    process = left_daemon(place)
    file = place.launches / "daemon.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({name: told[name] for name in ("port", "flags")}))
    assert run("launch", "goose").exit_code == 0
    assert process.poll() is None
    process.kill()
    process.wait()

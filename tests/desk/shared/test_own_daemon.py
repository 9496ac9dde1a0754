"""Which daemon a command speaks with that is not told: one of this user, wherever it listens, and never another's."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import pytest

from diskprefix.daemon import rooms
from diskprefix.daemon.cli import commands
from diskprefix.daemon.server.process import token_file
from diskprefix.daemon.server.process.token_file import own_daemons, published_token
from diskprefix.desk.shared import daemon_call, launched_daemon, own_daemon
from diskprefix.desk.shared.own_daemon import own_urls
from diskprefix.errors import NotReady
from tests.desk.conftest import Run
from tests.desk.small_daemon import SmallDaemon, models, small_daemon

pytestmark = pytest.mark.usefixtures("own_places")

CARD = {"id": "m", "context_length": 32_768, "loaded": True, "capabilities": ["tool_use"]}
STARTS = {"launch", "run"}
"""These start a daemon if there is none."""
ASKS: dict[str, list[str]] = {
    "chat": ["chat"],
    "clients": ["clients", "codex"],
    "dashboard": ["dashboard", "--print"],
    "launch": ["launch", "goose", "--print"],
    "ps": ["ps"],
    "run": ["run", "m", "hello"],
    "stop": ["stop", "m"],
    "top": ["top"],
    "warm": ["warm", "text"],
}
ASKS = {name: args for name, args in ASKS.items() if name in commands()}


@pytest.fixture(autouse=True)
def usual_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What another user runs at the usual address. It must not get a byte."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a prompt")
    monkeypatch.delenv("DISKPREFIX_URL", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("DISKPREFIX_PORT", str(listener.getsockname()[1]))
        yield listener
        listener.setblocking(False)
        while True:
            try:
                connected, _ = listener.accept()
            except BlockingIOError:
                break
            with connected:
                connected.setblocking(False)
                assert connected.recv(1) == b"", "it was sent something"


@contextmanager
def own() -> Iterator[SmallDaemon]:
    """A daemon of this user."""
    with small_daemon(models=[models(CARD)]) as daemon, published_token("abc", [daemon.listener]):
        yield daemon


def command(name: str) -> click.Command:
    found: click.Command = rooms.loaded(commands()[name])
    return found


def test_the_commands_that_speak_with_a_daemon_are_those_below() -> None:
    assert {name for name in commands() if any(one.name == "url" for one in command(name).params)} == ASKS.keys()
    assert {name for name in ASKS if "your running daemon" in command(name).get_help(click.Context(command(name)))} == (
        ASKS.keys()
    )


@pytest.mark.parametrize("name", ASKS)
def test_a_daemon_of_this_user_is_found_on_any_port(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: name == "top")
    monkeypatch.setattr("diskprefix.desk.watch.top.live.show", lambda _source: None)
    with own() as daemon:
        ended = run(*ASKS[name])
        link = f"{daemon.url}/#token=abc\n"
        assert daemon.asked or ended.stdout == link, ended.stderr
        assert "no daemon of yours" not in ended.stderr


@pytest.mark.parametrize("name", sorted(ASKS.keys() - STARTS))
def test_what_listens_on_the_usual_port_and_is_not_this_users_is_sent_nothing(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch, usual_port: socket.socket
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: name == "top")
    url = f"http://127.0.0.1:{usual_port.getsockname()[1]}"
    ended = run(*ASKS[name])
    words = f"no daemon of yours runs: what listens at {url} is not known as yours"
    assert words in ended.stderr
    assert f"--url {url}" in ended.stderr
    assert (ended.exit_code, ended.stderr.count("\n")) == (0 if name == "ps" else 1, 1)


def test_a_start_beside_another_users_daemon_takes_another_port(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual_port: socket.socket
) -> None:
    (ends := tmp_path / "ends.py").write_text("import sys; print('error:', *sys.argv[1:], file=sys.stderr)")
    monkeypatch.setattr(launched_daemon, "SERVE", (sys.executable, str(ends)))
    (tmp_path / "m").mkdir()
    ended = run("run", "./m", "hello")
    assert ended.exit_code == 1
    assert f"--port {usual_port.getsockname()[1]}" not in ended.stderr
    assert "--port " in ended.stderr


def test_where_nothing_runs_the_error_says_how_to_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISKPREFIX_PORT", "1")
    run("chat").assert_refused(1, "no daemon of yours runs; start one with `diskprefix serve`", "--url")
    ended = run("ps")
    assert (ended.exit_code, ended.stdout.split()[0]) == (0, "model")
    assert ended.stderr.startswith("no daemon of yours runs; start one")
    assert run("ps", "--json").json == {"models": []}


def test_what_takes_the_place_of_this_users_daemon_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_call, "_own_urls", set())
    with small_daemon(models=[models(CARD)]) as daemon:
        with published_token("abc", [daemon.listener]):
            call = daemon_call.running_daemon(own_daemon.daemon_url(None), None)
            assert call("GET", "/v1/models", None).status == 200
        asked = list(daemon.asked)
        for method, body in (("GET", None), ("POST", {"messages": []})):
            with pytest.raises(NotReady, match="has ended, and what listens there now is not known as yours"):
                call(method, "/v1/models", body)
        with pytest.raises(NotReady, match="has ended"):
            daemon_call.running_daemon(daemon.url, "a key")("GET", "/health", None)
        assert daemon.asked == asked


def test_a_folder_that_may_not_be_entered_holds_no_daemon_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob

    def refused(path: Path, pattern: str) -> Iterator[Path]:
        if path == token_file._OF_THE_SERVICE:
            raise PermissionError(errno.EACCES, "Permission denied")
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", refused)
    with own() as daemon:
        assert own_urls() == [daemon.url]


def test_the_daemon_at_the_usual_port_comes_first_whatever_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISKPREFIX_PORT", "8642")
    monkeypatch.setattr(own_daemon, "own_daemons", lambda: {1: "http://127.0.0.1:9", 2: "http://[::1]:8642"})
    assert own_urls() == ["http://[::1]:8642", "http://127.0.0.1:9"]


def test_of_several_daemons_the_usual_one_is_taken_then_the_last_and_it_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(own()).url for _ in range(3)]
        for number, url in enumerate(urls):
            [file] = (Path(os.environ["XDG_CACHE_HOME"]) / "diskprefix/daemons").glob(f"*_{url.rpartition(':')[2]}")
            os.utime(file, (number, number))
        # The same process runs them all here.
        assert [*own_daemons().values()] == [urls[0]], "a process has one address"
        pids = dict(enumerate(reversed(urls)))
        monkeypatch.setattr(own_daemon, "own_daemons", lambda: pids)
        assert own_urls() == urls[::-1]
        ended = run("dashboard", "--print")
        assert ended.stdout.startswith(urls[2])
        assert ended.stderr == f"using your daemon at {urls[2]}; choose another with --url: {urls[1]}, {urls[0]}\n"
        monkeypatch.setenv("DISKPREFIX_PORT", urls[1].rpartition(":")[2])
        assert run("dashboard", "--print").stdout.startswith(urls[1])
        named = run("dashboard", "--print", "--url", urls[0])
        assert (named.stdout.startswith(urls[0]), named.stderr) == (True, "")

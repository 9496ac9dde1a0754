"""`diskprefix chat` against a scripted daemon: what it sends, writes, and does when the daemon goes away."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from diskprefix.daemon.cli import cli, main
from diskprefix.desk.shared import daemon_call
from diskprefix.desk.shared.daemon_call import ConnectionBroken, state_of
from diskprefix.desk.talk import chat_command
from diskprefix.desk.talk.chat_command import chat
from diskprefix.errors import InvalidRequest, NotReady
from tests.daemon.server.agent_model import saying, thought
from tests.daemon.server.scripted import AppServer, ScriptedEngine, scripted_app


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_message_from_a_pipe_is_answered(
    command: str, agent: AppServer, engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.script = saying(thought("I look.") + "The Nile\x1b[2J,\nthe Po.")
    (tmp_path / "notes.txt").write_text("All rivers.", encoding="utf-8")
    flags = ["--url", agent.url, "--system", str(tmp_path / "notes.txt"), "--max-tokens", "77", "--temperature", "0.5"]
    found = CliRunner().invoke(cli, [command, *(["scripted"] if command == "run" else []), *flags], input="Rivers?")
    assert found.exit_code == 0, found.output
    assert found.stdout.strip() == "I look.\nThe Nile[2J,\nthe Po."
    assert "first token after" in found.stderr
    assert engine.requests[-1].sampling.max_tokens == 77
    assert engine.requests[-1].sampling.temperature == 0.5
    assert "All rivers." in engine.last_prompt
    assert "Rivers?" in engine.last_prompt


@pytest.mark.parametrize("command", ["chat", "run"])
def test_the_key_is_sent_and_a_wrong_one_is_refused(command: str, agent_model: Path, tmp_path: Path) -> None:
    engine, keys = ScriptedEngine(), tmp_path / "keys"
    engine.script = saying("Yes.")
    keys.touch(0o600)
    keys.write_text("admin the-key-of-admin\n", encoding="utf-8")
    with scripted_app(agent_model, engine, api_keys=keys) as app:
        words = [command, *(["scripted"] if command == "run" else []), "--url", app.url, "--api-key"]
        found = CliRunner().invoke(cli, [*words, "the-key-of-admin"], input="Rivers?")
        assert (found.exit_code, found.stdout.strip()) == (0, "Yes."), found.output
        refused = CliRunner().invoke(cli, [*words, "another-key-than-it"], input="Rivers?")
        assert refused.exit_code != 0
        assert len(engine.requests) == 1


def test_a_conversation_grows_is_answered_again_and_begins_anew(
    agent: AppServer,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = iter(["", "One?", "/help", "Two?", "/again", "/agian", "/new", "/etc/hosts: Three?", "/bye"])
    prompts = []

    def script(*arguments: object) -> None:
        prompts.append(engine.last_prompt)
        saying("Yes.")(*arguments)  # type: ignore[arg-type]

    engine.script = script
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    monkeypatch.setattr("sys.stdin", Terminal())
    assert chat.main(["--url", agent.url], standalone_mode=False) is None
    says = [[word for word in ("One?", "Yes.", "Two?", "Three?") if word in prompt] for prompt in prompts]
    assert says == [["One?"], ["One?", "Yes.", "Two?"], ["One?", "Yes.", "Two?"], ["Three?"]]
    said = capsys.readouterr().err
    assert said.count("\n/again   answers the last message again\n") == 2
    assert said.count("there is no command") == said.count("there is no command /agian\n/again") == 1


def test_chat_waits_for_a_lost_daemon_and_then_answers_unless_a_reply_had_begun(
    agent: AppServer,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, lines = daemon_call._events, iter(["One?", "Two?", "/again"])
    breaks = iter(
        [
            (NotReady("no daemon answers"), ()),
            (None, ()),
            (ConnectionBroken("it broke"), [{"choices": [{"delta": {"content": "Half"}}]}]),
            (None, ()),
        ]
    )

    def events(response: HTTPResponse, url: str) -> Iterator[Any]:
        error, first = next(breaks)
        yield from first
        if error is not None:
            raise error
        yield from whole(response, url)

    engine.script = saying("Yes.")

    @contextmanager
    def status(text: str) -> Iterator[Callable[[str], None]]:
        click.echo(f"<{text.partition(';')[0]}", err=True)
        yield lambda line: click.echo(line, err=True)
        click.echo(">", err=True)

    is_there = iter([True, False, False, True])
    """At the start of `chat`; then when it is looked whether the first loss is one, and while it is waited for. After
    the second, nobody looks: the reply had begun."""

    def state(*arguments: Any) -> Any:
        if next(is_there):
            return state_of(*arguments)
        raise NotReady("no daemon answers")

    monkeypatch.setattr(chat_command, "status", status)
    monkeypatch.setattr(chat_command, "state_of", state)
    monkeypatch.setattr(daemon_call, "state_of", state)
    monkeypatch.setattr(daemon_call, "_events", events)
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(StopIteration):
        chat.main(["--url", agent.url], standalone_mode=False)
    said = capsys.readouterr()
    assert said.out.split() == ["Yes.", "Half", "Yes."]
    assert said.err.count("<waiting for the daemon") == 2, "at the start of `chat`, too"
    assert "no daemon answers\n<waiting for the daemon\n>\n" in said.err
    assert "of the reply; try again\n/again sends the message again\n" in said.err


def test_a_request_that_is_refused_or_whose_reply_breaks_off_is_an_error(
    agent: AppServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise InvalidRequest("this is refused", param="messages")

    engine.script = refuse
    found = CliRunner().invoke(chat, ["--url", agent.url], input="Rivers?")
    assert (found.exit_code, "this is refused" in str(found.exception)) == (1, True)
    whole = daemon_call._events

    class Cut:
        status = 200

        def __init__(self) -> None:
            self.readline = io.BytesIO(b'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n').readline

    monkeypatch.setattr(daemon_call, "_events", lambda _response, url: whole(Cut(), url))  # type: ignore[arg-type]
    found = CliRunner().invoke(chat, ["--url", agent.url], input="Rivers?")
    assert found.stdout.strip() == "Half"
    assert str(found.exception) == "the connection broke after 4 characters of the reply; try again"


def test_a_reader_who_leaves_ends_the_chat_without_a_word(
    agent: AppServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `diskprefix chat | head`: nobody reads the output, and the connection is sound."""

    def leave(_text: str, **_style: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    engine.script = saying("Yes.")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"One?")))
    monkeypatch.setattr(chat_command, "_output", lambda **_options: chat_command._Raw(leave))
    with pytest.raises(SystemExit) as end:
        main(["chat", "--url", agent.url])
    assert (end.value.code, capsys.readouterr().err) == (141, "")


def test_a_reply_is_wrapped_at_words_in_a_terminal_and_raw_in_a_pipe(
    agent: AppServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = saying("The Moon, and all who followed.")
    monkeypatch.setenv("COLUMNS", "12")
    piped = CliRunner().invoke(chat, ["--url", agent.url], input="Who?")
    assert piped.stdout == "The Moon, and all who followed.\n"
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Who?")))
    chat.main(["--url", agent.url], standalone_mode=False)
    assert shown.getvalue() == "The Moon,\nand all who\nfollowed.\n"

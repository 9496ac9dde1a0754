"""The session of the moving picture shows `chat` as it is now."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
import msgspec
import pytest

from diskprefix.daemon.cli import cli
from diskprefix.desk.shared.daemon_call import Stream
from diskprefix.desk.talk import chat_command
from diskprefix.desk.talk.chat_command import Talk
from diskprefix.units import parse_duration
from tools.pictures.session import COMMANDS, Session
from tools.screenshots import RECORDED


@pytest.fixture(scope="module")
def session() -> Session:
    return msgspec.json.decode(RECORDED.read_bytes(), type=Session)


def test_the_recorded_commands_exist_with_their_options() -> None:
    for line in COMMANDS:
        program, *words = shlex.split(line.partition("2>")[0].partition("<")[0])
        if program == "diskprefix":
            command = cli.get_command(click.Context(cli), words.pop(0))
            assert command is not None
            options = {name for parameter in command.params for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options


def test_the_recorded_figures_are_as_the_command_prints_them_now(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for line in session.lines() if "first token after" in line]
    (tokens, cold_s, _), (_, warm_s, _) = session.figures()
    reports: list[tuple[Mapping[str, Any], float]] = [
        ({"restored": 0, "miss_reason": "new"}, cold_s),
        ({"restored": tokens, "source": "disk"}, warm_s),
    ]
    for line, (report, seconds) in zip(lines, reports, strict=True):
        speed = parse_duration(line.partition(" tokens/s")[0].rpartition(" ")[2], param="tokens/s")
        timings = {"ttft_ms": seconds * 1e3, "decode_tokens_per_s": speed}
        event = {
            "choices": [{"delta": {"content": "Yes"}, "finish_reason": "length"}],
            "prefix_cache": report,
            "timings": timings,
            "usage": {"prompt_tokens": tokens},
        }
        monkeypatch.setattr(chat_command, "streaming_daemon", partial(stream_of, event))
        Talk("", None, {}, []).answer()
        assert capsys.readouterr().err == f"{line}\n"


def stream_of(event: dict[str, Any], _url: str, _api_key: str | None) -> Stream:
    """Returns what reads replies of a daemon that has one event for each."""

    @contextmanager
    def stream(_path: str, _body: object) -> Iterator[Iterator[Any]]:
        yield iter([event])

    return stream

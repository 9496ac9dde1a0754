"""A template that writes the day: what was asked before midnight is computed with the new day while nobody waits, and a
conversation goes on with the day that it began with."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.chat.conversation_opening import decode_opening, encode_opening
from diskprefix.daemon.chat.messages import Conversation, ImagePart, Message, TextPart
from diskprefix.daemon.chat.template_date import TemplateClock
from diskprefix.daemon.engine.idle import ahead_jobs
from diskprefix.daemon.server import daemon, openings
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.store.note_record import NoteKind
from tests.agent_bodies import words
from tests.daemon.engine.driving import write_model
from tests.daemon.server.chat_model import CHAT_TEMPLATE
from tests.daemon.server.daemon_process import command, reply_to
from tests.daemon.server.scripted import AppServer, real_app
from tests.prefixstore.store.building import stored_texts
from tests.runtime.plan import tiny
from tests.waiting import wait_for

TEMPLATE = "<|im_start|>system\nToday: {{ strftime_now('%d %B %Y') }}<|im_end|>\n" + CHAT_TEMPLATE
SYSTEM = words(1, 300)


class Clock:
    """The local time, some days from now."""

    days = 0

    def __call__(self) -> datetime:
        return datetime.now() + timedelta(days=self.days)

    def text(self, days: int = 0) -> str:
        return (datetime.now() + timedelta(days=days)).strftime("%d %B %Y")


@pytest.fixture(params=["llama", "qwen3_5"], ids=["dense", "hybrid"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("models") / "dated", request.param)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(daemon, "TemplateClock", partial(TemplateClock, now=clock))
    monkeypatch.setattr(openings, "_CHECK_S", 0.02)
    monkeypatch.setattr(ahead_jobs, "_QUIET_S", 0.0)
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)
    return clock


def start(model: Path, folder: Path, **changes: Any) -> AbstractContextManager[AppServer]:
    usual: dict[str, Any] = {"ahead": "auto", "kv_cache_gate": "off", "speculative": "off"}
    return real_app(model, folder / "kv", **usual | changes)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[AppServer]:
    with start(model, tmp_path) as server:
        yield server


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def first(question: str) -> list[dict[str, str]]:
    return [said("system", SYSTEM), said("user", question)]


def ask(server: AppServer, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    with server.client() as client:
        return reply_to(client, {"messages": messages, "max_tokens": 8, "temperature": 0, **options})


def tokens_of(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["prefix_cache"]["restored"], answer["usage"]["prompt_tokens"]


def num_ahead(server: AppServer) -> int:
    return int(server.engine.cache.counters["ahead_tokens"])


def wait_for_ahead(server: AppServer, more_than: int) -> None:
    wait_for(lambda: num_ahead(server) > more_than and server.engine.ahead.wait_s is None)


def test_the_first_question_of_a_day_is_a_next_turn(server: AppServer, clock: Clock) -> None:
    ask(server, first("Name three rivers."))
    assert server.engine.cache.writer.flush(10)
    before = num_ahead(server)
    clock.days = 1
    wait_for_ahead(server, before)
    answer = ask(server, first("And three lakes?"))
    restored, sent = tokens_of(answer)
    assert sent - 40 < restored < sent
    assert answer["choices"] == cold(server, first("And three lakes?"))


def test_a_new_days_prompt_has_the_options_of_its_request_and_goes_with_it(server: AppServer, clock: Clock) -> None:
    cache, secret = server.engine.cache, "My password is swordfish and I live at number 17."
    ask(server, first(secret), prefix_cache={"scope": "full", "ttl": 600})
    wait_for(lambda: server.engine.ahead.wait_s is None)
    before = num_ahead(server)
    clock.days = 1
    wait_for_ahead(server, before)
    assert cache.writer.flush(10)
    with cache.store.snapshot() as snapshot:
        entries = {name: entry for name, entry in snapshot.entries() if entry.kind == "opening"}
        assert entries
        assert {(entry.scope, entry.ttl_s) for entry in entries.values()} == {("full", 600)}
        assert {snapshot.usage(name).ttl_s for name in stored_texts(snapshot)} == {600}
        saved = [name for name, entry in snapshot.entries() if entry.kind == "saved"]
    for name in saved:
        cache.delete(name.hex())
    counts = cache.store.counts()
    assert (counts["entries"], counts["blocks"], counts["prompts"]) == (0, 0, 0)
    with cache.store.snapshot() as snapshot:
        kinds = {note.kind for note in snapshot.notes()}
    assert kinds <= {NoteKind.SAVINGS}


def cold(server: AppServer, messages: list[dict[str, str]]) -> Any:
    return ask(server, messages, prefix_cache={"scope": "off"})["choices"]


def test_a_conversation_goes_on_with_the_day_that_it_began_with(server: AppServer, clock: Clock) -> None:
    reply = ask(server, first("Name three rivers."))["choices"][0]["message"]["content"]
    clock.days = 1
    longer = [*first("Name three rivers."), said("assistant", reply), said("user", "And three lakes?")]
    restored, sent = tokens_of(ask(server, longer))
    assert sent - 60 < restored < sent
    with server.client() as client:
        prompt = client.post("/apply-template", json={"messages": longer[-1:]}).json()["prompt"]
    assert clock.text(days=1) in prompt, "another conversation has the new day"


def test_a_start_in_the_morning_computes_what_was_asked_the_day_before(
    model: Path, clock: Clock, tmp_path: Path
) -> None:
    with start(model, tmp_path) as server:
        ask(server, first("Name three rivers."))
    clock.days = 1
    with start(model, tmp_path) as server:
        wait_for_ahead(server, 0)
        restored, sent = tokens_of(ask(server, first("And three lakes?")))
        assert sent - 40 < restored < sent
        assert server.engine.cache.writer.flush(10)
    with start(model, tmp_path) as server:
        wait_for(lambda: server.engine.ahead.wait_s is None)
        assert num_ahead(server) == 0, "it is stored by now"


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"ahead": "off"}, {}),
        ({"template_date": "2026-01-31"}, {}),
        ({}, {"prefix_cache": {"save": False}}),
        ({}, {"prefix_cache": {"scope": "off"}}),
        ({}, {"prefix_cache": {"scope": "40"}}),
        ({}, {"chat_template_kwargs": {"strftime_now": "no clock"}}),
    ],
    ids=lambda value: json.dumps(value),
)
def test_an_opening_that_is_not_kept_is_not_computed(
    model: Path, clock: Clock, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    with start(model, tmp_path, **changes) as server:
        with server.client() as client:
            client.post("/v1/chat/completions", json={"messages": first("Name a river."), "max_tokens": 1, **options})
        assert server.engine.cache.writer.flush(10)
        clock.days = 1
        assert server.daemon.serving is not None
        assert openings.add_openings(server.daemon.serving, clock().date()) == 0 or changes == {"ahead": "off"}
        # The end of the conversation may still be computed.
        wait_for(lambda: server.engine.ahead.wait_s is None)


def test_the_latest_openings_are_computed_latest_first(model: Path, clock: Clock, tmp_path: Path) -> None:
    with start(model, tmp_path) as server:
        for number in range(openings._MAX_OPENINGS + 2):
            ask(server, [said("system", f"You are number {number}. {SYSTEM}"), said("user", "Hello.")], max_tokens=1)
            assert server.engine.cache.writer.flush(10)
        serving, tomorrow = server.daemon.serving, (clock() + timedelta(days=1)).date()
        assert serving is not None
        wait_for(lambda: serving.engine.ahead.wait_s is None)
        serving.engine.ahead.pause(is_long=True)
        assert openings.add_openings(serving, tomorrow) == openings._MAX_OPENINGS
        texts = [job.make() for some in serving.engine.ahead._jobs.values() for job in some]
    shown = [serving.renderer.detokenize(prompt.token_ids.tolist()) for prompt in texts if prompt is not None]
    numbers = [int(text.split("You are number ")[1].split(".")[0]) for text in shown]
    assert numbers == [*range(9, 1, -1)]


def test_a_purge_removes_the_openings_too(server: AppServer, clock: Clock, tmp_path: Path) -> None:
    ask(server, first("Name three rivers."))
    assert server.engine.cache.writer.flush(10)
    serving, tomorrow = server.daemon.serving, (clock() + timedelta(days=1)).date()
    assert serving is not None
    assert openings.add_openings(serving, tomorrow) == 1
    command("purge", tmp_path / "kv", "--all", "--yes")
    assert openings.add_openings(serving, tomorrow) == 0


def test_the_report_names_the_date_that_broke_the_prefix(
    server: AppServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The work ahead did not come in time."""
    server.engine.ahead.add_job = lambda _: None
    ask(server, first("Name three rivers."))
    clock.days = 1
    with caplog.at_level(logging.INFO, "diskprefix"):
        broken = ask(server, first("Name three rivers."))["prefix_cache"]["broken_by"]
    assert broken["template_date"] is True
    assert broken["line"].startswith("Xxxxx: ##") or "##" in broken["line"]
    assert "--template-date YYYY-MM-DD fixes" in caplog.text


def test_a_day_that_is_fixed_is_written(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path, template_date="2026-01-31") as server, server.client() as client:
        prompt = client.post("/apply-template", json={"messages": first("Name a river.")}).json()["prompt"]
    assert "Today: 31 January 2026" in prompt


@pytest.mark.parametrize("text", ["", "now", "2026-02-30", "31.1.2026", "2026-01-31T10:00", "20260131"])
def test_a_date_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--template-date: .* is not today or a day such as 2026-01-31"):
        Settings(template_date=text)


def message(role: Any, text: str) -> Message:
    return Message(role=role, content=(TextPart(text, "messages[0]"),), path="messages[0]")


ASKED = Conversation(
    messages=[message("system", "Be kind."), message("user", "Hello \ud800 you")],
    tools=[{"type": "function", "function": {"name": "look"}}],
    template_variables={"a": [1, None]},
    reasoning_effort="low",
    thinking=True,
)


def test_an_opening_is_read_as_it_was_kept() -> None:
    kept = encode_opening(ASKED)
    assert kept is not None
    again = decode_opening(kept[1])
    assert encode_opening(again) == kept
    assert [message.texts[0].text for message in again.messages] == ["Be kind.", "Hello \ud800 you"]
    assert (again.tools, again.template_variables) == (ASKED.tools, ASKED.template_variables)
    other = encode_opening(Conversation(messages=[*ASKED.messages[:1], message("user", "Good day")], tools=ASKED.tools))
    assert other is not None
    assert other[0] != kept[0], "other variables"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"messages": [1]}', b'{"messages": []}', b"null"])
def test_content_that_is_no_opening_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an opening|Expecting value|decode"):
        decode_opening(content)


def test_replies_and_pictures_make_no_opening() -> None:
    picture = Message(role="user", content=(ImagePart("data:", "", ""),), path="")
    for last in (message("assistant", "Hello."), picture):
        assert encode_opening(Conversation(messages=[*ASKED.messages, last])) is None

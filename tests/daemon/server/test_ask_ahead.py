"""A client asks for its first prompt ahead: the daemon answers at once how much of it is computed, keeps it over a
restart, and computes it while no request waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.engine.idle import ahead_jobs
from diskprefix.daemon.server import openings
from diskprefix.errors import DiskStalled
from tests.agent_bodies import words
from tests.daemon.engine.driving import write_model
from tests.daemon.server.chat_model import CHAT_TEMPLATE
from tests.daemon.server.daemon_process import command, reply_to
from tests.daemon.server.scripted import AppServer, real_app
from tests.runtime.plan import tiny
from tests.waiting import wait_for

SYSTEM = words(1, 300)
TOOL = {"name": "look", "description": "Look at it.", "input_schema": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/messages": {
        "system": SYSTEM,
        "messages": [{"role": "user", "content": "Hello."}],
        "tools": [TOOL],
        "max_tokens": 9,
        "stream": True,
    },
    "/v1/responses": {"instructions": SYSTEM, "input": "Hello.", "stream": True},
}
CHAT = "/v1/chat/completions"


@pytest.fixture(params=["llama", "qwen3_5"], ids=["dense", "hybrid"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("models") / "asked", request.param)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_jobs, "_QUIET_S", 0.0)
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)


def start(model: Path, folder: Path, **changes: Any) -> AbstractContextManager[AppServer]:
    usual: dict[str, Any] = {"ahead": "auto", "kv_cache_gate": "off", "speculative": "off"}
    return real_app(model, folder / "kv", **usual | changes)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[AppServer]:
    with start(model, tmp_path) as server:
        yield server


def ask_ahead(server: AppServer, route: str = CHAT, label: Any = "Agent", **options: Any) -> httpx.Response:
    body = BODIES[route] | {"prefix_cache": {"ahead": label} | options}
    with server.client() as client:
        return client.post(route, json=body)


def first_question(server: AppServer, **options: Any) -> tuple[int, int]:
    """The tokens that the first question of a session restores, and those that it sends."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And three lakes?"}]
    with server.client() as client:
        answer = reply_to(client, {"messages": messages, "max_tokens": 2, "temperature": 0}, **options)
    return answer["prefix_cache"]["restored"], answer["usage"]["prompt_tokens"]


def wait_computed(server: AppServer) -> None:
    wait_for(lambda: server.engine.ahead.wait_s is None)
    assert server.engine.cache.writer.flush(10)


@pytest.mark.parametrize("route", BODIES)
def test_the_answer_says_how_much_is_ready_and_the_rest_is_computed_later(server: AppServer, route: str) -> None:
    answer = ask_ahead(server, route).json()
    num_tokens = answer.pop("prompt_tokens")
    assert num_tokens > 300
    assert answer == {
        "object": "prefix_cache.ahead",
        "model": "asked",
        "ready_tokens": 0,
        "waits": True,
        "paused": None,
    }
    wait_computed(server)
    again = ask_ahead(server, route).json()
    assert num_tokens - 2 <= again["ready_tokens"] <= num_tokens == again["prompt_tokens"]
    assert server.engine.ahead.wait_s is None, "there is nothing left to compute"
    assert server.daemon.inbox.queue_depth == 0


@pytest.mark.parametrize("route", BODIES)
def test_a_prompt_asked_ahead_is_rendered_in_a_turn_of_its_caller(
    server: AppServer, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered_on = list[str]()
    for name in ("opening", "replay"):
        render = getattr(PromptRenderer, name)

        def note(*args: Any, render: Callable[..., Any] = render) -> Any:
            rendered_on.append(threading.current_thread().name)
            return render(*args)

        monkeypatch.setattr(PromptRenderer, name, note)
    assert ask_ahead(server, route).status_code == 200
    # The template may still be examined on the thread that loads the model.
    assert {name.partition("_")[0] for name in rendered_on} - {"load"} == {"rendering"}


def test_asking_ahead_pauses_no_work_ahead(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = list[int]()
    monkeypatch.setattr(server.engine.ahead, "pause", lambda **_: paused.append(1))
    ask_ahead(server)
    assert not paused
    first_question(server)
    assert paused


def test_the_first_question_is_a_next_turn(server: AppServer) -> None:
    ask_ahead(server)
    wait_computed(server)
    restored, sent = first_question(server)
    assert sent - 40 < restored < sent


def test_a_restart_computes_the_prompts_that_wait(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path) as server:
        server.engine.ahead.pause(is_long=True)
        ask_ahead(server, label="Claude Code")
        [asked] = server.engine.ahead.figures["asked"]
        assert (asked["label"], asked["ready"], asked["tokens"] > 300) == ("Claude Code", 0, True)
    with start(model, tmp_path) as server:
        wait_for(lambda: server.engine.cache.counters["ahead_tokens"] > 0)
        wait_computed(server)
        restored, sent = first_question(server)
        assert sent - 40 < restored < sent
    with start(model, tmp_path) as server:
        wait_for(lambda: any(task.done() for task in server.daemon._background_tasks))
        wait_computed(server)
        assert server.engine.cache.counters["ahead_tokens"] == 0, "it is stored by now"


def test_after_a_restart_a_prompt_has_the_options_of_its_request(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path) as server:
        server.engine.ahead.pause(is_long=True)
        ask_ahead(server, ttl=600, scope="full")
    with start(model, tmp_path) as server:
        wait_for(lambda: server.engine.cache.counters["ahead_tokens"] > 0)
        wait_computed(server)
        with server.engine.cache.store.snapshot() as snapshot:
            found = {(entry.kind, entry.scope, entry.ttl_s) for _, entry in snapshot.entries()}
            times = {snapshot.usage(name).ttl_s for name in snapshot.keys("usage")}
        assert found == {("opening", "full", 600)}
        assert times == {600}


def test_a_prompt_belongs_to_its_tenant_and_a_purge_deletes_it(server: AppServer, tmp_path: Path) -> None:
    serving = server.daemon.serving
    assert serving is not None
    ask_ahead(server, salt="alice")
    wait_computed(server)
    assert first_question(server)[0] == 0
    assert first_question(server, salt="alice")[0] > 300
    assert server.engine.cache.writer.flush(10)
    assert openings.add_openings(serving, date.today()) == 1
    wait_computed(server)
    command("purge", tmp_path / "kv", "--all", "--yes")
    assert openings.add_openings(serving, date.today()) == 0


def test_only_the_newest_prompts_are_computed_after_a_start(server: AppServer) -> None:
    serving = server.daemon.serving
    assert serving is not None
    for number in range(openings._MAX_OPENINGS + 2):
        messages = [{"role": "system", "content": f"You are {number}."}, {"role": "user", "content": "Hello."}]
        with server.client() as client:
            client.post(CHAT, json={"messages": messages, "prefix_cache": {"ahead": f"Agent {number}"}})
    wait_computed(server)
    server.engine.ahead.pause(is_long=True)
    assert openings.add_openings(serving, date.today()) == openings._MAX_OPENINGS
    labels = [asked["label"] for asked in server.engine.ahead.figures["asked"]]
    assert labels == [f"Agent {number}" for number in range(9, 1, -1)]


@pytest.mark.parametrize("ahead", ["off", "auto"])
def test_the_answer_says_why_nothing_is_computed(
    model: Path, tmp_path: Path, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: True)
    with start(model, tmp_path, ahead=ahead) as server:
        assert ask_ahead(server).json()["paused"] == ("off" if ahead == "off" else "battery")
        with server.client() as client:
            figures = client.get("/props").json()["ahead"]
        assert (figures["waiting"], len(figures["asked"])) == ((0, 0) if ahead == "off" else (1, 1))
        assert figures["tokens"] == 0


def test_a_disk_that_does_not_answer_has_nothing_ready(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def stall(*_: object) -> None:
        raise DiskStalled("the disk does not answer")

    ask_ahead(server)
    wait_computed(server)
    server.engine.pages.forget_idle()
    assert ask_ahead(server).json()["ready_tokens"] > 300
    monkeypatch.setattr(server.engine.cache.store.reads, "ask", stall)
    assert ask_ahead(server).json()["ready_tokens"] == 0


@pytest.mark.parametrize("label", ["", "a" * 65, "a\nb", "\x1b[1m", "\u200b", 1, True, None, ["a"]])
def test_a_label_is_short_and_printable(server: AppServer, label: Any) -> None:
    response = ask_ahead(server, label=label)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prefix_cache.ahead")


ASSISTANT = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(
    ("route", "changes", "problem"),
    [
        (CHAT, {"prefix_cache": {"ahead": "Agent", "save": False}}, "not save: false"),
        (CHAT, {"prefix_cache": {"ahead": "Agent", "scope": "off"}}, "needs the scope full or auto"),
        (CHAT, {"prefix_cache": {"ahead": "Agent", "scope": 40}}, "needs the scope full or auto"),
        (CHAT, {"messages": [*BODIES[CHAT]["messages"], ASSISTANT]}, "without replies and pictures"),
        ("/v1/completions", {"prompt": "Hello."}, "only for the first request of a conversation"),
    ],
)
def test_other_requests_are_refused(server: AppServer, route: str, changes: dict[str, Any], problem: str) -> None:
    body = BODIES.get(route, {}) | {"prefix_cache": {"ahead": "Agent"}} | changes
    with server.client() as client:
        error = client.post(route, json=body)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "prefix_cache.ahead")
    assert problem in error.json()["error"]["message"]
    assert server.engine.ahead.wait_s is None

"""The names that a request may give the only model."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diskprefix.daemon import hooks
from diskprefix.daemon.catalogue.built_in_names import BuiltInNames
from diskprefix.daemon.server.serving import Serving
from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelNotFound
from diskprefix.runtime.fetch.proposals import short_names
from tests.daemon.server.scripted import AppServer, scripted_app

USER = {"role": "user", "content": "hello"}


FILE = Path("/models/Small-Instruct.Q4_1.gguf")
HERE = {
    "claude-of-mine": Path("/models/of-mine.gguf"),
    "Claude-X:latest": Path("/models/x.gguf"),
    "gpt-4-bad": None,
    "gpt-3.5-turbo:latest": FILE,
    "someone/Copy:v1": FILE,
}


def names(*, are_refused: bool = False, models_here: Any = HERE.items) -> BuiltInNames:
    made = BuiltInNames(are_refused=are_refused, models_here=models_here)
    made.prepare(FILE, "Small-Instruct")
    return made


def serving(**changes: Any) -> Serving:
    engine = SimpleNamespace(origin=FILE)
    changes = {"built_in_names": names()} | changes
    values: dict[str, Any] = dict.fromkeys(Serving.__struct_fields__) | {"engine": engine, "takes_any_name": False}
    return Serving(**values | {"model_name": "Small-Instruct"} | changes)


@pytest.mark.parametrize("name", [None, "Small-Instruct", "Small-Instruct:latest", "Small-Instruct.Q4_1"])
def test_a_model_is_found_by_its_name_and_by_that_of_its_file(name: str | None) -> None:
    serving().require_model(name)


@pytest.mark.parametrize("name", ["Small", "Small-Instruct.Q4_1.gguf", "/models/Small-Instruct.Q4_1"])
def test_another_name_is_no_model(name: str) -> None:
    with pytest.raises(ModelNotFound, match="is not served here; 'Small-Instruct' is"):
        serving().require_model(name)
    serving(takes_any_name=True).require_model(name)


BUILT_IN = [
    *("gpt-4", "gpt-4o", "gpt-4.1-mini", "gpt-5.1-codex-max", "gpt-3.5", "openai/gpt-5", "chatgpt-4o-latest"),
    *("claude-sonnet-4-5", "claude-3-5-haiku-20241022", "anthropic/claude-opus-4.6", "claude-opus-4@20250514"),
    *(
        "codex-mini-latest",
        "coder-model",
        "qwen3-coder-plus",
        "",
        "o1",
        "o3-mini",
        "GPT-4o",
        "gpt-4o:latest",
        "anthropic/claude-opus-5:latest",
    ),
]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_only_model_answers_to_names_that_programs_have_built_in(name: str) -> None:
    serving().require_model(name)
    with pytest.raises(
        ModelNotFound, match="is not served here; 'Small-Instruct' is, and --strict-model-names refuses"
    ):
        serving(built_in_names=names(are_refused=True)).require_model(name)


COMMAND = (
    "; once this server has ended, `diskprefix serve --model {}` serves that one ({} to fetch, if it is not on this "
    "machine)"
)
OTHER_NAME = "; `--served-model-name` of `diskprefix serve` gives it another name"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gpt-oss:20b", COMMAND.format("gpt-oss:20b", "11.3 GiB")),
        ("qwen3-coder:30b", COMMAND.format("qwen3-coder:30b", "17.1 GiB")),
        ("claude-of-mine", OTHER_NAME),
        ("claude-of-mine:latest", OTHER_NAME),
        ("claude-x", OTHER_NAME),
        ("claude-X:latest", OTHER_NAME),
        ("gpt-4-bad", OTHER_NAME),
        ("gpt-4o:latest:latest", OTHER_NAME),
        ("gpt-4o:8b", OTHER_NAME),
        ("gpt-4o\n", OTHER_NAME),
        ("my-gpt-4o", OTHER_NAME),
        (" ", OTHER_NAME),
    ],
)
def test_a_name_of_a_model_that_can_be_had_is_never_another_model(name: str, advice: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        serving().require_model(name)
    assert refused.value.message.endswith(f"; 'Small-Instruct' is{advice}")


@pytest.mark.parametrize("name", ["gpt-3.5-turbo", "gpt-3.5-turbo:latest", "someone/Copy:v1"])
def test_another_name_of_the_served_file_is_answered(name: str) -> None:
    serving().require_model(name)
    serving(built_in_names=names(are_refused=True)).require_model(name)


def test_a_name_that_also_means_another_model_is_not_answered() -> None:
    twice = [("gpt-4o", FILE), ("GPT-4o", Path("/models/another.gguf"))]
    for here in (twice, twice[::-1]):
        assert not names(models_here=here.copy).has("gpt-4o", "Small-Instruct")


def test_names_that_cannot_be_read_end_nothing_and_are_refused(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_settings: Settings) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a name")

    monkeypatch.setattr(hooks, "known_names", fails)
    with scripted_app(chat_model) as server, server.client() as client:
        statuses = [
            client.post("/v1/chat/completions", json={"messages": [USER]} | model).status_code
            for model in ({}, {"model": "gpt-4o"})
        ]
        assert (statuses, server.daemon.status) == ([200, 404], "ok")
    assert "the names of the models here cannot be read" in caplog.text


def test_names_are_read_before_the_first_request(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def none_here(_settings: Settings) -> tuple[()]:
        threads.append(threading.current_thread().name)
        return ()

    monkeypatch.setattr(hooks, "known_names", none_here)
    with scripted_app(chat_model) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json={"messages": [USER], "model": "gpt-4o"}).status_code == 200
    assert threads == ["load"]


def test_each_short_name_of_a_model_is_that_model() -> None:
    short = [*short_names(), *(row.source for row in short_names().values())]
    assert [name for name in short if names().has(name, "Small-Instruct")] == []


def test_the_log_says_once_who_answers_to_a_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diskprefix"):
        asked = serving()
        for name in ("gpt-4o", "gpt-4o", "", *(f"gpt-4-{number}" for number in range(500))):
            asked.require_model(name)
    assert caplog.messages[0].startswith(
        "Small-Instruct answers a request for 'gpt-4o', a name that programs have built in"
    )
    assert caplog.messages[1].startswith("Small-Instruct answers a request for ''")
    assert len(caplog.messages) == 64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 4}),
        ("/v1/responses", {"input": "x"}),
        ("/api/chat", {"messages": [USER], "stream": False}),
    ],
)
def test_a_response_names_the_model_that_answered(server: AppServer, path: str, body: dict[str, Any]) -> None:
    with server.client() as client:
        [card] = client.get("/v1/models").json()["data"]
        answer = client.post(path, json=body | {"model": "gpt-4o"})
        assert client.get("/v1/models/gpt-4o").json() == card
    assert (answer.status_code, answer.json()["model"]) == (200, card["id"])


def test_with_strict_model_names_no_other_name_is_answered(chat_model: Path) -> None:
    with scripted_app(chat_model, strict_model_names=True) as server, server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [USER], "model": "gpt-4o"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


@pytest.mark.usefixtures("own_places")
def test_names_in_models_toml_are_answered_if_they_mean_the_served_file(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config" / "diskprefix").mkdir(parents=True)
    table = '[gpt-5-of-mine]\nmodel = "small"\naliases = ["claude-haiku-4-5"]\n'
    table += f'[served-too]\nmodel = "{chat_model}"\naliases = ["gpt-4-too"]\n'
    (tmp_path / "config" / "diskprefix" / "models.toml").write_text(table)
    with scripted_app(chat_model) as server, server.client() as client:
        answered = {
            name: client.post("/v1/completions", json={"prompt": "x", "model": name}).status_code
            for name in ("gpt-5-of-mine", "claude-haiku-4-5", "gpt-5", "served-too", "gpt-4-too")
        }
    assert answered == {
        "gpt-5-of-mine": 404,
        "claude-haiku-4-5": 404,
        "gpt-5": 200,
        "served-too": 200,
        "gpt-4-too": 200,
    }

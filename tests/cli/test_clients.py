"""`diskprefix clients`: the settings that it prints are well formed and say what the daemon says."""

from __future__ import annotations

import ast
import json
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from diskprefix.errors import NotReady
from diskprefix.extras import daemon_call
from diskprefix.extras.clients import clients_command
from diskprefix.extras.clients.recipe import Recipe, RecipeFile, Served, names, recipe
from diskprefix.extras.daemon_call import Answer
from tests.cli.conftest import Run

SERVED = Served(url="http://127.0.0.1:8642", model='a "model"\\1', key="k-1", context=32_768)
"""The name has what quoted strings must escape."""
PARSERS: dict[str, Any] = {".json": json.loads, ".toml": tomllib.loads, ".yml": yaml.safe_load, ".yaml": yaml.safe_load}
PARSERS |= {".py": ast.parse}
FILES = [(name, file) for name in names() for file in recipe(name, SERVED).files]


def texts_of(value: object) -> list[str]:
    """All texts of a parsed file, the keys of its objects too."""
    if isinstance(value, ast.AST):
        return [
            node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in texts_of(part)]
    if isinstance(value, list):
        return [text for part in value for text in texts_of(part)]
    return [str(value)]


def all_texts(told: Recipe) -> str:
    parsed = [text for file in told.files for text in texts_of(PARSERS[Path(file.path).suffix](file.text))]
    return "\n".join([told.note, told.run, *told.environment.values(), *parsed])


class FakeDaemon:
    """Answers as a daemon does that serves `model-1` with 4 096 positions."""

    def __init__(self, models: Answer | None = None) -> None:
        card = {"id": "model-1", "context_length": 4096}
        self.models = models or Answer(200, json.dumps({"data": [card]}).encode())
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, url: str, api_key: str | None, otherwise: str) -> Any:
        assert "There are settings for aider, claude-code, " in otherwise
        self.asked.append((url, api_key))
        health = Answer(200, b'{"status": "ok"}')
        return lambda _method, path, _body: health if path == "/health" else self.models


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    fake = FakeDaemon()
    monkeypatch.setattr(clients_command, "running_daemon", fake)
    return fake


def test_each_client_of_the_list_has_a_recipe() -> None:
    assert names() == [
        *("aider", "claude-code", "cline", "codex", "continue", "goose", "langchain", "llm", "open-webui", "opencode"),
        *("pi", "pydantic-ai", "qwen-code"),
    ]


@pytest.mark.parametrize(("name", "file"), FILES, ids=[f"{name}-{Path(file.path).name}" for name, file in FILES])
def test_each_file_parses_and_keeps_the_name_of_the_model(name: str, file: RecipeFile) -> None:
    texts = texts_of(PARSERS[Path(file.path).suffix](file.text))
    assert any(SERVED.model in text for text in texts), f"{name}: {texts}"


def test_a_launch_says_it_where_opencode_and_aider_read_last() -> None:
    said = recipe("opencode", SERVED, Path("/profile")).environment["OPENCODE_CONFIG_CONTENT"]
    assert json.loads(said)["model"] == f"diskprefix/{SERVED.model}"
    told = recipe("aider", SERVED, Path("/profile"))
    [text] = [file.text for file in told.files if file.path == told.environment["AIDER_ENV_FILE"]]
    assert f'AIDER_OPENAI_API_BASE="{SERVED.url}/v1"\n' in text


@pytest.mark.parametrize("name", names())
def test_each_recipe_names_the_address_and_the_key(name: str) -> None:
    told = all_texts(recipe(name, SERVED))
    assert SERVED.url in told
    assert SERVED.key in told
    assert "$" not in told.replace("$schema", "")


@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode", "qwen-code", "aider", "continue"])
def test_clients_that_can_know_the_context_are_told_it(name: str) -> None:
    assert str(SERVED.context) in all_texts(recipe(name, SERVED))


def test_the_settings_are_those_of_the_running_daemon(run: Run, daemon: FakeDaemon) -> None:
    ended = run("clients", "codex", "--url", "http://10.0.0.1:9/v1/", "--api-key", "secret", "--json")
    assert (ended.exit_code, ended.stderr) == (0, "")
    [told] = ended.json["clients"]
    settings = tomllib.loads(told["files"][0]["text"])
    assert (settings["model"], settings["model_context_window"]) == ("model-1", 4096)
    assert settings["model_providers"]["diskprefix"]["base_url"] == "http://10.0.0.1:9/v1"
    assert told["environment"] == {"DISKPREFIX_API_KEY": "secret"}
    assert daemon.asked == [("http://10.0.0.1:9/v1/", "secret")]


def test_without_a_name_all_are_printed(run: Run, daemon: FakeDaemon) -> None:  # noqa: ARG001
    ended = run("clients", "--model", "model-1")
    assert [line for line in ended.stdout.splitlines() if line.startswith("## ")] == [
        f"## {recipe(name, SERVED).title}" for name in names()
    ]
    assert "export ANTHROPIC_MODEL=model-1" in ended.stdout
    assert '    model: "model-1"' in ended.stdout


def test_a_refused_key_and_no_daemon_are_one_clear_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Answer(401, b'{"error": {"message": "this key is not known"}}')
    monkeypatch.setattr(clients_command, "running_daemon", FakeDaemon(refusal))
    ended = run("clients", "llm", "--api-key", "wrong")
    assert (ended.exit_code, ended.stderr) == (2, "error: --api-key: this key is not known\n")
    monkeypatch.undo()
    ended = run("clients", "llm", "--url", "http://127.0.0.1:1")
    assert ended.exit_code == 1
    assert ended.stderr.startswith("error: no daemon answers at http://127.0.0.1:1 (")


@pytest.mark.parametrize("command", ["clients llm", "chat", "warm prompt.txt", "launch claude --print"])
def test_what_takes_connections_and_says_nothing_is_not_waited_for(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_call, "_CONNECT_S", 0.05)
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text("A prompt.", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ended = run(*command.split(), "--url", url)
    ended.assert_refused(1, f"no daemon answers at {url} (timed out); ")


def test_a_daemon_that_falls_silent_within_an_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_call, "_SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NotReady, match="timed out"):
            daemon_call.running_daemon(url, None)("POST", "/v1/completions", {})
        stream = daemon_call.streaming_daemon(url, None)
        with pytest.raises(NotReady, match="timed out"), stream("/v1/completions", {}):
            pass

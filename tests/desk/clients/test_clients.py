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
from msgspec.structs import replace

from diskprefix.desk.shared import daemon_call
from diskprefix.desk.shared.recipes.recipe import Recipe, Served, names, recipe
from diskprefix.errors import NotReady
from tests.desk.conftest import Run
from tests.desk.small_daemon import models, small_daemon

SERVED = Served(url="http://127.0.0.1:8642", model='a "model"\\1', key="k-1", context=32_768)
"""The name has what quoted strings must escape."""
PARSERS: dict[str, Any] = {".json": json.loads, ".toml": tomllib.loads, ".yml": yaml.safe_load, ".yaml": yaml.safe_load}
PARSERS |= {".py": ast.parse}


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


KNOW_THE_CONTEXT = {"claude-code", "codex", "opencode", "qwen-code", "aider", "continue", "hermes"}


@pytest.mark.parametrize("name", names())
def test_each_recipe_is_well_formed_and_names_the_model_the_address_and_the_key(name: str) -> None:
    told = recipe(name, SERVED)
    for file in told.files:
        texts = texts_of(PARSERS[Path(file.path).suffix](file.text))
        assert any(SERVED.model in text for text in texts), f"{file.path}: {texts}"
    said = all_texts(told)
    assert SERVED.url in said
    assert SERVED.key in said
    assert "$" not in said.replace("$schema", "")
    assert str(SERVED.context) in said or name not in KNOW_THE_CONTEXT


@pytest.mark.parametrize(("context", "output"), [(32_768, "4096"), (131_072, "16384"), (1_000_000, "32000")])
def test_claude_code_leaves_room_for_a_conversation_beside_the_longest_reply(context: int, output: str) -> None:
    environment = recipe("claude-code", replace(SERVED, context=context)).environment
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == output
    # It sums up when less than this is left; a task with a first prompt of 11 600 tokens was seen to end without that.
    assert context - int(output) - 13_000 > 15_000


@pytest.mark.parametrize("takes_images", [True, False])
def test_a_client_that_must_be_told_is_told_whether_the_model_takes_images(takes_images: bool) -> None:
    served = replace(SERVED, takes_images=takes_images)
    told = {name: json.loads(recipe(name, served).files[0].text) for name in ("opencode", "pi", "qwen-code")}
    kinds = ["text", "image"] if takes_images else ["text"]
    [opencode] = told["opencode"]["provider"]["diskprefix"]["models"].values()
    assert opencode["modalities"]["input"] == kinds
    [pi] = told["pi"]["providers"]["diskprefix"]["models"]
    assert pi["input"] == kinds
    [qwen] = told["qwen-code"]["modelProviders"]["openai"]
    assert qwen["generationConfig"]["modalities"] == {"image": takes_images}


def test_agents_that_shorten_their_history_are_told_not_to() -> None:
    opencode, goose, hermes = (recipe(name, SERVED) for name in ("opencode", "goose", "hermes"))
    assert json.loads(opencode.files[0].text)["compaction"] == {"prune": False}
    assert goose.environment["GOOSE_TOOL_PAIR_SUMMARIZATION"] == "false"
    assert yaml.safe_load(hermes.files[0].text)["compression"]["threshold"] == 0.9
    assert all("computed again" in " ".join(told.note.split()) for told in (opencode, goose, hermes))


def test_a_launch_says_it_where_opencode_and_aider_read_last() -> None:
    said = recipe("opencode", SERVED, Path("/profile")).environment["OPENCODE_CONFIG_CONTENT"]
    assert json.loads(said)["model"] == f"diskprefix/{SERVED.model}"
    told = recipe("aider", SERVED, Path("/profile"))
    [text] = [file.text for file in told.files if file.path == told.environment["AIDER_ENV_FILE"]]
    assert f'AIDER_OPENAI_API_BASE="{SERVED.url}/v1"\n' in text


def test_the_settings_are_those_of_the_running_daemon(run: Run) -> None:
    with small_daemon(
        models=[models({"id": "model-1", "context_length": 4096, "capabilities": ["tool_use", "vision"]})]
    ) as daemon:
        ended = run("clients", "codex", "--url", f"{daemon.url}/v1/", "--api-key", "secret", "--json")
        assert run("clients", "claude", "--url", daemon.url).stdout.startswith("## Claude Code")
        everything = run("clients", "--model", "model-1", "--url", daemon.url).stdout
    assert ended.exit_code == 0
    first, advice = ended.stderr.splitlines()
    assert first == "warning for agents: model-1 takes 4,096 tokens, and first prompts of agents have up to 19,000"
    assert advice.startswith("fetch another with `diskprefix pull ")
    [told] = ended.json["clients"]
    settings = tomllib.loads(told["files"][0]["text"])
    assert (settings["model"], settings["model_context_window"]) == ("model-1", 4096)
    assert settings["model_providers"]["diskprefix"]["base_url"] == f"{daemon.url}/v1"
    assert told["environment"] == {"DISKPREFIX_API_KEY": "secret"}
    assert daemon.keys[:2] == ["Bearer secret"] * 2
    titles = [line for line in everything.splitlines() if line.startswith("## ")]
    assert titles == [f"## {recipe(name, SERVED).title}" for name in names()]
    assert "export ANTHROPIC_MODEL=model-1" in everything
    assert '"modalities": {"image": true}' in everything
    assert '    model: "model-1"' in everything


@pytest.mark.parametrize("command", ["clients llm", "chat", "warm prompt.txt", "launch claude --print"])
def test_commands_stop_waiting_for_a_silent_server(
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

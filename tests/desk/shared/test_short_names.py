"""The short names of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.cli import commands
from diskprefix.desk.shared import daemon_choice, fetch_model, model_choice
from diskprefix.runtime.fetch.proposals import full_name, meant_name, require_repository
from tests.desk.conftest import Run

QWEN = "unsloth/Qwen3.5-4B-GGUF:Q4_K_M"


@pytest.mark.usefixtures("own_places")
def test_a_short_name_is_taken_wherever_a_model_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(name: str, *_: Any, **__: Any) -> Path:
        fetched.append(name)
        return tmp_path

    monkeypatch.setattr(fetch_model, "fetched_model", fetch)
    monkeypatch.setattr(model_choice, "cached_model", lambda _name: None)
    assert model_choice.flags_of_model("Qwen3.5:4b") == ["--model", QWEN]
    fetch_model.fetch(require_repository("qwen3.5:4b"), "--model")
    assert fetched == [QWEN, QWEN]
    assert f'model = "{QWEN},a/b"' in run("serve", "--model", "qwen3.5:4b", "--model", "a/b", "--print-config").stdout
    refused = (["pull", "qwen3.5:5b"], ["run", "qwen3.5:5b", "hi"], ["launch", "goose", "--model", "qwen3.5:5b"])
    for command in (command for command in refused if command[0] in commands()):
        monkeypatch.setattr("shutil.which", lambda name: name)
        monkeypatch.setattr(daemon_choice, "own_urls", list)
        run(*command).assert_refused(2, "no model has the short name 'qwen3.5:5b'; did you mean qwen3.5:", "qwen3.5:9b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3.5:4b").touch()
    assert meant_name("qwen3.5:4b") == "qwen3.5:4b", "a file of this name goes before"
    assert full_name("qwen3.5:4b") == QWEN, "for what a client sends, nothing is looked for"

"""Doctor's findings in a model's files, without its weights, and its judgement of replies."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from diskprefix.errors import LoadInterrupted
from diskprefix.extras.catalogue import catalogue
from diskprefix.extras.catalogue.catalogue import path_of
from diskprefix.extras.setup import doctor_model, this_process
from diskprefix.extras.setup.doctor_machine import Finding
from diskprefix.extras.setup.doctor_model import model_findings
from diskprefix.model.load import fit, memory
from diskprefix.model.load.fit import ModelNeeds, TokenState, fitted, needs_of_gguf
from diskprefix.model.load.gguf import converted_folder
from diskprefix.settings import Settings
from tests.model import tiny
from tests.server.chat_model import write_tokenizer

GIB = 2**30
STATE = TokenState(per_token=2**15, positions=32_768)
"""A GiB for the longest sequence."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer, and a file for its weights."""
    write_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how much memory the weights take, and how much is free."""

    def set_to(needed: int, free: int) -> None:
        def needs(folder: Path, _files: object, _weights: str, dtype: str) -> ModelNeeds:
            num_bytes = needed * (2 if dtype == "float32" else 1)
            return ModelNeeds(name=folder.name, weights={"bfloat16": num_bytes}, state=STATE)

        monkeypatch.setattr(catalogue, "needs_of_folder", needs)
        monkeypatch.setattr(memory, "available_ram_bytes", lambda: free)

    set_to(GIB, 10 * GIB)
    return set_to


def found_in(folder: Path, **settings: Any) -> dict[str, Finding]:
    return {each.check: each for each in model_findings(Settings(model=str(folder), **settings), lambda _line: None)}


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    assert all(each.advice for each in findings.values() if each.level in ("note", "problem"))
    return {check: each.level for check, each in findings.items()}


@pytest.mark.parametrize(
    ("needed", "settings", "level"),
    [
        (5, {}, "ok"),
        (9, {}, "note"),
        (11, {}, "problem"),
        (9, {"dtype": "float32"}, "problem"),
        (11, {"device": "cuda"}, "ok"),
    ],
)
def test_weights_are_compared_with_the_memory(
    folder: Path, sizes: Any, needed: int, settings: dict[str, Any], level: str
) -> None:
    sizes(needed * GIB, 10 * GIB)
    assert levels(found_in(folder, **settings))["model"] == level


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def without_a_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_weights, {"model": "problem"}),
        (with_a_broken_tokenizer, {"model": "ok", "tokenizer": "problem"}),
        (without_a_template, {"model": "ok", "tokenizer": "ok", "template": "note"}),
    ],
)
def test_what_a_folder_lacks_is_told(folder: Path, change: Callable[[Path], None], expected: dict[str, str]) -> None:
    change(folder)
    assert levels(found_in(folder)) == expected


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_0")


def test_the_tokenizer_of_a_file_is_not_looked_at_before_it_is_converted(gguf: Path) -> None:
    assert levels(found_in(gguf)) == {"model": "ok", "tokenizer": "skipped"}
    converted_folder(gguf, lambda _line: None)
    assert found_in(gguf, weights="native")["tokenizer"].level != "skipped"


def test_a_file_is_a_problem_where_the_start_would_refuse_it(gguf: Path, sizes: Any) -> None:
    needed = fitted(needs_of_gguf(gguf, "auto"), 0).needed_bytes
    sizes(GIB, needed - 1)
    found = found_in(gguf)["model"]
    assert (found.level, dict(found.table)["room to compute"]) == ("problem", fit.ROOM_BYTES)
    sizes(GIB, needed)
    assert levels(found_in(gguf))["model"] == "ok"


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    found = found_in(tmp_path / "model.gguf")["model"]
    assert (found.level, "cannot read" in found.text) == ("problem", True)


def test_a_model_that_is_only_partly_here_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (None, "org/absent", "not a name//"):
        assert path_of(name) is None


def template(folder: Path, text: str) -> None:
    (folder / "template.jinja").write_text(text)


@pytest.mark.parametrize(
    ("text", "level", "says"),
    [
        (None, "ok", "the system message ends at one"),
        (
            "<|im_start|>user\n{{ messages[0].content }}\n{{ messages[1].content }}<|im_end|>\n"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "ok",
            "none at the system message's end",
        ),
        ("{% for message in messages %}{{ message.content }} {% endfor %}", "note", "no safe boundaries"),
        ("{{ raise_exception('no') }}", "problem", "no"),
    ],
)
def test_the_boundaries_of_a_template_are_told(folder: Path, text: str | None, level: str, says: str) -> None:
    if text is not None:
        template(folder, text)
    found = found_in(folder, chat_template=None if text is None else folder / "template.jinja")
    assert (levels(found)["template"], says in found["template"].text) == (level, True)


def test_a_tokenizer_that_changes_texts_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(found_in(folder))["tokenizer"] == "ok"
    decode = PreTrainedTokenizerFast.decode
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda *args, **how: decode(*args, **how).lower())
    assert levels(found_in(folder))["tokenizer"] == "note"


@pytest.mark.parametrize(("name", "level"), [("none", "note"), ("json", "note"), ("qwen", "ok")])
def test_calls_in_no_known_format_are_told(name: str, level: str) -> None:
    assert doctor_model._calls_finding(name).level == level


def reply(text: str = "hello", restored: int = 90, **report: Any) -> dict[str, Any]:
    return {
        "usage": {"prompt_tokens": 100},
        "choices": [{"message": {"content": text}}],
        "timings": {"ttft_ms": 12.0},
        "prefix_cache": {"restored": restored, "source": "disk"} | report,
    }


def judged(*replies: dict[str, Any]) -> dict[str, Finding]:
    return {each.check: each for each in doctor_model._judged(list(replies), "token")}


@pytest.mark.parametrize(
    ("replies", "problems"),
    [
        ((reply(restored=0), reply(), reply()), {}),
        ((reply(restored=0), reply(), reply(restored=0, miss_reason="no_match")), {"restart": "no_match"}),
        ((reply(restored=0), reply(restored=0), reply()), {"repeated": "nothing was restored: not known"}),
        ((reply(restored=0), reply(), reply("hallo")), {"same reply": "differ"}),
    ],
)
def test_replies_must_be_restored_and_equal(replies: tuple[dict[str, Any], ...], problems: dict[str, str]) -> None:
    found = judged(*replies)
    assert {check for check, level in levels(found).items() if level != "ok"} == problems.keys()
    assert all(words in found[check].text for check, words in problems.items())


def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *statuses: int) -> tuple[dict[str, Finding], list[Settings]]:
    """Returns the findings for such answers, and the settings of each start."""
    starts: list[Settings] = []
    answers = iter(statuses)

    @contextmanager
    def in_this_process(settings: Settings, _say: Any) -> Iterator[Any]:
        starts.append(settings)

        def call(method: str, _path: str, _body: Any) -> Any:
            if method == "GET":
                return SimpleNamespace(body={"model": {"identity": {"exact_at": "token"}}})
            return SimpleNamespace(status=next(answers), message="busy", body=reply())

        yield call

    monkeypatch.setattr(this_process, "in_this_process", in_this_process)
    settings = Settings(kv_cache_dir=tmp_path / "kv", record=tmp_path / "day.jsonl", api_keys=tmp_path / "keys")
    found = doctor_model.client_findings(settings, lambda _line: None)
    return {each.check: each for each in found}, starts


def test_the_request_is_sent_to_a_store_of_its_own_without_keys_gate_and_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, starts = asked(monkeypatch, tmp_path, 200, 200, 200)
    assert levels(found)["restart"] == "ok"
    assert len(starts) == 2
    for own in starts:
        assert (own.kv_cache_gate, own.record, own.api_keys) == ("off", None, None)
        assert own.kv_cache_dir == starts[0].kv_cache_dir != tmp_path / "kv"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("statuses", [(503,), (200, 503), (200, 200, 503)])
def test_a_request_that_fails_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: tuple[int, ...]
) -> None:
    found, _ = asked(monkeypatch, tmp_path, *statuses)
    assert (levels(found), found["request"].text) == ({"request": "problem"}, "busy")


def test_an_interrupt_while_nothing_asks_for_it_is_raised_at_the_end_of_the_load() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(LoadInterrupted), this_process._interrupts_held():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    with this_process._interrupts_held():
        pass
    assert signal.getsignal(signal.SIGINT) is before

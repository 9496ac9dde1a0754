"""The views of `diskprefix inspect`: a saved prompt in full, the tree, the figures, and why a request misses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, run_fresh
from tests.extras.watch.browse.saved_chats import ALICE, SYSTEM, SavedChats, chat, tokenizer_in
from tests.store.building import open_store

QUESTION = "When is high tide today?"
OTHER = "org/other:Q8_0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two conversations of one agent, and one of Alice's."""
    place = tmp_path_factory.mktemp("views")
    chats = SavedChats(place / "kv", place / "tokenizer")
    for question in (QUESTION, "Which birds nest on the pier?"):
        chats.save(chat(question))
    chats.save(chat("A secret."), tenant=ALICE)
    chats.store.close()
    return place / "kv"


@pytest.fixture
def inspect(run: Run, folder: Path) -> Any:
    return lambda *args: run("inspect", *args, "--kv-cache-dir", folder)


def first_id(inspect: Any, text: str) -> str:
    entries = inspect("--json").json["entries"]
    return next(str(entry["id"]) for entry in entries if text in entry["preview"])


def test_an_entry_shows_its_text_who_shares_it_and_how_it_is_stored(inspect: Any) -> None:
    name = first_id(inspect, "nest")
    lines = inspect(name).stdout.splitlines()
    assert "  Which birds nest on the pier?<|im_end|>" in lines, "the text, decoded"
    assert next(line for line in lines if line.startswith("reason")).split() == ["reason", "full"]
    at = lines.index("shared with 1")
    assert QUESTION in lines[at + 1]
    assert any(line.startswith("blocks ") and line.endswith(" of them in other prompts too") for line in lines)
    shown = inspect(name, "--json").json
    assert shown["text"].count("<|im_start|>") == 3
    assert [one["num_tokens"] for one in shown["shared_with"]] == [
        max(b["position"] + b["num_tokens"] for b in shown["blocks"] if b["entries"] == 2)
    ]
    assert shown["hit_times"] == sorted(shown["hit_times"]) != []


def test_an_entry_whose_tokenizer_is_gone_shows_its_preview(run: Run, tmp_path: Path) -> None:
    chats = SavedChats(tmp_path / "kv", tmp_path / "tokenizer")
    made = chats.save(chat(QUESTION))
    chats.store.close()
    (tmp_path / "tokenizer").rename(tmp_path / "gone")
    assert made.last_node is not None
    assert (
        "preview     You look after" in run("inspect", made.last_node.hex(), "--kv-cache-dir", tmp_path / "kv").stdout
    )
    asked = run("inspect", "--why", _written(tmp_path, chat(QUESTION)), "--kv-cache-dir", tmp_path / "kv")
    asked.assert_refused(2, "give it with --model")


def test_the_tree_folds_what_is_shared_and_names_each_prompt(inspect: Any) -> None:
    lines = inspect("--tree").stdout.splitlines()
    assert lines[0].startswith("tiny: 2 prompts, ")
    assert lines[1].startswith("└── 0–")
    assert "2 prompts" in lines[1]
    assert {line.rsplit(" ● ")[-1].split(" ", 1)[1] for line in lines[2:4]} == {
        QUESTION,
        "Which birds nest on the pier?",
    }
    assert any(line.startswith("tiny, tenant ") for line in lines)
    trees = inspect("--tree", "--json").json["trees"]
    assert [tree["num_entries"] for tree in trees] == [2, 1]


def test_the_figures_tell_what_is_saved(inspect: Any) -> None:
    shown = inspect("--stats").stdout
    assert "2 prompts, " in shown
    assert "4 requests; 50% of their prompt tokens restored" in shown
    assert "computing saved: " in shown
    figures = inspect("--stats", "--json").json
    main = figures["roots"][0]
    assert (main["total"]["requests"], main["restored_share"], main["total"]["saved_s"]) == (4, 0.5, 3.0)
    assert main["shared_bytes"] > 0 < figures["budget_bytes"]


def test_of_several_models_one_is_shown_and_a_request_by_an_alias_must_say_which(run: Run, tmp_path: Path) -> None:
    chats = SavedChats(tmp_path / "kv", tmp_path / "tokenizer")
    for model, question in (("tiny", QUESTION), (OTHER, QUESTION), (OTHER, "Which birds nest on the pier?")):
        chats.save(chat(question), model=model)
    chats.store.close()

    def inspect(*args: object) -> Any:
        return run("inspect", *args, "--kv-cache-dir", tmp_path / "kv")

    listed, everything = inspect("--model", OTHER, "--json").json, inspect("--json").json
    assert {entry["model"] for entry in listed["entries"]} == {OTHER}
    assert listed["blocks"] == everything["blocks"] - inspect("--model", "tiny", "--json").json["blocks"] > 0
    for view, key in (("--tree", "trees"), ("--stats", "roots")):
        shown = inspect(view, "--model", OTHER, "--json").json
        assert [root["model"] for root in shown[key]] == [OTHER]
    assert " of all models in " in inspect("--model", OTHER).stdout.splitlines()[-1]
    assert " of all models in " not in inspect().stdout
    inspect("--model", "nobody").assert_refused(2, f"there are prompts of {OTHER}, tiny")
    asked = _written(tmp_path, chat(QUESTION) | {"model": "claude-haiku"})
    inspect("--why", asked).assert_refused(2, "nothing is saved of claude-haiku; say with --model which one it is")
    folder = tmp_path / "tokenizer"
    inspect("--why", asked, "--model", folder).assert_refused(2, "nothing is saved of claude-haiku")
    assert inspect("--why", asked, "--model", "tiny", "--json").json["model"] == "tiny"


def test_a_prompt_is_looked_up_with_the_tokenizer_of_the_model_that_was_used_last(run: Run, tmp_path: Path) -> None:
    chats = SavedChats(tmp_path / "kv", tmp_path / "tokenizer")
    chats.save(chat(QUESTION))
    chats.tokenizer = tmp_path / "other"
    tokenizer_in(chats.tokenizer)
    template = chats.tokenizer / "chat_template.jinja"
    template.write_text("Other words." + template.read_text())
    chats.save(chat(QUESTION), model=OTHER)
    chats.tokenizer = tmp_path / "tokenizer"
    chats.save(chat(QUESTION))
    chats.store.close()
    found = run(
        "inspect", "--why", _written(tmp_path, chat(QUESTION)), "--kv-cache-dir", tmp_path / "kv", "--json"
    ).json
    assert (found["model"], found["restored"]) == ("tiny", found["prompt_tokens"])


def _written(folder: Path, body: object) -> Path:
    file = folder / "body.json"
    file.write_text(json.dumps(body))
    return file


def test_why_shows_the_text_around_the_difference_and_the_cause(inspect: Any, tmp_path: Path) -> None:
    changed = SYSTEM.replace("Saturday, November 21", "Sunday, November 22")
    lines = inspect("--why", _written(tmp_path, chat(QUESTION, changed))).stdout.splitlines()
    assert lines[0].endswith(" computed; a running daemon may have more in memory")
    assert "because   a date, a number or an id that changes" in lines
    saved, here, caret = lines[-3:]
    at = caret.index("^")
    assert (saved[at - 1 : at + 3], here[at - 1 : at + 3]) == ("Satu", "Sund")
    found = inspect("--why", _written(tmp_path, chat(QUESTION, changed)), "--json").json
    assert (found["cause"]["kind"], found["parting"]["at"]) == ("value", found["restored"])


def test_why_reads_a_body_from_standard_input(inspect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(chat(QUESTION) | {"prefix_cache": {"salt": "nobody"}})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body.encode())))
    assert inspect("--why", "-", "--json").json["cause"]["kind"] == "tenant"


def test_why_says_that_a_request_with_the_scope_off_does_not_ask(inspect: Any, tmp_path: Path) -> None:
    body = chat(QUESTION) | {"prefix_cache": {"scope": "off"}}
    lines = inspect("--why", _written(tmp_path, body)).stdout.splitlines()
    assert lines[0].startswith("0 of ")
    assert any(line.startswith("because   the request has the scope off") for line in lines)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"messages": 3}', '{"messages": [{"role": "user"}]}'])
def test_a_file_that_is_no_request_is_one_line(inspect: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "body.json").write_text(text)
    inspect("--why", tmp_path / "body.json").assert_refused(2)


def test_an_empty_store_has_every_view(run: Run, tmp_path: Path) -> None:
    open_store(tmp_path / "kv").close()
    for view, said in (("--tree", "nothing is saved"), ("--stats", "of a budget of ")):
        assert said in run("inspect", view, "--kv-cache-dir", tmp_path / "kv").stdout
    ended = run("inspect", "--why", _written(tmp_path, chat("x")), "--kv-cache-dir", tmp_path / "kv")
    ended.assert_refused(2, "the store is empty")


def test_the_plain_views_start_without_what_takes_long_to_import(folder: Path) -> None:
    shown, imported = run_fresh(
        *(["inspect", *view, "--kv-cache-dir", str(folder)] for view in ([], ["--tree"], ["--stats"]))
    )
    assert imported <= {"rich"}
    assert any("computing saved" in line for line in shown)

"""`tools/bench tokenizers`: which texts have other token ids, and whether a reason is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tools.__main__ import main
from tools.benchmarks import llama_cpp_worker, token_ids

TEXTS = [("code", "ab"), ("code", "a\u00e9"), ("numbers", "12")]


def encode(text: str) -> list[int]:
    return [*map(ord, text)]


def without_accents(text: str) -> list[int]:
    return encode(text.replace("\u00e9", "e"))


def test_texts_with_other_ids_are_counted_by_kind() -> None:
    names = ("llama.cpp", "ours")
    equal = token_ids.compared("gpt-2", names, (encode, encode), TEXTS)
    assert (equal.texts, equal.differing, equal.reason) == ({"code": 2, "numbers": 1}, {}, "")
    other = token_ids.compared("gpt-2", names, (encode, without_accents), TEXTS)
    assert (other.differing, other.example) == ({"code": 1}, "[233] and [101]")
    assert other.reason == token_ids.UNKNOWN
    assert "composes" in token_ids.compared("command-r", names, (encode, without_accents), TEXTS).reason
    longer = token_ids.compared("gpt-2", names, (encode, lambda text: [*encode(text), 0]), TEXTS)
    assert longer.differing == {"code": 2, "numbers": 1}


def test_the_texts_are_the_same_in_each_run_and_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_bytes(b"caf\xc3\xa9\x00 \xff!")
    first, second = list(token_ids.texts(None)), list(token_ids.texts(tmp_path))
    assert second == [*first, ("files", "caf\u00e9 !")]
    assert {kind for kind, _ in first} >= {"code", "numbers", "white space", "calls", "scripts", "control tokens"}


@pytest.mark.parametrize(("ours", "code"), [(encode, 0), (without_accents, 1)])
def test_it_fails_for_a_difference_without_a_reason(
    ours: Callable[[str], list[int]], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairs: dict[tuple[str, str], Any] = {("llama.cpp", "ours"): (encode, ours)}
    monkeypatch.setattr(token_ids, "llama_cpp_libraries", lambda _: tmp_path)
    monkeypatch.setattr(llama_cpp_worker, "loaded", lambda _: SimpleNamespace(llama_log_set=lambda *_: None))
    monkeypatch.setattr(token_ids, "vocabularies", lambda _: tmp_path)
    monkeypatch.setattr(token_ids, "programs", lambda *_: iter([("gpt-2", pairs)]))
    monkeypatch.setattr(token_ids, "texts", lambda _: iter(TEXTS))
    shown = CliRunner().invoke(main, ["tokenizers"])
    assert (shown.exit_code, "gpt-2" in shown.stdout) == (code, True)

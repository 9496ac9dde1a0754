"""What --model names is looked at before anything slow, and what is near is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.errors import ModelError
from diskprefix.model.load.embedded import EMBEDDED
from diskprefix.model.load.named_model import name_faster, require_named, weight_files_of
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")


def refusal(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        require_named(model, "--draft-model", with_weights=True)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("--draft-model: ")
    return caught.value.message


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two models."""
    monkeypatch.chdir(tmp_path)
    tiny.write_folder(tmp_path / "Tiny-Chat")
    (tmp_path / "tiny-q4_0.gguf").touch()
    (tmp_path / "tiny-q4_1.txt").touch()
    return tmp_path


@pytest.mark.parametrize("name", ["Tiny-Chat", "tiny-q4_0.gguf", "org/unknown", "org/unknown:Q4_0", EMBEDDED.name])
def test_what_may_be_there_is_not_refused(name: str, here: Path) -> None:
    require_named(name, "--model", with_weights=True)
    require_named(str(here / "Tiny-Chat"), "--model", with_weights=True)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tiny-chat2", "Tiny-Chat"),
        ("./tiny-q4_1.gguf", "./tiny-q4_0.gguf"),
        ("tiny-q4_1.gguf", "tiny-q4_0.gguf"),
        (f"{EMBEDDED.name[:-1]}", EMBEDDED.name),
    ],
)
def test_the_nearest_name_is_said(name: str, nearest: str, here: Path) -> None:
    assert refusal(name).endswith(f"; the nearest is {nearest}")
    absolute = refusal(f"{here}/tiny-q4.gguf")
    assert absolute.endswith(f"; the nearest is {here}/tiny-q4_0.gguf")


@pytest.mark.parametrize("name", ["/not/there", "something-else", "~/nope-such-folder/x", " "])
def test_a_name_that_nothing_is_near_to_is_refused_without_one(name: str, here: Path) -> None:
    assert "nearest" not in refusal(name)
    assert refusal(str(here / "tiny-q4_1.txt")).endswith("give the folder that holds the model, or a .gguf file")


def test_a_folder_says_which_smaller_file_in_it_is_faster(here: Path) -> None:
    folder, lines = here / "Tiny-Chat", list[str]()
    files = weight_files_of(folder)
    name_faster(folder, files, lines.append)
    assert not lines, "there is none"
    for name, size in (
        ("mmproj-F16.gguf", 3),
        ("b-00001-of-00002.gguf", 3),
        ("b-00002-of-00002.gguf", 2),
        ("a.gguf", 4),
    ):
        (folder / name).write_bytes(bytes(size))
    (folder / "large.gguf").write_bytes(bytes(1 + files[0].stat().st_size))
    name_faster(folder, files, lines.append)
    (line,) = lines
    assert line.endswith(f"--model {folder}/b-00001-of-00002.gguf")

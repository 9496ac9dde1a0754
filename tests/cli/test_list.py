"""`diskprefix list` and `diskprefix show`: what is known of models before they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diskprefix.extras.catalogue import architectures
from diskprefix.extras.catalogue.architectures import installed_versions, verified_of
from diskprefix.model.load.fit import fitted, needs_of_gguf
from diskprefix.model.load.gguf_file import MATRICES
from tests.cli.conftest import Run, run_fresh
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def models_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    tiny.write_gguf(folder / "tiny.gguf", quantised="Q4_0", tensors_in_a_part=8)
    tiny.write_folder(folder / "made", dtype=torch.bfloat16)
    (folder / "bad.gguf").write_bytes(b"GGUF")
    capsys.readouterr()  # transformers shows how it writes.
    return folder


def test_models_are_listed_with_what_they_need_and_where_they_are(run: Run, models_dir: Path) -> None:
    found = run("list", "--models-dir", models_dir, "--kv-memory", "1GiB", "--json").json
    rows = {row["name"]: row for row in found["models"]}
    assert list(rows) == ["bad", "made", "tiny"]
    needed = fitted(needs_of_gguf(models_dir / "tiny-00001-of-00003.gguf", "auto"), 0, 1 << 30).needed_bytes
    tiny_row = rows["tiny"]
    assert (tiny_row["kind"], tiny_row["needed_bytes"], tiny_row["context"]) == ("Q4_0", needed, 128)
    assert tiny_row["file_bytes"] == sum(file.stat().st_size for file in models_dir.glob("tiny-*"))
    assert (tiny_row["origin"], tiny_row["fits"]) == ("--models-dir", needed <= found["free_bytes"])
    assert (rows["made"]["kind"], rows["made"]["context"]) == ("bfloat16", 128)
    assert "cannot read" in rows["bad"]["problem"]
    lines = run("list", "--models-dir", models_dir).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "bad", "made", "tiny", "3"]


def test_the_embedded_model_is_listed_where_it_is_the_default(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    [row] = [row for row in run("list", "--json").json["models"] if row["origin"] == "embedded"]
    assert (row["name"], row["path"]) == ("SmolLM2-135M-Instruct", None)
    run("show", row["name"]).assert_refused(3, "`diskprefix serve` fetches it")


def test_a_folder_that_was_made_of_a_file_is_as_large_as_that_file(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_folder(tmp_path / "made", dtype=torch.bfloat16)
    file = tmp_path / "made" / "tiny.gguf"
    tiny.write_gguf(file, quantised="Q4_0")
    (tmp_path / "made" / MATRICES).touch()
    capsys.readouterr()
    assert run("show", tmp_path / "made", "--json").json["file_bytes"] == file.stat().st_size


def test_a_model_is_shown_with_its_sum_its_template_and_its_own_settings(
    run: Run, models_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f'[small]\nmodel = "{models_dir}/made"\naliases = ["haiku"]\nkv_memory = "1MiB"\nweights = "int8"\n'
    )
    found = run("show", "haiku", "--models-file", file, "--json").json
    assert (found["name"], found["aliases"], found["template"]) == ("small", ["haiku"], True)
    assert found["settings"] == {"weights": "int8", "kv_memory": 1 << 20}
    assert {"weights in bfloat16", "weights in Q8_0", "room to compute"} <= found["memory"].keys()
    assert sum(found["memory"].values()) >= found["needed_bytes"]
    shown = run("show", "small", "--models-file", file).stdout
    assert "small, haiku (models.toml)" in shown
    assert "weights = int8, kv_memory = 1048576" in shown
    assert "128 of 128 tokens" in shown


@pytest.mark.parametrize(
    ("name", "weights", "forms"),
    [
        ("tiny-00002-of-00003.gguf", "auto", {"Q4_0", "bfloat16"}),
        ("made", "int4", {"Q4_1", "bfloat16"}),
        ("made", "native", {"bfloat16"}),
    ],
)
def test_the_forms_of_weights_are_shown_as_they_are_served(
    name: str, weights: str, forms: set[str], run: Run, models_dir: Path
) -> None:
    memory = run("show", models_dir / name, "--weights", weights, "--json").json["memory"]
    assert {row.removeprefix("weights in ") for row in memory if row.startswith("weights")} == forms


def test_what_cannot_be_shown_is_refused_with_the_reason(run: Run, models_dir: Path) -> None:
    run("show", models_dir / "bad.gguf").assert_refused(3, "cannot read")
    run("show", "tinny", "--models-dir", models_dir).assert_refused(2, "the nearest name is 'tiny'")


def test_a_name_goes_before_a_folder_that_is_called_so(
    run: Run, models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models_dir)
    file = tmp_path / "models.toml"
    file.write_text(f'[made]\nmodel = "{models_dir}/tiny-00001-of-00003.gguf"\n')
    for name, origin in (("made", "models.toml"), ("./made", "--model"), ("tiny-00002-of-00003.gguf", "--model")):
        assert run("show", name, "--models-file", file, "--json").json["origin"] == origin


def test_one_folder_that_cannot_be_read_leaves_the_others_in_the_list(run: Run, models_dir: Path) -> None:
    for name, broken in (("config.json", '{"layer_types": 3}'), ("model.safetensors.index.json", "3")):
        (models_dir / "made" / name).write_text(broken)
        rows = run("list", "--models-dir", models_dir, "--json").json["models"]
        assert {row["name"] for row in rows if not row["problem"]} >= {"tiny"}


def test_architectures_are_listed_as_they_were_verified(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(kind: str, *dtypes: str, tokens: int = 0, reason: str | None = None) -> dict[str, object]:
        return {"model_type": "", "kind": kind, "dtypes": dtypes, "exact_at_tokens": dtypes[:tokens], "reason": reason}

    found = {
        "llama": entry("cut", "bfloat16", "float32", tokens=1),
        "mamba2": entry("checkpoint", "bfloat16", "float32"),
        "qwen4_exp": entry("unsupported", reason="unsupported: positions of its own"),
    }
    table = tmp_path / "table.json"
    table.write_text(json.dumps(installed_versions() | {"architectures": found}))
    monkeypatch.setattr(architectures, "TABLE", table)
    rows = {row["architecture"]: row for row in run("list", "--architectures", "--json").json["architectures"]}
    assert rows["mamba2"]["restored"] == "at checkpoints"
    assert (rows["qwen4_exp"]["verified"], rows["qwen4_exp"]["note"]) == ([], "unsupported: positions of its own")
    lines = run("list", "--architectures").stdout.splitlines()
    assert ["token (bf16)" in lines[1], "bf16, fp32" in lines[1], "grid" in lines[2]] == [True] * 3
    assert lines[-1].startswith("3 architectures, 2 verified with torch ")
    table.write_text(json.dumps({"torch": "2", "transformers": "5", "architectures": found}))
    assert "other versions are installed" in run("list", "--architectures").stdout


def test_a_model_is_shown_with_what_was_verified_of_its_architecture(
    run: Run, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("made", "tiny-00001-of-00003.gguf"):
        assert (
            "llama: restored anywhere, exact at token, verified in bf16, fp32" in run("show", models_dir / name).stdout
        )
    config, unknown = (
        models_dir / "made" / "config.json",
        "none of `diskprefix list --architectures`, so it may not be served",
    )
    config.write_text('{"model_type": "llama-of-tomorrow"}')
    assert verified_of(models_dir / "made") == f"llama-of-tomorrow: {unknown}"
    config.write_text('{"model_type": "mistral3", "text_config": {"model_type": "mistral"}}')
    assert verified_of(models_dir / "made").startswith("mistral3: restored anywhere, exact at token, ")
    config.unlink()
    assert verified_of(models_dir / "made") == f"not known: {unknown}"
    header = SimpleNamespace(values={"general.architecture": "deepseek2"})
    monkeypatch.setattr(architectures, "read_header", lambda _path: header)
    assert verified_of(models_dir / "bad.gguf").startswith("deepseek2: restored anywhere, exact at token, ")


def test_both_start_without_torch(models_dir: Path) -> None:
    (models_dir / "bad.gguf").unlink()
    lines, imported = run_fresh(
        ["list", "--models-dir", str(models_dir), "--json"],
        ["show", str(models_dir / "made"), "--json"],
        ["list", "--architectures", "--json"],
    )
    assert json.loads("\n".join(lines[: lines.index("}") + 1]))["models"][0]["name"] == "made"
    assert imported <= {"rich"}

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, Gemma3TextConfig, LlamaConfig, T5Config

from diskprefix.extras.models import models_command
from tests.cli.conftest import Run

Row = dict[str, Any]
Listed = Callable[..., dict[str, Row]]

pytestmark = pytest.mark.usefixtures("table")


def entry(model_type: str, kind: str, *dtypes: str, tokens: int = 0, reason: str | None = None) -> Row:
    """`tokens`: in so many of the dtypes it is exact at every token."""
    exact = {"dtypes": dtypes, "exact_at_tokens": dtypes[:tokens]}
    return {"model_class": "", "model_type": model_type, "layers": "", "kind": kind, "reason": reason} | exact


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A table as a run of the exactness suite might write it."""
    found = {
        "llama": entry("llama", "cut", "bfloat16", "float32", tokens=1),
        "gemma3": entry("gemma3_text", "cut", "bfloat16", tokens=1),
        "mamba": entry("mamba", "one pass", "bfloat16", "float32"),
        "qwen4_exp": entry("qwen4_exp_text", "unsupported", reason="unsupported: positions of its own"),
    }
    path = tmp_path / "verified.json"
    path.write_text(json.dumps(models_command.installed_versions() | {"architectures": found, "real_models": {}}))
    monkeypatch.setattr(models_command, "TABLE", path)
    return path


@pytest.fixture
def listed(run: Run) -> Listed:
    """The rows that `diskprefix models NAME… --json` prints, by architecture."""

    def call(*names: str | Path) -> dict[str, Row]:
        return {row["architecture"]: row for row in run("models", *names, "--json").json["models"]}

    return call


def test_an_architecture_has_its_layers_and_what_was_verified(listed: Listed) -> None:
    rows = listed("llama", "gemma3_text", "mamba", "qwen3_next")
    assert list(rows) == ["llama", "gemma3_text", "mamba", "qwen3_next"]
    assert rows["llama"] == {
        "architecture": "llama", "layers": "32× full", "restored": "anywhere", "verified": ["bfloat16", "float32"],
        "exact_at_tokens": ["bfloat16"], "note": "",
    }  # fmt: skip
    assert rows["gemma3_text"]["layers"] == "22× sliding(4096), 4× full"
    assert rows["gemma3_text"]["verified"] == ["bfloat16"], "the type of the text decoder's configuration is known too"
    assert rows["mamba"]["restored"] == "at the end only", "which only the model itself shows"
    assert rows["qwen3_next"]["restored"] == "at checkpoints"
    assert (rows["qwen3_next"]["verified"], rows["qwen3_next"]["note"]) == ([], "not verified")


def test_what_cannot_be_restored_says_why(listed: Listed) -> None:
    rows = listed("qwen4_exp", "bart", "deepseek_v4")
    assert (rows["qwen4_exp"]["restored"], rows["bart"]["restored"]) == ("not", "not")
    assert rows["qwen4_exp"]["note"] == "unsupported: positions of its own"
    assert rows["bart"]["note"] == "not served: an encoder–decoder model"
    # Its layers are classes of the model's own code: they are known only once something has imported that.
    assert rows["deepseek_v4"]["restored"] in ("unknown", "not")


def test_without_a_name_all_decoders_of_transformers_are_listed(listed: Listed) -> None:
    rows = listed()
    assert len(rows) > 150
    assert rows.keys() >= {"llama", "gpt2", "rwkv", "qwen3_next", "gemma3"}
    assert all(row["layers"] or row["note"] for row in rows.values())


def test_the_table_shows_what_json_holds_and_with_which_versions(run: Run) -> None:
    shown = run("models", "llama", "mamba").stdout
    assert "32× full" in shown
    assert "bf16, fp32" in shown
    installed = models_command.installed_versions()
    assert f"2 verified with torch {installed['torch']} and transformers {installed['transformers']}" in shown
    assert "installed are" not in shown


def test_other_versions_than_the_verified_ones_are_told(run: Run, table: Path) -> None:
    table.write_text(json.dumps(json.loads(table.read_text()) | {"transformers": "5.0.0"}))
    assert f"installed are torch {models_command.installed_versions()['torch']} and" in run("models", "llama").stdout


def test_a_folder_is_described_by_its_own_configuration(listed: Listed, tmp_path: Path) -> None:
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=512, architectures=["Gemma3ForCausalLM"])
    config.save_pretrained(tmp_path / "mine")
    (row,) = listed(tmp_path / "mine").values()
    assert row["architecture"] == "gemma3_text"
    assert row["layers"] == "5× sliding(512), 1× full"
    assert row["verified"] == ["bfloat16"]


def test_a_rope_that_moves_is_not_cached_whatever_was_verified(listed: Listed, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    LlamaConfig(rope_parameters=rope, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (row,) = listed(tmp_path).values()
    assert (row["restored"], row["verified"], row["note"]) == ("not", [], "unsupported: dynamic RoPE")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "an encoder–decoder model"),
        (BertConfig(architectures=["BertModel"]), "an embedding model"),
    ],
)
def test_a_folder_that_is_not_served_is_an_error(run: Run, tmp_path: Path, config: Any, kind: str) -> None:
    config.save_pretrained(tmp_path / "other")
    ended = run("models", tmp_path / "other")
    ended.assert_refused(3, kind)


def test_a_folder_without_a_model_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run("models", tmp_path / "empty").assert_refused(3, str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["lama", "no/such-model"])
def test_an_unknown_name_is_an_error_that_helps(run: Run, name: str) -> None:
    run("models", "llama", name).assert_refused(2, name, "`diskprefix models` lists")


def test_the_table_says_in_which_dtypes_a_model_is_exact_at_every_token(run: Run) -> None:
    lines = {line.split()[0]: line for line in run("models", "llama", "gemma3", "mamba").stdout.splitlines() if line}
    assert "token (bf16)" in lines["llama"]
    assert "token " in lines["gemma3"].replace("token (", "")
    assert "grid" in lines["mamba"]

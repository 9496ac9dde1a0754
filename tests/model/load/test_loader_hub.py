"""Models that are fetched from a hub, and what a hub that does not give one is said to have answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.model.load.loader import load_tokenizer
from tests.model import tiny
from tests.model.hub import fake_hub
from tests.model.load.test_loader import load, refusal

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def test_a_hub_id_is_fetched_once_and_served_from_the_hubs_cache_when_it_is_down(
    folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"a copy in another format")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights, pickled")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights, by other names")
    with fake_hub(hub_cache, monkeypatch) as hub:
        hub.repos["org/tiny"] = folder
        online = load("org/tiny")
        assert hub.fetched() == sorted(["model.safetensors", *(path.name for path in folder.glob("*.j*"))])
        hub.sent.clear()
        load("org/tiny")
        assert hub.fetched() == []
    offline = load("org/tiny")
    assert online.name == offline.name == "org/tiny"
    assert online.weights_digest == offline.weights_digest == load(folder).weights_digest
    assert capfd.readouterr().err == ""


def test_pickled_weights_are_refused_before_they_are_fetched(
    folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert them to safetensors" in refusal(folder)
    with fake_hub(hub_cache, monkeypatch) as hub:
        hub.repos["org/tiny"] = folder
        assert "holds no weights" in refusal("org/tiny")
        assert "pytorch_model.bin" not in hub.fetched()


def test_a_hub_that_is_not_asked_or_cannot_be_reached_is_said_with_what_to_do(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    with fake_hub(hub_cache, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in refusal("org/tiny")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    message = refusal("org/tiny")
    assert message.startswith("cannot fetch 'org/tiny' from the hub: the hub cannot be reached")
    assert message.endswith("check the name and the network, or give a local folder")


@pytest.mark.parametrize(
    ("repo", "words"),
    [
        ("org/unknown", "there is no such model, or it is private"),
        ("org/gated", "access must be granted first"),
        ("org/broken", "500"),
        ("org/empty", "holds no model: there is no config.json"),
        ("a/b/c", "neither an existing file or folder nor a hub id"),
        ("org/some model", "neither an existing file or folder nor a hub id"),
        ("model", "'model' is no file or folder here, and names of the hub are org/name"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_with_the_reason(
    repo: str, words: str, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "generation_config.json").write_text("{}")
    with fake_hub(hub_cache, monkeypatch) as hub:
        hub.repos["org/empty"] = tmp_path / "empty"
        hub.gated.add("org/gated")
        hub.broken.add("org/broken")
        assert words in refusal(repo)


def test_a_tokenizer_is_fetched_without_the_weights(
    folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(hub_cache, monkeypatch) as hub:
        hub.repos["org/tiny"] = folder
        tokenizer = load_tokenizer("org/tiny", None, lambda _: None)
        assert tokenizer.chat_template
        assert hub.fetched() == sorted(path.name for path in folder.glob("*.j*"))
        hub.sent.clear()
        assert load("org/tiny").name == "org/tiny"
        assert hub.fetched() == ["model.safetensors"], "what is there is not fetched again"


def test_a_quant_of_a_repository_is_loaded_by_its_name_and_without_the_hub_from_the_cache(
    tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "repository").mkdir()
    file = tiny.write_gguf(tmp_path / "repository" / "tiny-Q4_0.gguf", quantised="Q4_0", tensors_in_a_part=8)
    with fake_hub(hub_cache, monkeypatch) as hub:
        hub.repos["org/tiny"] = tmp_path / "repository"
        online = load("org/tiny:q4_0")
        assert len(hub.fetched()) == 3
        assert load("org/tiny").weights_digest == online.weights_digest, "there is nothing but this quant"
    offline = load("org/tiny:q4_0")
    assert online.name == offline.name == "org/tiny:q4_0"
    first = file.with_name("tiny-Q4_0-00001-of-00003.gguf")
    assert online.weights_digest == offline.weights_digest == load(first).weights_digest

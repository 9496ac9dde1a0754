"""Where a request says nothing, the sampling is what the model's files recommend. What they say that is nonsense, or is
not used here, is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from msgspec.structs import replace

from diskprefix.daemon.catalogue.catalogue import Catalogue
from diskprefix.daemon.settings import Settings
from diskprefix.runtime.fetch import recommended_sampling
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.named_model import path_of
from diskprefix.runtime.fetch.recommended_sampling import DEFAULT_SAMPLING, SamplingDefaults, sampling_defaults
from diskprefix.values import MAX_STOPS
from tests.runtime.load.ollama_folder import OllamaFolder
from tests.runtime.plan import tiny

pytestmark = pytest.mark.usefixtures("own_places")

MODEL = "registry.ollama.ai/library/tiny:1b"


@pytest.fixture
def ollama(tmp_path: Path) -> OllamaFolder:
    return OllamaFolder(tmp_path / "home" / ".ollama" / "models")


def write_gguf(file: Path, **sampling: Any) -> Path:
    """Writes a tiny model with `general.sampling.*`."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in sampling.items():
            kind = {float: writer.add_float32, int: writer.add_int32, str: writer.add_string}[type(value)]
            kind(f"general.sampling.{name}", value)

    tiny.write_gguf(file, more=add)
    return file


def of_file(file: Path, sampling: str = "model") -> SamplingDefaults:
    return sampling_defaults(Settings(model=str(file), sampling=sampling), file)


def of_folder(folder: Path, text: str, sampling: str = "model") -> SamplingDefaults:
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return sampling_defaults(Settings(model=str(folder), sampling=sampling), folder)


def of_ollama(ollama: OllamaFolder, parameters: bytes, tmp_path: Path, **sampling: Any) -> SamplingDefaults:
    weights = ollama.layer("model", write_gguf(tmp_path / "own.gguf", **sampling).read_bytes())
    ollama.add(MODEL, weights, ollama.layer("params", parameters))
    return sampling_defaults(Settings(model="tiny:1b"), path_of("tiny:1b"))


def sources_of(found: SamplingDefaults) -> Mapping[str, tuple[Any, str]]:
    return {name: (value, found.sources[name]) for name, value in found.values.items()}


def test_a_model_without_recommendations_is_sampled_as_elsewhere(tmp_path: Path) -> None:
    found = of_file(write_gguf(tmp_path / "plain.gguf"))
    assert found.values == {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05} == DEFAULT_SAMPLING
    assert {*found.sources.values()} == {"default"}
    assert found.stop == found.ignored == ()


def test_each_value_comes_from_the_strongest_source_that_has_it(ollama: OllamaFolder, tmp_path: Path) -> None:
    parameters = {"temperature": 0.1, "top_k": 20, "repeat_penalty": 1.1, "repeat_last_n": -1, "stop": ["</s>", ""]}
    found = of_ollama(ollama, json.dumps(parameters).encode(), tmp_path, temp=0.6, top_p=0.7, penalty_repeat=1.3)
    assert sources_of(found) == {
        "temperature": (0.1, "Ollama's parameters"),
        "top_p": (0.7, "general.sampling"),
        "top_k": (20, "Ollama's parameters"),
        "min_p": (0.05, "default"),
        "repetition_penalty": (1.1, "Ollama's parameters"),
    }
    assert (found.stop, found.sources["stop"]) == (("</s>",), "Ollama's parameters")
    own = sampling_defaults(Settings(model="tiny:1b", sampling="top_p=1,model"), path_of("tiny:1b"))
    assert own.values == {**found.values, "top_p": 1.0}
    assert (own.sources["top_p"], own.sources["top_k"]) == ("--sampling", "Ollama's parameters")


def test_a_folder_recommends_in_generation_config_json(tmp_path: Path) -> None:
    text = '{"temperature": 0.6, "top_p": null, "top_k": 20.0, "repetition_penalty": 1.05, "eos_token_id": 2}'
    found = of_folder(tmp_path, text)
    assert found.values == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert type(found.values["top_k"]) is int
    assert (found.sources["temperature"], found.ignored) == ("generation_config.json", ())


def test_neutral_takes_nothing_from_the_model(ollama: OllamaFolder, tmp_path: Path) -> None:
    of_ollama(ollama, b'{"temperature": 0.1, "stop": ["x"], "num_ctx": 4096}', tmp_path)
    found = sampling_defaults(Settings(model="tiny:1b", sampling="neutral, top_k=7"), path_of("tiny:1b"))
    plain = {"temperature": 1, "top_p": 1, "top_k": 7, "min_p": 0}
    assert found.values == plain | {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    assert (found.stop, found.ignored, {*found.sources.values()}) == ((), (), {"--sampling"})


PENALTIES: list[tuple[dict[str, Any], dict[str, float], str]] = [
    ({"repeat_penalty": 1.1}, {}, "it is for the last 64 tokens (repeat_last_n), and would count the whole text here"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 256}, {}, "it is for the last 256 tokens"),
    ({"repeat_penalty": 1.1, "repeat_last_n": "all"}, {}, "it is for the last 'all' tokens"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 0}, {}, "repeat_last_n 0 turns it off"),
    ({"presence_penalty": 1.5, "repeat_last_n": 0}, {}, "repeat_last_n 0 turns it off"),
    ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}, ""),
    ({"repeat_penalty": 1}, {"repetition_penalty": 1}, ""),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}, ""),
]


@pytest.mark.parametrize(("parameters", "used", "said"), PENALTIES)
def test_a_penalty_is_used_where_it_counts_the_same_text(
    parameters: dict[str, Any], used: dict[str, float], said: str, ollama: OllamaFolder, tmp_path: Path
) -> None:
    found = of_ollama(ollama, json.dumps(parameters).encode(), tmp_path)
    assert found.values == {**DEFAULT_SAMPLING, **used}
    assert [line.partition(": ")[2].startswith(said) for line in found.ignored] == [True] * bool(said)


@pytest.mark.parametrize(
    ("window", "used"), [({}, None), ({"penalty_last_n": 0}, None), ({"penalty_last_n": -1}, 1.25)]
)
def test_a_file_says_where_its_penalty_looks(window: dict[str, int], used: float | None, tmp_path: Path) -> None:
    found = of_file(write_gguf(tmp_path / "own.gguf", penalty_repeat=1.25, **window))
    assert found.values.get("repetition_penalty") == used
    assert ["penalty_repeat of general.sampling: " in line for line in found.ignored] == [True] * (used is None)


def test_a_number_of_a_file_is_the_one_that_was_written(tmp_path: Path) -> None:
    found = of_file(write_gguf(tmp_path / "own.gguf", temp=0.2, top_p=0.95, min_p=0.0))
    assert found.values == {"temperature": 0.2, "top_p": 0.95, "top_k": 40, "min_p": 0.0}


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature of Ollama's parameters: -1 is out of range (0 to 2)"),
    ({"temperature": float("nan")}, "temperature of Ollama's parameters: nan is out of range"),
    ({"temperature": 10**400}, "is out of range (0 to 2)"),
    ({"temperature": True}, "temperature of Ollama's parameters: True is no number"),
    ({"top_p": "hot"}, "top_p of Ollama's parameters: 'hot' is no number"),
    ({"top_k": 1.5}, "top_k of Ollama's parameters: 1.5 is no whole number"),
    ({"stop": "x" * 3_000_000}, "stop of Ollama's parameters: a text of 3,000,000 characters (1,024 at most)"),
    ({"stop": 7}, "stop of Ollama's parameters: 7 is no text"),
    ({"num_ctx": 4096}, "num_ctx of Ollama's parameters: not read"),
    ({"\x1b[2J": 1}, r"\x1b[2J of Ollama's parameters: not read"),
]


@pytest.mark.parametrize(("parameters", "said"), NONSENSE)
def test_nonsense_in_parameters_is_ignored_and_named(
    parameters: dict[str, Any], said: str, ollama: OllamaFolder, tmp_path: Path
) -> None:
    found = of_ollama(ollama, json.dumps(parameters | {"min_p": 0.2}).encode(), tmp_path)
    assert (found.values, found.stop) == ({**DEFAULT_SAMPLING, "min_p": 0.2}, ())
    (ignored,) = found.ignored
    assert said in ignored


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"stop": "' + b"x" * 10_000_000 + b'"}', "Ollama's parameters: it has more than 4.0 MiB"),
        (b"[" * 100_000, "Ollama's parameters: maximum recursion depth exceeded"),
        (b"[]", "Ollama's parameters: it is no object of JSON"),
        (b'{"temperature": 1' + b"0" * 5000 + b"}", "Ollama's parameters: Exceeds the limit"),
    ],
)
def test_a_model_whose_parameters_cannot_be_read_is_served_without_them(
    text: bytes, said: str, ollama: OllamaFolder, tmp_path: Path
) -> None:
    found = of_ollama(ollama, text, tmp_path)
    assert found.values == DEFAULT_SAMPLING
    assert [line[: len(said)] for line in found.ignored] == [said]


def test_parameters_that_are_gone_are_named(ollama: OllamaFolder, tmp_path: Path) -> None:
    of_ollama(ollama, b'{"temperature": 0.1}', tmp_path)
    ollama.blob(b'{"temperature": 0.1}').unlink()
    found = sampling_defaults(Settings(model="tiny:1b"), path_of("tiny:1b"))
    assert (found.values, found.ignored) == (DEFAULT_SAMPLING, ("Ollama's parameters: it is no file",))


def test_what_is_named_is_bounded(ollama: OllamaFolder, tmp_path: Path) -> None:
    many = {f"key-{number}": 1 for number in range(50_000)}
    found = of_ollama(ollama, json.dumps(many | {"stop": [f"end {n}" for n in range(50_000)]}).encode(), tmp_path)
    assert len(found.ignored) == 16
    assert found.stop == tuple(f"end {number}" for number in range(MAX_STOPS))


def test_a_folder_with_a_damaged_file_is_sampled_by_the_defaults(tmp_path: Path) -> None:
    found = of_folder(tmp_path, "{")
    assert found.values == DEFAULT_SAMPLING
    assert found.ignored[0].startswith("generation_config.json: cannot read the configuration")


def test_models_of_ollama_that_share_a_file_keep_their_own_parameters(ollama: OllamaFolder, tmp_path: Path) -> None:
    weights = ollama.layer("model", write_gguf(tmp_path / "own.gguf").read_bytes())
    ollama.add(MODEL, weights)
    ollama.add(MODEL.replace("1b", "plain"), weights)
    for name, temperature in (("calm", b"0.1"), ("wild", b"1.5")):
        ollama.add(MODEL.replace("1b", name), weights, ollama.layer("params", b'{"temperature": ' + temperature + b"}"))
    known = {model.name: model for model in Catalogue(Settings()).models()}
    found = {name: sampling_defaults(model.settings, model.path).values["temperature"] for name, model in known.items()}
    assert found == {"tiny:1b": 0.8, "tiny:calm": 0.1, "tiny:wild": 1.5}
    assert known["tiny:1b"].aliases == ("tiny:plain",)
    by_name = {name: sampling_defaults(Settings(model=name), path_of(name)).values["temperature"] for name in found}
    assert by_name == found


def add_pair(ollama: OllamaFolder, content: bytes) -> Path:
    """Adds two models with parameters of their own that share a file. Returns the file."""
    for name, temperature in (("zprecise", b"0.1"), ("creative", b"1.5")):
        params = ollama.layer("params", b'{"temperature": ' + temperature + b"}")
        ollama.add(f"registry.ollama.ai/library/{name}:latest", ollama.layer("model", content), params)
    return ollama.blob(content)


def test_the_name_under_which_a_model_is_served_says_its_parameters_only_for_a_path(
    ollama: OllamaFolder, tmp_path: Path
) -> None:
    blob = add_pair(ollama, write_gguf(tmp_path / "own.gguf").read_bytes())
    found = {
        (model, served): sampling_defaults(Settings(model=model, served_model_name=served), blob).values["temperature"]
        for model in ("zprecise", "creative", str(blob))
        for served in ("zprecise", "creative")
    }
    assert {key: value for key, value in found.items() if value == 0.1}.keys() == {
        *(("zprecise", served) for served in ("zprecise", "creative")),
        (str(blob), "zprecise"),
    }


def test_a_file_keeps_its_parameters_where_the_folder_of_blobs_is_a_link(ollama: OllamaFolder, tmp_path: Path) -> None:
    blob = add_pair(ollama, write_gguf(tmp_path / "own.gguf").read_bytes())
    (tmp_path / "disk").mkdir()
    (ollama.root / "blobs").rename(tmp_path / "disk" / "blobs")
    (ollama.root / "blobs").symlink_to(tmp_path / "disk" / "blobs")
    for path in (blob, blob.resolve()):
        settings = Settings(model=str(path), served_model_name="zprecise")
        assert sampling_defaults(settings, path).values["temperature"] == 0.1, path


def test_the_embedded_model_is_sampled_alike_by_each_name_of_its_bytes(
    ollama: OllamaFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = write_gguf(tmp_path / "copy.gguf")
    content = copy.read_bytes()
    ollama.add(MODEL, ollama.layer("model", content))
    digest = ollama.blob(content).name.removeprefix("sha256-")
    embedded = replace(EMBEDDED, gguf_bytes=len(content), gguf_sha256=digest)
    monkeypatch.setattr(recommended_sampling, "EMBEDDED", embedded)
    expected = sampling_defaults(Settings(), None).values
    assert expected == {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    assert of_file(copy).values == expected
    assert sampling_defaults(Settings(model="tiny:1b"), path_of("tiny:1b")).values == expected
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert of_file(copy).values == DEFAULT_SAMPLING


MADE: dict[str, Callable[[Path], SamplingDefaults]] = {
    "general.sampling": lambda folder: of_file(write_gguf(folder / "own.gguf", temp=0.31)),
    "generation_config.json": lambda folder: of_folder(folder, '{"temperature": 0.31}'),
    "--sampling": lambda folder: of_file(write_gguf(folder / "own.gguf", temp=0.6), "temperature=0.31"),
}


@pytest.mark.parametrize("source", MADE)
def test_each_source_is_named_beside_its_value(source: str, tmp_path: Path) -> None:
    record = MADE[source](tmp_path).record
    assert record["values"]["temperature"] == {"value": 0.31, "source": source}
    assert recommended_sampling.sampling_line(record).count(f"temperature 0.31 ({source})") == 1

"""The models of Ollama, LM Studio and llama.cpp are found in folders as these programs write them, and are served from
there without a change."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.catalogue.catalogue import Catalogue, known_names, needs
from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.fetch.found_models import found_models
from diskprefix.runtime.fetch.named_model import path_of, plain_name, require_named
from diskprefix.runtime.fetch.proposals import full_name, meant_name
from diskprefix.runtime.files.gguf.gguf_file import part_paths
from diskprefix.runtime.files.manifests import manifest_of
from tests.daemon.server.daemon_process import CHAT, DaemonProcess, clean_environment, serve_flags
from tests.desk.conftest import Run
from tests.desk.conftest import run as run
from tests.runtime.load.ollama_folder import LIST, MANIFEST, OllamaFolder
from tests.runtime.plan import tiny

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def ollama(tmp_path: Path) -> OllamaFolder:
    return OllamaFolder(tmp_path / "home" / ".ollama" / "models")


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_0").read_bytes()


def found() -> dict[str, tuple[str, ...]]:
    return {model.names[0]: tuple(model.names[1:]) for model in found_models()}


def problem_of(name: str) -> str:
    return next(model.problem for model in found_models() if model.names[0] == name)


def test_models_of_ollama_have_the_names_that_ollama_list_shows(ollama: OllamaFolder, gguf: bytes) -> None:
    weights = ollama.layer("model", gguf)
    library = "registry.ollama.ai/library"
    parameters = ollama.layer("params", b'{"stop":["x"]}')
    ollama.add(f"{library}/qwen2.5:0.5b", weights, ollama.layer("template", b"{{ .Prompt }}"), parameters)
    ollama.add(f"{library}/qwen2.5:latest", weights, parameters)
    ollama.add("registry.ollama.ai/someone/own:v1", ollama.layer("model", gguf + b"1"))
    ollama.add("hf.co/org/name-GGUF:Q4_0", ollama.layer("model", gguf + b"2"))
    assert found() == {
        "hf.co/org/name-GGUF:Q4_0": (),
        "qwen2.5:0.5b": ("qwen2.5:latest", "qwen2.5"),
        "someone/own:v1": (),
    }
    assert path_of("qwen2.5") == path_of("qwen2.5:0.5b") == ollama.blob(gguf)
    (row,) = [one for one in Catalogue(Settings()).models() if one.name == "qwen2.5:0.5b"]
    assert (row.origin, row.settings.served_model_name) == ("Ollama", "qwen2.5:0.5b")
    assert needs(row.settings).weights.keys() == needs(Settings(model="qwen2.5:0.5b")).weights.keys()  # type: ignore[union-attr]


def test_a_place_that_cannot_be_read_hides_no_other(tmp_path: Path, ollama: OllamaFolder, gguf: bytes) -> None:
    ollama.add("registry.ollama.ai/library/plain:1b", ollama.layer("model", gguf))
    for place in ("home/.lmstudio/models", "hub/models--org--loop/snapshots", "cache/llama.cpp", "service/manifests"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).symlink_to(tmp_path / place)
    for name in ("bytes", "whole"):
        snapshot = tmp_path / f"hub/models--org--{name}" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (snapshot / "whole-Q4_0.gguf").write_bytes(gguf)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_bytes(b"\xff" if name == "bytes" else b"1")
    (folder := tmp_path / "home/.cache/lm-studio/models/of/one").mkdir(parents=True)
    (folder / "one.gguf").write_bytes(gguf)
    here = dict(known_names(Settings()))
    assert [*here] == [
        "org/bytes:Q4_0",
        "org/whole:Q4_0",
        "plain:1b",
        "of/one/one",
    ]
    assert here["plain:1b"] == path_of("plain:1b") == ollama.blob(gguf)


def test_ollamas_newer_manifests_are_links_and_the_gguf_of_their_list_is_used(
    ollama: OllamaFolder, gguf: bytes
) -> None:
    own = ollama.manifest(ollama.layer("model", gguf))
    mlx = ollama.manifest(ollama.layer("tensor", b"1")) | {"runner": "mlx"}
    ref = {"mediaType": MANIFEST, "runner": "ollama", "digest": ollama.blob(json.dumps(own).encode()).name}
    ollama.link("registry.ollama.ai/library/plain:1b", own)
    ollama.add("registry.ollama.ai/library/plain:1b", ollama.layer("model", b"an older one"))
    ollama.link("registry.ollama.ai/library/listed:1b", {"mediaType": LIST, "manifests": [mlx, ref]})
    assert found() == {"listed:1b": ("plain:1b",)}
    assert path_of("plain:1b") == ollama.blob(gguf)


def test_the_parts_of_a_split_model_of_ollama_are_taken_in_their_order(ollama: OllamaFolder, tmp_path: Path) -> None:
    parts = [file.read_bytes() for file in tiny.write_parts(tmp_path)]
    layers = [ollama.layer("model", part) for part in parts]
    ollama.add("registry.ollama.ai/library/split:1b", layers[2], layers[0], layers[1])
    path = path_of("split:1b")
    assert path is not None
    assert part_paths(path) == [ollama.blob(part) for part in parts]
    assert needs(Settings(model="split:1b")) is not None


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is no object of JSON"),
        ("[" * 100_000, "maximum recursion depth"),
        ("fifo", "is no file"),
        ('{"layers": 3}', "'int' object is not iterable"),
        (
            '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]}',
            "digest in it",
        ),
        ('{"layers": []}', "names no .gguf file"),
        (json.dumps({"mediaType": LIST, "manifests": [{"runner": "mlx", "layers": []}]}), "names no .gguf file"),
        ("missing", "is missing; fetch the model again with Ollama"),
        ("adapter", "adapters are not served"),
    ],
)
def test_an_unservable_ollama_model_is_one_line_and_does_not_affect_others(
    manifest: str, problem: str, ollama: OllamaFolder, gguf: bytes
) -> None:
    weights = ollama.layer("model", gguf)
    ollama.add("registry.ollama.ai/library/good:1b", weights)
    own: dict[str, Sequence[dict[str, Any]]] = {
        "missing": [weights | {"digest": f"sha256:{'0' * 64}"}],
        "adapter": [weights, ollama.layer("adapter", b"lora")],
    }
    text = json.dumps(ollama.manifest(*own[manifest])) if manifest in own else manifest
    ollama.write("registry.ollama.ai/library/bad:1b", text)
    if manifest == "fifo":
        file = ollama.root / "manifests/registry.ollama.ai/library/bad/1b"
        file.unlink()
        os.mkfifo(file)
    assert found() == {"bad:1b": (), "good:1b": ()}
    assert problem in problem_of("bad:1b")
    with pytest.raises(ModelError, match=r"^--model: Ollama's model bad:1b: "):
        require_named("bad:1b", "--model")
    assert [model.path for model in Catalogue(Settings()).models()] == [None, ollama.blob(gguf)]


def test_ollama_models_and_llama_cache_move_the_folders(
    tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, variable in (("a", "OLLAMA_MODELS"), ("service", "")):
        moved = OllamaFolder(tmp_path / name)
        moved.add(f"registry.ollama.ai/library/{name}:1b", moved.layer("model", gguf))
        if variable:
            monkeypatch.setenv(variable, str(moved.root))
    snapshot = tmp_path / "cache-of-llama" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny-Q4_0.gguf").write_bytes(gguf)
    (tmp_path / "cache-of-llama" / "own.gguf").write_bytes(gguf)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "cache-of-llama"))
    assert [(model.owner, *model.names) for model in found_models()] == [
        ("Ollama", "a:1b"),
        ("Ollama", "service:1b"),
        ("llama.cpp", "own"),
        ("llama.cpp", "org/name:Q4_0"),
    ]


def test_models_of_lm_studio_are_called_publisher_repository_and_file(tmp_path: Path, gguf: bytes) -> None:
    home = tmp_path / "home"
    for root, name in (
        (home / ".lmstudio", "models/org/repo/tiny-Q4_0.gguf"),
        (home / ".lmstudio", "models/org/repo/mmproj-tiny-f16.gguf"),
        (home / ".lmstudio", "models/org/split/s-00001-of-00002.gguf"),
        (home / ".lmstudio", "models/org/split/s-00002-of-00002.gguf"),
        (home / ".cache/lm-studio", "models/old/repo/tiny.gguf"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(gguf)
    assert [*found()] == ["org/repo/tiny-Q4_0", "org/split/s", "old/repo/tiny"]
    assert path_of("org/split/s") == home / ".lmstudio/models/org/split/s-00001-of-00002.gguf"


def test_files_of_llama_cpp_go_by_their_manifests_with_their_own_projectors(tmp_path: Path, gguf: bytes) -> None:
    folder = tmp_path / "cache" / "llama.cpp"
    folder.mkdir(parents=True)

    def add(user: str, repo: str, tag: str, file: str, projector: str = "", *, is_here: bool = True) -> None:
        manifest: dict[str, Any] = {"ggufFile": {"rfilename": file, "size": 1}}
        if projector:
            manifest["mmprojFile"] = {"rfilename": projector}
        (folder / f"manifest={user}={repo}={tag}.json").write_text(json.dumps(manifest))
        for name in filter(None, (file, projector)) if is_here else ():
            (folder / f"{user}_{repo}_{name}".replace("/", "_")).write_bytes(gguf)

    add("org", "sees-GGUF", "Q4_0", "sub/sees-Q4_0.gguf", "mmproj-model-f16.gguf")
    add("org", "plain-GGUF", "latest", "plain-Q4_0.gguf")
    add("org", "gone-GGUF", "Q8_0", "gone-Q8_0.gguf", is_here=False)
    (folder / "manifest=org=bad-GGUF=Q8_0.json").write_text("{")
    (folder / "loose-Q8_0.gguf").write_bytes(gguf)
    assert set(found()) == {
        "org/bad-GGUF:Q8_0",
        "org/gone-GGUF:Q8_0",
        "org/plain-GGUF",
        "org/sees-GGUF:Q4_0",
        "loose-Q8_0",
    }
    assert "is missing" in problem_of("org/gone-GGUF:Q8_0")
    assert "Expecting property name" in problem_of("org/bad-GGUF:Q8_0")
    for name, projectors in (("org/sees-GGUF:Q4_0", 1), ("org/plain-GGUF", 0)):
        path = path_of(name)
        assert path is not None
        manifest = manifest_of(path)
        assert manifest is not None
        assert len(manifest.projectors) == projectors


def test_a_folder_stands_for_its_only_gguf_model_and_lists_several(tmp_path: Path, gguf: bytes) -> None:
    folder = tmp_path / "only"
    folder.mkdir()
    (folder / "tiny-Q4_0.gguf").write_bytes(gguf)
    (folder / "mmproj-F16.gguf").write_bytes(gguf)
    (folder / "config.json").write_text("{}")
    require_named(str(folder), "--model", with_weights=True)
    assert path_of(str(folder)) == folder / "tiny-Q4_0.gguf"
    assert plain_name(str(folder)) == "tiny-Q4_0"
    assert needs(Settings(model=str(folder))) is not None
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"^--model: .*only holds 2 models; give .* one: other.gguf \(4 B\), t"):
        require_named(str(folder), "--model")


def test_names_of_the_user_and_the_hub_precede_names_of_other_programs(
    tmp_path: Path, ollama: OllamaFolder, gguf: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ollama.add("registry.ollama.ai/library/mine:latest", ollama.layer("model", gguf))
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(tmp_path / "tiny.gguf", models / "mine.gguf")
    catalogue = Catalogue(Settings(models_dir=models))
    assert catalogue.find("mine").origin == "--models-dir"
    assert catalogue.find("mine:latest").origin == "Ollama"
    assert Catalogue(Settings(model="org/other,org/b")).models()[-1].name == "org/b", "--model gets these alone"
    # What a running daemon's clients mean does not change when Ollama fetches a model.
    ollama.add("registry.ollama.ai/library/qwen3.5:4b", ollama.layer("model", gguf))
    assert (named := meant_name("qwen3.5:4b")) == "qwen3.5:4b"
    assert Catalogue(Settings(model=f"{full_name(named)},org/b")).find(named).name == full_name(named) != named
    assert not caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_alone"), [pytest.param("qwen2.5:latest", True, marks=pytest.mark.slow), ("split:1b", False)]
)
def test_a_daemon_serves_ollamas_files_where_they_are_and_changes_nothing(
    name: str, is_alone: bool, ollama: OllamaFolder, gguf: bytes, tmp_path: Path
) -> None:
    ollama.add("registry.ollama.ai/library/qwen2.5:latest", ollama.layer("model", gguf))
    parts = [ollama.layer("model", part.read_bytes()) for part in tiny.write_parts(tmp_path)]
    ollama.add("registry.ollama.ai/library/split:1b", *parts)
    ollama.write("registry.ollama.ai/library/bad:1b", "{")
    places = [ollama.root, *ollama.root.rglob("*")]

    def state() -> list[tuple[int, ...]]:
        return [
            (one.st_ino, one.st_mode, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in map(os.stat, places)
        ]

    before = state()
    (tmp_path / "none").mkdir()
    flags = serve_flags(tmp_path / "none", tmp_path / "kv")
    own = ["--model", name] if is_alone else ["--models-dir", flags[1]]
    environment = clean_environment(HOME=str(tmp_path / "home"), HF_HUB_CACHE=str(tmp_path / "hub"))
    with DaemonProcess(*own, *flags[2:], environment=environment) as daemon:
        body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        answer = httpx.post(daemon.url + CHAT, json=body, timeout=120).json()
        cards = {card["id"]: card for card in httpx.get(daemon.url + "/v1/models").json()["data"]}
        assert daemon.stop() == 0
    assert answer["usage"]["completion_tokens"] in (1, 2)
    assert answer["model"] == name
    assert {*cards} == ({name} if is_alone else {"qwen2.5:latest", "split:1b", "bad:1b"})
    assert sorted(places) == sorted([ollama.root, *ollama.root.rglob("*")])
    assert state() == before


def test_list_show_and_rm_know_what_other_programs_have(run: Run, ollama: OllamaFolder, gguf: bytes) -> None:
    ollama.add("registry.ollama.ai/library/qwen2.5:0.5b", ollama.layer("model", gguf))
    ollama.write("registry.ollama.ai/library/bad:1b", "{")
    rows = {row["name"]: row for row in run("list", "--json").json["models"]}
    assert (rows["qwen2.5:0.5b"]["origin"], rows["qwen2.5:0.5b"]["kind"]) == ("Ollama", "Q4_0")
    assert rows["qwen2.5:0.5b"]["file_bytes"] == len(gguf)
    assert "its manifest" in rows["bad:1b"]["problem"]
    printed = [line.partition(" ")[0] for line in run("list").stdout.splitlines()]
    assert [printed.count(name) for name in rows] == [1, 1, 1]
    assert "qwen2.5:0.5b (Ollama)" in run("show", "qwen2.5:0.5b").stdout
    run("pull", "qwen2.5:0.5b").assert_refused(2, "Ollama has qwen2.5:0.5b", "diskprefix serve --model qwen2.5:0.5b")
    run("rm", "qwen2.5:0.5b", "--yes").assert_refused(2, "qwen2.5:0.5b belongs to Ollama, and must be removed there")
    run("serve", "--model", "qwen2.5:05b").assert_refused(3, "`diskprefix list`", "the nearest is qwen2.5:0.5b")

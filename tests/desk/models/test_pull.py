"""`diskprefix pull` and `diskprefix rm`, with the unchanged client of the hub and a hub on this machine."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from diskprefix.daemon.catalogue.catalogue import open_catalogue
from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared import fetch_model
from diskprefix.errors import ModelError
from diskprefix.folders import cache_home
from diskprefix.native.library import operators
from diskprefix.runtime.fetch import hub as hub_module
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.named_model import is_embedded
from diskprefix.runtime.files.fit import ROOM_BYTES
from diskprefix.runtime.load import packed_weights
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.load.packed_weights import PackedFiles
from tests.desk.conftest import Run
from tests.runtime.plan import tiny
from tests.runtime.plan.hub import MOST_BYTES, FakeHub, fake_hub

pytestmark = pytest.mark.usefixtures("own_places")
REPO = "org/tiny-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for kind in ("Q4_0", "Q8_0"):
        tiny.write_gguf(folder / f"tiny-{kind.lower()}.gguf", quantised=kind)
    tiny.write_gguf(folder / "tiny-F32.gguf")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("whole") / "whole")


@pytest.fixture
def repository(files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(files, tmp_path / "repository"))


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    (tmp_path / "real").mkdir()
    (tmp_path / "hub").symlink_to(tmp_path / "real")
    with fake_hub(tmp_path / "hub", monkeypatch) as hub:
        hub.repos[REPO] = repository
        yield hub


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(hub_module, "available_ram_bytes", lambda: num_bytes)


def listed(run: Run) -> list[str]:
    return [row["name"] for row in run("list", "--json").json["models"] if row["origin"] != "embedded"]


def leftovers(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "hub").rglob("*") if path.is_file() and path.parent.name == "blobs"]


def test_the_quant_that_is_asked_for_is_fetched_and_nothing_else(run: Run, hub: FakeHub, repository: Path) -> None:
    ended = run("pull", f"{REPO}:q4_0")
    assert (ended.exit_code, hub.fetched()) == (0, ["tiny-q4_0.gguf"])
    lines = ended.stdout.splitlines()
    path = Path(lines[0].removeprefix(f"{REPO}:Q4_0 is in "))
    assert path.read_bytes() == (repository / "tiny-q4_0.gguf").read_bytes()
    assert lines[2] == f"serve it  diskprefix serve --model {REPO}:Q4_0"
    assert f"{REPO}: Q4_0, " in ended.stderr
    assert listed(run) == [f"{REPO}:Q4_0"]
    again = run("pull", f"{REPO}:Q4_0", "--json").json
    assert (again["name"], again["path"]) == (f"{REPO}:Q4_0", str(path))
    assert len([path for path in hub.sent if "elsewhere" in path]) == 1, "it is not fetched again"


def test_packs_beside_a_quant_are_offered_and_fetched_if_asked_for(
    run: Run, hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny-q4_0.prefixes/agents", "tiny-q4_0.prefixes/old/agents", "tiny-q8_0.prefixes/agents"):
        path = repository / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1000))
    ended = run("pull", f"{REPO}:Q4_0")
    assert f"{REPO} has 1 file of prompts for it, 1000 B; `diskprefix pull --packs` fetches them" in ended.stderr
    assert (ended.exit_code, hub.fetched()) == (0, ["tiny-q4_0.gguf"])
    ended = run("pull", f"{REPO}:Q4_0", "--packs")
    assert "1000 B; they are fetched too" in ended.stderr
    assert hub.fetched() == ["agents.safetensors", "tiny-q4_0.gguf"]
    line = ended.stdout.splitlines()[-1]
    folder = Path(line.rpartition(" ")[2])
    assert line == f"{folder} has 1 file of prompts for this model; add them: diskprefix import {folder}"
    assert [path.name for path in folder.iterdir()] == ["agents.safetensors"]
    lines: list[str] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_model(Settings(model=f"{REPO}:Q4_0"), lines.append)
    assert line in lines


def test_the_best_quant_that_fits_is_chosen_with_the_reason_and_16_bits_only_if_nothing_else_does(
    run: Run, hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (repository / "tiny-q8_0.gguf").stat().st_size
    for num_bytes in (size + ROOM_BYTES + (1 << 30), 1 << 40):
        free_memory(monkeypatch, num_bytes)
        assert "Q8_0, " in run("pull", REPO).stderr
        run("rm", f"{REPO}:Q8_0", "--yes")
    free_memory(monkeypatch, size + ROOM_BYTES + (1 << 30) - 1)
    ended = run("pull", REPO)
    assert "Q4_0, " in ended.stderr
    assert "the best of 3 that fits into 1.6 GiB of free memory" in ended.stderr
    assert hub.fetched() == ["tiny-q4_0.gguf", "tiny-q8_0.gguf"]
    run("rm", f"{REPO}:Q4_0", "--yes")
    free_memory(monkeypatch, ROOM_BYTES)
    refused = run("pull", REPO)
    assert (refused.exit_code, "no quant of org/tiny-GGUF fits into" in refused.stderr) == (3, True)
    for name in ("tiny-q8_0.gguf", "tiny-q4_0.gguf"):
        (repository / name).unlink()
    free_memory(monkeypatch, 1 << 40)
    assert "F32, " in run("pull", REPO).stderr


def test_a_name_without_a_quant_takes_the_largest_local_quant_with_its_parts(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_gguf(hub.repos[REPO] / "tiny-Q5_1.gguf", quantised="Q5_1", tensors_in_a_part=8)
    for quant in ("Q4_0", "Q5_1"):
        run("pull", f"{REPO}:{quant}")
    fetched = hub.fetched()
    found = hub_module.cached_model(REPO)
    assert found is not None
    assert found.name == "tiny-Q5_1-00001-of-00003.gguf"
    free_memory(monkeypatch, 1 << 40)
    assert f"{found.name} is on this machine" in run("pull", REPO).stderr
    assert hub.fetched() == fetched


def test_a_quant_that_does_not_fit_is_fetched_with_a_note_and_refused_by_the_start_with_those_that_do(
    run: Run, hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = (repository / "tiny-q8_0.gguf").stat().st_size + ROOM_BYTES - 1
    monkeypatch.setattr(fetch_model, "available_ram_bytes", lambda: num_bytes)
    monkeypatch.setattr("diskprefix.runtime.load.loader.available_bytes", lambda _device: num_bytes)
    with pytest.raises(ModelError, match=rf"^{REPO}:Q8_0 does not fit: .*; --model {REPO}:Q4_0 would fit: "):
        load_model(Settings(model=f"{REPO}:Q8_0"), lambda _line: None)
    assert hub.fetched() == []
    ended = run("pull", f"{REPO}:Q8_0")
    assert f"note: {REPO}:Q8_0 does not fit: " in ended.stderr
    assert (ended.exit_code, hub.fetched()) == (0, ["tiny-q8_0.gguf"])


def test_all_parts_come_from_their_folder_with_its_encoder_and_what_cannot_be_read_is_an_error(
    run: Run, hub: FakeHub
) -> None:
    folder = hub.repos[REPO]
    (folder / "Q5_1").mkdir()
    tiny.write_gguf(folder / "Q5_1" / "tiny-Q5_1.gguf", quantised="Q5_1", tensors_in_a_part=8)
    for name in ("mmproj-tiny-f16.gguf", "Q5_1/mmproj-tiny-f16.gguf", "Q5_1/mmproj-tiny-F32.gguf"):
        tiny.write_gguf(folder / name, architecture="clip")
    ended = run("pull", f"{REPO}:Q5_1")
    encoder = "mmproj-tiny-f16.gguf"
    assert hub.fetched() == [encoder, *(f"tiny-Q5_1-0000{part}-of-00003.gguf" for part in (1, 2, 3))]
    assert "pictures need Q5_1/mmproj-tiny-f16.gguf, 144.2 KiB, which is fetched too" in ended.stderr
    assert listed(run) == [f"{REPO}:Q5_1"]
    (folder / "tiny-Q6_K.gguf").write_bytes(b"GGUF")
    ended = run("pull", f"{REPO}:Q6_K")
    assert (ended.exit_code, "Q6_K is here, but cannot be served: " in ended.stderr) == (3, True)
    run("rm", f"{REPO}:Q5_1", f"{REPO}:Q6_K", "--yes")
    assert not [*Path(constants.HF_HUB_CACHE).rglob("*.gguf")]


Change = Callable[[FakeHub, pytest.MonkeyPatch], object]


def nothing(_hub: FakeHub, _monkeypatch: pytest.MonkeyPatch) -> None: ...


def told(listing: Any) -> Change:
    return lambda hub, _monkeypatch: setattr(hub, "listing", listing)


def tagged(where: str, tag: str) -> Change:
    return lambda hub, _monkeypatch: hub.tags.update({where: tag})


def named(where: str, name: str) -> Change:
    return lambda hub, _monkeypatch: hub.names.update({where: name})


def full(_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "diskprefix.runtime.fetch.made_once.shutil.disk_usage", lambda _path: SimpleNamespace(free=1000)
    )


def changing(_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, found = hub_module.repository_files(REPO)
    monkeypatch.setattr(hub_module, "repository_files", lambda _repo: (commit, found | {"tiny-Q6_K.gguf": 5}))


def failing(error: Exception) -> Change:
    def listing(*args: Any, dry_run: bool = False, **kwargs: Any) -> Any:
        if dry_run:
            raise error
        return snapshot_download(*args, **kwargs)

    return lambda _hub, monkeypatch: monkeypatch.setattr("huggingface_hub.snapshot_download", listing)


NOT_GIVEN = {
    "org/unknown": "there is no such model, or it is private",
    "org/private": "there is no such model, or it is private",
    "org/gated": "access must be granted first",
    "org/broken": "500",
    "a/b/c": "neither an existing file or folder nor a hub id",
}
MALFORMED = [
    *([], {"siblings": [{}]}, {"siblings": [7]}, {"siblings": [{"rfilename": 7}]}, {"siblings": "x"}),
    *({"siblings": [{"rfilename": "x.gguf", "size": size}]} for size in ("many", [1])),
    *({"siblings": [{"rfilename": "x.gguf", "lfs": {"size": 1}}]}, {"sha": "../../../stolen"}, {"sha": None}),
]
Q8 = f"{REPO}:Q8_0"
NAMES = {"info": "is not the name of a file inside the folder"}
HOSTILE_NAMES = [
    *(
        "../stolen-Q8_0.gguf",
        "/stolen-Q8_0.gguf",
        "a/../../stolen-Q8_0.gguf",
        "..\\stolen-Q8_0.gguf",
        "a//stolen-Q8_0.gguf",
    ),
    *("C:stolen-Q8_0.gguf", "stolen\0-Q8_0.gguf", "stolen\n-Q8_0.gguf", "", ".."),
]


@pytest.mark.cases(14)
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        *((f"{repo}{quant}", nothing, words) for repo, words in NOT_GIVEN.items() for quant in ("", ":Q8_0")),
        (f"{REPO}:Q6_K", nothing, f"error: {REPO} has no quant 'Q6_K'; it has Q4_0 ("),
        ("org/none", nothing, "org/none holds no model"),
        *((Q8, named(where, name), words) for where, words in NAMES.items() for name in HOSTILE_NAMES),
        (Q8, full, "needed, 1000 B free; free some, or set HF_HOME to"),
        (f"{REPO}:Q6_K", changing, "was changed while it was fetched; fetch it again"),
        *((Q8, failing(error), "from the hub: it breaks") for error in (OSError("it breaks"), ValueError("it breaks"))),
        *(
            (Q8, tagged(where, tag), f"the tag of tiny-q8_0.gguf is {tag!r}, which is no digest")
            for where in ("header", "listing")
            for tag in ("../../../stolen", "A" * 64, "a" * 41)
        ),
        *((Q8, told(listing), f"error: cannot fetch '{REPO}' from the hub: ") for listing in MALFORMED),
    ],
)
def test_a_failed_pull_reports_the_reason_and_writes_nothing(
    name: str,
    change: Change,
    words: str,
    run: Run,
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.private.add("org/private")
    hub.gated.add("org/gated")
    hub.broken.add("org/broken")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "README.txt").write_text("nothing")
    hub.repos["org/none"] = tmp_path / "none"
    change(hub, monkeypatch)
    ended = run("pull", name)
    assert (ended.exit_code, ended.stdout, words in ended.stderr.splitlines()[-1]) == (3, "", True), ended.stderr
    assert not [path for path in hub.sent if path.startswith("elsewhere")]
    assert not list(tmp_path.rglob("*stolen*"))
    assert name == "org/none" or not leftovers(tmp_path)


STOLEN = "../../../../stolen"
LIES: dict[str, Callable[[FakeHub], object]] = {
    "ETag": lambda hub: hub.tags.update(header=f"{STOLEN}/x"),
    "digest": lambda hub: hub.tags.update(dict.fromkeys(("header", "listing"), f"{STOLEN}/x")),
    "commit": lambda hub: hub.commits.update(header=STOLEN, info=STOLEN),
    "another commit": lambda hub: hub.commits.update(header="0" * 40),
    "long commit": lambda hub: hub.commits.update(info="0" * 64, header=STOLEN),
    "404 of a commit": lambda hub: vars(hub).update(commits={"header": STOLEN}, is_missing=True),
    "name": lambda hub: hub.names.update(info=f"{STOLEN}.json", listing="..\\stolen.json"),
}


@pytest.mark.cases(9)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("refused", "num_honest"), [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (0, 3)])
@pytest.mark.parametrize("model", [f"{REPO}:Q8_0", "org/whole"])
def test_a_mirror_that_lies_or_refuses_its_first_answers_has_nothing_fetched_or_written_elsewhere(
    lie: str, refused: int, num_honest: int, model: str, hub: FakeHub, whole: Path, tmp_path: Path
) -> None:
    hub.repos["org/whole"] = whole
    LIES[lie](hub)
    hub.refused, hub.num_honest = refused, num_honest
    before = {*tmp_path.rglob("*"), *tmp_path.parent.iterdir()}
    with pytest.raises(ModelError):
        load_model(Settings(model=model), lambda _line: None)
    new = {*tmp_path.rglob("*"), *tmp_path.parent.iterdir()} - before
    commit = hub.commit_of(model.partition(":")[0])
    assert all(path.is_relative_to(tmp_path / "real") or path.is_relative_to(tmp_path / "hub") for path in new)
    assert not [
        path for path in new if "stolen" in str(path) or (path.parent.name == "snapshots" and path.name != commit)
    ]
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("way", ["http", "xet"])
def test_a_large_file_whose_bytes_do_not_have_the_announced_sha_256_is_an_error_and_does_not_stay(
    way: str, run: Run, hub: FakeHub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (repository / "tiny-q8_0.gguf").read_bytes()
    announced, found = (hashlib.sha256(text).hexdigest() for text in (content, bytes(len(content))))
    hub.is_damaged = True
    with monkeypatch.context() as xet:
        if way == "xet":
            hub.tags["listing"] = announced
            xet.setattr(
                "huggingface_hub.file_download.xet_get",
                lambda *, incomplete_path, **_options: incomplete_path.write_bytes(bytes(len(content))),
            )
        refused = run("pull", Q8)
    assert f"the SHA-256 of tiny-q8_0.gguf is {found}, not {announced} as the hub announced" in refused.stderr
    assert (refused.exit_code, leftovers(tmp_path), listed(run)) == (3, [], [])
    assert way == "xet" or hub.fetched() == ["tiny-q8_0.gguf"]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("endless", "model", "words"),
    [
        ("file", Q8, "tiny-q8_0.gguf was announced with {size} bytes, and more were sent"),
        ("small", "org/whole", "was announced with"),
        ("listing", Q8, "its answers have more than 1.0 MiB"),
        ("redirect", Q8, "its answers have more than 1.0 MiB"),
    ],
)
def test_an_answer_without_an_end_is_cut_off_at_its_announced_size_or_a_limit_and_leaves_nothing(
    endless: str,
    model: str,
    words: str,
    run: Run,
    hub: FakeHub,
    repository: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diskprefix.runtime.fetch.hub_library.MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr("diskprefix.runtime.fetch.hub_library.OFFICIAL", "https://hub.example")
    # The library writes in chunks of 10 MB.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.repos["org/whole"], hub.endless = whole, endless
    ended = run("pull", model)
    reason = ended.stderr.splitlines()[-1]
    assert (ended.exit_code, ended.stderr.count("error: ")) == (3, 1), ended.stderr
    assert words.format(size=(repository / "tiny-q8_0.gguf").stat().st_size) in reason
    assert hub.num_endless_bytes < MOST_BYTES, "the client read on"
    assert not [path for path in leftovers(tmp_path) if path.name.endswith(".incomplete")]
    assert not [path for path in leftovers(tmp_path) if path.stat().st_size > 1 << 20]
    hub.endless = ""
    assert run("pull", model).exit_code == 0


def test_a_mirror_is_not_asked_for_files_by_xet_which_has_no_limit(
    run: Run, hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.runtime.fetch.hub_library.OFFICIAL", "https://hub.example")
    # The listing names a hash of Xet's.
    hub.tags["listing"] = hashlib.sha256((repository / "tiny-q8_0.gguf").read_bytes()).hexdigest()

    def never(**_options: Any) -> None:
        raise AssertionError("Xet is asked")

    monkeypatch.setattr("huggingface_hub.file_download.xet_get", never)
    assert (run("pull", Q8).exit_code, hub.fetched()) == (0, ["tiny-q8_0.gguf"])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_small_file_whose_bytes_do_not_have_the_announced_git_digest_is_an_error_and_does_not_stay(
    name: str, run: Run, hub: FakeHub, whole: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(whole, own)
    hub.repos["org/whole"] = own
    other = own / name
    tag = hashlib.sha1(b"blob 5\0other").hexdigest()
    hub.tags_of[name] = tag
    content = other.read_bytes()
    found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    ended = run("pull", "org/whole")
    assert f"the SHA-1 of {name} is {found}, not {tag} as the hub announced" in ended.stderr
    assert ended.exit_code == 3
    assert not [path for path in leftovers(tmp_path) if path.name == tag]


@pytest.mark.parametrize(
    ("size", "words"), [(None, "the size of config.json is not announced"), (7, "bytes, and then with 7")]
)
def test_the_size_of_a_file_is_announced_and_stays(
    size: int | None, words: str, run: Run, hub: FakeHub, whole: Path
) -> None:
    hub.repos["org/whole"] = whole
    hub.later_sizes["config.json"] = size
    ended = run("pull", "org/whole")
    assert (ended.exit_code, words in ended.stderr) == (3, True), ended.stderr


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("quant", ["", ":Q8_0"])
def test_offline_what_is_here_is_found_and_the_rest_is_an_error(
    quant: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (models := tmp_path / "models.toml").write_text('[mine]\nmodel = "x.gguf"\n', encoding="utf-8")
    run("pull", f"{REPO}:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("pull", REPO + quant).stdout.startswith(f"{REPO}:Q8_0 is in ")
    for absent in ("org/other" + quant, f"{REPO}:Q4_0"):
        ended = run("pull", absent)
        assert (ended.exit_code, "HF_HUB_OFFLINE is set" in ended.stderr) == (3, True), ended.stderr
        (advised,) = re.findall(r"unset it; `diskprefix serve --model (\S+)` serves a small one", ended.stderr)
        # Also where `serve` without --model has other models.
        for file in (None, models):
            settings = Settings(model=advised, models_file=file)
            catalogue = open_catalogue(settings)
            assert catalogue is None or advised in [known.name for known in catalogue.models()]
        assert is_embedded(advised)


def test_safetensors_are_fetched_where_there_are_some(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/whole"] = tiny.write_folder(tmp_path / "whole")
    shutil.copy(hub.repos[REPO] / "tiny-q8_0.gguf", tmp_path / "whole")
    row = run("pull", "org/whole", "--json").json
    assert (row["name"], row["kind"]) == ("org/whole", "float32")
    assert "tiny-q8_0.gguf" not in hub.fetched()
    run("pull", "org/whole:Q8_0")
    assert listed(run) == ["org/whole", "org/whole:Q8_0"]
    run("rm", "org/whole", "--yes")
    assert listed(run) == ["org/whole:Q8_0"]


def test_a_quant_that_two_files_have_is_fetched_and_found_by_the_name_of_the_file(
    run: Run, hub: FakeHub, repository: Path
) -> None:
    (repository / "a-Q4_0.gguf").symlink_to(repository / "tiny-q4_0.gguf")
    ended = run("pull", f"{REPO}:a-Q4_0")
    assert hub.fetched() == ["a-Q4_0.gguf"]
    assert ended.stdout.splitlines()[2] == f"serve it  diskprefix serve --model {REPO}:a-Q4_0"
    path = hub_module.cached_model(f"{REPO}:a-Q4_0")
    assert path is not None
    assert ended.stdout.startswith(f"{REPO}:a-Q4_0 is in {path.parent.resolve()}/a-Q4_0.gguf")
    assert listed(run) == [f"{REPO}:Q4_0"]
    assert run("pull", f"{REPO}:Q4_0").stdout.startswith(f"{REPO}:Q4_0 is in {path}\n")


def test_16_bits_are_the_last_choice_by_any_name_and_what_is_no_model_is_none() -> None:
    files = {"a-F16.gguf": 200, "b-F16.gguf": 200, "a-Q8_0.gguf": 100, "b-Q8_0.gguf": 100, "imatrix.gguf": 300}
    chosen = {hub_module.choose_quant("org/x", dict(order), "", 1 << 40)[0] for order in permutations(files.items())}
    assert chosen == {"a-Q8_0"}


def test_an_update_that_is_refused_leaves_the_model_that_is_here(
    run: Run, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/whole"] = tiny.write_folder(tmp_path / "whole")
    path = run("pull", "org/whole", "--json").json["path"]
    (tmp_path / "whole" / "added.json").write_text("{}")
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"other weights")
    with monkeypatch.context() as full:
        full.setattr("diskprefix.runtime.fetch.made_once.shutil.disk_usage", lambda _path: SimpleNamespace(free=0))
        assert "not enough disk space" in run("pull", "org/whole").stderr
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert Path(run("pull", "org/whole", "--json").json["path"]).samefile(path)
    newest = Path(path).parents[1] / "refs" / "main"
    assert newest.read_text() == Path(path).name
    run("pull", "org/whole")
    assert newest.read_text() == hub.commit_of("org/whole") != Path(path).name


def test_no_message_holds_a_password_or_control_characters(
    run: Run, hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "tiny-\u202e-Q6_K.gguf").touch()
    (repository / "other-Q6_K.gguf").touch()
    refused = run("pull", f"{REPO}:Q5_0")
    assert "has no quant 'Q5_0'; it has" in refused.stderr
    assert "\u202e" not in refused.stderr
    (repository / "tiny-\x1b[31m-Q6_K.gguf").touch()
    refused = run("pull", f"{REPO}:Q5_0")
    assert "is not the name of a file inside the folder" in refused.stderr
    assert "\x1b" not in refused.stderr
    monkeypatch.setattr(constants, "ENDPOINT", hub.url.replace("//", "//user:geheim@"))
    hub.broken.add("org/broken")
    refused = run("pull", "org/broken")
    assert (refused.exit_code, "geheim" in refused.stderr) == (3, False)
    assert "127.0.0.1" in refused.stderr


# -- rm --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hub")
def test_what_was_fetched_is_removed_and_the_rest_stays(run: Run, tmp_path: Path) -> None:
    rows = [run("pull", f"{REPO}:{quant}", "--json").json for quant in ("Q8_0", "Q4_0")]
    size = Path(rows[0]["path"]).stat().st_size
    removed = run("rm", f"{REPO}:Q8_0", "--yes", "--json").json
    assert removed == {"removed": [f"{REPO}:Q8_0"], "bytes": size, "packed_bytes": 0}
    assert listed(run) == [f"{REPO}:Q4_0"]
    assert run("rm", f"{REPO}:Q4_0", "--yes").stdout.startswith("removed 1 model, ")
    assert not list((tmp_path / "hub").glob("models--*"))


@pytest.mark.usefixtures("hub")
def test_the_embedded_model_is_removed_by_its_names(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run("rm", "smollm2:135m", "--yes").assert_refused(2, "the embedded model, is not on this machine")
    folder = cache_home() / "models" / EMBEDDED.requirement
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(b"12345")
    run("rm", "smollm2").assert_refused(2, "add --yes")
    assert run("rm", "smollm2:135m", "--yes", "--json").json["bytes"] == 5
    assert not folder.exists()


@pytest.mark.usefixtures("hub")
def test_packed_weights_are_listed_with_their_model_and_removed_with_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)
    at = ["--packed-weights", str(tmp_path / "weights")]
    for quant in ("Q8_0", "Q4_0"):
        path = run("pull", f"{REPO}:{quant}", "--json").json["path"]
        for _ in load_model(Settings(model=path, packed_weights=at[1]), lambda _line: None).keep_weights():
            pass
    report = run("list", *at, "--json").json
    sizes = {row["name"]: row["packed_bytes"] for row in report["models"] if row["origin"] == "pulled"}
    assert sizes.keys() == {f"{REPO}:Q8_0", f"{REPO}:Q4_0"}
    assert all(sizes.values())
    assert report["packed_weights"] == {"folder": at[1], "files": 2, "bytes": sum(sizes.values())}
    assert run("list", *at).stdout.splitlines()[-1].startswith("packed weights: 2 files, ")
    assert run("list", "--packed-weights", "off", "--json").json["packed_weights"] is None
    assert run("rm", f"{REPO}:Q8_0", *at, "--yes", "--json").json["packed_bytes"] == sizes[f"{REPO}:Q8_0"]
    (left,) = PackedFiles(tmp_path / "weights").all()
    assert left[1] == sizes[f"{REPO}:Q4_0"]
    monkeypatch.setenv("DISKPREFIX_PACKED_WEIGHTS", at[1])
    assert run("rm", f"{REPO}:Q4_0", "--yes").stdout.endswith(" of packed weights\n")
    assert not list((tmp_path / "weights").iterdir())
    assert "packed weights" not in run("list").stdout


@pytest.mark.usefixtures("hub")
def test_unknown_names_are_refused_and_nothing_goes_unasked(run: Run) -> None:
    run("pull", f"{REPO}:Q8_0")
    run("rm", "x" * 201, "--yes").assert_refused(2, "no model has a name of 201 characters")
    run("rm", f"{REPO}:Q8_1", "--yes").assert_refused(2, f"the nearest name is '{REPO}:Q8_0'")
    run("rm", "zzz", f"{REPO}:Q8_0", "--yes").assert_refused(
        2, "no model that was fetched from the hub is called 'zzz'"
    )
    run("rm", f"{REPO}:Q8_0").assert_refused(2, "add --yes")
    assert listed(run) == [f"{REPO}:Q8_0"]


@pytest.mark.parametrize("state", ["a data set of that name", "main names a commit that is not here"])
@pytest.mark.usefixtures("hub")
def test_a_model_is_removed_whatever_else_is_in_the_cache(state: str, run: Run, tmp_path: Path) -> None:
    run("pull", f"{REPO}:Q8_0")
    folder = tmp_path / "hub" / "models--org--tiny-GGUF"
    others = tmp_path / "hub" / "datasets--org--tiny-GGUF"
    if "data set" in state:
        shutil.copytree(folder, others, symlinks=True)
        next((others / "snapshots").iterdir()).rename(others / "snapshots" / ("1" * 40))
        (others / "refs" / "main").write_text("1" * 40)
    else:
        (folder / "refs" / "main").write_text("0" * 40)
    assert run("rm", f"{REPO}:Q8_0", "--yes", "--json").json["bytes"] > 0
    assert not folder.exists()
    assert others.exists() == ("data set" in state)


@pytest.mark.parametrize("linked", ["the file", "the snapshot", "the blob's name"])
@pytest.mark.usefixtures("hub")
def test_the_users_own_file_behind_a_link_stays(linked: str, run: Run, tmp_path: Path) -> None:
    file = Path(run("pull", f"{REPO}:Q8_0", "--json").json["path"])
    own = tmp_path / "mine" / "tiny-q8_0.gguf"
    own.parent.mkdir()
    shutil.copy(file, own)
    if linked == "the snapshot":
        shutil.rmtree(file.parent)
        file.parent.symlink_to(own.parent)
    else:
        link = file if linked == "the file" else file.resolve()
        link.unlink()
        link.symlink_to(own)
    run("rm", f"{REPO}:Q8_0", "--yes")
    assert own.exists()
    assert listed(run) == []


@pytest.mark.parametrize(
    "other", ["snapshots/COMMIT/imatrix.gguf", "snapshots/COMMIT/onnx/model.onnx", "blobs/0123.4567.incomplete"]
)
@pytest.mark.usefixtures("hub")
def test_rm_keeps_files_that_other_programs_fetched(other: str, run: Run, tmp_path: Path) -> None:
    row = run("pull", f"{REPO}:Q8_0", "--json").json
    commit = Path(row["path"]).parent
    file = commit.parents[1] / other.replace("COMMIT", commit.name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"of another program")
    run("rm", f"{REPO}:Q8_0", "--yes")
    assert file.exists()
    assert listed(run) == []
    assert [left.name for left in leftovers(tmp_path)] == [file.name] * (file.parent.name == "blobs")


def test_a_model_is_removed_from_all_snapshots_and_is_not_read_for_it(
    run: Run, hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("pull", f"{REPO}:Q8_0")
    (repository / "tiny-F32.gguf").unlink()
    (repository / "tiny-q8_0.gguf").write_bytes((repository / "tiny-q4_0.gguf").read_bytes())
    run("pull", f"{REPO}:Q8_0")
    assert hub.fetched() == ["tiny-q8_0.gguf"]
    monkeypatch.setattr("diskprefix.model_identity.file_digest", lambda _path: pytest.fail("it was read"))
    run("rm", f"{REPO}:Q8_0", "--yes")
    assert listed(run) == []

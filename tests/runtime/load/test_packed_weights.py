"""Packed weights are made once and mapped by later starts, and what is wrong with a file costs packing and one line."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from diskprefix.daemon.settings import Settings
from diskprefix.file_system import REMOTE
from diskprefix.native import packing
from diskprefix.native.library import Operators, operators
from diskprefix.native.packing import TYPES
from diskprefix.runtime.files import file_matrix, packed_file
from diskprefix.runtime.files.packed_file import PackedFile, PackedMatrix, UnusableFile, write_packed
from diskprefix.runtime.load import packed_weights
from diskprefix.runtime.load.loader import LoadedModel, load_model
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.tokens import content_digest
from tests.runtime.plan import tiny

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def compiled() -> Operators:
    found = operators()
    if found is None:
        pytest.skip("no compiled operators")
    return found


@pytest.fixture(autouse=True)
def _keeps_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)


@pytest.fixture
def model(compiled: Operators, tmp_path: Path) -> Path:
    assert compiled
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")
    # What was written a moment ago may still change: its digest is not remembered.
    os.utime(file, (1e9, 1e9))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of the packer for a model's files."""
    counts, own = Counter[str](), packing.pack_file

    def pack_file(*args: Any) -> None:
        counts["calls"] += 1
        own(*args)

    monkeypatch.setattr(file_matrix, "pack_file", pack_file)
    return counts


def load(model: Path, folder: Path, **settings: Any) -> LoadedModel:
    return load_model(Settings(model=str(model), packed_weights=str(folder), **settings), lambda _line: None)


def keep(loaded: LoadedModel) -> None:
    for _ in loaded.keep_weights():
        pass


def weights_of(loaded: LoadedModel) -> dict[str, bytes]:
    assert loaded.weights is not None
    return {name: np.ascontiguousarray(weights).tobytes() for name, weights in loaded.weights.named()}


def file_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def put(path: Path, content: bytes | bytearray) -> None:
    """Replaces a file: one that is mapped must not change."""
    new = path.with_name("new")
    new.write_bytes(content)
    new.chmod(0o600)
    new.replace(path)


def write(path: Path, matrices: list[PackedMatrix], sources: Sequence[Path] = ()) -> None:
    with path.with_name("new").open("wb") as file:
        for _ in write_packed(file, matrices, path.stem, sources, _compiled()):
            pass
    put(path, path.with_name("new").read_bytes())


def stored(path: Path) -> list[PackedMatrix]:
    return list(PackedFile.open(path, path.stem, _compiled()).others(()))


def test_the_next_start_maps_what_the_first_has_packed(model: Path, folder: Path, packed: Counter[str]) -> None:
    first = load(model, folder)
    assert packed.pop("calls") > 10
    keep(first)
    assert file_in(folder).stat().st_mode & 0o777 == 0o600
    inode = file_in(folder).stat().st_ino
    second = load(model, folder)
    keep(second)
    assert not packed
    assert weights_of(second) == weights_of(first)
    assert file_in(folder).stat().st_ino == inode, "it is not made again"


def test_a_model_of_other_names_and_folders_is_mapped_too(model: Path, folder: Path, packed: Counter[str]) -> None:
    first = load(model, folder)
    keep(first)
    other = model.rename(model.with_name("other.gguf"))
    load(other, folder)  # Its digest is computed, beside packing.
    packed.clear()
    again = load(other, folder)
    assert not packed
    assert weights_of(again) == weights_of(first)


@pytest.mark.parametrize("replace", [False, True], ids=["written over", "replaced"])
def test_another_model_under_the_same_name_and_time_is_packed(
    model: Path, folder: Path, packed: Counter[str], *, replace: bool
) -> None:
    keep(load(model, folder))
    before, content = model.stat(), bytearray(model.read_bytes())
    content[-1] ^= 1
    if replace:
        model.unlink()
    model.write_bytes(content)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    packed.clear()
    other, old = load(model, folder), file_in(folder)
    assert packed
    keep(other)
    assert file_in(folder) != old, "that of the model that was replaced is gone"


def test_small_models_and_off_keep_nothing(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(load(model, Path("off")))
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1 << 30)
    keep(load(model, folder))
    assert not folder.exists()
    assert not Path("off").exists()


def test_a_file_of_other_settings_gets_what_it_lacks(model: Path, folder: Path, packed: Counter[str]) -> None:
    """With and without a draft layer, say: the file has the matrices of both, and neither start makes it anew."""
    first = load(model, folder)
    keep(first)
    path = file_in(folder)
    write(path, stored(path)[3:])
    packed.clear()
    second = load(model, folder)
    assert packed.pop("calls") == 3
    keep(second)
    load(model, folder)
    assert not packed
    assert weights_of(second) == weights_of(first)


def test_matrices_that_a_start_does_not_take_stay_in_the_file(model: Path, folder: Path) -> None:
    keep(load(model, folder))
    path, other = file_in(folder), PackedMatrix(bytes(16), "Q4_1", np.ones((1, 2, 3), np.uint8))
    matrices = stored(path)
    write(path, [*matrices[1:], other])
    keep(load(model, folder))
    contents = {matrix.content_digest: matrix.packed for matrix in stored(path)}
    assert np.array_equal(contents.pop(bytes(16)), other.packed)
    assert contents.keys() == {matrix.content_digest for matrix in matrices}


def _compiled() -> Operators:
    compiled = operators()
    assert compiled is not None
    return compiled


def flip_each_matrix(path: Path) -> list[bytes]:
    """Returns the file once for each matrix, with a bit of it flipped."""
    content = path.read_bytes()
    with path.open("rb") as file:
        contents, _ = packed_file._read_contents(file)
    results = []
    for number, entry in enumerate(contents.places.values()):
        damaged = bytearray(content)
        damaged[entry.offset + number * 7919 % entry.num_bytes] ^= 1 << number % 8
        results.append(bytes(damaged))
    return results


def test_a_flipped_bit_of_any_matrix_is_packed_anew_and_the_file_too(
    model: Path, folder: Path, packed: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = load(model, folder)
    keep(first)
    path = file_in(folder)
    for content in flip_each_matrix(path):
        put(path, content)
        packed.clear()
        caplog.clear()
        second = load(model, folder)
        assert weights_of(second) == weights_of(first)
        assert packed.pop("calls") == 1
        assert [line for line in caplog.messages if "damaged" in line] == [
            f"[model] a packed matrix in {path} is damaged: it is packed anew"
        ]
        keep(second)
        load(model, folder)
        assert not packed, "the file was made anew"


def _cut(path: Path, at: int) -> None:
    put(path, path.read_bytes()[:at])


def _change(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    put(path, content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: _cut(path, 0), "it is cut short"),
    "a byte": (lambda path: _cut(path, 1), "it is cut short"),
    "without its last byte": (lambda path: _cut(path, -1), "it is cut short or damaged"),
    "without its table": (lambda path: _cut(path, 4096), "it is cut short or damaged"),
    "another name": (lambda path: _change(path, -36), "it is cut short or damaged"),
    "another version": (lambda path: _change(path, -28), "its version is 254, not 1"),
    "a table of another size": (lambda path: _change(path, -24), "its table is damaged"),
    "a table of a size beyond the file": (lambda path: _change(path, -17), "its end is damaged"),
    "another table": (lambda path: _change(path, -50), "its table is damaged"),
    "readable by others": (lambda path: path.chmod(0o640), "other users may read or write it (mode 640)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_cannot_be_used_is_named_once_and_made_anew(
    kind: str, model: Path, folder: Path, packed: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = load(model, folder)
    keep(first)
    path = file_in(folder)
    damage, reason = DAMAGE[kind]
    damage(path)
    packed.clear()
    with caplog.at_level("INFO"):
        second = load(model, folder)
    assert weights_of(second) == weights_of(first)
    assert packed["calls"] > 10
    (line,) = [line for line in caplog.messages if "packed weights" in line]
    assert line.startswith(f"[model] the packed weights in {path} are made anew: {reason}")
    keep(second)
    packed.clear()
    load(model, folder)
    assert not packed, "it was made anew"


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".x")))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("other", [_link, _pipe])
def test_something_else_in_the_place_of_the_file_is_replaced(
    other: Callable[[Path], None], model: Path, folder: Path, packed: Counter[str]
) -> None:
    keep(load(model, folder))
    path = file_in(folder)
    other(path)
    packed.clear()
    keep(load(model, folder))
    assert packed.pop("calls") > 10
    assert path.is_file()
    assert not path.is_symlink()
    load(model, folder)
    assert not packed


def test_a_folder_in_the_place_of_the_file_costs_one_line(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(load(model, folder))
    path = file_in(folder)
    path.unlink()
    path.mkdir()
    with caplog.at_level("INFO"):
        keep(load(model, folder))
    assert [line for line in caplog.messages if "packed weights" in line] == [
        f"[model] the packed weights are not kept in {folder}: Is a directory"
    ]


def test_what_another_packer_made_is_not_read(
    model: Path, folder: Path, packed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(load(model, folder))
    own = packing.pack

    def pack(
        operators: Operators, kind: str, content: Any, order: Any, out: np.ndarray, *args: Any, **more: Any
    ) -> None:
        own(operators, kind, content, order, out, *args, **more)
        out.reshape(-1)[0] ^= 1

    monkeypatch.setattr(packed_file, "pack", pack)
    packed.clear()
    second = load(model, folder)
    assert packed.pop("calls") > 10
    keep(second)
    load(model, folder)
    assert not packed, "it converges"


@pytest.mark.parametrize("kind", TYPES)
def test_the_known_matrix_of_each_type_tells_packers_apart(kind: str, compiled: Operators) -> None:
    """Such as one that takes rows in another order."""
    digest = packed_file._known(compiled, kind)
    assert digest == packed_file._known(compiled, kind)
    own = packing.pack

    def forwards(*args: Any, **more: Any) -> None:
        operators, kind, content, order, *others = args
        own(operators, kind, content, order if order is None else order[::-1].copy(), *others, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_file, "pack", forwards)
        assert packed_file._known(compiled, kind) != digest


def test_a_table_that_points_beyond_the_file_is_refused(tmp_path: Path, compiled: Operators) -> None:
    path = tmp_path / "file"
    for shape, offset in (((1, 1, 1 << 40), 0), ((1, 1, 1), 1 << 62), ((-1, -1, 1), 0), ((1, 1, 1), -1)):
        entry = packed_file._Place("Q4_1", offset, shape, bytes(16))
        table = msgspec.msgpack.encode(packed_file._Contents({}, {bytes(16): entry}, [], ""))
        digest = content_digest(table)
        path.write_bytes(table + packed_file._END.pack(packed_file._NAME, packed_file.VERSION, len(table), digest))
        path.chmod(0o600)
        with pytest.raises(UnusableFile, match=r"its table is damaged|beyond its end"):
            PackedFile.open(path, "", compiled)


def test_a_full_disk_keeps_nothing_and_says_so(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(model, folder)
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        usage = type("Usage", (), {"total": 1 << 40, "free": 1000})()
        patch.setattr(shutil, "disk_usage", lambda _path: usage)
        keep(loaded)
    assert not list(folder.iterdir())
    assert "[model] the packed weights are not kept" in caplog.text

    def refused(*_: Any) -> Any:
        yield
        raise OSError(28, "No space left on device")

    caplog.clear()
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(packed_weights, "write_packed", refused)
        keep(loaded)
    assert not list(folder.iterdir()), "nothing stays of it"
    assert "are not kept in" in caplog.text
    assert "No space left on device" in caplog.text


def test_a_folder_that_cannot_be_written_costs_one_line(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"")
    with caplog.at_level("INFO"):
        keep(load(model, blocked / "weights"))
    assert [line for line in caplog.messages if "packed weights" in line] == [
        f"[model] the packed weights are not kept in {blocked / 'weights'}: Not a directory"
    ]


def made(folder: Path, number: int, *sources: Path, num_bytes: int = 1) -> Path:
    """Makes a file of the right name, the older the larger its number."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{number:032x}.packed"
    write(path, [PackedMatrix(bytes(16), "Q4_1", np.ones((1, 1, num_bytes), np.uint8))], sources)
    os.utime(path, (1e9 - number, 1e9 - number))
    return path


def limit_disk(monkeypatch: pytest.MonkeyPatch, total: int, free: int, files: PackedFiles | None = None) -> None:
    """Has a disk that is free for so many bytes now, and for more without some of the `files`."""
    used = files.amounts["bytes"] if files else 0

    def usage(_path: object) -> object:
        freed = used - files.amounts["bytes"] if files else 0
        return type("Usage", (), {"total": total, "free": free + freed})()

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_the_file_that_was_not_used_for_longest_goes_first(
    compiled: Operators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled
    files = PackedFiles(tmp_path / "weights")
    new, middle, old = (made(files.folder, number) for number in range(3))
    assert [path for path, _ in files.all()] == [old, middle, new]
    size = new.stat().st_size
    limit_disk(monkeypatch, 16 * size, 9 * size, files)
    assert files.room_bytes() == 4 * size
    files._make_room("own", 2 * size, [])
    assert [path for path, _ in files.all()] == [middle, new], "a quarter of the disk is for all"
    limit_disk(monkeypatch, 100 * size, 2 * size, files)
    assert files.room_bytes() == 2 * size
    files._make_room("own", 3 * size // 2, [])
    assert [path for path, _ in files.all()] == [new], "and half of what is free for one"


def test_files_of_models_that_are_gone_or_replaced_go_when_another_is_made(
    model: Path, folder: Path, tmp_path: Path
) -> None:
    """Files of other names stay, whoever has given us such a folder, and what another program writes there."""
    here, gone, strange = tmp_path / "here.gguf", tmp_path / "gone.gguf", tmp_path / "n\udcff.gguf"
    here.touch()
    strange.touch()
    kept = made(folder, 1, here, strange)
    without, replaced, unusable = made(folder, 2, here, gone), made(folder, 3, model.resolve()), made(folder, 4, here)
    _cut(unusable, 100)
    mine = [folder / "notes.packed", folder / ".partial-download"]
    for path in mine:
        path.touch()
    keep(load(model, folder))
    assert not any(path.exists() for path in (without, replaced, unusable))
    (own,) = {*folder.iterdir()} - {kept, *mine}
    files = PackedFiles(folder)
    assert [path for path, _ in files.made_from([strange])] == [kept]
    assert [path for path, _ in files.made_from([model.resolve(), gone])] == [own]


def test_links_to_a_model_are_followed_to_its_file(model: Path, folder: Path) -> None:
    link = model.with_name("link.gguf")
    link.symlink_to(model)
    keep(load(link, folder))
    assert packed_file.sources_of(file_in(folder)) == [model.resolve()]


def test_a_writer_that_was_killed_leaves_nothing_that_stays(model: Path, folder: Path) -> None:
    """Killed at any piece: the next start removes what it wrote, and never takes it for whole."""
    program = textwrap.dedent(
        f"""
        import os, signal, sys
        from pathlib import Path
        from diskprefix.runtime.files import packed_file; from diskprefix.runtime.load import packed_weights
        packed_weights.LEAST_BYTES = 0
        packed_file._READ_BYTES = 2048
        from diskprefix.runtime.load.loader import load_model
        from diskprefix.daemon.settings import Settings
        loaded = load_model(Settings(model={str(model)!r}, packed_weights={str(folder)!r}), lambda _line: None)
        for number, _ in enumerate(loaded.keep_weights()):
            if number == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    for number in (0, 1, 5, 10):
        ended = subprocess.run([sys.executable, "-c", program, str(number)], check=False)
        assert ended.returncode == -signal.SIGKILL
        assert not list(folder.glob("*.packed"))
    keep(load(model, folder))
    assert [file.suffix for file in folder.iterdir()] == [".packed"]


def test_what_the_disk_cannot_read_is_packed_anew_and_ends_no_process(
    model: Path, folder: Path, packed: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As with a bad sector: the file is as long as it says when it is mapped, and some of its pages are not there."""
    first = load(model, folder)
    keep(first)
    program = textwrap.dedent(
        f"""
        import os, sys
        from pathlib import Path
        from diskprefix.runtime.files import packed_file
        own = packed_file._mapped
        def mapped(file, size):
            made = own(file, size)
            os.truncate(file.name, 1 << 16)
            return made
        packed_file._mapped = mapped
        from diskprefix.runtime.load.loader import load_model
        from diskprefix.daemon.settings import Settings
        loaded = load_model(Settings(model={str(model)!r}, packed_weights={str(folder)!r}), lambda _line: None)
        from tests.runtime.load.test_packed_weights import keep, packed_weights, weights_of
        packed_weights.LEAST_BYTES = 0
        from diskprefix.tokens import content_digest
        print(content_digest(repr(weights_of(loaded)).encode()).hex())
        keep(loaded)
        """
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == content_digest(repr(weights_of(first)).encode()).hex()
    packed.clear()
    assert weights_of(load(model, folder)) == weights_of(first)
    assert not packed, "the file was made anew"
    assert "anew" not in caplog.text


@pytest.mark.parametrize("kind", [*sorted(REMOTE), "fuse.s3fs", ""])
def test_on_a_network_the_file_is_read_into_memory_so_that_whoever_cuts_it_ends_no_process(
    kind: str, model: Path, folder: Path, packed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(model, folder)
    keep(first)
    packed.clear()
    monkeypatch.setattr(packed_file, "file_system", lambda _path: kind)
    second, file = load(model, folder), file_in(folder)
    assert not packed
    assert str(file) not in Path("/proc/self/maps").read_text()
    os.truncate(file, 0)
    assert weights_of(second) == weights_of(first)


def test_the_file_of_another_model_under_this_name_is_not_read(
    model: Path, folder: Path, packed: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A fine-tune has the same names and shapes."""
    first = load(model, folder)
    keep(first)
    other = tiny.write_gguf(model.with_name("other.gguf"), seed=1, quantised="Q4_1")
    os.utime(other, (1e9, 1e9))
    own = file_in(folder)
    keep(load(other, folder))
    (others,) = (path for path in folder.iterdir() if path != own)
    others.replace(own)
    packed.clear()
    with caplog.at_level("INFO"):
        assert weights_of(load(model, folder)) == weights_of(first)
    assert packed["calls"] > 10
    assert f"[model] the packed weights in {own} are made anew: it is that of another model" in caplog.messages


def test_a_file_on_a_disk_that_is_read_only_is_mapped(
    model: Path, folder: Path, packed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(load(model, folder))
    packed.clear()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    load(model, folder)
    assert not packed


def test_a_model_that_has_no_room_removes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    names = [f"{number:032x}.packed" for number in range(3)]
    for name in names:
        (folder / name).write_bytes(bytes(1000))
    monkeypatch.setattr(packed_weights, "_is_left", lambda *_: False)
    usage = type("Usage", (), {"total": 12_000, "free": 9_000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(packed_weights._NoRoom):
        PackedFiles(folder)._make_room("f" * 32, 3001, [])
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_pipe_among_the_leftovers_holds_no_start(model: Path, folder: Path, packed: Counter[str]) -> None:
    keep(load(model, folder))
    os.mkfifo(folder / f".partial-{'0' * 16}")
    packed.clear()
    load(model, folder)
    assert not packed

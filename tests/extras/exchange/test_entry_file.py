"""A file from anybody: either it is a sound export, or one line says what is wrong with it."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diskprefix.errors import CacheError, SettingsError, StoreCorrupt, StoreFormatError
from diskprefix.extras.exchange.entry_file import EntryReader
from diskprefix.extras.exchange.exchange import verify_payloads
from diskprefix.tokens import checksum, root_hash
from tests.examples import examples
from tests.extras.exchange.exported import HYBRID, LAYOUT, TENANT, entry_of, export, identity_of
from tests.store.building import BLOCK, open_store, prompt

OURS = b'"diskprefix-entry"'
"""A part of each header that an export wrote."""
MOST_BYTES = 8 << 20
"""The memory that looking at a file of a few kilobytes may take."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound file."""
    return exported(tmp_path_factory.mktemp("sound"), LAYOUT)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound file of a layout with states."""
    return exported(tmp_path_factory.mktemp("hybrid"), HYBRID, checkpoints=(BLOCK, 2 * BLOCK))


def exported(folder: Path, layout: str, checkpoints: tuple[int, ...] = ()) -> bytes:
    store = open_store(folder / "kv")
    pub = entry_of(store, prompt(1, 2 * BLOCK + 5), layout=layout, checkpoints=checkpoints)
    store.publish(pub)
    data = export(store, pub, folder / "e.safetensors").read_bytes()
    store.close()
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "e.safetensors"


def check(path: Path) -> None:
    """All that an import checks before it writes."""
    with EntryReader.open(path) as reader:
        verify_payloads(reader, lambda _num_bytes: None)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def joined(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def with_checksum(header: dict[str, Any], data: bytes) -> bytes:
    """The file with the checksum that its metadata ought to have: what is wrong beside it is left to be found."""
    metadata = header["__metadata__"]
    rest = {name: text for name, text in metadata.items() if name != "checksum"}
    index = b"".join(
        data[slice(*header[name]["data_offsets"])] for name in ("token_ids", "nodes.checksum", "nodes.prefill_s")
    )
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    metadata["checksum"] = f"{checksum(text + index):016x}"
    return joined(header, data)


def test_a_sound_file_is_sound(sound: bytes, hybrid: bytes, path: Path) -> None:
    for data in (sound, hybrid):
        path.write_bytes(data)
        check(path)
        path.write_bytes(with_checksum(*split(data)))
        check(path)


Change = Callable[[dict[str, Any]], object]
"""Something that a header's metadata or tensors are changed by."""


def metadata(**changes: object) -> Change:
    return lambda header: header["__metadata__"].update(changes)


def tensor(name: str, **changes: object) -> Change:
    return lambda header: header[name].update(changes)


def relaid(layout: str, **changes: object) -> Change:
    """Another layout, with the identity and the root that belong to it."""
    identity = identity_of(layout)
    return metadata(layout=layout, identity=identity, root=root_hash(identity).hex(), **changes)


def identified(**changes: object) -> Change:
    identity = json.dumps(json.loads(identity_of()) | changes)
    return metadata(identity=identity, root=root_hash(identity).hex())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (metadata(format="pt"), "`diskprefix export` did not write it"),
        (lambda header: header.pop("__metadata__"), "`diskprefix export` did not write it"),
        (metadata(version="2"), "version 2, this diskprefix reads version 1"),
        (metadata(states="16"), "layout has states and it has none"),
        (metadata(version=1), "metadata cannot be read"),
        (lambda header: header["__metadata__"].pop("root"), "root is not the hash of its identity"),
        (metadata(root="zz" * 16), "metadata cannot be read"),
        (metadata(root="ab" * 16), "root is not the hash of its identity"),
        (metadata(identity=identity_of(weights="w2")), "root is not the hash of its identity"),
        (metadata(layout=LAYOUT + " "), "layout is not the one in its identity"),
        (identified(block_size=2 * BLOCK), "block size is not the one in its identity"),
        (identified(salt=TENANT), "tenant is not the one in its identity"),
        (identified(fingerprint=[1]), "identity cannot be read"),
        (identified(layout=[[]] * 10), "identity cannot be read"),
        (metadata(tenant=TENANT), "tenant is not the one in its identity"),
        (metadata(block_size="-16"), "metadata cannot be read"),
        (metadata(block_size="99999999999999999999"), "metadata cannot be read"),
        (metadata(num_tokens="9999999999"), "metadata cannot be read"),
        (metadata(num_tokens="36"), "token_ids is I32|layers.* is "),
        (metadata(num_tokens="١٢"), "metadata cannot be read"),
        (metadata(created_at="nan"), "out of range"),
        (metadata(created_at="1e+999"), "metadata cannot be read"),
        (metadata(scope="[/nope]"), "metadata cannot be read"),
        (metadata(preview="x" * 20_000), "metadata cannot be read"),
        (metadata(preview="another"), "checksum of its metadata"),
        (metadata(model=7), "metadata cannot be read"),
        (lambda header: header.pop("layers.0.keys"), "too many or too few: layers.0.keys"),
        (lambda header: header.pop("token_ids"), "too many or too few: token_ids"),
        (lambda header: header.update(more=header["token_ids"]), "too many or too few: more"),
        (lambda header: header.pop("logits"), "layers.*, not |bytes of data"),
        (tensor("layers.0.keys", dtype="F16"), "layers.0.keys is F16"),
        (tensor("layers.0.keys", shape=[1, 2, 37, 8]), "layers.0.keys is BF16 of shape"),
        (tensor("layers.0.keys", shape=[2**62, 2**62]), "layers.0.keys is BF16 of shape"),
        (tensor("layers.0.keys", shape="all"), "header cannot be read"),
        (tensor("layers.0.keys", data_offsets=[0, 592]), "layers.* at bytes .*, not "),
        (tensor("layers.0.keys", data_offsets=[0, 2**64]), "header cannot be read|at bytes .*, not "),
        (tensor("layers.0.keys", data_offsets=[0]), "header cannot be read"),
        (tensor("layers.0.keys", more=1), "header cannot be read"),
        (relaid("{}"), "layout cannot be read"),
        (relaid("[" * 100_000), "layout cannot be read"),
        (relaid(LAYOUT.replace('"bfloat16"', '"float5"')), "tensor of float5"),
        (relaid(LAYOUT.replace('"heads":2', '"heads":0')), "tensor of bfloat16 of shape"),
        (relaid(LAYOUT.replace('"heads":2', '"heads":-2')), "tensor of bfloat16 of shape"),
        (relaid(LAYOUT.replace('"heads":2', f'"heads":{2**62}')), "layers.* is BF16 of shape"),
        (relaid(LAYOUT.replace('"1.keys"', '"0.keys"')), "a tensor twice"),
        (relaid('{"version":1,"groups":[],"logits":[25,"float32"]}'), "holds no tensor"),
        (relaid('{"version":1,"groups":[],"logits":[0,"float32"]}'), "holds no tensor|of shape"),
    ],
)
def test_what_does_not_agree_is_one_clear_error(sound: bytes, path: Path, change: Change, problem: str) -> None:
    header, data = split(sound)
    change(header)
    path.write_bytes(joined(header, data))
    with pytest.raises((StoreCorrupt, StoreFormatError, SettingsError), match=f"(?s)^{path}.*({problem})") as caught:
        check(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda header: header["__metadata__"].pop("states"),
            "layout has states and it has none, or the other way round",
        ),
        (metadata(states=""), "metadata cannot be read"),
        (metadata(states="16,32,x"), "metadata cannot be read"),
        (metadata(states="0,32,37"), "metadata cannot be read"),
        (metadata(states="16,99999999999"), "metadata cannot be read"),
        (metadata(states="32,16,37"), "at impossible positions"),
        (metadata(states="16,38,37"), "at impossible positions"),
        (metadata(states="16,32,36"), "at impossible positions"),
        (metadata(states="16,37"), "is .* of shape"),
        (lambda header: header.pop("layers.2.conv0"), "too many or too few: layers.2.conv0"),
        (tensor("layers.3.recurrent0", shape=[2, 2, 4, 5]), "layers.3.recurrent0 is F32 of shape"),
        (tensor("layers.3.recurrent0", dtype="BF16"), "layers.3.recurrent0 is BF16 of shape"),
        (relaid(HYBRID.replace('"3.conv0"', '"2.conv0"')), "a tensor twice"),
        (relaid(HYBRID.replace('"3.conv0"', '"0.keys"')), "holds no tensor, or one twice"),
        (relaid(HYBRID.replace("[6,3]", "[6,0]")), "tensor of bfloat16 of shape"),
        (relaid(HYBRID.replace("[6,3]", "[6,-3]")), "tensor of bfloat16 of shape"),
        (relaid(HYBRID.replace('"rows":6', '"rows":5')), "rows that do not fit"),
        (relaid(HYBRID.replace('"rows":6', '"rows":0')), "rows that do not fit"),
        (relaid(LAYOUT, states=None), "metadata cannot be read|other way round"),
    ],
)
def test_states_that_do_not_agree_are_one_clear_error(hybrid: bytes, path: Path, change: Change, problem: str) -> None:
    header, data = split(hybrid)
    change(header)
    path.write_bytes(joined(header, data))
    with pytest.raises(StoreCorrupt, match=f"(?s)^{path}.*({problem})") as caught:
        check(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (struct.pack("<Q", 2**64 - 1) + OURS, "its header alone claims 18446744073709551615"),
        (struct.pack("<Q", len(OURS) + 1) + OURS, "its header alone claims"),
        (joined(b"[" + OURS + b"]", b""), "header cannot be read"),
        (joined(b'{"__metadata__":' + OURS + b"[" * 100_000, b""), "cannot be read"),
        (joined(OURS + b"\xff\xfe", b""), "header cannot be read"),
        (joined(b'{"\\ud800":' + OURS + b"}", b""), "header cannot be read"),
        (joined(OURS + b" " * (5 << 20), b""), "its header alone claims"),
    ],
)
def test_a_damaged_header_is_one_clear_error(path: Path, data: bytes, problem: str) -> None:
    path.write_bytes(data)
    with pytest.raises(StoreCorrupt, match=problem):
        check(path)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\0" * 7, bytes(8), bytes(100), b"import torch\n" * 50, b"GGUF\3\0\0\0" + bytes(100)),
        *(struct.pack("<Q", 2**64 - 1), struct.pack("<Q", 2) + b"{"),
        *(joined(header, b"") for header in (b"{}", b"[]", b"\xff\xfe", b" " * (5 << 20), b'{"format":"pt"}')),
    ],
)
def test_a_file_of_another_program_is_told_so_whatever_it_holds(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(SettingsError, match="`diskprefix export` did not write it"):
        check(path)


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_truncated_file_is_one_clear_error(sound: bytes, path: Path, cut: int) -> None:
    for data in (sound[:-cut], sound + bytes(cut)):
        path.write_bytes(data)
        with pytest.raises(StoreCorrupt, match="bytes of data, its tensors"):
            check(path)


def test_a_flipped_bit_anywhere_in_the_data_is_found(sound: bytes, hybrid: bytes, path: Path) -> None:
    for whole in (sound, hybrid):
        _, data = split(whole)
        for at in range(len(whole) - len(data), len(whole), 7):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << (at % 8)
            path.write_bytes(flipped)
            with pytest.raises(StoreCorrupt, match="checksum of"):
                check(path)


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 1e300])
def test_a_time_that_cannot_be_is_refused(sound: bytes, path: Path, seconds: float) -> None:
    header, data = split(sound)
    start = header["nodes.prefill_s"]["data_offsets"][0]
    path.write_bytes(with_checksum(header, data[:start] + struct.pack("<d", seconds) + data[start + 8 :]))
    with pytest.raises(StoreCorrupt, match="out of range"):
        check(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (("none", "no such file"), ("pipe", "not a file"), (".", "not a file")):
        with pytest.raises(SettingsError, match=problem):
            check(tmp_path / name)


def test_a_huge_sparse_file_takes_no_memory(sound: bytes, path: Path) -> None:
    """Everything agrees: the sizes with each other and with the file's length, which is all holes."""
    header, _ = split(sound)
    layout = LAYOUT.replace('"heads":2', f'"heads":{2**31}')
    relaid(layout)(header)
    shape = [1, 2**31, 37, 4]
    size = 2 * 2**31 * 37 * 4
    end = 0
    for name in sorted(header.keys() - {"__metadata__"}):
        old = header[name]["data_offsets"]
        is_huge = header[name]["shape"] == [1, 2, 37, 4]
        header[name]["shape"] = shape if is_huge else header[name]["shape"]
        header[name]["data_offsets"] = [end, end + (size if is_huge else old[1] - old[0])]
        end = header[name]["data_offsets"][1]
    path.write_bytes(joined(header, b""))
    os.truncate(path, path.stat().st_size + end)
    with within_memory(), pytest.raises(StoreCorrupt, match="blocks are larger than any"):
        check(path)


@contextmanager
def within_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "e.safetensors"


def sound_or_one_line(path: Path, data: bytes) -> None:
    """Never another exception, never much memory."""
    path.write_bytes(data)
    with within_memory():
        try:
            check(path)
        except (CacheError, SettingsError) as error:
            message = str(error)
        else:
            return
    assert message.startswith(str(path))
    assert message.isprintable()
    assert len(message) < 600


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(max_size=12)), min_size=1, max_size=4
    )
)
def test_any_bytes_changed_anywhere(sound: bytes, fuzzed: Path, edits: list[tuple[float, int, bytes]]) -> None:
    data = bytearray(sound)
    for where, kind, new in edits:
        at = int(where * len(data))
        if kind == 0:
            data[at : at + len(new)] = new
        elif kind == 1:
            data[at:at] = new
        elif kind == 2:
            del data[at : at + len(new)]
        else:
            del data[at:]
    sound_or_one_line(fuzzed, bytes(data))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["BF16", "I32", "0", "-1", "1e400", "9" * 30, "\ud800", LAYOUT, identity_of()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_of_the_header_changed(sound: bytes, hybrid: bytes, fuzzed: Path, data: st.DataObject) -> None:
    header, rest = split(data.draw(st.sampled_from([sound, hybrid])))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = header
        for _ in range(data.draw(st.integers(0, 2))):
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            inner = place[data.draw(st.sampled_from(keys))] if keys else None
            if isinstance(inner, dict | list):
                place = inner
        if isinstance(place, dict):
            key = data.draw(st.sampled_from(sorted(place)) | st.text(max_size=5)) if place else "new"
            place[key] = data.draw(JSON)
        elif place:
            place[data.draw(st.integers(0, len(place) - 1))] = data.draw(JSON)
    sound_or_one_line(fuzzed, joined(header, rest))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_text_of_the_metadata_changed_with_its_checksum(
    sound: bytes, hybrid: bytes, fuzzed: Path, data: st.DataObject
) -> None:
    """A checksum does not find this, because whoever changed it knew how to compute one."""
    header, rest = split(data.draw(st.sampled_from([sound, hybrid])))
    values = header["__metadata__"]
    name = data.draw(st.sampled_from(sorted(values)))
    values[name] = data.draw(st.text(max_size=30) | st.integers(-5, 2**65).map(str) | st.just(LAYOUT))
    sound_or_one_line(fuzzed, with_checksum(header, rest))

"""A file from anybody: either it is a sound export, or one line says what is wrong with it."""

from __future__ import annotations

import base64
import json
import os
import struct
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.errors import SettingsError, StoreCorrupt, StoreFormatError
from diskprefix.prefixstore.packs.exchange import encoded_notes, import_pack
from diskprefix.prefixstore.packs.pack_file import MAX_PROMPTS, Manifest, PackNode, PackPrompt, PackReader, write_pack
from diskprefix.prefixstore.store.note_record import note_bytes, note_limit
from diskprefix.prefixstore.store.schema import EntryRecord, ModelRecord, NodeKind, RootRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tokens import root_hash
from tests.desk.conftest import Run, run  # noqa: F401 (a fixture)
from tests.prefixstore.packs.exported import (
    HYBRID,
    LAYOUT,
    TENANT,
    entry_of,
    export,
    identity_of,
    joined,
    sealed,
    split,
)
from tests.prefixstore.store.building import BLOCK, open_store, prompt


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return exported(tmp_path_factory.mktemp("sound"), LAYOUT)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return exported(tmp_path_factory.mktemp("hybrid"), HYBRID, checkpoints=(BLOCK, 2 * BLOCK))


def exported(folder: Path, layout: str, checkpoints: tuple[int, ...] = (), seed: int = 1) -> bytes:
    store = open_store(folder / "kv")
    pub = entry_of(store, prompt(seed, 2 * BLOCK + 5), layout=layout, checkpoints=checkpoints)
    store.publish(pub)
    data = export(store, pub, folder / "e.safetensors").read_bytes()
    store.close()
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "e.safetensors"


def check(path: Path) -> None:
    with PackReader.open(path) as reader:
        reader.read_nodes()
        reader.verify_payloads(lambda _num_bytes: None)


def test_a_sound_file_is_sound(sound: bytes, hybrid: bytes, path: Path) -> None:
    for data in (sound, hybrid):
        path.write_bytes(data)
        check(path)
        path.write_bytes(sealed(*split(data)))
        check(path)


def test_without_safetensors_one_line_says_what_to_install(
    sound: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(sound)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SettingsError, match=r"^a pack is read by safetensors; pip install safetensors$"):
        check(path)


Change = Callable[[dict[str, Any]], object]
"""Something that a header, or a manifest, is changed by."""


def metadata(**changes: object) -> Change:
    return lambda header: header["__metadata__"].update(changes)


def assert_refused(path: Path, problem: str) -> None:
    with pytest.raises((StoreCorrupt, StoreFormatError, SettingsError), match=f"^{path}.*({problem})") as caught:
        check(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def of(part: str, **changes: object) -> Change:
    return lambda manifest: manifest[part].update(changes)


def of_entry(**changes: object) -> Change:
    return lambda manifest: manifest["prompts"][0]["entry"].update(changes)


def ends_at(node: int, **changes: object) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        (prompt,) = manifest["prompts"]
        prompt["node"] = node
        prompt["entry"].update(changes)

    return change


def node(index: int, *changed: object, seconds: float = 0.5) -> Change:
    return lambda manifest: manifest["nodes"].__setitem__(index, [*changed, seconds])


def relaid(layout: str) -> Change:
    """Another layout, with the identity and the root that belong to it."""

    def change(manifest: dict[str, Any]) -> None:
        identity = identity_of(layout)
        manifest["root"] |= {"layout": layout, "identity": identity}
        manifest["prompts"][0]["entry"]["root"] = base64.b64encode(root_hash(identity)).decode()

    return change


def named(**changes: object) -> Change:
    """Other fields of the identity, with the root that belongs to it."""

    def change(manifest: dict[str, Any]) -> None:
        fields = json.loads(manifest["root"]["identity"]) | changes
        identity = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        manifest["root"] |= {"identity": identity, "block_size": fields["block_size"]}
        manifest["prompts"][0]["entry"]["root"] = base64.b64encode(root_hash(identity)).decode()

    return change


NO_PATH, NOT_ITS_ROOT, SIZES = (
    "nodes are not those of its prompts",
    "root is not the hash",
    "not as large as its manifest",
)
UNREADABLE = "layout cannot be read"


@pytest.mark.parametrize(
    ("whose", "change", "problem"),
    [
        ("header", metadata(format="pt"), "`diskprefix export` did not write it"),
        ("header", metadata(version="2\n"), r"version 2\\n, this diskprefix reads version 1"),
        ("header", metadata(manifest="{}"), "digest of its manifest"),
        ("header", lambda header: header["__metadata__"].pop("manifest"), "digest of its manifest"),
        ("header", lambda header: header.pop("token_ids"), "cut short, or no .safetensors file"),
        ("header", lambda header: header["digests"].update(header["signature"]), "cut short, or no .safetensors file"),
        ("header", of("token_ids", dtype="F32"), "its tensor token_ids is not a list of I32"),
        ("header", of("digests", dtype="I8"), "its tensor digests is not a list of U8"),
        ("header", of("payloads", dtype="F8_E4M3"), "its tensor payloads is not a list of U8"),
        ("header", lambda header: header["payloads"]["shape"].append(1), "its tensor payloads is not a list of U8"),
        ("plain", lambda manifest: manifest.pop("root"), "missing required field `root`"),
        ("plain", of_entry(root=base64.b64encode(b"r" * 16).decode()), NOT_ITS_ROOT),
        ("plain", of("root", identity=identity_of(weights="w2")), NOT_ITS_ROOT),
        ("plain", of("root", identity="[1]"), "damaged"),
        ("plain", of("root", identity="[" * 100_000), "damaged"),
        *(("plain", named(fingerprint=value), "not an identity") for value in ("text", 7, ["list"])),
        *(("plain", named(block_size=size), rf"it has blocks of {size} tokens") for size in (0, -1)),
        ("plain", of("root", layout=LAYOUT + " "), NOT_ITS_ROOT),
        ("plain", of("root", block_size=2 * BLOCK), NOT_ITS_ROOT),
        ("plain", of("root", tenant=TENANT), NOT_ITS_ROOT),
        ("plain", of("root", model=7), "Expected `str`"),
        ("plain", of_entry(num_tokens=36), NO_PATH),
        ("plain", lambda manifest: manifest["nodes"].clear(), NO_PATH),
        ("plain", lambda manifest: manifest["nodes"].pop(0), NO_PATH),
        ("plain", lambda manifest: manifest["nodes"].insert(0, manifest["nodes"][0]), NO_PATH),
        ("plain", node(0, 0, -1, BLOCK - 1), NO_PATH),
        ("plain", node(0, 0, -1, -BLOCK), NO_PATH),
        ("plain", node(0, 2, -1, BLOCK - 1), NO_PATH),
        ("plain", node(0, 7, -1, BLOCK), "Invalid enum value 7"),
        ("plain", node(0, int(NodeKind.GHOST), -1, BLOCK), NO_PATH),
        *(("plain", node(1, 0, parent, BLOCK), NO_PATH) for parent in (1, 2, -2, 7, 2**62)),
        ("plain", lambda manifest: manifest["prompts"].clear(), "it has 0 prompts"),
        ("plain", lambda manifest: manifest["prompts"].extend(1000 * manifest["prompts"]), "it has 1001 prompts"),
        ("plain", lambda manifest: manifest["prompts"].append(manifest["prompts"][0]), NO_PATH),
        *(("plain", ends_at(number), NO_PATH) for number in (-1, 1, 3, 2**40)),
        ("hybrid", ends_at(3, num_tokens=2 * BLOCK), NO_PATH),
        ("hybrid", node(2, 0, 1, BLOCK), NO_PATH),
        ("hybrid", node(1, int(NodeKind.GHOST), 0, 0), NO_PATH),
        ("hybrid", node(-1, int(NodeKind.GHOST), 2, 5), NO_PATH),
        ("plain", node(2, 1, 1, 2**70), "damaged"),
        ("plain", node(0, 0, -1, BLOCK, seconds=-1.0), NO_PATH),
        ("plain", node(0, 0, -1, BLOCK, seconds=1e300), NO_PATH),
        ("plain", relaid("[" * 100_000), "damaged"),
        ("plain", relaid(LAYOUT.replace('"bfloat16"', '"float5"')), UNREADABLE),
        ("plain", relaid(LAYOUT.replace('"heads":2', '"heads":0')), UNREADABLE),
        ("plain", relaid(LAYOUT.replace('"heads":2', f'"heads":{2**62}')), SIZES),
        ("plain", relaid(HYBRID), SIZES),
        ("plain", relaid('{"version":1,"groups":[],"logits":[0,"float32"]}'), SIZES),
        ("hybrid", relaid(LAYOUT), NO_PATH),
        ("hybrid", lambda manifest: manifest["nodes"].pop(1), NO_PATH),
        ("hybrid", node(1, 2, 3, 0), NO_PATH),
        ("hybrid", node(1, 2, 0, BLOCK), NO_PATH),
        ("hybrid", node(4, 0, 2, 5), NO_PATH),
        ("hybrid", relaid(HYBRID.replace("[6,3]", "[6,0]")), SIZES),
        ("hybrid", relaid(HYBRID.replace("[6,3]", "[6,-3]")), UNREADABLE),
        ("hybrid", relaid(HYBRID.replace('"rows":6', '"rows":5')), UNREADABLE),
        ("hybrid", relaid(HYBRID.replace('"rows":6', '"rows":0')), UNREADABLE),
    ],
)
def test_a_contradictory_manifest_raises_one_clear_error(
    sound: bytes, hybrid: bytes, path: Path, whose: str, change: Change, problem: str
) -> None:
    header, data = split(hybrid if whose == "hybrid" else sound)
    if whose == "header":
        change(header)
        path.write_bytes(joined(header, data))
    else:
        manifest = json.loads(header["__metadata__"]["manifest"])
        change(manifest)
        header["__metadata__"]["manifest"] = json.dumps(manifest)
        path.write_bytes(sealed(header, data))
    assert_refused(path, problem)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "is empty"),
        (b"import torch\n" * 50, "is a text"),
        (("é" * 300).encode(), "is a text"),
        (b"GGUF\3\0\0\0" + bytes(100), "is a .gguf model"),
        *((data, "is no .safetensors file") for data in (b"\0" * 7, bytes(8), bytes(100), b"\x89PNG\r\n" + bytes(9))),
        *((struct.pack("<Q", size) + end, "is no .safetensors file") for size, end in ((2**64 - 1, b"{"), (9, b""))),
        *((joined(header, b""), "is no .safetensors file") for header in (b"[]", b"\xff\xfe", b" " * (5 << 20))),
    ],
)
def test_import_names_the_kind_of_a_foreign_file_and_the_expected_kind(path: Path, data: bytes, kind: str) -> None:
    path.write_bytes(data)
    assert_refused(path, f"it {kind}; import takes files that `diskprefix export` wrote")


@pytest.mark.parametrize("data", [struct.pack("<Q", 2) + b"{", *(joined(h, b"") for h in (b"{}", b'{"format":"pt"}'))])
def test_a_file_of_tensors_that_no_export_wrote_is_told_so(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert_refused(path, "`diskprefix export` did not write it|it is cut short, or no .safetensors file")


def test_a_truncated_file_and_a_flipped_bit_anywhere_in_the_data_are_found(
    sound: bytes, hybrid: bytes, path: Path
) -> None:
    for whole in (sound, hybrid):
        for data in (whole[:-1], whole + b"\0"):
            path.write_bytes(data)
            assert_refused(path, "it is cut short")
        _, data = split(whole)
        for at in range(len(whole) - len(data), len(whole), 7):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << (at % 8)
            path.write_bytes(flipped)
            assert_refused(path, "digest of")


def test_exchanged_parts_of_two_packs_are_found(sound: bytes, hybrid: bytes, path: Path, tmp_path: Path) -> None:
    """Parts of the same size from another pack of the same model, and the files of two models."""
    other, (header, data) = exported(tmp_path / "other", LAYOUT, seed=2), split(sound)
    other_header, other_data = split(other)
    assert {name: header[name] for name in ("payloads", "digests")} == {
        name: other_header[name] for name in ("payloads", "digests")
    }
    for name in ("token_ids", "payloads", "digests"):
        start, stop = header[name]["data_offsets"]
        path.write_bytes(joined(header, data[:start] + other_data[start:stop] + data[stop:]))
        assert_refused(path, "digest of")
    path.write_bytes(joined(split(hybrid)[0], data))
    assert_refused(path, "cut short|digest of")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe", "."):
        with pytest.raises(SettingsError, match="no such file"):
            check(tmp_path / name)


class Counted(tuple[PackNode, ...]):
    """Nodes that count how often one of them is looked up."""

    lookups = 0

    def __getitem__(self, index: Any) -> Any:
        self.lookups += 1
        return super().__getitem__(index)


def deep(path: Path, num_nodes: int) -> Path:
    """A file with one long chain of blocks, and a prompt that ends with each of the last ones."""
    root = RootRecord(model="tiny", block_size=BLOCK, layout=LAYOUT, created_at=0.0, identity=identity_of(LAYOUT))
    first = max(0, num_nodes - MAX_PROMPTS)
    entries = [
        EntryRecord(
            root=root_hash(root.identity), num_tokens=BLOCK * (end + 1), scope="full", preview="", created_at=0.0
        )
        for end in range(first, num_nodes)
    ]
    prompts = tuple(PackPrompt(end, entry) for end, entry in enumerate(entries, first))
    manifest = Manifest(root, prompts, tuple(PackNode(NodeKind.BLOCK, at - 1, BLOCK, 0.5) for at in range(num_nodes)))
    payloads = (memoryview(bytes(size)) for size in manifest.payload_bytes())
    write_pack(path, manifest, prompt(7, BLOCK * num_nodes), payloads, force=False)
    return path


def test_the_work_over_a_pack_grows_as_its_nodes_however_many_prompts_pass_each(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, has = list[bytes](), Snapshot.has

    def counted(self: Snapshot, name: bytes, *node: Any) -> bool:
        looked_up.append(name)
        return has(self, name, *node)

    monkeypatch.setattr(Snapshot, "has", counted)
    with PackReader.open(deep(path, 150)) as reader, closing(open_store(path.parent / "kv")) as store:
        nodes = Counted(reader.manifest.nodes)
        reader.manifest = replace(reader.manifest, nodes=nodes)
        reader.read_nodes()
        assert nodes.lookups < 10 * len(nodes)
        import_pack(store, reader, advance=lambda _: None, is_unverified=False)
        assert (store.counts()["entries"], store.counts()["blocks"]) == (150, 150)
    assert len(looked_up) <= 2 * 150


def test_the_model_of_a_pack_is_known_before_its_nodes_are_looked_at(
    sound: bytes,
    path: Path,
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    header, data = split(sound)
    manifest = json.loads(header["__metadata__"]["manifest"])
    named(block_size=1)(manifest)
    header["__metadata__"]["manifest"] = json.dumps(manifest)
    path.write_bytes(sealed(header, data))
    with closing(open_store(tmp_path / "kv")) as store, store.changes() as changes:
        changes.put_model(ModelRecord(model="ours", identity=identity_of(LAYOUT)))
    refused = run("import", path, "--kv-cache-dir", tmp_path / "kv")
    refused.assert_refused(2, "differs from 'ours' here in block_size")
    run("import", path, "--kv-cache-dir", tmp_path / "kv", "--force").assert_refused(4, NO_PATH)


def test_a_pack_whose_notes_would_push_each_other_out_is_refused(path: Path) -> None:
    with PackReader.open(deep(path, 300)) as reader, closing(open_store(path.parent / "kv")) as store:
        reader.read_nodes()
        assert note_bytes(4 * BLOCK * 300) < note_limit(store.budget_bytes)
        with pytest.raises(SettingsError, match="300 prompts, too many to note"):
            encoded_notes(store, reader)

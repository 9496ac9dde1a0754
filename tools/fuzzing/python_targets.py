"""The targets in Python: readers of files, records, objects of a bucket, and replies.

Each takes any bytes, and raises only for a fault in the tested code. They run below Atheris, which chooses bytes by
what they reach, and in the tests, which replay the corpus.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diskprefix.daemon.api.dialect import json_text
from diskprefix.daemon.api.error_forms import openai_error
from diskprefix.daemon.catalogue.models_file import read_models_file
from diskprefix.daemon.cli.options import policy_value
from diskprefix.daemon.cli.policy_file import read_policy
from diskprefix.errors import DiskPrefixError
from diskprefix.native import library
from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.packs.pack_file import PackReader
from diskprefix.prefixstore.remote.bundle import BundleSlot, decode_bundle, encode_bundle, slot_nodes, slot_path
from diskprefix.prefixstore.remote.signing import signed, verified
from diskprefix.prefixstore.store.codec.codec import Codec, Element, Piece, decode_piece, encode_piece
from diskprefix.prefixstore.store.codec.planes import BF16, FP16, FP32, join_with, join_with_numpy
from diskprefix.prefixstore.store.note_record import NoteKind, NoteTimes, StoredNote, decode_note, encode_note, note_key
from diskprefix.prefixstore.store.pieces import PayloadLayout, split_payload
from diskprefix.prefixstore.store.schema import (
    EntryRecord,
    ModelRecord,
    NodeKind,
    NodeRecord,
    PromptRecord,
    RootRecord,
    decode_node,
    decode_record,
    decode_usage,
    encode_node,
    encode_record,
)
from diskprefix.runtime.files.gguf.gguf_file import read_tensors
from diskprefix.tokens import NO_PROMPT, TokenPath, checksum
from tests.daemon.chat.output.replies import NAMES, REPLIES, format_named, read, tool
from tests.prefixstore.packs import exported
from tests.prefixstore.packs.exported import HYBRID, LAYOUT, entry_of, export
from tests.prefixstore.store.building import BLOCK, layout_of, open_store, payload_of, prompt
from tests.runtime.files.gguf.test_gguf_refusals import write_sample
from tools.fuzzing import gguf_tables

Check = Callable[[bytes], None]


@dataclass(frozen=True)
class PythonTarget:
    """`opened` returns the check of one input, which may write into the folder; `seeds` returns sound inputs, and
    `words` texts that inputs are made of."""

    opened: Callable[[Path], Check]
    seeds: Callable[[Path], Iterable[bytes]]
    words: Callable[[], Iterable[str]] = tuple


class Wrong(Exception):
    """A fault in the tested code."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def refused(act: Callable[[], object]) -> None:
    """Acts. An error of the project is right if its message is one line that JSON can hold."""
    try:
        act()
    except DiskPrefixError as error:
        require(len(error.message.splitlines()) == 1, f"an error of several lines: {error.message!r}")
        json_text(openai_error(error))


_SPARE_BYTES = 1 << 19
"""Memory beside a file's size: objects of Python for names that are there, and the buffer of a file."""


def _gguf(folder: Path) -> Check:
    """Reading takes no more memory than the file has bytes, and no tensor or array ends after the end of the file."""
    path = folder / "fuzzed.gguf"

    def act() -> None:
        header, tensors = read_tensors([path])
        for tensor in tensors:
            require(tensor.offset + tensor.content().nbytes <= path.stat().st_size, "a tensor ends behind the file")
        for array in header.arrays.values():
            require(array.end <= path.stat().st_size, "an array ends behind the file")
            refused(partial(getattr, array, "content"))

    def check(data: bytes) -> None:
        # ext4 waits for the disk when a file is cut to nothing and written again.
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        tracemalloc.start()
        try:
            refused(act)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        require(most <= len(data) + _SPARE_BYTES, f"{most} bytes of memory for a file of {len(data)}")

    return check


def _gguf_file(folder: Path) -> Iterable[bytes]:
    yield write_sample(folder / "whole.gguf").read_bytes()


def _pack_file(folder: Path) -> Check:
    """The first byte says whether the file gets the digest that its header and index need."""
    path = folder / "fuzzed.safetensors"

    def act() -> None:
        with PackReader.open(path) as reader:
            reader.read_nodes()
            reader.verify_payloads(lambda _num_bytes: None)

    def check(data: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(_with_digest(data[1:]) if data[:1] > b"\x7f" else data[1:])
        refused(act)

    return check


def _with_digest(data: bytes) -> bytes:
    """Returns an exported file with the digest of its manifest, as far as it has one."""
    with suppress(
        ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, UnicodeEncodeError, RecursionError
    ):
        return exported.sealed(*exported.split(data))
    return data


def _pack_files(folder: Path) -> Iterable[bytes]:
    for number, (layout, checkpoints) in enumerate(((LAYOUT, ()), (HYBRID, (BLOCK,)))):
        store = open_store(folder / f"kv-{number}")
        pub = entry_of(store, prompt(1, BLOCK + 5), layout=layout, checkpoints=checkpoints)
        store.publish(pub)
        yield b"\xff" + export(store, pub, folder / f"{number}.safetensors").read_bytes()
        store.close()


_KEY = NamespaceKey.of(b"the key of the fuzzed bucket")
_PROMPT = PromptNodes(TokenPath(7, b"r" * 16, prompt(1, 3 * BLOCK + 5), BLOCK), PayloadLayout.parse(layout_of(512, 64)))
_SLOTS = (
    BundleSlot(0, 2),
    BundleSlot(2, 3, has_tail=True),
    BundleSlot(0, 3),
)


def _bucket_object(_folder: Path) -> Check:
    """The first byte says which place of the prompt is read, how much of it is near, and whether the input is the
    content of an object that is signed, or the object."""

    def check(data: bytes) -> None:
        choice, content = (data[0], data[1:]) if data else (0, b"")
        slot, num_near = _SLOTS[choice % 3], choice // 4 % 4
        path = slot_path(_KEY, _PROMPT, slot)
        whole = signed(_KEY, path, content) if choice & 16 else content
        refused(lambda: decode_bundle(_KEY, _PROMPT, slot, path, memoryview(whole), num_near))

    return check


def _bundles(_folder: Path) -> Iterable[bytes]:
    for number, slot in enumerate(_SLOTS):
        payloads = []
        for node in slot_nodes(_PROMPT, slot):
            pieces = _PROMPT.pieces(node)
            payload = payload_of(_PROMPT.token_ids[node.position : node.end], sum(piece.num_bytes for piece in pieces))
            payloads.append((node, split_payload(payload, pieces)))
        path = slot_path(_KEY, _PROMPT, slot)
        whole = encode_bundle(_KEY, _PROMPT, path, payloads, 5.0)
        yield bytes([number]) + whole
        yield bytes([16 + number]) + verified(_KEY, path, whole)


_FORMATS = {Element.BF16: BF16, Element.FP16: FP16, Element.FP32: FP32}


def _stored_piece(_folder: Path) -> Check:
    """Two bytes say the form of the piece; its checksum is made right. Planes are joined by numpy too."""
    operators = library.planes()

    def check(data: bytes) -> None:
        if len(data) < 3:
            return
        piece = _piece_of(data)
        stored = memoryview(data[3:])
        out = np.zeros((piece.num_rows, piece.row_bytes), np.uint8)
        refused(lambda: decode_piece(stored, piece, None, out))
        form = _FORMATS.get(piece.element)
        if (
            operators is not None
            and form is not None
            and not piece.row_bytes % form.item_bytes
            and len(stored) > 48
            and out.size
        ):
            joined = [out, np.zeros_like(out)]
            bits, planes = stored[16], stored[48:]
            is_right = join_with(operators, form, bits, planes, joined[0])
            require(is_right == join_with_numpy(form, bits, planes, joined[1]), "numpy and C++ do not agree on planes")
            require(not is_right or bool((joined[0] == joined[1]).all()), "numpy and C++ join planes differently")

    return check


def _piece_of(data: bytes) -> Piece:
    return Piece(data[0] % 4 + 1, int.from_bytes(data[1:3], "little") % 6000, Element(data[0] // 4 % len(Element)))


def _stored_pieces(_folder: Path) -> Iterable[bytes]:
    for element in Element:
        for width in (256, 5000):
            head = bytes([element * 4 + 1]) + struct.pack("<H", width)
            piece = _piece_of(head)
            values = np.random.default_rng(1).normal(size=piece.num_bytes // 4).astype("<f4").view(np.uint8)
            raw = np.ascontiguousarray(np.resize(values, piece.num_bytes)).data
            for codec in Codec:
                yield head + encode_piece(raw, piece, codec, None)


_RECORDS = (RootRecord, ModelRecord, EntryRecord, PromptRecord)
_NOTE = note_key(b"r" * 16, NoteKind.RESPONSE, "resp_1")


def _records(_folder: Path) -> Check:
    """The first byte says which record of the store it is. Its checksum is made right."""

    def check(data: bytes) -> None:
        choice, content = (data[0], data[1:]) if data else (0, b"")
        value = _checked_record(_NOTE, content)
        match choice % 7:
            case 0:
                refused(lambda: decode_node(b"n" * 16, _checked_node(content)))
            case 1:
                refused(lambda: decode_note(_NOTE, value))
                StoredNote.of(_NOTE, value).times.is_expired(5.0)
            case 3:
                refused(lambda: decode_usage(content))
            case _:
                kind: Any = _RECORDS[choice // 7 % len(_RECORDS)]
                refused(lambda: decode_record(kind, _NOTE, value))

    return check


def _checked_record(key: bytes, packed: bytes) -> bytes:
    return struct.pack("<Q", checksum(key + packed)) + packed


def _checked_node(content: bytes) -> bytes:
    header, token_ids = content[:_NODE_BYTES], content[_NODE_BYTES:]
    return header + struct.pack("<Q", checksum(b"n" * 16 + header + token_ids)) + token_ids


_NODE_BYTES = 64


def _record_seeds(_folder: Path) -> Iterable[bytes]:
    node = NodeRecord(b"p" * 16, b"r" * 16, 16, prompt(1, 16), NodeKind.BLOCK, 2, 1000, 500)
    encoded = encode_node(b"n" * 16, node)
    yield b"\0" + encoded[:_NODE_BYTES] + encoded[_NODE_BYTES + 8 :]
    yield b"\1" + encode_note(_NOTE, b"a note" * 9, NoteTimes(1.0, 2.0, 60), NO_PROMPT)[8:]
    yield b"\3" + bytes(48)
    entry = EntryRecord(root=b"r" * 16, num_tokens=5, scope="full", preview="text", created_at=5.0)
    root = RootRecord(model="tiny", block_size=16, layout=LAYOUT, created_at=5.0)
    seen = PromptRecord(came_at=1.0, parent=b"p" * 16, rest=bytes(40), ttl_s=60)
    for choice, record in ((19, entry), (5, root), (26, seen)):
        yield bytes([choice]) + encode_record(_NOTE, record)[8:]


def _toml(act: Callable[[Path], object], folder: Path) -> Check:
    path = folder / "fuzzed.toml"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        refused(lambda: act(path))

    return check


def _policies(_folder: Path) -> Iterable[bytes]:
    yield b'disk_prefix_cache = "auto:30"\nkv_cache_budget = "20GiB"\nblock_size = 256\n'
    yield b'kv-cache-gate = "off"\nidle_unload = "30m"\nrouter = true\n'


def _models(_folder: Path) -> Iterable[bytes]:
    yield b'[a]\nmodel = "a.gguf"\naliases = ["b"]\npin = true\nidle_unload = "30m"\n[c]\nmodel = "org/c"\n'
    yield b'[a]\nmodel = "a"\nweights = "native"\nchat-template = "t.jinja"\n'


_TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("special_function", arg1={"type": "integer"}),
]


def _reply(_folder: Path) -> Check:
    """Four bytes choose the format, whether there are tools, and a cut. A reply is the same however it is cut."""

    def check(data: bytes) -> None:
        if len(data) < 4:
            return
        text = data[4:].decode(errors="replace")
        format, tools = format_named(NAMES[data[0] % len(NAMES)]), _TOOLS if data[1] & 1 else []
        opened = "<think>" if data[1] & 2 else ""
        step = data[2] % 7 + 1
        whole = read(format, [text], tools, opened)
        pieces = [text[: data[3]], *(text[at : at + step] for at in range(data[3], len(text), step))]
        require(read(format, pieces, tools, opened) == whole, "a reply that is cut is read otherwise")

    return check


def _replies(_folder: Path) -> Iterable[bytes]:
    for case in REPLIES:
        yield bytes([NAMES.index(case["family"]), 1, 3, 9]) + case["text"].encode()


def _reply_words() -> Iterable[str]:
    return sorted({tag for name in NAMES for tag in getattr(getattr(format_named(name), "family", None), "tags", ())})


TARGETS: dict[str, PythonTarget] = {
    "bucket_object": PythonTarget(_bucket_object, _bundles),
    "pack_file": PythonTarget(_pack_file, _pack_files),
    "gguf": PythonTarget(_gguf, _gguf_file),
    "gguf_tables": PythonTarget(partial(gguf_tables.check, refused), gguf_tables.seeds),
    "models_toml": PythonTarget(partial(_toml, read_models_file), _models),
    "policy_toml": PythonTarget(partial(_toml, lambda path: read_policy(path, policy_value)), _policies),
    "records": PythonTarget(_records, _record_seeds),
    "reply": PythonTarget(_reply, _replies, _reply_words),
    "stored_piece": PythonTarget(_stored_piece, _stored_pieces),
}

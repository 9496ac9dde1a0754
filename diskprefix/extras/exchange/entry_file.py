"""Reads and writes a saved prompt as a `.safetensors` file. `README.md` describes the format.

The checksums find damage. They do not prevent forgery.
"""

from __future__ import annotations

import codecs
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from diskprefix.errors import SettingsError, StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.identity import identity_fields, identity_of_tenant, identity_text
from diskprefix.printable import escaped, first_line
from diskprefix.store.folder import sync
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import MAX_PREFILL_S, EntryRecord, NodeKind, RootRecord
from diskprefix.tokens import TokenIds, checksum, root_hash
from diskprefix.user_key import user_tenant
from diskprefix.values import Tenant

FORMAT, VERSION = "diskprefix-entry", "1"
_TENSORS = {"token_ids": ("I32", 4), "payloads": ("U8", 1), "checksums": ("U8", 1)}
"""Dtype and bytes of an element of each tensor."""


class EntryNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the prompt: `num_tokens` tokens from `position` on. `prefill_s` is its compute time, 0 if unknown."""

    kind: NodeKind
    position: int
    num_tokens: int
    prefill_s: float

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class Manifest(msgspec.Struct, frozen=True):
    """The content of a file. `nodes` are in the order of their payloads: each block, then its checkpoints. `is_own`:
    the prompt belonged to the programs of the user who exported it."""

    root: RootRecord
    entry: EntryRecord
    nodes: tuple[EntryNode, ...]
    is_own: bool = False

    def of_tenant(self, tenant: Tenant) -> Manifest:
        """Returns the manifest of the same prompt as this `tenant` stores it."""
        identity = identity_of_tenant(self.root.identity, str(tenant))
        root = msgspec.structs.replace(self.root, identity=identity, tenant=str(tenant))
        entry = msgspec.structs.replace(self.entry, root=root_hash(identity))
        return msgspec.structs.replace(self, root=root, entry=entry)

    def require_sound(self) -> None:
        """Raises `StoreCorrupt` for a manifest that no export writes."""
        identity_fields(self.root.identity)
        fields = json.loads(self.root.identity)
        own = (self.root.block_size, fields["layout_version"], self.root.layout, self.root.tenant)
        is_named = identity_text(fields["fingerprint"], *own) == self.root.identity
        if not is_named or root_hash(self.root.identity) != self.entry.root:
            raise StoreCorrupt("its root is not the hash of its identity")
        Tenant.parse(self.root.tenant)
        if self.root.block_size < 1:
            raise StoreCorrupt(f"it has blocks of {self.root.block_size} tokens")
        if not self._is_path() or not all(0 <= node.prefill_s <= MAX_PREFILL_S for node in self.nodes):
            raise StoreCorrupt("its nodes are not those of a prompt")

    def payload_bytes(self) -> list[int]:
        """Returns the size of each node's raw payload. Raises `StoreCorrupt`."""
        layout = PayloadLayout.parse(self.root.layout)
        return [layout.payload_bytes(node.num_tokens, node.kind) for node in self.nodes]

    def _is_path(self) -> bool:
        """Returns whether the nodes form one path. Only the last may be a tail, or a partial block of a layout without
        states."""
        size, has_states = self.root.block_size, bool(PayloadLayout.parse(self.root.layout).states)
        position = 0
        for node in self.nodes:
            is_last = node is self.nodes[-1]
            if node.kind == NodeKind.BLOCK:
                is_right = node.num_tokens == size or (is_last and not has_states and 0 < node.num_tokens < size)
            elif node.kind in (NodeKind.TAIL, NodeKind.CHECKPOINT):
                is_right = 0 <= node.num_tokens < size and (is_last if node.kind == NodeKind.TAIL else has_states)
            else:
                is_right = False
            if node.position != position or not is_right:
                return False
            position = node.end if node.kind == NodeKind.BLOCK else position
        places = [(node.position, node.num_tokens, node.kind) for node in self.nodes]
        is_whole = bool(self.nodes) and self.nodes[-1].end == self.entry.num_tokens
        return is_whole and places == sorted(set(places), key=lambda place: place[:2])


class EntryReader:
    """Reads a file. Opening it checks manifest, sizes and token ids (int32), reading a payload checks that payload."""

    def __init__(self, path: Path, file: Any) -> None:
        """Takes an open `file` of the safetensors library. Raises as `open`."""
        self.path, self._file = path, file
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise SettingsError("`diskprefix export` did not write it")
        if metadata.get("version") != VERSION:
            version = escaped(metadata.get("version", "")[:20])
            raise StoreFormatError(f"its format is version {version}, this diskprefix reads version {VERSION}")
        text = metadata.get("manifest", "")
        for name, (dtype, _) in _TENSORS.items():
            tensor = file.get_slice(name)
            if tensor.get_dtype() != dtype or len(tensor.get_shape()) != 1:
                raise StoreCorrupt(f"its tensor {name} is not a list of {dtype}, as its format says")
        self.token_ids: TokenIds = file.get_tensor("token_ids")
        *self._checksums, of_index = file.get_tensor("checksums").view("<u8").tolist()
        if _index_checksum(text, self.token_ids, self._checksums) != of_index:
            raise StoreCorrupt("the checksum of its manifest and token ids does not match")
        self.manifest = msgspec.json.decode(text, type=Manifest)
        self.manifest.require_sound()
        self._starts = list(accumulate(self.manifest.payload_bytes(), initial=0))
        self._payloads = file.get_slice("payloads")
        sizes = (len(self.token_ids), self._payloads.get_shape(), len(self._checksums))
        if sizes != (self.manifest.entry.num_tokens, [self._starts[-1]], len(self.manifest.nodes)):
            raise StoreCorrupt("its tensors are not as large as its manifest says")

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[EntryReader]:
        """Raises `SettingsError` (no such file, or no export wrote it), `StoreFormatError` (another version),
        `StoreCorrupt` (damaged) or `StoreUnavailable` (cannot be read)."""
        with _naming(path):
            if not path.is_file():
                raise SettingsError("no such file")
            _require_tensors(path)
            file: Any = safe_open(path, "np")
        with file:
            with _naming(path):
                reader = cls(path, file)
            yield reader

    def give(self, *, mine: bool = False) -> None:
        """Gives a prompt of the exporting user's programs to this user's programs; with `mine` any prompt, without its
        salt. Raises `SettingsError` as `user_tenant`."""
        if mine:
            self.manifest = msgspec.structs.replace(self.manifest.of_tenant(user_tenant()), is_own=True)
        elif self.manifest.is_own:
            salts = Tenant.parse(self.manifest.root.tenant).ids[1:]
            self.manifest = self.manifest.of_tenant(Tenant((*user_tenant().ids, *salts)))

    def verify_payloads(self, advance: Callable[[int], None]) -> None:
        """Reads and checks all payloads, and reports their bytes to `advance`. Raises `StoreCorrupt`."""
        for index in range(len(self.manifest.nodes)):
            advance(len(self.read_payload(index)))

    def read_payload(self, index: int) -> memoryview:
        """Returns the raw payload of node number `index`, checked. Raises `StoreCorrupt`."""
        start, stop = self._starts[index : index + 2]
        payload: memoryview = self._payloads[start:stop].data
        with _naming(self.path):
            if checksum(payload) != self._checksums[index]:
                node = self.manifest.nodes[index]
                raise StoreCorrupt(f"the checksum of tokens {node.position} to {node.end} does not match")
        return payload


def write_entry(
    path: Path, manifest: Manifest, token_ids: TokenIds, payloads: Iterable[memoryview], *, force: bool
) -> int:
    """Writes a file that only its owner may read, with a raw payload for each node. Returns its size in bytes.

    Raises `SettingsError` if it exists, unless `force`, and `StoreUnavailable`. After an error no file is left.
    """
    text, token_ids, checksums = msgspec.json.encode(manifest).decode(), token_ids.astype("<i4"), list[int]()
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(prefix=".diskprefix-", dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(_header(text, token_ids.size, sum(manifest.payload_bytes()), 8 * len(manifest.nodes) + 8))
            file.write(token_ids.tobytes())
            for payload in payloads:
                file.write(payload)
                checksums.append(checksum(payload))
            file.write(np.array([*checksums, _index_checksum(text, token_ids, checksums)], "<u8").tobytes())
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
        if not force:
            refuse_existing(path)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return num_bytes


def _header(manifest: str, num_tokens: int, payload_bytes: int, checksum_bytes: int) -> bytes:
    """Returns length and header, padded to align the data. The library's own writer needs whole tensors in memory."""
    at, header = 0, dict[str, Any]({"__metadata__": {"format": FORMAT, "version": VERSION, "manifest": manifest}})
    sizes = (("token_ids", num_tokens), ("payloads", payload_bytes), ("checksums", checksum_bytes))
    for name, size in sizes:
        dtype, item_bytes = _TENSORS[name]
        start, at = at, at + size * item_bytes
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [start, at]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def refuse_existing(path: Path) -> None:
    """Raises `SettingsError` if there is a file."""
    if os.path.lexists(path):
        raise SettingsError(f"{path} exists; add --force to overwrite it, or choose another name with -o")


_HEADER_BYTES, _MAX_HEADER_BYTES = 8, 100_000_000
"""The length of a .safetensors file's header, which is JSON, and the most that the library reads."""
_LOOKED_AT_BYTES = 512


def _require_tensors(path: Path) -> None:
    """Raises `SettingsError` for a file that is not of the form .safetensors, and says what it seems to be."""
    with path.open("rb") as file:
        begin = file.read(_LOOKED_AT_BYTES)
    size = int.from_bytes(begin[:_HEADER_BYTES], "little")
    if len(begin) > _HEADER_BYTES and size <= _MAX_HEADER_BYTES and begin[_HEADER_BYTES:][:1] == b"{":
        return
    kind = "is no .safetensors file"
    if not begin:
        kind = "is empty"
    elif begin.startswith(b"GGUF"):
        kind = "is a .gguf model"
    elif _is_text(begin):
        kind = "is a text"
    raise SettingsError(f"it {kind}; import takes files that `diskprefix export` wrote")


def _is_text(begin: bytes) -> bool:
    try:
        # Not to its end: the last character may be cut.
        text = codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char.isspace() for char in text)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the file's name to errors of reading it, and translates errors of libraries."""
    try:
        yield
    except (SettingsError, StoreFormatError) as error:
        raise type(error)(f"{path}: {error.message}") from error
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error
    except (StoreCorrupt, SafetensorError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        cause = "it is cut short, or no .safetensors file: " if isinstance(error, SafetensorError) else ""
        raise StoreCorrupt(f"{path} is damaged: {cause}{escaped(first_line(error))}; export it again") from error


def _index_checksum(manifest: str, token_ids: TokenIds, checksums: list[int]) -> int:
    return checksum(manifest.encode() + token_ids.tobytes() + np.array(checksums, "<u8").tobytes())

"""One saved prompt as a `.safetensors` file: `export` writes it and `import` reads it. `README.md` gives the format.

The checksums find damage. They do not prevent forgery.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from diskprefix.errors import SettingsError, StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.identity import identity_text
from diskprefix.nouns import Tenant
from diskprefix.printable import escaped, first_line
from diskprefix.store.folder import sync
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import MAX_PREFILL_S, EntryRecord, Kind, RootRecord
from diskprefix.tokens import TokenIds, checksum, root_hash

FORMAT, VERSION = "diskprefix-entry", "1"

_TOKEN_IDS, _PAYLOADS, _CHECKSUMS = "token_ids", "payloads", "checksums"
_TENSORS = ((_TOKEN_IDS, "I32", 4), (_PAYLOADS, "U8", 1), (_CHECKSUMS, "U8", 1))
"""Name, dtype and bytes of an element. Checksums are U8 because they may lie at an odd offset."""


class EntryNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the prompt: `num_tokens` tokens from `position` on. `prefill_s` are the seconds that computing it took,
    0 if unknown."""

    kind: Kind
    position: int
    num_tokens: int
    prefill_s: float

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    def __str__(self) -> str:
        if self.kind == Kind.CHECKPOINT:
            return f"the checkpoint at token {self.end}"
        return f"tokens {self.position} to {self.end}"


class Manifest(msgspec.Struct, frozen=True):
    """The content of a file. `nodes` are in the order of their payloads: each block, then the checkpoints behind it."""

    root: RootRecord
    entry: EntryRecord
    nodes: tuple[EntryNode, ...]

    def require_sound(self) -> None:
        """Raises `StoreCorrupt` for a manifest that no export writes."""
        fields = json.loads(self.root.identity)
        own = (self.root.block_size, fields["layout_version"], self.root.layout, self.root.tenant)
        is_named = identity_text(fields["fingerprint"], *own) == self.root.identity
        if not is_named or root_hash(self.root.identity) != self.entry.root:
            raise StoreCorrupt("its root is not the hash of its identity")
        Tenant.parse(self.root.tenant)
        has_times = all(0 <= node.prefill_s <= MAX_PREFILL_S for node in self.nodes)
        if not has_times or not self._is_path():
            raise StoreCorrupt("its nodes are not those of a prompt")

    def payload_bytes(self) -> list[int]:
        """Returns the size of each node's raw payload. Raises `StoreCorrupt`."""
        layout = PayloadLayout.parse(self.root.layout)
        return [layout.payload_bytes(node.num_tokens, node.kind) for node in self.nodes]

    def _is_path(self) -> bool:
        """Only the last node may be a tail, or a partial block of a layout without states."""
        size, has_states = self.root.block_size, bool(PayloadLayout.parse(self.root.layout).states)
        places = [(node.position, node.num_tokens, node.kind) for node in self.nodes]
        position = 0
        for node in self.nodes:
            is_last = node is self.nodes[-1]
            if node.position != position or not 0 <= node.num_tokens <= size:
                return False
            if node.kind == Kind.BLOCK:
                position = node.end
                is_right = node.num_tokens == size or (is_last and not has_states and node.num_tokens > 0)
            else:
                is_right = node.num_tokens < size and (is_last if node.kind == Kind.TAIL else has_states)
            if not is_right:
                return False
        is_whole = bool(self.nodes) and self.nodes[-1].end == self.entry.num_tokens
        return is_whole and places == sorted(set(places), key=lambda place: place[:2])


@dataclass(frozen=True)
class EntryReader:
    """Reads a file. Manifest, sizes and token ids (int32) are checked when it is opened, each payload when it is
    read."""

    path: Path
    manifest: Manifest
    token_ids: TokenIds
    _file: Any
    _checksums: list[int]
    _starts: list[int]

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[EntryReader]:
        """Raises `SettingsError` (no such file, or no export wrote it), `StoreFormatError` (another version),
        `StoreCorrupt` (damaged) or `StoreUnavailable` (cannot be read)."""
        with _naming(path):
            if not path.is_file():
                raise SettingsError("no such file")
            try:
                file = safe_open(path, "np")
            except SafetensorError as error:
                raise StoreCorrupt(
                    f"it is cut short, or no .safetensors file ({escaped(first_line(error))})"
                ) from error
        with file:
            with _naming(path):
                reader = cls._checked(path, file)
            yield reader

    @classmethod
    def _checked(cls, path: Path, file: Any) -> EntryReader:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise SettingsError("`diskprefix export` did not write it")
        if metadata.get("version") != VERSION:
            version = escaped(metadata.get("version", "")[:20])
            raise StoreFormatError(f"its format is version {version}, this diskprefix reads version {VERSION}")
        text = metadata.get("manifest", "")
        token_ids, checksums = file.get_tensor(_TOKEN_IDS), file.get_tensor(_CHECKSUMS)
        *of_nodes, of_index = checksums.view("<u8").tolist()
        if _index_checksum(text, token_ids.tobytes(), of_nodes) != of_index:
            raise StoreCorrupt("the checksum of its manifest and token ids does not match")
        manifest = msgspec.json.decode(text, type=Manifest)
        manifest.require_sound()
        starts = list(accumulate(manifest.payload_bytes(), initial=0))
        sizes = (token_ids.shape, token_ids.dtype, file.get_slice(_PAYLOADS).get_shape(), len(of_nodes))
        if sizes != ((manifest.entry.num_tokens,), np.int32, [starts[-1]], len(manifest.nodes)):
            raise StoreCorrupt("its tensors are not as large as its manifest says")
        return cls(path, manifest, token_ids, file, of_nodes, starts)

    def verify_payloads(self, advance: Callable[[int], None]) -> None:
        """Reads and checks all payloads, and tells their bytes. Raises `StoreCorrupt`."""
        for index in range(len(self.manifest.nodes)):
            advance(len(self.read_payload(index)))

    def read_payload(self, index: int) -> memoryview:
        """Returns the raw payload of node number `index`, checked. Raises `StoreCorrupt`."""
        start, end = self._starts[index : index + 2]
        payload: memoryview = self._file.get_slice(_PAYLOADS)[start:end].data
        with _naming(self.path):
            if checksum(payload) != self._checksums[index]:
                raise StoreCorrupt(f"the checksum of {self.manifest.nodes[index]} does not match")
        return payload


def write_entry(
    path: Path, manifest: Manifest, token_ids: TokenIds, payloads: Iterable[memoryview], *, force: bool
) -> int:
    """Writes the file under a temporary name, then renames it. Only its owner may read it. `payloads` are raw, one for
    each node. Returns the size of the file in bytes.

    Raises `SettingsError` if it exists, unless `force`, and `StoreUnavailable`. After an error no file is left.
    """
    text, ids = msgspec.json.encode(manifest).decode(), token_ids.astype("<i4").tobytes()
    checksums: list[int] = []
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=".diskprefix-", suffix=".part", dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(_header(text, (len(ids), sum(manifest.payload_bytes()), 8 * len(manifest.nodes) + 8)) + ids)
            for payload in payloads:
                file.write(payload)
                checksums.append(checksum(payload))
            file.write(np.array([*checksums, _index_checksum(text, ids, checksums)], "<u8").tobytes())
            file.flush()
            os.fsync(fd)
            num_bytes = file.tell()
        if not force:
            refuse_existing(path)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return num_bytes


def refuse_existing(path: Path) -> None:
    """Raises `SettingsError` if there is a file."""
    if os.path.lexists(path):
        raise SettingsError(f"{path} exists; add --force to overwrite it, or choose another name with -o")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name into errors of reading it, and translates those of libraries."""
    try:
        yield
    except (SettingsError, StoreFormatError) as error:
        raise type(error)(f"{path}: {error.message}") from error
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error
    except (StoreCorrupt, SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreCorrupt(f"{path} is damaged: {escaped(first_line(error))}; export it again") from error


def _header(manifest: str, sizes: Sequence[int]) -> bytes:
    """Returns the length and the header, padded so that the data is aligned. `sizes` are those of the tensors, in
    bytes. safetensors' own writer takes tensors that are whole in memory."""
    ends = [0, *accumulate(sizes)]
    tensors = {
        name: {"dtype": dtype, "shape": [(end - start) // item_bytes], "data_offsets": [start, end]}
        for (name, dtype, item_bytes), (start, end) in zip(_TENSORS, pairwise(ends), strict=True)
    }
    header = {"__metadata__": {"format": FORMAT, "version": VERSION, "manifest": manifest}} | tensors
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _index_checksum(manifest: str, token_ids: bytes, checksums: list[int]) -> int:
    return checksum(manifest.encode() + token_ids + np.array(checksums, "<u8").tobytes())

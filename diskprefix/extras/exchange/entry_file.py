"""One saved prompt as a `.safetensors` file: `export` writes it and `import` reads it.

`README.md` of the store gives the format. No size in a file is trusted: each is compared with what the layout needs and
with the length of the file before memory is allocated. The checksums find damage. They do not prevent forgery.

The safetensors library does not read it. It maps the file, so that a file which is cut short meanwhile ends the
process. And without torch, which the store does not import, it has no bfloat16.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from diskprefix.errors import SettingsError, StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.extras.exchange.manifest import (
    CHECKSUMS,
    LOGITS,
    PREFILL_S,
    TOKEN_IDS,
    Manifest,
    NodeSpan,
    Tensor,
    decode_json,
    shown,
)
from diskprefix.store.folder import sync
from diskprefix.store.schema import MAX_PREFILL_S, Kind
from diskprefix.tokens import TokenIds, checksum

FORMAT, VERSION = "diskprefix-entry", "1"

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 4 << 20
"""The header of a model with a thousand layers takes a tenth of this."""
_MAX_NODE_BYTES = 2 << 30
"""A node's payload is kept in memory as a whole."""


class _TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def __str__(self) -> str:
        return f"{shown(self.dtype)} of shape {shown(str(self.shape))} at bytes {self.data_offsets}"


class _EntryFile:
    """An open file. `offsets` says where each tensor starts, in bytes from the beginning of the file."""

    def __init__(self, path: Path, fd: int, manifest: Manifest, offsets: Mapping[str, int]) -> None:
        self.path = path
        self.manifest = manifest
        self.spans = manifest.spans
        self._fd = fd
        self._offsets = offsets
        self._tokens, self._states = manifest.token_tensors(), manifest.state_tensors()
        self._logits_bytes = manifest.logits_tensor().num_bytes if manifest.with_logits else 0
        self._token_bytes = sum(tensor.num_bytes for tensor in self._tokens.values()) // manifest.num_tokens
        self._row_bytes = {name: tensor.num_bytes // tensor.shape[0] for name, tensor in self._states.items()}

    def payload_bytes(self, span: NodeSpan) -> int:
        """Returns the size of a node's raw payload."""
        state_bytes = 0 if span.states is None else sum(self._row_bytes.values())
        logits_bytes = self._logits_bytes if span.kind == Kind.TAIL else 0
        return self._token_bytes * span.num_tokens + state_bytes + logits_bytes

    def _runs(self, span: NodeSpan) -> Iterator[tuple[int, int]]:
        """Yields offset and size in the file of each part of a node's payload, in the payload's order."""
        for name, tensor in self._tokens.items():
            num_tokens = self.manifest.num_tokens
            token_bytes = tensor.num_bytes // (tensor.rows * num_tokens)
            for row in range(tensor.rows if span.num_tokens else 0):
                first_token = row * num_tokens + span.position
                yield self._offsets[name] + first_token * token_bytes, span.num_tokens * token_bytes
        if span.states is not None:
            for name, row_bytes in self._row_bytes.items():
                yield self._offsets[name] + span.states * row_bytes, row_bytes
        if span.kind == Kind.TAIL:
            yield self._offsets[LOGITS], self._logits_bytes


class EntryReader(_EntryFile):
    """Reads a file. Header, sizes and token ids are checked when it is opened, each payload when it is read.

    `prefill_s` has one value for each node, in seconds.
    """

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[EntryReader]:
        """Raises `SettingsError` (no such file, or no export wrote it), `StoreFormatError` (another version),
        `StoreCorrupt` (damaged) or `StoreUnavailable` (cannot be read)."""
        with _naming(path):
            fd = _open_regular(path)
        try:
            with _naming(path):
                reader = cls._checked(path, fd)
            yield reader
        finally:
            os.close(fd)

    @classmethod
    def _checked(cls, path: Path, fd: int) -> EntryReader:
        size = os.fstat(fd).st_size
        metadata, tensors, data_at = _read_header(fd, size)
        manifest = Manifest.of_metadata(metadata, with_logits=LOGITS in tensors)
        _check_tensors(tensors, manifest.tensors(), size - data_at)
        offsets = {name: data_at + info.data_offsets[0] for name, info in tensors.items()}
        reader = cls(path, fd, manifest, offsets)
        if max(map(reader.payload_bytes, reader.spans)) > _MAX_NODE_BYTES:
            raise StoreCorrupt("its blocks are larger than any that are written")
        reader._read_index(metadata)
        return reader

    def read_payload(self, index: int) -> memoryview:
        """Returns the raw payload of node number `index`, checked. Raises `StoreCorrupt`, `StoreUnavailable`."""
        span = self.spans[index]
        payload = memoryview(bytearray(self.payload_bytes(span)))
        with _naming(self.path):
            start = 0
            for offset, size in self._runs(span):
                _read_into(self._fd, payload[start : start + size], offset)
                start += size
            if checksum(payload) != self._checksums[index]:
                what = "the checkpoint " if span.kind == Kind.CHECKPOINT else ""
                raise StoreCorrupt(f"the checksum of {what}{span} does not match")
        return payload

    def _read_index(self, metadata: Mapping[str, str]) -> None:
        tensors = self.manifest.tensors()
        token_ids, checksums, prefill_s = (
            _read(self._fd, tensors[name].num_bytes, self._offsets[name]) for name in (TOKEN_IDS, CHECKSUMS, PREFILL_S)
        )
        if metadata.get("checksum") != _index_checksum(metadata, token_ids, checksums, prefill_s):
            raise StoreCorrupt("the checksum of its metadata and token ids does not match")
        self.token_ids: TokenIds = np.frombuffer(token_ids, "<i4").astype(np.int32)
        self.prefill_s: list[float] = np.frombuffer(prefill_s, "<f8").tolist()
        self._checksums: list[int] = np.frombuffer(checksums, "<u8").tolist()
        if not all(0 <= seconds <= MAX_PREFILL_S for seconds in self.prefill_s):
            raise StoreCorrupt(f"{PREFILL_S} is out of range")


class EntryWriter(_EntryFile):
    """Writes a file under a temporary name. Call `write_payload` for each node in order, then `finish`."""

    @classmethod
    @contextmanager
    def create(cls, path: Path, manifest: Manifest) -> Iterator[EntryWriter]:
        """Creates a file beside `path` that only its owner may read. It is removed unless `finish` is called.

        Raises `StoreUnavailable` if it cannot be written.
        """
        with _naming(path):
            fd, name = tempfile.mkstemp(prefix=".diskprefix-", suffix=".part", dir=path.parent)
        temporary = Path(name)
        try:
            yield cls(path, fd, manifest, temporary)
        finally:
            os.close(fd)
            temporary.unlink(missing_ok=True)

    def __init__(self, path: Path, fd: int, manifest: Manifest, temporary: Path) -> None:
        self._temporary = temporary
        self._header_bytes = len(_header(manifest, "0" * 16))
        infos = _infos(manifest.tensors())
        super().__init__(path, fd, manifest, {n: self._header_bytes + i.data_offsets[0] for n, i in infos.items()})
        self._checksums: list[int] = []
        self._prefill_s: list[float] = []

    def write_payload(self, payload: memoryview, prefill_s: float) -> None:
        """Writes the raw payload of the next node. Raises `StoreUnavailable` if the disk is full or fails."""
        span = self.spans[len(self._checksums)]
        assert len(payload) == self.payload_bytes(span)
        with _naming(self.path):
            start = 0
            for offset, size in self._runs(span):
                _write(self._fd, payload[start : start + size], offset)
                start += size
        self._checksums.append(checksum(payload))
        self._prefill_s.append(prefill_s)

    def finish(self, token_ids: TokenIds, *, force: bool) -> int:
        """Gives the file its name. Returns its size in bytes. Raises `SettingsError` if it exists, unless `force`."""
        assert len(self._checksums) == len(self.spans)
        index = {
            TOKEN_IDS: token_ids.astype("<i4").tobytes(),
            CHECKSUMS: np.array(self._checksums, "<u8").tobytes(),
            PREFILL_S: np.array(self._prefill_s, "<f8").tobytes(),
        }
        header = _header(self.manifest, _index_checksum(_metadata(self.manifest), *index.values()))
        assert len(header) == self._header_bytes
        with _naming(self.path):
            for name, data in index.items():
                _write(self._fd, memoryview(data), self._offsets[name])
            _write(self._fd, memoryview(header), 0)
            os.fsync(self._fd)
        if not force:
            refuse_existing(self.path)
        with _naming(self.path):
            self._temporary.replace(self.path)
            sync(self.path.parent)
            return os.fstat(self._fd).st_size


def refuse_existing(path: Path) -> None:
    """Raises `SettingsError` if there is a file."""
    if os.path.lexists(path):
        raise SettingsError(f"{path} exists; add --force to overwrite it, or choose another name with -o")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name into errors, and raises `StoreUnavailable` for those of the file system."""
    try:
        yield
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{path} is damaged: {error.message}; export it again") from error
    except (SettingsError, StoreFormatError) as error:
        raise type(error)(f"{path}: {error.message}") from error
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error


def _open_regular(path: Path) -> int:
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise SettingsError("no such file") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SettingsError("not a file")
    return fd


def _read_header(fd: int, size: int) -> tuple[dict[str, str], dict[str, _TensorInfo], int]:
    """Returns the metadata, the tensors, and where the data begins in a file of `size` bytes.

    Raises `SettingsError` if no export wrote the file, `StoreFormatError` if it has another version.
    """
    foreign = SettingsError("`diskprefix export` did not write it")
    if size < _LENGTH.size:
        raise foreign
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, 0))
    most_bytes = min(size - _LENGTH.size, _MAX_HEADER_BYTES)
    text = _read(fd, min(length, most_bytes), _LENGTH.size)
    if f'"{FORMAT}"'.encode() not in text:
        raise foreign
    if length > most_bytes:
        raise StoreCorrupt(f"it has {size} bytes, its header alone claims {length}")
    values = decode_json(text, dict[str, msgspec.Raw], "header")
    metadata = decode_json(values.pop(_METADATA, msgspec.Raw(b"{}")), dict[str, str], "metadata")
    if metadata.get("format") != FORMAT:
        raise foreign
    if metadata.get("version") != VERSION:
        version = shown(metadata.get("version", ""))
        raise StoreFormatError(f"its format is version {version}, this diskprefix reads version {VERSION}")
    tensors = {name: decode_json(value, _TensorInfo, "header") for name, value in values.items()}
    return metadata, tensors, _LENGTH.size + length


def _check_tensors(tensors: Mapping[str, _TensorInfo], expected: Mapping[str, Tensor], data_bytes: int) -> None:
    """Raises `StoreCorrupt` unless the file holds exactly these tensors, without gaps up to its end."""
    if unlike := sorted(tensors.keys() ^ expected.keys()):
        raise StoreCorrupt(f"it has a tensor too many or too few: {shown(unlike[0])}")
    order = sorted(expected, key=lambda name: tensors[name].data_offsets)
    for name, info in _infos({name: expected[name] for name in order}).items():
        if tensors[name] != info:
            raise StoreCorrupt(f"{shown(name)} is {tensors[name]}, not {info}")
    end = sum(tensor.num_bytes for tensor in expected.values())
    if end != data_bytes:
        raise StoreCorrupt(f"it holds {data_bytes} bytes of data, its tensors {end}")


def _header(manifest: Manifest, index_checksum: str) -> bytes:
    """Returns the length and the header, padded so that the data is aligned."""
    metadata = _metadata(manifest) | {"checksum": index_checksum}
    text = msgspec.json.encode({_METADATA: metadata} | _infos(manifest.tensors()))
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _infos(tensors: Mapping[str, Tensor]) -> dict[str, _TensorInfo]:
    """Returns what a header says of these tensors, which follow each other in this order."""
    infos: dict[str, _TensorInfo] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        infos[name] = _TensorInfo(tensor.dtype, tensor.shape, (start, end))
    return infos


def _metadata(manifest: Manifest) -> dict[str, str]:
    return {"format": FORMAT, "version": VERSION} | manifest.metadata()


def _index_checksum(metadata: Mapping[str, str], *index: bytes) -> str:
    rest = {name: text for name, text in metadata.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    return f"{checksum(text + b''.join(index)):016x}"


def _read(fd: int, size: int, offset: int) -> bytes:
    data = bytearray(size)
    _read_into(fd, memoryview(data), offset)
    return bytes(data)


def _read_into(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.preadv(fd, [view], offset)
        if not count:
            raise StoreCorrupt("it became shorter while it was read")
        view, offset = view[count:], offset + count


def _write(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count

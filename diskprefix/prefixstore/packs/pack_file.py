"""Reads and writes a pack: saved prompts of one model as a `.safetensors` file. `README.md` describes the format.

Digests find damage, and name all of a pack. Whether its maker is to be believed, a signature says (`signatures`).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from diskprefix.errors import SettingsError, StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.identity import identity_fields, identity_of_tenant, identity_text
from diskprefix.prefixstore.packs.signatures import MAX_SIGNATURE_BYTES
from diskprefix.prefixstore.store.folder import sync
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import MAX_PREFILL_S, EntryRecord, NodeKind, RootRecord
from diskprefix.printable import escaped, first_line
from diskprefix.tokens import TokenIds, root_hash
from diskprefix.user_key import user_tenant
from diskprefix.values import Tenant

FORMAT, VERSION = "diskprefix-pack", "1"
MAX_PROMPTS = 1000
NO_PARENT = -1
_TENSORS = {"token_ids": ("I32", 4), "payloads": ("U8", 1), "digests": ("U8", 1), "signature": ("U8", 1)}
"""Dtype and bytes of an element of each tensor."""
_DIGEST_BYTES = 32


class PackNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the prompts: `num_tokens` tokens that continue the node of number `parent`, or the root. `prefill_s` is
    its compute time in seconds, 0 if unknown."""

    kind: NodeKind
    parent: int
    num_tokens: int
    prefill_s: float


class PackPrompt(msgspec.Struct, frozen=True):
    """A prompt, which ends with the node of number `node`."""

    node: int
    entry: EntryRecord


class Manifest(msgspec.Struct, frozen=True):
    """The content of a file. `nodes` are in the order of their payloads, parents first. `is_own`: the prompts are for
    the programs of the user who imports them, because they belonged to those of the user who exported them, or because
    they were exported without their keys."""

    root: RootRecord
    prompts: tuple[PackPrompt, ...]
    nodes: tuple[PackNode, ...]
    is_own: bool = False

    def of_tenant(self, tenant: Tenant) -> Manifest:
        """Returns the manifest of the same prompts as this `tenant` stores them."""
        identity = identity_of_tenant(self.root.identity, str(tenant))
        root = replace(self.root, identity=identity, tenant=str(tenant))
        prompts = (replace(each, entry=replace(each.entry, root=root_hash(identity))) for each in self.prompts)
        return replace(self, root=root, prompts=tuple(prompts))

    def require_sound(self) -> None:
        """Raises `StoreCorrupt` for a manifest that no export writes."""
        self.require_sound_root()
        self.require_sound_nodes()

    def require_sound_root(self) -> None:
        """Raises `StoreCorrupt` for a root that no export writes. Looks at no node."""
        identity_fields(self.root.identity)
        fields = json.loads(self.root.identity)
        own = (self.root.block_size, fields["layout_version"], self.root.layout, self.root.tenant)
        is_named = identity_text(fields["fingerprint"], *own) == self.root.identity
        root = root_hash(self.root.identity)
        if not is_named or any(each.entry.root != root for each in self.prompts):
            raise StoreCorrupt("its root is not the hash of its identity")
        Tenant.parse(self.root.tenant)
        if self.root.block_size < 1:
            raise StoreCorrupt(f"it has blocks of {self.root.block_size} tokens")
        if not 0 < len(self.prompts) <= MAX_PROMPTS:
            raise StoreCorrupt(f"it has {len(self.prompts)} prompts; a pack has 1 to {MAX_PROMPTS}")

    def require_sound_nodes(self) -> None:
        """Raises `StoreCorrupt` for nodes that no export writes."""
        if not self._are_nodes_sound() or not self._are_ends_sound():
            raise StoreCorrupt("its nodes are not those of its prompts")

    def payload_bytes(self) -> list[int]:
        """Returns the size of each node's raw payload. Raises `StoreCorrupt`."""
        layout = PayloadLayout.parse(self.root.layout)
        return [layout.payload_bytes(node.num_tokens, node.kind) for node in self.nodes]

    def positions(self) -> list[int]:
        """Returns the position of each node's first token."""
        positions = list[int]()
        for node in self.nodes:
            is_first = node.parent == NO_PARENT
            positions.append(0 if is_first else positions[node.parent] + self.nodes[node.parent].num_tokens)
        return positions

    def _are_nodes_sound(self) -> bool:
        """Returns whether each node continues a full block before it, and is as long as its kind may be."""
        size, has_states = self.root.block_size, bool(PayloadLayout.parse(self.root.layout).states)
        for number, node in enumerate(self.nodes):
            if node.kind == NodeKind.BLOCK:
                is_right = node.num_tokens == size or (not has_states and 0 < node.num_tokens < size)
            else:
                is_right = node.kind == NodeKind.TAIL or (node.kind == NodeKind.CHECKPOINT and has_states)
                is_right = is_right and 0 <= node.num_tokens < size
            if node.parent != NO_PARENT:
                parent = self.nodes[node.parent] if 0 <= node.parent < number else node
                is_right = is_right and (parent.kind, parent.num_tokens) == (NodeKind.BLOCK, size) and parent != node
            if not is_right or not 0 <= node.prefill_s <= MAX_PREFILL_S:
                return False
        return True

    def _are_ends_sound(self) -> bool:
        """Returns whether each prompt ends with a node of its own, at its last token."""
        ends = [each.node for each in self.prompts]
        if len(set(ends)) < len(ends) or not all(0 <= end < len(self.nodes) for end in ends):
            return False
        positions = self.positions()
        return all(
            0 < each.entry.num_tokens == positions[each.node] + self.nodes[each.node].num_tokens
            for each in self.prompts
        )


class PackReader:
    """Reads a file. Opening it checks its digest and its root, `read_nodes` its nodes, sizes and token ids, and reading
    a payload that payload. Until `read_nodes`, only what is known without a look at the nodes is there: a file may have
    millions of them, so first see whether its model is wanted.

    `digest` is the hex SHA-256 of all that the file says but its signature, `signature` that of its maker, empty
    without one. `positions` are those of the nodes.
    """

    positions: list[int]

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
        self._all_ids: TokenIds = file.get_tensor("token_ids")
        digests = file.get_tensor("digests").tobytes()
        self._digests = [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]
        index = _index_digest(text, self._all_ids, self._digests[:-1])
        if not self._digests or self._digests.pop() != index:
            raise StoreCorrupt("the digest of its manifest and token ids does not match")
        self.digest, self.signature = index.hex(), file.get_tensor("signature").tobytes().rstrip(b"\0")
        self.manifest = msgspec.json.decode(text, type=Manifest)
        self.manifest.require_sound_root()
        self._payloads = file.get_slice("payloads")

    def read_nodes(self) -> None:
        """Checks the nodes and their token ids. Raises `StoreCorrupt`."""
        with _naming(self.path):
            self.manifest.require_sound_nodes()
            nodes = self.manifest.nodes
            self.positions = self.manifest.positions()
            self._starts = list(accumulate(self.manifest.payload_bytes(), initial=0))
            ends = list(accumulate((node.num_tokens for node in nodes), initial=0))
            sizes = (len(self._all_ids), self._payloads.get_shape(), len(self._digests))
            if sizes != (ends[-1], [self._starts[-1]], len(nodes)):
                raise StoreCorrupt("its tensors are not as large as its manifest says")
            self._token_ids = [self._all_ids[start:end] for start, end in pairwise(ends)]
            self._checkpoints = self._checkpoints_by_length()
            named = {(node.parent, node.kind, ids.tobytes()) for node, ids in zip(nodes, self._token_ids, strict=True)}
            on_paths = set[int]()
            for prompt in self.manifest.prompts:
                on_paths.update(self.nodes_of(prompt, on_paths))
            if len(named) < len(nodes) or len(on_paths) < len(nodes):
                raise StoreCorrupt("its nodes are not those of its prompts")

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[PackReader]:
        """Raises `SettingsError` (no such file, no export wrote it, or safetensors is missing), `StoreFormatError`
        (another version), `StoreCorrupt` (damaged) or `StoreUnavailable` (cannot be read)."""
        with _naming(path):
            if not path.is_file():
                raise SettingsError("no such file")
            _require_tensors(path)
            file: Any = _library().safe_open(path, "np")
        with file:
            with _naming(path):
                reader = cls(path, file)
            yield reader

    def give(self, *, mine: bool = False) -> None:
        """Gives prompts of the exporting user's programs to this user's programs; with `mine` any prompts, without
        their salt. Raises `SettingsError` as `user_tenant`."""
        if mine:
            self.manifest = replace(self.manifest.of_tenant(user_tenant()), is_own=True)
        elif self.manifest.is_own:
            salts = Tenant.parse(self.manifest.root.tenant).ids[1:]
            self.manifest = self.manifest.of_tenant(Tenant((*user_tenant().ids, *salts)))

    def nodes_of(self, prompt: PackPrompt, known: Container[int] = ()) -> list[int]:
        """Returns the numbers of a prompt's nodes, parents first: its blocks, the checkpoints on the way, and its last
        node. With `known`, the nodes of earlier prompts, only those behind the last one of them."""
        nodes, blocks = self.manifest.nodes, [prompt.node]
        # Bound: parents come before their children.
        while (parent := nodes[blocks[-1]].parent) != NO_PARENT and parent not in known:
            blocks.append(parent)
        blocks.append(parent)
        blocks.reverse()
        path = set(blocks[1:])
        for step, behind in pairwise(blocks):
            following = self._token_ids[behind].tobytes()
            for num_bytes, checkpoints in self._checkpoints.get(step, {}).items():
                if (number := checkpoints.get(following[:num_bytes])) is not None:
                    path.add(number)
        return [*sorted(path - {prompt.node}), prompt.node]

    def token_ids(self, number: int) -> TokenIds:
        """Returns the token ids of a node, int32."""
        return self._token_ids[number]

    def digest_of(self, number: int) -> bytes:
        """Returns the SHA-256 of a node's raw payload."""
        digest: bytes = self._digests[number]
        return digest

    def verify_payloads(self, advance: Callable[[int], None]) -> None:
        """Reads and checks all payloads, and reports their bytes to `advance`. Raises `StoreCorrupt`."""
        for number in range(len(self.manifest.nodes)):
            advance(len(self.read_payload(number)))

    def read_payload(self, number: int) -> memoryview:
        """Returns the raw payload of a node, checked. Raises `StoreCorrupt`."""
        start, stop = self._starts[number : number + 2]
        payload: memoryview = self._payloads[start:stop].data
        with _naming(self.path):
            if hashlib.sha256(payload).digest() != self._digests[number]:
                start, end = self.positions[number], self.positions[number] + self.manifest.nodes[number].num_tokens
                raise StoreCorrupt(f"the digest of tokens {start} to {end} does not match")
        return payload

    def _checkpoints_by_length(self) -> dict[int, dict[int, dict[bytes, int]]]:
        """Returns the numbers of the checkpoints that continue each node, by the length and the bytes of their token
        ids: those that a block passes are found by its beginnings, however many there are."""
        checkpoints = dict[int, dict[int, dict[bytes, int]]]()
        for number, node in enumerate(self.manifest.nodes):
            if node.kind == NodeKind.CHECKPOINT:
                token_ids = self._token_ids[number].tobytes()
                checkpoints.setdefault(node.parent, {}).setdefault(len(token_ids), {})[token_ids] = number
        return checkpoints


class WrittenPack(NamedTuple):
    """The size of a file in bytes, and its digest; see `PackReader`."""

    num_bytes: int
    digest: str


def write_pack(
    path: Path,
    manifest: Manifest,
    token_ids: TokenIds,
    payloads: Iterable[memoryview],
    *,
    force: bool,
    sign: Callable[[str], bytes] | None = None,
) -> WrittenPack:
    """Writes a file that only its owner may read, with the token ids of all nodes and a raw payload for each. `sign`
    takes the digest and returns a signature.

    Raises `SettingsError` if it exists, unless `force`, or as `sign`, and `StoreUnavailable`. After an error no file is
    left.
    """
    text, token_ids, digests = msgspec.json.encode(manifest).decode(), token_ids.astype("<i4"), list[bytes]()
    num_nodes, signature_bytes = len(manifest.nodes), MAX_SIGNATURE_BYTES if sign else 0
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(prefix=".diskprefix-", dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            sizes = (token_ids.size, sum(manifest.payload_bytes()), _DIGEST_BYTES * (num_nodes + 1), signature_bytes)
            file.write(_header(text, sizes))
            file.write(token_ids.tobytes())
            for payload in payloads:
                file.write(payload)
                digests.append(hashlib.sha256(payload).digest())
            index = _index_digest(text, token_ids, digests)
            file.write(b"".join([*digests, index]))
            if sign is not None:
                file.write(sign(index.hex()).ljust(signature_bytes, b"\0"))
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
    return WrittenPack(num_bytes, index.hex())


def _header(manifest: str, sizes: Sequence[int]) -> bytes:
    """Returns length and header, padded to align the data. The library's own writer needs whole tensors in memory.
    `sizes` are the elements of each tensor."""
    at, header = 0, dict[str, Any]({"__metadata__": {"format": FORMAT, "version": VERSION, "manifest": manifest}})
    for (name, (dtype, item_bytes)), size in zip(_TENSORS.items(), sizes, strict=True):
        start, at = at, at + size * item_bytes
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [start, at]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def refuse_existing(path: Path) -> None:
    """Raises `SettingsError` if there is a file."""
    if os.path.lexists(path):
        raise SettingsError(f"{path} exists; add --force to overwrite it, or choose another name")


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


def _library() -> Any:
    """Returns safetensors, which nothing else of the store needs. Raises `SettingsError`."""
    try:
        import safetensors
    except ImportError as error:
        raise SettingsError("a pack is read by safetensors; pip install safetensors") from error
    return safetensors


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the file's name to errors of reading it, and translates errors of libraries."""
    of_library: type[Exception] = _library().SafetensorError
    try:
        yield
    except (SettingsError, StoreFormatError) as error:
        raise type(error)(f"{path}: {error.message}") from error
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error
    except (StoreCorrupt, of_library, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        cause = "it is cut short, or no .safetensors file: " if isinstance(error, of_library) else ""
        raise StoreCorrupt(f"{path} is damaged: {cause}{escaped(first_line(error))}; export it again") from error


def _index_digest(manifest: str, token_ids: TokenIds, digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join([manifest.encode(), token_ids.astype("<i4").tobytes(), *digests])).digest()

"""Exports saved prompts from a store into a pack, and imports them into another store.

The time to live is not exported. Both directions work node by node, so memory does not grow with the pack. An export
takes a new snapshot for each node, because an open snapshot keeps a daemon from reusing pages. An import may write
several publications, an entry with the last one of its prompt, so a kill leaves a shorter prefix of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from diskprefix.errors import PrefixGone, SettingsError, StoreCorrupt
from diskprefix.identity import differing, identity_fields, identity_of_tenant
from diskprefix.prefixstore.cache.imported_prompt import IMPORTED_TTL_S, ImportedNode, ImportedPrompt, encode_imported
from diskprefix.prefixstore.packs.pack_file import (
    MAX_PROMPTS,
    NO_PARENT,
    Manifest,
    PackNode,
    PackPrompt,
    PackReader,
    WrittenPack,
    refuse_existing,
    write_pack,
)
from diskprefix.prefixstore.store.changes import Changes, NewNode, SmallWrite, node_bytes
from diskprefix.prefixstore.store.note_record import (
    NoteKind,
    NoteTimes,
    encode_note,
    note_bytes,
    note_key,
    note_limit,
    root_limit,
)
from diskprefix.prefixstore.store.pieces import PayloadLayout, split_payload
from diskprefix.prefixstore.store.schema import (
    MAX_PREFILL_S,
    EntryRecord,
    ModelRecord,
    NodeKind,
    NodeRecord,
    RootRecord,
    node_name,
)
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.tree import PrefixTree
from diskprefix.prefixstore.store.verify import raw_payload
from diskprefix.printable import shown
from diskprefix.tokens import NO_PROMPT, PromptDigest, TokenIds, as_token_ids, root_hash
from diskprefix.user_key import is_users
from diskprefix.values import SHARED, Tenant

Advance = Callable[[int], None]
"""Takes the bytes of raw payload done since the last call."""

_BATCH_BYTES = 64 << 20
"""Bytes of raw payload in a publication, held in memory until it is written."""


class PackedNode(NamedTuple):
    """A node of the store that goes into a pack. `parent` is the number of the node that it continues there."""

    name: bytes
    record: NodeRecord
    parent: int
    prefill_s: float


def export_pack(
    store: Store,
    names: Sequence[bytes],
    path: Path,
    *,
    force: bool,
    advance: Advance,
    without_keys: bool = False,
    sign: Callable[[str], bytes] | None = None,
) -> WrittenPack:
    """Writes the entries that end at the nodes `names` to the file `path`. Every payload is verified. `without_keys`:
    the prompts belong to whoever imports them. `sign` is that of `write_pack`.

    Raises `StoreCorrupt` (an entry is damaged), `PrefixGone` (one was evicted in the meantime), `SettingsError` (the
    file exists, unless `force`, or an entry cannot be exported) or `StoreUnavailable`. Then no file is left.
    """
    if not force:
        refuse_existing(path)
    if len(names) > MAX_PROMPTS:
        raise SettingsError(f"a pack has at most {MAX_PROMPTS} prompts, these are {len(names)}")
    with store.snapshot() as snapshot:
        manifest, nodes = _read_entries(snapshot, store.secret, names, without_keys=without_keys)
    layout = PayloadLayout.parse(manifest.root.layout)

    def payloads() -> Iterator[memoryview]:
        for node in nodes:
            with store.snapshot() as snapshot:
                payload = _read_node(snapshot, node.name, node.record, layout)
            yield payload
            advance(len(payload))

    token_ids = np.concatenate([node.record.token_ids for node in nodes])
    return write_pack(path, manifest, token_ids, payloads(), force=force, sign=sign)


def _read_entries(
    snapshot: Snapshot, secret: int, names: Sequence[bytes], *, without_keys: bool
) -> tuple[Manifest, list[PackedNode]]:
    tree, is_own, first = PrefixTree(snapshot, secret), is_users(), None
    packed, prompts = dict[tuple[int, NodeKind, bytes], int](), list[PackPrompt]()
    nodes, root = list[PackedNode](), None
    for name in dict.fromkeys(names):
        entry, record, of_entry = _read_entry(snapshot, tree, name, without_keys=without_keys)
        tenant = SHARED if without_keys else Tenant.parse(record.tenant)
        identity = identity_of_tenant(record.identity, str(tenant))
        root, first = root or structs.replace(record, identity=identity, tenant=str(tenant)), first or record
        if identity != root.identity:
            other = "another tenant" if record.model_identity == first.model_identity else "another model"
            raise SettingsError(f"entry {name.hex()} is of {other} than {names[0].hex()}; write a file for each")
        numbers = dict[bytes, int]()
        for key, node in of_entry.items():
            parent = numbers.get(node.parent, NO_PARENT)
            place = (parent, node.kind, node.token_ids.tobytes())
            if place not in packed:
                usage = snapshot.usage(key)
                is_known = usage is not None and 0 <= usage.prefill_s <= MAX_PREFILL_S
                nodes.append(PackedNode(key, node, parent, usage.prefill_s if usage and is_known else 0.0))
                packed[place] = len(packed)
            numbers[key] = packed[place]
        # The digests and shares of this machine mean nothing on another one.
        described = replace(entry, root=root_hash(identity), kind="saved", came_from=NO_PROMPT, ttl_s=0, share="")
        prompts.append(PackPrompt(numbers[name], described))
    assert root is not None, "no entry"
    assert first is not None
    created_at = max(prompt.entry.created_at for prompt in prompts)
    # The tokenizer's folder is on this machine only.
    root = structs.replace(root, created_at=created_at, tokenizer="")
    packed_nodes = [PackNode(node.record.kind, node.parent, node.record.num_tokens, node.prefill_s) for node in nodes]
    ours = without_keys or is_own(first.tenant)
    manifest = Manifest(root, tuple(prompts), tuple(packed_nodes), is_own=ours)
    try:
        manifest.require_sound()
    except (StoreCorrupt, ValueError, TypeError, KeyError) as error:
        which = ", ".join(name.hex() for name in names)
        raise StoreCorrupt(f"entry {which} cannot be exported: {error}; run `diskprefix verify --fix`") from error
    return manifest, nodes


def _read_entry(
    snapshot: Snapshot, tree: PrefixTree, name: bytes, *, without_keys: bool
) -> tuple[EntryRecord, RootRecord, dict[bytes, NodeRecord]]:
    entry = snapshot.entry(name)
    if entry is None:
        raise PrefixGone(f"entry {name.hex()} was evicted a moment ago")
    root = snapshot.root(entry.root)
    if root is None:
        raise StoreCorrupt(f"entry {name.hex()} belongs to a root without a record; run `diskprefix verify`")
    nodes = tree.entry(name)
    if PayloadLayout.parse(root.layout).states and all(node.kind == NodeKind.BLOCK for node in nodes.values()):
        problem = "has lost the checkpoint at which it could be restored; send the prompt again, then export it"
        raise SettingsError(f"entry {name.hex()} {problem}")
    if any(node.is_unverified for node in nodes.values()):
        problem = "has state that was imported with --trust, which this machine has not computed"
        raise SettingsError(f"entry {name.hex()} {problem}; purge it, send the prompt again, then export it")
    if without_keys and any((node.token_ids < 0).any() for node in nodes.values()):
        raise SettingsError(f"entry {name.hex()} has pictures, which a pack cannot have")
    return entry, root, nodes


def _read_node(snapshot: Snapshot, name: bytes, node: NodeRecord, layout: PayloadLayout) -> memoryview:
    """Returns a copy of the raw payload."""
    if snapshot.usage(name) is None:
        raise PrefixGone("the entry was evicted while it was exported; save the prompt again, or raise the budget")
    try:
        return raw_payload(snapshot, name, layout.pieces(node.num_tokens, node.kind))
    except StoreCorrupt as error:
        advice = "`diskprefix verify --fix` removes it"
        raise StoreCorrupt(f"block {name.hex()} of the store is damaged: {error.message}; {advice}") from error


def require_known_model(snapshot: Snapshot, reader: PackReader) -> None:
    """Raises `SettingsError`, with what differs, unless the store was served with the model of the file.

    The tenant may differ: the user who imports decides for all tenants.
    """
    wanted, nearest = identity_fields(reader.manifest.root.identity), None
    known: list[ModelRecord | RootRecord] = [record for _, record in snapshot.models()]
    for record in [*known, *(record for _, record in snapshot.roots())]:
        try:
            names = differing(wanted, identity_fields(record.identity))
        except ValueError:
            continue
        if not names:
            return
        if nearest is None or len(names) < len(nearest[1]):
            nearest = (record.model, names)
    why = "but no model here can be read"
    if nearest is not None:
        why = f"which differs from '{shown(nearest[0])}' here in {', '.join(map(shown, nearest[1]))}"
    model, remedy = shown(reader.manifest.root.model), "serve that model with this store, or add --force"
    raise SettingsError(f"{reader.path} holds state of '{model}', {why}; {remedy}")


class Imported(NamedTuple):
    """The result of an import: the new names of the entries, the nodes that were added and the bytes of their raw
    payloads, and the number of nodes that were evicted for them."""

    ids: list[str]
    new_nodes: int
    new_bytes: int
    evicted: int


def require_room(store: Store, reader: PackReader) -> None:
    """Raises `StoreFull` if the pack does not fit the budget of the store."""
    nodes = _new_nodes(store.secret, reader, is_unverified=False)
    store.evictor.check_fits(sum(node_bytes(len(n.token_ids), [piece.max_bytes for piece in n.pieces]) for n in nodes))


def import_pack(store: Store, reader: PackReader, *, advance: Advance, is_unverified: bool) -> Imported:
    """Stores the prompts of a file, to be used at once. Nodes that are stored already are not changed. The entry of a
    prompt is a partial one until all of it is there. `is_unverified`: responses that use them say so, and the previews,
    which need not be of the same text, are left out.

    Raises `StoreFull`, `StoreCorrupt`, `StoreUnavailable`, and `PrefixGone` if another process evicts the first nodes
    before the last ones are written.
    """
    manifest, all_nodes, waiting = reader.manifest, _new_nodes(store.secret, reader, is_unverified), list[NewNode]()
    sizes, done = manifest.payload_bytes(), set[int]()
    # `inspect` would read a tokenizer from the folder that a forged file names.
    root_record = structs.replace(manifest.root, tokenizer="")
    num_new = new_bytes = evicted = waiting_bytes = 0
    epoch = store.epochs.of(root_record.tenant)
    for place, prompt in enumerate(manifest.prompts):
        came_from, continued = PromptDigest.of(store.secret, _token_ids(reader, place)), None
        preview = "" if is_unverified else prompt.entry.preview
        entry = replace(prompt.entry, kind="imported", came_from=came_from, ttl_s=0, share="", preview=preview)
        for number in reader.nodes_of(prompt, done):
            node, is_last = all_nodes[number], number == prompt.node
            with store.snapshot() as snapshot:
                is_there = snapshot.has(node.name, node.parent, node.position, node.kind, node.token_ids.tobytes())
            if not is_there:
                waiting.append(replace(node, payload=split_payload(reader.read_payload(number), node.pieces)))
                num_new, new_bytes = num_new + 1, new_bytes + sizes[number]
                waiting_bytes += sizes[number]
            if number not in done:
                done.add(number)
                advance(sizes[number])
            if is_last or waiting_bytes >= _BATCH_BYTES:
                evicted += store.publish(
                    Publication(
                        epoch=epoch,
                        root=prompt.entry.root,
                        root_record=root_record,
                        nodes=tuple(waiting),
                        last_node=node.name,
                        entry=entry if is_last else replace(entry, kind="partial", num_tokens=0),
                        continued=continued,
                    )
                )
                waiting, waiting_bytes, continued = [], 0, node.name
    return Imported([all_nodes[prompt.node].name.hex() for prompt in manifest.prompts], num_new, new_bytes, evicted)


def put_notes(store: Store, reader: PackReader, notes: Mapping[bytes, bytes]) -> None:
    """Has the daemon compute the prompts of a file while nobody waits, and then compare its state with that of the
    file, which is not stored. `notes` are from `encoded_notes`. Raises `StoreFull` and `StoreUnavailable`."""
    root = reader.manifest.prompts[0].entry.root
    record = structs.replace(reader.manifest.root, tokenizer="")

    def put(changes: Changes) -> None:
        changes.put_root(root, record)
        for key, value in notes.items():
            changes.put_note(key, value)

    store.write([SmallWrite(sum(note_bytes(len(value)) for value in notes.values()), put)])


def encoded_notes(store: Store, reader: PackReader) -> dict[bytes, bytes]:
    """Returns a note for each prompt of a file that is to be computed first. Raises `SettingsError` if one cannot be
    computed from its tokens, or if they are too long for notes."""
    root, now, notes = reader.manifest.prompts[0].entry.root, store.clock(), dict[bytes, bytes]()
    num_bytes = 0
    for number in range(len(reader.manifest.prompts)):
        imported = _to_compute(reader, number)
        key, token_ids = note_key(root, NoteKind.IMPORTED, imported.id), imported.token_ids
        of_prompt = PromptDigest.of(store.secret, token_ids)
        value = encode_note(key, encode_imported(imported), NoteTimes(now, now, IMPORTED_TTL_S), of_prompt)
        num_bytes += note_bytes(len(value))
        if note_bytes(len(value)) > note_limit(store.budget_bytes):
            size = f"a prompt of {len(token_ids):,} tokens"
            raise SettingsError(f"{reader.path} has {size}, too long to note in this store; raise its budget")
        # More than its share of the notes would be forgotten before it is computed.
        if num_bytes > root_limit(store.budget_bytes):
            size = f"{len(reader.manifest.prompts):,} prompts"
            raise SettingsError(f"{reader.path} has {size}, too many to note in this store; raise its budget")
        notes[key] = value
    return notes


def _to_compute(reader: PackReader, number: int) -> ImportedPrompt:
    prompt = reader.manifest.prompts[number]
    path, nodes, token_ids = reader.nodes_of(prompt), reader.manifest.nodes, _token_ids(reader, number)
    if (token_ids < 0).any():
        raise SettingsError(f"{reader.path} has a prompt with pictures, which cannot be computed again; see --trust")
    described = [
        ImportedNode(nodes[place].kind, reader.positions[place], nodes[place].num_tokens, reader.digest_of(place))
        for place in path
    ]
    return ImportedPrompt(
        pack=shown(reader.path.name),
        digest=reader.digest,
        number=number,
        ids=token_ids.astype("<i4").tobytes(),
        nodes=tuple(described),
    )


def _token_ids(reader: PackReader, number: int) -> TokenIds:
    """Returns the token ids of a prompt."""
    prompt, nodes = reader.manifest.prompts[number], reader.manifest.nodes
    path = reader.nodes_of(prompt)
    ends = [place for place in path if nodes[place].kind == NodeKind.BLOCK or place == prompt.node]
    return as_token_ids(np.concatenate([reader.token_ids(place) for place in ends]))


def _new_nodes(secret: int, reader: PackReader, is_unverified: bool) -> list[NewNode]:
    """Returns the nodes of a file without their payloads. They get their names from the secret of the store."""
    manifest, nodes = reader.manifest, list[NewNode]()
    layout, root = PayloadLayout.parse(manifest.root.layout), root_hash(manifest.root.identity)
    for number, node in enumerate(manifest.nodes):
        token_ids, pieces = reader.token_ids(number), layout.pieces(node.num_tokens, node.kind)
        parent = root if node.parent == NO_PARENT else nodes[node.parent].name
        nodes.append(
            NewNode(
                name=node_name(secret, parent, token_ids, node.kind),
                parent=parent,
                position=reader.positions[number],
                token_ids=token_ids,
                kind=node.kind,
                payload=(),
                pieces=pieces,
                prefill_s=node.prefill_s,
                is_unverified=is_unverified,
            )
        )
    return nodes

"""Exports one saved prompt from a store into a file, and imports it into another store.

The time to live is not exported. Both work node by node, so memory does not grow with the entry. An export takes a new
snapshot for each node, because an open snapshot keeps a daemon from reusing pages. An import may write several
publications, the entry with the last one, so a kill leaves a shorter prefix of the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import DecodeError, convert, json, structs

from diskprefix.errors import PrefixGone, SettingsError, StoreCorrupt
from diskprefix.extras.exchange.entry_file import EntryReader, EntryWriter, refuse_existing
from diskprefix.extras.exchange.manifest import Identity, Manifest, NodeSpan, shown
from diskprefix.identity import differing
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.changes import NewNode, node_bytes
from diskprefix.store.folder import DATA
from diskprefix.store.maintenance.verify import stored_pieces
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import (
    MAX_PREFILL_S,
    EntryRecord,
    Kind,
    ModelRecord,
    NodeRecord,
    RootRecord,
    node_name,
)
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Publication, Store
from diskprefix.store.tree import PrefixTree

Advance = Callable[[int], None]
"""Takes the bytes of raw payload done since the last call."""

_BATCH_BYTES = 64 << 20
"""Raw payload in one publication, which is kept in memory until it is written."""
_ATTEMPTS = 3
"""A daemon whose store is full may evict the first nodes of an import before the rest is there."""
_SHOWN_FIELDS = 4


def export_entry(store: Store, name: bytes, path: Path, *, force: bool, advance: Advance) -> int:
    """Writes the entry that ends at node `name` to the file `path`. Every payload is verified. Returns the file's size
    in bytes.

    Raises `StoreCorrupt` (the entry is damaged), `PrefixGone` (it was evicted in the meantime), `SettingsError` (the
    file exists, unless `force`, or the entry cannot be exported) or `StoreUnavailable`. Then no file is left.
    """
    if not force:
        refuse_existing(path)
    with store.snapshot() as snapshot:
        manifest, nodes = _read_entry(snapshot, store.secret, name)
    layout = PayloadLayout.parse(manifest.layout)
    with EntryWriter.create(path, manifest) as writer:
        for node in nodes:
            with store.snapshot() as snapshot:
                payload, prefill_s = _read_node(snapshot, *node, layout)
            writer.write_payload(payload, prefill_s)
            advance(len(payload))
        # Checkpoints repeat tokens of blocks, except at the end.
        token_ids = [node.token_ids for one, node in nodes if node.kind == Kind.BLOCK or one == name]
        return writer.finish(np.concatenate(token_ids), force=force)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The result of an import, or of a plan for one. `new_nodes` of the `num_nodes`, of `new_bytes` raw bytes, were not
    stored before. `is_new`: the entry was not listed before. `id` is None if there is no store yet, because its secret
    is part of the name."""

    id: str | None
    model: str
    tenant: str
    num_tokens: int
    num_nodes: int
    new_nodes: int
    new_bytes: int
    is_new: bool
    evicted: int = 0


def verify_payloads(reader: EntryReader, advance: Advance) -> None:
    """Reads and checks the whole file. Raises `StoreCorrupt`, `StoreUnavailable`."""
    for index in range(len(reader.spans)):
        advance(len(reader.read_payload(index)))


def known_models(snapshot: Snapshot) -> list[ModelRecord]:
    """Returns the models that a store was served with, or that something is stored of. Raises `StoreCorrupt`."""
    stored = (ModelRecord(model=record.model, identity=record.identity) for _, record in snapshot.roots())
    return [*dict(snapshot.models()).values(), *stored]


def require_known_model(known: Sequence[ModelRecord], reader: EntryReader, advice: str) -> None:
    """Raises `SettingsError`, with what differs and with `advice`, unless one of the models is that of the file.

    The tenant may differ: the user who imports decides for all tenants.
    """
    manifest = reader.manifest
    wanted = Identity.parse(manifest.identity)
    differences = [(model.model, _differences(wanted, model)) for model in known]
    if not all(differs for _, differs in differences):
        return
    why = "but this store has seen no model yet"
    if differences:
        name, differs = min(differences, key=lambda found: len(found[1]))
        more = f" and {len(differs) - _SHOWN_FIELDS} more" if len(differs) > _SHOWN_FIELDS else ""
        why = f"but compared with {_quoted(name)} here, {', '.join(differs[:_SHOWN_FIELDS])}{more}"
    raise SettingsError(f"{reader.path} holds state of {_quoted(manifest.model)}, {why}; {advice}")


def open_target(
    path: Path,
    *,
    budget_bytes: int,
    min_free_bytes: int,
    namespace: NamespaceKey | None = None,
) -> Store:
    """Returns the store in folder `path`, which is created if there is none. Raises `CacheError`.

    A store keeps the budget of its last daemon, since a smaller one would evict what that daemon stored. `budget_bytes`
    is for a store that no daemon has opened, `namespace` for one that is created.
    """
    if (path / DATA).is_file():
        store = Store(path, min_free_bytes=min_free_bytes)
        with store.snapshot() as snapshot:
            has_budget = snapshot.meta("budget") is not None
        if has_budget:
            return store
        store.close()
    return Store(path, budget_bytes=budget_bytes, min_free_bytes=min_free_bytes, namespace=namespace)


def plan_import(store: Store | None, reader: EntryReader) -> Imported:
    """Returns what `import_entry` would do, without evictions. None stands for a store that would be created.

    Raises `StoreCorrupt`, `StoreUnavailable`.
    """
    if store is not None:
        return _Import(store, reader).plan()
    return _imported(reader, None, reader.spans, is_new=True)


def require_room(store: Store, reader: EntryReader) -> None:
    """Raises `StoreFull` if the entry does not fit the budget of the store."""
    layout = PayloadLayout.parse(reader.manifest.layout)
    pieces = [(span, layout.pieces(span.num_tokens, span.kind)) for span in reader.spans]
    store.evictor.check_fits(sum(node_bytes(span.num_tokens, [p.max_bytes for p in found]) for span, found in pieces))


def import_entry(store: Store, reader: EntryReader, *, advance: Advance) -> Imported:
    """Stores the entry of a file. Nodes that are stored already stay as they are. The entry is visible at the end.

    Raises `StoreFull`, `StoreCorrupt`, `StoreUnavailable`, and `PrefixGone` if another process evicts the first nodes
    before the last ones are written.
    """
    require_room(store, reader)
    task = _Import(store, reader)
    plan, evicted = task.plan(), 0
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            for publication in task.publications(advance if attempt == 1 else lambda _num_bytes: None):
                evicted += store.publish(publication)
        except PrefixGone:
            if attempt == _ATTEMPTS:
                raise
        else:
            break
    return replace(plan, evicted=evicted)


class _Import:
    """The import of one file into one store. The nodes get their names from the store's secret."""

    def __init__(self, store: Store, reader: EntryReader) -> None:
        self._store = store
        self._reader = reader
        self._nodes: list[NewNode] = []
        """Without their payloads."""
        parent, layout = reader.manifest.root, PayloadLayout.parse(reader.manifest.layout)
        for span, prefill_s in zip(reader.spans, reader.prefill_s, strict=True):
            token_ids = reader.token_ids[span.position : span.position + span.num_tokens]
            name = node_name(store.secret, parent, token_ids, span.kind)
            pieces = layout.pieces(span.num_tokens, span.kind)
            new = NewNode(name, parent, span.position, token_ids, span.kind, memoryview(b""), pieces, prefill_s)
            self._nodes.append(new)
            # A checkpoint continues its block; nothing continues a checkpoint.
            parent = name if span.kind == Kind.BLOCK else parent

    def plan(self) -> Imported:
        named, last = zip(self._reader.spans, self._nodes, strict=True), self._nodes[-1].name
        with self._store.snapshot() as snapshot:
            missing = [span for span, node in named if not _is_there(snapshot, node)]
            is_new = snapshot.entry(last) is None
        return _imported(self._reader, last.hex(), missing, is_new=is_new)

    def publications(self, advance: Advance) -> Iterator[Publication]:
        """Yields publications of the missing nodes, from the first block on. Publish each before the next is taken."""
        manifest = self._reader.manifest
        root_record = convert(manifest, RootRecord, from_attributes=True)
        entry = convert(manifest, EntryRecord, from_attributes=True, builtin_types=(bytes,))
        nodes: list[NewNode] = []
        for index, node in enumerate(self._nodes):
            with self._store.snapshot() as snapshot:
                is_there = _is_there(snapshot, node)
            if not is_there:
                nodes.append(replace(node, payload=self._reader.read_payload(index)))
            advance(self._reader.payload_bytes(self._reader.spans[index]))
            is_last = node is self._nodes[-1]
            if is_last or sum(len(new.payload) for new in nodes) >= _BATCH_BYTES:
                yield Publication(
                    store_id=self._store.store_id,
                    root=manifest.root,
                    root_record=root_record,
                    nodes=tuple(nodes),
                    last_node=node.name,
                    entry=entry if is_last else None,
                )
                nodes = []


def _is_there(snapshot: Snapshot, node: NewNode) -> bool:
    try:
        return snapshot.has(node.name, node.parent, node.position, node.kind, node.token_ids.tobytes())
    except StoreCorrupt as error:
        raise _damaged(node.name, NodeSpan(node.position, len(node.token_ids), node.kind), error) from error


def _imported(reader: EntryReader, id_: str | None, missing: list[NodeSpan], *, is_new: bool) -> Imported:
    return Imported(
        id=id_,
        model=reader.manifest.model,
        tenant=reader.manifest.tenant,
        num_tokens=reader.manifest.num_tokens,
        num_nodes=len(reader.spans),
        new_nodes=len(missing),
        new_bytes=sum(map(reader.payload_bytes, missing)),
        is_new=is_new,
    )


def _read_entry(snapshot: Snapshot, secret: int, name: bytes) -> tuple[Manifest, list[tuple[bytes, NodeRecord]]]:
    entry = snapshot.entry(name)
    if entry is None:
        raise PrefixGone(f"entry {name.hex()} was evicted a moment ago")
    root = snapshot.root(entry.root)
    if root is None:
        raise StoreCorrupt(f"entry {name.hex()} belongs to a root without a record; run `diskprefix verify`")
    has_states = bool(PayloadLayout.parse(root.layout).states)
    nodes = list(PrefixTree(snapshot, secret).entry(name).items())
    _require_exportable(name, nodes, has_states)
    fields = structs.asdict(root) | structs.asdict(entry)
    fields["with_logits"] = nodes[-1][1].kind == Kind.TAIL
    fields["states"] = [node.end for _, node in nodes if node.kind != Kind.BLOCK] if has_states else []
    try:
        manifest = Manifest.checked(fields)
    except StoreCorrupt as error:
        raise StoreCorrupt(f"entry {name.hex()} cannot be exported: {error.message}") from error
    found = [(node.position, node.num_tokens, node.kind) for _, node in nodes]
    wanted = [(span.position, span.num_tokens, span.kind) for span in manifest.spans]
    if found != wanted or nodes[0][1].parent != manifest.root:
        raise StoreCorrupt(f"entry {name.hex()} has other blocks than its record says; run `diskprefix verify --fix`")
    return manifest, nodes


def _require_exportable(name: bytes, nodes: list[tuple[bytes, NodeRecord]], has_states: bool) -> None:
    """Raises `SettingsError`."""
    if has_states and all(node.kind == Kind.BLOCK for _, node in nodes):
        raise SettingsError(
            f"entry {name.hex()} has lost the checkpoint that it could be restored at; send the prompt again, then "
            "export it"
        )


def _read_node(snapshot: Snapshot, name: bytes, node: NodeRecord, layout: PayloadLayout) -> tuple[memoryview, float]:
    """Returns a copy of the raw payload, and the seconds that computing it took."""
    usage = snapshot.usage(name)
    if usage is None:
        raise PrefixGone("the entry was evicted while it was exported; save the prompt again, or raise the budget")
    payload = np.empty(layout.payload_bytes(node.num_tokens, node.kind), dtype=np.uint8)
    start = 0
    try:
        for piece in stored_pieces(snapshot, name, layout.pieces(node.num_tokens, node.kind)):
            end = start + piece.expected.num_bytes
            rows = payload[start:end].reshape(piece.expected.num_rows, -1)
            piece.decode(rows)
            start = end
    except StoreCorrupt as error:
        raise _damaged(name, NodeSpan(node.position, node.num_tokens, node.kind), error) from error
    prefill_s = usage.prefill_s if 0 <= usage.prefill_s <= MAX_PREFILL_S else 0.0
    return payload.data, prefill_s


def _damaged(name: bytes, span: NodeSpan, error: StoreCorrupt) -> StoreCorrupt:
    what = "checkpoint" if span.kind == Kind.CHECKPOINT else "block"
    return StoreCorrupt(
        f"{what} {name.hex()} ({span}) of the store is damaged: {error.message}; `diskprefix verify --fix` removes it"
    )


def _differences(wanted: Identity, model: ModelRecord) -> list[str]:
    """Returns how the identity of a file differs from that of a model, in words: the weights first, the layout, which
    follows from other fields, last."""
    try:
        there, here = wanted.fields, Identity.parse(model.identity).fields
    except StoreCorrupt:
        return ["an identity cannot be read"]
    names = sorted(differing(here, there), key=_place)
    lines = (_differing(name, there.get(name, ""), here.get(name, "")) or [shown(name)] for name in names)
    return [line for of_one in lines for line in of_one]


def _place(field: str) -> tuple[bool, bool, str]:
    return field != "weights_digest", field.startswith("layout"), field


def _differing(name: str, there: str, here: str) -> list[str]:
    """Returns how one field differs. Of JSON objects, such as the architecture, those of their values that do."""
    try:
        objects = [json.decode(text, type=dict[str, Any]) for text in (there, here)]
    except (DecodeError, RecursionError):
        return [f"{shown(name)} is {_quoted(there)} instead of {_quoted(here)}"]
    pairs = {key: [str(values.get(key, "")) for values in objects] for key in sorted(objects[0] | objects[1])}
    return [
        f"{shown(name)}.{shown(key)} is {_quoted(one)} instead of {_quoted(other)}"
        for key, (one, other) in pairs.items()
        if one != other
    ]


def _quoted(text: str) -> str:
    return f"'{shown(text)}'"

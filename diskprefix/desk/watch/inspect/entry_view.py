"""The output of `diskprefix inspect ENTRY`: the details of one saved prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import click
import numpy as np
from msgspec.structs import asdict

from diskprefix.desk.shared.tooling import SHOWN, print_json, short_id, shortened, tenant_names, terminal_width
from diskprefix.desk.watch.inspect.stored_text import decoder_of, runs
from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.note_record import NoteKind, decode_note
from diskprefix.prefixstore.store.schema import NodeRecord, RootRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.tree import EntryInfo, PrefixTree
from diskprefix.printable import printable_only
from diskprefix.tokens import TokenIds, picture_ids
from diskprefix.units import ago, format_size

_LABEL = 12
_SHOWN_CHARS = 600


def show_entry(snapshot: Snapshot, entries: Sequence[EntryInfo], info: EntryInfo, *, as_json: bool) -> None:
    """Prints one of `entries`, the entries of `snapshot`."""
    details = entry_details(snapshot, entries, info)
    if as_json:
        print_json(details)
        return
    for label, value in _lines(info, details):
        click.echo(f"{label:<{_LABEL}}{printable_only(value)}")
    room, others = max(20, terminal_width(otherwise=160) - 36), details["shared_with"]
    click.echo(f"{'shared with':<{_LABEL}}{len(others) or 'nobody'}")
    for other in others[:SHOWN]:
        preview = shortened(printable_only(other["preview"]), room)
        click.echo(f"  {short_id(other['id'])}  {other['num_tokens']:,} tokens  {preview}")
    if details["text"] is None:
        click.echo(f"{'preview':<{_LABEL}}{printable_only(info.preview)}")
    else:
        click.echo(f"text\n{_indented(details['text'])}")


def entry_details(snapshot: Snapshot, entries: Sequence[EntryInfo], info: EntryInfo) -> dict[str, Any]:
    """Returns JSON values for one of `entries`, the result of `list_entries` for this snapshot: the fields of `info`,
    and

    * `reason`, the policy's reason for the boundary, and `text`, None if the tokenizer was removed,
    * `images`, each with `position` and `num_tokens`, and with `size` and `digest` while its encoding is stored,
    * `blocks`, the blocks, tails and checkpoints in order, each with the number of `entries` that share it,
    * `shared_with`, the other saved prompts with common blocks, those with the most common tokens first.

    Raises `StoreCorrupt` if the prompt's path is damaged.
    """
    tree, name = PrefixTree(snapshot), bytes.fromhex(info.id)
    path, record = tree.entry(name), snapshot.entry(name)
    others = {other: tree.entry(bytes.fromhex(other.id)) for other in entries if other.id != info.id}
    users = Counter(node for nodes in others.values() for node in nodes)
    root = snapshot.root(record.root) if record else None
    token_ids = np.concatenate([node.token_ids for node in tree.path(name).values()])
    return asdict(info) | {
        "reason": record.reason if record else "",
        "shared_with": _shared_with(path, others),
        "blocks": [_block(snapshot, step, node, 1 + users[step]) for step, node in path.items()],
        "text": decode(token_ids) if root and (decode := decoder_of(root.tokenizer)) else None,
        "images": list(_pictures(snapshot, root, token_ids)) if root else [],
    }


def _shared_with(
    path: Mapping[bytes, NodeRecord], others: Mapping[EntryInfo, Mapping[bytes, NodeRecord]]
) -> list[dict[str, Any]]:
    common = {
        other: max((nodes[name].end for name in nodes.keys() & path.keys()), default=0)
        for other, nodes in others.items()
    }
    sharing = sorted((other for other in common if common[other]), key=lambda other: (-common[other], other.id))
    return [{"id": other.id, "num_tokens": common[other], "preview": other.preview} for other in sharing]


def _block(snapshot: Snapshot, name: bytes, node: NodeRecord, entries: int) -> dict[str, Any]:
    usage = snapshot.usage(name)
    return {
        "hash": name.hex(),
        "kind": node.kind.name.lower(),
        "position": node.position,
        "num_tokens": node.num_tokens,
        "raw_bytes": node.raw_bytes,
        "stored_bytes": node.stored_bytes,
        "entries": entries,
        "hits": usage.restores if usage else 0,
        "last_used_at": round(usage.last_used, 3) if usage else 0.0,
        "prefill_s": round(usage.prefill_s, 6) if usage else 0.0,
    }


def _pictures(snapshot: Snapshot, root: RootRecord, token_ids: TokenIds) -> Iterator[dict[str, Any]]:
    owner = root.model, root.tenant
    roots = {name for name, other in snapshot.roots() if other.has_pictures and (other.model, other.tenant) == owner}
    known: dict[int, dict[str, str]] = {}
    for note in snapshot.notes():
        if note.root in roots and note.kind == NoteKind.PICTURE:
            with suppress(StoreCorrupt):
                content = decode_note(note.key, snapshot.get_record("notes", note.key) or b"")[1]
                size, _, digest = content.decode().rpartition(" ")
                known[int(picture_ids(bytes.fromhex(digest), 1)[0])] = {"size": size, "digest": digest}
    for position, ids in runs(token_ids):
        if ids[0] < 0:
            yield {"position": position, "num_tokens": len(ids)} | known.get(int(ids[0]), {})


def _lines(info: EntryInfo, details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    blocks = [block for block in details["blocks"] if block["kind"] != "checkpoint"]
    points = ", ".join(f"{position:,}" for position in info.checkpoints)
    ratio = f", {info.raw_bytes / info.stored_bytes:.2f}× smaller" if info.stored_bytes < info.raw_bytes else ""
    yield "id", info.id
    yield "kind", info.kind
    yield "model", info.model
    yield "tokens", f"{info.num_tokens:,}"
    yield "stored", f"{format_size(info.stored_bytes)} (raw {format_size(info.raw_bytes)}{ratio})"
    yield "shared", format_size(info.shared_bytes)
    yield "checkpoints", f"{format_size(info.checkpoint_bytes)} at {points}" if points else "none"
    yield "blocks", f"{len(blocks)}, {sum(block['entries'] > 1 for block in blocks)} of them in other prompts too"
    for image in details["images"]:
        known = f": {image['size']}, digest {image['digest']}" if "size" in image else ""
        yield "image", f"{image['num_tokens']:,} tokens at {image['position']:,}{known}"
    yield "hits", f"{info.hits:,}"
    yield "created", ago(info.created_at)
    yield "last used", ago(info.last_used_at)
    yield "kept for", _ttl_text(info)
    yield "scope", info.scope
    yield "reason", details["reason"].replace("_", " ") or "not known"
    yield "tenant", tenant_names(in_full=True)(info.tenant) or "none"


def _indented(text: str) -> str:
    """Returns the beginning and the end of a text, indented and safe for a terminal."""
    if len(text) > 2 * _SHOWN_CHARS:
        left_out = len(text) - 2 * _SHOWN_CHARS
        text = f"{text[:_SHOWN_CHARS]}\n[… {left_out:,} characters; --json has all …]\n{text[-_SHOWN_CHARS:]}"
    return "\n".join(f"  {printable_only(line)}" for line in text.split("\n"))


def _ttl_text(info: EntryInfo) -> str:
    if info.ttl_s is None:
        return "until evicted (or --kv-cache-ttl, if set)"
    return f"{info.ttl_s:,} s after its last use" + (", or --kv-cache-ttl, if longer" if info.default_ttl else "")

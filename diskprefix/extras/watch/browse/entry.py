"""The details of a saved prompt: its blocks, the prompts that share them, and its uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diskprefix.store.savings import Savings
from diskprefix.store.schema import NodeRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo, PrefixTree
from diskprefix.tokens import TokenIds


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """A block, tail or checkpoint of a saved prompt. `entries` saved prompts share it. Sizes are in bytes,
    `prefill_s` in seconds."""

    hash: str
    kind: str
    position: int
    num_tokens: int
    raw_bytes: int
    stored_bytes: int
    entries: int
    hits: int
    last_used_at: float
    prefill_s: float


@dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """Another saved prompt. Its first `num_tokens` tokens are in the same blocks."""

    id: str
    num_tokens: int
    preview: str


@dataclass(frozen=True, kw_only=True)
class EntryDetails:
    """A saved prompt with its nodes in order. `shared_with` begins with the prompt that shares most.

    `reason` is the policy's reason for the boundary. `hit_times` are the remembered times of the last hits, in seconds
    since the epoch, oldest first. `tokenizer` is the folder of the tokenizer of `token_ids`, empty if unknown.
    """

    info: EntryInfo
    nodes: tuple[NodeInfo, ...]
    shared_with: tuple[SharedPrompt, ...]
    reason: str
    hit_times: tuple[float, ...]
    tokenizer: str
    token_ids: TokenIds


def entry_details(
    snapshot: Snapshot, entries: list[EntryInfo], info: EntryInfo, savings: Mapping[bytes, Savings]
) -> EntryDetails:
    """Returns the details of one of `entries`, the result of `list_entries` for this snapshot.

    `savings` is the result of `read_savings`. Raises `StoreCorrupt` if the prompt's path is damaged.
    """
    tree, name = PrefixTree(snapshot), bytes.fromhex(info.id)
    path = tree.entry(name)
    paths = {other.id: tree.entry(bytes.fromhex(other.id)) for other in entries if other.id != info.id}
    users = Counter(node for nodes in paths.values() for node in nodes)
    nodes = tuple(_node_info(snapshot, step, node, 1 + users[step]) for step, node in path.items())
    record = snapshot.entry(name)
    root = snapshot.root(record.root) if record else None
    used = savings.get(record.root) if record else None
    tokens = [node.token_ids for node in tree.path(name).values()]
    return EntryDetails(
        info=info,
        nodes=nodes,
        shared_with=_shared_with(entries, path, paths),
        reason=record.reason if record else "",
        hit_times=tuple(round(hit.when, 3) for hit in used.hits if hit.block in path) if used else (),
        tokenizer=root.tokenizer if root else "",
        token_ids=np.concatenate(tokens),
    )


def _shared_with(
    entries: list[EntryInfo], path: Mapping[bytes, NodeRecord], paths: Mapping[str, Mapping[bytes, NodeRecord]]
) -> tuple[SharedPrompt, ...]:
    found = []
    for other in entries:
        common = [node.end for name, node in paths.get(other.id, {}).items() if name in path]
        if common:
            found.append(SharedPrompt(id=other.id, num_tokens=max(common), preview=other.preview))
    return tuple(sorted(found, key=lambda one: (-one.num_tokens, one.id)))


def _node_info(snapshot: Snapshot, name: bytes, node: NodeRecord, entries: int) -> NodeInfo:
    usage = snapshot.usage(name)
    return NodeInfo(
        hash=name.hex(),
        kind=node.kind.name.lower(),
        position=node.position,
        num_tokens=node.num_tokens,
        raw_bytes=node.raw_bytes,
        stored_bytes=node.stored_bytes,
        entries=entries,
        hits=usage.restores if usage else 0,
        last_used_at=round(usage.last_used, 3) if usage else 0.0,
        prefill_s=round(usage.prefill_s, 6) if usage else 0.0,
    )

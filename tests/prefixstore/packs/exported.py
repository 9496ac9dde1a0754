"""Entries that can be exported: their roots are the hashes of identities, as a daemon's are."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diskprefix.prefixstore.packs.exchange import Imported, export_pack, import_pack
from diskprefix.prefixstore.packs.pack_file import PackReader
from diskprefix.prefixstore.store.schema import EntryRecord, RootRecord
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.tokens import TokenIds, root_hash
from tests.prefixstore.store.building import BLOCK, publication

LAYOUT = json.dumps(
    {
        "version": 1,
        "groups": [
            {"heads": 2, "head_dim": 4, "dtype": "bfloat16", "tensors": ["0.keys", "0.values", "1.values"]},
            {"heads": 1, "head_dim": 3, "dtype": "float32", "tensors": ["1.keys"]},
        ],
        "logits": [25, "float32"],
    },
    separators=(",", ":"),
)
"""A model of two layers whose second has keys of another form: 60 bytes a token."""
HYBRID = json.dumps(
    json.loads(LAYOUT)
    | {
        "states": [
            {"shape": [6, 3], "rows": 6, "dtype": "bfloat16", "tensors": ["2.conv0", "3.conv0"]},
            {"shape": [2, 4, 5], "rows": 2, "dtype": "float32", "tensors": ["2.recurrent0", "3.recurrent0"]},
        ]
    },
    separators=(",", ":"),
)
"""The same with two layers more, of states at one position: 392 bytes."""
TENANT = "0123456789abcdef" * 2


def large_layout(block_bytes: int) -> str:
    """A model whose blocks take that many bytes, a multiple of `8 * BLOCK`."""
    group = {"heads": 2, "head_dim": block_bytes // (8 * BLOCK), "dtype": "float16", "tensors": ["0.keys", "0.values"]}
    return json.dumps({"version": 1, "groups": [group], "logits": [25, "float32"]}, separators=(",", ":"))


def identity_of(layout: str = LAYOUT, *, weights: str = "w1", tenant: str = "", torch_version: str = "2.13") -> str:
    fingerprint = {"weights_digest": weights, "torch_version": torch_version, "dtype": "bfloat16"}
    values = {"fingerprint": fingerprint, "block_size": BLOCK, "layout_version": 1, "layout": layout, "salt": tenant}
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def entry_of(
    store: Store,
    token_ids: TokenIds,
    *,
    layout: str = LAYOUT,
    identity: str = "",
    tenant: str = "",
    model: str = "tiny",
    with_tail: bool = True,
    checkpoints: Collection[int] = (),
    replaces: bool = False,
) -> Publication:
    """Returns what saving this prompt publishes; without its tail, it ends with its last full block or checkpoint."""
    identity = identity or identity_of(layout, tenant=tenant)
    root = root_hash(identity)
    pub = publication(
        store,
        token_ids,
        root=root,
        layout=layout,
        checkpoints=checkpoints,
        replaces=replaces,
    )
    nodes = pub.nodes if with_tail else pub.nodes[:-1]
    return replace(
        pub,
        epoch=store.epochs.of(tenant),
        nodes=nodes,
        last_node=nodes[-1].name,
        entry=EntryRecord(
            root=root,
            num_tokens=nodes[-1].position + len(nodes[-1].token_ids),
            scope="auto:30",
            preview='Wie schön … 🦀 "quoted"',
            created_at=1234.5,
        ),
        root_record=RootRecord(
            model=model, block_size=BLOCK, layout=layout, created_at=0.0, identity=identity, tenant=tenant
        ),
    )


def export(store: Store, pub: Publication, path: Path, *, force: bool = False) -> Path:
    return export_all(store, [pub], path, force=force)


def export_all(store: Store, pubs: Sequence[Publication], path: Path, **options: Any) -> Path:
    names = [pub.last_node for pub in pubs if pub.last_node is not None]
    export_pack(store, names, path, **{"force": False} | options, advance=lambda _num_bytes: None)
    return path


def import_file(store: Store, path: Path, *, is_unverified: bool = False) -> Imported:
    with PackReader.open(path) as reader:
        reader.read_nodes()
        return import_pack(store, reader, advance=lambda _num_bytes: None, is_unverified=is_unverified)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def joined(header: object, data: bytes) -> bytes:
    """The inverse of `split`. A header of bytes is taken as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def sealed(header: dict[str, Any], data: bytes) -> bytes:
    """The file with the digest that its manifest ought to have: what is wrong beside it is left to be found."""
    start, end = header["token_ids"]["data_offsets"]
    text = header["__metadata__"]["manifest"].encode(errors="replace")
    header["__metadata__"]["manifest"] = text.decode()
    digests_at, digests_end = header["digests"]["data_offsets"]
    index = hashlib.sha256(text + data[start:end] + data[digests_at : digests_end - 32]).digest()
    return joined(header, data[: digests_end - 32] + index + data[digests_end:])


def with_payload(header: dict[str, Any], data: bytes, number: int, at: int, payload: bytes) -> bytes:
    """The file with another payload of a node, which begins at byte `at`, and all its digests."""
    start, digests_at = header["payloads"]["data_offsets"][0] + at, header["digests"]["data_offsets"][0] + 32 * number
    data = data[:start] + payload + data[start + len(payload) :]
    digest = hashlib.sha256(payload).digest()
    return sealed(header, data[:digests_at] + digest + data[digests_at + 32 :])

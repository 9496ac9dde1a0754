"""An export is what was stored; an import was verified; a bad file changes nothing."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diskprefix.errors import (
    PrefixGone,
    SettingsError,
    StoreCorrupt,
    StoreFull,
    StoreUnavailable,
)
from diskprefix.extras.exchange import exchange
from diskprefix.extras.exchange.entry_file import EntryReader
from diskprefix.extras.exchange.exchange import (
    require_known_model,
)
from diskprefix.store.codec.codec import Codec
from diskprefix.store.schema import Kind, ModelRecord
from diskprefix.store.store import Publication, Store
from diskprefix.store.verify import verify_index
from diskprefix.tokens import TokenIds
from tests.extras.exchange.exported import (
    HYBRID,
    LAYOUT,
    TENANT,
    entry_of,
    export,
    identity_of,
    import_file,
    large_layout,
)
from tests.store.building import BLOCK, Clock, damage, is_whole, open_store, prompt
from tests.traced_memory import traced_peak

PROMPT = prompt(1, 3 * BLOCK + 5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "source")
    yield store
    store.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "target")
    yield store
    store.close()


@pytest.fixture
def pub(store: Store) -> Publication:
    pub = entry_of(store, PROMPT)
    store.publish(pub)
    return pub


@pytest.fixture
def file(store: Store, pub: Publication, tmp_path: Path) -> Path:
    return export(store, pub, tmp_path / "entry.safetensors")


def nothing_in(store: Store) -> bool:
    counts = store.counts()
    return counts["blocks"] == counts["entries"] == 0


@pytest.mark.parametrize("written", list(Codec), ids=lambda codec: codec.name)
@pytest.mark.parametrize("read", list(Codec), ids=lambda codec: codec.name)
def test_payloads_are_the_same_in_a_store_of_another_secret_and_codec(
    store: Store, target: Store, tmp_path: Path, written: Codec, read: Codec
) -> None:
    store.codec, target.codec = written, read
    pub = entry_of(store, PROMPT)
    done = import_file(target, exported(store, pub, tmp_path / "e.safetensors"))
    theirs = entry_of(target, PROMPT)
    assert is_whole(target, theirs)
    assert {node.name for node in pub.nodes}.isdisjoint(node.name for node in theirs.nodes)
    assert theirs.last_node is not None
    assert (done.id, done.new_nodes) == (theirs.last_node.hex(), 4)
    assert done.new_bytes == theirs.payload_bytes


def test_all_that_is_known_of_an_entry_comes_along_but_what_is_of_its_machine(
    store: Store, target: Store, tmp_path: Path
) -> None:
    pub = entry_of(store, PROMPT, tenant=TENANT)
    nodes = tuple(replace(node, prefill_s=1.25 + node.position) for node in pub.nodes)
    record = structs.replace(pub.root_record, tokenizer="/home/somebody/model")
    import_file(target, exported(store, replace(pub, nodes=nodes, root_record=record), tmp_path / "e.safetensors"))
    theirs = entry_of(target, PROMPT, tenant=TENANT)
    assert theirs.last_node is not None
    assert pub.entry is not None
    with target.snapshot() as snapshot:
        assert snapshot.entry(theirs.last_node) == pub.entry
        assert snapshot.root(pub.root) == structs.replace(pub.root_record, created_at=pub.entry.created_at)
        usages = [snapshot.usage(node.name) for node in theirs.nodes]
        assert [usage.prefill_s for usage in usages if usage] == [node.prefill_s for node in nodes]


def test_the_file_is_what_its_page_says(pub: Publication, file: Path) -> None:
    tensors = load_file(file)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "token_ids": (torch.int32, (len(PROMPT),)),
        "payloads": (torch.uint8, (60 * len(PROMPT) + 100,)),
        "checksums": (torch.uint8, (8 * 5,)),
    }
    assert tensors["token_ids"].tolist() == PROMPT.tolist()
    assert tensors["payloads"].numpy().tobytes() == b"".join(node.payload for node in pub.nodes)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata["format"], metadata["version"]) == ("diskprefix-entry", "1")
    manifest = json.loads(metadata["manifest"])
    assert (manifest["root"]["model"], manifest["root"]["layout"]) == ("tiny", LAYOUT)
    assert manifest["root"]["identity"] == pub.root_record.identity
    assert (manifest["entry"]["scope"], manifest["entry"]["num_tokens"]) == ("auto:30", len(PROMPT))
    assert manifest["nodes"] == [*([0, start, BLOCK, 0.5] for start in (0, 16, 32)), [1, 48, 5, 0.5]]


def test_a_file_that_safetensors_wrote_anew_is_imported(target: Store, file: Path, tmp_path: Path) -> None:
    """Its own writer puts the tensors in another order."""
    again = tmp_path / "again.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), again, metadata=metadata)
    import_file(target, again)
    assert is_whole(target, entry_of(target, PROMPT))


PAGES = {"heads": 2, "head_dim": 4, "dtype": "uint8", "tensors": ["0.pages", "1.pages"]} | {
    "axes": ["page", "token", "head", "dim"],
    "page": BLOCK // 2,
}
LAYOUTS = {
    "states alone": json.loads(HYBRID) | {"groups": []},
    "a window": json.loads(LAYOUT) | {"groups": [json.loads(LAYOUT)["groups"][0] | {"window": 5}]},
    "pages": {"version": 1, "groups": [PAGES], "logits": [0, "float32"], "shard": [1, 2]},
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_an_entry_of_any_layout_comes_back(store: Store, target: Store, tmp_path: Path, layout: str) -> None:
    text = json.dumps(LAYOUTS[layout], separators=(",", ":"))
    for num_tokens in (3, len(PROMPT)):
        with_tail = layout != "pages"
        token_ids = PROMPT[:num_tokens] if with_tail else PROMPT[: 2 * BLOCK]
        pub, theirs = (entry_of(s, token_ids, layout=text, with_tail=with_tail) for s in (store, target))
        import_file(target, exported(store, pub, tmp_path / f"{num_tokens}.safetensors"))
        assert is_whole(target, theirs)


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_prompts_of_any_length_come_back(store: Store, target: Store, tmp_path: Path, num_tokens: int) -> None:
    import_file(target, exported(store, entry_of(store, prompt(2, num_tokens)), tmp_path / "e.safetensors"))
    assert is_whole(target, entry_of(target, prompt(2, num_tokens)))


POINTS = (BLOCK, 3 * BLOCK)


def of_hybrid(store: Store, token_ids: TokenIds = PROMPT, **how: Any) -> Publication:
    return entry_of(store, token_ids, layout=HYBRID, checkpoints=how.pop("checkpoints", POINTS), **how)


def exported(store: Store, pub: Publication, path: Path) -> Path:
    store.publish(pub)
    return export(store, pub, path)


@pytest.mark.parametrize("with_tail", [True, False])
@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
def test_states_come_along_with_every_checkpoint_on_the_path(
    store: Store, target: Store, tmp_path: Path, with_tail: bool, codec: Codec
) -> None:
    target.codec = codec
    done = import_file(target, exported(store, of_hybrid(store, with_tail=with_tail), tmp_path / "e.safetensors"))
    theirs = of_hybrid(target, with_tail=with_tail)
    assert is_whole(target, theirs)
    assert theirs.last_node is not None
    assert (done.id, done.new_nodes) == (theirs.last_node.hex(), len(theirs.nodes))
    assert done.new_bytes == theirs.payload_bytes
    with target.snapshot() as snapshot:
        assert snapshot.entry(theirs.last_node) == theirs.entry
    assert verify_index(target).problems == ()


def test_an_entry_that_ends_with_a_block_brings_the_checkpoints_before_it(
    store: Store, target: Store, tmp_path: Path
) -> None:
    def pub_of(store: Store) -> Publication:
        return of_hybrid(store, checkpoints=(BLOCK, 2 * BLOCK), with_tail=False)

    import_file(target, exported(store, pub_of(store), tmp_path / "e.safetensors"))
    assert pub_of(store).nodes[-1].kind == Kind.BLOCK
    assert is_whole(target, pub_of(target))


def test_an_entry_that_lost_all_its_checkpoints_is_not_exported(store: Store, tmp_path: Path) -> None:
    pub = of_hybrid(store, checkpoints=(), with_tail=False)
    with pytest.raises(SettingsError, match="has lost the checkpoint that it could be restored at; send the prompt"):
        exported(store, pub, tmp_path / "e.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_checkpoint_that_is_missing_is_brought_and_what_is_there_is_not_stored_again(
    store: Store, target: Store, tmp_path: Path
) -> None:
    path = exported(store, of_hybrid(store), tmp_path / "e.safetensors")
    target.publish(of_hybrid(target, checkpoints=(3 * BLOCK,)))
    done = import_file(target, path)
    assert (done.new_nodes, done.new_bytes) == (1, 392)
    assert is_whole(target, of_hybrid(target))


def test_a_file_is_overwritten_only_by_force(store: Store, pub: Publication, tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"
    path.write_text("precious")
    with pytest.raises(SettingsError, match="exists; add --force"):
        export(store, pub, path)
    assert path.read_text() == "precious"
    export(store, pub, path, force=True)
    assert len(load_file(path)["token_ids"]) == len(PROMPT)


def test_a_file_that_appears_meanwhile_is_not_overwritten(store: Store, pub: Publication, tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"

    def write(_num_bytes: int) -> None:
        path.write_text("precious")

    assert pub.last_node is not None
    with pytest.raises(SettingsError, match="exists"):
        exchange.export_entry(store, pub.last_node, path, force=False, advance=write)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.safetensors", "source"]
    assert path.read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_named(store: Store, pub: Publication, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"nowhere/e\.safetensors: No such file"):
        export(store, pub, tmp_path / "nowhere" / "e.safetensors")


def test_a_full_disk_leaves_no_file(
    store: Store, pub: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailable, match=r"e\.safetensors: No space left"):
        export(store, pub, tmp_path / "e.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_damaged_block_is_not_exported(store: Store, pub: Publication, tmp_path: Path) -> None:
    damage(store, pub.nodes[2].name)
    with pytest.raises(StoreCorrupt, match=f"{pub.nodes[2].name.hex()}.*verify --fix"):
        export(store, pub, tmp_path / "e.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_an_entry_that_is_evicted_meanwhile_is_not_exported(store: Store, pub: Publication, tmp_path: Path) -> None:
    def evict(_num_bytes: int) -> None:
        for node in pub.nodes[:0:-1]:
            store.quarantine(node.name, node.parent)

    assert pub.last_node is not None
    with pytest.raises(PrefixGone, match="evicted while it was exported"):
        exchange.export_entry(store, pub.last_node, tmp_path / "e.safetensors", force=False, advance=evict)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_what_two_entries_share_is_stored_once(store: Store, target: Store, tmp_path: Path) -> None:
    longer = np.concatenate([PROMPT[: 2 * BLOCK], prompt(9, 2 * BLOCK)])
    files = []
    for i, token_ids in enumerate((PROMPT, longer)):
        files.append(exported(store, entry_of(store, token_ids), tmp_path / f"{i}.safetensors"))
    first, second, again = (import_file(target, file) for file in (*files, files[0]))
    assert (first.new_nodes, second.new_nodes, again.new_nodes) == (4, 3, 0)
    assert target.counts()["blocks"] == 7
    assert is_whole(target, entry_of(target, PROMPT))
    assert is_whole(target, entry_of(target, longer))


def known(store: Store, path: Path) -> None:
    with EntryReader.open(path) as reader, store.snapshot() as snapshot:
        require_known_model(snapshot, reader)


def test_another_model_s_state_is_refused_with_what_differs_from_the_nearest(target: Store, file: Path) -> None:
    def serve(model: str, identity: str) -> None:
        with target.changes() as changes:
            changes.put_model(ModelRecord(model=model, identity=identity))

    def refused(words: str) -> None:
        with pytest.raises(SettingsError, match=f"'tiny', {words}; serve that model"):
            known(target, file)

    refused("but this store has seen no model yet")
    serve("unreadable", "?")
    refused("but this store has seen no model yet")
    target.publish(entry_of(target, prompt(5, BLOCK), identity=identity_of(weights="w2", torch_version="2.14")))
    refused("which differs from 'tiny' here in torch_version, weights_digest")
    serve("near\x1b[2J", identity_of(torch_version="2.14"))
    refused(r"which differs from 'near\\x1b\[2J' here in torch_version")
    serve("served", identity_of())
    known(target, file)


def test_another_tenant_of_a_known_model_is_no_other_model(store: Store, target: Store, tmp_path: Path) -> None:
    target.publish(entry_of(target, prompt(5, BLOCK)))
    path = exported(store, entry_of(store, PROMPT, tenant=TENANT), tmp_path / "e.safetensors")
    known(target, path)
    import_file(target, path)
    assert is_whole(target, entry_of(target, PROMPT, tenant=TENANT))
    assert not is_whole(target, entry_of(target, PROMPT))


def test_a_file_that_is_larger_than_the_budget_is_refused_before_anything_is_evicted(
    store: Store, tmp_path: Path
) -> None:
    layout = large_layout(1 << 20)
    path = exported(store, entry_of(store, prompt(1, 20 * BLOCK), layout=layout), tmp_path / "e.safetensors")
    target = open_store(tmp_path / "target", budget_bytes=16 << 20)
    kept = entry_of(target, prompt(2, 8 * BLOCK), layout=layout)
    target.publish(kept)
    with pytest.raises(StoreFull, match="do not fit --kv-cache-budget"):
        import_file(target, path)
    assert is_whole(target, kept)
    assert target.counts()["blocks"] == len(kept.nodes)
    target.close()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication for every two blocks."""
    monkeypatch.setattr(exchange, "_BATCH_BYTES", 1500)


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.usefixtures("small_batches")
def test_what_an_import_leaves_behind_is_a_shorter_prefix_that_the_next_one_completes(
    store: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(store, entry_of(store, prompt(3, 7 * BLOCK + 1)), tmp_path / "e.safetensors")
    publish = target.publish

    def killed(publication: Publication) -> int:
        if target.counts()["blocks"] == 4:
            raise Killed
        return publish(publication)

    monkeypatch.setattr(target, "publish", killed)
    with pytest.raises(Killed):
        import_file(target, path)
    monkeypatch.undo()
    theirs = entry_of(target, prompt(3, 7 * BLOCK + 1))
    assert is_whole(target, replace(theirs, nodes=theirs.nodes[:4]))
    assert target.counts()["entries"] == 0
    assert import_file(target, path).new_nodes == 4
    assert is_whole(target, theirs)


def test_what_changes_after_it_was_verified_is_not_imported(target: Store, file: Path) -> None:
    with EntryReader.open(file) as reader:
        reader.verify_payloads(lambda _num_bytes: None)
        with file.open("r+b") as opened:
            opened.seek(-100, os.SEEK_END)
            opened.write(b"12345678")
        with pytest.raises(StoreCorrupt, match=r"entry\.safetensors is damaged: the checksum of tokens"):
            exchange.import_entry(target, reader, advance=lambda _num_bytes: None)
    assert nothing_in(target)


def test_an_import_makes_room_by_evicting_others(store: Store, tmp_path: Path) -> None:
    layout = large_layout(1 << 20)
    clock = Clock()
    target = open_store(tmp_path / "target", budget_bytes=16 << 20, clock=clock)
    old = entry_of(target, prompt(2, 8 * BLOCK), layout=layout)
    target.publish(old)
    clock.now += 3600
    pub = entry_of(store, prompt(1, 10 * BLOCK), layout=layout)
    done = import_file(target, exported(store, pub, tmp_path / "e.safetensors"))
    assert done.evicted > 0
    assert is_whole(target, entry_of(target, prompt(1, 10 * BLOCK), layout=layout))
    assert not is_whole(target, old)
    target.close()


def test_memory_stays_at_a_few_blocks_whatever_the_entry_s_size(
    store: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, count = 512 * 1024, 40
    monkeypatch.setattr(exchange, "_BATCH_BYTES", 2 * block)
    pub = entry_of(store, prompt(1, count * BLOCK), layout=large_layout(block))
    store.publish(pub)
    del pub
    name = next(iter(listed(store)))
    path = tmp_path / "e.safetensors"

    assert (
        traced_peak(lambda: exchange.export_entry(store, name, path, force=False, advance=lambda _: None)) < 4 * block
    )
    assert path.stat().st_size > count * block
    assert traced_peak(lambda: import_file(target, path)) < 12 * block


def listed(store: Store) -> list[bytes]:
    with store.snapshot() as snapshot:
        return [name for name, _ in snapshot.entries()]

"""An export is what was stored; an import was verified; a bad file changes nothing."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    known_models,
    open_target,
    plan_import,
    require_known_model,
    verify_payloads,
)
from diskprefix.store.codec.codec import Codec
from diskprefix.store.maintenance.verify import verify_index
from diskprefix.store.schema import Kind, ModelRecord
from diskprefix.store.store import Publication, Store
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


def parts(payload: memoryview, num_tokens: int) -> dict[str, torch.Tensor]:
    """The tensors of a block's payload under `LAYOUT`, each [1, heads, num_tokens, head_dim]."""
    found: dict[str, torch.Tensor] = {}
    start = 0
    for names, dtype, heads, head_dim in (
        (("0.keys", "0.values", "1.values"), torch.bfloat16, 2, 4),
        (("1.keys",), torch.float32, 1, 3),
    ):
        for name in names:
            count = heads * num_tokens * head_dim
            values = torch.frombuffer(bytearray(payload), dtype=dtype, count=count, offset=start)
            found[name] = values.reshape(1, heads, num_tokens, head_dim)
            start += count * dtype.itemsize
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Payloads of tests are random bits: some are no numbers, which are unequal to themselves."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


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
    assert (done.id, done.num_nodes, done.new_nodes, done.is_new) == (theirs.last_node.hex(), 4, 4, True)
    assert done.new_bytes == theirs.payload_bytes


def test_all_that_is_known_of_an_entry_comes_along(store: Store, target: Store, tmp_path: Path) -> None:
    pub = entry_of(store, PROMPT, tenant=TENANT)
    nodes = tuple(replace(node, prefill_s=1.25 + node.position) for node in pub.nodes)
    import_file(target, exported(store, replace(pub, nodes=nodes), tmp_path / "e.safetensors"))
    theirs = entry_of(target, PROMPT, tenant=TENANT)
    assert theirs.last_node is not None
    with target.snapshot() as snapshot:
        assert snapshot.entry(theirs.last_node) == pub.entry
        assert snapshot.root(pub.root) == replace_created(pub)
        usages = [snapshot.usage(node.name) for node in theirs.nodes]
        assert [usage.prefill_s for usage in usages if usage] == [node.prefill_s for node in nodes]


def replace_created(pub: Publication) -> Any:
    """A root is as old as the entry that brought it."""
    assert pub.entry is not None
    return type(pub.root_record)(**{**_fields(pub.root_record), "created_at": pub.entry.created_at})


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_anybody_reads_the_tensors_with_their_true_dtypes_and_shapes(pub: Publication, file: Path) -> None:
    tensors = load_file(file)
    num_tokens = len(PROMPT)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "layers.0.keys": (torch.bfloat16, (1, 2, num_tokens, 4)),
        "layers.0.values": (torch.bfloat16, (1, 2, num_tokens, 4)),
        "layers.1.keys": (torch.float32, (1, 1, num_tokens, 3)),
        "layers.1.values": (torch.bfloat16, (1, 2, num_tokens, 4)),
        "logits": (torch.float32, (25,)),
        "token_ids": (torch.int32, (num_tokens,)),
        "nodes.checksum": (torch.uint64, (4,)),
        "nodes.prefill_s": (torch.float64, (4,)),
    }
    assert tensors["token_ids"].tolist() == PROMPT.tolist()
    assert tensors["logits"].numpy().tobytes() == bytes(pub.nodes[-1].payload[-100:])
    blocks = [parts(node.payload, len(node.token_ids)) for node in pub.nodes]
    for name in blocks[0]:
        assert same_bits(tensors[f"layers.{name}"], torch.cat([block[name] for block in blocks], dim=2)), name


def test_pages_come_along_page_by_page(store: Store, target: Store, tmp_path: Path) -> None:
    group = {"heads": 2, "head_dim": 4, "dtype": "uint8", "tensors": ["0.pages", "1.pages"]}
    group |= {"axes": ["page", "token", "head", "dim"], "page": BLOCK // 2}
    layout = json.dumps({"version": 1, "groups": [group], "logits": [0, "float32"], "shard": [1, 2]})
    pub, again = (entry_of(one, prompt(2, 2 * BLOCK), layout=layout, with_tail=False) for one in (store, target))
    pub, again = (replace(one, nodes=one.nodes[:2], last_node=one.nodes[1].name) for one in (pub, again))
    file = exported(store, pub, tmp_path / "e.safetensors")
    pages = load_file(file)["layers.1.pages"]
    assert tuple(pages.shape) == (4, BLOCK // 2, 2, 4)
    assert pages.numpy().tobytes() == b"".join(bytes(node.payload)[-len(node.payload) // 2 :] for node in pub.nodes)
    import_file(target, file)
    assert is_whole(target, again)


def test_the_metadata_says_what_the_file_is(pub: Publication, file: Path) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata["format"], metadata["version"]) == ("diskprefix-entry", "1")
    assert metadata["root"] == pub.root.hex()
    assert (metadata["identity"], metadata["layout"]) == (pub.root_record.identity, LAYOUT)
    assert (metadata["model"], metadata["scope"], metadata["num_tokens"]) == ("tiny", "auto:30", str(len(PROMPT)))
    assert pub.entry is not None
    assert metadata["preview"] == pub.entry.preview
    assert "states" not in metadata


def test_each_tensor_starts_at_a_multiple_of_its_element(file: Path) -> None:
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    size = {"F64": 8, "U64": 8, "F32": 4, "I32": 4, "BF16": 2}
    for name, tensor in header.items():
        if name != "__metadata__":
            assert (8 + length + tensor["data_offsets"][0]) % size[tensor["dtype"]] == 0, name


def test_a_file_that_safetensors_wrote_anew_is_imported(target: Store, file: Path, tmp_path: Path) -> None:
    """Its own writer puts the tensors in another order."""
    again = tmp_path / "again.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), again, metadata=metadata)
    assert again.read_bytes() != file.read_bytes()
    import_file(target, again)
    assert is_whole(target, entry_of(target, PROMPT))


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_prompts_of_any_length_come_back(store: Store, target: Store, tmp_path: Path, num_tokens: int) -> None:
    import_file(target, exported(store, entry_of(store, prompt(2, num_tokens)), tmp_path / "e.safetensors"))
    assert is_whole(target, entry_of(target, prompt(2, num_tokens)))


def test_an_entry_that_ends_with_a_block_has_no_logits(store: Store, target: Store, tmp_path: Path) -> None:
    path = exported(store, entry_of(store, PROMPT, with_tail=False), tmp_path / "e.safetensors")
    tensors = load_file(path)
    assert "logits" not in tensors
    assert tensors["token_ids"].tolist() == PROMPT[: 3 * BLOCK].tolist()
    assert import_file(target, path).num_nodes == 3
    assert is_whole(target, entry_of(target, PROMPT, with_tail=False))


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
    assert (done.id, done.num_nodes, done.new_nodes) == (theirs.last_node.hex(), len(theirs.nodes), len(theirs.nodes))
    assert done.new_bytes == theirs.payload_bytes
    with target.snapshot() as snapshot:
        assert snapshot.entry(theirs.last_node) == theirs.entry
    assert verify_index(target).problems == ()


def test_a_model_of_states_alone_comes_back(store: Store, target: Store, tmp_path: Path) -> None:
    layout = json.dumps(json.loads(HYBRID) | {"groups": []}, separators=(",", ":"))
    for num_tokens in (3, len(PROMPT)):
        pub, theirs = (entry_of(s, PROMPT[:num_tokens], layout=layout) for s in (store, target))
        import_file(target, exported(store, pub, tmp_path / f"{num_tokens}.safetensors"))
        assert is_whole(target, theirs)


def test_states_are_where_the_file_says_they_are(store: Store, tmp_path: Path) -> None:
    pub = of_hybrid(store)
    path = exported(store, pub, tmp_path / "e.safetensors")
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata["version"], metadata["states"]) == ("1", f"{BLOCK},{3 * BLOCK},{len(PROMPT)}")
    tensors = load_file(path)
    assert tensors["layers.3.conv0"].shape == (3, 6, 3)
    assert tensors["layers.2.recurrent0"].shape == (3, 2, 4, 5)
    with_states = [node for node in pub.nodes if node.kind != Kind.BLOCK]
    for row, node in enumerate(with_states):
        states = bytes(node.payload)[60 * len(node.token_ids) :][:392]
        names = ("2.conv0", "3.conv0", "2.recurrent0", "3.recurrent0")
        found = [tensors[f"layers.{name}"][row].contiguous().view(torch.uint8).numpy().tobytes() for name in names]
        assert b"".join(found) == states


def test_a_layer_with_a_window_is_exported_for_all_tokens(store: Store, target: Store, tmp_path: Path) -> None:
    groups = json.loads(LAYOUT)["groups"]
    layout = json.dumps(json.loads(LAYOUT) | {"groups": [groups[0], groups[1] | {"window": 5}]}, separators=(",", ":"))
    path = exported(store, entry_of(store, PROMPT, layout=layout), tmp_path / "e.safetensors")
    assert load_file(path)["layers.1.keys"].shape == (1, 1, len(PROMPT), 3)
    import_file(target, path)
    assert is_whole(target, entry_of(target, PROMPT, layout=layout))


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


def test_a_damaged_checkpoint_is_not_exported(store: Store, tmp_path: Path) -> None:
    pub = of_hybrid(store)
    store.publish(pub)
    checkpoint = pub.nodes[1]
    damage(store, checkpoint.name)
    with pytest.raises(StoreCorrupt, match=f"checkpoint {checkpoint.name.hex()} .at token {BLOCK}.*verify --fix"):
        export(store, pub, tmp_path / "e.safetensors")


def test_a_checkpoint_that_is_missing_is_brought_and_what_is_there_is_not_stored_again(
    store: Store, target: Store, tmp_path: Path
) -> None:
    path = exported(store, of_hybrid(store), tmp_path / "e.safetensors")
    target.publish(of_hybrid(target, checkpoints=(3 * BLOCK,)))
    done = import_file(target, path)
    assert (done.new_nodes, done.new_bytes, done.is_new) == (1, 392, False)
    assert is_whole(target, of_hybrid(target))


def test_a_damaged_checkpoint_in_a_file_is_named(store: Store, target: Store, tmp_path: Path) -> None:
    path = exported(store, of_hybrid(store), tmp_path / "e.safetensors")
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    start, _ = json.loads(data[8 : 8 + length])["layers.2.conv0"]["data_offsets"]
    data[8 + length + start + 36] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorrupt, match=f"the checksum of the checkpoint at token {3 * BLOCK} does not match"):
        import_file(target, path)


def test_the_file_is_its_owner_s_alone(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


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
    calls = iter(range(10))

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if next(calls) == 9:
            raise OSError(28, os.strerror(28))
        return write(fd, data, offset)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreUnavailable, match=r"e\.safetensors: No space left"):
        export(store, pub, tmp_path / "e.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_damaged_block_is_not_exported(store: Store, pub: Publication, tmp_path: Path) -> None:
    damage(store, pub.nodes[2].name)
    with pytest.raises(StoreCorrupt, match=f"{pub.nodes[2].name.hex()}.*tokens 32 to 48.*verify --fix"):
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
    assert (first.is_new, second.is_new, again.is_new) == (True, True, False)
    assert target.counts()["blocks"] == 7
    assert is_whole(target, entry_of(target, PROMPT))
    assert is_whole(target, entry_of(target, longer))


def test_a_dry_run_foresees_what_is_new(store: Store, target: Store, tmp_path: Path) -> None:
    pub = entry_of(store, PROMPT)
    store.publish(pub)
    target.publish(entry_of(target, PROMPT[: 2 * BLOCK], with_tail=False))
    with EntryReader.open(export(store, pub, tmp_path / "e.safetensors")) as reader:
        planned = plan_import(target, reader)
        unnamed = plan_import(None, reader)
    assert (planned.num_nodes, planned.new_nodes, planned.is_new) == (4, 2, True)
    assert (unnamed.id, unnamed.new_nodes, unnamed.new_bytes) == (None, 4, pub.payload_bytes)
    assert target.counts()["blocks"] == 2
    done = import_file(target, tmp_path / "e.safetensors")
    assert replace(done, evicted=0) == planned


def known(store: Store, path: Path) -> None:
    with EntryReader.open(path) as reader, store.snapshot() as snapshot:
        require_known_model(known_models(snapshot), reader, "do so")


def test_another_model_s_state_is_refused_with_what_differs(target: Store, file: Path) -> None:
    with pytest.raises(SettingsError, match=r"'tiny', but this store has seen no model yet; do so"):
        known(target, file)
    other = entry_of(target, prompt(5, BLOCK), identity=identity_of(weights="w2"), model="other\x1b[2J")
    target.publish(other)
    differs = r"'tiny', but compared with 'other\\x1b\[2J' here, weights_digest is 'w1' instead of 'w2'; do so"
    with pytest.raises(SettingsError, match=differs):
        known(target, file)
    target.publish(entry_of(target, prompt(5, BLOCK)))
    known(target, file)


def test_a_model_that_was_served_is_known_before_anything_is_stored(target: Store, file: Path) -> None:
    with target.changes() as changes:
        changes.put_model(ModelRecord(model="served", identity=identity_of(torch_version="2.14")))
    with pytest.raises(
        SettingsError, match=r"compared with 'served' here, torch_version is '2\.13' instead of '2\.14'"
    ):
        known(target, file)
    with target.changes() as changes:
        changes.put_model(ModelRecord(model="served", identity=identity_of()))
    known(target, file)


def test_of_several_models_the_nearest_tells_what_differs_the_weights_first(file: Path) -> None:
    def served(name: str, **fingerprint: str) -> ModelRecord:
        identity = json.loads(identity_of())
        identity["fingerprint"] |= fingerprint
        return ModelRecord(model=name, identity=json.dumps(identity))

    near = served("near", weights_digest="w2", architecture='{"layers":2,"heads":4}', adapters="a", cpu="b", zeta="c")
    far = served("far", **{f"field_{number}": "x" for number in range(9)})
    unreadable = ModelRecord(model="unreadable", identity="?")
    differs = (
        r"compared with 'near' here, weights_digest is 'w1' instead of 'w2', adapters is '' instead of 'a', "
        r"architecture is '' instead of '\{\"layers\":2,\"heads\":4\}', cpu is '' instead of 'b' and 1 more; do so"
    )
    with EntryReader.open(file) as reader:
        with pytest.raises(SettingsError, match=differs):
            require_known_model([far, near], reader, "do so")
        with pytest.raises(SettingsError, match="compared with 'unreadable' here, an identity cannot be read"):
            require_known_model([unreadable], reader, "do so")


def test_of_another_architecture_the_values_are_named_that_differ(store: Store, tmp_path: Path) -> None:
    def identity(architecture: str) -> str:
        fields = json.loads(identity_of())
        fields["fingerprint"] |= {"architecture": architecture}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    pub = entry_of(store, PROMPT, identity=identity('{"heads":4,"layers":2,"rope":{"theta":1.0}}'))
    store.publish(pub)
    other = ModelRecord(model="deep", identity=identity('{"heads":4,"layers":3}'))
    differs = r"architecture\.layers is '2' instead of '3', architecture\.rope is '\{.*1.*' instead of ''; do so"
    path = export(store, pub, tmp_path / "e.safetensors")
    with EntryReader.open(path) as reader, pytest.raises(SettingsError, match=differs):
        require_known_model([other], reader, "do so")


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


@pytest.mark.usefixtures("small_batches")
def test_what_is_evicted_while_the_rest_is_written_is_written_again(
    store: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(store, entry_of(store, prompt(3, 7 * BLOCK + 1)), tmp_path / "e.safetensors")
    theirs = entry_of(target, prompt(3, 7 * BLOCK + 1))
    publish, evictions = target.publish, 2

    def with_a_greedy_daemon(publication: Publication) -> int:
        nonlocal evictions
        evicted = publish(publication)
        if evictions:
            evictions -= 1
            target.quarantine(theirs.nodes[0].name, theirs.root)
        return evicted

    monkeypatch.setattr(target, "publish", with_a_greedy_daemon)
    import_file(target, path)
    assert is_whole(target, theirs)
    target.quarantine(theirs.nodes[0].name, theirs.root)
    evictions = 3
    with pytest.raises(PrefixGone):
        import_file(target, path)


def test_what_changes_after_it_was_verified_is_not_imported(target: Store, file: Path) -> None:
    with EntryReader.open(file) as reader:
        verify_payloads(reader, lambda _num_bytes: None)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
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


def test_a_store_keeps_the_budget_of_its_last_daemon(tmp_path: Path) -> None:
    Store(tmp_path, budget_bytes=40 << 20).close()
    target = open_target(tmp_path, budget_bytes=16 << 20, min_free_bytes=0)
    assert target.budget_bytes == 40 << 20
    target.close()
    target = open_target(tmp_path / "new", budget_bytes=17 << 20, min_free_bytes=0)
    assert target.budget_bytes == 17 << 20
    target.close()

"""An export is what was stored; an import was verified; a bad file changes nothing. Also as somebody types it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.errors import DiskPrefixError, PrefixGone, SettingsError, StoreCorrupt, StoreUnavailable
from diskprefix.prefixstore.packs import exchange
from diskprefix.prefixstore.packs.exchange import require_known_model
from diskprefix.prefixstore.packs.pack_file import PackReader
from diskprefix.prefixstore.store.codec.codec import Codec
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION
from diskprefix.prefixstore.store.schema import ModelRecord
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.runtime.load.fingerprint import fingerprint_of_modules
from diskprefix.tokens import PromptDigest, TokenIds
from tests.daemon.server.daemon_process import reply_to, running_daemon, wait_until
from tests.desk.conftest import Run, overwrite, saved
from tests.desk.conftest import run as run
from tests.devices import DEVICES
from tests.exactness.architectures import tiny_model
from tests.prefixstore.packs.exported import (
    HYBRID,
    LAYOUT,
    TENANT,
    entry_of,
    export,
    identity_of,
    import_file,
    large_layout,
)
from tests.prefixstore.store.building import BLOCK, Clock, damage, is_whole, open_store, prompt
from tests.runner import Runner, random_prompt, tiny_llama, tiny_settings
from tests.traced_memory import traced_peak

PROMPT = prompt(1, 3 * BLOCK + 5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(tmp_path / "source")) as store:
        yield store


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(tmp_path / "target")) as store:
        yield store


@pytest.fixture
def pub(store: Store) -> Publication:
    pub = entry_of(store, PROMPT)
    store.publish(pub)
    return pub


@pytest.fixture
def file(store: Store, pub: Publication, tmp_path: Path) -> Path:
    return export(store, pub, tmp_path / "entry.safetensors")


def exported(store: Store, pub: Publication, path: Path) -> Path:
    store.publish(pub)
    return export(store, pub, path)


def compact(layout: object) -> str:
    return json.dumps(layout, separators=(",", ":"))


PAGES = {"heads": 2, "head_dim": 4, "dtype": "uint8", "tensors": ["0.pages", "1.pages"]} | {
    "axes": ["page", "token", "head", "dim"],
    "page": BLOCK // 2,
}
STATES_ALONE = compact(json.loads(HYBRID) | {"groups": []})
WINDOW = compact(json.loads(LAYOUT) | {"groups": [json.loads(LAYOUT)["groups"][0] | {"window": 5}]})
PAGED = compact({"version": 1, "groups": [PAGES], "logits": [0, "float32"], "shard": [1, 2]})
CODECS = [(written, read) for written in Codec for read in Codec]


@pytest.mark.parametrize(
    ("layout", "num_tokens", "with_tail", "checkpoints", "codecs"),
    [
        *((LAYOUT, len(PROMPT), True, (), [pair]) for pair in CODECS),
        *((LAYOUT, num_tokens, True, (), CODECS[:1]) for num_tokens in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)),
        *((layout, num_tokens, True, (), CODECS[:1]) for layout in (STATES_ALONE, WINDOW) for num_tokens in (3, 53)),
        (PAGED, 2 * BLOCK, False, (), CODECS[:1]),
        (HYBRID, len(PROMPT), True, (BLOCK, 3 * BLOCK), CODECS[: len(Codec)]),
        (HYBRID, len(PROMPT), False, (BLOCK, 3 * BLOCK), CODECS[: len(Codec)]),
        (HYBRID, len(PROMPT), False, (BLOCK, 2 * BLOCK), CODECS[:1]),
    ],
)
def test_an_entry_is_the_same_in_a_store_of_another_secret_and_codec(
    tmp_path: Path,
    layout: str,
    num_tokens: int,
    with_tail: bool,
    checkpoints: tuple[int, ...],
    codecs: list[tuple[Codec, Codec]],
) -> None:
    """Also every checkpoint on the path, where the last block or a checkpoint ends it."""
    for place, (written, read) in enumerate(codecs):
        folder = tmp_path / str(place)
        with closing(open_store(folder / "source")) as store, closing(open_store(folder / "target")) as target:
            store.codec, target.codec = written, read
            ours, theirs = (
                entry_of(one, PROMPT[:num_tokens], layout=layout, with_tail=with_tail, checkpoints=checkpoints)
                for one in (store, target)
            )
            done = import_file(target, exported(store, ours, folder / "e.safetensors"))
            assert is_whole(target, theirs)
            assert {node.name for node in ours.nodes}.isdisjoint(node.name for node in theirs.nodes)
            assert theirs.last_node is not None
            assert (done.ids, done.new_nodes) == ([theirs.last_node.hex()], len(theirs.nodes))
            assert done.new_bytes == theirs.payload_bytes
            assert theirs.entry is not None
            came_from = PromptDigest.of(target.secret, PROMPT[: theirs.entry.num_tokens])
            with target.snapshot() as snapshot:
                stored = snapshot.entry(theirs.last_node)
            assert stored == replace(theirs.entry, kind="imported", came_from=came_from)
            assert verify_index(target).problems == ()


def test_all_that_is_known_of_an_entry_comes_along_but_what_is_of_its_machine(
    store: Store, target: Store, tmp_path: Path
) -> None:
    pub = entry_of(store, PROMPT, tenant=TENANT)
    nodes = tuple(replace(node, prefill_s=1.25 + node.position) for node in pub.nodes)
    record = structs.replace(pub.root_record, tokenizer="/home/somebody/model")
    import_file(target, exported(store, replace(pub, nodes=nodes, root_record=record), tmp_path / "e.safetensors"))
    theirs = entry_of(target, PROMPT, tenant=TENANT)
    assert pub.entry is not None
    with target.snapshot() as snapshot:
        assert snapshot.root(pub.root) == structs.replace(pub.root_record, created_at=pub.entry.created_at)
        usages = [snapshot.usage(node.name) for node in theirs.nodes]
        assert [usage.prefill_s for usage in usages if usage] == [node.prefill_s for node in nodes]


def test_the_folder_of_a_tokenizer_that_a_forged_file_names_is_not_stored(
    pub: Publication, file: Path, target: Store
) -> None:
    with PackReader.open(file) as reader:
        reader.read_nodes()
        root = structs.replace(reader.manifest.root, tokenizer="/tmp/forged")
        reader.manifest = structs.replace(reader.manifest, root=root)
        exchange.import_pack(target, reader, advance=lambda _num_bytes: None, is_unverified=False)
    with target.snapshot() as snapshot:
        assert snapshot.root(pub.root) == structs.replace(root, tokenizer="")


def test_the_file_is_what_its_page_says(pub: Publication, file: Path) -> None:
    tensors = load_file(file)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "token_ids": (torch.int32, (len(PROMPT),)),
        "payloads": (torch.uint8, (60 * len(PROMPT) + 100,)),
        "digests": (torch.uint8, (32 * 5,)),
        "signature": (torch.uint8, (0,)),
    }
    assert tensors["token_ids"].tolist() == PROMPT.tolist()
    assert tensors["payloads"].numpy().tobytes() == b"".join(piece for node in pub.nodes for piece in node.payload)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata["format"], metadata["version"]) == ("diskprefix-pack", "1")
    manifest = json.loads(metadata["manifest"])
    assert (manifest["root"]["model"], manifest["root"]["layout"]) == ("tiny", LAYOUT)
    assert manifest["root"]["identity"] == pub.root_record.identity
    (kept,) = manifest["prompts"]
    assert (kept["node"], kept["entry"]["scope"], kept["entry"]["num_tokens"]) == (3, "auto:30", len(PROMPT))
    assert manifest["nodes"] == [*([0, parent, BLOCK, 0.5] for parent in (-1, 0, 1)), [1, 2, 5, 0.5]]


def test_a_file_that_safetensors_wrote_anew_is_imported(target: Store, file: Path, tmp_path: Path) -> None:
    """Its own writer puts the tensors in another order."""
    again = tmp_path / "again.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), again, metadata=metadata)
    import_file(target, again)
    assert is_whole(target, entry_of(target, PROMPT))


def test_an_import_stores_only_missing_nodes(store: Store, target: Store, tmp_path: Path) -> None:
    def publications(store: Store) -> list[Publication]:
        longer = np.concatenate([PROMPT[: 2 * BLOCK], prompt(9, 2 * BLOCK)])
        hybrid = entry_of(store, PROMPT, layout=HYBRID, checkpoints=(BLOCK, 3 * BLOCK))
        return [hybrid, entry_of(store, PROMPT), entry_of(store, longer)]

    target.publish(entry_of(target, PROMPT, layout=HYBRID, checkpoints=(3 * BLOCK,)))
    files = [exported(store, pub, tmp_path / f"{n}.safetensors") for n, pub in enumerate(publications(store))]
    done = [import_file(target, file) for file in (*files, files[1])]
    assert [one.new_nodes for one in done] == [1, 4, 3, 0]
    assert done[0].new_bytes == 392
    assert all(is_whole(target, pub) for pub in publications(target))


def evict(store: Store, pub: Publication, _path: Path) -> None:
    for node in pub.nodes[:0:-1]:
        store.quarantine(node.name, node.parent)


@pytest.mark.parametrize(
    ("happens", "error", "words"),
    [
        (evict, PrefixGone, "evicted while it was exported"),
        (lambda store, pub, _path: damage(store, pub.nodes[1].name), StoreCorrupt, "block .* is damaged.*verify --fix"),
        (lambda _store, _pub, path: path.write_text("precious"), SettingsError, "exists; add --force"),
    ],
    ids=["eviction", "damage", "another file"],
)
def test_what_happens_during_an_export_ends_it_without_a_file(
    store: Store,
    pub: Publication,
    tmp_path: Path,
    happens: Callable[[Store, Publication, Path], object],
    error: type[DiskPrefixError],
    words: str,
) -> None:
    path = tmp_path / "e.safetensors"

    def advance(_num_bytes: int) -> None:
        happens(store, pub, path)

    assert pub.last_node is not None
    with pytest.raises(error, match=words):
        exchange.export_pack(store, [pub.last_node], path, force=False, advance=advance)
    assert {one.name for one in tmp_path.iterdir()} - {path.name} == {"source"}
    assert not path.exists() or path.read_text() == "precious"


def test_what_cannot_be_written_or_restored_leaves_no_file(
    store: Store, pub: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = entry_of(store, PROMPT, layout=HYBRID, with_tail=False)
    with pytest.raises(SettingsError, match="has lost the checkpoint at which it could be restored; send the prompt"):
        exported(store, lost, tmp_path / "e.safetensors")
    with pytest.raises(StoreUnavailable, match=r"nowhere/e\.safetensors: No such file"):
        export(store, pub, tmp_path / "nowhere" / "e.safetensors")

    def fsync(_fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailable, match=r"e\.safetensors: No space left"):
        export(store, pub, tmp_path / "e.safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


OTHER = identity_of(weights="w2", torch_version="2.14")


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({"unreadable": "?"}, "but no model here can be read"),
        ({"tiny": OTHER}, "which differs from 'tiny' here in torch_version, weights_digest"),
        (
            {"tiny": OTHER, "near\x1b[2J": identity_of(torch_version="2.14")},
            r"which differs from 'near\\x1b\[2J' here in torch_version",
        ),
        ({"tiny": OTHER, "same": identity_of(tenant=TENANT)}, ""),
    ],
)
def test_another_model_s_state_is_refused_with_what_differs_from_the_nearest(
    target: Store, file: Path, served: dict[str, str], words: str
) -> None:
    """A model is known that was served, though nothing of it is stored."""
    with target.changes() as changes:
        for model, identity in served.items():
            changes.put_model(ModelRecord(model=model, identity=identity))
    with PackReader.open(file) as reader, target.snapshot() as snapshot:
        if words:
            with pytest.raises(SettingsError, match=f"'tiny', {words}; serve that model"):
                require_known_model(snapshot, reader)
        else:
            require_known_model(snapshot, reader)


class Killed(Exception):
    """Stands for the end of the process."""


def test_an_interrupted_import_leaves_a_shorter_prefix_that_the_next_completes(
    store: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(store, entry_of(store, prompt(3, 7 * BLOCK + 1)), tmp_path / "e.safetensors")
    publish = target.publish

    def killed(publication: Publication) -> int:
        if target.counts()["blocks"] == 4:
            raise Killed
        return publish(publication)

    monkeypatch.setattr(exchange, "_BATCH_BYTES", 1500)  # Two blocks.
    monkeypatch.setattr(target, "publish", killed)
    with pytest.raises(Killed):
        import_file(target, path)
    monkeypatch.undo()
    theirs = entry_of(target, prompt(3, 7 * BLOCK + 1))
    assert is_whole(target, replace(theirs, nodes=theirs.nodes[:4]))
    assert kinds(target) == ["partial"]
    assert import_file(target, path).new_nodes == 4
    assert is_whole(target, theirs)
    assert kinds(target) == ["imported"]


def kinds(store: Store) -> list[str]:
    """The kinds of the entries."""
    with store.snapshot() as snapshot:
        return [entry.kind for _, entry in snapshot.entries()]


def test_what_changes_after_it_was_verified_is_not_imported(target: Store, file: Path) -> None:
    with PackReader.open(file) as reader:
        reader.read_nodes()
        reader.verify_payloads(lambda _num_bytes: None)
        with file.open("r+b") as opened:
            opened.seek(-200, os.SEEK_END)
            opened.write(b"12345678")
        with pytest.raises(StoreCorrupt, match=r"entry\.safetensors is damaged: the digest of tokens"):
            exchange.import_pack(target, reader, advance=lambda _num_bytes: None, is_unverified=False)
    assert target.counts()["blocks"] == target.counts()["entries"] == 0


def test_an_import_makes_room_by_evicting_others(store: Store, tmp_path: Path) -> None:
    layout, clock = large_layout(1 << 20), Clock()
    with closing(open_store(tmp_path / "target", budget_bytes=16 << 20, clock=clock)) as target:
        old = entry_of(target, prompt(2, 8 * BLOCK), layout=layout)
        target.publish(old)
        clock.now += 3600
        pub = entry_of(store, prompt(1, 10 * BLOCK), layout=layout)
        done = import_file(target, exported(store, pub, tmp_path / "e.safetensors"))
        assert done.evicted > 0
        assert is_whole(target, entry_of(target, prompt(1, 10 * BLOCK), layout=layout))
        assert not is_whole(target, old)


def test_memory_stays_at_a_few_blocks_whatever_the_entry_s_size(
    store: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, count, path = 512 * 1024, 40, tmp_path / "e.safetensors"
    monkeypatch.setattr(exchange, "_BATCH_BYTES", 2 * block)
    pub = entry_of(store, prompt(1, count * BLOCK), layout=large_layout(block))
    store.publish(pub)
    name = pub.last_node
    assert name is not None
    del pub
    assert (
        traced_peak(lambda: exchange.export_pack(store, [name], path, force=False, advance=lambda _: None)) < 4 * block
    )
    assert path.stat().st_size > count * block
    assert traced_peak(lambda: import_file(target, path)) < 12 * block


# -- The commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def from_kv(tmp_path: Path) -> Path:
    saved(tmp_path / "from", PROMPT)
    return tmp_path / "from"


@pytest.fixture
def to_kv(tmp_path: Path) -> Path:
    saved(tmp_path / "to", prompt(9, BLOCK))
    return tmp_path / "to"


def entry_id(folder: Path) -> str:
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        return next(name for name, _ in snapshot.entries()).hex()


def holds_the_prompt(folder: Path, **fields: Any) -> bool:
    with closing(Store(folder, read_only=True)) as store:
        return is_whole(store, entry_of(store, PROMPT, **fields))


@pytest.mark.parametrize("tenant", ["", TENANT])
def test_a_prompt_goes_from_store_to_store_with_its_tenant_and_both_commands_say_what_was_done(
    run: Run, to_kv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    # Variables of a daemon disturb neither.
    monkeypatch.setenv("DISKPREFIX_MODEL", "./none")
    monkeypatch.setenv("DISKPREFIX_WEIGHTS", "native")
    monkeypatch.chdir(tmp_path)
    from_kv = tmp_path / "from"
    saved(from_kv, PROMPT, tenant=tenant)
    name, path = entry_id(from_kv), Path("e.safetensors")
    exported = run("export", name, "-o", path, "--kv-cache-dir", from_kv, "--json").json
    assert exported == {
        "file": str(path.absolute()),
        "file_bytes": path.stat().st_size,
        "sha256": exported["sha256"],
        "signed": False,
        "model": "tiny",
        "tenant": tenant,
        "num_tokens": len(PROMPT),
        "entries": [name],
    }
    whose = "tiny" + (f" of tenant {tenant[:8]}" if tenant else "")
    shown = run("export", name[:6], "--kv-cache-dir", from_kv)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{name[:12]}.safetensors: {len(PROMPT)} tokens of {whose}, ")
    assert Path(f"{name[:12]}.safetensors").read_bytes() == path.read_bytes()
    planned = run("import", path, "--trust", "--kv-cache-dir", to_kv, "--dry-run", "--json").json
    assert not holds_the_prompt(to_kv, tenant=tenant)
    done = run("import", path, "--trust", "--kv-cache-dir", to_kv, "--json").json
    (plan,), (entry,) = planned["files"], done["files"]
    assert (planned["dry_run"], done["dry_run"], entry | plan) == (True, False, entry)
    assert entry == {
        "file": str(path),
        "sha256": exported["sha256"],
        "signer": None,
        "is_signed": False,
        "use": "unverified",
        "model": "tiny",
        "tenant": tenant,
        "prompts": 1,
        "num_tokens": len(PROMPT),
        "num_nodes": 4,
        "ids": entry["ids"],
        "new_nodes": 4,
        "new_bytes": 60 * len(PROMPT) + 100,
        "evicted": 0,
    }
    assert holds_the_prompt(to_kv, tenant=tenant)
    assert not holds_the_prompt(to_kv, tenant=TENANT if not tenant else "")
    again = run("import", path, "--trust", "--kv-cache-dir", to_kv)
    assert f": imported {len(PROMPT)} tokens of {whose} in 4 blocks, none new; unverified" in again.stdout


def test_an_import_of_several_files_is_refused_whole(run: Run, from_kv: Path, to_kv: Path, tmp_path: Path) -> None:
    file, large, flipped, text = (tmp_path / f"{name}.safetensors" for name in ("e", "large", "flipped", "text"))
    assert run("export", entry_id(from_kv), "-o", file, "--kv-cache-dir", from_kv).exit_code == 0
    flipped.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    text.write_text("import os\n" * 100)
    pub = saved(tmp_path / "large", prompt(1, 40 * BLOCK), layout=large_layout(1 << 20), budget_bytes=64 << 20)
    assert pub.last_node is not None
    assert run("export", pub.last_node.hex(), "-o", large, "--kv-cache-dir", tmp_path / "large").exit_code == 0
    other, broken = tmp_path / "other", tmp_path / "broken"
    for folder in (other, broken):
        saved(folder, prompt(5, BLOCK), identity=identity_of(weights="w2"), model="Other-7B")
    overwrite(broken)
    for args, folder, exit_code, words in (
        (("export", entry_id(from_kv), "-o", file), from_kv, 2, ("exists", "--force")),
        (("export", entry_id(from_kv), "-o", "none/e"), from_kv, 2, ("--output: there is no folder", "/none;")),
        (("import", file, tmp_path / "none"), to_kv, 2, ("none: no such file",)),
        (("import", file, text), to_kv, 2, (f"{text}: it is a text; import takes files that",)),
        (("import", file, flipped), to_kv, 4, ("flipped.safetensors is damaged", "digest")),
        (("import", file, large, "--force"), to_kv, 4, ("do not fit --kv-cache-budget 32.0 MiB",)),
        (("import", file), other, 2, ("'tiny'", "'Other-7B'", "--force")),
        (("import", file, "--dry-run"), other, 2, ("'tiny'",)),
        (("import", file, "--dry-run"), tmp_path, 4, ("holds no diskprefix store", "`import` make it")),
        *(
            (("import", file, *flags), broken, 4, ("is damaged", "`verify --fix` cannot repair"))
            for flags in ((), ("--force",), ("--dry-run",))
        ),
    ):
        run(*args, "--kv-cache-dir", folder).assert_refused(exit_code, *words)
    assert not holds_the_prompt(to_kv)
    assert run("export", entry_id(from_kv), "-o", file, "--force", "--kv-cache-dir", from_kv).exit_code == 0
    assert run("import", file, "--kv-cache-dir", other, "--force").exit_code == 0
    assert not holds_the_prompt(other)
    assert run("import", file, "--kv-cache-dir", other, "--force", "--trust").exit_code == 0
    assert holds_the_prompt(other)


def test_on_a_new_machine_an_import_makes_the_store_and_says_what_will_use_it(
    run: Run, from_kv: Path, tmp_path: Path
) -> None:
    file, new = tmp_path / "e.safetensors", tmp_path / "new" / "kv"
    assert run("export", entry_id(from_kv), "-o", file, "--kv-cache-dir", from_kv).exit_code == 0
    run("import", file, "--dry-run", "--kv-cache-dir", new).assert_refused(4, "holds no diskprefix store")
    assert not new.parent.exists()
    made = run("import", file, "--trust", "--kv-cache-dir", new)
    assert (made.exit_code, "has seen no model yet: serve the same one" in made.stdout) == (0, True)
    assert holds_the_prompt(new)
    with closing(Store(new, read_only=True)) as store:
        assert store.budget_bytes == Settings.kv_cache_new_budget
    again = run("import", file, "--kv-cache-dir", new)
    assert (again.exit_code, "has seen no model" in again.stdout) == (0, False)


class FingerprintedRunner(Runner):
    """A model whose root is that of its fingerprint, as a daemon's is."""

    def identity(self, salt: str) -> str:
        fingerprint = fingerprint_of_modules(self.model, f"digest of {self.name}")
        return fingerprint.identity(self.settings.block_size, LAYOUT_VERSION, self.layout.describe(), salt)


@pytest.fixture(scope="module", params=[*DEVICES, "qwen3_next", "mamba2", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A Llama, a hybrid of linear and full attention, one of states alone, one with windows of less than two blocks."""
    if request.param in DEVICES:
        return tiny_llama(torch.bfloat16, request.param)
    return tiny_model(request.param, torch.bfloat16)


@pytest.mark.cases(2)
@pytest.mark.parametrize("has_tail", [True, False], ids=["tail", "checkpoint"])
def test_a_model_restores_what_another_store_computed_bit_for_bit(
    run: Run, model: PreTrainedModel, tmp_path: Path, has_tail: bool
) -> None:
    def answers(folder: Path, *prompts: tuple[TokenIds, Any], **settings: object) -> list[Any]:
        with closing(FingerprintedRunner(model, tiny_settings(folder, **settings))) as runner:
            return [runner.run(ids, scope, reply=8) for ids, scope in prompts]

    token_ids = random_prompt(1, 10 * BLOCK + 7)
    shorter, longer = token_ids[: 7 * BLOCK], np.concatenate([token_ids, random_prompt(3, 2 * BLOCK)])
    whole = len(token_ids) if has_tail else 10 * BLOCK
    asked: list[tuple[TokenIds, Any]] = [(token_ids, "full" if has_tail else whole), (shorter, "off"), (longer, "off")]
    expected = answers(tmp_path / "a", *asked, kv_cache_interval=4 * BLOCK)
    path = tmp_path / "e.safetensors"
    assert run("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a").exit_code == 0
    if has_tail:
        # The other time, the import makes the store.
        answers(tmp_path / "b", (random_prompt(2, 2 * BLOCK), "full"))
    imported = run("import", path, "--trust", "--kv-cache-dir", tmp_path / "b")
    assert imported.exit_code == 0, imported.stderr
    found = answers(tmp_path / "b", *((ids, "full") for ids in (token_ids, shorter, longer)))
    assert found[0].report.source == "disk"
    assert (found[0].num_forwards == 0) == has_tail
    has_states = model.config.model_type in ("qwen3_next", "mamba2")
    assert [answer.report.restored for answer in found] == [whole, (4 if has_states else 6) * BLOCK, 10 * BLOCK]
    for answer, same in zip(found, expected, strict=True):
        assert torch.equal(answer.logits, same.logits)
        assert answer.greedy == same.greedy


@pytest.mark.slow
def test_a_daemon_without_a_request_makes_its_model_known_for_an_import_beside_it(
    run: Run, chat_model: Path, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "You are patient. " * 30}
    body: dict[str, Any] = {"model": chat_model.name, "messages": [system, {"role": "user", "content": "Hello?"}]}
    body |= {"temperature": 0, "max_tokens": 12, "logprobs": True}

    def knows_a_model() -> bool:
        with closing(Store(tmp_path / "b", read_only=True)) as store, store.snapshot() as snapshot:
            return bool(list(snapshot.models()))

    with running_daemon(chat_model, tmp_path / "a") as daemon:
        with daemon.client() as client:
            cold = reply_to(client, body, scope="full")
        daemon.wait_saved()
    assert cold["prefix_cache"]["restored"] == 0
    path = tmp_path / "e.safetensors"
    assert run("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a").exit_code == 0
    with running_daemon(chat_model, tmp_path / "b") as daemon:
        wait_until(knows_a_model, "the model is known")
        assert run("inspect", "--stats", "--json", "--kv-cache-dir", tmp_path / "b").json["roots"] == []
        assert run("import", path, "--trust", "--kv-cache-dir", tmp_path / "b").exit_code == 0
        with daemon.client() as client:
            warm = reply_to(client, body, scope="full")
    # The prompt, or its beginning if the reply took the place of its end.
    assert warm["prefix_cache"].get("source") == "disk"
    assert warm["prefix_cache"]["restored"] >= cold["usage"]["prompt_tokens"] - 1
    assert warm["choices"] == cold["choices"]
    assert run("verify", "--kv-cache-dir", tmp_path / "b").exit_code == 0

"""`diskprefix inspect`: the list, a saved prompt in full, the tree, and the figures."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from diskprefix.desk.shared import tooling
from diskprefix.prefixstore.store.changes import Use, touches
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.schema import EntryRecord, NodeKind, RootRecord
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens, hour_of
from diskprefix.prefixstore.store.statistics.savings import SavingsLog, Tally
from diskprefix.tenant_ids import matches
from diskprefix.tokens import as_token_ids, picture_ids, root_hash
from diskprefix.values import Tenant
from tests.daemon.server.daemon_process import DaemonProcess, serve_flags
from tests.daemon.server.test_auth import write_keys
from tests.desk.conftest import Ended, Run
from tests.desk.watch.browse.saved_chats import ALICE, LAYOUT, SavedChats, chat
from tests.faults.damage import damaged
from tests.prefixstore.store.building import BLOCK, layout_of, of_root, open_store, prompt, publication

BLOCK_BYTES = 19_968
"""Raw bytes of a block in these tests, one piece each."""
STATE_BYTES = 32_000
"""Raw bytes of the states of a hybrid, one piece."""
PIECE_HEADER_BYTES = 48

Inspect = Callable[..., Ended]


@pytest.fixture
def inspect(run: Run) -> Inspect:
    return lambda folder, *args: run("inspect", *args, "--kv-cache-dir", folder)


def listed(inspect: Inspect, folder: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = inspect(folder, "--json").json["entries"]
    return entries


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with closing(open_store(tmp_path / "kv")) as store:
        first, second = prompt(1, 4 * BLOCK), prompt(1, 4 * BLOCK)
        second[3 * BLOCK :] += 1
        pub = publication(store, first)
        for publication_ in (pub, publication(store, second)):
            store.publish(publication_)
        assert pub.last_node is not None
        store.write([touches({pub.last_node: Use(2000.0, 2)})])
    return tmp_path / "kv"


def test_every_entry_is_listed_with_the_documented_keys_and_leaves_the_store_as_it_was(
    inspect: Inspect, folder: Path
) -> None:
    before = (folder / "data.mdb").read_bytes()
    first, second = listed(inspect, folder)
    assert set(first) == {
        "id", "kind", "model", "num_tokens", "raw_bytes", "stored_bytes", "shared_bytes", "hits", "created_at",
        "last_used_at", "ttl_s", "default_ttl", "scope", "tenant", "preview", "checkpoints", "checkpoint_bytes",
        "made_with",
    }  # fmt: skip
    assert (first["hits"], first["last_used_at"], second["hits"]) == (2, 2000.0, 2), "both have the trunk"
    assert {e["num_tokens"] for e in (first, second)} == {4 * BLOCK}
    assert {e["raw_bytes"] for e in (first, second)} == {4 * BLOCK_BYTES + 100}
    assert {e["shared_bytes"] for e in (first, second)} == {3 * (BLOCK_BYTES + PIECE_HEADER_BYTES)}
    assert first["model"] == "tiny"
    table = inspect(folder)
    assert (table.exit_code, first["id"][:6] in table.stdout) == (0, True)
    assert "2 saved prompts, 7 blocks" in table.stdout
    shown = inspect(folder, first["id"][:8])
    assert "blocks      5, 3 of them in other prompts too\n" in shown.stdout
    blocks = inspect(folder, first["id"], "--json").json["blocks"]
    assert [(b["position"], b["num_tokens"], b["kind"]) for b in blocks][-1] == (4 * BLOCK, 0, "tail")
    assert blocks[-1]["hash"] == first["id"]
    assert (folder / "data.mdb").read_bytes() == before


@pytest.mark.parametrize(
    ("recorded", "ttl_s", "default_ttl", "told"),
    [
        (0, None, True, "until evicted (or --kv-cache-ttl, if set)"),
        (3600, 3600, False, "3,600 s after its last use"),
        (-300, 300, True, "300 s after its last use, or --kv-cache-ttl, if longer"),
    ],
)
def test_how_long_an_entry_was_asked_to_be_kept_is_shown(
    inspect: Inspect, folder: Path, recorded: int, ttl_s: int | None, default_ttl: bool, told: str
) -> None:
    name = listed(inspect, folder)[0]["id"]
    with damaged(folder) as records:
        records.change_usage(bytes.fromhex(name), ttl_s=recorded)
    entry = listed(inspect, folder)[0]
    assert (entry["ttl_s"], entry["default_ttl"]) == (ttl_s, default_ttl)
    assert f"kept for    {told}" in inspect(folder, name).stdout.splitlines()


def test_checkpoints_are_shown_where_there_are_any(inspect: Inspect, folder: Path, tmp_path: Path) -> None:
    """Two prompts of a model with states. They share two blocks and the checkpoint there, where the second one ends."""
    layout, token_ids, hybrid = layout_of(20_000, STATE_BYTES), prompt(1, 4 * BLOCK + 3), tmp_path / "hybrid"
    with closing(open_store(hybrid)) as store:
        whole = publication(store, token_ids, layout=layout, checkpoints=(2 * BLOCK, 4 * BLOCK))
        store.publish(whole)
        boundary = publication(store, token_ids[: 2 * BLOCK], layout=layout, checkpoints=(2 * BLOCK,))
        boundary = replace(boundary, nodes=boundary.nodes[:-1], last_node=boundary.nodes[-2].name)
        store.publish(boundary)
    assert whole.last_node is not None
    assert boundary.last_node is not None
    entries = {entry["id"]: entry for entry in listed(inspect, hybrid)}
    long, short = entries[whole.last_node.hex()], entries[boundary.last_node.hex()]
    one = STATE_BYTES + PIECE_HEADER_BYTES
    assert (long["checkpoints"], long["checkpoint_bytes"]) == ([2 * BLOCK, 4 * BLOCK], 2 * one)
    assert (short["checkpoints"], short["checkpoint_bytes"]) == ([2 * BLOCK], one)
    shared = 2 * (BLOCK_BYTES + PIECE_HEADER_BYTES) + one
    assert long["shared_bytes"] == short["shared_bytes"] == short["stored_bytes"] == shared
    assert long["raw_bytes"] == sum(node.payload_bytes for node in whole.nodes)
    assert f"checkpoints 31.3 KiB at {2 * BLOCK}\n" in inspect(hybrid, boundary.last_node.hex()).stdout
    blocks = inspect(hybrid, whole.last_node.hex(), "--json").json["blocks"]
    assert [(b["kind"], b["position"]) for b in blocks] == [
        ("block", 0), ("block", BLOCK), ("checkpoint", 2 * BLOCK), ("block", 2 * BLOCK),
        ("block", 3 * BLOCK), ("checkpoint", 4 * BLOCK), ("tail", 4 * BLOCK),
    ]  # fmt: skip
    totals = inspect(hybrid, "--json").json
    del totals["entries"], totals["packed_weights"]
    assert totals == {"blocks": 5, "checkpoints": 2, "checkpoint_bytes": 2 * one, "images": 0, "image_bytes": 0}
    shown = inspect(hybrid).stdout
    assert " checkpoints " in shown.splitlines()[0]
    assert "2 saved prompts, 5 blocks, 2 checkpoints (62.6 KiB), " in shown
    assert "5 blocks and 2 checkpoints (62.6 KiB) in " in inspect(hybrid, "--stats").stdout
    assert " checkpoints" not in inspect(folder).stdout


def save_preview(folder: Path, preview: str, seed: int = 1) -> None:
    with closing(open_store(folder)) as store:
        pub = publication(store, prompt(seed, BLOCK))
        entry = EntryRecord(root=pub.root, num_tokens=BLOCK, scope="full", preview=preview, created_at=1.0)
        store.publish(replace(pub, entry=entry))


def test_inspect_prints_no_control_characters_from_saved_text(inspect: Inspect, tmp_path: Path) -> None:
    """A store of an earlier version, or of somebody else, holds whatever was in the prompts."""
    nasty = "hi \x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\n[bold]x[/bold] [/nope] 🦀"
    save_preview(tmp_path, nasty)
    name = listed(inspect, tmp_path)[0]["id"]
    for args in ((), (name,), ("--json",), (name, "--json")):
        shown = inspect(tmp_path, *args).stdout
        assert shown.replace("\n", "").isprintable(), args
        assert "[bold]x[/bold] [/nope] 🦀" in shown, "it is not read as markup"
    assert listed(inspect, tmp_path)[0]["preview"] == nasty


def test_the_table_shows_where_conversations_differ(inspect: Inspect, tmp_path: Path) -> None:
    for seed, question in enumerate(("and what about maps?", "and what about birds?")):
        begin = "You look after a small library and answer questions about it, briefly and kindly, … "
        save_preview(tmp_path, begin + question, seed)
    shown = inspect(tmp_path).stdout
    assert "about maps?" in shown
    assert "about birds?" in shown


def test_tenants_are_shown_where_there_are_any_as_purge_takes_them(inspect: Inspect, folder: Path) -> None:
    assert " tenant " not in inspect(folder).stdout.splitlines()[0]
    tenant = Tenant.of_key("a key").with_salt("alice")
    with closing(open_store(folder)) as store:
        pub = publication(store, prompt(5, BLOCK), root=b"t" * 16)
        layout = pub.root_record.layout
        record = RootRecord(model="tiny", block_size=BLOCK, layout=layout, created_at=0.0, tenant=str(tenant))
        store.publish(of_root(pub, record))
    shown = inspect(folder).stdout
    assert " tenant " in shown.splitlines()[0]
    digits = re.search(r"\b[0-9a-f]{8}/[0-9a-f]{8}\b", shown)
    assert digits
    assert matches(str(tenant), digits[0])
    assert pub.last_node is not None
    assert f"tenant      {tenant}\n" in inspect(folder, pub.last_node.hex()).stdout
    assert "tenant      none\n" in inspect(folder, listed(inspect, folder)[0]["id"]).stdout


def save_for_tenants(folder: Path, num_tenants: int) -> None:
    with closing(open_store(folder)) as store:
        for number in range(num_tenants):
            pub = publication(store, prompt(number, BLOCK), root=bytes([number]) * 16)
            layout, tenant = pub.root_record.layout, str(Tenant.of_key(f"key {number}"))
            record = RootRecord(model="tiny", block_size=BLOCK, layout=layout, created_at=0.0, tenant=tenant)
            store.publish(of_root(pub, record))


@pytest.mark.parametrize("view", [(), ("--stats",), ("--tree",)])
def test_a_view_reads_the_users_key_once_for_all_tenants(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: tuple[str, ...]
) -> None:
    save_for_tenants(tmp_path / "kv", 3)
    num_reads = 0

    def is_users() -> Callable[[str], bool]:
        nonlocal num_reads
        num_reads += 1
        return lambda _tenant: False

    monkeypatch.setattr(tooling, "is_users", is_users)
    assert len(set(re.findall(r"\b[0-9a-f]{8}\b(?! tokens)", inspect(tmp_path / "kv", *view).stdout))) >= 3
    assert num_reads == 1


# -- Of saved conversations ------------------------------------------------------------------------------------------

TIDE, BIRDS = "When is high tide today?", "Which birds nest on the pier?"
OTHER = "org/other:Q8_0"


@pytest.fixture
def made(tmp_path: Path) -> SavedChats:
    return SavedChats(tmp_path / "kv", tmp_path / "tokenizer")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chats")
    made = SavedChats(place / "kv", place / "tokenizer")
    made.save(chat(TIDE))
    made.save(chat(BIRDS))
    made.save(chat("A secret."), tenant=ALICE)
    made.store.close()
    return place / "kv"


def test_an_entry_shows_its_text_who_shares_it_and_how_it_is_stored(inspect: Inspect, chats: Path) -> None:
    name = next(entry["id"] for entry in listed(inspect, chats) if "nest" in entry["preview"])
    lines = inspect(chats, name).stdout.splitlines()
    assert f"  {BIRDS}<|im_end|>" in lines, "the text, decoded"
    assert next(line for line in lines if line.startswith("reason")).split() == ["reason", "full"]
    assert TIDE in lines[lines.index("shared with 1") + 1]
    shown = inspect(chats, name, "--json").json
    assert shown["text"].count("<|im_start|>") == 3
    assert [one["num_tokens"] for one in shown["shared_with"]] == [
        max(b["position"] + b["num_tokens"] for b in shown["blocks"] if b["entries"] == 2)
    ]


def test_an_entry_whose_tokenizer_is_gone_shows_its_preview(inspect: Inspect, made: SavedChats, tmp_path: Path) -> None:
    pub = made.save(chat(TIDE))
    made.store.close()
    (tmp_path / "tokenizer").rename(tmp_path / "gone")
    assert pub.last_node is not None
    assert "preview     You look after" in inspect(tmp_path / "kv", pub.last_node.hex()).stdout


def test_pictures_are_counted_and_named(inspect: Inspect, made: SavedChats, tmp_path: Path) -> None:
    store, words = made.store, made.renderer.tokenize(TIDE, add_special_tokens=False)
    ids, root = picture_ids(bytes(16), BLOCK + 4), root_hash("pictures of tiny")
    of_text = made.save(chat(BIRDS))
    record = msgspec.structs.replace(of_text.root_record, identity="pictures of tiny", has_prompts=False)
    pictured = publication(store, as_token_ids([*words, *ids, *words]), root=of_text.root, layout=LAYOUT)
    store.publish(replace(pictured, root_record=of_text.root_record))
    rows = publication(store, ids, root=root, layout=LAYOUT, end_kind=NodeKind.BLOCK)
    store.publish(replace(rows, root_record=record, last_node=None, entry=None, prompt=None))
    notes = Notes(store, lambda: None)
    notes.put(store.epochs.of(""), root, record, NoteKind.PICTURE, "", f"1920x1080 {'00' * 16}".encode(), 1e6)
    store.write_from(notes.writing)
    store.close()
    assert pictured.last_node is not None
    shown = inspect(tmp_path / "kv", pictured.last_node.hex(), "--json").json
    assert shown["text"] == f"{TIDE}[image]{TIDE}"
    known = {"size": "1920x1080", "digest": "00" * 16}
    assert shown["images"] == [{"position": len(words), "num_tokens": BLOCK + 4, **known}]
    assert ": 1920x1080, digest 0000" in inspect(tmp_path / "kv", pictured.last_node.hex()).stdout
    assert "2 saved prompts" in (lines := inspect(tmp_path / "kv").stdout)
    assert "images, encoded: 1 (" in lines
    assert "images, encoded: 1, 2 blocks in" in inspect(tmp_path / "kv", "--stats").stdout
    assert len(inspect(tmp_path / "kv", "--tree", "--json").json["trees"]) == 1


def test_the_tree_folds_what_is_shared_and_the_figures_tell_what_is_saved(inspect: Inspect, chats: Path) -> None:
    lines = inspect(chats, "--tree").stdout.splitlines()
    assert lines[0].startswith("tiny: 2 prompts, ")
    assert lines[1].startswith("└── 0–")
    assert "2 prompts" in lines[1]
    assert {line.rsplit(" ● ")[-1].split(" ", 1)[1] for line in lines[2:4]} == {TIDE, BIRDS}
    assert any(line.startswith("tiny, tenant ") for line in lines)
    assert [tree["num_entries"] for tree in inspect(chats, "--tree", "--json").json["trees"]] == [2, 1]
    shown = inspect(chats, "--stats").stdout
    assert "2 prompts, " in shown
    assert "4 requests; 50% of their prompt tokens restored" in shown
    assert "computing saved: " in shown
    figures = inspect(chats, "--stats", "--json").json
    main = figures["roots"][0]
    assert (main["total"]["requests"], main["restored_share"], main["total"]["saved_s"]) == (4, 0.5, 3.0)
    assert main["shared_bytes"] > 0 < figures["budget_bytes"]


def test_of_several_models_one_is_shown(inspect: Inspect, made: SavedChats, tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    for model, question in (("tiny", TIDE), (OTHER, TIDE), (OTHER, BIRDS)):
        made.save(chat(question), model=model)
    made.store.close()
    of_other, everything = inspect(kv, "--model", OTHER, "--json").json, inspect(kv, "--json").json
    assert {entry["model"] for entry in of_other["entries"]} == {OTHER}
    assert of_other["blocks"] == everything["blocks"] - inspect(kv, "--model", "tiny", "--json").json["blocks"] > 0
    for view, key in (("--tree", "trees"), ("--stats", "roots")):
        assert [root["model"] for root in inspect(kv, view, "--model", OTHER, "--json").json[key]] == [OTHER]
    assert " of all models in " in inspect(kv, "--model", OTHER).stdout.splitlines()[-1]
    assert " of all models in " not in inspect(kv).stdout
    inspect(kv, "--model", "nobody").assert_refused(2, f"there are prompts of {OTHER}, tiny")


def test_packed_weights_are_counted_beside_the_store(inspect: Inspect, chats: Path, tmp_path: Path) -> None:
    at, weights = ["--packed-weights", str(tmp_path / "weights")], tmp_path / "weights"
    amounts = {"folder": str(weights), "files": 0, "bytes": 0}
    for view in ([], ["--stats"]):
        assert inspect(chats, *view, *at, "--json").json["packed_weights"] == amounts
        assert inspect(chats, *view, "--packed-weights", "off", "--json").json["packed_weights"] is None
    assert "packed weights" not in inspect(chats, "--stats", *at).stdout
    weights.mkdir()
    (weights / f"{1:032x}.packed").write_bytes(bytes(1000))
    for view in ([], ["--stats"]):
        assert inspect(chats, *view, *at, "--json").json["packed_weights"] == amounts | {"files": 1, "bytes": 1000}
    assert inspect(chats, "--stats", *at).stdout.endswith(f"packed weights: 1 file, 1000 B in {weights}\n")


def test_an_empty_store_has_every_view(inspect: Inspect, tmp_path: Path) -> None:
    open_store(tmp_path).close()
    for view, said in (("--tree", "nothing is saved"), ("--stats", "of a budget of ")):
        assert said in inspect(tmp_path, view).stdout


def test_tokens_that_were_computed_again_are_listed_with_what_to_do(inspect: Inspect, tmp_path: Path) -> None:
    layout = layout_of(4_000)
    with closing(open_store(tmp_path)) as store:
        hour = hour_of(time.time())
        for model in ("one", "two"):
            log = SavingsLog(store)
            rows = [
                LostTokens(hour=hour, cause="not_stored", client="opencode", tokens=700),
                LostTokens(hour=hour, cause="diverged", line=f"[bold]{model}", tool="bash", tokens=90),
            ]
            record = RootRecord(model=model, block_size=BLOCK, layout=layout, created_at=0.0)
            log.record_request(store.epochs.of(""), root_hash(model), record, Tally(), rows)
            store.write_from(log.writing)
    first, *others = inspect(tmp_path, "--lost", "--json").json["lost"]
    assert (first["cause"], first["client"], first["tokens"], first["requests"]) == ("not_stored", "opencode", 1400, 2)
    assert "--kv-cache-budget" in first["advice"]
    assert sorted((row["tool"], row["line"]) for row in others) == [("bash", "[bold]one"), ("bash", "[bold]two")]
    shown = inspect(tmp_path, "--lost", "--model", "one").stdout
    assert "not stored, from opencode" in shown
    assert "[bold]one" in shown
    assert "[bold]two" not in shown
    assert "790 tokens of the last 24 hours were computed again" in shown
    assert inspect(tmp_path, "--lost", "--stats").exit_code == 2


def test_lost_tokens_are_solved_if_each_daemon_of_the_store_has_the_option_whatever_it_does(
    inspect: Inspect, chat_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    with closing(open_store(folder)) as store:
        log, hour = SavingsLog(store), hour_of(time.time()) - 1
        record = RootRecord(model="one", block_size=BLOCK, layout=layout_of(4_000), created_at=0.0)
        rows = [LostTokens(hour=hour, cause="faster_to_compute", tokens=700)]
        log.record_request(store.epochs.of(""), root_hash("one"), record, Tally(), rows)
        store.write_from(log.writing)

    def solved_since() -> float | None:
        [row] = inspect(folder, "--lost", "--json").json["lost"]
        assert row["advice"].startswith("solved: --kv-cache-gate off" if row["solved_since"] else "use a faster disk")
        since: float | None = row["solved_since"]
        return since

    @contextmanager
    def router(*flags: str, cache: Path = folder, **changes: str) -> Iterator[DaemonProcess]:
        with DaemonProcess(*serve_flags(chat_model, cache, **changes), *flags) as daemon:
            # It has no model in memory.
            assert httpx.get(daemon.url + "/health").status_code == 200
            yield daemon

    keys = ("--api-keys", str(write_keys(tmp_path / "keys", f"alice {'k' * 24}")))
    several = ("--models-dir", str(tmp_path))
    assert solved_since() is None, "no daemon runs"
    with router("--idle-unload", "1h", *keys) as daemon:
        since = solved_since()
        assert since is not None
        assert hour < hour_of(since) <= hour_of(time.time())
        with router("--idle-unload", "1h", cache=tmp_path / "other", kv_cache_gate="auto"):
            assert solved_since() == since, "another store"
        for flags, gate in (((), "auto"), (several, "off")):
            with router("--idle-unload", "1h", *flags, kv_cache_gate=gate):
                assert solved_since() is None
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            assert solved_since() == since, "nothing is asked"
        finally:
            daemon.process.send_signal(signal.SIGCONT)

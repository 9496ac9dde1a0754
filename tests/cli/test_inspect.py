from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diskprefix.nouns import Tenant
from diskprefix.store.changes import Use, touches
from diskprefix.store.schema import EntryRecord, RootRecord
from diskprefix.store.store import Publication
from diskprefix.tenant_ids import matches
from tests.cli.conftest import Run
from tests.faults.damage import damaged
from tests.store.building import BLOCK, layout_of, open_store, prompt, publication

BLOCK_BYTES = 19_968
"""Raw bytes of a block in these tests, one piece each."""
PIECE_HEADER_BYTES = 48


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prompts that share three blocks, the first of them used twice."""
    store = open_store(tmp_path / "kv")
    first, second = prompt(1, 4 * BLOCK), prompt(1, 4 * BLOCK)
    second[3 * BLOCK :] += 1
    pub = publication(store, first)
    for publication_ in (pub, publication(store, second)):
        store.publish(publication_)
    assert pub.last_node is not None
    store.write([touches({pub.last_node: Use(2000.0, 2)})])
    store.close()
    return tmp_path / "kv"


@pytest.fixture
def inspect(run: Run) -> Run:
    return lambda folder, *args: run("inspect", *args, "--kv-cache-dir", folder)


def listed(inspect: Run, folder: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = inspect(folder, "--json").json["entries"]
    return entries


def test_json_lists_every_entry_with_the_documented_keys(inspect: Run, folder: Path) -> None:
    first, second = listed(inspect, folder)
    assert set(first) == {
        "id", "model", "num_tokens", "raw_bytes", "stored_bytes", "shared_bytes", "hits", "created_at",
        "last_used_at", "ttl_s", "default_ttl", "scope", "tenant", "preview", "checkpoints", "checkpoint_bytes",
    }  # fmt: skip
    assert (first["hits"], first["last_used_at"], second["hits"]) == (2, 2000.0, 2), "both have the trunk"
    assert {e["num_tokens"] for e in (first, second)} == {4 * BLOCK}
    assert {e["raw_bytes"] for e in (first, second)} == {4 * BLOCK_BYTES + 100}
    assert {e["shared_bytes"] for e in (first, second)} == {3 * (BLOCK_BYTES + PIECE_HEADER_BYTES)}
    assert first["model"] == "tiny"


def test_the_table_names_entries_and_totals(inspect: Run, folder: Path) -> None:
    result = inspect(folder)
    assert result.exit_code == 0
    assert listed(inspect, folder)[0]["id"][:6] in result.stdout
    assert "2 saved prompts, 7 blocks" in result.stdout


def test_one_entry_shows_its_blocks(inspect: Run, folder: Path) -> None:
    name = listed(inspect, folder)[0]["id"]
    shown = inspect(folder, name[:8])
    assert shown.exit_code == 0
    assert "blocks      5, 3 of them in other prompts too\n" in shown.stdout
    blocks = inspect(folder, name, "--json").json["blocks"]
    assert [(b["position"], b["num_tokens"], b["kind"]) for b in blocks][-1] == (4 * BLOCK, 0, "tail")
    assert blocks[-1]["hash"] == name


@pytest.mark.parametrize(
    ("recorded", "ttl_s", "default_ttl", "told"),
    [
        (0, None, True, "what --kv-cache-ttl says"),
        (3600, 3600, False, "3,600 s after its last use"),
        (-300, 300, True, "300 s after its last use, or what --kv-cache-ttl says"),
    ],
)
def test_how_long_an_entry_was_asked_to_be_kept_is_shown(
    inspect: Run, folder: Path, recorded: int, ttl_s: int | None, default_ttl: bool, told: str
) -> None:
    name = listed(inspect, folder)[0]["id"]
    with damaged(folder) as records:
        records.change_usage(bytes.fromhex(name), ttl_s=recorded)
    entry = listed(inspect, folder)[0]
    assert (entry["ttl_s"], entry["default_ttl"]) == (ttl_s, default_ttl)
    assert f"kept for    {told}" in inspect(folder, name).stdout.splitlines()


STATE_BYTES = 32_000
"""Raw bytes of the states in the store below, one piece."""


@pytest.fixture
def hybrid(tmp_path: Path) -> tuple[Path, Publication, Publication]:
    """Two prompts of a model with states. They share two blocks and the checkpoint there, where the second one ends."""
    store = open_store(tmp_path / "hybrid")
    layout = layout_of(20_000, STATE_BYTES)
    token_ids = prompt(1, 4 * BLOCK + 3)
    whole = publication(store, token_ids, layout=layout, checkpoints=(2 * BLOCK, 4 * BLOCK))
    store.publish(whole)
    boundary = publication(store, token_ids[: 2 * BLOCK], layout=layout, checkpoints=(2 * BLOCK,))
    assert boundary.entry is not None
    boundary = replace(boundary, nodes=boundary.nodes[:-1], last_node=boundary.nodes[-2].name)
    store.publish(boundary)
    store.close()
    return tmp_path / "hybrid", whole, boundary


def test_checkpoints_are_shown(inspect: Run, hybrid: tuple[Path, Publication, Publication]) -> None:
    folder, whole, boundary = hybrid
    assert whole.last_node is not None
    assert boundary.last_node is not None
    entries = {entry["id"]: entry for entry in listed(inspect, folder)}
    long, short = entries[whole.last_node.hex()], entries[boundary.last_node.hex()]
    one = STATE_BYTES + PIECE_HEADER_BYTES
    assert (long["checkpoints"], long["checkpoint_bytes"]) == ([2 * BLOCK, 4 * BLOCK], 2 * one)
    assert (short["checkpoints"], short["checkpoint_bytes"]) == ([2 * BLOCK], one)
    shared = 2 * (BLOCK_BYTES + PIECE_HEADER_BYTES) + one
    assert long["shared_bytes"] == short["shared_bytes"] == short["stored_bytes"] == shared
    assert long["raw_bytes"] == sum(len(node.payload) for node in whole.nodes)
    assert f"checkpoints 31.3 KiB at {2 * BLOCK}\n" in inspect(folder, boundary.last_node.hex()).stdout
    blocks = inspect(folder, whole.last_node.hex(), "--json").json["blocks"]
    assert [(b["kind"], b["position"]) for b in blocks] == [
        ("block", 0), ("block", BLOCK), ("checkpoint", 2 * BLOCK), ("block", 2 * BLOCK),
        ("block", 3 * BLOCK), ("checkpoint", 4 * BLOCK), ("tail", 4 * BLOCK),
    ]  # fmt: skip
    totals = inspect(folder, "--json").json
    del totals["entries"]
    assert totals == {"blocks": 5, "checkpoints": 2, "checkpoint_bytes": 2 * one}


def test_the_table_has_a_column_for_checkpoints_where_there_are_any(
    inspect: Run, folder: Path, hybrid: tuple[Path, Publication, Publication]
) -> None:
    assert "checkpoint" not in inspect(folder).stdout
    shown = inspect(hybrid[0]).stdout
    assert " checkpoints " in shown.splitlines()[0]
    assert "2 saved prompts, 5 blocks, 2 checkpoints (62.6 KiB), " in shown
    assert "5 blocks and 2 checkpoints (62.6 KiB) in " in inspect(hybrid[0], "--stats").stdout


def save_preview(folder: Path, preview: str, seed: int = 1) -> None:
    with closing(open_store(folder)) as store:
        pub = publication(store, prompt(seed, BLOCK))
        entry = EntryRecord(root=pub.root, num_tokens=BLOCK, scope="full", preview=preview, created_at=1.0)
        store.publish(replace(pub, entry=entry))


def test_nothing_that_was_saved_steers_the_terminal(inspect: Run, tmp_path: Path) -> None:
    """A store of an earlier version, or of somebody else, holds whatever was in the prompts."""
    nasty = "hi \x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\n[bold]x[/bold] [/nope] 🦀"
    save_preview(tmp_path, nasty)
    name = listed(inspect, tmp_path)[0]["id"]
    for args in ((), (name,), ("--json",), (name, "--json")):
        shown = inspect(tmp_path, *args).stdout
        assert shown.replace("\n", "").isprintable(), args
        assert "[bold]x[/bold] [/nope] 🦀" in shown, "it is not read as markup"
    assert listed(inspect, tmp_path)[0]["preview"] == nasty


def test_it_leaves_the_store_as_it_was(inspect: Run, folder: Path) -> None:
    before = (folder / "data.mdb").read_bytes()
    assert inspect(folder).exit_code == 0
    assert (folder / "data.mdb").read_bytes() == before


def test_the_table_shows_where_conversations_differ(inspect: Run, tmp_path: Path) -> None:
    for seed, question in enumerate(("and what about maps?", "and what about birds?")):
        begin = "You look after a small library and answer questions about it, briefly and kindly, … "
        save_preview(tmp_path, begin + question, seed)
    shown = inspect(tmp_path).stdout
    assert "about maps?" in shown
    assert "about birds?" in shown


def test_tenants_are_shown_where_there_are_any_as_purge_takes_them(inspect: Run, folder: Path) -> None:
    assert " tenant " not in inspect(folder).stdout.splitlines()[0]
    tenant = Tenant.of_key("a key").with_salt("alice")
    store = open_store(folder)
    pub = publication(store, prompt(5, BLOCK), root=b"t" * 16)
    record = RootRecord(
        model="tiny", block_size=BLOCK, layout=pub.root_record.layout, created_at=0.0, tenant=str(tenant)
    )
    store.publish(replace(pub, root_record=record))
    store.close()
    shown = inspect(folder).stdout
    assert " tenant " in shown.splitlines()[0]
    digits = re.search(r"\b[0-9a-f]{8}/[0-9a-f]{8}\b", shown)
    assert digits
    assert matches(str(tenant), digits[0])
    assert pub.last_node is not None
    assert f"tenant      {tenant}\n" in inspect(folder, pub.last_node.hex()).stdout
    assert "tenant      none\n" in inspect(folder, listed(inspect, folder)[0]["id"]).stdout

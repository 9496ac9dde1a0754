from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from diskprefix.cli import main
from diskprefix.errors import StoreFull
from diskprefix.nouns import Tenant
from diskprefix.store.changes import Use
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Publication, Store
from diskprefix.tenant_ids import matches
from tests.faults.damage import damaged
from tests.store.building import BLOCK, Clock, layout_of, open_store, prompt, publication

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
    store.touch({pub.last_node: Use(2000.0, 2)})
    store.close()
    return tmp_path / "kv"


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    def run(*args: str | Path) -> Result:
        code: object = 0
        try:
            main(["inspect", *map(str, args)])
        except SystemExit as end:
            code = end.code
        out = capsys.readouterr()
        assert isinstance(code, int | None)
        return Result(code or 0, out.out, out.err)

    return run


def listed(invoke: Invoke, folder: Path) -> list[dict[str, Any]]:
    result = invoke("--kv-cache-dir", folder, "--json")
    assert result.exit_code == 0, result.stderr
    entries: list[dict[str, Any]] = json.loads(result.stdout)["entries"]
    return entries


def test_json_lists_every_entry_with_the_documented_keys(invoke: Invoke, folder: Path) -> None:
    first, second = listed(invoke, folder)
    assert set(first) == {
        "id", "model", "num_tokens", "raw_bytes", "stored_bytes", "shared_bytes", "hits", "created_at",
        "last_used_at", "ttl_s", "default_ttl", "scope", "tenant", "preview", "checkpoints", "checkpoint_bytes",
        "generated_tokens",
    }  # fmt: skip
    assert (first["hits"], first["last_used_at"], second["hits"]) == (2, 2000.0, 0)
    assert {e["num_tokens"] for e in (first, second)} == {4 * BLOCK}
    assert {e["raw_bytes"] for e in (first, second)} == {4 * BLOCK_BYTES + 100}
    assert {e["shared_bytes"] for e in (first, second)} == {3 * (BLOCK_BYTES + PIECE_HEADER_BYTES)}
    assert first["model"] == "tiny"


def test_the_table_names_entries_and_totals(invoke: Invoke, folder: Path) -> None:
    result = invoke("--kv-cache-dir", folder)
    assert result.exit_code == 0
    assert listed(invoke, folder)[0]["id"][:6] in result.stdout
    assert "2 saved prompts, 7 blocks" in result.stdout


def test_one_entry_shows_its_blocks(invoke: Invoke, folder: Path) -> None:
    name = listed(invoke, folder)[0]["id"]
    shown = invoke("--kv-cache-dir", folder, name[:8])
    assert shown.exit_code == 0
    assert f"tokens {3 * BLOCK}–{4 * BLOCK}" in shown.stdout
    blocks = json.loads(invoke("--kv-cache-dir", folder, name, "--json").stdout)["blocks"]
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
    invoke: Invoke, folder: Path, recorded: int, ttl_s: int | None, default_ttl: bool, told: str
) -> None:
    name = listed(invoke, folder)[0]["id"]
    with damaged(folder) as records:
        records.change_usage(bytes.fromhex(name), ttl_s=recorded)
    entry = listed(invoke, folder)[0]
    assert (entry["ttl_s"], entry["default_ttl"]) == (ttl_s, default_ttl)
    assert f"kept for    {told}" in invoke("--kv-cache-dir", folder, name).stdout.splitlines()


STATE_BYTES = 32_000
"""Raw bytes of the states in the store below, one piece."""


@pytest.fixture
def hybrid(tmp_path: Path) -> tuple[Path, Publication, Publication]:
    """Two prompts of a model with states. They share two blocks and the checkpoint there, where the second one ends."""
    store = open_store(tmp_path / "hybrid")
    layout = layout_of(20_000, STATE_BYTES)
    token_ids = prompt(1, 4 * BLOCK + 3)
    whole = publication(store, token_ids, layout=layout, checkpoints=(2 * BLOCK, 4 * BLOCK), generated_from=3 * BLOCK)
    store.publish(whole)
    boundary = publication(store, token_ids[: 2 * BLOCK], layout=layout, checkpoints=(2 * BLOCK,))
    assert boundary.entry is not None
    boundary = replace(boundary, nodes=boundary.nodes[:-1], last_node=boundary.nodes[-2].name)
    store.publish(boundary)
    store.close()
    return tmp_path / "hybrid", whole, boundary


def test_checkpoints_and_what_was_generated_are_shown(
    invoke: Invoke, hybrid: tuple[Path, Publication, Publication]
) -> None:
    folder, whole, boundary = hybrid
    assert whole.last_node is not None
    assert boundary.last_node is not None
    entries = {entry["id"]: entry for entry in listed(invoke, folder)}
    long, short = entries[whole.last_node.hex()], entries[boundary.last_node.hex()]
    one = STATE_BYTES + PIECE_HEADER_BYTES
    assert (long["checkpoints"], long["checkpoint_bytes"]) == ([2 * BLOCK, 4 * BLOCK], 2 * one)
    assert (short["checkpoints"], short["checkpoint_bytes"]) == ([2 * BLOCK], one)
    assert (long["generated_tokens"], short["generated_tokens"]) == (BLOCK + 3, 0)
    shared = 2 * (BLOCK_BYTES + PIECE_HEADER_BYTES) + one
    assert long["shared_bytes"] == short["shared_bytes"] == short["stored_bytes"] == shared
    assert long["raw_bytes"] == sum(len(node.payload) for node in whole.nodes)
    totals = json.loads(invoke("--kv-cache-dir", folder, "--json").stdout)
    del totals["entries"]
    assert totals == {"blocks": 5, "generated_blocks": 2, "checkpoints": 2, "checkpoint_bytes": 2 * one}


def test_the_table_has_a_column_for_checkpoints_and_one_for_generated_tokens_where_there_are_any(
    invoke: Invoke, folder: Path, hybrid: tuple[Path, Publication, Publication]
) -> None:
    plain = invoke("--kv-cache-dir", folder).stdout
    assert "checkpoint" not in plain
    assert "generated" not in plain
    shown = invoke("--kv-cache-dir", hybrid[0]).stdout
    assert " checkpoints " in shown.splitlines()[0]
    assert " generated " in shown.splitlines()[0]
    assert "2 saved prompts, 5 blocks (2 generated), 2 checkpoints (62.6 KiB), " in shown


def test_an_entry_that_ends_with_a_checkpoint_shows_it_after_its_block(
    invoke: Invoke, hybrid: tuple[Path, Publication, Publication]
) -> None:
    folder, whole, boundary = hybrid
    assert whole.last_node is not None
    assert boundary.last_node is not None
    shown = invoke("--kv-cache-dir", folder, boundary.last_node.hex())
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    chain = lines[lines.index("blocks      2") + 1 :]
    assert chain[0].split()[:4] == ["tokens", f"0–{2 * BLOCK}", "2", "blocks"]
    assert chain[1].split()[:4] == ["at", "token", str(2 * BLOCK), "checkpoint"]
    assert chain[1].endswith(boundary.last_node.hex())
    assert f"checkpoints 31.3 KiB at {2 * BLOCK}" in lines
    assert "generated   none" in lines
    blocks = json.loads(invoke("--kv-cache-dir", folder, whole.last_node.hex(), "--json").stdout)["blocks"]
    assert [(b["kind"], b["position"], b["generated"]) for b in blocks] == [
        ("block", 0, False), ("block", BLOCK, False), ("checkpoint", 2 * BLOCK, False), ("block", 2 * BLOCK, False),
        ("block", 3 * BLOCK, True), ("checkpoint", 4 * BLOCK, True), ("tail", 4 * BLOCK, True),
    ]  # fmt: skip


@pytest.mark.parametrize("entry", ["zzzz", "", "0" * 33])
def test_an_unknown_or_ambiguous_entry_is_one_line(invoke: Invoke, folder: Path, entry: str) -> None:
    result = invoke("--kv-cache-dir", folder, entry)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_store_is_one_line(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("--kv-cache-dir", tmp_path)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "holds no diskprefix store" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_preview_is_not_read_as_markup(invoke: Invoke, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    pub = publication(store, prompt(1, BLOCK))
    assert pub.entry is not None
    entry = type(pub.entry)(
        root=pub.entry.root, num_tokens=BLOCK, scope="full", preview="[bold]x[/bold] [/nope]", created_at=1.0
    )
    store.publish(replace(pub, entry=entry))
    store.close()
    result = invoke("--kv-cache-dir", tmp_path)
    assert result.exit_code == 0
    assert "[bold]x[/bold] [/nope]" in result.stdout


def test_nothing_that_was_saved_steers_the_terminal(invoke: Invoke, tmp_path: Path) -> None:
    """A store of an earlier version, or of somebody else, holds whatever was in the prompts."""
    store = open_store(tmp_path)
    pub = publication(store, prompt(1, BLOCK))
    assert pub.entry is not None
    nasty = "hi \x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\nthere 🦀"
    entry = type(pub.entry)(root=pub.entry.root, num_tokens=BLOCK, scope="full", preview=nasty, created_at=1.0)
    store.publish(replace(pub, entry=entry))
    store.close()
    name = listed(invoke, tmp_path)[0]["id"]
    for args in ((), (name,), ("--json",), (name, "--json")):
        shown = invoke("--kv-cache-dir", tmp_path, *args).stdout
        assert shown.replace("\n", "").isprintable(), args
        assert "there 🦀" in shown
    assert listed(invoke, tmp_path)[0]["preview"] == nasty


def test_it_reads_a_store_that_is_being_written(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    stop = threading.Event()

    def write() -> None:
        for seed in range(10_000):
            if stop.is_set():
                return
            clock.now += 11
            # It is full if a slow reader keeps the pages of many publications.
            with suppress(StoreFull):
                store.publish(publication(store, prompt(seed, 2 * BLOCK)))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        command = [sys.executable, "-m", "diskprefix", "inspect", "--kv-cache-dir", str(tmp_path), "--json"]
        for _ in range(3):
            shown = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
            assert shown.returncode == 0, shown.stderr
            assert "entries" in json.loads(shown.stdout)
    finally:
        stop.set()
        writer.join()
        store.close()


def test_it_leaves_the_store_as_it_was(invoke: Invoke, folder: Path) -> None:
    before = (folder / "data.mdb").read_bytes()
    assert invoke("--kv-cache-dir", folder).exit_code == 0
    assert (folder / "data.mdb").read_bytes() == before
    store = Store(folder, read_only=True)
    assert store.counts()["entries"] == 2
    store.close()


def test_the_table_shows_where_conversations_differ(invoke: Invoke, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for seed, question in enumerate(("and what about maps?", "and what about birds?")):
        pub = publication(store, prompt(seed, BLOCK))
        assert pub.entry is not None
        preview = "You look after a small library and answer questions about it, briefly and kindly, … " + question
        entry = type(pub.entry)(root=pub.root, num_tokens=BLOCK, scope="full", preview=preview, created_at=1.0)
        store.publish(replace(pub, entry=entry))
    store.close()
    shown = invoke("--kv-cache-dir", tmp_path).stdout
    assert "about maps?" in shown
    assert "about birds?" in shown


def test_tenants_are_shown_where_there_are_any_as_purge_takes_them(invoke: Invoke, folder: Path) -> None:
    assert " tenant " not in invoke("--kv-cache-dir", folder).stdout.splitlines()[0]
    tenant = Tenant.of_key("a key").with_salt("alice")
    store = open_store(folder)
    pub = publication(store, prompt(5, BLOCK), root=b"t" * 16)
    record = RootRecord(
        model="tiny", block_size=BLOCK, layout=pub.root_record.layout, created_at=0.0, tenant=str(tenant)
    )
    store.publish(replace(pub, root_record=record))
    store.close()
    shown = invoke("--kv-cache-dir", folder).stdout
    assert " tenant " in shown.splitlines()[0]
    digits = re.search(r"\b[0-9a-f]{8}/[0-9a-f]{8}\b", shown)
    assert digits
    assert matches(str(tenant), digits[0])
    assert pub.last_node is not None
    assert f"tenant      {tenant}\n" in invoke("--kv-cache-dir", folder, pub.last_node.hex()).stdout
    assert "tenant      none\n" in invoke("--kv-cache-dir", folder, listed(invoke, folder)[0]["id"]).stdout

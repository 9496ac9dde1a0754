"""The figures of each model and tenant, and those of one saved prompt."""

from __future__ import annotations

from diskprefix.extras.watch.browse.outline import outline
from diskprefix.extras.watch.inspect.entry_view import entry_details
from diskprefix.extras.watch.inspect.stats_view import figures
from diskprefix.store.savings import read_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import list_entries
from tests.extras.watch.browse.saved_chats import ALICE, SavedChats


def test_each_model_and_tenant_has_its_own_figures(snapshot: Snapshot, chats: SavedChats) -> None:
    entries = list_entries(snapshot)
    rows = figures(outline(snapshot, entries), read_savings(snapshot), chats.clock.now)
    main, alice = max(rows, key=lambda row: row["entries"]), next(row for row in rows if row["tenant"] == str(ALICE))
    mine = [info for info in entries if info.model == "tiny" and not info.tenant]
    assert main["listed_bytes"] == sum(info.raw_bytes for info in mine if info.preview.find("older build") < 0)
    assert main["shared_bytes"] == main["listed_bytes"] - main["raw_bytes"] > 0
    assert (alice["entries"], alice["shared_bytes"]) == (1, 0)
    assert (main["total"]["requests"], main["restored_share"]) == (10, 0.5)
    assert main["today"]["saved_s"] == main["total"]["saved_s"] == 5 * 1.5
    assert main["since"] <= chats.clock.now


def test_an_entry_names_who_shares_its_blocks(snapshot: Snapshot) -> None:
    entries = list_entries(snapshot)
    info = next(one for one in entries if "birds nest" in one.preview)
    details = entry_details(snapshot, entries, info)
    assert len(details["shared_with"]) == 3, "Alice's, and those of other builds, share nothing"
    most = details["shared_with"][0]["num_tokens"]
    assert {node["entries"] for node in details["blocks"] if node["position"] + node["num_tokens"] <= most} >= {4}
    assert details["blocks"][-1]["entries"] == 1
    assert details["reason"] == "full"
    assert len(details["hit_times"]) == 4, "requests that restored a block of it, whichever prompt they were"

"""Whom a purge concerns: its tenants, for good, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from diskprefix.prefixstore.store.epochs import (
    EVERYONE,
    Epoch,
    Epochs,
    Purges,
    epochs_of,
    of_salt,
    of_tenants,
    purges_of,
)
from diskprefix.prefixstore.store.purge import PurgeFilter, plan_purge, purge
from diskprefix.prefixstore.store.store import Store
from diskprefix.tenant_ids import matches, short_tenant
from diskprefix.tokens import root_hash
from diskprefix.values import SHARED, Tenant
from tests.prefixstore.store.building import BLOCK, of_root, open_store, prompt, publication

KEY = Tenant.of_key("a key")
TENANTS = [
    str(tenant) for tenant in (SHARED, SHARED.with_salt("alice"), SHARED.with_salt("bob"), KEY, KEY.with_salt("alice"))
]
SHARED_TEXT, ALICE, BOB, KEYS, KEYS_ALICE = TENANTS


def purged(before: Purges, after: Purges) -> set[str]:
    return {tenant for tenant in TENANTS if after.was_purged(tenant, before.last(tenant))}


@pytest.mark.parametrize(
    ("whose", "tenants"),
    [
        (EVERYONE, set(TENANTS)),
        (of_tenants([SHARED_TEXT]), {SHARED_TEXT}),
        (of_tenants([KEYS]), {KEYS}),
        (of_tenants([KEYS_ALICE, BOB]), {KEYS_ALICE, BOB}),
        (of_salt("alice"), {ALICE, KEYS_ALICE}),
        (of_salt("a key"), {KEYS, KEYS_ALICE}),
        (of_salt("nobody"), set()),
        (of_salt(short_tenant(ALICE)), {ALICE, KEYS_ALICE}),
        (of_salt(short_tenant(BOB)), {BOB}),
        (of_salt(KEYS_ALICE), {KEYS_ALICE}),
    ],
)
def test_a_purge_concerns_its_tenants_and_no_others(whose: frozenset[str], tenants: set[str]) -> None:
    """Whatever was purged before."""
    history = Purges()
    for earlier in (None, EVERYONE, of_salt("alice"), of_tenants([BOB]), whose):
        history = history if earlier is None else history.and_of(earlier)
        assert purged(history, history.and_of(whose)) == tenants


@pytest.mark.parametrize("wanted", ["alice", "a key", "nobody", *filter(None, map(short_tenant, TENANTS)), ALICE[:12]])
def test_a_salt_concerns_the_tenants_whose_records_a_purge_removes(wanted: str) -> None:
    assert purged(Purges(), Purges().and_of(of_salt(wanted))) == {one for one in TENANTS if matches(one, wanted)}


def test_no_later_purge_brings_an_epoch_back() -> None:
    """Neither another tenant's, nor that of everyone, nor one too many to be remembered alone."""
    history, ids = Purges(), {Purges().last(ALICE)}
    for number in range(600):
        whose = of_salt("alice") if number % 200 == 0 else of_tenants([f"{number:032x}"])
        was = history.last(ALICE)
        history = history.and_of(whose)
        if number % 200 == 0:
            assert history.last(ALICE) not in ids
        # Rarely, a purge counts as one of everyone.
        assert history.last(ALICE) == was or history.last(ALICE) not in ids
        ids.add(history.last(ALICE))
    assert len(ids) <= 1 + 3 + 600 // 250
    assert len(history.encoded()) < 16_000


def test_a_damaged_record_outdates_everything_once(store: Store) -> None:
    with store.changes() as changes:
        changes.record_purge(of_salt("alice"))
    before = store.read_epochs()
    with store.changes() as changes:
        value = bytearray(changes.meta("purges") or b"")
        value[-1] ^= 1
        changes.put_meta("purges", bytes(value))
    after = store.read_epochs()
    assert purged(before.purges, after.purges) == set(TENANTS)
    assert store.read_epochs() == after
    with store.changes() as changes:
        changes.record_purge(of_salt("bob"))
    assert purged(after.purges, store.read_epochs().purges) == {BOB}


def test_all_epochs_of_another_store_are_others(store: Store, tmp_path: Path) -> None:
    tmp_path.joinpath("other").mkdir(mode=0o700)
    other = open_store(tmp_path / "other")
    assert not store.epochs.is_over(store.epochs.of(ALICE))
    assert other.epochs.is_over(store.epochs.of(ALICE))
    assert Epochs().is_over(store.epochs.of(ALICE))
    assert not Epochs().is_over(Epoch())
    other.close()


@pytest.mark.parametrize(
    ("chosen", "tenants"),
    [
        ({"salt": "alice"}, {ALICE, KEYS_ALICE}),
        ({"salt": "alice", "model": "tiny"}, {ALICE, KEYS_ALICE}),
        ({"model": "tiny"}, set(TENANTS)),
        ({"older_than_s": 0.0}, set(TENANTS)),
        ({}, set(TENANTS)),
        ({"entries": [BOB]}, {BOB}),
        ({"entries": [SHARED_TEXT]}, {SHARED_TEXT}),
        ({"entries": [BOB, KEYS]}, {BOB, KEYS}),
    ],
)
def test_a_purge_ends_the_epochs_of_whom_it_selects(store: Store, chosen: dict[str, object], tenants: set[str]) -> None:
    """A saved prompt is its tenant's, with every model: a draft model has read it too."""
    ends = dict[str, bytes]()
    for number, tenant in enumerate(TENANTS):
        made = publication(store, prompt(number, 2 * BLOCK), root=root_hash(tenant))
        store.publish(of_root(made, structs.replace(made.root_record, tenant=tenant)))
        assert made.last_node is not None
        ends[tenant] = made.last_node
    if "entries" in chosen:
        chosen = {"entries": frozenset(ends[tenant] for tenant in chosen["entries"])}  # type: ignore[attr-defined]
    before = store.epochs
    assert purge(store, PurgeFilter(**chosen), store.clock() + 10).blocks  # type: ignore[arg-type]
    with store.snapshot() as snapshot:
        assert {tenant for tenant in TENANTS if epochs_of(snapshot, store.names).is_over(before.of(tenant))} == tenants


def test_an_entry_whose_blocks_all_stay_is_purged_of_its_tenant(store: Store) -> None:
    """The records of its root are those of the entry alone."""
    short, long = prompt(1, 2 * BLOCK), prompt(1, 4 * BLOCK)
    first = publication(store, short)
    for made in (first, publication(store, long)):
        store.publish(made)
    assert first.last_node is not None
    chosen = PurgeFilter(entries=frozenset({first.last_node}))
    with store.snapshot() as snapshot:
        plan = plan_purge(snapshot, chosen, 0.0)
    assert chosen.purged(plan) == of_tenants([""])
    before = store.epochs
    purge(store, chosen, 0.0)
    assert store.epochs.is_over(before.of(""))
    assert not store.epochs.is_over(before.of(BOB))


def test_the_file_does_not_name_whom_it_has_forgotten(store: Store) -> None:
    with store.changes() as changes:
        changes.record_purge(of_salt("alice"))
        changes.record_purge(of_tenants([KEYS]))
        value = changes.meta("purges") or b""
        assert len(purges_of(changes).ids) == 3
    assert not [text for text in ("alice", *ALICE.split("/"), KEYS) if text.encode() in value]

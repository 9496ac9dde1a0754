"""The id of a saved prompt that has grown finds what grew out of it."""

from __future__ import annotations

import numpy as np
import pytest

from diskprefix.store import tree
from diskprefix.store.changes import Use
from diskprefix.store.schema import Kind
from diskprefix.store.store import Store
from diskprefix.store.tree import grown_from, has_grown
from diskprefix.tokens import TokenIds
from tests.store.building import BLOCK, prompt, publication

TOKENS = prompt(1, 5 * BLOCK)


def save(store: Store, token_ids: TokenIds, end_kind: Kind = Kind.BLOCK) -> str:
    """Returns the id of the saved prompt."""
    pub = publication(store, token_ids, replaces=True, end_kind=end_kind)
    store.publish(pub)
    assert pub.last_node is not None
    return pub.last_node.hex()


def grown(store: Store, beginning: str) -> list[str]:
    with store.snapshot() as snapshot:
        return grown_from(snapshot, store.secret, beginning)


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.TAIL])
@pytest.mark.parametrize("end", [2 * BLOCK + 3, 2 * BLOCK + 9, 3 * BLOCK, 4 * BLOCK + 5])
def test_an_id_finds_what_has_grown_out_of_it_after_one_turn_and_after_several(
    store: Store, kind: Kind, end: int
) -> None:
    save(store, prompt(2, 3 * BLOCK + 1))
    former = save(store, TOKENS[: 2 * BLOCK + 2], kind)
    assert grown(store, former) == []
    for turn in (2 * BLOCK + 3, end):
        present = save(store, TOKENS[:turn])
    for digits in (former, former[:12], former[:9], former.upper()):
        assert grown(store, digits) == [present]
    assert has_grown(former, [present]) == f"entry {former} has grown; its id is now {present}"


def test_all_that_has_grown_out_of_one_is_found(store: Store) -> None:
    former = save(store, TOKENS[: 2 * BLOCK + 2], Kind.TAIL)
    other = TOKENS.copy()
    other[2 * BLOCK + 4 :] += 1
    present = [save(store, TOKENS[: 3 * BLOCK + 1]), save(store, other[: 2 * BLOCK + 7])]
    save(store, prompt(2, 2 * BLOCK + 7))
    found = grown(store, former)
    assert sorted(found) == sorted(present)
    assert has_grown(former, found) == f"entry {former} has grown into 2: {', '.join(found)}"


@pytest.mark.parametrize("beginning", ["", "zz", "é" * 10, "f" * 32, "f" * 99])
def test_what_was_no_id_finds_nothing(store: Store, beginning: str) -> None:
    save(store, TOKENS)
    assert grown(store, beginning) == []


def test_few_digits_find_nothing_since_they_begin_many_names(store: Store) -> None:
    former = save(store, TOKENS[: BLOCK + 2])
    save(store, TOKENS[: BLOCK + 7])
    assert len(grown(store, former[:8])) == 1
    assert grown(store, former[:7]) == []


def test_only_what_was_used_of_late_is_looked_at(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    former = save(store, TOKENS[: BLOCK + 2])
    present = save(store, TOKENS[: BLOCK + 7])
    others = [save(store, np.concatenate([TOKENS[:3] + seed, TOKENS])) for seed in (1, 2)]
    monkeypatch.setattr(tree, "_MAX_GROWN", 2)
    store.touch({bytes.fromhex(name): Use(2000.0) for name in others})
    assert grown(store, former) == []
    store.touch({bytes.fromhex(present): Use(3000.0)})
    assert grown(store, former) == [present]

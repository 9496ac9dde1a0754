"""A store with saved conversations for the tests of a file, which may save more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diskprefix.prefixstore.store.snapshot import Snapshot
from tests.desk.watch.browse.saved_chats import ALICE, SavedChats, chat


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SavedChats]:
    """Three conversations that share a system prompt, one of Alice's, one of another agent, one of another build."""
    folder = tmp_path_factory.mktemp("browse")
    made = SavedChats(folder / "kv", folder / "tokenizer")
    for question in ("When is high tide today?", "Which birds nest on the pier?", "Who drew the chart of the bay?"):
        made.save(chat(question))
    made.save(chat("When is high tide today?"), tenant=ALICE)
    made.save(chat("Go on.", system="Another agent says other things. " * 12))
    made.save(chat("Only there?", system="Kept by an older build alone. " * 12), torch="2.12")
    # The build of before is in use again.
    made.save(chat("And now?"))
    yield made
    made.store.close()


@pytest.fixture
def snapshot(chats: SavedChats) -> Iterator[Snapshot]:
    with chats.store.snapshot() as taken:
        yield taken

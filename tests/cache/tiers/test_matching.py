"""The search for the last checkpoint of a prompt asks for few names, however long the prompt is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diskprefix.cache.matching import Matcher
from diskprefix.cache.tiers.local import BufferTier, DiskTier, DiskView
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.cache.tiers.tier import Tier, View, open_views
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import Kind
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer
from tests.cache.tiers.test_tiers import Held
from tests.store.building import BLOCK, ROOT, layout_of, open_store, prompt, publication

NUM_BLOCKS = 200
LAYOUT = layout_of(64, 256)
LONG = prompt(1, NUM_BLOCKS * BLOCK + 7)
CHECKPOINT = 30 * BLOCK + 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    opened.publish(publication(opened, LONG[: NUM_BLOCKS * BLOCK], layout=LAYOUT, end_kind=Kind.BLOCK))
    yield opened
    opened.close()


def restorable(store: Store, *tiers: Tier) -> tuple[list[Node], int]:
    nodes = PromptNodes(store.secret, ROOT, LONG, BLOCK, PayloadLayout.parse(LAYOUT))
    with open_views(tiers) as views:
        matcher = Matcher[View](nodes, views, "token_checkpoints")
        matcher.match()
        assert len(matcher.blocks) == NUM_BLOCKS
        return matcher.restorable()


def test_blocks_that_only_the_next_block_continues_are_not_searched(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 blocks with one checkpoint behind the thirtieth, and a prompt that leaves behind the hundredth."""
    points = publication(store, LONG[: CHECKPOINT + 5], layout=LAYOUT, checkpoints=(CHECKPOINT,), end_kind=Kind.BLOCK)
    store.publish(points)
    store.publish(publication(store, np.append(LONG[: 100 * BLOCK + 2], prompt(3, 2 * BLOCK)), layout=LAYOUT))
    asked: Counter[int] = Counter()
    has = DiskView.has

    def counted(view: DiskView, node: Node, token_ids: bytes) -> bool:
        asked[node.kind != Kind.BLOCK] += 1
        return has(view, node, token_ids)

    monkeypatch.setattr(DiskView, "has", counted)
    found, end = restorable(store, DiskTier(store, store.quarantine))
    assert (end, found[-1].kind, len(found)) == (CHECKPOINT, Kind.CHECKPOINT, 31)
    # Of each of two blocks at most a checkpoint and a tail for each length, and the prompt's own tail.
    assert asked[True] <= 2 * 2 * BLOCK + 1


def test_a_checkpoint_that_waits_to_be_written_is_found_behind_blocks_on_the_disk(store: Store) -> None:
    writer: Writer = Held(store, buffer_bytes=1 << 30)
    pub = publication(store, LONG[:CHECKPOINT], layout=LAYOUT, end_kind=Kind.CHECKPOINT)
    assert writer.reserve(pub.payload_bytes)
    writer.submit(pub, reserved_bytes=pub.payload_bytes)
    tiers = BufferTier(writer), DiskTier(store, store.quarantine)
    assert restorable(store, *tiers)[1] == CHECKPOINT
    assert restorable(store, *tiers[1:])[1] == 0

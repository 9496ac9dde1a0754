"""What holds for every tier that can be read at once, on the writer's buffer and on a store; and the search for the
last checkpoint of a prompt asks for few names, however long the prompt is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.cache import restore
from diskprefix.prefixstore.cache.matching import Matcher, RestoreResult
from diskprefix.prefixstore.cache.saving import SavePlanner
from diskprefix.prefixstore.cache.tiers.loading import Loader
from diskprefix.prefixstore.cache.tiers.local import DiskView, view_buffer, view_disk
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Tier, View, Write, open_views
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.pieces import PayloadLayout, split_payload
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.tokens import TokenPath
from tests.prefixstore.store.building import BLOCK, ROOT, damage, layout_of, open_store, part_of, prompt, publication

PAYLOAD_BYTES = 20_000
PROMPT = prompt(1, 3 * BLOCK + 5)


class Held(Writer):
    """A writer that writes nothing: what is submitted stays in its buffer."""

    def _run(self) -> None:
        return


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(params=["memory", "disk"])
def tier_of(request: pytest.FixtureRequest, store: Store) -> Callable[[Publication], Tier]:
    """Returns a tier that has a publication."""

    def made(pub: Publication) -> Tier:
        if request.param == "disk":
            store.publish(pub)
            return partial(view_disk, store, store.quarantine)
        return held(store, pub)

    return made


def held(store: Store, *pubs: Publication) -> Tier:
    writer = Held(store, buffer_bytes=1 << 30)
    save = Save(pubs[0].epoch)
    for pub in pubs:
        writer.queue_publication(save, pub, is_last=pub is pubs[-1])
    return partial(view_buffer, writer)


def node_of(node: NewNode) -> Node:
    return Node(node.name, node.parent, node.position, len(node.token_ids), node.kind)


def nodes_of(store: Store) -> PromptNodes:
    return PromptNodes(TokenPath(store.secret, ROOT, PROMPT, BLOCK), PayloadLayout.parse(layout_of(PAYLOAD_BYTES)))


def test_a_tier_has_a_node_only_with_its_tokens_its_place_and_its_parent(
    store: Store, tier_of: Callable[[Publication], Tier]
) -> None:
    pub = publication(store, PROMPT)
    with tier_of(pub)() as view:
        for new in pub.nodes:
            node, ids = node_of(new), new.token_ids.tobytes()
            assert view.has(node, ids)
            assert not view.has(node._replace(name=b"x" * 16), ids)
    others: list[tuple[Any, bytes]] = [
        (node, bytes(len(ids))),
        (node._replace(parent=b"p" * 16), ids),
        (node._replace(position=0), ids),
        (node._replace(kind=NodeKind.BLOCK), ids),
    ]
    for other, its in others:
        with tier_of(pub)() as view:
            assert not view.has(other, its)


def test_nodes_that_continue_another_come_by_what_they_have_in_common(
    store: Store, tier_of: Callable[[Publication], Tier]
) -> None:
    near, far = (np.concatenate([PROMPT[:common], prompt(9, 2 * BLOCK - common)]) for common in (12, 3))
    pubs = [publication(store, ids) for ids in (far, near, PROMPT)]
    both = part_of(replace(pubs[0], nodes=tuple(node for pub in pubs for node in pub.nodes)))
    with tier_of(both)() as view:
        found = [node.name for node, _ in view.similar(ROOT, near)]
        assert found == [pubs[index].nodes[0].name for index in (1, 2, 0)]
        second, ids = next(view.similar(pubs[2].nodes[0].name, PROMPT[BLOCK:]))
        assert (second, ids.tolist()) == (node_of(pubs[2].nodes[1]), PROMPT[BLOCK : 2 * BLOCK].tolist())


@pytest.mark.parametrize(("written", "queued"), [(some, all_) for all_ in range(1, 4) for some in range(all_ + 1)])
def test_a_prompt_is_a_part_until_its_end_is_queued_however_much_is_written(
    store: Store, written: int, queued: int
) -> None:
    """Two publications bring a block each. The last one only says that the second block was the prompt's end."""
    whole = publication(store, PROMPT[: 2 * BLOCK], end_kind=NodeKind.BLOCK)
    pubs = [*(part_of(replace(whole, nodes=(node,))) for node in whole.nodes), replace(whole, nodes=())]
    for pub in pubs[:written]:
        store.publish(pub)
    buffer = [held(store, *pubs[written:queued])] if written < queued else []
    with open_views([*buffer, partial(view_disk, store, store.quarantine)]) as views:
        matcher = Matcher[View](nodes_of(store), views, "token")
        matcher.match()
        assert len(matcher.blocks) == min(queued, 2)
        assert restore._is_part(matcher) is (queued < 3)


def test_a_dropped_node_is_not_found_any_more(store: Store, tier_of: Callable[[Publication], Tier]) -> None:
    pub = publication(store, PROMPT)
    first, ids = node_of(pub.nodes[0]), pub.nodes[0].token_ids
    with tier_of(pub)() as view:
        assert [node for node, _ in view.similar(ROOT, ids)] == [first]
        view.drop_damaged(first, StoreCorrupt("it is damaged"))
        assert set(view.damaged) == {first.name}
        assert not view.has(first, ids.tobytes())
        assert not list(view.similar(ROOT, ids))


class Pages:
    """Memory as another engine may keep it: pages of four tokens, each with all rows of its tokens."""

    PAGE = 4

    def __init__(self, piece: Piece) -> None:
        self._row_bytes = piece.row_bytes
        self._pages = np.zeros((20, piece.num_rows, self.PAGE * piece.row_bytes), dtype=np.uint8)

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Write) -> None:
        assert group == 0
        out: Bytes = np.empty((rows.stop - rows.start, num_tokens * self._row_bytes), dtype=np.uint8)
        write(out)
        for token in range(position, position + num_tokens):
            page, place = divmod(token, self.PAGE)
            its = slice(place * self._row_bytes, (place + 1) * self._row_bytes)
            start = (token - position) * self._row_bytes
            self._pages[page, rows, its] = out[:, start : start + self._row_bytes]

    def tokens(self, start: int, end: int) -> bytes:
        """As a payload has them: row after row."""
        in_order = self._pages.transpose(1, 0, 2).reshape(self._pages.shape[1], -1)
        return in_order[:, start * self._row_bytes : end * self._row_bytes].tobytes()


@pytest.mark.parametrize("in_memory_tokens", [0, BLOCK, BLOCK + 3])
def test_any_memory_can_be_read_into(
    in_memory_tokens: int, store: Store, tier_of: Callable[[Publication], Tier]
) -> None:
    pub, nodes = publication(store, PROMPT), nodes_of(store)
    pages = Pages(nodes.layout.groups[0])
    with ThreadPoolExecutor(2) as readers, tier_of(pub)() as view:
        missing = [(node_of(new), view) for new in pub.nodes if new.position + len(new.token_ids) > in_memory_tokens]
        loader = Loader(nodes, missing, in_memory_tokens, len(PROMPT), {}, pages.fill)
        assert loader.run(readers) is None
    for new in pub.nodes:
        start, end = new.position, new.position + len(new.token_ids)
        if start >= in_memory_tokens:
            assert pages.tokens(start, end) == b"".join(new.payload)[: len(pages.tokens(start, end))]
    assert loader.logits is not None
    assert b"".join(pub.nodes[-1].payload).endswith(loader.logits.tobytes())
    assert not any(pages.tokens(0, in_memory_tokens)), "what the memory has already is not written"


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_piece_that_is_damaged_or_not_finite_names_its_node(where: str, store: Store) -> None:
    """The writer may not have checked yet what waits."""
    pub, nodes = publication(store, PROMPT), nodes_of(store)
    bad = pub.nodes[1]
    if where == "disk":
        store.publish(pub)
        damage(store, bad.name)
        tier: Tier = partial(view_disk, store, store.quarantine)
    else:
        payload = tuple(np.full(piece.num_bytes, 0xFF, np.uint8).data for piece in bad.pieces)
        changed = replace(bad, payload=payload, num_checked=1)
        tier = held(store, replace(pub, nodes=(pub.nodes[0], changed, *pub.nodes[2:])))
    with ThreadPoolExecutor(2) as readers, tier() as view:
        path = [(node_of(new), view) for new in pub.nodes]
        fault = Loader(nodes, path, 0, len(PROMPT), {}, Pages(nodes.layout.groups[0]).fill).run(readers)
    assert fault is not None
    assert fault[0] == node_of(bad)


def test_what_a_view_shows_stays_in_memory_until_it_is_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [bytearray(b"".join(node.payload)) for node in publication(store, PROMPT).nodes]
    expected, done, may_write = [bytes(content) for content in memory], list[int](), threading.Event()
    publish = store.publish

    def publish_later(pub: Publication) -> int:
        assert may_write.wait(30)
        return publish(pub)

    class Reused:
        def release(self) -> None:
            done.append(1)
            for content in memory:
                content[:] = bytes(len(content))

        def frees(self) -> bool:
            return True

    monkeypatch.setattr(store, "publish", publish_later)
    writer, pub = Writer(store, buffer_bytes=1 << 30), publication(store, PROMPT)
    contents = zip(pub.nodes, memory, strict=True)
    nodes = [replace(node, payload=split_payload(memoryview(content), node.pieces)) for node, content in contents]
    pub = replace(pub, nodes=tuple(nodes))
    writer.queue_publication(Save(pub.epoch), pub, [Reused()], is_last=True)
    tier = partial(view_buffer, writer)
    with tier() as later:
        with tier() as view:
            may_write.set()
            assert writer.close(30)
            assert not done
            with tier() as empty:
                assert not empty.has(node_of(nodes[0]), nodes[0].token_ids.tobytes())
            assert [read(view, node) for node in nodes] == expected
        assert not done
        assert read(later, nodes[0]) == expected[0]
    assert done == [1]


def read(view: View, new: NewNode) -> bytes:
    node, pieces = node_of(new), PayloadLayout.parse(layout_of(PAYLOAD_BYTES)).pieces(len(new.token_ids), new.kind)
    out = [np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8) for piece in pieces]
    for part, write in zip(out, view.piece_writes(node, pieces, range(len(pieces))), strict=True):
        write(part)
    return b"".join(part.tobytes() for part in out)


NUM_BLOCKS = 200
LAYOUT = layout_of(64, 256)
LONG = prompt(1, NUM_BLOCKS * BLOCK + 7)
CHECKPOINT = 30 * BLOCK + 5


@pytest.fixture
def long_store(store: Store) -> Store:
    store.publish(publication(store, LONG[: NUM_BLOCKS * BLOCK], layout=LAYOUT, end_kind=NodeKind.BLOCK))
    return store


def restorable(store: Store, *tiers: Tier) -> tuple[list[Node], int]:
    nodes = PromptNodes(TokenPath(store.secret, ROOT, LONG, BLOCK), PayloadLayout.parse(LAYOUT))
    with open_views(tiers) as views:
        matcher = Matcher[View](nodes, views, "token_checkpoints")
        matcher.match()
        assert len(matcher.blocks) == NUM_BLOCKS
        return matcher.restorable()


def test_blocks_that_only_the_next_block_continues_are_not_searched(
    long_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 blocks with one checkpoint behind the thirtieth, and a prompt that leaves behind the hundredth."""
    points = publication(
        long_store, LONG[: CHECKPOINT + 5], layout=LAYOUT, checkpoints=(CHECKPOINT,), end_kind=NodeKind.BLOCK
    )
    long_store.publish(points)
    long_store.publish(publication(long_store, np.append(LONG[: 100 * BLOCK + 2], prompt(3, 2 * BLOCK)), layout=LAYOUT))
    asked: Counter[int] = Counter()
    has = DiskView.has

    def counted(view: DiskView, node: Node, token_ids: bytes) -> bool:
        asked[node.kind != NodeKind.BLOCK] += 1
        return has(view, node, token_ids)

    monkeypatch.setattr(DiskView, "has", counted)
    found, end = restorable(long_store, partial(view_disk, long_store, long_store.quarantine))
    assert (end, found[-1].kind, len(found)) == (CHECKPOINT, NodeKind.CHECKPOINT, 31)
    # Of each of two blocks at most a checkpoint and a tail for each length, and the prompt's own tail.
    assert asked[True] <= 2 * 2 * BLOCK + 1


def test_a_checkpoint_that_waits_to_be_written_is_found_behind_blocks_on_the_disk(long_store: Store) -> None:
    pub = publication(long_store, LONG[:CHECKPOINT], layout=LAYOUT, end_kind=NodeKind.CHECKPOINT)
    tiers = held(long_store, pub), partial(view_disk, long_store, long_store.quarantine)
    assert restorable(long_store, *tiers)[1] == CHECKPOINT
    assert restorable(long_store, *tiers[1:])[1] == 0


def test_states_that_a_preempted_reply_copied_before_an_end_that_was_saved_save_nothing(store: Store) -> None:
    nodes = PromptNodes(TokenPath(store.secret, ROOT, LONG, BLOCK), PayloadLayout.parse(LAYOUT))
    planner = SavePlanner(nodes, RestoreResult(), "checkpoints", len(LONG))
    points = [nodes.checkpoint(blocks * BLOCK) for blocks in (3, 1, 4)]
    assert list(planner.saved_tokens(points)) == [3 * BLOCK, 0, BLOCK]

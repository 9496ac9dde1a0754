"""The worker's side. One thread loads blocks into pages, with others that read and decode. At the end of a step, the
thread that runs the model copies pages to buffers, and the writer's thread writes the buffers."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from msgspec.structs import replace

from diskprefix.bridges.shared.step_orders import (
    NO_PAGE,
    BlocksToSave,
    EndOfRequest,
    Load,
    OrderedBlock,
    OrderedUpload,
    StepOrders,
)
from diskprefix.bridges.vllm.engine_pages import Pages, PageSink
from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.tiers.loading import READER_THREADS, Loader
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Upload, View, open_views
from diskprefix.prefixstore.shared_store import SharedStore
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.prefixstore.store.pieces import Hold, PayloadLayout, split_payload
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import EntryRecord, NodeKind
from diskprefix.prefixstore.store.store import Publication
from diskprefix.processors import unbind
from diskprefix.staging import Staging
from diskprefix.tokens import PromptDigest, TokenPath, as_token_ids

log = logging.getLogger("diskprefix")

_NO_TOKENS = as_token_ids([])


class WorkerSide:
    """Loads and saves the pages of one rank. `load`, `save` and `take_results` are for the thread that runs the model.
    Only `take_results` waits for the disk, up to the given time. `rank` is the index of this rank in plans."""

    def __init__(self, shared: SharedStore, pages: Pages, identity: StateIdentity, rank: int) -> None:
        self._shared, self._pages, self._identity, self._rank = shared, pages, identity, rank
        self._layout = PayloadLayout.parse(identity.layout)
        self.block_bytes = pages.block_bytes(identity.block_size)
        """The bytes of one block in the pages of this rank."""
        assert self.block_bytes == self._layout.payload_bytes(identity.block_size, NodeKind.BLOCK)
        self._staging = Staging(self.block_bytes)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kv-loader", initializer=unbind)
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kv-reader", initializer=unbind)
        self._saves: dict[str, Save] = {}
        self._lock = threading.Lock()
        self._has_loaded = threading.Condition(self._lock)
        self._num_loading = 0
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._counts: Counter[str] = Counter()

    def load(self, plan: StepOrders) -> None:
        """Starts the loads of a step."""
        self._num_loading += len(plan.loads)
        for load in plan.loads:
            self._loader.submit(self._load, load)

    def save(self, plan: StepOrders) -> None:
        """Saves the blocks that the step completed: copies their pages and submits the copies to the writer.
        Call it at the end of the step, before anything changes the pages."""
        for save in plan.saves:
            self._save(save)
        for ended in plan.ended:
            self._end(ended)
        for upload in plan.uploads:
            self._upload(upload)

    def take_results(self, patience_s: float = 0.0) -> tuple[set[str], set[str], set[int]]:
        """Returns the requests whose loads have ended since the last call, the failed ones among them, and the engine's
        blocks that were not loaded. If loads are running, waits up to `patience_s` for the first one."""
        with self._has_loaded:
            if self._num_loading and not self._loaded:
                self._has_loaded.wait(patience_s)
            loaded, self._loaded = self._loaded, set()
            self._num_loading -= len(loaded)
            failed, self._failed = self._failed, set()
            bad, self._bad_blocks = self._bad_blocks, set()
        return loaded, failed, bad

    def take_counts(self) -> Counter[str]:
        """Returns the counts since the last call, by the names in `stats`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Waits for all loads, and ends the threads. The store stays open."""
        self._loader.shutdown()
        self._readers.shutdown()

    def _load(self, load: Load) -> None:
        started = time.perf_counter()
        num_loaded = 0
        try:
            num_loaded = self._load_blocks(load)
        except CacheError as error:
            log.warning("[disk-cache] %s: not loaded: %s", load.request_id, error)
        except Exception:
            # The request computes the missing blocks.
            log.exception("[disk-cache] %s: not loaded", load.request_id)
        lost = load.blocks[num_loaded:]
        self._count(
            loaded_blocks=num_loaded,
            loaded_bytes=num_loaded * self.block_bytes,
            load_errors=int(bool(lost)),
            load_us=round((time.perf_counter() - started) * 1e6),
        )
        with self._lock:
            # Tables of other requests have `NO_PAGE` too.
            pages = {page for block in lost for group in block.pages for page in group}
            self._bad_blocks |= pages - {NO_PAGE}
            self._failed.update([load.request_id] if lost else [])
            self._loaded.add(load.request_id)
            self._has_loaded.notify_all()

    def _load_blocks(self, load: Load) -> int:
        """Loads blocks into their pages, and returns how many of the first ones were loaded. The content of the other
        pages is undefined."""
        root = self._identity.root(load.tenant)
        no_path = TokenPath(self._shared.store.secret, root, _NO_TOKENS, self._identity.block_size)
        nodes = PromptNodes(no_path, self._layout)
        path: list[tuple[Node, View]] = []
        with open_views(self._shared.tiers) as views:
            for block in load.blocks:
                node = block.node(self._rank)
                view = next((view for view in views if view.has(node, block.token_ids)), None)
                if view is None:
                    log.info("[disk-cache] %s: a block was evicted before it was loaded", load.request_id)
                    break
                path.append((node, view))
            if not path:
                return 0
            sink = PageSink(self._pages, {block.position: block.pages for block in load.blocks})
            if (bad := Loader(nodes, path, 0, path[-1][0].end, {}, sink.fill).run(self._readers)) is not None:
                damaged, view, error = bad
                view.drop_damaged(damaged, error)
                path = [(node, view) for node, view in path if node.end <= damaged.position]
        if path:
            self._shared.writer.touch(path[-1][0].name, self._shared.store.clock())
        return len(path)

    def _save(self, save: BlocksToSave) -> None:
        writer, new = self._shared.writer, Save(self._shared.store.epochs.of(save.tenant))
        saving = self._saves.setdefault(save.request_id, new)
        if saving.has_failed or self._shared.store.problem is not None:
            return
        nodes, rooms = list[NewNode](), list[Hold]()
        for block, ttl_s in zip(save.blocks, save.ttls, strict=True):
            if (room := writer.reserve(self.block_bytes)) is None:
                break
            try:
                nodes.append(self._captured(block, ttl_s))
                rooms.append(room)
            except Exception:
                room.release()
                log.exception("[disk-cache] %s: the rest is not saved", save.request_id)
                break
        if nodes:
            entry = self._entry(save.tenant, save.scope, save.prompt, save.ttls[0])
            writer.queue_publication(saving, self._publication(save.tenant, saving, nodes, entry), rooms)
        is_dropped = len(nodes) < len(save.blocks) and saving.lost is None
        if is_dropped:
            writer.fail(saving, "the write buffer has no room for it")
        self._count(saved_blocks=len(nodes), saved_bytes=len(nodes) * self.block_bytes, dropped=int(is_dropped))

    def _captured(self, block: OrderedBlock, ttl_s: float | None) -> NewNode:
        payload = self._staging.take()
        self._pages.read(block.pages, payload)
        pieces = self._layout.pieces(self._identity.block_size, NodeKind.BLOCK)
        return NewNode(
            name=block.names[self._rank],
            parent=block.parents[self._rank],
            position=block.position,
            token_ids=as_token_ids(np.frombuffer(block.token_ids, "<i4")),
            kind=NodeKind.BLOCK,
            payload=split_payload(payload.data, pieces),
            pieces=pieces,
            ttl_s=ttl_s,
        )

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _end(self, ended: EndOfRequest) -> None:
        saving = self._saves.pop(ended.request_id, None)
        if saving is None:
            return
        if saving.has_failed or not ended.num_tokens:
            self._shared.writer.finish(saving)
            return
        part = self._entry(ended.tenant, ended.scope, ended.prompt, ended.ttl_s)
        entry = replace(part, kind="saved", num_tokens=ended.num_tokens, reason=ended.reason)
        publication = self._publication(ended.tenant, saving, (), entry)
        last = replace(publication, last_node=ended.names[self._rank], ttl_s=ended.ttl_s)
        self._shared.writer.queue_publication(saving, last, is_last=True)

    def _upload(self, planned: OrderedUpload) -> None:
        """Queues blocks for the bucket. What was saved of them is read from the write buffer or the disk."""
        store, tenant = self._shared.store, planned.tenant
        if self._shared.remote is None:
            return
        token_ids = as_token_ids(np.frombuffer(planned.token_ids, "<i4"))
        path = TokenPath(store.secret, self._identity.root(tenant), token_ids, self._identity.block_size)
        nodes, is_current = PromptNodes(path, self._layout), partial(store.is_current, store.epochs.of(tenant))
        record = self._identity.record(tenant)
        self._shared.remote.upload(Upload(nodes, len(token_ids), record, self._shared.tiers, is_current))

    def _entry(self, tenant: str, scope: str, prompt: PromptDigest, ttl_s: float | None) -> EntryRecord:
        """Returns the entry of a part of a prompt."""
        return EntryRecord(
            root=self._identity.root(tenant),
            num_tokens=0,
            scope=scope,
            preview="",
            created_at=self._shared.store.clock(),
            kind="partial",
            came_from=prompt,
            ttl_s=recorded_ttl(ttl_s),
        )

    def _publication(self, tenant: str, saving: Save, nodes: Sequence[NewNode], entry: EntryRecord) -> Publication:
        root, record = self._identity.root(tenant), self._identity.record(tenant)
        return Publication(epoch=saving.epoch, root=root, root_record=record, nodes=tuple(nodes), entry=entry)

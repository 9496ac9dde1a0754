"""The scheduler's side: finds the stored blocks of a prompt, and plans loads and saves."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from diskprefix.bridges.shared.step_orders import (
    NO_PAGE,
    BlocksToSave,
    EndOfRequest,
    Load,
    OrderedBlock,
    OrderedUpload,
    StepOrders,
)
from diskprefix.bridges.vllm.fetching import PromptFetch, PromptFetcher, fetched_names
from diskprefix.bridges.vllm.request_options import BadParameters, options_of
from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.choosing import refused_tokens, selection_of, sighting_of, ttl_at
from diskprefix.prefixstore.cache.namespaces import TenantNamespace, TenantNamespaces
from diskprefix.prefixstore.cache.policy.select import Rules
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.cache.tiers.tier import View, open_views
from diskprefix.prefixstore.recording import open_recorder
from diskprefix.prefixstore.shared_store import SharedStore
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import NodeKind, node_name
from diskprefix.prefixstore.store.statistics.savings import Tally
from diskprefix.prefixstore.store.store import Publication
from diskprefix.tokens import ID_BYTES, PromptDigest, TokenIds, TokenPath, as_token_ids
from diskprefix.values import (
    MAX_VALUE,
    SHARED,
    CacheOptions,
    CacheReport,
    Mark,
    Prompt,
    Selection,
    StateSource,
    Tenant,
)

log = logging.getLogger("diskprefix")


class EngineRequest(Protocol):
    """The fields of vLLM's request that the connector reads. `num_tokens` counts the known tokens of prompt and reply;
    `num_preemptions` counts how often the request lost its pages."""

    request_id: str
    prompt_token_ids: list[int] | None
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    num_preemptions: int

    @property
    def num_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Tracked(Struct):
    """A request that the cache serves.

    `names` has, for each rank, the root and the names of the full blocks. The first `num_stored` blocks are stored by
    all ranks, or are being saved. The first `num_matched` blocks can be loaded. `selection` says how much is kept.

    `num_preemptions` is the engine's value at the last lookup. `loading` is the range of tokens being loaded, and
    `num_restored` the number of tokens loaded. `num_saved` counts new blocks. `has_saves`: workers received blocks to
    save, which may fail. `is_broken`: a block is missing, so the blocks after it cannot be saved. `fetch` is the
    running fetch from the bucket, and `fetched` has the names of the blocks that it brought.
    """

    request: EngineRequest
    options: CacheOptions
    marks: tuple[Mark, ...]
    tenant: Tenant
    prompt: TokenIds
    names: list[list[bytes]]
    token_ids: bytes
    when: float
    num_matched: int = 0
    num_stored: int = 0
    num_restored: int = 0
    num_saved: int = 0
    has_saves: bool = False
    num_preemptions: int = -1
    loading: range = range(0)
    selection: Selection | None = None
    is_broken: bool = False
    fetch: PromptFetch | None = None
    fetched: frozenset[bytes] = frozenset()

    def num_loadable(self, block_size: int) -> int:
        """Returns the number of blocks to load, which leaves at least one token to compute."""
        return min(self.num_matched, (len(self.prompt) - 1) // block_size)

    def set_stored(self, num_blocks: int) -> None:
        """Corrects the number of stored blocks."""
        self.num_saved = max(0, self.num_saved - max(0, self.num_stored - num_blocks))
        self.num_stored = num_blocks


class SchedulerSide:
    """Matches prompts, and plans the workers' loads and saves. For the scheduler's thread only. It waits for the disk
    only to look up names."""

    def __init__(self, shared: SharedStore, ranks: Sequence[StateIdentity], engine_block_sizes: Sequence[int]) -> None:
        """`ranks` are the identities of the workers. `engine_block_sizes` has the number of tokens in an engine block,
        by group. Raises `CacheError`, and `SettingsError` if the recording cannot be written."""
        self._shared, self._ranks, self._engine_block_sizes = shared, tuple(ranks), tuple(engine_block_sizes)
        self._settings = shared.settings
        self._block_size = shared.settings.block_size
        self._rules = Rules.of(shared.settings, "sliceable")
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._ended: list[EndOfRequest] = []
        self._uploads: list[OrderedUpload] = []
        self._is_off = False
        self._fetcher = None if shared.remote is None else PromptFetcher(shared, shared.remote, self._ranks)
        self._recorder = open_recorder(shared.settings, lambda: shared.store.secret)
        layouts = (PayloadLayout.parse(rank.layout) for rank in ranks)
        block_bytes = sum(layout.payload_bytes(self._block_size, NodeKind.BLOCK) for layout in layouts)
        self._bytes_per_token = block_bytes // self._block_size
        if self._recorder is not None:
            self._recorder.describe(
                bytes_per_token=self._bytes_per_token, state_bytes=0, logits_bytes=0, exact_at="grid"
            )
        self._namespaces = TenantNamespaces(
            shared.store,
            lambda tenant: ranks[0].record(str(tenant)),
            None if self._recorder is None else self._recorder.know,
        )
        self._counts: Counter[str] = Counter()
        self._differs = ranks[0].differences(shared.store)
        if self._differs is not None:
            log.warning(
                "[disk-cache] stored prefixes of %s are not used: they differ in %s", ranks[0].model, self._differs
            )

    def add(self, request: EngineRequest, *, not_cached: str | None) -> None:
        """Adds a new request. `not_cached` is the reason why the cache cannot serve it, or None."""
        self._counts["requests"] += 1
        if not_cached is None and not request.prompt_token_ids:
            not_cached = "no_tokens"
        try:
            options, marks = options_of(request.kv_transfer_params, self._settings)
        except BadParameters as error:
            log.warning("[disk-cache] %s: served without the cache: %s", request.request_id, error)
            not_cached = "bad_parameters"
        if self._is_off:
            not_cached = "reset"
        if not_cached is not None:
            self._counts[f"miss_{not_cached}"] += 1
            return
        tenant = SHARED.with_salt(request.cache_salt) if request.cache_salt else SHARED
        self._namespaces.forget_deleted()
        prompt = as_token_ids(request.prompt_token_ids or [])
        roots = [rank.root(str(tenant)) for rank in self._ranks]
        tracked = self._requests[request.request_id] = Tracked(
            request, options, marks, tenant, prompt, [[root] for root in roots], b"", self._shared.store.clock()
        )
        if self._fetcher is not None and options.scope.kind != "off":
            whole = prompt[: (len(prompt) - 1) // self._block_size * self._block_size]
            tracked.fetch = self._fetcher.start(whole, str(tenant), options.ttl_s)

    def match(self, request_id: str, num_computed: int) -> int | None:
        """Returns the number of tokens after the first `num_computed` that can be loaded, leaving at least one to
        compute. Returns None while blocks are fetched from the bucket."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.options.scope.kind == "off":
            return 0
        if tracked.fetch is not None and not self._end_fetch(tracked, tracked.fetch):
            return None
        try:
            if tracked.num_preemptions != tracked.request.num_preemptions:
                self._look_up(tracked)
            elif tracked.loading:
                # The engine asks again: it kept no token of the load.
                self._end_load(tracked, num_computed, restored=0)
        except CacheError as error:
            log.warning("[disk-cache] %s: served without the cache: %s", request_id, error)
            self._counts["miss_store"] += 1
            del self._requests[request_id]
            self._plan_end(tracked)
            return 0
        return max(0, tracked.num_loadable(self._block_size) * self._block_size - num_computed)

    def plan_load(self, request_id: str, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """Plans the load of `num_external` tokens. `blocks` has the engine's blocks for them, by group."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        stop = tracked.num_loadable(self._block_size)
        num_computed = stop * self._block_size - num_external
        indices = range(num_computed // self._block_size, stop)
        planned = tuple(self._plan_block(tracked, index, blocks, first=num_computed) for index in indices)
        tracked.loading = range(num_computed, num_computed + num_external)
        self._loads.append(Load(request_id, str(tracked.tenant), planned))

    def plan(self, scheduled: Sequence[tuple[str, int, Sequence[Sequence[int]]]]) -> StepOrders:
        """Returns the workers' plan for a step. `scheduled` has for each request its id, the number of computed tokens
        after the step, and the engine's blocks by group."""
        saves = []
        for request_id, num_computed, blocks in scheduled:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            if tracked.loading:
                start = tracked.request.num_computed_tokens
                self._end_load(tracked, start, restored=len(tracked.loading[: max(0, start - tracked.loading.start)]))
            if (save := self._plan_save(tracked, num_computed, blocks)) is not None:
                saves.append(save)
        loads, self._loads = self._loads, []
        ended, self._ended = self._ended, []
        uploads, self._uploads = self._uploads, []
        return StepOrders(tuple(loads), tuple(saves), tuple(ended), tuple(uploads))

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """Ends a request. Returns the `kv_transfer_params` of its response."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return None
        self._stop_fetch(tracked)
        if tracked.selection is None:
            return None
        selection = tracked.selection
        self._record(tracked, selection)
        self._tally(tracked)
        self._plan_end(tracked)
        self._plan_upload(tracked, selection)
        if tracked.request.kv_transfer_params is None:
            return None
        return {
            "prefix_cache": {
                "restored": tracked.num_restored,
                "source": self._source(tracked),
                "saved": tracked.num_saved * self._block_size,
                "reason": selection.reason,
            }
        }

    def take_counts(self) -> Counter[str]:
        """Returns the counts since the last call, by the names in `stats`."""
        counts, self._counts = self._counts, Counter()
        return counts

    def wait_for_fetch(self, timeout_s: float) -> None:
        """Waits until a fetch from the bucket ends; at once if none is running."""
        if self._fetcher is not None:
            self._fetcher.wait(timeout_s)

    def switch_off(self) -> None:
        """Neither restores nor saves anything from now on: the engine's weights may be others than those that its
        identity names."""
        if not self._is_off:
            log.warning(
                "[disk-cache] vLLM reset its caches, as before a change of weights: requests are served without the "
                "cache until vLLM is started again"
            )
        self._is_off = True
        for tracked in self._requests.values():
            self._stop_fetch(tracked)
            self._plan_end(tracked)
        self._requests.clear()

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        if self._recorder is not None:
            self._recorder.close()

    def _record(self, tracked: Tracked, selection: Selection) -> None:
        if self._recorder is None:
            return
        restored = tracked.num_restored
        report = CacheReport(
            selection=selection,
            restored=restored,
            source=self._source(tracked),
            miss_reason=None if restored else "not_stored",
            matched=tracked.num_matched * self._block_size,
        )
        self._recorder.record_request(
            Prompt(tracked.prompt, marks=tracked.marks),
            tracked.options,
            report,
            root=self._ranks[0].root(str(tracked.tenant)),
            when=tracked.when,
            reply=tracked.prompt[:0],
            prefill_ms=0.0,
            remembered=True,
        )

    def _plan_end(self, tracked: Tracked) -> None:
        """Plans the end of a request: the workers forget it, and list its new blocks as a saved prompt."""
        selection, options = tracked.selection, tracked.options
        if not tracked.has_saves or selection is None:
            return
        num_blocks = tracked.num_stored if tracked.num_saved else 0
        position = num_blocks * self._block_size
        ttl_s = ttl_at(position, tracked.marks, options.ttl_s)
        names = tuple(names[num_blocks] for names in tracked.names)
        request_id, tenant, scope = tracked.request.request_id, str(tracked.tenant), str(options.scope)
        ended = EndOfRequest(
            request_id, tenant, names, position, scope, selection.reason, ttl_s, self._digest_of(tracked)
        )
        self._ended.append(ended)

    def _digest_of(self, tracked: Tracked) -> PromptDigest:
        return PromptDigest.of(self._shared.store.secret, tracked.prompt)

    def _plan_upload(self, tracked: Tracked, selection: Selection) -> None:
        """Plans what to write to the bucket, by `remote_write`."""
        if self._fetcher is None or not tracked.options.save:
            return
        size, num_matched = self._block_size, tracked.num_matched * self._block_size
        num_tokens = selection.shared(self._settings.remote_write, tracked.num_stored * size, num_matched)
        if token_ids := tracked.token_ids[: ID_BYTES * (num_tokens // size * size)]:
            self._uploads.append(OrderedUpload(str(tracked.tenant), token_ids))

    def _source(self, tracked: Tracked) -> StateSource:
        """Returns where the restored tokens came from: the bucket, if any of their blocks did."""
        if not tracked.num_restored:
            return "none"
        restored = tracked.names[0][1 : 1 + tracked.num_restored // self._block_size]
        return "disk" if tracked.fetched.isdisjoint(restored) else "remote"

    def _end_fetch(self, tracked: Tracked, fetch: PromptFetch) -> bool:
        """Takes the result of a fetch. Returns False if it must be waited for."""
        assert self._fetcher is not None, "it has started the fetch"
        if not self._fetcher.has_ended(fetch):
            return False
        tracked.fetch = None
        is_done = fetch.running.done() and not fetch.running.cancelled()
        results = fetch.running.result() if is_done else []
        tracked.fetched = fetched_names(results)
        self._counts["fetched_bytes"] += sum(result.num_bytes for result in results)
        self._counts["fetches_cut"] += int(not is_done or not all(result.is_whole for result in results))
        return True

    def _stop_fetch(self, tracked: Tracked) -> None:
        if self._fetcher is not None and tracked.fetch is not None:
            self._fetcher.give_up(tracked.fetch)
            tracked.fetch = None

    def _look_up(self, tracked: Tracked) -> None:
        """Finds the stored blocks of a prompt and, the first time, chooses how much of it to keep."""
        self._extend(tracked, len(tracked.prompt))
        with open_views(self._shared.tiers) as views:
            num_stored = self._num_stored(views, tracked)
        tracked.set_stored(num_stored)
        tracked.num_matched = min(num_stored, len(tracked.prompt) // self._block_size)
        tracked.num_preemptions, tracked.loading = tracked.request.num_preemptions, range(0)
        if tracked.selection is None:
            tracked.selection = self._select(tracked)
            reason = "not_stored" if self._differs is None else "other_numbers"
            self._counts["hits" if tracked.num_matched else f"miss_{reason}"] += 1

    def _end_load(self, tracked: Tracked, start: int, *, restored: int) -> None:
        """Ends a load: the engine continues at token `start` after `restored` tokens were loaded. Tokens whose load
        failed are computed and saved, and are not matched again."""
        if start < tracked.loading.stop:
            num_blocks = start // self._block_size
            tracked.num_matched = min(tracked.num_matched, num_blocks)
            tracked.set_stored(min(tracked.num_stored, num_blocks))
        tracked.loading = range(0)
        tracked.num_restored = max(tracked.num_restored, restored)
        self._counts["restored_tokens"] += restored

    def _num_stored(self, views: Sequence[View], tracked: Tracked) -> int:
        """Returns the number of leading blocks that all ranks have stored."""
        num_blocks, size = len(tracked.names[0]) - 1, self._block_size
        for names in tracked.names:
            for index in range(num_blocks):
                node = Node(names[index + 1], names[index], index * size, size, NodeKind.BLOCK)
                if not any(view.has(node, self._block_tokens(tracked, index)) for view in views):
                    num_blocks = index
                    break
        return num_blocks

    def _select(self, tracked: Tracked) -> Selection:
        """Returns the policy's choice of how much to keep, and remembers the prompt as seen."""
        options, prompt = tracked.options, Prompt(tracked.prompt, marks=tracked.marks)
        namespace = self._namespaces.get(tracked.tenant)
        self._namespaces.read_seen(namespace)
        names = tracked.names[0][1:]
        restored = tracked.num_matched * self._block_size
        evictor = self._shared.store.evictor
        sighting = sighting_of(namespace.seen, prompt, options, names, evictor.stays_s)
        selection = selection_of(sighting, self._rules, prompt, options, restored)
        evictor.refuse(refused_tokens(sighting, selection, restored) * self._bytes_per_token)
        if options.save and len(prompt.token_ids) >= self._settings.kv_cache_min_tokens:
            self._remember(tracked, namespace, names)
        return selection

    def _remember(self, tracked: Tracked, namespace: TenantNamespace, names: Sequence[bytes]) -> None:
        namespace.remember(tracked.prompt, b"", names, self._shared.store.clock(), math.inf)
        epoch = self._shared.store.epochs.of(namespace.record.tenant)
        publication = Publication(
            epoch=epoch,
            root=namespace.root,
            root_record=namespace.record,
            nodes=(),
            prompt=TokenPath(epoch.secret, namespace.root, tracked.prompt, self._block_size),
        )
        self._shared.writer.queue_publication(Save(epoch), publication, is_last=True)

    def _tally(self, tracked: Tracked) -> None:
        num_tokens = tracked.num_restored
        namespace = self._namespaces.get(tracked.tenant)
        tally = Tally(requests=1, prompt_tokens=len(tracked.prompt), restored_tokens=num_tokens)
        epoch = self._shared.store.epochs.of(namespace.record.tenant)
        self._shared.savings.record_request(epoch, namespace.root, namespace.record, tally)

    def _plan_save(self, tracked: Tracked, num_computed: int, blocks: Sequence[Sequence[int]]) -> BlocksToSave | None:
        """Returns the blocks to save: wanted, not stored, and complete when `num_computed` tokens are computed. Draft
        tokens do not count."""
        num_known = min(num_computed, tracked.request.num_tokens)
        num_blocks = min(num_known, self._num_wanted(tracked)) // self._block_size
        if tracked.is_broken or num_blocks <= tracked.num_stored:
            return None
        self._extend(tracked, num_blocks * self._block_size)
        planned: list[OrderedBlock] = []
        for index in range(tracked.num_stored, num_blocks):
            block = self._plan_block(tracked, index, blocks)
            if any(NO_PAGE in pages for pages in block.pages):
                # A window has moved past this block, and blocks after it need it.
                tracked.is_broken = True
                break
            planned.append(block)
        if not planned:
            return None
        self._differs = None
        tracked.num_stored += len(planned)
        tracked.num_saved += len(planned)
        tracked.has_saves = True
        stops = (block.position + self._block_size for block in planned)
        ttls = tuple(ttl_at(position, tracked.marks, tracked.options.ttl_s) for position in stops)
        scope, prompt = str(tracked.options.scope), self._digest_of(tracked)
        return BlocksToSave(tracked.request.request_id, str(tracked.tenant), tuple(planned), ttls, scope, prompt)

    def _num_wanted(self, tracked: Tracked) -> int:
        """Returns the number of tokens of the request that the policy keeps."""
        selection = tracked.selection
        if selection is None:
            return 0
        if not selection.saves_reply:
            return selection.aligned
        most = selection.scope.most
        return MAX_VALUE * self._block_size if most is None else most

    def _plan_block(
        self, tracked: Tracked, index: int, blocks: Sequence[Sequence[int]], first: int = 0
    ) -> OrderedBlock:
        """Returns a block and its pages, without the pages of tokens before `first`."""
        start = index * self._block_size
        pages = []
        for table, size in zip(blocks, self._engine_block_sizes, strict=True):
            numbers = range(start // size, (start + self._block_size) // size)
            pages.append(tuple(table[n] if n < len(table) and n * size >= first else NO_PAGE for n in numbers))
        parents, names = zip(*(names[index : index + 2] for names in tracked.names), strict=True)
        return OrderedBlock(names, parents, start, self._block_tokens(tracked, index), tuple(pages))

    def _extend(self, tracked: Tracked, num_tokens: int) -> None:
        """Adds the names of the full blocks in the first `num_tokens` tokens."""
        num_named, num_blocks = len(tracked.names[0]) - 1, num_tokens // self._block_size
        ids = tracked.request.all_token_ids[num_named * self._block_size : num_blocks * self._block_size]
        tracked.token_ids += np.asarray(ids, dtype="<i4").tobytes()
        for index in range(num_named, num_blocks):
            for names in tracked.names:
                token_ids = self._block_tokens(tracked, index)
                names.append(node_name(self._shared.store.secret, names[-1], token_ids, NodeKind.BLOCK))

    def _block_tokens(self, tracked: Tracked, index: int) -> bytes:
        """Returns the token ids of a block, int32, little-endian."""
        size = 4 * self._block_size
        return tracked.token_ids[index * size : (index + 1) * size]

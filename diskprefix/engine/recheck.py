"""Computes a few stored blocks again after an upgrade, while nobody waits.

A build has the same root as one before it if tiny models give the same bits with both (`model.bits`). What these do not
reach shows here: if a block differs from what is stored, nothing of the earlier build is used any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any, NamedTuple

import numpy as np

from diskprefix.cache.context import RequestContext
from diskprefix.cache.fetch import Fetch
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import CacheError
from diskprefix.kv.pages import Page
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.runtime import Rows
from diskprefix.printable import first_line
from diskprefix.store.tree import PrefixTree
from diskprefix.tokens import TokenIds, TokenPath, floor_to_grid
from diskprefix.units import counted
from diskprefix.values import CacheOptions, Prompt, Scope, Tenant

log = logging.getLogger("diskprefix")

_PROMPTS, _MAX_TOKENS, _MAX_COMPUTED = 3, 4096, 1024
"""The saved prompts that are looked at, the tokens of each that are restored, and those that are computed."""
_ROWS = 32
"""The rows of a step, for which a new request waits."""


class _PromptToCheck(NamedTuple):
    """The beginning of a saved prompt."""

    tenant: Tenant
    token_ids: TokenIds


class Recheck:
    """The work of one process, on the engine's thread. `wake` is called, on any thread, when `work` can go on."""

    def __init__(self, served: ServedModel, wake: Callable[[], None]) -> None:
        self._served, self._cache, self._wake = served, served.cache, wake
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="recheck")
        """Reads and writes the store."""
        self._reading: Future[Any] | None = None
        self._steps: Generator[Future[Any] | None] | None = None
        self._left: list[_PromptToCheck] | None = None
        """The prompts that were not computed again."""
        self._num_equal = 0

    def work(self) -> bool:
        """Computes some tokens. Returns False if there is nothing to do, or if it waits for the disk."""
        if not self._cache.must_recheck or (self._reading is not None and not self._reading.done()):
            return False
        self._steps = self._steps or self._check()
        try:
            self._reading = next(self._steps, None)
        except Exception as error:  # noqa: BLE001 (what fails here fails no request)
            raise_if_lost(error)
            log.info("[disk-cache] what an earlier version has stored is not computed again: %s", first_line(error))
            self._cache.must_recheck = False
        return self._cache.must_recheck

    def stop(self) -> None:
        """Gives all memory back, because a request has come. The prompt begins again later."""
        if self._steps is not None:
            self._steps.close()
            self._steps = self._reading = None

    def close(self) -> None:
        self.stop()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, read: Callable[[], Any]) -> Future[Any]:
        reading = self._reader.submit(read)
        reading.add_done_callback(lambda _: self._wake())
        return reading

    def _check(self) -> Generator[Future[Any] | None]:
        """Yields what it waits for, or None after a step of the model."""
        if self._left is None:
            yield (found := self._read(self._chosen))
            self._left = found.result()
        while self._left:
            is_equal = yield from self._is_equal(self._left[-1])
            self._left.pop()
            if is_equal is False:
                log.warning("[disk-cache] this version computes other bits than what is stored, which is dropped")
                yield (done := self._read(self._cache.drop_outdated))
                break
            self._num_equal += is_equal is True
        else:
            yield (done := self._read(self._cache.note_build))
            found_equal = counted(self._num_equal, "stored prompt")
            log.info("[disk-cache] this version computes the bits of an earlier one: %s looked at", found_equal)
        done.result()
        self._cache.must_recheck = False

    def _chosen(self) -> list[_PromptToCheck]:
        """Returns saved prompts of the model, of any tenant. On the reader's thread."""
        chosen: list[_PromptToCheck] = []
        with self._cache.store.snapshot() as snapshot:
            tree = PrefixTree(snapshot)
            own = dict[bytes, Tenant]()
            for root, record in snapshot.roots():
                with suppress(ValueError):
                    if self._cache.owner(tenant := Tenant.parse(record.tenant)).root == root:
                        own[root] = tenant
            entries = [(name, entry.root) for name, entry in snapshot.entries() if entry.root in own]
            for name, root in entries[:: -(-len(entries) // _PROMPTS) or 1]:
                with suppress(CacheError):
                    ids = np.concatenate([node.token_ids for node in tree.path(name).values()])
                    pictures = np.flatnonzero(ids < 0)
                    chosen.append(_PromptToCheck(own[root], ids[: min([_MAX_TOKENS, *pictures[:1].tolist()])]))
        return chosen

    def _is_equal(self, stored: _PromptToCheck) -> Generator[Future[Any] | None, None, bool | None]:
        """Returns whether the last tokens of a prompt have the state that is stored; None if they cannot be computed
        from what is stored before them."""
        with self._restoring(stored.tenant, stored.token_ids) as whole:
            yield whole.reading
            end, size = whole.num_restored(), self._cache.settings.block_size
            before = stored.token_ids[: max(1, floor_to_grid(end - 1, size))]
            with self._restoring(stored.tenant, before) as again:
                yield again.reading
                start, sequence = again.num_restored(), again.sequence
                if not 0 < end - start <= _MAX_COMPUTED:
                    return None
                while sequence.num_tokens < end:
                    self._compute(
                        sequence, stored.token_ids[sequence.num_tokens : min(end, sequence.num_tokens + _ROWS)]
                    )
                    yield None
                sequence.settle()
                return _has_state_of(sequence, whole.sequence, start, end)

    def _compute(self, sequence: KVSequence, token_ids: TokenIds) -> None:
        self._served.runtime.run([Rows(sequence, token_ids.astype(np.int64))])

    @contextmanager
    def _restoring(self, tenant: Tenant, token_ids: TokenIds) -> Iterator[_Restoring]:
        """Gives a context with a sequence into which the stored state of a prompt is read."""
        pages, is_over = self._served.pages, Event()
        sequence = pages.begin(None, token_ids)
        if not isinstance(sequence, KVSequence):
            raise CacheError("there is no memory for it")
        options = CacheOptions(scope=Scope("full"), tenant=tenant, save=False)
        context = RequestContext(self._cache, self._cache.namespaces.get(tenant), Prompt(token_ids), options, True)
        path = TokenPath(self._cache.store.secret, context.namespace.root, token_ids, self._cache.settings.block_size)
        nodes = PromptNodes(path, self._cache.payload_layout)
        fetch = Fetch(
            *(context, nodes, sequence, 0, None),
            on_logits=lambda _: None,
            on_block=lambda _: None,
            is_wanted=lambda: not is_over.is_set(),
        )

        def end(_: Future[Any]) -> None:
            fetch.close()
            pages.end(sequence, keep=False)

        reading = self._read(fetch.run)
        try:
            yield _Restoring(sequence, fetch, reading)
        finally:
            is_over.set()
            # The thread writes to the pages until it has returned.
            reading.add_done_callback(end)


class _Restoring(NamedTuple):
    sequence: KVSequence
    fetch: Fetch
    reading: Future[Any]

    def num_restored(self) -> int:
        """Returns the number of tokens that were restored, once they are."""
        self.reading.result()
        self.sequence.truncate(self.fetch.restored.num_tokens)
        return self.sequence.num_tokens


def _has_state_of(sequence: KVSequence, other: KVSequence, start: int, end: int) -> bool:
    """Returns whether two sequences have the same bits for the tokens from `start` to `end`, as far as windows need
    them, and the same states."""
    size, pairs = sequence.pool.block_size, list[tuple[Page, Page, slice]]()
    for number, table in enumerate(sequence.tables):
        first = max(start, table.group.first_needed(end))
        for block in range(first // size, -(-end // size)):
            one, same = (found.tables[number].pages[block] for found in (sequence, other))
            if one is not None and same is not None:
                width = one.num_bytes // one.num_rows // size
                of_block = slice(max(first - block * size, 0) * width, min(end - block * size, size) * width)
                pairs.append((one, same, of_block))
    pairs += [(one, same, slice(None)) for one, same in zip(sequence.states, other.states, strict=True)]
    return all(np.array_equal(one.rows[:, part], same.rows[:, part]) for one, same, part in pairs)

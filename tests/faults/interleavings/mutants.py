"""The protections of the engine's interleavings, each of which can be taken away once: then a history must be wrong."""

from __future__ import annotations

import math
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from diskprefix.daemon.engine.active_requests import ActiveRequests
from diskprefix.daemon.engine.fetches import Fetches, ReadJob
from diskprefix.daemon.engine.idle.recheck import Recheck
from diskprefix.daemon.engine.inbox import Ticket
from diskprefix.daemon.engine.loop import Loop
from diskprefix.errors import ContextTooLong, NotReady
from diskprefix.prefixstore.cache import namespaces
from diskprefix.prefixstore.cache.build_bits import BuildBits, build_digest
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.matching import Matcher
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.page_table import PageTable
from diskprefix.prefixstore.kv.pages import Captured, Page, PagePool
from diskprefix.prefixstore.kv.sequence import Owner
from diskprefix.prefixstore.store import folder, notes, reads, writer
from diskprefix.prefixstore.store.epochs import EVERYONE, Purges
from diskprefix.prefixstore.store.evictor import Evictor
from diskprefix.prefixstore.store.folder import FileMark, FolderLock
from diskprefix.prefixstore.store.housekeeping import Housekeeping
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.purge import PurgeFilter
from diskprefix.prefixstore.store.reads import Patience, Reads
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.store_file import StoreFile
from diskprefix.prefixstore.store.write_counter import WriteMeter, WrittenBytes
from diskprefix.prefixstore.store.write_lock import WriteLock
from diskprefix.prefixstore.store.writer import Room, Writer, WriterLimits
from diskprefix.thread_pool import ThreadPool
from diskprefix.tokens import root_hash
from tests.faults.interleavings import world

_owner: Any = PrefixCache.owner
_owner_of: Any = PrefixCache.owner_of
_forget_expired: Any = PageCache.forget_expired
_drop: Any = Matcher.drop_node
_make_fetches: Any = Fetches.__init__
_make: Any = Loop.__init__
_hold: Any = Captured.__init__
_add_to, _report, _lacking = WriteMeter.add_to, Housekeeping._report, PagePool.lacking
_take_shared, _written_lately = FolderLock._take_shared, Store.written_lately


def _same_as_all(self: BuildBits, _builds: frozenset[bytes]) -> bool:
    self.note_same(frozenset(map(build_digest, world.BUILDS)))
    return False


def _check_without_holds(self: Fetches) -> float | None:
    return 1.0 if self._open or self._cache.store.write_s else None


def _ended_unheard(self: Fetches, one: ReadJob) -> None:
    one.is_over = True
    self._ended.append(one)


def _reserved(self: Writer, num_bytes: int) -> Room:
    self._reserved_bytes += num_bytes
    return Room(self, num_bytes)


def _add_twice(self: WriteMeter, written: WrittenBytes, now: float, recorded_bytes: int) -> WrittenBytes:
    written.recorder = ""
    return _add_to(self, written, now, recorded_bytes)


def _made_unheard(self: Loop, served: Any, inbox: Any) -> None:
    _make(self, served, inbox)
    served.pages.pool.on_free = lambda: None


def _held_for_a_moment(self: Captured, pool: PagePool, pages: Mapping[int, Page], *content: Any) -> None:
    _hold(self, pool, pages, *content)
    self.release()


def _unmarked(self: FolderLock, *, is_refused: bool = False) -> None:  # noqa: ARG001 (as the real one)
    if self._fd is not None:
        folder._write_mark(self._fd, FileMark())
    self._close()


def _read_lately(self: Store) -> WrittenBytes:
    with self.snapshot():
        return _written_lately(self)


def _taken_impatiently(self: FolderLock) -> None:
    self._on_wait = None
    _take_shared(self)


def _told_as_too_long(self: PagePool, num_tokens: int) -> ContextTooLong | NotReady:
    self._is_refused = False
    return _lacking(self, num_tokens)


def _tried_once(self: Writer, save: Save, publication: Publication) -> bool:
    if self.housekeeping.attempt(partial(self._write_publication, save, publication)) is not None:
        self.fail(save, keep=0)
    return True


_pause_writing = Writer.pause_writing


def _paused_for_long(self: Writer) -> None:
    self.limits = WriterLimits(pause_s=60.0, max_held_s=60.0)
    _pause_writing(self)


def _full_unsaid(self: Housekeeping, message: str, *, is_for_room: bool = False, saves_some: bool = False) -> None:
    if " is full: " in message:
        self.error = None
    else:
        _report(self, message, is_for_room=is_for_room, saves_some=saves_some)


def _one_thread(self: Fetches, *args: Any) -> None:
    _make_fetches(self, *args)
    self._pools = dict.fromkeys(self._pools, ThreadPool(1, "pool").start())


def _waited_for(self: Fetches) -> None:
    for one in self._open:
        one.is_given_up = True
    for pool in self._pools.values():
        pool.shutdown()


def _in_any_epoch(self: Notes, key: bytes) -> tuple[bool, bytes | None]:
    if key in self._waiting:
        return True, self._waiting[key].value
    _, value = self._recent.get(key) or (None, None)
    return value is not None, value


def _equal_unseen(_self: Recheck, _stored: object) -> Generator[None, None, bool]:
    yield None
    return True


def _dropped_of_own_prompt(self: Matcher[Any], node: Node) -> None:
    if node.kind != NodeKind.TAIL or node is self.tail:
        _drop(self, node)


class Mutant(NamedTuple):
    """What is replaced, and what a history must say that finds it: other failures prove nothing."""

    shows: str
    patches: tuple[tuple[object, str, Any], ...]


NEVER_OVER = SimpleNamespace(is_over=lambda _epoch: False)
_WRONG_REPLY, _FOUND, _LEFT = " got [", "could be there for", "left behind: "

MUTANTS: dict[str, Mutant] = {
    "the tenant in the names of blocks": Mutant(
        _WRONG_REPLY, ((namespaces, "root_hash", lambda identity: root_hash(identity[:5])),)
    ),
    "the tenant of memory": Mutant(
        _WRONG_REPLY,
        (
            (PrefixCache, "owner_of", lambda self, _options, _private, _began: Owner(b"", self._secret)),
            (PrefixCache, "is_gone", lambda _self, _owner: False),
        ),
    ),
    "the purge of memory": Mutant(
        _FOUND,
        (
            (PrefixCache, "owner", lambda self, tenant: _owner(self, tenant)._replace(last_purge=b"")),
            (PrefixCache, "owner_of", lambda self, *given: _owner_of(self, *given)._replace(last_purge=b"")),
            (PrefixCache, "is_gone", lambda _self, _owner: False),
            (PageCache, "forget_expired", lambda self, _purges: _forget_expired(self, Purges())),
        ),
    ),
    "the copy of a page that others use": Mutant(
        _WRONG_REPLY,
        ((PageTable, "unwritable", lambda self, first, stop: [n for n in range(first, stop) if n >= len(self.pages)]),),
    ),
    "the hold of pages that wait to be written": Mutant(_WRONG_REPLY, ((Captured, "__init__", _held_for_a_moment),)),
    "the users that names are": Mutant(" users, not ", ((PagePool, "hold", lambda _self, _pages: None),)),
    "the wake where pages are free": Mutant("pages that are free", ((Loop, "__init__", _made_unheard),)),
    "the time to live of memory": Mutant(_FOUND, ((PrefixCache, "lasts_s", lambda _self, _ttl_s: math.inf),)),
    "the search for what has expired": Mutant(
        "what has expired is stored", ((Evictor, "expire", lambda _self, _ttl_s: 0),)
    ),
    "the wake behind a fetch": Mutant(
        "never ends", ((Fetches, "_end_read", _ended_unheard), (Fetches, "check_in_s", property(lambda _self: None)))
    ),
    "the room that is given back": Mutant(_LEFT + "{'reserved bytes'", ((Room, "release", lambda _self: None),)),
    "the bound of the write buffer": Mutant("write buffer are reserved", ((Writer, "reserve", _reserved),)),
    "the end of a save": Mutant(_LEFT + "{'saves'", ((Writer, "finish", lambda _self, _save: None),)),
    "the end of a pin": Mutant(_LEFT + "{'pins'", ((Evictor, "unpin", lambda _self, _name: None),)),
    "the tenants of a purge": Mutant(
        "because another one was purged", ((PurgeFilter, "purged", lambda _self, _plan: EVERYONE),)
    ),
    "the epoch of a prompt": Mutant(
        _FOUND,
        (
            (Store, "_require_epoch", lambda _self, _snapshot, _publication: None),
            (Writer, "_left_of", lambda _self, save: save.waiting[0]),
            (Writer, "_drop_outdated", lambda _self, _save, _why: None),
        ),
    ),
    "the epoch of what waits to be written": Mutant(
        _FOUND, ((Writer, "_drop_outdated", lambda _self, _save, _why: None),)
    ),
    "the word that memory is refused": Mutant(" failed: ContextTooLong", ((PagePool, "lacking", _told_as_too_long),)),
    "the epoch of a note": Mutant(
        "is found, and was purged",
        ((notes, "epochs_of", lambda _snapshot, _names: NEVER_OVER), (Notes, "drop_outdated", lambda _self: None)),
    ),
    "the mark of others": Mutant("the mark is gone", ((FolderLock, "close", _unmarked),)),
    "the share of all notes": Mutant("notes take", ((notes, "total_limit", lambda _budget_bytes: 1 << 60),)),
    "the second attempt in a new file": Mutant(
        "because the file was rewritten",
        ((Writer, "_publish_alone", _tried_once), (writer, "StoreReplaced", ZeroDivisionError)),
    ),
    "the word of a full disk": Mutant("on the full disk, and health says", ((Housekeeping, "_report", _full_unsaid),)),
    "the look at the free space": Mutant(
        "health says degraded, and prompts are saved", ((Housekeeping, "check_room", lambda _self: None),)
    ),
    "the end of a pause": Mutant("the writer pauses for nobody", ((Writer, "pause_writing", _paused_for_long),)),
    "the threads of each kind of step": Mutant(
        "what needs no read waits", ((Fetches, "__init__", _one_thread), (reads, "STALL_S", 60.0))
    ),
    "the place of a share with nothing running": Mutant(
        "what needs no read waits", ((ActiveRequests, "_may_exceed", lambda *_: False),)
    ),
    "the stop beside a load that hangs": Mutant("the daemon does not stop", ((Fetches, "close", _waited_for),)),
    "the write budget": Mutant("with no budget", ((PrefixCache, "spending", lambda _self, _share="": None),)),
    "the count of written bytes in memory": Mutant(
        "the thread engine reads the disk", ((Store, "written_lately", _read_lately),)
    ),
    "the mark that needs no check": Mutant(
        "a start checks a file that needs none", ((FileMark, "needs_check", lambda _self, _file: True),)
    ),
    "the wait for who checks the file": Mutant(
        "the daemon does not start", ((FolderLock, "_take_shared", _taken_impatiently),)
    ),
    "the name of who recorded written bytes": Mutant("are recorded as written", ((WriteMeter, "add_to", _add_twice),)),
    "the thread that reads for others": Mutant(
        "reads the disk", ((Reads, "ask", lambda _self, read, _patience=None: read()),)
    ),
    "the epoch of the turns in memory": Mutant(
        "could be there for nobody",
        ((Notes, "_in_memory", _in_any_epoch), (Notes, "drop_outdated", lambda _self: None)),
    ),
    "the patience of a request": Mutant(
        "a request waits for a disk that does not answer", ((Patience, "left_s", property(lambda _self: 1e9)),)
    ),
    "the verdict on a disk": Mutant("the counts wait for the disk", ((Reads, "stalled", None),)),
    "the drop of a damaged node of another prompt": Mutant(
        " failed: ", ((Matcher, "drop_node", _dropped_of_own_prompt),)
    ),
    "the end of giving way": Mutant(
        "a stranger's whole reply", ((ActiveRequests, "_bring_forward", lambda _self, _waiter, _wait=None: None),)
    ),
    "the end of idle work for a question": Mutant(
        "waits for idle work", ((PageCache, "abandon", lambda _self, _sequence: None),)
    ),
    "the word of a suspended writer": Mutant("suspended writer, and health says ok", ((WriteLock, "stalled", None),)),
    "the stop beside a suspended writer": Mutant("a stop takes", ((StoreFile, "write_waited_s", 0.0),)),
    "the comparison with what another build has stored": Mutant(_WRONG_REPLY, ((Recheck, "_is_equal", _equal_unseen),)),
    "the root of a build with other bits": Mutant(_WRONG_REPLY, ((BuildBits, "note_other", _same_as_all),)),
    "the look at pages that the writer holds": Mutant(
        "a request waits for a disk that does not answer",
        ((Fetches, "check_in_s", property(_check_without_holds)),),
    ),
    "the one end of a request": Mutant(
        "behind its end", ((Ticket, "send_last", lambda self, event: self.emit(event)),)
    ),
    "the build of a node": Mutant(_WRONG_REPLY, ((BuildBits, "accepts", lambda _self, _build: True),)),
    "the pages of a thread that may still write": Mutant(
        _WRONG_REPLY, ((ReadJob, "may_write", property(lambda _self: False)),)
    ),
}


bad: list[str] = []
"""The errors of the mutant itself, which say nothing of the protection."""


def _watched(value: Any) -> Any:
    """Returns what takes the place of a protection, and notes in `bad` if it is wrong itself."""
    if not isinstance(value, FunctionType):
        return value

    @wraps(value)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return value(*args, **kwargs)
        except (TypeError, AttributeError):
            bad.append(traceback.format_exc())
            raise

    return watched


@contextmanager
def without_protection(name: str) -> Iterator[None]:
    """Takes a protection away."""
    bad.clear()
    patches = [patch.object(holder, attribute, _watched(value)) for holder, attribute, value in MUTANTS[name].patches]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()

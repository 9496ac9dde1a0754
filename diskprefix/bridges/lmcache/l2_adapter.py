"""The adapter that LMCache loads by its `module_path`. See README.md."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from diskprefix.bridges.lmcache import _lmcache_compat as compat
from diskprefix.bridges.shared.connector_settings import tier_settings
from diskprefix.bridges.shared.timed_opening import open_in_time
from diskprefix.errors import CacheError
from diskprefix.identity import identity_fields
from diskprefix.prefixstore.chunk_store import DIGEST_BYTES, ChunkGroup, ChunkKey, chunk_identity, chunks_in
from diskprefix.processors import unbind
from diskprefix.values import SHARED

log = logging.getLogger("diskprefix")

_LOCK_S = 300.0
"""A lock ends after this time: a prefetch that LMCache gives up while its lookup runs is never unlocked."""
_MAX_FORMS = 64
"""Limit for the forms of objects of one model, rank and group. Objects of other forms are not stored."""
_ENGINE = "lmcache"

T = TypeVar("T")


class ObjectGroup(NamedTuple):
    """The parts of an `ObjectKey` that objects of one form share. `hash_bytes` is the length of their chunk hashes."""

    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str
    hash_bytes: int


class FormGroup(NamedTuple):
    """The objects of one group and one form: chunks under one root."""

    objects: ObjectGroup
    form: compat.Form


class DiskPrefixL2Adapter(compat.L2AdapterInterface):  # type: ignore[misc]
    """Keeps LMCache's objects in a store on disk. One thread each looks up, loads and stores, so an adapter's tasks of
    one kind end in their order. A store task ends when its objects are in the file. The store evicts by itself; LMCache
    may delete objects, too. For any thread.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """`config` has the keys of `connector_settings.TIER_NAMES`. Raises `ImportError` or `DiskPrefixError`, each
        with one line, for wrong settings and for another interface of LMCache. If the store cannot be opened in
        time, nothing is stored."""
        del l1_memory_desc
        compat.check_version(type(self))
        settings = tier_settings(config)
        self._folder, self._opened = settings.kv_cache_dir, open_in_time(settings)
        super().__init__(max_capacity_bytes=0 if self._opened is None else self._opened.store.budget_bytes)
        self._chunks = chunks_in(self._opened, _chunk_group)
        self._lock = threading.Lock()
        self._num_tasks = 0
        self._stores: _Tasks[Any] = _Tasks("kv-saver")
        self._lookups: _Tasks[Any] = _Tasks("kv-lookup")
        self._loads: _Tasks[Any] = _Tasks("kv-loader")
        self._locked: dict[Any, deque[tuple[float, ChunkKey]]] = {}
        """The chunks that each locked key keeps from eviction, and when each lock ends by itself."""
        self._forms: dict[ObjectGroup, set[compat.Form]] = {}
        self._known: dict[ChunkKey, Any] = {}
        """The key of each stored chunk that LMCache was told of, or that was stored at the start."""
        self._num_removed = 0
        """The removals by the store itself when it was last checked what they took."""
        self._has_told: set[str] = set()
        self._closed = False
        self._remember_stored()

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._stores.submit(
            self._next_task(), lambda: self._store(keys, objects), compat.L2StoreResult(False, 0)
        )

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        return self._lookups.submit(
            self._next_task(), lambda: self._look_up(keys, group_layout_descs), compat.Bitmap(len(keys))
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        with self._lock:
            for key in keys:
                self._release(key)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._loads.submit(self._next_task(), lambda: self._load(keys, objects), compat.Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.pop(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Deletes the objects that are stored and not locked. Waits for the disk."""
        if self._closed or not keys:
            return
        with self._lock:
            self._end_old_locks()
            free = [key for key in keys if key not in self._locked]
        chunks = {chunk: key for key in free for chunk in self._chunks_of(key)}
        deleted = self._chunks.delete(list(chunks))
        self._forget([chunk for chunk, is_deleted in zip(chunks, deleted, strict=True) if is_deleted])
        if not all(deleted):
            # Some may be deleted later.
            self._num_removed = -1

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        """Returns a page of the objects in the file, in the order of their groups and hashes; those that are being
        stored are not listed. Raises `ValueError` for a wrong page size or cursor, and `CacheError`."""
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, not {page_size}")
        after = _parsed_cursor(cursor)
        listed = self._in_file(model_name, after, page_size + 1)
        entries = [
            compat.KeyEntry(key=_object_key(group.objects, digest).to_encoded_object_key(), size_bytes=size)
            for group, digest in listed[:page_size]
            for size in [group.form.num_bytes]
        ]
        more = len(listed) > page_size
        return compat.KeyListPage(
            entries=tuple(entries), next_page_token=_cursor(*listed[page_size - 1]) if more else None
        )

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            self._end_old_locks()
            num_stored, num_locked = len(self._known), len(self._locked)
        usage = self.get_usage()
        return {
            "is_healthy": not self._closed and self._problem is None,
            "type": type(self).__name__,
            "kv_cache_dir": str(self._folder),
            "problem": self._problem,
            "stored_object_count": num_stored,
            "locked_key_count": num_locked,
            "current_size_bytes": usage.total_bytes_used,
            "max_capacity_bytes": usage.total_capacity_bytes,
        }

    @property
    def _problem(self) -> str | None:
        """The reason why not everything is stored; None if it is."""
        if self._opened is None:
            return "the store could not be opened in time"
        return self._opened.problem

    def close(self) -> None:
        """Ends the tasks, of which those that store are finished, and closes the store."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for tasks in (self._lookups, self._loads, self._stores):
            tasks.close(finish=tasks is self._stores)
        with self._lock:
            for key in list(self._locked):
                self._release(key, everything=True)
        self._chunks.close()
        if self._opened is not None:
            self._opened.release()

    def _next_task(self) -> int:
        with self._lock:
            self._num_tasks += 1
            return self._num_tasks

    # The tasks, each kind on its own thread.

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        chunks, is_whole = dict[ChunkKey, Any](), True
        places = list[npt.NDArray[np.uint8]]()
        for key, obj in zip(keys, objects, strict=True):
            if (chunk := self._storable(key, obj)) is None:
                is_whole = False
            elif chunk not in chunks:
                chunks[chunk] = key
                places.append(np.frombuffer(obj.byte_array, np.uint8))
        written = self._chunks.write(list(chunks), places)
        self._chunks.use(list(chunks))
        new = [chunk for chunk, is_written in written.items() if is_written]
        self._tell_stored([(chunk, chunks[chunk]) for chunk in new])
        self._tell_removed()
        num_bytes = sum(_form_group(chunk).form.num_bytes for chunk in new)
        return compat.L2StoreResult(is_whole and all(written.values()), num_bytes)

    def _look_up(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> Any:
        candidates = [(number, chunk) for number, key in enumerate(keys) for chunk in self._chunks_of(key, layouts)]
        # The pins come first, so that a found chunk stays.
        for _, chunk in candidates:
            self._chunks.pin(chunk)
        is_stored_of = self._chunks.are_stored([chunk for _, chunk in candidates])
        bitmap = compat.Bitmap(len(keys))
        with self._lock:
            self._end_old_locks()
            for (number, chunk), is_stored in zip(candidates, is_stored_of, strict=True):
                if is_stored and not bitmap.test(number) and not self._closed:
                    bitmap.set(number)
                    self._locked.setdefault(keys[number], deque()).append((time.monotonic() + _LOCK_S, chunk))
                else:
                    self._chunks.unpin(chunk)
        return bitmap

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        bitmap, numbers, chunks, places = (
            compat.Bitmap(len(keys)),
            list[int](),
            list[ChunkKey](),
            list[npt.NDArray[np.uint8]](),
        )
        for number, (key, obj) in enumerate(zip(keys, objects, strict=True)):
            with suppress(NotImplementedError):
                form = compat.form_of(obj)
                if (chunk := _chunk_key(key, form)) is not None:
                    numbers.append(number)
                    chunks.append(chunk)
                    places.append(np.frombuffer(obj.byte_array, np.uint8))
        loaded = self._chunks.load(chunks, places)
        accessed = [number for number, is_loaded in zip(numbers, loaded, strict=True) if is_loaded]
        for number in accessed:
            bitmap.set(number)
        if accessed:
            self._notify_keys_accessed([keys[number] for number in accessed])
        return bitmap

    # Keys and forms.

    def _storable(self, key: Any, obj: Any) -> ChunkKey | None:
        """Returns the chunk of an object, None if it cannot be stored."""
        try:
            form = compat.form_of(obj)
        except NotImplementedError:
            self._refuse("they are not in main memory")
            return None
        if not form.num_bytes or (chunk := _chunk_key(key, form)) is None:
            self._refuse(f"their hashes have {len(key.chunk_hash)} bytes, or they are empty")
            return None
        with self._lock:
            forms = self._forms.setdefault(_form_group(chunk).objects, set())
            if len(forms) >= _MAX_FORMS and form not in forms:
                self._refuse(f"a model has more than {_MAX_FORMS} forms of them")
                return None
            forms.add(form)
        return chunk

    def _refuse(self, why: str) -> None:
        """Logs once that some objects are served without the store."""
        if why not in self._has_told:
            self._has_told.add(why)
            log.warning("[disk-cache] objects of LMCache are not stored: %s", why)

    def _chunks_of(self, key: Any, layouts: Mapping[int, Any] = MappingProxyType({})) -> Iterator[ChunkKey]:
        """Yields the chunks that may hold an object: one if its layout is known, else one for each known form."""
        wanted = compat.form_of_layout(layouts.get(key.object_group_id))
        with self._lock:
            forms = [wanted] if wanted is not None else sorted(self._forms.get(_objects_of(key), ()))
        for form in forms:
            if (chunk := _chunk_key(key, form)) is not None:
                yield chunk

    # The listeners, and the counts of usage, which are the base class's.

    def _remember_stored(self) -> None:
        """Counts what the file has at the start. Nothing listens yet."""
        stored = list[tuple[FormGroup, bytes]]()
        with suppress(CacheError):
            stored = self._in_file(None, None, None)
        for group, _ in stored:
            self._forms.setdefault(group.objects, set()).add(group.form)
        self._tell_stored([(ChunkKey(digest, group), _object_key(group.objects, digest)) for group, digest in stored])

    def _tell_stored(self, stored: Sequence[tuple[ChunkKey, Any]]) -> None:
        with self._lock:
            new = [(chunk, key) for chunk, key in stored if chunk not in self._known]
            self._known.update(new)
        if new:
            sizes = [_form_group(chunk).form.num_bytes for chunk, _ in new]
            self._notify_keys_stored([key for _, key in new], sizes)

    def _tell_removed(self) -> None:
        """Tells LMCache what the store has evicted, or removed because it expired or was damaged."""
        if self._opened is None:
            return
        if (num_removed := self._opened.num_removed) == self._num_removed:
            return
        self._num_removed = num_removed
        with self._lock:
            known = list(self._known)
        self._forget(
            [chunk for chunk, is_found in zip(known, self._chunks.are_stored(known), strict=True) if not is_found]
        )

    def _forget(self, chunks: Iterable[ChunkKey]) -> None:
        with self._lock:
            gone = [(chunk, self._known.pop(chunk)) for chunk in chunks if chunk in self._known]
        if gone:
            self._notify_keys_deleted(
                [key for _, key in gone], [_form_group(chunk).form.num_bytes for chunk, _ in gone]
            )

    def _in_file(
        self, model_name: str | None, after: tuple[str, bytes] | None, limit: int | None
    ) -> list[tuple[FormGroup, bytes]]:
        """Returns groups and digests of the objects in the file, those after a position. Raises `CacheError`."""

        def group_of(identity: str) -> FormGroup | None:
            group = _group_of_identity(identity)
            return group if group is not None and model_name in (None, group.objects.model_name) else None

        return [(_form_group(chunk), chunk.digest) for chunk in self._chunks.listed(group_of, after, limit)]

    # Locks, under `_lock`.

    def _release(self, key: Any, *, everything: bool = False) -> None:
        """Ends the oldest lock of a key, or all. A key that is not locked may be released."""
        locks = self._locked.get(key)
        # Bound: each round ends a lock.
        while locks:
            self._chunks.unpin(locks.popleft()[1])
            if not everything:
                break
        if not locks:
            self._locked.pop(key, None)

    def _end_old_locks(self) -> None:
        now = time.monotonic()
        old = [key for key, locks in self._locked.items() if locks[0][0] <= now]
        for key in old:
            # Bound: each round ends a lock.
            while key in self._locked and self._locked[key][0][0] <= now:
                self._release(key)
        if old:
            log.info("[disk-cache] %d keys were still locked after %.0f s", len(old), _LOCK_S)


class _Tasks(Generic[T]):
    """The tasks of one kind: a thread that runs them in order, their results, and a file descriptor that tells of
    them. For any thread."""

    def __init__(self, name: str) -> None:
        self._notifier = compat.create_event_notifier()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=unbind)
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def submit(self, task_id: int, work: Callable[[], T], failed: T) -> int:
        """Runs `work` later. Its result is `failed` if it raises an exception. Returns `task_id`."""

        def run() -> None:
            try:
                result = work()
            except Exception:
                log.exception("[disk-cache] a task of LMCache failed")
                result = failed
            with self._lock:
                self._results[task_id] = result
            self._notifier.notify()

        self._thread.submit(run)
        return task_id

    def pop(self, task_id: int) -> T | None:
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[int, T]:
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self, *, finish: bool) -> None:
        """Ends the thread after the running task, or with `finish` after all tasks."""
        self._thread.shutdown(cancel_futures=not finish)
        self._notifier.close()


def _objects_of(key: Any) -> ObjectGroup:
    return ObjectGroup(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, len(key.chunk_hash))


def _object_key(objects: ObjectGroup, digest: bytes) -> Any:
    return compat.ObjectKey(
        chunk_hash=digest[: objects.hash_bytes],
        model_name=objects.model_name,
        kv_rank=objects.kv_rank,
        object_group_id=objects.object_group_id,
        cache_salt=objects.cache_salt,
    )


def _chunk_key(key: Any, form: compat.Form) -> ChunkKey | None:
    """Returns the chunk of an object, None if its hash is longer than a digest."""
    if len(key.chunk_hash) > DIGEST_BYTES:
        return None
    # The length of the hash is in the group, so the zeros cannot make two hashes equal.
    return ChunkKey(key.chunk_hash.ljust(DIGEST_BYTES, b"\0"), FormGroup(_objects_of(key), form))


def _form_group(chunk: ChunkKey) -> FormGroup:
    assert isinstance(chunk.group, FormGroup)
    return chunk.group


def _chunk_group(group: FormGroup) -> ChunkGroup:
    objects, form = group
    fingerprint = {
        "engine": _ENGINE,
        "lmcache_version": compat.VERSION,
        **{name: str(value) for name, value in objects._asdict().items()},
        **{name: str(value) for name, value in form._asdict().items()},
    }
    identity = chunk_identity(objects.model_name, fingerprint, form.num_bytes, form.dtype)
    return ChunkGroup(
        identity, form.num_bytes, str(SHARED.with_salt(objects.cache_salt) if objects.cache_salt else SHARED)
    )


def _group_of_identity(identity: str) -> FormGroup | None:
    """Returns the group of a root, the inverse of `_chunk_group`; None for a root of something else, or of another
    version of LMCache, whose objects are not found."""
    with suppress(ValueError, KeyError):
        fields = identity_fields(identity)
        if (fields.get("engine"), fields.get("lmcache_version")) == (_ENGINE, compat.VERSION):
            return FormGroup(
                ObjectGroup(
                    fields["model_name"],
                    int(fields["kv_rank"]),
                    int(fields["object_group_id"]),
                    fields["cache_salt"],
                    int(fields["hash_bytes"]),
                ),
                compat.Form(fields["tensors"], int(fields["num_bytes"]), fields["dtype"]),
            )
    return None


def _cursor(group: FormGroup, digest: bytes) -> str:
    chunk_group = _chunk_group(group)
    return f"{chunk_group.identity.root(chunk_group.tenant).hex()}-{digest.hex()}"


def _parsed_cursor(cursor: str | None) -> tuple[str, bytes] | None:
    """Returns root and digest of a cursor. Raises `ValueError`."""
    if cursor is None:
        return None
    root, _, digest = cursor.partition("-")
    if len(bytes.fromhex(root)) != 16 or len(bytes.fromhex(digest)) != DIGEST_BYTES:
        raise ValueError(f"not a cursor: {cursor!r}")
    return root, bytes.fromhex(digest)

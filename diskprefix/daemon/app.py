"""The composition root. Importing it is quick: torch is imported when a model is loaded."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING

from diskprefix.daemon.router import open_router
from diskprefix.daemon.settings import Settings
from diskprefix.file_system import lost_with_container
from diskprefix.native.compute_threads import limit_libraries
from diskprefix.prefixstore.recording import open_recorder
from diskprefix.scope import parse_scope
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

_SPINS = "1500"
"""GOMP_SPINCOUNT on x86-64, for models on the grid: how many rounds an idle thread of torch spins before it sleeps.
libgomp's default of 300 000 rounds (7 ms) takes time from busy processes; a thread that sleeps early is scheduled again
at once."""
_NO_MEMORY_LEFT = "the model fits in memory, but nothing to compute with is left"

if TYPE_CHECKING:
    from diskprefix.daemon.engine.loop import Engine
    from diskprefix.prefixstore.store.store import Store
    from diskprefix.progress import Report


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then returns. Raises the `DiskPrefixError` that kept the daemon from serving."""
    from diskprefix.prefixstore.store.folder import FolderUnavailable, make_folder, require_on_disk
    from diskprefix.runtime.fetch.named_model import require_named

    limit_libraries()
    # Before the port is taken.
    for flag, models in (("--model", settings.model_names), ("--draft-model", [settings.draft_model])):
        for model in models:
            require_named(model, flag, with_weights=True)
    try:
        make_folder(settings.kv_cache_dir)
    except FolderUnavailable as error:
        if not error.passing:
            raise
    if lost := lost_with_container(settings.kv_cache_dir):
        log.warning("[disk-cache] the cache and fetched models end with this container: %s", lost)
    require_on_disk(settings.kv_cache_dir, settings.kv_cache_budget or 0)
    run_router = open_router(settings)
    if run_router is not None:
        run_router(settings)
        return
    # Before torch loads libgomp. Rounds take other times on other CPUs, and macOS has no libgomp. llama.cpp's threads
    # meet after each operation of a step, so sleep costs them more.
    if platform.machine() == "x86_64" and "OMP_WAIT_POLICY" not in os.environ and settings.runtime != "llama":
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    from diskprefix.daemon.server.process.process import run

    run(settings, load_engine)


def load_engine(settings: Settings, progress: Report) -> Engine:
    """Opens the prefix cache of a model, and begins to read its weights: `finish_load` of the engine returns when they
    are in memory. Raises `ModelError`, `SettingsError` or `CacheError`."""
    started = time.perf_counter()
    # A wrong scope is reported before anything else.
    parse_scope(settings.disk_prefix_cache, param="--disk-prefix-cache")
    from diskprefix.daemon.engine.loop import Engine
    from diskprefix.prefixstore.cache.tiered_store import open_store
    from diskprefix.runtime.choose_runtime import load_draft, load_servable
    from diskprefix.runtime.memory import explain_out_of_memory

    imported = time.perf_counter()
    with ExitStack() as opened, explain_out_of_memory(_NO_MEMORY_LEFT):
        # The store comes first: an unusable folder is reported before the model takes seconds to load.
        opening = _open_beside(partial(open_store, settings), progress)
        opened.callback(opening.add_done_callback, _close_store)
        recorder = open_recorder(settings, lambda: opening.result().secret, settings.served_model_name or "")
        if recorder is not None:
            opened.callback(recorder.close)
        measurement = load_servable(settings, progress)
        loaded = measurement.loaded
        store = opening.result()
        loaded_at = time.perf_counter()
        if loaded.device == "cpu":
            buffer_bytes = loaded.fit.buffer_bytes(settings.kv_cache_write_buffer)
            if buffer_bytes < settings.kv_cache_write_buffer:
                log.info("[disk-cache] the write buffer is %s, for want of memory", format_size(buffer_bytes))
            settings = replace(settings, kv_cache_write_buffer=buffer_bytes)
        layout = measurement.layout
        if recorder is not None:
            recorder.describe(
                bytes_per_token=layout.bytes_per_token,
                state_bytes=layout.state_bytes,
                logits_bytes=layout.logits_bytes,
                exact_at=layout.exact_at,
            )
        cache = measurement.cache(settings, store, recorder.know if recorder else None)
        opened.pop_all()
        # From here on the cache owns the store.
        opened.callback(cache.close, 0)
        if recorder is not None:
            opened.callback(recorder.close)
            cache.namespaces.on_forget = recorder.forget
        exactness = {"exact_at": layout.exact_at, "exact_at_reason": measurement.reason or None}
        identity = measurement.fingerprint.as_dict() | exactness
        draft = None if settings.draft_model is None else load_draft(settings, loaded, cache, progress)
        engine = Engine(loaded, measurement.runtime, cache, settings, recorder=recorder, identity=identity, draft=draft)
        engine.warm_up()
        opened.pop_all()
    imports_s = loaded.timings["imports"] + imported - started
    engine.startup_timings = loaded.timings | {"imports": imports_s, "warm_up": time.perf_counter() - loaded_at}
    return engine


def _open_beside(open_store: Callable[[Callable[[str], None]], Store], progress: Report) -> Future[Store]:
    """Opens a store on a thread of its own. Returns when it is open, or when that takes long (the file is checked, or
    another process replaces it), after `progress` got the reason. Raises an error that comes before that."""
    opening: Future[Store] = Future()
    is_decided = Event()

    def wait(why: str) -> None:
        progress(f"store: {why}")
        is_decided.set()

    def run() -> None:
        try:
            opening.set_result(open_store(wait))
        except BaseException as error:  # noqa: BLE001 (the thread that waits raises it)
            opening.set_exception(error)
        is_decided.set()

    Thread(target=run, name="store-opening", daemon=True).start()
    is_decided.wait()
    if opening.done():
        opening.result()
    return opening


def _close_store(opening: Future[Store]) -> None:
    """Closes the store of `_open_beside`, if it was opened."""
    if opening.exception() is None:
        opening.result().close()

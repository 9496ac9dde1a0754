"""Processes that have a store open beside the process of the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.writer import Writer
from tests import forked
from tests.prefixstore.store.building import BLOCK, Clock, open_store, prompt, publication
from tests.waiting import wait_for


@contextmanager
def beside(work: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """Starts `work(ready, *arguments)` in another process, waits until it makes the file `ready`, and kills it at the
    end."""
    with TemporaryDirectory() as folder:
        process = forked.start(work, Path(folder) / "ready", *arguments)
        try:
            wait_for((Path(folder) / "ready").exists)
            yield process
        finally:
            process.kill()
            process.join()


def read(ready: Path, folder: Path) -> None:
    """Keeps a snapshot."""
    with Store(folder, read_only=True).snapshot() as snapshot:
        snapshot.counts()
        ready.touch()
        time.sleep(3600)


def hold(ready: Path, folder: Path, read_only: bool) -> None:
    """Keeps a store open."""
    store = Store(folder, read_only=read_only)
    ready.touch()
    time.sleep(3600)
    store.close()


def churn(ready: Path, folder: Path, budget_bytes: int, payload_bytes: int) -> None:
    """Publishes without end, and evicts once the store is full."""
    clock = Clock()
    store = open_store(folder, budget_bytes=budget_bytes, clock=clock)
    for seed in count():
        clock.now += 20
        token_ids = prompt(seed % 90, (2 + seed % 7) * BLOCK + seed % 5)
        store.publish(publication(store, token_ids, payload_bytes=payload_bytes))
        if seed == 60:
            ready.touch()
        if seed >= 60:
            # A reader that copies the store pins all pages meanwhile, so at full speed the file would reach its limit.
            time.sleep(0.01)


def save_on(ready: Path, folder: Path) -> None:
    """Saves prompts without end, as a daemon does."""
    store = Store(folder, budget_bytes=256 << 20, serving=True)
    writer = Writer(store, buffer_bytes=64 << 20)
    for seed in count(1000):
        pub = publication(store, prompt(seed, 3 * BLOCK))
        writer.queue_publication(Save(pub.epoch), pub, is_last=True)
        writer.flush(60)
        ready.touch()


def fill(store: Store, clock: Clock, seeds: range) -> None:
    for seed in seeds:
        clock.now += 11
        store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000))


def open_and_fill(folder: Path, budget_bytes: int, seeds: range) -> None:
    clock = Clock()
    store = open_store(folder, budget_bytes=budget_bytes, clock=clock)
    fill(store, clock, seeds)
    store.close()

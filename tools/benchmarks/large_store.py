"""Stores of many GiB that take little room on the disk: their payloads are zeros, in holes of the file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import lmdb
import numpy as np

from diskprefix.store.changes import NewNode
from diskprefix.store.folder import DATA, LOCK
from diskprefix.store.pieces import PayloadLayout, split_payload
from diskprefix.store.schema import EntryRecord, Kind, RootRecord, node_name
from diskprefix.store.store import Publication, Store
from diskprefix.tokens import TokenPath
from tests.store.building import BLOCK as BUILT_BLOCK
from tests.store.building import ROOT, layout_of
from tools.measuring import page_cache

_BLOCK, _BLOCKS = 256, 40
"""Tokens in a block, as the daemon's default; blocks of a prompt."""
_BYTES_PER_TOKEN = 12 << 10
"""As a model of half a billion parameters."""
_PAGE = 4096
_PUNCH_HOLE_KEEP_SIZE = 3


def build(folder: Path, num_bytes: int) -> None:
    """Makes a store of `num_bytes` in `folder`. Each record is there, and right. Linux only."""
    layout = layout_of(_BYTES_PER_TOKEN * BUILT_BLOCK)
    pieces = PayloadLayout.parse(layout).pieces(_BLOCK, Kind.BLOCK)
    payload = split_payload(memoryview(bytes(sum(piece.num_bytes for piece in pieces))), pieces)
    record = RootRecord(model="made", block_size=_BLOCK, layout=layout, created_at=0.0)
    unsynced = mock.patch("lmdb.open", partial(lmdb.open, sync=False))
    with unsynced, closing(Store(folder, budget_bytes=2 * num_bytes)) as store:
        for seed in count():
            begin = store.file_bytes()
            if begin >= num_bytes:
                break
            token_ids = np.random.default_rng(seed).integers(0, 1000, _BLOCK * _BLOCKS).astype(np.int32)
            nodes, parent = [], ROOT
            for start in range(0, len(token_ids), _BLOCK):
                block = token_ids[start : start + _BLOCK]
                name = node_name(store.secret, parent, block, Kind.BLOCK)
                nodes.append(NewNode(name, parent, start, block, Kind.BLOCK, payload, pieces, prefill_s=0.5))
                parent = name
            entry = EntryRecord(
                root=ROOT, num_tokens=len(token_ids), scope="full", preview="", created_at=store.clock()
            )
            path = TokenPath(store.secret, ROOT, token_ids, _BLOCK)
            store.publish(Publication(store.epoch, ROOT, record, tuple(nodes), parent, entry, prompt=path))
            # Before the kernel writes them.
            _punch(folder / DATA, begin)


def _punch(file: Path, begin: int) -> None:
    """Makes holes of the pages from `begin` on that are zeros."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    fd = os.open(file, os.O_RDWR)
    try:
        for at, length in _zeros(fd, begin):
            if fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, at, length):
                raise OSError(ctypes.get_errno(), "this file system makes no holes")
    finally:
        os.close(fd)


def _zeros(fd: int, begin: int) -> Iterator[tuple[int, int]]:
    pages = np.frombuffer(os.pread(fd, os.fstat(fd).st_size - begin, begin), np.uint8).reshape(-1, _PAGE)
    is_used = np.concatenate(([True], pages.any(axis=1), [True]))
    edges = np.flatnonzero(np.diff(is_used)).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        yield begin + first * _PAGE, (end - first) * _PAGE


def forget_boot(folder: Path) -> None:
    """Has the next start find the store as after a start of the machine: not checked, nor in memory."""
    (folder / LOCK).write_bytes(b"")
    page_cache.drop(folder / DATA)

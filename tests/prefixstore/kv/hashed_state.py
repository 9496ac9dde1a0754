"""Sequences without a model: the state of a token is a hash of the tokens up to it, and of a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from diskprefix.prefixstore.kv.kept_blocks import KeptBlock
from diskprefix.prefixstore.kv.layout import Group, LayerSpec, Layout, StateGroup, StateSpec, TensorSpec
from diskprefix.prefixstore.kv.numbers import Array, array_dtype
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.pages import Captured, Page, PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.prefixstore.store.epochs import Purges
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import TokenIds

BLOCK, WINDOW = 4, 6
KINDS = ("token", "sliceable", "token_checkpoints", "checkpoints")
A, B = Owner(b"a" * 16, 1, "a"), Owner(b"b" * 16, 1, "b")


@cache
def layout_of(kind: str = "token", window: int | None = None) -> Layout:
    """Two layers, of which the second one may have a window, and with checkpoints a third one with a state. Each row
    has 16 bytes."""
    layers = [LayerSpec(), LayerSpec() if window is None else LayerSpec("sliding", window)]
    forms: list[tuple[int, int, str, int | None]] = [(2, 4, "float32", None), (1, 8, "bfloat16", window)]
    groups = [Group(tuple(TensorSpec(i, part, *form) for part in ("keys", "values"))) for i, form in enumerate(forms)]
    states: tuple[StateGroup, ...] = ()
    if kind.endswith("checkpoints"):
        layers.append(LayerSpec("linear", num_states=1))
        states = (StateGroup((StateSpec(2, "recurrent", 0, (3, 4), "float32"),)),)
    exact_at = "token" if kind.startswith("token") else "grid"
    layout = Layout(tuple(layers), tuple(groups), 16, "float32", states=states, exact_at=exact_at)  # type: ignore[arg-type]
    assert layout.state_kind == kind
    return layout


def page_cache(layout: Layout, *, blocks: int = 1000, **options: Any) -> PageCache:
    """With room for so many blocks, and for as many states."""
    limit_bytes = blocks * (layout.bytes_per_token * BLOCK + layout.state_bytes)
    given: dict[str, Any] = {"limit_bytes": limit_bytes, "free_bytes": lambda: 1 << 40} | options
    cache = PageCache(layout, block_size=BLOCK, **given)
    cache.stop_populating()
    # As an engine does before its first request.
    cache.forget_expired(Purges())
    return cache


def ids_of(cache: PageCache, node: KeptBlock) -> TokenIds:
    """The tokens up to the end of what is kept."""
    found = cache.kept.token_ids_of(node)
    assert found is not None
    return found


def tokens(*parts: int | range | TokenIds) -> TokenIds:
    return np.concatenate([np.empty(0, np.int32), *(np.atleast_1d(np.asarray(part, np.int32)) for part in parts)])


def hashes(seed: object, token_ids: TokenIds, start: int, end: int) -> npt.NDArray[np.uint8]:
    """Returns those of the tokens from `start` to `end`, [tokens, 16]."""
    hashed = hashlib.blake2b(repr(seed).encode() + token_ids[:start].tobytes(), digest_size=16)
    found = np.empty((end - start, 16), np.uint8)
    for number, token in enumerate(token_ids[start:end]):
        hashed.update(token.tobytes())
        found[number] = np.frombuffer(hashed.digest(), np.uint8)
    return found


def rows_of(group: Group, hashed: npt.NDArray[np.uint8]) -> Array:
    """Returns what these tokens have in a group, [tensors, heads, tokens, dim]: each row of a group another one."""
    numbers = np.arange(len(group.specs) * group.heads, dtype=np.uint8)
    content = (hashed ^ numbers[:, None, None]).view(array_dtype(group.dtype))
    return content.reshape(len(group.specs), group.heads, len(hashed), -1)


def payload_of(layout: Layout, hashed: npt.NDArray[np.uint8]) -> bytes:
    """Returns the payload of these tokens."""
    numbers = (np.arange(len(group.specs) * group.heads, dtype=np.uint8) for group in layout.groups)
    return b"".join((hashed ^ of_group[:, None, None]).tobytes() for of_group in numbers)


def captured(sequence: KVSequence, position: int, num_tokens: int, kind: NodeKind = NodeKind.BLOCK) -> Captured:
    """Returns the payload of a node."""
    found = sequence.capture(position, PayloadLayout.parse(sequence.layout.describe()).pieces(num_tokens, kind))
    assert found is not None
    return found


def holding(pool: PagePool, pages: Iterable[Page | None]) -> Captured:
    """Returns a user of pages, as what waits to be written is."""
    return Captured(pool, dict(enumerate(page for page in pages if page is not None)), (), memoryview(b""))


def compute(
    sequence: KVSequence, token_ids: TokenIds, end: int | None = None, *, seed: object = 0, num_wrong: int = 0
) -> bool:
    """Does what the engine does in a step up to `end`, or to that of all tokens, and with so many wrong guesses behind
    it. Returns False without memory."""
    end = len(token_ids) if end is None else end
    if not sequence.take_pages_to(end):
        return False
    if not (sequence.take_pages_to(end + num_wrong) and sequence.take_spares()):
        num_wrong = 0
    run = sequence.begin_step(end + num_wrong - sequence.num_tokens, num_guesses=num_wrong)
    hashed = hashes(seed, tokens(token_ids[:end], *[99] * num_wrong), run.start, run.end)

    def put_states(num_rows: int) -> None:
        for page in sequence.states if num_rows else ():
            page.tensor.view(np.uint8)[:] = hashed[num_rows - 1]

    for table in sequence.tables:
        table.write_rows(run.start, rows_of(table.group, hashed))
    put_states(run.num_rows)
    sequence.end_step(run)
    if run.replays is not None:
        run.replays.append(put_states)
    if num_wrong:
        sequence.take_back(end)
    return True


def compute_for_all(cache: PageCache, sequence: KVSequence, token_ids: TokenIds, *args: Any, **options: Any) -> bool:
    """Does what `compute` does, and has others find it."""
    if not compute(sequence, token_ids, *args, **options):
        return False
    end = sequence.num_tokens
    cache.set_ready(sequence, end, lambda: token_ids[:end])
    return True


def wrong(sequence: KVSequence, token_ids: TokenIds, *, seed: object = 0) -> list[str]:
    """Returns which groups have not the state of these tokens, as far as they have pages."""
    found, end = list[str](), sequence.num_tokens
    hashed = hashes(seed, token_ids, 0, end)
    for number, table in enumerate(sequence.tables):
        if (first := table.complete_from) < end:
            expected = rows_of(table.group, hashed[first:])
            if table.gathered(first, end).tobytes() != expected.tobytes():
                found.append(f"group {number}, from {first} to {end}")
    for page in sequence.states if end else ():
        if not (page.tensor.view(np.uint8) == hashed[-1]).all():
            found.append("the state")
    return found


def restore(cache: PageCache, sequence: KVSequence, token_ids: TokenIds, end: int, *, seed: object = 0) -> None:
    """Does what a fetch does that restores whole blocks up to `end`. Raises `MemoryError`."""
    start, hashed = sequence.num_tokens // BLOCK * BLOCK, hashes(seed, token_ids, 0, end)
    is_running = sequence in cache.running
    if is_running:
        cache.set_ready(sequence, 0)
    for number, group in enumerate(sequence.layout.groups):
        sequence.prepare_restore(number, group.first_needed(end) // BLOCK * BLOCK, end)
    for number, group in enumerate(sequence.layout.groups):
        first = max(start, group.first_needed(end) // BLOCK * BLOCK)
        for position in range(first, end, BLOCK):
            rows = np.arange(len(group.specs) * group.heads, dtype=np.uint8)
            content = (hashed[position : position + BLOCK] ^ rows[:, None, None]).reshape(len(rows), -1)
            for row in rows:
                sequence.fill(position, BLOCK, number, slice(row, row + 1), partial(_put, content[row]))
    for number in range(len(sequence.states)):
        at = len(sequence.layout.groups) + number
        sequence.fill(0, 0, at, slice(None), partial(_put, np.tile(hashed[-1], 3)))
    sequence.truncate(end)
    for number in range(start // BLOCK, end // BLOCK):
        cache.name_restored(sequence, number)
    if is_running:
        cache.set_ready(sequence, end)


def _put(content: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    out[...] = content.reshape(out.shape)

"""The state of prompts in memory: the pages of sequences that run, and of those that ended, by the names of blocks.

The names are those of the store (`tokens.block_hashes`). A prompt begins with the pages of the longest prefix that is
there. Complete blocks get their names as soon as they are computed or restored. The end of a sequence, behind its last
complete block, gets none: it is found among what continues that block. What no sequence uses stays until its memory is
needed: the least recently used goes first. A use of a block is one of all before it, as in the store
(`store.eviction`), so what continues a block goes before that.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from diskprefix.errors import ContextTooLong, NotReady
from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.kv.pages import Page, PagePool
from diskprefix.kv.sequence import KVSequence, Owner, Prefix
from diskprefix.kv.sizes import STEP_TOKENS, longest_within
from diskprefix.nouns import CacheOptions
from diskprefix.tokens import LEAST_TOKENS, TokenIds, block_hash, common_prefix_length, floor_to_grid
from diskprefix.units import format_size

_MOST_LOGITS = 64
"""The logits at ends of prompts that are kept for exact repeats."""
_LOOK_S = 1.0
"""Seconds after which it is looked again for what has expired: it may be in use."""
_RECLAIMED = 8
"""Pages that are made free at a time: looking for them takes time."""


class KeptSums(NamedTuple):
    """Sums over blocks: the bytes of pages that nobody else uses, and the bytes and tokens of blocks that no sequence
    uses."""

    idle_bytes: int = 0
    kept_bytes: int = 0
    kept_tokens: int = 0


@dataclass(eq=False)
class KeptBlock:
    """A block in memory, or with fewer tokens or none, the end of a sequence behind its last block, with the states
    there. It is a user of its pages, which are None for groups of which it has none."""

    owner: Owner
    name: bytes
    parent: bytes
    position: int
    token_ids: TokenIds
    pages: list[Page | None]
    expires_at: float
    """The time on the clock of `time.monotonic`."""
    states: list[Page] = field(default_factory=list)
    options: CacheOptions | None = None
    """Those of the request, of the end of a sequence."""
    counted: KeptSums = field(default_factory=KeptSums)
    """What it adds to the sums over all blocks."""

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)


class Later(NamedTuple):
    """The wait of a prompt: `sequence`, of this `owner`, is about to have the state of its first `num_tokens` tokens.
    `block` is the key of the first complete block with which the wait is over, None if there is none."""

    sequence: KVSequence
    owner: Owner
    num_tokens: int
    block: tuple[Owner, bytes] | None


class NoRoom(NamedTuple):
    """The wait of a prompt for memory, while others run: what there was when it got none."""

    used_bytes: int
    idle_bytes: int
    num_blocks: int
    room_bytes: int


@dataclass(frozen=True)
class PrefixMatch:
    """The beginning of a prompt that is in memory, and the number of its tokens that `later` will be: `awaited`, a
    sequence that runs, is about to have their state. `logits` are those at the prompt's end, shape [vocab]."""

    prefix: Prefix = field(default_factory=Prefix)
    later: int = 0
    awaited: KVSequence | None = None
    logits: torch.Tensor | None = None


def held_up() -> NotReady:
    """The error of a request that lacks the memory which reads hold that do not end."""
    return NotReady("a restore holds the KV memory that is missing, and the disk does not answer")


class PageCache:
    """The pages of one model, by sequence and by name, within `limit_bytes` and within what `free_bytes` says that the
    device has. `block_size` is in tokens. `keeps`: what no sequence uses stays. For the engine's thread, but for
    `name_restored`.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        block_size: int,
        limit_bytes: int,
        free_bytes: Callable[[], int],
        keeps: bool = True,
    ) -> None:
        self.layout = layout
        self.pool = PagePool(layout, device, block_size=block_size, limit_bytes=limit_bytes, free_bytes=free_bytes)
        self.pool.reclaim, self.pool.idle_bytes = self._reclaim, self._idle_bytes
        self._sums = KeptSums()
        """Of all blocks but those in `pool.changed`, which are counted again when the sums are asked for."""
        self.running: set[KVSequence] = set()
        self.disk_hangs = False
        """The disk does not answer: what reads it may keep pages for ever."""
        self._abandoned: set[KVSequence] = set()
        """Sequences that nothing computes any more. Threads that hang may still write to their pages."""
        self._block_size = block_size
        self._keeps = keeps
        self._nodes: OrderedDict[tuple[Owner, bytes], KeptBlock] = OrderedDict()
        """The least recently used first."""
        self._children: dict[tuple[Owner, bytes], list[KeptBlock]] = {}
        """By the name of what they continue."""
        self._logits: OrderedDict[tuple[Owner, bytes], tuple[torch.Tensor, float]] = OrderedDict()
        """Those at ends of prompts, shape [vocab], and when they expire."""
        self._purged_at: bytes | None = b""
        """The last purge that is known of; empty until `drop_gone` is first called, before anything is begun."""
        self.expires_at = math.inf
        """A time before which nothing expires, on the clock of `time.monotonic`."""
        self._is_idle = True
        """True until the first request. Until then, pages are made ahead."""

    def longest(self, most_tokens: int) -> int:
        """Returns the longest sequence, at most `most_tokens`, that fits if it is alone."""
        return longest_within(self.pool.limit_bytes, self.pool.sequence_bytes, most_tokens, self._block_size)

    def make_ahead(self, num_bytes: int, max_tokens: int) -> None:
        """Makes pages for at most so many bytes and tokens before the first request, on a thread beside the rest of the
        start, until `give_way`."""
        affordable = min(num_bytes, self.pool.room_bytes // 2) // max(self.layout.bytes_per_token, 1)
        self.pool.make_ahead(min(max_tokens, affordable), lambda: self._is_idle)

    def give_way(self) -> None:
        """Stops making pages ahead, as a request has come. Meanwhile the process could map no memory, which a tokenizer
        does hundreds of times. For any thread."""
        self._is_idle = False

    # A sequence begins.

    def match_prefix(self, owner: Owner, token_ids: TokenIds, *, leaves_last: bool = False) -> PrefixMatch:
        """Returns the longest beginning of a prompt that a sequence can go on from. For `leaves_last` see `begin`."""
        size, state_kind = self._block_size, self.layout.state_kind
        names = owner.block_names(token_ids, size)
        with self.pool.lock:
            path = self._path(owner, names, token_ids)
            logits = self._logits.get((owner, self._end_name(owner, names, token_ids)), (None, 0.0))[0]
            logits = None if leaves_last else logits
            most = len(token_ids) - (logits is None)
            if self.layout.states:
                found = self._with_states(owner, path, token_ids, most)
                logits = logits if found.num_tokens == len(token_ids) else None
                return PrefixMatch(found, found.num_tokens, logits=logits)
            common, part, later, awaited = self._part(owner, path, token_ids)
            if state_kind != "token" and logits is not None and len(token_ids) % size:
                # On the grid, only an equal prompt has its last tokens from the same step.
                equal = self._end_of(owner, names, token_ids)
                part, most = (part, most - 1) if equal is None else (equal, most)
            points = [len(path) * size + common, *range(len(path) * size, 0, -size)]
            for point in points:
                end = min(point, most)
                if state_kind != "token" and end < len(token_ids):
                    end = floor_to_grid(min(end, len(token_ids) - 1), size)
                pages = self._pages(path, part, end)
                if pages is not None:
                    break
            else:
                end, pages = 0, []
            later = min(later, len(token_ids) - 1)
            later = later if state_kind == "token" else floor_to_grid(later, size)
            logits = logits if end == len(token_ids) else None
            return PrefixMatch(Prefix(end, pages), max(end, later), awaited, logits)

    def begin(
        self, owner: Owner | None, token_ids: TokenIds, *, leaves_last: bool = False, expires_at: float = math.inf
    ) -> KVSequence | Later | None:
        """Returns a sequence with room for a prompt, which begins with what is there of it; None if others must end
        first, a `Later` if a sequence that runs is about to have more of it. Only prompts of the same `owner` begin
        with its pages, and none without. With `leaves_last`, the last token is left to compute in any case. For
        `expires_at` see `KVSequence`. Raises `ContextTooLong` if the prompt never fits, and `NotReady` if it does not
        before a restore has given its pages back that the disk holds up."""
        pool, needed = self.pool, self.pool.sequence_bytes(len(token_ids))
        if needed > pool.limit_bytes:
            raise ContextTooLong(
                f"{len(token_ids)} tokens need {format_size(needed)} of KV memory, and --kv-memory allows "
                f"{format_size(pool.limit_bytes)}; use a shorter prompt or raise --kv-memory"
            )
        with pool.lock:
            found = PrefixMatch()
            if owner is not None:
                found = self.match_prefix(owner, token_ids, leaves_last=leaves_last)
            is_later = found.later >= found.prefix.num_tokens + LEAST_TOKENS
            if owner is not None and found.awaited is not None and is_later:
                return self._later(owner, token_ids, found.awaited, found.later)
            if found.prefix.num_tokens < LEAST_TOKENS:
                found = PrefixMatch()
            shared = {page for of in found.prefix.pages for page in of if page is not None}
            missing = needed - sum(page.num_bytes for page in shared)
            excess = missing - pool.room_bytes
            if self.running and excess > 0 and excess > self._idle_bytes():
                return None
            sequence = self._begun(found.prefix, len(token_ids))
            if sequence is None and owner is not None and found.prefix.num_tokens:
                # The copies of its last page and of its states take more than there is.
                end = floor_to_grid(found.prefix.num_tokens, self._block_size)
                found = (
                    PrefixMatch()
                    if self.layout.states
                    else self.match_prefix(owner, token_ids[: end + 1], leaves_last=True)
                )
                sequence = self._begun(found.prefix, len(token_ids))
            is_held = any(hold.pages for hold in pool.holds)
            if sequence is None and (self.running or (is_held and not self.disk_hangs)):
                return None
            if sequence is None and (self._abandoned or is_held):
                raise held_up()
            if sequence is None:
                raise pool.too_long(len(token_ids))
            sequence.owner, sequence.token_ids, sequence.num_exact = owner, token_ids, len(token_ids)
            sequence.expires_at = expires_at
            sequence.names = [] if owner is None else owner.block_names(token_ids, self._block_size)
            sequence.num_ready = found.prefix.num_tokens
            sequence.num_named = sequence.num_ready // self._block_size
            sequence.logits = found.logits if sequence.num_ready == len(token_ids) else None
            self._use(sequence)
            return sequence

    def no_room(self) -> NoRoom:
        """Returns the wait of a prompt for which `begin` has just found no memory."""
        with self.pool.lock:
            return NoRoom(self.pool.used_bytes, self._idle_bytes(), len(self._nodes), self.pool.room_bytes)

    def is_later(self, later: Later | NoRoom) -> bool:
        """Returns whether what a prompt waits for is still to come. If not, `begin` tells."""
        if isinstance(later, NoRoom):
            # What the device has free changes all the time. Only more of it helps.
            now = self.no_room()
            return bool(self.running) and now[:-1] == later[:-1] and now.room_bytes <= later.room_bytes
        one = later.sequence
        with self.pool.lock:
            is_coming = one in self.running and one.owner == later.owner
            return is_coming and one.num_ready + LEAST_TOKENS <= later.num_tokens and later.block not in self._nodes

    def fork(self, source: KVSequence) -> KVSequence | None:
        """Returns a sequence with the state of another one; None if others must end first."""
        with self.pool.lock:
            sequence = self._begun(source.prefix(), 0)
            if sequence is not None:
                sequence.is_purged = source.is_purged
            return sequence

    def _later(self, owner: Owner, token_ids: TokenIds, awaited: KVSequence, num_tokens: int) -> Later:
        # As long as this block has no name, the prompt shares too few of them.
        end = floor_to_grid(num_tokens - LEAST_TOKENS, self._block_size) + self._block_size
        names = owner.block_names(token_ids[:end], self._block_size)
        block = (owner, names[-1]) if len(names) * self._block_size == end else None
        return Later(awaited, owner, num_tokens, block)

    def _begun(self, prefix: Prefix, num_tokens: int) -> KVSequence | None:
        # Taking pages must not free those.
        held = [page for of in (*prefix.pages, prefix.states) for page in of]
        self.pool.hold(held)
        try:
            sequence = KVSequence(self.pool)
            first_step = min(num_tokens, prefix.num_tokens + STEP_TOKENS)
            if sequence.begin_with(prefix) and sequence.has_capacity(num_tokens) and sequence.has_room(first_step):
                self.running.add(sequence)
                return sequence
            sequence.close()
        except ContextTooLong:
            # Not even its states have room.
            pass
        finally:
            self.pool.release(held)
        return None

    # What it computes is found by others.

    def name_blocks(self, sequence: KVSequence) -> None:
        """Gives the complete blocks of a sequence their names, as far as they are ready and exact."""
        end = min(sequence.num_ready, sequence.num_exact) // self._block_size
        if sequence.owner is not None and end > sequence.num_named:
            self._name(sequence, sequence.num_named, end)
            sequence.num_named = end

    def name_restored(self, sequence: KVSequence, number: int) -> None:
        """Gives a block that was restored its name. For any thread while a fetch fills the sequence."""
        self._name(sequence, number, number + 1)

    def keep_logits(self, sequence: KVSequence, logits: torch.Tensor) -> None:
        """Keeps the next-token logits, shape [vocab], at the end of a sequence's prompt, which is all of its tokens."""
        if sequence.owner is not None and logits.isfinite().all():
            names = sequence.owner.block_names(sequence.token_ids, self._block_size)
            key = sequence.owner, self._end_name(sequence.owner, names, sequence.token_ids)
            with self.pool.lock:
                self._logits[key] = logits, sequence.expires_at
                self.expires_at = min(self.expires_at, sequence.expires_at)
            self._logits.move_to_end(key)
            if len(self._logits) > _MOST_LOGITS:
                self._logits.popitem(last=False)

    def end(self, sequence: KVSequence, *, keep: bool, options: CacheOptions | None = None) -> None:
        """Ends a sequence. `keep`: a later prompt may go on from its last token. `options` are those of its request, if
        the state is to be saved when the process ends."""
        try:
            if keep:
                sequence.settle()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            keep = False
        with self.pool.lock:
            self.running.discard(sequence)
            self._abandoned.discard(sequence)
            if keep and sequence.owner is not None:
                self.name_blocks(sequence)
                self._keep_end(sequence, options)
                self._use(sequence)
            if sequence.is_purged:
                _make_secret(sequence.pages())
            sequence.close()
            if not self._keeps:
                self.forget_idle()

    def abandon(self, sequence: KVSequence) -> None:
        """Takes a sequence out of those that run. Its pages stay until `end`. Nobody waits for what it will have."""
        with self.pool.lock:
            self.running.remove(sequence)
            self._abandoned.add(sequence)

    def forget(self, sequence: KVSequence) -> None:
        """Forgets the names of a sequence that failed: what it computed may be the reason."""
        owner, sequence.owner = sequence.owner, None
        if owner is not None:
            names = sequence.names[: sequence.num_named]
            with self.pool.lock:
                for node in [self._nodes[owner, name] for name in names if (owner, name) in self._nodes]:
                    self._remove(node)

    def forget_idle(self) -> None:
        """Forgets what no sequence uses."""
        with self.pool.lock:
            used = {page for sequence in self._sequences for page in sequence.pages() if page}
            for node in [one for one in self._nodes.values() if used.isdisjoint((*one.pages, *one.states))]:
                self._remove(node)
            self._logits.clear()

    def drop_gone(self, purged_at: bytes | None) -> None:
        """Forgets what has expired, and what is of before the last purge. Its content does not stay in memory when its
        last user has ended."""
        now = time.monotonic()
        is_purged, self._purged_at = self._purged_at not in (purged_at, b""), purged_at
        if not is_purged and now < self.expires_at:
            return
        with self.pool.lock:
            for node in list(self._nodes.values()):
                # The time counts from the end of what uses it. Until then it is not found.
                is_over = node.expires_at <= now and not self._is_used(node)
                if is_over or node.owner.purged_at != purged_at:
                    _make_secret((*node.pages, *node.states))
                    self._remove(node)
            for key, (_, expires_at) in list(self._logits.items()):
                if key[0].purged_at != purged_at or expires_at <= now:
                    del self._logits[key]
            if is_purged:
                for one in self._sequences:
                    # Those of nobody may have begun with what was purged.
                    if one.owner is None or one.owner.purged_at != purged_at:
                        one.owner, one.is_purged = None, True
                        _make_secret(one.pages())
                for hold in self.pool.holds:
                    _make_secret(hold.pages)
                self.pool.wipe()
            times = [*(node.expires_at for node in self._nodes.values()), *(at for _, at in self._logits.values())]
            self.expires_at = max(min(times, default=math.inf), now + _LOOK_S)

    def ended(self) -> list[KeptBlock]:
        """Returns the ends of sequences that have not expired, the latest first."""
        now = time.monotonic()
        return [one for one in reversed(self._nodes.values()) if one.options is not None and one.expires_at > now]

    def token_ids_of(self, node: KeptBlock) -> TokenIds | None:
        """Returns the tokens up to the end of a node; None if not all blocks before it are there."""
        parts = [node.token_ids]
        with self.pool.lock:
            while node.position:
                before = self._nodes.get((node.owner, node.parent))
                if before is None:
                    return None
                node = before
                parts.append(node.token_ids)
        return np.concatenate(parts[::-1])

    def resume(self, node: KeptBlock) -> KVSequence | None:
        """Returns a sequence with the state of one that has ended, or of models on the grid, with that up to its last
        block; None if that is no longer there."""
        with self.pool.lock:
            if (token_ids := self.token_ids_of(node)) is None:
                return None
            prefix = self.match_prefix(node.owner, np.append(token_ids, token_ids[-1:])).prefix
            is_there = prefix.num_tokens == len(token_ids) or (prefix.num_tokens and self.layout.is_sliceable)
            return self._begun(prefix, 0) if is_there else None

    def stats(self) -> dict[str, int]:
        """Returns sizes in bytes, the number of sequences that run, and the tokens of blocks that none of them uses."""
        with self.pool.lock:
            counted = self._counted()
            return {
                "limit_bytes": self.pool.limit_bytes,
                "used_bytes": self.pool.used_bytes,
                "kept_bytes": counted.kept_bytes,
                "kept_tokens": counted.kept_tokens,
                "running": len(self.running),
            }

    def sequences(self) -> list[dict[str, Any]]:
        """Returns the tokens and bytes of sequences: those that run, then those that ended, the latest first."""
        with self.pool.lock:
            running = [(one.num_ready, True) for one in self.running]
            counts = [*running, *((node.end, False) for node in self.ended())]
            of_bytes = self.pool.sequence_bytes
            return [{"tokens": count, "num_bytes": of_bytes(count), "busy": is_busy} for count, is_busy in counts]

    def check(self) -> list[str]:
        """Returns what is wrong: users against lists, names against tokens, what is free, and the sums."""
        with self.pool.lock:
            nodes = list(self._nodes.values())
            users = [page for node in nodes for page in (*node.pages, *node.states)]
            found = self.pool.check([*users, *(page for one in self._sequences for page in one.pages())])
            listed = [node for of in self._children.values() for node in of]
            if len(listed) != len(nodes) or set(listed) != set(nodes):
                found.append(f"{len(listed)} blocks continue others, of {len(nodes)}")
            for node in nodes:
                mark = b"" if len(node.token_ids) == self._block_size else b"e"
                if node.name != block_hash(node.owner.secret, node.parent, node.token_ids, mark):
                    found.append("a block has the name of other tokens")
            counted, exact = self._counted(), KeptSums(*map(sum, zip(*map(self._count, nodes), strict=True)))
            if counted != exact:
                found.append(f"the blocks are counted as {counted}, and are {exact}")
            return found

    @property
    def _sequences(self) -> set[KVSequence]:
        return self.running | self._abandoned

    def _use(self, sequence: KVSequence) -> None:
        """Records a use of all blocks of a sequence, the last one first."""
        if sequence.owner is not None:
            for key in ((sequence.owner, name) for name in reversed(sequence.names[: sequence.num_named])):
                if key in self._nodes:
                    self._nodes.move_to_end(key)
                    self._nodes[key].expires_at = max(self._nodes[key].expires_at, sequence.expires_at)

    def _name(self, sequence: KVSequence, first: int, end: int) -> None:
        size = self._block_size
        with self.pool.lock:
            # A purge takes the owner away.
            if (owner := sequence.owner) is not None:
                if len(sequence.names) < end:
                    sequence.names = owner.block_names(sequence.token_ids[: end * size], size)
                for number in range(first, end):
                    start, name = number * size, sequence.names[number]
                    parent = sequence.names[number - 1] if number else owner.root
                    # A copy: a part of an array keeps all of it.
                    block, pages = sequence.token_ids[start : start + size].copy(), sequence.block(number)
                    self._add(KeptBlock(owner, name, parent, start, block, pages, sequence.expires_at))

    def _keep_end(self, sequence: KVSequence, options: CacheOptions | None) -> None:
        owner, size = sequence.owner, self._block_size
        assert owner is not None
        token_ids = sequence.token_ids[: min(sequence.num_ready, sequence.num_exact)]
        names, start = owner.block_names(token_ids, size), floor_to_grid(len(token_ids), size)
        if not len(token_ids) or (self.layout.states and sequence.num_tokens != len(token_ids)):
            # Nothing goes on from there.
            return
        if start == len(token_ids) and not self.layout.states:
            if (last := self._nodes.get((owner, names[-1]))) is not None:
                last.options = options
            return
        name, parent = self._end_name(owner, names, token_ids), names[-1] if names else owner.root
        pages = sequence.block(start // size) if start < len(token_ids) else []
        rest = token_ids[start:].copy()
        self._add(KeptBlock(owner, name, parent, start, rest, pages, sequence.expires_at, sequence.states, options))

    def _add(self, node: KeptBlock) -> None:
        """Adds a node, which becomes a user of its pages. One that is there takes over the pages that it lacks."""
        known = self._nodes.get((node.owner, node.name))
        if known is None:
            self._nodes[node.owner, node.name] = node
            self._keep(node, (*node.pages, *node.states))
            self.expires_at = min(self.expires_at, node.expires_at)
            self._children.setdefault((node.owner, node.parent), []).append(node)
            return
        self._nodes.move_to_end((node.owner, node.name))
        known.expires_at = max(known.expires_at, node.expires_at)
        known.options = node.options or known.options
        for number, page in enumerate(node.pages):
            if known.pages[number] is None:
                self._keep(known, [page])
                known.pages[number] = page

    def _remove(self, node: KeptBlock) -> None:
        del self._nodes[node.owner, node.name]
        siblings = self._children[node.owner, node.parent]
        siblings.remove(node)
        if not siblings:
            del self._children[node.owner, node.parent]
        self._let_go((*node.pages, *node.states))
        self.pool.changed.discard(node)
        self._sums = self._sum(KeptSums(), node.counted)

    def _keep(self, node: KeptBlock, pages: Iterable[Page | None]) -> None:
        """Makes a block a user of pages."""
        # With states alone, blocks have none.
        self.pool.changed.add(node)
        for page in (page for page in pages if page is not None):
            page.kept_in = node
            self.pool.hold([page])

    def _let_go(self, pages: Iterable[Page | None]) -> None:
        """Ends the use of pages by their block."""
        for page in (page for page in pages if page is not None):
            self.pool.release([page])
            page.kept_in = None

    @staticmethod
    def _is_used(node: KeptBlock) -> bool:
        """Returns whether a sequence uses some page of a node."""
        return any(page.users > page.num_holds + 1 for page in (*node.pages, *node.states) if page is not None)

    def _idle_bytes(self) -> int:
        spares = sum(page.num_bytes for sequence in self.running for page in sequence.idle_spares)
        return self._counted().idle_bytes + spares

    def _counted(self) -> KeptSums:
        """Returns the sums over all blocks. Counts again only blocks whose pages got or lost a user."""
        while self.pool.changed:
            node: KeptBlock = self.pool.changed.pop()
            before, node.counted = node.counted, self._count(node)
            self._sums = self._sum(node.counted, before)
        return self._sums

    def _sum(self, more: KeptSums, less: KeptSums) -> KeptSums:
        return KeptSums(*(at + new - old for at, new, old in zip(self._sums, more, less, strict=True)))

    def _count(self, node: KeptBlock) -> KeptSums:
        idle_bytes = sum(page.num_bytes for page in self._idle(node))
        if any(page.users > page.num_holds + 1 for page in node.pages if page is not None):
            return KeptSums(idle_bytes)
        kept = sum(page.num_bytes for page in (*node.pages, *node.states) if page is not None)
        return KeptSums(idle_bytes, kept, len(node.token_ids))

    def _idle(self, node: KeptBlock) -> list[Page]:
        """Returns the pages that nobody else uses: all, or those of windows that others have gone on behind."""
        pages = [page for page in (*node.pages, *node.states) if page is not None]
        idle, groups = [page for page in pages if page.users == 1], self.layout.groups
        if len(idle) == len(pages):
            return idle
        return [page for page in idle if page.group < len(groups) and groups[page.group].window is not None]

    def _reclaim(self, num_pages: int) -> bool:
        """Makes about so many idle pages free, those of the least recently used blocks, then those of guesses."""
        num_free, found = 0, list[tuple[KeptBlock, list[Page], bool]]()
        for node in self._nodes.values():
            idle = self._idle(node)
            is_whole = len(idle) == sum(page is not None for page in (*node.pages, *node.states))
            if idle or is_whole:
                found.append((node, idle, is_whole))
            num_free += len(idle)
            if num_free >= max(num_pages, _RECLAIMED):
                break
        for node, idle, is_whole in found:
            if is_whole:
                self._remove(node)
            else:
                node.pages = [None if page in idle else page for page in node.pages]
                self._let_go(idle)
        return num_free > 0 or any(sequence.drop_spares() for sequence in self.running)

    # How much of a prompt is there.

    def _found(self, key: tuple[Owner, bytes]) -> KeptBlock | None:
        node = self._nodes.get(key)
        return None if node is None or node.expires_at <= time.monotonic() else node

    def _continuing(self, key: tuple[Owner, bytes]) -> list[KeptBlock]:
        """Returns the nodes that continue one."""
        now = time.monotonic()
        return [node for node in self._children.get(key, ()) if node.expires_at > now]

    def _path(self, owner: Owner, names: Sequence[bytes], token_ids: TokenIds) -> list[KeptBlock]:
        """Returns the blocks that a prompt begins with. A name is no proof: tokens are compared."""
        path: list[KeptBlock] = []
        for number, name in enumerate(names):
            node, start = self._found((owner, name)), number * self._block_size
            if node is None or not np.array_equal(node.token_ids, token_ids[start : start + self._block_size]):
                break
            path.append(node)
        return path

    def _part(
        self, owner: Owner, path: Sequence[KeptBlock], token_ids: TokenIds
    ) -> tuple[int, Sequence[Page | None], int, KVSequence | None]:
        """Returns how many tokens behind the path of a prompt are there, in part of a block, the pages with them, how
        many tokens of the prompt will be there, and the sequence that will have them."""
        parent, start = path[-1].name if path else owner.root, len(path) * self._block_size
        rest, later, awaited = token_ids[start:], 0, None
        found: list[tuple[int, Sequence[Page | None]]] = [
            (common_prefix_length(node.token_ids, rest), node.pages) for node in self._continuing((owner, parent))
        ]
        for one in self.running:
            if one.owner == owner:
                common = min(common_prefix_length(one.token_ids, token_ids), one.num_exact)
                if one.num_ready < common > later:
                    later, awaited = common, one
                ready = min(common, one.num_ready, start + self._block_size - 1) - start
                if ready > 0:
                    found.append((ready, one.block(len(path))))
        common, pages = max(found, key=lambda one: one[0], default=(0, ()))
        return common, pages, later, awaited

    def _end_of(self, owner: Owner, names: Sequence[bytes], token_ids: TokenIds) -> Sequence[Page | None] | None:
        """Returns the last page of an equal prompt, whose end is not that of a block; None if there is none."""
        if (node := self._found((owner, self._end_name(owner, names, token_ids)))) is not None:
            return node.pages
        for one in self.running:
            is_there = one.owner == owner and one.num_exact == len(token_ids) <= one.num_ready
            if is_there and np.array_equal(one.token_ids[: one.num_exact], token_ids):
                return one.block(len(names))
        return None

    def _with_states(self, owner: Owner, path: Sequence[KeptBlock], token_ids: TokenIds, most: int) -> Prefix:
        """Returns the longest prefix, of at most `most` tokens, at whose end the states are. Models on the grid go on
        from the end of a block, or from that of the prompt, as its logits are there."""
        is_exact = self.layout.exact_at == "token"
        for num_blocks in range(len(path), -1, -1):
            parent, start = path[num_blocks - 1].name if num_blocks else owner.root, num_blocks * self._block_size
            ends = [
                node
                for node in self._continuing((owner, parent))
                if node.states
                and node.end <= most
                and (is_exact or node.end in (start, len(token_ids)))
                and np.array_equal(node.token_ids, token_ids[start : node.end])
            ]
            for node in sorted(ends, key=lambda one: -one.end):
                pages = self._pages(path[:num_blocks], node.pages, node.end)
                if pages is not None:
                    self._nodes.move_to_end((owner, node.name))
                    return Prefix(node.end, pages, node.states)
        return Prefix()

    def _pages(
        self, path: Sequence[KeptBlock], part: Sequence[Page | None], end: int
    ) -> list[list[Page | None]] | None:
        """Returns the pages of the first `end` tokens, by group; None if some are missing. `part` has those behind the
        path."""
        num_pages, found = -(-end // self._block_size), list[list[Page | None]]()
        for number, group in enumerate(self.layout.groups):
            first = group.first_needed(end) // self._block_size
            pages: list[Page | None] = [None] * min(first, num_pages)
            pages += [path[at].pages[number] if at < len(path) else part[number] for at in range(first, num_pages)]
            if None in pages[first:]:
                return None
            found.append(pages)
        return found

    def _end_name(self, owner: Owner, names: Sequence[bytes], token_ids: TokenIds) -> bytes:
        rest = token_ids[len(names) * self._block_size :]
        return block_hash(owner.secret, names[-1] if names else owner.root, rest, b"e")


def _make_secret(pages: Iterable[Page | None]) -> None:
    for page in pages:
        if page is not None:
            page.is_secret = True

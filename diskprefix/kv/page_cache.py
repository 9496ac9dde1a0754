"""The memory of sequences: what a prompt begins with, and what others begin with of it.

A prompt begins with the pages of its longest prefix in memory: of blocks that are kept by name (`kept_blocks`), and of
sequences that run. A complete block gets its name as soon as it is computed or restored. The end of a sequence, behind
its last complete block, is found among the blocks that continue that one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from diskprefix.errors import ContextTooLong, NotReady
from diskprefix.kv.kept_blocks import KeptBlock, KeptBlocks, make_secret
from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.kv.pages import PagePool
from diskprefix.kv.prefix_match import PrefixMatch, PrefixMatcher, SharedPrefix, end_name
from diskprefix.kv.sequence import KVSequence, Owner, Prefix
from diskprefix.kv.sizes import STEP_TOKENS, longest_within
from diskprefix.tokens import LEAST_TOKENS, TokenIds, TokenPath, floor_to_grid
from diskprefix.units import format_size
from diskprefix.values import CacheOptions


class Later(NamedTuple):
    """The wait of a prompt: `sequence`, of this `owner`, is about to have the state of its first `num_tokens` tokens.
    `block` is the name of the first complete block with which the wait is over, None if there is none."""

    sequence: KVSequence
    owner: Owner
    num_tokens: int
    block: bytes | None


class NoRoom(NamedTuple):
    """The wait of a prompt for memory, while others run: the sizes when it got none."""

    used_bytes: int
    idle_bytes: int
    num_blocks: int
    room_bytes: int


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
        self.kept = KeptBlocks(layout, self.pool)
        self.running: dict[KVSequence, SharedPrefix] = {}
        self._matcher = PrefixMatcher(layout, block_size, self.kept, self.running)
        self.disk_hangs = False
        """The disk does not answer: what reads it may keep pages for ever."""
        self._abandoned: set[KVSequence] = set()
        """Sequences that nothing computes any more. Threads that hang may still write to their pages."""
        self._block_size = block_size
        self._keeps = keeps
        self._purged_at: bytes | None = b""
        """The last purge that is known of; empty until `drop_gone` is first called, before anything is begun."""
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

    def match_prefix(self, owner: Owner, path: TokenPath, *, computes_last: bool = False) -> PrefixMatch:
        """Returns the longest beginning of a prompt that a sequence can go on from. For `computes_last` see `begin`."""
        with self.pool.lock:
            return self._matcher.match(owner, path, computes_last=computes_last)

    def begin(
        self,
        owner: Owner | None,
        token_ids: TokenIds,
        *,
        computes_last: bool = False,
        expires_at: float = math.inf,
        is_shared: bool = True,
    ) -> KVSequence | Later | None:
        """Returns a sequence with room for a prompt, which begins with what is there of it; None if others must end
        first, a `Later` if a sequence that runs is about to have more of it. Only prompts of the same `owner` begin
        with its pages; none without an owner, or if it is not `is_shared`. With `computes_last`, the last token is left
        to compute in any case. For `expires_at` see `SharedPrefix`. Raises `ContextTooLong` if the prompt never fits,
        and `NotReady` if it does not before a restore has given its pages back that the disk holds up."""
        pool, needed = self.pool, self.pool.sequence_bytes(len(token_ids))
        if needed > pool.limit_bytes:
            raise ContextTooLong(
                f"{len(token_ids)} tokens need {format_size(needed)} of KV memory, and --kv-memory allows "
                f"{format_size(pool.limit_bytes)}; use a shorter prompt or raise --kv-memory"
            )
        with pool.lock:
            found, path = PrefixMatch(), TokenPath(0, b"", token_ids, self._block_size)
            if owner is not None:
                path = owner.path(token_ids, self._block_size)
                found = self.match_prefix(owner, path, computes_last=computes_last)
            if found.awaited is not None and found.later >= found.prefix.num_tokens + LEAST_TOKENS:
                return self._later(path, found.awaited, found.later)
            if found.prefix.num_tokens < LEAST_TOKENS:
                found = PrefixMatch()
            shared = {page for of in found.prefix.pages for page in of if page is not None}
            missing = needed - sum(page.num_bytes for page in shared)
            excess = missing - pool.room_bytes
            if self.running and excess > 0 and excess > self._idle_bytes():
                return None
            sequence = self._start_sequence(found.prefix, len(token_ids))
            if sequence is None and owner is not None and found.prefix.num_tokens:
                # The copies of its last page and of its states take more than there is.
                end = floor_to_grid(found.prefix.num_tokens, self._block_size)
                found = (
                    PrefixMatch()
                    if self.layout.states
                    else self.match_prefix(owner, path.extended(token_ids[: end + 1]), computes_last=True)
                )
                sequence = self._start_sequence(found.prefix, len(token_ids))
            is_held = any(hold.pages for hold in pool.holds)
            if sequence is None and (self.running or (is_held and not self.disk_hangs)):
                return None
            if sequence is None and (self._abandoned or is_held):
                raise held_up()
            if sequence is None:
                raise pool.too_long(len(token_ids))
            num_ready = found.prefix.num_tokens
            logits = found.logits if num_ready == len(token_ids) else None
            num_named = num_ready // self._block_size
            shares = SharedPrefix(owner if is_shared else None, path, expires_at, num_ready, num_named, logits)
            self.running[sequence] = shares
            self._use(shares)
            return sequence

    def no_room(self) -> NoRoom:
        """Returns the wait of a prompt for which `begin` has just found no memory."""
        with self.pool.lock:
            pool = self.pool
            return NoRoom(pool.used_bytes, self._idle_bytes(), len(self.kept.blocks), pool.room_bytes)

    def is_later(self, later: Later | NoRoom) -> bool:
        """Returns whether what a prompt waits for is still to come. If not, `begin` tells."""
        if isinstance(later, NoRoom):
            # What the device has free changes all the time. Only more of it helps.
            now = self.no_room()
            return bool(self.running) and now[:-1] == later[:-1] and now.room_bytes <= later.room_bytes
        with self.pool.lock:
            one = self.running.get(later.sequence)
            if one is None or one.owner != later.owner or (later.owner, later.block) in self.kept.blocks:
                return False
            return one.num_ready + LEAST_TOKENS <= later.num_tokens

    def _later(self, path: TokenPath, awaited: KVSequence, num_tokens: int) -> Later:
        owner = self.running[awaited].owner
        assert owner is not None, "nobody waits for a sequence that is not shared"
        # As long as this block has no name, the prompt shares too few of them.
        end = floor_to_grid(num_tokens - LEAST_TOKENS, self._block_size) + self._block_size
        number = end // self._block_size
        return Later(awaited, owner, num_tokens, path.parent(number) if 0 < number <= path.num_blocks else None)

    def _start_sequence(self, prefix: Prefix, num_tokens: int) -> KVSequence | None:
        # Taking pages must not free those.
        held = [page for of in (*prefix.pages, prefix.states) for page in of]
        self.pool.hold(held)
        try:
            sequence = KVSequence(self.pool)
            first_step = min(num_tokens, prefix.num_tokens + STEP_TOKENS)
            if sequence.begin_with(prefix) and sequence.take_pages(num_tokens) and sequence.make_room(first_step):
                return sequence
            sequence.close()
        except ContextTooLong:
            # Not even its states have room.
            pass
        finally:
            self.pool.release(held)
        return None

    # Others find what it computes.

    def set_ready(self, sequence: KVSequence, num_tokens: int, token_ids: Callable[[], TokenIds] | None = None) -> None:
        """Has others find the first `num_tokens` tokens of a sequence: they are computed, and right. Complete blocks
        get their names. `token_ids` returns the tokens that are computed, which is asked for when a block behind the
        prompt is complete. Of a model on the grid, others find the prompt only. During a fetch, which may take back
        what the sequence has, `num_tokens` is 0."""
        shares, size = self.running[sequence], self._block_size
        shares.num_ready = num_tokens
        if shares.owner is None or num_tokens // size <= shares.num_named:
            return
        if token_ids is not None and num_tokens > len(shares.path.token_ids) and self.layout.exact_at == "token":
            shares.path = shares.path.extended(token_ids())
        end = min(num_tokens // size, shares.path.num_blocks)
        if end > shares.num_named:
            self._name(sequence, shares, shares.num_named, end)
            shares.num_named = end

    def name_restored(self, sequence: KVSequence, number: int) -> None:
        """Gives a block that was restored its name. For any thread while a fetch fills the sequence."""
        with self.pool.lock:
            if (shares := self.running.get(sequence)) is not None:
                self._name(sequence, shares, number, number + 1)

    def keep_logits(self, sequence: KVSequence, logits: torch.Tensor) -> None:
        """Keeps the next-token logits, shape [vocab], at the end of a sequence's prompt, which is all of its tokens."""
        one = self.running[sequence]
        if one.owner is not None and logits.isfinite().all():
            with self.pool.lock:
                self.kept.keep_logits(one.owner, end_name(one.path), logits, one.expires_at)

    def keep_prompt(self, sequence: KVSequence) -> None:
        """Keeps the state at the end of a sequence's prompt, which is all of its tokens, for the other replies of its
        request: the next step changes states in place. Without memory for a copy, each of them computes the prompt."""
        one = self.running[sequence]
        if not self.layout.states or not _settle(sequence):
            return
        with self.pool.lock:
            copied = self._start_sequence(sequence.prefix(), 0)
            if copied is not None:
                self._keep_end(copied, one, one.path)
                copied.close()

    def end(
        self,
        sequence: KVSequence,
        *,
        keep: bool,
        token_ids: TokenIds | None = None,
        expires_at: float | None = None,
        options: CacheOptions | None = None,
    ) -> None:
        """Ends a sequence. `keep`: a later prompt may go on from its last token. `token_ids` are its tokens, without
        which others find no more than before. `expires_at` is the time at which what it leaves expires. `options` are
        those of its request, if the state is to be saved when the process ends."""
        keep = keep and _settle(sequence)
        with self.pool.lock:
            shares = self.running.pop(sequence, None)
            self._abandoned.discard(sequence)
            if keep and shares is not None and shares.owner is not None:
                if expires_at is not None:
                    shares.expires_at = expires_at
                if token_ids is not None:
                    most = len(token_ids) if self.layout.exact_at == "token" else len(shares.path.token_ids)
                    shares.path, shares.num_ready = shares.path.extended(token_ids[:most]), len(token_ids)
                path = shares.path.extended(shares.path.token_ids[: shares.num_ready])
                self._name(sequence, shares, shares.num_named, path.num_blocks)
                shares.num_named = max(shares.num_named, path.num_blocks)
                self._keep_end(sequence, shares, path, options)
                self._use(shares)
            sequence.close()
            if not self._keeps:
                self.forget_idle()

    def abandon(self, sequence: KVSequence) -> None:
        """Takes a sequence out of those that run. Its pages stay until `end`. Nobody waits for what it will have."""
        with self.pool.lock:
            del self.running[sequence]
            self._abandoned.add(sequence)

    def forget(self, sequence: KVSequence) -> None:
        """Forgets the names of a sequence that failed: what it computed may be the reason."""
        with self.pool.lock:
            shares = self.running[sequence]
            if shares.owner is not None:
                self.kept.remove_names(shares.owner, shares.path.block_names[: shares.num_named])
            shares.owner = None

    def forget_private(self, private: bytes) -> None:
        """Forgets all of a request that shares nothing (see `Owner`), which has ended."""
        with self.pool.lock:
            self.kept.remove_private(private)

    def forget_idle(self) -> None:
        """Forgets what no sequence uses."""
        with self.pool.lock:
            self.kept.remove_unused({page for sequence in self._sequences for page in sequence.pages()})

    def drop_gone(self, purged_at: bytes | None) -> None:
        """Forgets what has expired, and what is of before the last purge. Its content does not stay in memory when its
        last user has ended."""
        is_purged, self._purged_at = self._purged_at not in (purged_at, b""), purged_at
        if not is_purged and time.monotonic() < self.kept.expires_at:
            return
        with self.pool.lock:
            self.kept.remove_gone(purged_at)
            if is_purged:
                for sequence in self._sequences:
                    shares = self.running.get(sequence)
                    # A sequence without an owner may have begun with what was purged.
                    if shares is None or shares.owner is None or shares.owner.purged_at != purged_at:
                        sequence.make_secret()
                        if shares is not None:
                            shares.owner = None
                for hold in self.pool.holds:
                    make_secret(hold.pages)
                self.pool.wipe()

    def resume(self, block: KeptBlock) -> KVSequence | None:
        """Returns a sequence with the state of one that has ended, or of models on the grid, with that up to its last
        block; None if that is no longer there."""
        with self.pool.lock:
            if (token_ids := self.kept.token_ids_of(block)) is None:
                return None
            path = block.owner.path(np.append(token_ids, token_ids[-1:]), self._block_size)
            prefix = self.match_prefix(block.owner, path).prefix
            is_there = prefix.num_tokens == len(token_ids) or (prefix.num_tokens and self.layout.is_sliceable)
            sequence = self._start_sequence(prefix, 0) if is_there else None
            if sequence is not None:
                self.running[sequence] = SharedPrefix(None, path.extended(token_ids), math.inf)
            return sequence

    def stats(self) -> dict[str, int]:
        """Returns sizes in bytes, the number of sequences that run, and the tokens of blocks that none of them uses."""
        with self.pool.lock:
            sums = self.kept.sums()
            return {
                "limit_bytes": self.pool.limit_bytes,
                "used_bytes": self.pool.used_bytes,
                "kept_bytes": sums.kept_bytes,
                "kept_tokens": sums.kept_tokens,
                "running": len(self.running),
            }

    def sequences(self) -> list[dict[str, Any]]:
        """Returns the tokens and bytes of sequences: those that run, then those that ended, the latest first."""
        with self.pool.lock:
            running = [(one.num_ready, True) for one in self.running.values()]
            counts = [*running, *((block.end, False) for block in self.kept.ended())]
            of_bytes = self.pool.sequence_bytes
            return [{"tokens": count, "num_bytes": of_bytes(count), "busy": is_busy} for count, is_busy in counts]

    def check(self) -> list[str]:
        """Returns what is wrong: users against lists, names against tokens, what is free, and the sums."""
        with self.pool.lock:
            users = [page for block in self.kept.blocks.values() for page in block.all_pages()]
            of_sequences = (page for one in self._sequences for page in one.pages())
            return self.pool.check([*users, *of_sequences]) + self.kept.check()

    @property
    def _sequences(self) -> set[KVSequence]:
        return self.running.keys() | self._abandoned

    def _use(self, shares: SharedPrefix) -> None:
        """Records a use of all blocks of a sequence, the last one first."""
        if shares.owner is not None:
            for name in reversed(shares.path.block_names[: shares.num_named]):
                self.kept.use(shares.owner, name, shares.expires_at)

    def _name(self, sequence: KVSequence, shares: SharedPrefix, first: int, end: int) -> None:
        size, path = self._block_size, shares.path
        with self.pool.lock:
            # A purge takes the owner away.
            if (owner := shares.owner) is not None:
                for number in range(first, end):
                    start, parent, name = number * size, path.parent(number), path.parent(number + 1)
                    # A copy: a part of an array keeps all of it.
                    block, pages = path.token_ids[start : start + size].copy(), sequence.block(number)
                    self.kept.add(KeptBlock(owner, name, parent, start, block, pages, shares.expires_at))

    def _keep_end(
        self, sequence: KVSequence, shares: SharedPrefix, path: TokenPath, options: CacheOptions | None = None
    ) -> None:
        owner, token_ids, start = shares.owner, path.token_ids, path.num_blocks * self._block_size
        if owner is None or not len(token_ids) or (self.layout.states and sequence.num_tokens != len(token_ids)):
            # Nothing goes on from there.
            return
        parent = path.parent(path.num_blocks)
        if start == len(token_ids) and not self.layout.states:
            if (last := self.kept.blocks.get((owner, parent))) is not None:
                last.options = options or last.options
            return
        pages = sequence.block(path.num_blocks) if start < len(token_ids) else []
        name, rest = end_name(path), token_ids[start:].copy()
        self.kept.add(KeptBlock(owner, name, parent, start, rest, pages, shares.expires_at, sequence.states, options))

    def _idle_bytes(self) -> int:
        spares = sum(page.num_bytes for sequence in self.running for page in sequence.idle_spares)
        return self.kept.sums().idle_bytes + spares

    def _reclaim(self, num_pages: int) -> bool:
        """Makes about so many idle pages free: of kept blocks, then of guesses."""
        return self.kept.reclaim(num_pages) or any(sequence.drop_spares() for sequence in self.running)


def _settle(sequence: KVSequence) -> bool:
    """Completes the memory of a draft layer, before others read the sequence. Returns False without memory for it."""
    try:
        sequence.settle()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True

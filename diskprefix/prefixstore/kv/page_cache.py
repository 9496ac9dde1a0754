"""The memory of sequences, which share the pages of equal prefixes.

A prompt begins with the pages of its longest prefix in memory: pages of blocks that are kept by name (`kept_blocks`),
and of running sequences. A complete block gets its name as soon as it is computed or restored. The end of a sequence is
kept as a child of the last complete block.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from diskprefix.errors import ContextTooLong, NotReady
from diskprefix.prefixstore.kv.kept_blocks import KeptBlock, KeptBlocks, make_secret
from diskprefix.prefixstore.kv.layout import Layout, is_out_of_memory
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.prefix_match import PrefixMatch, PrefixMatcher, SharedPrefix, end_name
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner, Prefix
from diskprefix.prefixstore.kv.sizes import STEP_TOKENS, longest_within
from diskprefix.prefixstore.store.epochs import Purges
from diskprefix.printable import first_line
from diskprefix.tokens import LEAST_TOKENS, Logits, TokenIds, TokenPath, floor_to_grid
from diskprefix.units import format_size
from diskprefix.values import CacheOptions

log = logging.getLogger("diskprefix")


class PrefixWait(NamedTuple):
    """A prompt waits for a `sequence` of `owner`, which will have the state of the prompt's first `num_tokens` tokens.
    The wait ends when the block with the name `block` is complete. `block` is None if no block ends the wait."""

    sequence: KVSequence
    owner: Owner
    num_tokens: int
    block: bytes | None


class MemoryWait(NamedTuple):
    """A prompt waits for memory that others use. Has the sizes at the time when there was too little."""

    used_bytes: int
    idle_bytes: int
    num_blocks: int
    room_bytes: int


def memory_held() -> NotReady:
    """Returns the error of a request whose memory is held by reads or writes that hang."""
    return NotReady("the KV memory that is missing is being read or written, and the disk does not answer")


class PageCache:
    """The pages of one model, by sequence and by name, within `limit_bytes` and the free memory (in bytes) that
    `free_bytes` returns. `block_size` is in tokens. Without `keeps`, pages that no sequence uses are freed at once. For
    the engine's thread; `name_restored` and `stop_populating` are for any thread."""

    def __init__(
        self,
        layout: Layout,
        *,
        block_size: int,
        limit_bytes: int,
        free_bytes: Callable[[], int],
        keeps: bool = True,
    ) -> None:
        self.layout = layout
        self.pool = PagePool(layout, block_size=block_size, limit_bytes=limit_bytes, free_bytes=free_bytes)
        self.pool.reclaim, self.pool.idle_bytes = self._reclaim, self._idle_bytes
        self.kept = KeptBlocks(layout, self.pool)
        self.running: dict[KVSequence, SharedPrefix] = {}
        self._matcher = PrefixMatcher(layout, block_size, self.kept, self.running)
        self.disk_hangs = False
        """The disk does not answer: reads may hold pages forever."""
        self._abandoned: set[KVSequence] = set()
        """Sequences that no longer run, but a read that hangs may still write to their pages."""
        self._block_size = block_size
        self._keeps = keeps
        self._purges: Purges | None = None
        """The purges at the last call of `forget_expired`."""
        self._is_idle = True
        """True until the first request: until then, pages are populated ahead."""

    def longest(self, max_tokens: int) -> int:
        """Returns the length of the longest sequence, at most `max_tokens`, that fits alone."""
        return longest_within(self.pool.limit_bytes, self.pool.sequence_bytes, max_tokens, self._block_size)

    def make_ahead(self, num_bytes: int, max_tokens: int) -> None:
        """Populates pages for at most `num_bytes` and `max_tokens` on its own thread, until `stop_populating`."""
        affordable = min(num_bytes, self.pool.room_bytes // 2) // max(self.layout.bytes_per_token, 1)
        self.pool.make_ahead(min(max_tokens, affordable), lambda: self._is_idle)

    def stop_populating(self) -> None:
        """Stops populating pages ahead, because the first request has come. While a page is populated, the process
        cannot map memory, and a tokenizer maps memory hundreds of times."""
        self._is_idle = False

    # A sequence begins.

    def match_prefix(self, owner: Owner, path: TokenPath, *, computes_last: bool = False) -> PrefixMatch:
        """Returns the longest prefix of a prompt that a sequence can begin with. For `computes_last` see
        `begin_sequence`."""
        with self.pool.lock:
            return self._matcher.match(owner, path, computes_last=computes_last)

    def begin_sequence(
        self,
        owner: Owner | None,
        token_ids: TokenIds,
        *,
        computes_last: bool = False,
        expires_at: float = math.inf,
        is_shared: bool = True,
    ) -> KVSequence | PrefixWait | MemoryWait:
        """Returns a sequence with room for a prompt. The sequence begins with the longest prefix of the prompt in
        memory. Returns a `PrefixWait` if a running sequence will soon have a longer prefix, and a `MemoryWait` if other
        sequences must end first. Only prompts of the same `owner` may share pages of the sequence; no prompt may if
        `owner` is None or `is_shared` is False. With `computes_last`, the last token remains to be computed in any
        case. For `expires_at` see `SharedPrefix`. Raises `ContextTooLong` if the prompt can never fit, and `NotReady`
        if a read that hangs holds the memory for it, or if the kernel refuses memory."""
        pool, needed = self.pool, self.pool.sequence_bytes(len(token_ids))
        if needed > pool.limit_bytes:
            raise ContextTooLong(
                f"{len(token_ids)} tokens need {format_size(needed)} of KV memory, and --kv-memory allows "
                f"{format_size(pool.limit_bytes)}; use a shorter prompt or raise --kv-memory"
            )
        with pool.lock:
            if owner is None:
                match, path = PrefixMatch(), TokenPath(0, b"", token_ids, self._block_size)
            else:
                path = owner.path(token_ids, self._block_size)
                match = self.match_prefix(owner, path, computes_last=computes_last)
            if (wait := self._prefix_wait(match, path)) is not None:
                return wait
            if match.prefix.num_tokens < LEAST_TOKENS:
                match = PrefixMatch()
            shared = {page for of_group in match.prefix.pages for page in of_group if page is not None}
            missing = needed - sum(page.num_bytes for page in shared)
            if self.running and missing > pool.room_bytes + self._idle_bytes():
                return self._memory_wait()
            sequence = self._start_sequence(match.prefix, len(token_ids))
            if sequence is None and owner is not None and match.prefix.num_tokens:
                # There is no memory for copies of the prefix's last page and states.
                stop = floor_to_grid(match.prefix.num_tokens, self._block_size)
                match = (
                    PrefixMatch()
                    if self.layout.states
                    else self.match_prefix(owner, path.extended(token_ids[: stop + 1]), computes_last=True)
                )
                sequence = self._start_sequence(match.prefix, len(token_ids))
            if sequence is None:
                return self._wait_or_fail(len(token_ids))
            num_ready = match.prefix.num_tokens
            logits = match.logits if num_ready == len(token_ids) else None
            num_named = num_ready // self._block_size
            shares = SharedPrefix(owner if is_shared else None, path, expires_at, num_ready, num_named, logits)
            self.running[sequence] = shares
            self._mark_used(shares)
            return sequence

    def must_wait(self, wait: PrefixWait | MemoryWait) -> bool:
        """Returns False if `begin_sequence` might now return something other than `wait`."""
        with self.pool.lock:
            if isinstance(wait, MemoryWait):
                # The free memory of the machine changes all the time. Only an increase ends the wait.
                now = self._memory_wait()
                return bool(self.running) and now[:-1] == wait[:-1] and now.room_bytes <= wait.room_bytes
            shares = self.running.get(wait.sequence)
            if shares is None or shares.owner != wait.owner or (wait.owner, wait.block) in self.kept.blocks:
                return False
            return shares.num_ready + LEAST_TOKENS <= wait.num_tokens

    def _prefix_wait(self, match: PrefixMatch, path: TokenPath) -> PrefixWait | None:
        """Returns a wait for the sequence that will have a much longer prefix of a prompt; None if there is none."""
        if match.awaited is None or match.later < match.prefix.num_tokens + LEAST_TOKENS:
            return None
        owner = self.running[match.awaited].owner
        assert owner is not None, "nobody waits for a sequence that is not shared"
        # Before this block has a name, the prompt shares too few tokens.
        number = (match.later - LEAST_TOKENS) // self._block_size + 1
        block = path.parent(number) if number <= path.num_blocks else None
        return PrefixWait(match.awaited, owner, match.later, block)

    def _wait_or_fail(self, num_tokens: int) -> MemoryWait:
        """Returns a wait for the memory that a prompt of `num_tokens` lacks. Raises `ContextTooLong` if nobody will
        give it back, and `NotReady` if a read or write that hangs has it or the kernel refuses it."""
        is_held = bool(self._abandoned) or any(hold.pages for hold in self.pool.holds)
        if self.running or (is_held and not self.disk_hangs):
            return self._memory_wait()
        raise memory_held() if is_held else self.pool.lacking(num_tokens)

    def _memory_wait(self) -> MemoryWait:
        pool = self.pool
        return MemoryWait(pool.used_bytes, self._idle_bytes(), len(self.kept.blocks), pool.room_bytes)

    def _start_sequence(self, prefix: Prefix, num_tokens: int) -> KVSequence | None:
        # Taking pages must not free the prefix.
        prefix_pages = [page for of_group in (*prefix.pages, prefix.states) for page in of_group]
        self.pool.hold(prefix_pages)
        try:
            sequence = KVSequence(self.pool)
            first_step = min(num_tokens, prefix.num_tokens + STEP_TOKENS)
            if (
                sequence.begin_with(prefix)
                and sequence.take_prompt_pages(num_tokens)
                and sequence.take_pages_to(first_step)
            ):
                return sequence
            sequence.close()
        except (ContextTooLong, NotReady):
            # There is not even memory for the states.
            pass
        finally:
            self.pool.release_pages(prefix_pages)
        return None

    # Others find its state.

    def set_ready(self, sequence: KVSequence, num_tokens: int, token_ids: Callable[[], TokenIds] | None = None) -> None:
        """Lets other prompts share the first `num_tokens` tokens of a sequence. Their state must be computed and right.
        Complete blocks get their names. `token_ids` returns all tokens of the sequence; it is called when a block after
        the prompt is complete. With a model on the grid, only tokens of the prompt are shared. `num_tokens` is 0 during
        a fetch, because a fetch may shorten the sequence."""
        shares, size = self.running[sequence], self._block_size
        shares.num_ready = num_tokens
        if shares.owner is None or num_tokens // size <= shares.num_named:
            return
        if token_ids is not None and num_tokens > len(shares.path.token_ids) and self.layout.exact_at == "token":
            shares.path = shares.path.extended(token_ids())
        stop = min(num_tokens // size, shares.path.num_blocks)
        if stop > shares.num_named:
            self._name(sequence, shares, shares.num_named, stop)
            shares.num_named = stop

    def name_restored(self, sequence: KVSequence, number: int) -> None:
        """Names a restored block. For any thread while a fetch fills the sequence."""
        with self.pool.lock:
            if (shares := self.running.get(sequence)) is not None:
                self._name(sequence, shares, number, number + 1)

    def keep_logits(self, sequence: KVSequence, logits: Logits) -> None:
        """Keeps the next-token logits, shape [vocab], of a sequence that has exactly its prompt."""
        shares = self.running[sequence]
        if shares.owner is not None and np.isfinite(logits).all():
            with self.pool.lock:
                self.kept.keep_logits(shares.owner, end_name(shares.path), logits, shares.expires_at)

    def keep_prompt(self, sequence: KVSequence) -> None:
        """Keeps a copy of the states of a sequence that has exactly its prompt, for the other replies of the request:
        the next step changes states in place. If there is no memory for a copy, each reply computes the prompt."""
        if not self.layout.states or not _complete_pages(sequence):
            return
        with self.pool.lock:
            shares, copied = self.running[sequence], self._start_sequence(sequence.prefix(), 0)
            if copied is not None:
                self._keep_end(copied, shares, shares.path)
                copied.close()

    def end_sequence(
        self,
        sequence: KVSequence,
        *,
        keep: bool,
        token_ids: TokenIds | None = None,
        expires_at: float | None = None,
        options: CacheOptions | None = None,
    ) -> None:
        """Ends a sequence. With `keep`, later prompts may share its state. If the sequence's tokens, `token_ids`, are
        given, they may also share the state after `num_ready`. The state expires at `expires_at`. `options` of the
        request are given if the state must be saved when the process ends."""
        keep = keep and _complete_pages(sequence)
        with self.pool.lock:
            shares = self.running.pop(sequence, None)
            self._abandoned.discard(sequence)
            try:
                if keep and shares is not None and shares.owner is not None:
                    self._keep(sequence, shares, token_ids, expires_at, options)
                if shares is not None:
                    self._mark_used(shares)
            finally:
                sequence.close()
                if not self._keeps:
                    self.forget_idle()

    def _keep(
        self,
        sequence: KVSequence,
        shares: SharedPrefix,
        token_ids: TokenIds | None,
        expires_at: float | None,
        options: CacheOptions | None,
    ) -> None:
        """Keeps the state of a sequence that ends; see `end_sequence`."""
        if expires_at is not None:
            shares.expires_at = expires_at
        if token_ids is not None:
            stop = len(token_ids) if self.layout.exact_at == "token" else len(shares.path.token_ids)
            shares.path, shares.num_ready = shares.path.extended(token_ids[:stop]), len(token_ids)
        path = shares.path.extended(shares.path.token_ids[: shares.num_ready])
        self._name(sequence, shares, shares.num_named, path.num_blocks)
        shares.num_named = max(shares.num_named, path.num_blocks)
        self._keep_end(sequence, shares, path, options)

    def abandon(self, sequence: KVSequence) -> None:
        """Removes a sequence from the running ones, so that no prompt waits for it. Its pages stay until
        `end_sequence`."""
        with self.pool.lock:
            self._abandoned.add(sequence)
            self._mark_used(self.running.pop(sequence))

    def forget_names(self, sequence: KVSequence) -> None:
        """Forgets the names of a sequence that failed, because its state may be the reason."""
        with self.pool.lock:
            shares = self.running[sequence]
            if shares.owner is not None:
                self.kept.remove_names(shares.owner, shares.path.block_names[: shares.num_named])
            shares.owner = None

    def forget_private(self, private: bytes) -> None:
        """Forgets the blocks of a request that has ended and shares nothing (see `Owner`)."""
        with self.pool.lock:
            self.kept.remove_private(private)

    def forget_idle(self) -> None:
        """Forgets the blocks that no sequence uses."""
        with self.pool.lock:
            self.kept.remove_unused({page for sequence in self._sequences for page in sequence.pages()})

    def forget_expired(self, purges: Purges) -> None:
        """Removes blocks and logits that have expired, or whose tenant was purged since. Their pages are wiped once the
        last users have ended."""
        is_purged, self._purges = self._purges not in (None, purges), purges
        if not is_purged and time.monotonic() < self.kept.expires_at:
            return
        with self.pool.lock:
            self.kept.remove_expired(purges)
            if is_purged:
                for sequence in self._sequences:
                    shares = self.running.get(sequence)
                    # A sequence without an owner may have begun with purged pages.
                    owner = None if shares is None else shares.owner
                    if owner is None or purges.was_purged(owner.tenant, owner.last_purge):
                        sequence.make_secret()
                        if shares is not None:
                            shares.owner = None
                for hold in self.pool.holds:
                    make_secret(hold.pages)
                self.pool.wipe()

    def resume(self, block: KeptBlock) -> KVSequence | None:
        """Returns a sequence with the state at the end of a kept block. For a model on the grid, the sequence may end
        at the last complete block. Returns None if the state is no longer in memory."""
        with self.pool.lock:
            if (token_ids := self.kept.token_ids_of(block)) is None:
                return None
            path = block.owner.path(np.append(token_ids, token_ids[-1:]), self._block_size)
            # Another prompt may be these tokens and the last one again.
            prefix = self.match_prefix(block.owner, path, computes_last=True).prefix
            is_there = prefix.num_tokens == len(token_ids) or (prefix.num_tokens and self.layout.is_sliceable)
            sequence = self._start_sequence(prefix, 0) if is_there else None
            if sequence is not None:
                self.running[sequence] = SharedPrefix(None, path.extended(token_ids), math.inf)
            return sequence

    def stats(self) -> dict[str, int]:
        """Returns sizes in bytes, the number of running sequences, and the tokens of blocks that no sequence uses."""
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
        """Returns the tokens and bytes of the running sequences, then of the ended sequences, the latest first."""
        with self.pool.lock:
            running = [(shares.num_ready, True) for shares in self.running.values()]
            counts = [*running, *((block.end, False) for block in self.kept.sequence_ends())]
            of_bytes = self.pool.sequence_bytes
            return [{"tokens": count, "num_bytes": of_bytes(count), "busy": is_busy} for count, is_busy in counts]

    def check(self) -> list[str]:
        """Checks the users of pages against lists, names against tokens, free pages, and the sums. Returns the
        errors."""
        with self.pool.lock:
            of_blocks = (page for block in self.kept.blocks.values() for page in block.all_pages())
            of_sequences = (page for sequence in self._sequences for page in sequence.pages())
            return self.pool.check([*of_blocks, *of_sequences]) + self.kept.check()

    @property
    def _sequences(self) -> set[KVSequence]:
        return self.running.keys() | self._abandoned

    def _mark_used(self, shares: SharedPrefix) -> None:
        """Records a use of all blocks of a sequence, the last block first. Otherwise a block might be removed before
        its children, which would stay in memory where no prompt finds them."""
        if shares.owner is not None:
            for name in reversed(shares.path.block_names[: shares.num_named]):
                self.kept.mark_used(shares.owner, name, shares.expires_at)

    def _name(self, sequence: KVSequence, shares: SharedPrefix, first: int, stop: int) -> None:
        size, path = self._block_size, shares.path
        with self.pool.lock:
            # A purge sets the owner to None.
            if (owner := shares.owner) is not None:
                for number in range(first, stop):
                    start, parent, name = number * size, path.parent(number), path.parent(number + 1)
                    # A view would keep the whole array in memory.
                    token_ids, pages = path.token_ids[start : start + size].copy(), sequence.block(number)
                    self.kept.add_block(KeptBlock(owner, name, parent, start, token_ids, pages, shares.expires_at))

    def _keep_end(
        self, sequence: KVSequence, shares: SharedPrefix, path: TokenPath, options: CacheOptions | None = None
    ) -> None:
        owner, token_ids, start = shares.owner, path.token_ids, path.num_blocks * self._block_size
        if owner is None or not len(token_ids) or (self.layout.states and sequence.num_tokens != len(token_ids)):
            # No sequence can begin at this position.
            return
        parent = path.parent(path.num_blocks)
        if start == len(token_ids) and not self.layout.states:
            if (last := self.kept.blocks.get((owner, parent))) is not None:
                last.options = options or last.options
            return
        pages = sequence.block(path.num_blocks) if start < len(token_ids) else []
        name, rest = end_name(path), token_ids[start:].copy()
        self.kept.add_block(
            KeptBlock(owner, name, parent, start, rest, pages, shares.expires_at, sequence.states, options)
        )

    def _idle_bytes(self) -> int:
        spares = sum(page.num_bytes for sequence in self.running for page in sequence.idle_spares)
        return self.kept.sums().idle_bytes + spares

    def _reclaim(self, num_pages: int) -> bool:
        """Frees about `num_pages` idle pages of kept blocks, or otherwise the idle spares of a sequence."""
        return self.kept.reclaim(num_pages) or any(sequence.drop_spares() for sequence in self.running)


def _complete_pages(sequence: KVSequence) -> bool:
    """Runs `KVSequence.complete_pages`. Returns False if memory runs out, or if an engine has lost what it computed."""
    try:
        sequence.complete_pages()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            log.warning("[engine] the state of a sequence is not kept: %s", first_line(error))
        return False
    return True

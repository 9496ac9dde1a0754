"""The blocks that memory keeps by name, and the logits at ends of prompts.

The names are those of the store (`tokens.TokenPath`). What no sequence uses stays until its memory is needed: the
least recently used block goes first. A use of a block is one of all blocks before it, as in the store
(`store.eviction`), so a block that continues another one goes before it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from diskprefix.kv.layout import Layout
from diskprefix.kv.pages import Page, PagePool
from diskprefix.kv.sequence import Owner
from diskprefix.tokens import TokenIds, TokenPath, block_hash
from diskprefix.values import CacheOptions

_MOST_LOGITS = 64
"""The logits at ends of prompts that are kept for exact repeats."""
_LOOK_S = 1.0
"""Seconds between two searches for expired blocks: a block that is in use expires later."""
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
    """A block in memory. The end of a sequence, behind its last complete block, is one too: it has fewer tokens or
    none, and the states there. A block is a user of its pages, which are None for groups of which it has none."""

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
    """The options of the request, for the end of a sequence that is saved when the process ends."""
    counted: KeptSums = field(default_factory=KeptSums)
    """What the block adds to the sums over all blocks."""

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)

    def all_pages(self) -> list[Page]:
        return [page for page in (*self.pages, *self.states) if page is not None]


class KeptBlocks:
    """Blocks and logits by owner and name. The caller holds the pool's lock."""

    def __init__(self, layout: Layout, pool: PagePool) -> None:
        self._layout, self._pool, self._block_size = layout, pool, pool.block_size
        self._sums = KeptSums()
        """Of all blocks but those in `pool.changed`, which are counted again when the sums are asked for."""
        self.blocks: OrderedDict[tuple[Owner, bytes], KeptBlock] = OrderedDict()
        """The least recently used first."""
        self._children: dict[tuple[Owner, bytes], list[KeptBlock]] = {}
        """Blocks by the name of the block that they continue."""
        self._private: dict[bytes, set[KeptBlock]] = {}
        """The blocks of requests that share nothing."""
        self._logits: OrderedDict[tuple[Owner, bytes], tuple[torch.Tensor, float]] = OrderedDict()
        """Next-token logits at ends of prompts, shape [vocab], and when they expire."""
        self.expires_at = math.inf
        """A time before which nothing expires, on the clock of `time.monotonic`."""

    # Look-up.

    def find(self, owner: Owner, name: bytes) -> KeptBlock | None:
        """Returns the block that a prompt of `owner` may begin with; None if it is not there or has expired."""
        now = time.monotonic()
        found = (self.blocks.get((source, name)) for source in owner.sources)
        return next((block for block in found if block is not None and block.expires_at > now), None)

    def continuing(self, owner: Owner, parent: bytes) -> list[KeptBlock]:
        """Returns the blocks that continue a block."""
        now = time.monotonic()
        return [
            block
            for source in owner.sources
            for block in self._children.get((source, parent), ())
            if block.expires_at > now
        ]

    def first_blocks(self, owner: Owner, path: TokenPath) -> list[KeptBlock]:
        """Returns the blocks that a prompt begins with. A name is no proof: tokens are compared."""
        found: list[KeptBlock] = []
        for number, name in enumerate(path.block_names):
            block, start = self.find(owner, name), number * self._block_size
            if block is None or not np.array_equal(block.token_ids, path.token_ids[start : start + self._block_size]):
                break
            found.append(block)
        return found

    def logits(self, owner: Owner, name: bytes) -> torch.Tensor | None:
        """Returns the next-token logits, shape [vocab], at the end of a prompt."""
        found = (self._logits.get((source, name)) for source in owner.sources)
        return next((one[0] for one in found if one is not None), None)

    def ended(self) -> list[KeptBlock]:
        """Returns the ends of sequences that have not expired, the latest first."""
        now = time.monotonic()
        return [one for one in reversed(self.blocks.values()) if one.options is not None and one.expires_at > now]

    def token_ids_of(self, block: KeptBlock) -> TokenIds | None:
        """Returns the tokens up to the end of a block; None if not all blocks before it are there."""
        parts = [block.token_ids]
        while block.position:
            before = self.blocks.get((block.owner, block.parent))
            if before is None:
                return None
            block = before
            parts.append(block.token_ids)
        return np.concatenate(parts[::-1])

    # Blocks come and go.

    def add(self, block: KeptBlock) -> None:
        """Adds a block, which becomes a user of its pages. If the block is there already, only the pages that it lacks
        are added to it."""
        key = block.owner, block.name
        known = self.blocks.get(key)
        if known is None:
            self.blocks[key] = block
            self._keep(block, block.all_pages())
            self.expires_at = min(self.expires_at, block.expires_at)
            self._children.setdefault((block.owner, block.parent), []).append(block)
            if block.owner.private:
                self._private.setdefault(block.owner.private, set()).add(block)
            return
        self.use(block.owner, block.name, block.expires_at)
        known.options = block.options or known.options
        for number, page in enumerate(block.pages):
            if page is not None and known.pages[number] is None:
                self._keep(known, [page])
                known.pages[number] = page

    def use(self, owner: Owner, name: bytes, expires_at: float) -> None:
        """Records a use of a block, if it is there."""
        for key in ((source, name) for source in owner.sources):
            if key in self.blocks:
                self.blocks.move_to_end(key)
                self.blocks[key].expires_at = max(self.blocks[key].expires_at, expires_at)

    def keep_logits(self, owner: Owner, name: bytes, logits: torch.Tensor, expires_at: float) -> None:
        """Keeps the next-token logits, shape [vocab], at the end of a prompt."""
        self._logits[owner, name] = logits, expires_at
        self.expires_at = min(self.expires_at, expires_at)
        self._logits.move_to_end((owner, name))
        if len(self._logits) > _MOST_LOGITS:
            self._logits.popitem(last=False)

    def remove(self, block: KeptBlock) -> None:
        del self.blocks[block.owner, block.name]
        siblings = self._children[block.owner, block.parent]
        siblings.remove(block)
        if not siblings:
            del self._children[block.owner, block.parent]
        if block.owner.private:
            self._private[block.owner.private].remove(block)
        self._let_go(block.all_pages())
        self._pool.changed.discard(block)
        self._sums = self._sum(KeptSums(), block.counted)

    def remove_names(self, owner: Owner, names: Iterable[bytes]) -> None:
        """Removes the blocks that have these names."""
        for block in [self.blocks[owner, name] for name in names if (owner, name) in self.blocks]:
            self.remove(block)

    def remove_private(self, private: bytes) -> None:
        """Removes all of a request that shares nothing."""
        for block in list(self._private.get(private, ())):
            self.remove(block)
        self._private.pop(private, None)
        for key in [key for key in self._logits if key[0].private == private]:
            del self._logits[key]

    def remove_unused(self, used: set[Page | None]) -> None:
        """Removes all blocks none of whose pages is among the `used` ones, and the logits."""
        for block in [one for one in self.blocks.values() if used.isdisjoint(one.all_pages())]:
            self.remove(block)
        self._logits.clear()

    def remove_gone(self, purged_at: bytes | None) -> None:
        """Removes what has expired, and what is of before the last purge. Its content does not stay in memory when its
        last user has ended."""
        now = time.monotonic()
        for block in list(self.blocks.values()):
            # The time counts from the end of the last use. Until then an expired block is not found.
            is_over = block.expires_at <= now and not self._is_used(block)
            if is_over or block.owner.purged_at != purged_at:
                make_secret(block.all_pages())
                self.remove(block)
        for key, (_, expires_at) in list(self._logits.items()):
            if key[0].purged_at != purged_at or expires_at <= now:
                del self._logits[key]
        times = [*(block.expires_at for block in self.blocks.values()), *(at for _, at in self._logits.values())]
        self.expires_at = max(min(times, default=math.inf), now + _LOOK_S)

    def reclaim(self, num_pages: int) -> bool:
        """Makes about so many idle pages free, of the least recently used blocks. Returns False if there are none."""
        num_free, found = 0, list[tuple[KeptBlock, list[Page], bool]]()
        for block in self.blocks.values():
            idle = self._idle(block)
            is_whole = len(idle) == len(block.all_pages())
            if idle or is_whole:
                found.append((block, idle, is_whole))
            num_free += len(idle)
            if num_free >= max(num_pages, _RECLAIMED):
                break
        for block, idle, is_whole in found:
            if is_whole:
                self.remove(block)
            else:
                block.pages = [None if page in idle else page for page in block.pages]
                self._let_go(idle)
        return num_free > 0

    def sums(self) -> KeptSums:
        """Returns the sums over all blocks. Counts again only blocks whose pages got or lost a user."""
        while self._pool.changed:
            block: KeptBlock = self._pool.changed.pop()
            before, block.counted = block.counted, self._count(block)
            self._sums = self._sum(block.counted, before)
        return self._sums

    def check(self) -> list[str]:
        """Returns what is wrong: lists that differ, names against tokens, and the sums."""
        blocks, found = list(self.blocks.values()), list[str]()
        listed = [block for of in self._children.values() for block in of]
        if len(listed) != len(blocks) or set(listed) != set(blocks):
            found.append(f"{len(listed)} blocks continue others, of {len(blocks)}")
        for block in blocks:
            mark = b"" if len(block.token_ids) == self._block_size else b"e"
            if block.name != block_hash(block.owner.secret, block.parent, block.token_ids, mark):
                found.append("a block has the name of other tokens")
        counted, exact = self.sums(), KeptSums(*map(sum, zip(*map(self._count, blocks), strict=True)))
        if counted != exact:
            found.append(f"the blocks are counted as {counted}, and are {exact}")
        return found

    def _keep(self, block: KeptBlock, pages: Iterable[Page]) -> None:
        """Makes a block a user of pages."""
        # Of states alone, blocks have no pages.
        self._pool.changed.add(block)
        for page in pages:
            page.kept_in = block
            self._pool.hold([page])

    def _let_go(self, pages: Iterable[Page]) -> None:
        """Ends the use of pages by their block."""
        for page in pages:
            self._pool.release([page])
            page.kept_in = None

    @staticmethod
    def _is_used(block: KeptBlock) -> bool:
        """Returns whether a sequence uses some page of a block."""
        return any(page.users > page.num_holds + 1 for page in block.all_pages())

    def _sum(self, more: KeptSums, less: KeptSums) -> KeptSums:
        return KeptSums(*(at + new - old for at, new, old in zip(self._sums, more, less, strict=True)))

    def _count(self, block: KeptBlock) -> KeptSums:
        idle_bytes = sum(page.num_bytes for page in self._idle(block))
        if any(page.users > page.num_holds + 1 for page in block.pages if page is not None):
            return KeptSums(idle_bytes)
        return KeptSums(idle_bytes, sum(page.num_bytes for page in block.all_pages()), len(block.token_ids))

    def _idle(self, block: KeptBlock) -> list[Page]:
        """Returns the pages of a block that can be made free. That is all of them if nobody else uses one. Otherwise it
        is the unused pages of windows: the sequences that use the rest have gone on behind these."""
        pages, groups = block.all_pages(), self._layout.groups
        idle = [page for page in pages if page.users == 1]
        if len(idle) == len(pages):
            return idle
        return [page for page in idle if page.group < len(groups) and groups[page.group].window is not None]


def make_secret(pages: Iterable[Page | None]) -> None:
    """Has the content of pages not stay when their last users have ended."""
    for page in pages:
        if page is not None:
            page.is_secret = True

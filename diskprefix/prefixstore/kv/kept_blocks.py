"""The blocks that are kept in memory by name, and the logits at the ends of prompts.

Blocks have the names of the store (`tokens.TokenPath`). Blocks that no sequence uses stay until their memory is needed.
Then the least recently used block is removed first. A use of a block is also a use of all blocks before it, as in the
store (`store.eviction`), so a child is removed before its parent.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import Page, PagePool
from diskprefix.prefixstore.kv.sequence import Owner
from diskprefix.prefixstore.store.epochs import Purges
from diskprefix.tokens import Logits, TokenIds, TokenPath, block_hash
from diskprefix.values import CacheOptions

_MAX_LOGITS = 64
"""The maximum number of prompts whose final logits are kept for exact repeats."""
_SEARCH_INTERVAL_S = 1.0
"""The time between two searches for expired blocks. They are repeated because a block that is in use expires later."""
_MIN_RECLAIMED = 8
"""At least this many pages are made free at a time, because the search takes time."""


class KeptSums(NamedTuple):
    """Sums over blocks: the bytes of pages that can be made free, and the bytes and tokens of blocks that no sequence
    uses."""

    idle_bytes: int = 0
    kept_bytes: int = 0
    kept_tokens: int = 0


class KeptBlock(Struct, eq=False):
    """A block in memory, which is a user of its pages; groups without a page have None. The end of a sequence, after
    the last complete block, is a block with fewer tokens or none, and with the states at that position."""

    owner: Owner
    name: bytes
    parent: bytes
    position: int
    token_ids: TokenIds
    pages: list[Page | None]
    expires_at: float
    """The time, on the clock of `time.monotonic`, at which the block expires."""
    states: list[Page] = field(default_factory=list)
    options: CacheOptions | None = None
    """The options of the request, if the block is the end of a sequence that is saved when the process ends."""
    counted: KeptSums = field(default_factory=KeptSums)
    """The part of this block in the sums over all blocks."""

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
        """The sums over all blocks, outdated for the blocks in `pool.changed`; `sums` updates them."""
        self.blocks: OrderedDict[tuple[Owner, bytes], KeptBlock] = OrderedDict()
        """The blocks by owner and name, the least recently used first."""
        self._children: dict[tuple[Owner, bytes], list[KeptBlock]] = {}
        """Blocks by their owner and the name of their parent."""
        self._private: dict[bytes, set[KeptBlock]] = {}
        """The blocks of requests that share nothing."""
        self._logits: OrderedDict[tuple[Owner, bytes], tuple[Logits, float]] = OrderedDict()
        """Next-token logits at ends of prompts, shape [vocab], and when they expire."""
        self.expires_at = math.inf
        """The earliest time at which something expires, on the clock of `time.monotonic`."""

    # Look-up.

    def find(self, owner: Owner, name: bytes) -> KeptBlock | None:
        """Returns the block with this name for prompts of `owner`, or None if no such block is kept or it has
        expired."""
        now = time.monotonic()
        blocks = (self.blocks.get((source, name)) for source in owner.sources)
        return next((block for block in blocks if block is not None and block.expires_at > now), None)

    def children(self, owner: Owner, parent: bytes) -> list[KeptBlock]:
        """Returns the blocks that continue block `parent`, for prompts of `owner`."""
        now = time.monotonic()
        return [
            block
            for source in owner.sources
            for block in self._children.get((source, parent), ())
            if block.expires_at > now
        ]

    def first_blocks(self, owner: Owner, path: TokenPath) -> list[KeptBlock]:
        """Returns the blocks that a prompt begins with. A name is no proof: tokens are compared."""
        blocks: list[KeptBlock] = []
        for number, name in enumerate(path.block_names):
            block, start = self.find(owner, name), number * self._block_size
            if block is None or not np.array_equal(block.token_ids, path.token_ids[start : start + self._block_size]):
                break
            blocks.append(block)
        return blocks

    def logits(self, owner: Owner, name: bytes) -> Logits | None:
        """Returns the next-token logits, shape [vocab], at the end of a prompt; None if they are not kept."""
        entries = (self._logits.get((source, name)) for source in owner.sources)
        return next((entry[0] for entry in entries if entry is not None), None)

    def sequence_ends(self) -> list[KeptBlock]:
        """Returns the ends of sequences that have not expired, the latest first."""
        now = time.monotonic()
        return [end for end in reversed(self.blocks.values()) if end.options is not None and end.expires_at > now]

    def token_ids_of(self, block: KeptBlock) -> TokenIds | None:
        """Returns the tokens up to the end of a block; None if a block before it is missing."""
        parts = [block.token_ids]
        # Bound: positions fall.
        while block.position:
            parent = self.blocks.get((block.owner, block.parent))
            if parent is None:
                return None
            block = parent
            parts.append(block.token_ids)
        return np.concatenate(parts[::-1])

    # Changes.

    def add_block(self, block: KeptBlock) -> None:
        """Adds a block, which becomes a user of its pages. If a block with this name is kept already, that block gets
        the pages that it lacks."""
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
        self.mark_used(block.owner, block.name, block.expires_at)
        known.options = block.options or known.options
        for number, page in enumerate(block.pages):
            if page is not None and known.pages[number] is None:
                self._keep(known, [page])
                known.pages[number] = page

    def mark_used(self, owner: Owner, name: bytes, expires_at: float) -> None:
        """Records a use of a block, unless it is missing."""
        for key in ((source, name) for source in owner.sources):
            if key in self.blocks:
                self.blocks.move_to_end(key)
                self.blocks[key].expires_at = max(self.blocks[key].expires_at, expires_at)

    def keep_logits(self, owner: Owner, name: bytes, logits: Logits, expires_at: float) -> None:
        """Keeps the next-token logits, shape [vocab], at the end of a prompt."""
        self._logits[owner, name] = logits, expires_at
        self.expires_at = min(self.expires_at, expires_at)
        self._logits.move_to_end((owner, name))
        if len(self._logits) > _MAX_LOGITS:
            self._logits.popitem(last=False)

    def remove(self, block: KeptBlock) -> None:
        del self.blocks[block.owner, block.name]
        siblings = self._children[block.owner, block.parent]
        siblings.remove(block)
        if not siblings:
            del self._children[block.owner, block.parent]
        if block.owner.private:
            self._private[block.owner.private].remove(block)
        self._release_pages(block.all_pages())
        self._pool.changed.discard(block)
        self._sums = self._sum(KeptSums(), block.counted)

    def remove_names(self, owner: Owner, names: Iterable[bytes]) -> None:
        """Removes the blocks with these names."""
        for block in [self.blocks[owner, name] for name in names if (owner, name) in self.blocks]:
            self.remove(block)

    def remove_private(self, private: bytes) -> None:
        """Removes the blocks and logits of a request that shares nothing."""
        for block in list(self._private.get(private, ())):
            self.remove(block)
        self._private.pop(private, None)
        for key in [key for key in self._logits if key[0].private == private]:
            del self._logits[key]

    def remove_unused(self, used: set[Page | None]) -> None:
        """Removes the blocks without a page among `used`, and all logits."""
        for block in [block for block in self.blocks.values() if used.isdisjoint(block.all_pages())]:
            self.remove(block)
        self._logits.clear()

    def remove_expired(self, purges: Purges) -> None:
        """Removes blocks and logits that have expired, or whose tenant was purged since. The pages of these blocks are
        wiped once their last users have ended."""
        now = time.monotonic()
        owners = {block.owner for block in self.blocks.values()} | {owner for owner, _ in self._logits}
        gone = {owner for owner in owners if purges.was_purged(owner.tenant, owner.last_purge)}
        for block in list(self.blocks.values()):
            # The time to live counts from the end of the last use, so a used block stays. Look-ups skip it if it has
            # expired.
            is_used = any(page.users > page.num_holds + 1 for page in block.all_pages())
            if (block.expires_at <= now and not is_used) or block.owner in gone:
                make_secret(block.all_pages())
                self.remove(block)
        for key, (_, expires_at) in list(self._logits.items()):
            if key[0] in gone or expires_at <= now:
                del self._logits[key]
        times = [*(block.expires_at for block in self.blocks.values()), *(at for _, at in self._logits.values())]
        self.expires_at = max(min(times, default=math.inf), now + _SEARCH_INTERVAL_S)

    def reclaim(self, num_pages: int) -> bool:
        """Frees about `num_pages` idle pages of the least recently used blocks. Returns False if no page is idle."""
        num_free, idle_pages = 0, list[tuple[KeptBlock, list[Page]]]()
        for block in self.blocks.values():
            idle_pages.append((block, self._idle(block)))
            num_free += len(idle_pages[-1][1])
            if num_free >= max(num_pages, _MIN_RECLAIMED):
                break
        for block, idle in idle_pages:
            if len(idle) == len(block.all_pages()):
                self.remove(block)
            elif idle:
                block.pages = [None if page in idle else page for page in block.pages]
                self._release_pages(idle)
        return num_free > 0

    def sums(self) -> KeptSums:
        """Returns the sums over all blocks. Counts only those blocks again whose pages got or lost a user."""
        while self._pool.changed:
            block: KeptBlock = self._pool.changed.pop()
            before, block.counted = block.counted, self._count(block)
            self._sums = self._sum(block.counted, before)
        return self._sums

    def check(self) -> list[str]:
        """Checks that the lists agree, that names match tokens, and the sums. Returns the errors."""
        blocks, errors = list(self.blocks.values()), list[str]()
        listed = [block for children in self._children.values() for block in children]
        if len(listed) != len(blocks) or set(listed) != set(blocks):
            errors.append(f"{len(listed)} blocks continue others, of {len(blocks)}")
        for block in blocks:
            mark = b"" if len(block.token_ids) == self._block_size else b"e"
            if block.name != block_hash(block.owner.secret, block.parent, block.token_ids, mark):
                errors.append("a block has the name of other tokens")
        counted, exact = self.sums(), KeptSums(*map(sum, zip(*map(self._count, blocks), strict=True)))
        if counted != exact:
            errors.append(f"the blocks are counted as {counted}, and are {exact}")
        return errors

    def _keep(self, block: KeptBlock, pages: Iterable[Page]) -> None:
        """Makes a block a user of pages."""
        # A block with no tokens and no states has no pages.
        self._pool.changed.add(block)
        for page in pages:
            page.kept_in = block
            self._pool.hold([page])

    def _release_pages(self, pages: Iterable[Page]) -> None:
        """Ends the use of pages by their block."""
        for page in pages:
            self._pool.release_pages([page])
            page.kept_in = None

    def _sum(self, more: KeptSums, less: KeptSums) -> KeptSums:
        return KeptSums(*(at + new - old for at, new, old in zip(self._sums, more, less, strict=True)))

    def _count(self, block: KeptBlock) -> KeptSums:
        idle_bytes = sum(page.num_bytes for page in self._idle(block))
        if any(page.users > page.num_holds + 1 for page in block.pages if page is not None):
            return KeptSums(idle_bytes)
        return KeptSums(idle_bytes, sum(page.num_bytes for page in block.all_pages()), len(block.token_ids))

    def _idle(self, block: KeptBlock) -> list[Page]:
        """Returns the pages of a block that can be freed: all pages, if the block is the only user of each. Otherwise
        the unused pages of groups with a window: the sequences that use the other pages have passed them."""
        pages, groups = block.all_pages(), self._layout.groups
        idle = [page for page in pages if page.users == 1]
        if len(idle) == len(pages):
            return idle
        return [page for page in idle if page.group < len(groups) and groups[page.group].window is not None]


def make_secret(pages: Iterable[Page | None]) -> None:
    """Marks pages so that their content is wiped once their last users have ended."""
    for page in pages:
        if page is not None:
            page.is_secret = True

"""Finding the beginning of a prompt among blocks that are kept by name and sequences that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from diskprefix.kv.kept_blocks import KeptBlock, KeptBlocks
from diskprefix.kv.layout import Layout
from diskprefix.kv.pages import Page
from diskprefix.kv.sequence import KVSequence, Owner, Prefix
from diskprefix.tokens import TokenIds, TokenPath, block_hash, common_prefix_length, floor_to_grid


@dataclass(eq=False)
class SharedPrefix:
    """The part of a running sequence that others may begin with."""

    owner: Owner | None
    """Whose prompts may begin with it; nobody's without."""
    path: TokenPath
    """The first tokens that have, or will have, the state that a prefill computes."""
    expires_at: float
    """The time on the clock of `time.monotonic` at which what is computed expires."""
    num_ready: int = 0
    """The tokens that others may begin with. 0 during a fetch, because a damaged block may shorten the sequence."""
    num_named: int = 0
    """The blocks that are kept by name."""
    logits: torch.Tensor | None = None
    """The next-token logits behind all tokens of the prompt, shape [vocab], if it began with all of them."""


@dataclass(frozen=True)
class PrefixMatch:
    """The beginning of a prompt that is in memory. `later`: how many tokens of the prompt will be, once the sequence
    `awaited` has computed them. `logits` are those at the prompt's end, shape [vocab]."""

    prefix: Prefix = field(default_factory=Prefix)
    later: int = 0
    awaited: KVSequence | None = None
    logits: torch.Tensor | None = None


class PrefixMatcher:
    """Finds the beginnings of prompts. The caller holds the pool's lock."""

    def __init__(
        self, layout: Layout, block_size: int, kept: KeptBlocks, running: Mapping[KVSequence, SharedPrefix]
    ) -> None:
        self.layout, self._block_size = layout, block_size
        self._kept, self._running = kept, running

    def match(self, owner: Owner, prompt: TokenPath, *, computes_last: bool = False) -> PrefixMatch:
        """Returns the longest beginning of a prompt that a sequence can go on from. With `computes_last`, the last
        token is computed in any case."""
        size, state_kind, token_ids = self._block_size, self.layout.state_kind, prompt.token_ids
        path = self._kept.first_blocks(owner, prompt)
        logits = None if computes_last else self._kept.logits(owner, end_name(prompt))
        most = len(token_ids) - (logits is None)
        if self.layout.states:
            found = self._with_states(owner, path, token_ids, most)
            logits = logits if found.num_tokens == len(token_ids) else None
            return PrefixMatch(found, found.num_tokens, logits=logits)
        common, part, later, awaited = self._partial_block(owner, path, token_ids)
        if state_kind != "token" and logits is not None and len(token_ids) % size:
            # On the grid, only an equal prompt has its last tokens from the same step.
            equal = self._end_of(owner, prompt)
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

    def _partial_block(
        self, owner: Owner, path: Sequence[KeptBlock], token_ids: TokenIds
    ) -> tuple[int, Sequence[Page | None], int, KVSequence | None]:
        """Returns how many tokens behind the path of a prompt are there, in part of a block, the pages with them, how
        many tokens of the prompt will be there, and the sequence that will have them."""
        parent, start = path[-1].name if path else owner.root, len(path) * self._block_size
        rest, later, awaited = token_ids[start:], 0, None
        found: list[tuple[int, Sequence[Page | None]]] = [
            (common_prefix_length(block.token_ids, rest), block.pages) for block in self._kept.continuing(owner, parent)
        ]
        for sequence, shares in self._running.items():
            if shares.owner in owner.sources:
                common = common_prefix_length(shares.path.token_ids, token_ids)
                if shares.num_ready < common > later:
                    later, awaited = common, sequence
                ready = min(common, shares.num_ready, start + self._block_size - 1) - start
                if ready > 0:
                    found.append((ready, sequence.block(len(path))))
        common, pages = max(found, key=lambda one: one[0], default=(0, ()))
        return common, pages, later, awaited

    def _end_of(self, owner: Owner, prompt: TokenPath) -> Sequence[Page | None] | None:
        """Returns the last page of an equal prompt, whose end is not that of a block; None if there is none."""
        token_ids = prompt.token_ids
        if (block := self._kept.find(owner, end_name(prompt))) is not None:
            return block.pages
        for sequence, shares in self._running.items():
            is_there = shares.owner in owner.sources and len(token_ids) <= shares.num_ready
            if is_there and np.array_equal(shares.path.token_ids, token_ids):
                return sequence.block(prompt.num_blocks)
        return None

    def _with_states(self, owner: Owner, path: Sequence[KeptBlock], token_ids: TokenIds, most: int) -> Prefix:
        """Returns the longest prefix, of at most `most` tokens, at whose end the states are. Models on the grid go on
        from the end of a block, or from that of the prompt, as its logits are there."""
        is_exact = self.layout.exact_at == "token"
        for num_blocks in range(len(path), -1, -1):
            parent, start = path[num_blocks - 1].name if num_blocks else owner.root, num_blocks * self._block_size
            ends = [
                block
                for block in self._kept.continuing(owner, parent)
                if block.states
                and block.end <= most
                and (is_exact or block.end in (start, len(token_ids)))
                and np.array_equal(block.token_ids, token_ids[start : block.end])
            ]
            for block in sorted(ends, key=lambda one: -one.end):
                pages = self._pages(path[:num_blocks], block.pages, block.end)
                if pages is not None:
                    self._kept.blocks.move_to_end((block.owner, block.name))
                    return Prefix(block.end, pages, block.states)
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


def end_name(path: TokenPath) -> bytes:
    """Returns the name of the end of a prompt."""
    rest = path.token_ids[path.num_blocks * path.block_size :]
    return block_hash(path.secret, path.parent(path.num_blocks), rest, b"e")

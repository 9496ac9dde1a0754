"""Finds the longest prefix of a prompt among the blocks that are kept by name and the running sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from diskprefix.prefixstore.kv.kept_blocks import KeptBlock, KeptBlocks
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import Page
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner, Prefix
from diskprefix.tokens import Logits, TokenIds, TokenPath, block_hash, common_prefix_length, floor_to_grid


class SharedPrefix(Struct, eq=False):
    """The part of a running sequence that other prompts may share."""

    owner: Owner | None
    """Only prompts of this owner may share the state; None: no prompt may."""
    path: TokenPath
    """The first tokens whose state is, or will be, the state that a prefill computes."""
    expires_at: float
    """The time on the clock of `time.monotonic` at which the state expires."""
    num_ready: int = 0
    """The number of tokens that other prompts may share. 0 during a fetch, because a damaged block may shorten the
    sequence."""
    num_named: int = 0
    """The number of blocks that are kept by name."""
    logits: Logits | None = None
    """The next-token logits at the end of the prompt, shape [vocab], if the sequence began with the whole prompt."""


class PrefixMatch(Struct, frozen=True):
    """The prefix of a prompt that is in memory. `later` tokens of the prompt will be in memory once the sequence
    `awaited` has computed them. `logits` are the next-token logits at the prompt's end, shape [vocab]."""

    prefix: Prefix = field(default_factory=Prefix)
    later: int = 0
    awaited: KVSequence | None = None
    logits: Logits | None = None


class PrefixMatcher:
    """Finds the prefixes of prompts. The caller holds the pool's lock."""

    def __init__(
        self, layout: Layout, block_size: int, kept: KeptBlocks, running: Mapping[KVSequence, SharedPrefix]
    ) -> None:
        self.layout, self._block_size = layout, block_size
        self._kept, self._running = kept, running

    def match(self, owner: Owner, prompt: TokenPath, *, computes_last: bool = False) -> PrefixMatch:
        """Returns the longest prefix of a prompt that a sequence can begin with. With `computes_last`, the last token
        remains to be computed."""
        size, state_kind, token_ids = self._block_size, self.layout.state_kind, prompt.token_ids
        path = self._kept.first_blocks(owner, prompt)
        logits = None if computes_last else self._kept.logits(owner, end_name(prompt))
        limit = len(token_ids) - (logits is None)
        if self.layout.states:
            prefix = self._match_states(owner, path, token_ids, limit)
            logits = logits if prefix.num_tokens == len(token_ids) else None
            return PrefixMatch(prefix, prefix.num_tokens, logits=logits)
        num_common, last_pages, later, awaited = self._partial_block(owner, path, token_ids)
        if state_kind != "token" and logits is not None and len(token_ids) % size:
            # With a model on the grid, only an equal prompt has computed these last tokens in one step.
            equal = self._last_block(owner, prompt)
            last_pages, limit = (last_pages, limit - 1) if equal is None else (equal, limit)
        for point in (len(path) * size + num_common, *range(len(path) * size, 0, -size)):
            stop = min(point, limit)
            if state_kind != "token" and stop < len(token_ids):
                stop = floor_to_grid(min(stop, len(token_ids) - 1), size)
            pages = self._pages(path, last_pages, stop)
            if pages is not None:
                break
        else:
            stop, pages = 0, []
        later = min(later, len(token_ids) - 1)
        later = later if state_kind == "token" else floor_to_grid(later, size)
        logits = logits if stop == len(token_ids) else None
        return PrefixMatch(Prefix(stop, pages), max(stop, later), awaited, logits)

    def _partial_block(
        self, owner: Owner, path: Sequence[KeptBlock], token_ids: TokenIds
    ) -> tuple[int, Sequence[Page | None], int, KVSequence | None]:
        """Returns, for the block after the path of a prompt, the number of its first tokens that are in memory, and the
        pages that hold them. Also returns the number of the prompt's tokens that a running sequence will have, and that
        sequence."""
        parent, start = path[-1].name if path else owner.root, len(path) * self._block_size
        rest, later, awaited = token_ids[start:], 0, None
        candidates: list[tuple[int, Sequence[Page | None]]] = [
            (common_prefix_length(block.token_ids, rest), block.pages) for block in self._kept.children(owner, parent)
        ]
        for sequence, shares in self._running.items():
            if shares.owner in owner.sources:
                common = common_prefix_length(shares.path.token_ids, token_ids)
                if shares.num_ready < common > later:
                    later, awaited = common, sequence
                ready = min(common, shares.num_ready, start + self._block_size - 1) - start
                if ready > 0:
                    candidates.append((ready, sequence.block(len(path))))
        num_common, pages = max(candidates, key=lambda candidate: candidate[0], default=(0, ()))
        return num_common, pages, later, awaited

    def _last_block(self, owner: Owner, prompt: TokenPath) -> Sequence[Page | None] | None:
        """Returns the pages of the last, partial block of an equal prompt; None if there is no equal prompt."""
        token_ids = prompt.token_ids
        if (block := self._kept.find(owner, end_name(prompt))) is not None:
            return block.pages
        for sequence, shares in self._running.items():
            is_ready = shares.owner in owner.sources and len(token_ids) <= shares.num_ready
            if is_ready and np.array_equal(shares.path.token_ids, token_ids):
                return sequence.block(prompt.num_blocks)
        return None

    def _match_states(self, owner: Owner, path: Sequence[KeptBlock], token_ids: TokenIds, limit: int) -> Prefix:
        """Returns the longest prefix of at most `limit` tokens with states at its end. A model on the grid continues
        only from the end of a block, or from the end of the prompt if its logits are kept."""
        is_exact = self.layout.exact_at == "token"
        for num_blocks in range(len(path), -1, -1):
            parent, start = path[num_blocks - 1].name if num_blocks else owner.root, num_blocks * self._block_size
            ends = [
                block
                for block in self._kept.children(owner, parent)
                if block.states
                and block.end <= limit
                and (is_exact or block.end in (start, len(token_ids)))
                and np.array_equal(block.token_ids, token_ids[start : block.end])
            ]
            for block in sorted(ends, key=lambda end: -end.end):
                pages = self._pages(path[:num_blocks], block.pages, block.end)
                if pages is not None:
                    self._kept.blocks.move_to_end((block.owner, block.name))
                    return Prefix(block.end, pages, block.states)
        return Prefix()

    def _pages(
        self, path: Sequence[KeptBlock], last_pages: Sequence[Page | None], stop: int
    ) -> list[list[Page | None]] | None:
        """Returns the pages of the first `stop` tokens, by group; None if some are missing. `last_pages` are the pages
        of the block after the path."""
        num_pages, by_group = -(-stop // self._block_size), list[list[Page | None]]()
        blocks = [*(block.pages for block in path), last_pages]
        for number, group in enumerate(self.layout.groups):
            first = group.first_needed(stop) // self._block_size
            pages = [block[number] for block in blocks[first:num_pages]]
            if None in pages:
                return None
            by_group.append([*([None] * min(first, num_pages)), *pages])
        return by_group


def end_name(path: TokenPath) -> bytes:
    """Returns the name of the end of a prompt."""
    rest = path.token_ids[path.num_blocks * path.block_size :]
    return block_hash(path.secret, path.parent(path.num_blocks), rest, b"e")

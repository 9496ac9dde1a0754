"""Finds what is deleted with a prompt: the entries that came from it, the seen prompts of its conversation, and the
notes from them.

An entry or a note says only length and digest of its prompt. Which prompt that is, a deleted text tells if it begins
with it, or a seen or saved prompt. What nobody tells is deleted: it may be of the deleted conversation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.ghosts import SeenRecord, seen_prompt
from diskprefix.prefixstore.store.note_record import ENCODED_TEXT, note_prompt
from diskprefix.prefixstore.store.removal import Removal
from diskprefix.prefixstore.store.schema import (
    OWN_KINDS,
    EntryRecord,
    PromptRecord,
    RootRecord,
    decode_record,
    node_num_tokens,
    node_position,
)
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.tree import PrefixTree
from diskprefix.tokens import (
    HASH_BYTES,
    ID_BYTES,
    LEAST_TOKENS,
    NO_PROMPT,
    PromptDigest,
    TokenIds,
    TokenPath,
    common_prefix_length,
)


class GoneText(Struct, frozen=True, eq=False):
    """A stored or seen prompt that a purge removes under a root, which has blocks of `block_size` tokens (0: unknown).
    What stays stored shares its first `num_kept` tokens. `key` is the key of a seen prompt, empty for a stored one."""

    root: bytes
    block_size: int
    token_ids: TokenIds
    num_kept: int
    key: bytes = b""

    def beginnings(self, secret: int, lengths: Iterable[int]) -> Iterator[PromptDigest]:
        """Yields the digests of the prefixes with these lengths. Leaves out prefixes of a seen prompt that a stored
        prompt shares: notes of other turns of that conversation may have come from them."""
        least = self.num_kept if self.key else 0
        wanted = sorted({length for length in lengths if least < length <= len(self.token_ids)})
        return PromptDigest.of_beginnings(secret, self.token_ids, wanted)


class DeletedPrompts:
    """The `chosen` entries and all that is deleted with them. Methods raise `StoreCorrupt`.

    `guesses`: an entry or note whose prompt is not known is deleted too, if that may continue a deleted text.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        roots: Mapping[bytes, RootRecord],
        chosen: Mapping[bytes, EntryRecord],
        *,
        guesses: bool,
    ) -> None:
        self._snapshot, self._roots, self._guesses = snapshot, roots, guesses
        self._secret = snapshot.names().secret
        self._tenants = {self._tenant(entry.root) for entry in chosen.values()}
        self._living = set[tuple[str, PromptDigest]]()
        """Tenants and prompts of the saved entries that stay. What came from these stays with them."""
        self._others = dict[bytes, EntryRecord]()
        """The entries of other kinds that stay."""
        for name, entry in snapshot.entries():
            if name not in chosen and self._tenant(entry.root) in self._tenants:
                if entry.kind in OWN_KINDS:
                    self._living.add(self._source(entry))
                else:
                    self._others[name] = entry
        self._prompts = _KnownPrompts(snapshot, [root for root in roots if self._tenant(root) in self._tenants])
        self._sources = {self._source(entry) for entry in chosen.values()} - self._living
        """Tenants and prompts of the deleted entries."""
        self._chosen = chosen
        self.entries: dict[bytes, EntryRecord] = {**self._following(), **chosen}
        """All deleted entries, the chosen ones last: after a kill, the same purge finds the others again."""

    def _tenant(self, root: bytes) -> str:
        # A root without a record has a tenant of its own.
        return self._roots[root].tenant if root in self._roots else root.hex()

    def _source(self, entry: EntryRecord) -> tuple[str, PromptDigest]:
        return self._tenant(entry.root), entry.came_from

    def _following(self) -> dict[bytes, EntryRecord]:
        """Returns the entries that came from the chosen ones. Takes them from the others."""
        gone, queue = dict[bytes, EntryRecord](), list[tuple[str, TokenIds]]()
        for name, entry in self._chosen.items() if self._others else ():
            queue.append((self._tenant(entry.root), text_of(self._snapshot, name)))
            source = None if entry.kind in OWN_KINDS else self._prompts.find(entry.came_from)
            queue += [] if source is None else [(self._tenant(entry.root), source.token_ids)]
        # Bound: each entry is queued once, or twice with its prompt.
        while queue and self._others:
            tenant, text = queue.pop()
            for other in self._that_follow(tenant, text):
                gone[other] = followed = self._others.pop(other)
                self._sources |= {self._source(followed)} - self._living
                usage = self._snapshot.usage(other)
                if usage is None or not usage.children:
                    # Otherwise its text is the beginning of other prompts.
                    queue.append((tenant, text_of(self._snapshot, other)))
        return gone

    def _that_follow(self, tenant: str, text: TokenIds) -> list[bytes]:
        """Returns the other entries whose prompt begins with a deleted text or continues it, or is that of a deleted
        entry."""
        near = {
            name: entry.came_from
            for name, entry in self._others.items()
            if self._tenant(entry.root) == tenant and self._source(entry) not in self._living
        }
        lengths = sorted({prompt.num_tokens for prompt in near.values() if prompt.num_tokens <= len(text)})
        beginnings = set(PromptDigest.of_beginnings(self._secret, text, lengths))
        return [
            name
            for name, prompt in near.items()
            if (prompt != NO_PROMPT and (tenant, prompt) in self._sources)
            or prompt in beginnings
            or ((prompt.num_tokens > len(text) or prompt == NO_PROMPT) and self._continues(name, prompt, text))
        ]

    def _continues(self, name: bytes, prompt: PromptDigest, text: TokenIds) -> bool:
        """Returns whether the prompt of an entry, which is longer than a deleted text, begins with that."""
        known = self._prompts.find(prompt)
        if known is not None:
            return common_prefix_length(known.token_ids, text) == len(text)
        if self._others[name].kind == "partial":
            own = text_of(self._snapshot, name)
            common = common_prefix_length(own, text)
            if common == len(text) or common < len(own):
                return common == len(text)
        return self._guesses

    def texts(self, removal: Removal) -> Iterator[GoneText]:
        """Yields the texts of the deleted entries, and of the seen prompts that are deleted with them."""
        by_root = defaultdict[bytes, list[GoneText]](list)
        for name, entry in self.entries.items():
            size, token_ids = self._block_size(entry.root), text_of(self._snapshot, name)
            kept = removal.num_kept(TokenPath(self._secret, entry.root, token_ids, size)) if size else 0
            by_root[entry.root].append(GoneText(entry.root, size, token_ids, kept))
        with_texts = set[bytes]()
        for root, of_root in by_root.items():
            yield from of_root
            for text in self._seen(root, of_root, removal) if of_root[0].block_size else ():
                with_texts.add(text.key)
                yield text
        for _, prompt in self._sources:
            seen = self._prompts.find(prompt)
            if seen is not None and seen.key not in with_texts:
                # What was made of it differs.
                root = seen.key[:HASH_BYTES]
                path = TokenPath(self._secret, root, seen.token_ids, self._block_size(root))
                if path.block_size and (kept := removal.num_kept(path)) < len(path.token_ids):
                    yield GoneText(root, path.block_size, path.token_ids, kept, seen.key)

    def _block_size(self, root: bytes) -> int:
        return self._roots[root].block_size if root in self._roots else 0

    def _seen(self, root: bytes, texts: Sequence[GoneText], removal: Removal) -> Iterator[GoneText]:
        """Yields the seen prompts of a root that one of the deleted texts begins with, that begin with one, or that
        share more with one than with what stays stored."""
        size, joins = texts[0].block_size, _Joins(self._snapshot, root, self._secret, texts)
        for key in self._snapshot.keys_under("seen", root):
            with suppress(StoreCorrupt):
                num_tokens, common, shortest = joins.common(key)
                is_part = common == num_tokens or shortest
                if not is_part and common < LEAST_TOKENS:
                    continue
                kept = joins.num_kept(key, removal)
                if kept < num_tokens and (is_part or common > kept):
                    yield GoneText(root, size, seen_prompt(self._snapshot, key).token_ids, kept, key)

    def notes(self, texts: Sequence[GoneText]) -> Iterator[bytes]:
        """Yields the keys of the notes that came from these texts or from prefixes of them, and of all encoded texts
        under their roots, because any of these may be a part of a deleted text."""
        notes = defaultdict[bytes, list[tuple[bytes, int | None, PromptDigest]]](list)
        roots = {text.root for text in texts}
        for note in self._snapshot.notes():
            if note.root in roots:
                prompt = note_prompt(self._snapshot.get_record("notes", note.key) or b"")
                notes[note.root].append((note.key, note.kind, prompt))
        for root, of_root in notes.items():
            lengths = {prompt.num_tokens for _, _, prompt in of_root}
            own = [text for text in texts if text.root == root]
            gone = {prompt for text in own for prompt in text.beginnings(self._secret, lengths)}
            gone |= {prompt for tenant, prompt in self._sources if tenant == self._tenant(root)} - {NO_PROMPT}
            gone |= self._unknown({prompt for _, _, prompt in of_root} - gone, own) if self._guesses else set()
            yield from (key for key, kind, prompt in of_root if kind == ENCODED_TEXT or prompt in gone)

    def _unknown(self, prompts: set[PromptDigest], texts: Sequence[GoneText]) -> set[PromptDigest]:
        """Returns the prompts that may be of a deleted conversation, because no seen or saved prompt shows them: those
        that may continue a deleted text, and all of them if nothing shows what a deleted text was made of."""
        root = texts[0].root
        told = min((len(text.token_ids) for text in texts if not text.key), default=math.inf)
        if not all(self._is_told(name, entry) for name, entry in self.entries.items() if entry.root == root):
            told = 0
        known = {prompt for tenant, prompt in self._living if tenant == self._tenant(root)} | {NO_PROMPT}
        unknown = {prompt for prompt in prompts - known if prompt.num_tokens > told}
        unknown -= {prompt for prompt in unknown if self._prompts.find(prompt) is not None}
        for name, entry in self._snapshot.entries() if unknown else ():
            if name not in self.entries and entry.root == root:
                lengths = sorted({prompt.num_tokens for prompt in unknown if prompt.num_tokens <= entry.num_tokens})
                if lengths:
                    unknown -= set(PromptDigest.of_beginnings(self._secret, text_of(self._snapshot, name), lengths))
        return unknown

    def _is_told(self, name: bytes, entry: EntryRecord) -> bool:
        """Returns whether the text of a deleted entry is the beginning of its prompt, or that is known."""
        if entry.kind in (*OWN_KINDS, "partial") or self._source(entry) in self._living:
            return True
        text, length = text_of(self._snapshot, name), entry.came_from.num_tokens
        is_own = 0 < length <= len(text) and PromptDigest.of(self._secret, text[:length]) == entry.came_from
        return is_own or self._prompts.find(entry.came_from) is not None


def text_of(snapshot: Snapshot, name: bytes) -> TokenIds:
    """Returns the token ids from the first block to the end of a node. Raises `StoreCorrupt`."""
    return np.concatenate([node.token_ids for node in PrefixTree(snapshot).path(name).values()])


class _KnownPrompts:
    """The seen prompts of some roots, by their digests."""

    def __init__(self, snapshot: Snapshot, roots: Collection[bytes]) -> None:
        self._snapshot, self._roots, self._secret = snapshot, roots, snapshot.names().secret

    def find(self, wanted: PromptDigest) -> SeenRecord | None:
        """Returns the prompt with this digest, None if it is not among them."""
        for key in self._by_length.get(wanted.num_tokens, ()):
            with suppress(StoreCorrupt):
                seen = seen_prompt(self._snapshot, key)
                if PromptDigest.of(self._secret, seen.token_ids) == wanted:
                    return seen
        return None

    @cached_property
    def _by_length(self) -> dict[int, list[bytes]]:
        """The keys of the prompts, by their numbers of tokens."""
        keys = defaultdict[int, list[bytes]](list)
        for root in self._roots:
            for key in self._snapshot.keys_under("seen", root):
                with suppress(StoreCorrupt):
                    keys[seen_length(self._snapshot, key)[0]].append(key)
        return keys


def seen_length(snapshot: Snapshot, key: bytes) -> tuple[int, PromptRecord]:
    """Returns the number of tokens of a seen prompt, and its record. Raises `StoreCorrupt`."""
    record = decode_record(PromptRecord, key, snapshot.listed("seen", key))
    return _node_end(snapshot, record.parent, key[:HASH_BYTES]) + len(record.rest) // ID_BYTES, record


def _node_end(snapshot: Snapshot, name: bytes, root: bytes) -> int:
    value = b"" if name == root else snapshot.get_record("nodes", name)
    return node_position(value) + node_num_tokens(value) if value else 0


class _Joins:
    """Finds where seen prompts leave deleted texts of one root. Reads the places of nodes, and the tokens of a few."""

    def __init__(self, snapshot: Snapshot, root: bytes, secret: int, texts: Sequence[GoneText]) -> None:
        self._snapshot, self._root, self._size = snapshot, root, texts[0].block_size
        self._texts = defaultdict[bytes, list[TokenIds]](list)
        """The texts that go on from a node, by its name."""
        for text in texts:
            path = TokenPath(secret, root, text.token_ids, self._size)
            for name in (root, *path.block_names):
                self._texts[name].append(text.token_ids)
        self._left_at: dict[bytes, tuple[bytes, bytes]] = {}
        """For a node that no text has, the last node before it that one has, and the node after that."""

    def common(self, key: bytes) -> tuple[int, int, bool]:
        """Returns the length of a seen prompt, the most first tokens that it shares with one of the texts, and whether
        these are all of a text."""
        num_tokens, record = seen_length(self._snapshot, key)
        name, after = self._join(record.parent)
        start, rest = _node_end(self._snapshot, name, self._root), self._tokens_after(record, after)
        shared = [(start + common_prefix_length(text[start:], rest), len(text)) for text in self._texts[name]]
        return num_tokens, max(common for common, _ in shared), any(common == length for common, length in shared)

    def num_kept(self, key: bytes, removal: Removal) -> int:
        """Returns how many of a seen prompt's first tokens stay stored."""
        _, record = seen_length(self._snapshot, key)
        name, after = record.parent, b""
        # Bound: positions fall.
        while name != self._root and not removal.stays(name):
            name, after = self._before(name), name
        rest = self._tokens_after(record, after).tobytes()
        return _node_end(self._snapshot, name, self._root) + removal.num_shared(name, rest)

    def _join(self, name: bytes) -> tuple[bytes, bytes]:
        passed, after = list[bytes](), b""
        # Bound: positions fall.
        while name not in self._texts and name not in self._left_at:
            passed.append(name)
            name, after = self._before(name), name
        join = self._left_at.get(name, (name, after))
        self._left_at.update(dict.fromkeys(passed, join))
        return join

    def _tokens_after(self, record: PromptRecord, after: bytes) -> TokenIds:
        """Returns the tokens of the block `after`; those at the end of the prompt without one."""
        if not after:
            return np.frombuffer(record.rest, "<i4").astype(np.int32)
        node = self._snapshot.node_or_ghost(after)
        return np.empty(0, np.int32) if node is None else node.token_ids

    def _before(self, name: bytes) -> bytes:
        """Returns the node that a block of a seen prompt continues, or the root."""
        parent = self._snapshot.parent(name)
        if not parent or (parent != self._root and self._position(parent) >= self._position(name)):
            raise StoreCorrupt("the blocks of a recent prompt do not join")
        return parent

    def _position(self, name: bytes) -> int:
        return node_position(self._snapshot.get_record("nodes", name) or b"")

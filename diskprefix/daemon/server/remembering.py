"""Stores the tokens that the model sampled for a reply, so that a later prompt can contain them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.daemon.chat.conversation_opening import encode_opening
from diskprefix.daemon.chat.known_parts import OwnedParts
from diskprefix.daemon.chat.messages import Conversation, Message
from diskprefix.daemon.chat.replay import RecordsUnread, Replayed, ReplyMemory
from diskprefix.daemon.chat.tool_order import RECORD_ID, ToolOrder
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.server.kept_opening import KeptOpening
from diskprefix.errors import DiskStalled
from diskprefix.prefixstore.cache.context import PromptOrigin
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.tokens import PromptDigest, TokenIds, common_prefix_length
from diskprefix.values import CacheOptions, Prompt

if TYPE_CHECKING:
    from diskprefix.daemon.server.serving import Serving
    from diskprefix.prefixstore.store.notes import TenantNotes
    from diskprefix.prefixstore.store.reads import Patience

T = TypeVar("T")


_OPENING_LASTS_S = 3 * 86400.0
"""How long an opening is kept that nobody sends, in seconds."""
_MAX_READS = 3
"""The most times that a request reads turns. It reads again if the first turns lead to others (compression)."""


class StoredTurns(Struct):
    """The turns of one tenant in the store, for one request. They are deleted with the `prompt` that they continue.

    `get` returns turns that are in memory. `read` reads the missing ones from the disk."""

    notes: TenantNotes
    prompt: TokenIds | None = None
    _read: dict[str, bytes | None] = field(default_factory=dict)
    _missing: list[str] = field(default_factory=list)
    _num_reads: int = 0

    def get(self, id_: str) -> bytes | None:
        if id_ in self._read:
            return self._read[id_]
        is_known, record = self.notes.recent(NoteKind.TURN, id_)
        if not is_known:
            self._missing.append(id_)
        return record

    def put(self, id_: str, record: bytes) -> None:
        self.notes.put(NoteKind.TURN, id_, record, self.prompt)

    def require_read(self) -> None:
        if self._missing and self._num_reads < _MAX_READS:
            raise RecordsUnread

    def read(self) -> None:
        """Reads the turns that `get` missed. Waits for the disk. Turns that cannot be read in time are encoded anew."""
        self._num_reads += 1
        missing, self._missing = self._missing, []
        self._read |= dict.fromkeys(missing)
        with suppress(DiskStalled):
            self._read |= self.notes.get_all(NoteKind.TURN, missing)


def stored_turns(serving: Serving, cache: CacheOptions, patience: Patience | None = None) -> StoredTurns | None:
    """Returns the stored turns that a prompt may reuse, None if the request uses none."""
    if not cache.replay or cache.scope.kind == "off":
        return None
    notes = replace(serving.engine.cache.notes(cache.tenant), patience=patience, share=cache.share)
    return StoredTurns(notes if cache.ttl_s is None else replace(notes, ttl_s=cache.ttl_s))


def with_turns(turns: StoredTurns, work: Callable[[], T]) -> T:
    """Runs `work`, which may raise `RecordsUnread`, on a thread that may wait for the disk."""
    # Bound: `require_read` raises it three times at most.
    while True:
        try:
            return work()
        except RecordsUnread:
            turns.read()


def known_parts(serving: Serving, cache: CacheOptions) -> OwnedParts | None:
    """Returns the encoded texts of the caller's earlier prompts, None if the request uses none."""
    if cache.scope.kind == "off":
        return None
    known, of_cache = serving.renderer.known_parts, serving.engine.cache
    owner, lasts_s = of_cache.owner(cache.tenant), of_cache.lasts_s(cache.ttl_s)
    return OwnedParts(known, owner, lasts_s, keeps=cache.save, share=cache.share)


def reply_memory(serving: Serving, cache: CacheOptions, asked: Conversation, replayed: Replayed) -> ReplyMemory | None:
    """Returns the memory for the replies to a conversation, None if they are not remembered. The expected prompt of the
    next question is computed while nobody waits. Keeps the tenant's order of tools, if the prompt has new ones."""
    turns = stored_turns(serving, cache) if cache.save else None
    if turns is None:
        return None
    engine = serving.engine
    if replayed.tool_order is not None:
        # The order is of no prompt, and lasts as long as the daemon's other notes.
        notes = replace(engine.cache.notes(cache.tenant), share=cache.share)
        # Another request may have brought tools since this one read the order.
        _, record = notes.recent(NoteKind.TURN, RECORD_ID)
        notes.put(NoteKind.TURN, RECORD_ID, ToolOrder.decode(record).joined(replayed.tool_order).encode())
    if replayed.origin is None:
        return None

    owner, secret = engine.cache.owner(cache.tenant), engine.cache.epoch(cache.tenant).secret

    def compute_ahead(reply: Message) -> None:
        def make() -> Prompt | None:
            now, own = StoredTurns(turns.notes), replayed.prompt
            ahead = partial(serving.renderer.ahead, asked, reply, now, known_parts(serving, cache))
            prompt = with_turns(now, ahead)
            if prompt is None or common_prefix_length(prompt.token_ids, own.token_ids) < own.question_end:
                return prompt
            return replace(prompt, question_end=own.question_end)

        origin = PromptOrigin("ahead", PromptDigest.of(secret, replayed.prompt.token_ids))
        expires_at = engine.cache.expires_at(cache.ttl_s)
        # The next request may come soon after a reply.
        engine.ahead.pause()
        engine.ahead.add_job(AheadJob(engine, make, cache, owner, tuple(asked.messages), expires_at, origin=origin))

    if replayed.origin.began is not None and cache.scope.most is None and serving.renderer.writes_today:
        _keep_opening(turns.notes, asked, cache, replayed.prompt.token_ids)
    # Pictures would stay in memory.
    then = compute_ahead if cache.scope.most is None and not asked.has_pictures else lambda _: None
    turns_of_prompt = StoredTurns(turns.notes, replayed.prompt.token_ids)
    return ReplyMemory(turns_of_prompt, replayed.origin, serving.renderer.end_ids, then)


def _keep_opening(notes: TenantNotes, asked: Conversation, cache: CacheOptions, token_ids: TokenIds) -> None:
    """Keeps the first request of a conversation, to compute it with the day of tomorrow. It is deleted with its prompt
    (`token_ids`)."""
    if (opening := encode_opening(asked)) is not None:
        id_, content = opening
        lasting = replace(notes, ttl_s=min(notes.ttl_s, _OPENING_LASTS_S))
        lasting.put(NoteKind.OPENING, id_, KeptOpening.of(content, cache).encode(), token_ids)

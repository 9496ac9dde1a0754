"""Stores the tokens that the model sampled for a reply, so that a later prompt can contain the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.chat.known_parts import OwnedParts
from diskprefix.chat.messages import Conversation, Message
from diskprefix.chat.replay import Replayed, ReplyMemory
from diskprefix.engine.ahead_jobs import AheadJob
from diskprefix.store.note_record import NoteKind
from diskprefix.tokens import TokenIds, common_prefix_length
from diskprefix.values import CacheOptions, Prompt

if TYPE_CHECKING:
    from diskprefix.server.serving import Serving
    from diskprefix.store.notes import TenantNotes


class StoredTurns(Struct, frozen=True):
    """The turns of one tenant in the store. They are deleted with the `prompt` that they continue."""

    notes: TenantNotes
    prompt: TokenIds | None = None

    def get(self, id_: str) -> bytes | None:
        return self.notes.get(NoteKind.TURN, id_)

    def put(self, id_: str, record: bytes) -> None:
        self.notes.put(NoteKind.TURN, id_, record, self.prompt)


def stored_turns(serving: Serving, cache: CacheOptions) -> StoredTurns | None:
    """Returns the turns from which a prompt may be made, None if the request uses none."""
    if not cache.replay or cache.scope.kind == "off":
        return None
    notes = serving.engine.cache.notes(cache.tenant)
    return StoredTurns(notes if cache.ttl_s is None else replace(notes, ttl_s=cache.ttl_s))


def known_parts(serving: Serving, cache: CacheOptions) -> OwnedParts | None:
    """Returns the encoded texts of the caller's earlier prompts, None if the request uses none."""
    if cache.scope.kind == "off":
        return None
    of_cache = serving.engine.cache
    return OwnedParts(
        serving.renderer.known_parts, of_cache.owner(cache.tenant), of_cache.lasts_s(cache.ttl_s), keeps=cache.save
    )


def reply_memory(serving: Serving, cache: CacheOptions, asked: Conversation, replayed: Replayed) -> ReplyMemory | None:
    """Returns the memory for the replies to a conversation, None if they are not remembered. The prompt that the next
    question will have is computed while nobody waits."""
    turns = stored_turns(serving, cache) if cache.save else None
    if turns is None or replayed.origin is None:
        return None

    owner = serving.engine.cache.owner(cache.tenant)

    def compute_ahead(reply: Message) -> None:
        def make() -> Prompt | None:
            prompt = serving.renderer.ahead(asked, reply, turns, known_parts(serving, cache))
            own = replayed.prompt
            if prompt is None or common_prefix_length(prompt.token_ids, own.token_ids) < own.question_end:
                return prompt
            return replace(prompt, question_end=own.question_end)

        expires_at = serving.engine.cache.expires_at(cache.ttl_s)
        serving.engine.ahead.add(AheadJob(serving.engine, make, cache, owner, tuple(asked.messages), expires_at))

    # Pictures would stay in memory.
    then = compute_ahead if cache.scope.most is None and not asked.has_pictures else lambda _: None
    turns_of_prompt = replace(turns, prompt=replayed.prompt.token_ids)
    return ReplyMemory(turns_of_prompt, replayed.origin, serving.renderer.end_ids, then)

"""Stores the tokens that the model sampled for a reply, so that a later prompt can contain the same tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diskprefix.api.reply import CallBegin, DeltaEvent, ReplyDelta, ReplyEvent, ReplyReader
from diskprefix.chat.known_parts import OwnedParts
from diskprefix.chat.output.format import OutputDelta, OutputParser, ToolCallBegin
from diskprefix.chat.replay import Replayed, ReplyMemory, Turn
from diskprefix.engine.request import Event, FinishEvent, TextEvent
from diskprefix.store.note_record import NoteKind
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions

if TYPE_CHECKING:
    from diskprefix.server.serving import Serving
    from diskprefix.store.notes import TenantNotes


@dataclass(frozen=True)
class Stored:
    """The notes of one kind in the store, for one tenant."""

    kind: NoteKind
    notes: TenantNotes
    keeps: bool = True
    """False: `put` does nothing."""
    prompt: TokenIds | None = None
    """The prompt that the notes belong to: they are deleted with it."""

    def get(self, id_: str) -> bytes | None:
        return self.notes.get(self.kind, id_)

    def put(self, id_: str, record: bytes) -> None:
        if self.keeps:
            self.notes.put(self.kind, id_, record, self.prompt)


def stored_turns(serving: Serving, cache: CacheOptions) -> Stored | None:
    """Returns the turns from which a prompt may be made, None if the request uses none."""
    if not cache.replay or cache.scope.kind == "off":
        return None
    notes = serving.engine.cache.notes(cache.tenant)
    notes = notes if cache.ttl_s is None else replace(notes, ttl_s=cache.ttl_s)
    return Stored(NoteKind.TURN, notes, keeps=cache.save)


def known_parts(serving: Serving, cache: CacheOptions) -> OwnedParts | None:
    """Returns the encoded texts of the caller's earlier prompts, None if the request uses none."""
    if cache.scope.kind == "off":
        return None
    of_cache = serving.engine.cache
    return OwnedParts(
        serving.renderer.known_parts, of_cache.owner(cache.tenant), of_cache.lasts_s(cache.ttl_s), keeps=cache.save
    )


def reply_memory(serving: Serving, cache: CacheOptions, replayed: Replayed) -> ReplyMemory | None:
    """Returns the memory for the replies to a request, None if they are not remembered."""
    turns = stored_turns(serving, cache) if cache.save else None
    if turns is None or replayed.origin is None:
        return None
    return ReplyMemory(replace(turns, prompt=replayed.prompt.token_ids), replayed.origin, serving.renderer.end_ids)


class RememberingReader(ReplyReader):
    """A `ReplyReader` that has each choice remembered when it ends, before the client knows that it did."""

    def __init__(
        self,
        new_parser: Callable[[], OutputParser],
        call_id_prefix: str,
        memory: ReplyMemory | None,
        *,
        many_calls: bool = True,
    ) -> None:
        super().__init__(new_parser, call_id_prefix, many_calls=many_calls)
        self._memory = memory
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._deltas_of: defaultdict[int, list[ReplyDelta]] = defaultdict(list)

    def read(self, event: Event) -> list[ReplyEvent]:
        events = super().read(event)
        if self._memory is not None:
            if isinstance(event, TextEvent):
                self._token_ids[event.choice] += event.token_ids
            for read in events:
                if isinstance(read, DeltaEvent):
                    self._deltas_of[read.choice] += read.deltas
            if isinstance(event, FinishEvent):
                self._remember(self._memory, event)
        return events

    def _remember(self, memory: ReplyMemory, end: FinishEvent) -> None:
        """Stores the tokens of a choice, unless they hold text that the client does not get."""
        if end.stop is not None or end.choice in self.shortened:
            return
        deltas = self._deltas_of[end.choice]
        call_ids = [delta.id for delta in deltas if isinstance(delta, CallBegin)]
        memory.remember(Turn.of_deltas(map(_as_parsed, deltas)), call_ids, self._token_ids[end.choice])


def _as_parsed(delta: ReplyDelta) -> OutputDelta:
    return ToolCallBegin(delta.index, delta.name) if isinstance(delta, CallBegin) else delta

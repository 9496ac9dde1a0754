"""Reads the body of a request and renders its prompts, on threads and in turns of its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request

from diskprefix.daemon.api.fields import RequestBody
from diskprefix.daemon.api.parsed_request import ParsedRequest, note_left_out
from diskprefix.daemon.chat.fill_in import FillIn
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.replay import RecordsUnread, Replayed
from diskprefix.daemon.server.body import end_large_turn
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.log_context import LogContext
from diskprefix.daemon.server.remembering import StoredTurns, known_parts
from diskprefix.daemon.server.serving import Serving
from diskprefix.daemon.server.threads import WorkKind
from diskprefix.errors import ContextTooLong
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.values import CacheOptions

M = TypeVar("M")


class Arrival(Struct, frozen=True, kw_only=True):
    """A request whose body was read, with everything that the later steps need."""

    request: Request
    daemon: Daemon
    context: LogContext
    serving: Serving
    dialect: Any
    """A `Dialect` if the client wants a reply, else a `BodyReader`."""
    body: RequestBody
    cache: CacheOptions

    patience: Patience
    """The time that the request may wait for the disk."""
    turns: StoredTurns | None
    """The stored turns that the prompt may reuse."""

    def notes(self) -> TenantNotes:
        """Returns the notes of the request's tenant."""
        notes = self.serving.engine.cache.notes(self.cache.tenant)
        return replace(notes, patience=self.patience, share=self.cache.share)


class Rendered(Struct, frozen=True):
    """A parsed request, in a form that all APIs share, with its prompts as token ids."""

    arrival: Arrival
    parsed: ParsedRequest
    prompts: Sequence[Replayed]

    @property
    def max_positions(self) -> int:
        return self.arrival.serving.engine.max_positions

    @property
    def rooms(self) -> list[int]:
        """For each prompt, the number of tokens that the model's positions leave for the reply."""
        positions = min(self.max_positions, self.parsed.num_ctx or self.max_positions)
        return [positions - len(replayed.prompt.token_ids) for replayed in self.prompts]


async def prepare(arrival: Arrival, make: Callable[[Rendered], M], kind: WorkKind = "rendering") -> tuple[Rendered, M]:
    """Reads the body, renders its prompts, and returns them with the result of `make`.

    A single text prompt takes one turn of the share for this `kind` of work, and several prompts take one turn each.
    Pictures, constraints and reads from the disk have threads of their own; reads take no turn. Raises
    `InvalidRequest`, `DiskStalled`, and `ClientDisconnect`.
    """
    threads = arrival.daemon.threads
    write = _render_counted if kind == "counting" else render

    async def run(kind: WorkKind, work: Callable[..., Any], *values: Any) -> Any:
        # Bound: `StoredTurns` raises it a few times at most.
        while True:
            try:
                return await threads.run_for(arrival.request, kind, work, *values)
            except RecordsUnread:
                assert arrival.turns is not None
                await threads.run("reading", arrival.patience.from_now(arrival.turns.read))

    def read() -> ParsedRequest:
        parsed: ParsedRequest = arrival.dialect.read(arrival.body, arrival.serving.renderer.vocab_size, arrival.notes)
        return parsed

    stored: ParsedRequest | None = None
    if arrival.body.needs_stored_items:
        # Others wait for reads alone, and no wait for a turn is a wait for the disk.
        async with arrival.daemon.stored_turns.of(arrival.context.share, arrival.context.conversation):
            stored = await threads.run("reading", arrival.patience.from_now(read))

    def begin() -> tuple[ParsedRequest, Rendered | None, M | None]:
        parsed = read() if stored is None else stored
        if arrival.body.prompt_cache_options is not None and arrival.body.prompt_cache_options.prewarm:
            parsed = parsed.without_reply()
        if parsed.more_prompts or _has_pictures(parsed.prompt):
            return parsed, None, None
        rendered = Rendered(arrival, parsed, [write(arrival, parsed.prompt)])
        return parsed, rendered, None if parsed.is_constrained else make(rendered)

    parsed, rendered, made = await run(kind, begin)
    if rendered is None:
        kind = "images" if _has_pictures(parsed.prompt) else kind
        prompts = [await run(kind, write, arrival, wanted) for wanted in (parsed.prompt, *parsed.more_prompts)]
        rendered = Rendered(arrival, parsed, prompts)
    if made is None:
        # The turn is given back first: other shares do not wait for a constraint to compile.
        end_large_turn(arrival.request)
        made = await run("compiling" if parsed.is_constrained else kind, make, rendered)
    return rendered, made


def render(arrival: Arrival, wanted: Conversation | str | list[int] | FillIn) -> Replayed:
    """Renders a prompt. May take long. Raises `InvalidRequest`, and `RecordsUnread`."""
    serving, cache = arrival.serving, arrival.cache
    renderer, known = serving.renderer, known_parts(serving, cache)
    if isinstance(wanted, Conversation):
        replayed = renderer.replay(wanted, arrival.turns, known, cache.asker)
        note_left_out(replayed.prompt.rewriting.left_out)
        if replayed.prompt.pictures:
            serving.engine.read_encoder()
        return replayed
    return Replayed(renderer.completion(wanted, known))


def _render_counted(arrival: Arrival, wanted: Conversation | str | list[int] | FillIn) -> Replayed:
    """Renders a prompt that may exceed the model's positions: a client that counts tokens wants to know by how much.
    Raises the errors of `render`."""
    try:
        return render(arrival, wanted)
    except ContextTooLong:
        assert isinstance(wanted, Conversation)
        return arrival.serving.renderer.counting.replay(wanted, arrival.turns, asker=arrival.cache.asker)


def _has_pictures(wanted: Conversation | str | list[int] | FillIn) -> bool:
    return isinstance(wanted, Conversation) and wanted.has_pictures

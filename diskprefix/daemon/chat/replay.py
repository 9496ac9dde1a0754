"""Records replies, so that later prompts can use their sampled tokens.

Clients send a reply back with other formatting, other blanks and no reasoning. So a reply is recorded under a hash of
the words that clients send back and of the conversation before it. README.md describes the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import Message, TextPart, ToolCall
from diskprefix.daemon.chat.output.format import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBegin, ToolCallDelta
from diskprefix.daemon.chat.template_input import PART_SEPARATOR
from diskprefix.daemon.chat.tool_order import ToolOrder
from diskprefix.daemon.json_values import whole_characters
from diskprefix.values import Picture, Prompt

_ID_BYTES = 32


class RecordsUnread(Exception):
    """The needed records must be read from the disk first, by a thread that may wait for the disk."""


class RecordStore(Protocol):
    """Records of the replies of one tenant and one model. `get` does not wait for the disk: it returns None for a
    record that does not exist or is not in memory. Call `require_read` after all calls of `get`: it raises
    `RecordsUnread` if records must be read from the disk."""

    def get(self, id_: str) -> bytes | None: ...

    def put(self, id_: str, record: bytes) -> None: ...

    def require_read(self) -> None: ...


class Turn(Struct, frozen=True):
    """The words of a reply. `calls` are pairs of name and arguments, which are JSON text if the model wrote JSON."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_deltas(cls, deltas: Iterable[OutputDelta]) -> Turn:
        content, reasoning = [], []
        calls: dict[int, list[str]] = {}
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                reasoning.append(delta.text)
            elif isinstance(delta, ToolCallBegin):
                calls[delta.index] = [delta.name]
            elif isinstance(delta, ToolCallDelta) and delta.index in calls:
                calls[delta.index].append(delta.arguments)
        named = tuple((name, "".join(arguments)) for name, *arguments in calls.values())
        return cls("".join(content), "".join(reasoning), named)

    def canonical(self) -> list[Any]:
        """Returns the words in canonical form: without blanks at the ends of texts, arguments without formatting."""
        calls = [[name, _canonical_arguments(arguments)] for name, arguments in self.calls]
        return [self.content.strip(), self.reasoning.strip(), calls]


def _canonical_arguments(arguments: str | Mapping[str, Any]) -> str:
    """Returns canonical JSON: sorted keys, no blanks, 1 for 1.0. Text that is not JSON is returned unchanged."""
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        value = json.loads(whole_characters(text), parse_float=_number)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return str(arguments)


def _number(text: str) -> float:
    return int(value) if (value := float(text)).is_integer() else value


class ConversationHash:
    """The hash of a growing conversation. Reasoning, the ids of calls, formatting and the daemon's own texts for late
    tools do not change it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_ID_BYTES)

    def copy(self) -> ConversationHash:
        other = ConversationHash()
        other._hash = self._hash.copy()
        return other

    def add_message(self, message: Message, pictures: Iterable[Picture] = ()) -> None:
        """Adds a message with the images in it."""
        text = PART_SEPARATOR.join(part.text for part in message.texts if not part.offers_tools)
        calls = [[call.name, _canonical_arguments(call.arguments)] for call in message.tool_calls]
        self._add(message.role, text.strip(), calls, *(picture.name.hex() for picture in pictures))

    def add_reply(self, turn: Turn) -> None:
        content, _, calls = turn.canonical()
        self._add("assistant", content, calls)

    def ids(self, call_ids: Sequence[str | None]) -> list[str]:
        """Returns the ids of the conversation: one with the ids of the last message's calls, which distinguish equal
        conversations, and one without them, for clients that change them."""
        with_calls = self._hash.copy()
        with_calls.update(json.dumps(call_ids).encode())
        without = self._hash.hexdigest()
        return [with_calls.hexdigest(), without] if any(call_ids) else [without]

    def _add(self, role: str, text: str, calls: list[list[str]], *pictures: str) -> None:
        self._hash.update(json.dumps([role, text, calls, *pictures]).encode() + b"\n")


class TextPlace(NamedTuple):
    """A place in a text: the number of characters before it, and their hash."""

    num_chars: int
    digest: str


class TextHash:
    """Hashes the beginnings of a text. Call `place` with ascending values."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0
        self._hash = hashlib.blake2b(digest_size=_ID_BYTES)

    def place(self, num_chars: int) -> TextPlace:
        self._hash.update(self._text[self._end : num_chars].encode("utf-8", "surrogatepass"))
        self._end = num_chars
        return TextPlace(num_chars, self._hash.hexdigest())


class NewTools(NamedTuple):
    """The digests of the names of the tools of a prompt that earlier prompts of the conversation lack; with `are_all`,
    of all its tools, as no earlier prompt is known."""

    digests: tuple[str, ...] = ()
    are_all: bool = False


class SampledTurn(Struct, frozen=True):
    """A recorded reply: its words, its sampled tokens without the end token, the place where it began, the moment that
    the template wrote into its prompt, if it wrote one, and the new tools of the prompt."""

    turn: Turn
    token_ids: tuple[int, ...]
    place: TextPlace
    began: datetime | None = None
    tools: NewTools = NewTools()

    def encode(self) -> bytes:
        turn = self.turn
        began = None if self.began is None else self.began.isoformat()
        words = [turn.content, turn.reasoning, turn.calls]
        return json.dumps([*words, self.token_ids, self.place, began, self.tools], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, record: bytes) -> SampledTurn:
        """Returns the reply of a record. Raises `ValueError` for a record that `encode` did not write."""
        content, reasoning, calls, token_ids, place, began, (tools, are_all) = json.loads(record)
        moment = None if began is None else datetime.fromisoformat(began)
        turn = Turn(content, reasoning, tuple((name, arguments) for name, arguments in calls))
        return cls(turn, tuple(token_ids), TextPlace(*place), moment, NewTools(tuple(map(str, tools)), bool(are_all)))


def find_turns(
    messages: Sequence[Message], turns: RecordStore, pictures: Sequence[Picture] = ()
) -> tuple[dict[int, SampledTurn], ConversationHash]:
    """Returns the recorded replies by the index of their message, ascending, and the hash of the conversation. Raises
    `RecordsUnread`."""
    turns_by_index, left, conversation = {}, iter(pictures), ConversationHash()
    for index, message in enumerate(messages):
        conversation.add_message(message, islice(left, len(message.pictures)))
        if message.role == "assistant":
            ids = conversation.ids([call.id for call in message.tool_calls])
            sampled = next(filter(None, map(_decoded, map(turns.get, ids))), None)
            # The id does not cover the reasoning, which the client may leave out.
            if sampled and (message.reasoning or "").strip() in ("", sampled.turn.reasoning.strip()):
                turns_by_index[index] = sampled
    turns.require_read()
    return turns_by_index, conversation


def _decoded(record: bytes | None) -> SampledTurn | None:
    with suppress(ValueError, TypeError):
        return None if record is None else SampledTurn.decode(record)
    return None


def with_turn(message: Message, turn: Turn) -> Message:
    """Returns `message` in the recorded words, with reasoning. Calls keep the client's ids, to which results refer."""
    sent = zip(message.tool_calls, turn.calls, strict=True)
    calls = tuple(ToolCall(call.id, name, arguments) for call, (name, arguments) in sent)
    marks = [part.mark for part in message.texts if part.mark is not None]
    content = (TextPart(turn.content, message.path, marks[-1] if marks else None),) if turn.content else ()
    return replace(message, content=content, tool_calls=calls, reasoning=turn.reasoning or None)


class Origin(NamedTuple):
    """The conversation that a reply was sampled for, the end of its rendered text, the moment that the template wrote
    into it, and its new tools."""

    conversation: ConversationHash
    place: TextPlace
    began: datetime | None = None
    tools: NewTools = NewTools()

    @classmethod
    def of(
        cls,
        conversation: ConversationHash,
        rendered: str,
        began: datetime | None = None,
        tools: NewTools = NewTools(),  # noqa: B008 (immutable)
    ) -> Origin:
        return cls(conversation, TextHash(rendered).place(len(rendered)), began, tools)


class Replayed(NamedTuple):
    """A prompt with the tokens of earlier replies. `origin` is None if its own reply cannot be recorded. `tool_order`
    is the tenant's order of tools from now on, None if it stays as it is."""

    prompt: Prompt
    origin: Origin | None = None
    tool_order: ToolOrder | None = None


class ReplyMemory:
    """Records the replies to one request. `end_ids` are the tokens that end a reply. `then` is called with each reply
    as a client sends it back."""

    def __init__(
        self,
        turns: RecordStore,
        origin: Origin,
        end_ids: frozenset[int],
        then: Callable[[Message], None] = lambda _: None,
    ) -> None:
        self._turns = turns
        self._origin = origin
        self._end_ids = end_ids
        self._then = then

    def remember(self, turn: Turn, call_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Records a reply and its sampled tokens. Ignores an empty reply: it would match any empty message."""
        has_end = bool(token_ids) and token_ids[-1] in self._end_ids
        sampled_ids, origin = tuple(token_ids[:-1] if has_end else token_ids), self._origin
        sampled = SampledTurn(turn, sampled_ids, origin.place, origin.began, origin.tools)
        if not sampled.token_ids or not any(turn.canonical()):
            return
        conversation = origin.conversation.copy()
        conversation.add_reply(turn)
        record = sampled.encode()
        for id_ in conversation.ids(call_ids):
            self._turns.put(id_, record)
        calls = tuple(ToolCall(id_, *call) for id_, call in zip(call_ids, turn.calls, strict=True))
        self._then(with_turn(Message(role="assistant", tool_calls=calls, path=""), turn))

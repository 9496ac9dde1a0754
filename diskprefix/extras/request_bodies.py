"""Reads request bodies from a file as the daemon reads them from HTTP, whatever their API."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from diskprefix.api.anthropic import CountTokensRequest, MessagesRequest
from diskprefix.api.fields import cache_options
from diskprefix.api.openai import CompletionRequest
from diskprefix.api.openai_chat import ChatRequest
from diskprefix.api.responses import ResponseRequest, Responses
from diskprefix.api.responses_items import ResponseStore
from diskprefix.chat.messages import Conversation
from diskprefix.chat.renderer import PromptRenderer
from diskprefix.errors import InvalidRequest
from diskprefix.nouns import DEFAULT_WINDOW, SHARED, CacheOptions, Prompt, Scope, Tenant
from diskprefix.server.body import parse_json
from diskprefix.server.remembering import Stored
from diskprefix.store.note_record import NoteKind
from diskprefix.store.notes import ReadOnlyNotes

Body: TypeAlias = dict[str, Any]
NotesOf: TypeAlias = Callable[[Tenant], ReadOnlyNotes | None]
DEFAULT = Scope("auto", DEFAULT_WINDOW)


@dataclass(frozen=True)
class ParsedBody:
    """A parsed body. `wanted` is a conversation, or a text or token ids to continue."""

    wanted: Conversation | str | list[int]
    options: CacheOptions
    notes: ReadOnlyNotes | None

    def prompt(self, renderer: PromptRenderer) -> Prompt:
        """Returns the prompt as the daemon renders it, with remembered replies if there are notes.

        Raises `InvalidRequest`.
        """
        if not isinstance(self.wanted, Conversation):
            return renderer.completion(self.wanted)
        is_replayed = self.options.replay and self.options.scope.kind != "off"
        # A command remembers no replies.
        turns = Stored(NoteKind.TURN, self.notes, keeps=False) if is_replayed and self.notes else None
        return renderer.replay(self.wanted, turns).prompt


def parse_body(body: Body, caller: Tenant = SHARED, notes_of: NotesOf = lambda _tenant: None) -> ParsedBody:
    """Parses a body of OpenAI's chat completions, completions or responses, or of Anthropic's messages.

    `caller` is the tenant of the API key. `notes_of` returns the notes of a tenant.

    Raises `InvalidRequest` for a body that the daemon would refuse.
    """
    text = json.dumps(body).encode()
    parsed: ChatRequest | CompletionRequest | CountTokensRequest | ResponseRequest
    if "input" in body or "previous_response_id" in body:
        parsed = parse_json(text, ResponseRequest)
    elif "messages" in body and _is_anthropic(body):
        parsed = parse_json(text, MessagesRequest if "max_tokens" in body else CountTokensRequest)
    elif "messages" in body:
        parsed = parse_json(text, ChatRequest)
    else:
        parsed = parse_json(text, CompletionRequest)
    options = cache_options(parsed, scope=DEFAULT, caller=caller)
    notes = notes_of(options.tenant)
    return ParsedBody(_wanted(parsed, notes), options, notes)


def _wanted(
    parsed: ChatRequest | CompletionRequest | CountTokensRequest | ResponseRequest, notes: ReadOnlyNotes | None
) -> Conversation | str | list[int]:
    if isinstance(parsed, CompletionRequest):
        if len(parsed.prompts) > 1:
            raise InvalidRequest.at("prompt", f"holds {len(parsed.prompts)} prompts; here each needs a body of its own")
        return parsed.prompts[0]
    if not isinstance(parsed, ResponseRequest):
        return parsed.conversation
    if notes is None and parsed.previous_response_id is not None:
        raise InvalidRequest.at("previous_response_id", "no stored responses are at hand")
    return Responses().conversation(parsed, ResponseStore(notes or ReadOnlyNotes(None, b"")))


def _is_anthropic(body: Body) -> bool:
    """Returns whether a body has fields of Anthropic's API. Without them, both APIs make the same prompt."""
    if "system" in body or "anthropic_version" in body or "thinking" in body:
        return True
    tools = body.get("tools")
    if isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        return True
    messages = body["messages"] if isinstance(body["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.get("type") in ("tool_use", "tool_result", "thinking", "redacted_thinking") for part in parts)

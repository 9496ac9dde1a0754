"""What the bodies of each API must not hold. The error names the field by its path."""

from __future__ import annotations

import json
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from diskprefix.daemon.api.anthropic import Messages
from diskprefix.daemon.api.dialect import BodyReader
from diskprefix.daemon.api.fields import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, cache_options
from diskprefix.daemon.api.openai import Completions
from diskprefix.daemon.api.openai_chat import Chat
from diskprefix.daemon.api.responses import Responses
from diskprefix.daemon.chat.content import note_unread, read_pictures
from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.infill.infill import Infill
from diskprefix.daemon.ollama.ollama_dialect import Ollama, OllamaChatRequest, OllamaGenerateRequest
from diskprefix.daemon.server.body import parse_json
from diskprefix.errors import InvalidRequest
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.values import SHARED, Scope

GONE = object()
"""The field is left out."""
USER = {"role": "user", "content": "hello"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MARK = {"type": "ephemeral"}
MARKED = {"cache_control": MARK}
NO_MARK = "is not allowed here; mark a message, a content part or a tool"

PARTS = [
    {"type": "text", "text": "see:"} | MARKED,
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}} | MARKED,
]
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        USER,
        {"role": "user", "content": PARTS} | MARKED,
    ],
    "tools": [NAMED | {"function": {"name": "f"} | MARKED}, NAMED | MARKED],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "stop": ["a", "b"],
    "modalities": ["text", "text"],
    "prefix_cache": {},
    "logit_bias": {},
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 8,
    "messages": [USER, {"role": "user", "content": [{"type": "text", "text": "x"} | MARKED]}],
    "system": [{"type": "text", "text": "x"}],
    "tools": [{"name": name, "input_schema": SCHEMA} for name in ("read", "w" * 128)],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled"},
    "stop_sequences": ["a"],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "prefix_cache": {},
}
RESPONSES: dict[str, Any] = {
    "input": [
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
        USER,
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]} | MARKED,
    ],
    "tools": [{"type": "function", "name": "read", "parameters": SCHEMA} | MARKED],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "read"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {},
    "metadata": {},
    "modalities": ["text"],
    "prefix_cache": {},
}
APIS: dict[str, tuple[BodyReader[Any], dict[str, Any]]] = {
    "chat": (Chat(), CHAT),
    "completions": (Completions(), {"prompt": "x"}),
    "infill": (Infill(), {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f", "text": "t"}]}),
    "messages": (Messages(), MESSAGES),
    "ollama": (
        Ollama(OllamaChatRequest),
        {"messages": [USER], "options": {"stop": ["x"]}, "format": SCHEMA, "think": True},
    ),
    "generate": (Ollama(OllamaGenerateRequest), {"prompt": "x", "images": ["eA=="], "options": {"num_ctx": 9}}),
    "responses": (Responses(), RESPONSES),
}
"""Each API with a body that it takes."""

MARKED_PLACES = ("messages.2", "messages.2.content.0", "messages.2.content.1", "tools.1", "tools.0.function")
BAD_MARKS: list[tuple[Any, ...]] = [
    ("", "ephemeral", True, []),
    (".type", GONE, "persistent", None),
    (".ttl", "2h", 300),
]
AT: dict[str, list[tuple[Any, ...]]] = {
    "chat": [
        ("messages", "", [], None, "hello"),
        ("messages.2", "", 5),
        ("messages.2.role", "", "wizard", GONE),
        ("messages.2.content", "", GONE, None, 5),
        ("messages.2.content.0", "", "x"),
        ("messages.2.content.0.text", "", GONE),
        ("messages.2.content.0.type", "", "smell", 5, ["text"], GONE),
        ("messages.2.content.1.image_url", "", GONE, 5),
        ("messages.2.content.1.image_url.url", "", GONE, 5),
        ("messages.2.content.1.image_url.cache_control", NO_MARK, MARK),
        ("cache_control", NO_MARK, MARK, "ephemeral"),
        ("max_tokens", "", 2**31, "5", True, 5.5, 1e300),
        ("max_tokens", "(got -5)", -5),
        ("max_tokens", "at least 1, or -1 for no limit", 0, 0.0),
        ("max_completion_tokens", "", -2, -1.5),
        ("temperature", "", 2.5, -5e-324, float("nan")),
        ("top_p", "", -0.01, 1.01),
        ("top_k", "", -2, 2**31),
        ("min_p", "", -0.1, 1.01),
        ("seed", "", 2**63, -(2**63) - 1, 1.5, "9" * 10_000),
        ("repetition_penalty", "", 0.0099, 100.1),
        ("presence_penalty", "", 2.1),
        ("frequency_penalty", "", -2.1),
        ("logit_bias.5", "", 101),
        ("logit_bias", "", {str(token): 1 for token in range(1025)}, [1], {"1000": 1}, {"one": 1}, {"-1": 1}),
        ("stop", "", 5, "x" * 1025, ["a"] * 17),
        ("stop.1", "", 5, "x" * 1025),
        ("n", "", 0, 17),
        ("logprobs", "", 5),
        ("top_logprobs", "", 21, -1),
        ("top_logprobs", "needs logprobs: true", 3),
        ("stream", "", "yes"),
        ("stream_options", "", True),
        ("stream_options", "needs stream: true", {}),
        ("tools", "", {"type": "function"}),
        ("tools.0.type", "", "retrieval"),
        ("tools.0.function.name", "", GONE),
        ("tools.0.function.name", "at most 128", "f" * 129),
        ("tool_choice", "", "sometimes", 5, {"type": "function"}, {"type": "allowed_tools"}),
        ("tool_choice", "names 'delete', which is not among", {"type": "function", "function": {"name": "delete"}}),
        ("tool_choice.type", "", "custom"),
        ("tool_choice.function.name", "", ""),
        ("tool_choice.allowed_tools.mode", "", "none"),
        ("tool_choice.allowed_tools.tools", "", []),
        ("parallel_tool_calls", "", "no"),
        ("response_format", "", {"type": "json_schema"}),
        ("response_format.type", "", "xml"),
        ("response_format.schema", "", {}, 123),
        ("response_format.json_schema.schema", "", GONE, 5),
        ("structured_outputs", "needs exactly one", {}, {"json_object": True, "choice": ["b"]}),
        ("structured_outputs", "not allowed beside response_format", {"choice": ["a"]}),
        ("structured_outputs.json", "", 5),
        ("structured_outputs.json_object", "must be true (got false)", False),
        ("structured_outputs.regex", "", "a"),
        ("structured_outputs.grammar", "", 'start: "a"'),
        ("structured_outputs.choice", "", []),
        ("structured_outputs.structural_tag", "", {}),
        ("reasoning_effort", "", 5, "x" * 129),
        ("continue_final_message", "", "yes", True),
        ("return_progress", "", 1),
        ("modalities.1", "", "audio"),
        ("audio", "", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", "", {}),
        ("functions", "is not supported", {}, [{"name": "f"}]),
        ("function_call", "is not supported", "f", {"name": "f"}),
        ("chat_template_kwargs", "", "x"),
        ("special_tokens_in_text", "", "true", 1),
        ("prefix_cache", "", "full"),
        ("prefix_cache.scope", "", "sometimes", "auto:0", ["auto"], True, 1.5, 0, None),
        ("prefix_cache.window", "", "8", 0, 10**4000, None),
        ("prefix_cache.widow", "", 8),
        ("prefix_cache.save", "", "false", None),
        ("prefix_cache.ttl", "", None, "", "soon", "-5m", "5M", "\u0665m", 2**31, "0.5s", "24856d", "9" * 5000),
        ("prefix_cache.ttl", "", 0, 10**400, True, ["5m"]),
        ("prompt_cache_key", "", "", "x" * 513, 5),
        ("prompt_cache_retention", "", "", "48h"),
        ("prompt_cache_options", "", "explicit", ["explicit"]),
        ("prompt_cache_options.mode", "", "auto", True),
        ("prompt_cache_options.prewarm", "", "true", 1),
        ("prompt_cache_options.ttl", "", "", "soon", 0),
        ("prefix_cache.salt", "", "", ["swordfish"], "swordfish" * 40),
        ("cache_salt", "", "", {"swordfish": 1}, "swordfish" * 40),
        *((f"{place}.cache_control{end}", "", *values) for place in MARKED_PLACES for end, *values in BAD_MARKS),
    ],
    "completions": [
        ("cache_control", NO_MARK, MARK),
        ("prompt", "", "", [], 5, None, ["a"] * 257),
        ("echo", "", "yes"),
        ("suffix", "", 5),
        ("logprobs", "", 21),
        ("best_of", "", 0),
        ("best_of", "must be equal to n", 2),
        ("special_tokens_in_text", "needs a suffix", False),
    ],
    "messages": [
        ("max_tokens", "greater than or equal to -1", -2),
        ("max_tokens", "is required", GONE),
        ("messages", "must not be empty", []),
        ("messages", "must be a list", "hello"),
        ("messages.1.role", "'user', 'assistant' or 'system'", "wizard"),
        ("messages.1.content", "is required", GONE, None),
        ("messages.1.content", "a string or a list of content blocks", 5),
        ("messages.1.content.0", "a content block with a type", "x"),
        ("messages.1.content.0.type", "valid string", 5),
        ("messages.1.content.0.type", "is required", GONE),
        ("messages.1.content.0.type", "'server_tool_use' is not supported", "server_tool_use"),
        ("messages.1.content.0.cache_control.type", "'ephemeral'", "x"),
        ("system", "a string or a list of text blocks", 5),
        ("system.0.type", "must be 'text'", "image"),
        ("tools.0", "must be a tool", "read"),
        ("tools.0.name", "at most 128", "f" * 129),
        ("tools.0.input_schema", "is required", GONE),
        ("tool_choice", "must be an object", "any"),
        ("tool_choice", "needs the field name", {"type": "tool"}),
        ("tool_choice", "names 'rm'", {"type": "tool", "name": "rm"}),
        ("tool_choice.type", "'auto', 'any', 'tool' or 'none'", "required"),
        ("thinking.type", "'enabled'", "on"),
        ("thinking.budget_tokens", "greater than or equal to 1", 0),
        ("temperature", "less than or equal to 1", 1.5),
        ("stop_sequences", "at most 16 items", ["x"] * 17),
        ("stop_sequences.0", "", 5),
        ("output_config.format.schema", "is required", GONE),
        ("output_config.effort", "", 5, "x" * 129),
        ("structured_outputs", "not allowed beside output_config.format.schema", {"choice": ["a"]}),
        ("special_tokens_in_text", "", "true", 1),
        ("mcp_servers", "is not supported", [{"url": "https://x"}]),
        ("container", "is not supported", "c"),
        ("thread", "send all messages", {"type": "create"}),
        ("prefix_cache.scop", "is not a known field", "full"),
    ],
    "responses": [
        ("input", "", 5, {"role": "user"}),
        ("input", "must not be empty", [], GONE),
        ("input.2", "", "x"),
        ("input.2.role", "", "wizard"),
        ("input.2.content", "", GONE, None),
        ("input.2.cache_control.type", "", "eternal"),
        ("input.2.type", "", "agent_message", 5),
        ("input.2.content.0", "", "x"),
        ("input.2.content.0.text", "", GONE),
        ("input.2.content.0.type", "", "smell", 5),
        ("instructions", "", ["x"]),
        ("previous_response_id", "", ""),
        ("special_tokens_in_text", "", "true", 1),
        ("store", "", "yes"),
        ("max_output_tokens", "", 0),
        ("tools", "", {}),
        ("tools.0", "", "x"),
        ("tools.0.type", "", GONE, 5),
        ("tools.0.name", "", GONE),
        ("tools.0.name", "at most 128", "f" * 129),
        ("tools.0.parameters", "", "x"),
        ("tools.0.cache_control.ttl", "", "2h"),
        ("tool_choice", "", "sometimes", {"type": "function"}, {"type": "allowed_tools", "mode": "auto"}),
        ("tool_choice", "names 'x'", {"type": "function", "name": "x"}),
        ("tool_choice.type", "", "web_search_preview"),
        ("tool_choice", "names 'x'", {"type": "custom", "name": "x"}),
        ("tool_choice.tools.0.type", "", "mcp"),
        ("text.format", "", {"type": "json_schema", "name": "n"}),
        ("text.format.type", "", "grammar"),
        ("text.verbosity", "", "much"),
        ("reasoning.effort", "", 5, "x" * 129),
        ("reasoning.summary", "", "long"),
        ("include", "", "x"),
        ("top_logprobs", "", 21),
        ("metadata.a", "", 5, "x" * 513),
        ("metadata", "", {str(number): "x" for number in range(17)}),
        ("truncation", "", "auto"),
        ("background", "", True),
        ("conversation", "", "conv_1"),
        ("prompt", "", {"id": "p"}),
        ("modalities.0", "", "audio"),
        ("cache_control", "", {"type": "ephemeral"}),
        ("prefix_cache.scope", "", "sometimes"),
    ],
}
"""The path of a field, words of the message, and values that it must not have."""


def block(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [value]}]}


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "print(1)"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}}
BASE64 = {"type": "image", "source": {"type": "base64"}}
BEGUN = [USER, {"role": "assistant", "content": "The answer is"}]
GO_ON = {"continue_final_message": True}
IMAGE = {"type": "input_image", "file_id": "f"}
BODIES: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"tools": [], "tool_choice": "required"}, "tool_choice", "no tool is offered"),
    (
        "chat",
        {"continue_final_message": True, "messages": CHAT["messages"][:1]},
        "continue_final_message",
        "text alone",
    ),
    ("chat", GO_ON | {"add_generation_prompt": True, "messages": BEGUN}, "continue_final_message", "is not allowed"),
    ("chat", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "needs the type"),
    ("chat", {"prefix_cache": {"scope": "full", "window": 8}}, "prefix_cache.window", ""),
    ("chat", {"prefix_cache": {"salt": "swordfish"}, "cache_salt": "swordfisch"}, "cache_salt", ""),
    *(("completions", {"prompt": [wrong]}, "prompt.0", "") for wrong in (1.5, True, "", list[Any]())),
    *(("completions", {"prompt": list(wrong)}, "prompt.1", "") for wrong in ((1, "a"), ("a", 1), ("a", ""))),
    ("completions", {"prompt": [[1], [True]]}, "prompt.1.0", ""),
    ("messages", block(USE), "messages.0.content.0.type", "'tool_use' is not supported in a message of role user"),
    ("messages", block({"type": "tool_result"}), "messages.0.content.0.tool_use_id", "is required"),
    ("messages", block({"type": "image", "source": {"type": "file"}}), "messages.0.content.0.source", "of type base64"),
    ("messages", block(BASE64), "messages.0.content.0.source.media_type", "is required"),
    ("messages", block(DOCUMENT | {"source": {"type": "text"}}), "messages.0.content.0.source.data", "is required"),
    ("messages", {"tools": [SEARCH]}, "tools.0.type", "run by Anthropic's servers, and no other tool is offered"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "is not known here"),
    ("messages", {"tools": [], "tool_choice": {"type": "any"}}, "tool_choice", "no tool is offered"),
    ("responses", {"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0.image_url", ""),
    ("responses", {"input": [{"type": "item_reference"}]}, "input.0.id", ""),
    ("responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tool is offered"),
    ("responses", {"tools": [NAMED]}, "tools.0.name", ""),
    ("chat", {"messages": [USER] * (MAX_MESSAGES + 1)}, "messages", "must have at most "),
    ("chat", {"messages": [USER | {"content": PARTS[:1] * (MAX_PARTS + 1)}]}, "messages.0.content", "have at most "),
    ("chat", {"tools": [NAMED] * (MAX_TOOLS + 1)}, "tools", "must have at most "),
    ("messages", {"messages": [USER] * (MAX_MESSAGES + 1)}, "messages", "must have at most "),
    ("messages", {"system": PARTS[:1] * (MAX_PARTS + 1)}, "system", "must have at most "),
    ("responses", {"input": [USER] * (MAX_MESSAGES + 1)}, "input", "must have at most "),
    ("responses", {"tools": [{"type": "function", "name": "f"}] * (MAX_TOOLS + 1)}, "tools", "must have at most "),
]
"""Fields that are changed together, the path that the error names, and words of the message."""


def with_value(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(body))
    place: Any = changed
    steps: list[Any] = [int(step) if step.isdigit() and "logit" not in path else step for step in path.split(".")]
    *parents, last = steps
    for step in parents:
        place = place[step] if isinstance(place, list) else place.setdefault(step, {})
    if value is GONE:
        place.pop(last, None)
    else:
        place[last] = value
    return changed


TAKES_ALL: Any = SimpleNamespace(problem=None, read_image=lambda *_, **__: None)
"""A processor that reads all pictures."""


class NoNotes:
    def get(self, _kind: NoteKind, _id: str) -> None:
        return None


def read(api: str, body: dict[str, Any]) -> None:
    """Reads all that is checked before a request is submitted."""
    dialect, _ = APIS[api]
    parsed = parse_json(json.dumps(body).encode(), dialect.body)
    asked = dialect.read(parsed, 1000, lambda: cast("TenantNotes", NoNotes()))
    if isinstance(asked.prompt, Conversation):
        read_pictures(TAKES_ALL, note_unread(TAKES_ALL, PromptDraft(conversation=asked.prompt)))
    asked.tool_choice.check(getattr(asked.prompt, "tools", None) or ())
    cache_options(parsed, scope=Scope("full"), caller=SHARED)


@pytest.mark.parametrize("api", APIS)
def test_the_body_that_is_changed_is_taken(api: str) -> None:
    read(api, APIS[api][1])


WRONG = [
    pytest.param(api, with_value(APIS[api][1], path, value), path, words, id=f"{api} {path} {str(value)[:20]}")
    for api, rows in AT.items()
    for path, words, *values in rows
    for value in values
] + [
    pytest.param(api, APIS[api][1] | fields, path, words, id=f"{api} {path} {words}")
    for api, fields, path, words in BODIES
]


@pytest.mark.parametrize(("api", "body", "path", "words"), WRONG)
def test_a_wrong_field_is_named_by_its_path(api: str, body: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(api, body)
    error = caught.value
    assert (error.param, error.http_status) == (path, 400)
    assert error.message.startswith(f"{path}: ")
    assert words in error.message
    assert len(error.message.splitlines()) == 1
    assert len(error.message) < 300
    assert "sword" not in error.message, "a salt is not repeated"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["function", "id"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "id", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@pytest.mark.cases(2)
@pytest.mark.parametrize("api", APIS)
@given(st.data())
@settings(max_examples=100)
def test_each_wrong_field_is_refused_with_its_param(api: str, data: st.DataObject) -> None:
    dialect, body = APIS[api]
    changed = deepcopy(body)
    for _ in range(data.draw(st.integers(1, 2))):
        fields = [(changed, name) for name in dialect.body.model_fields]
        container, key = data.draw(st.sampled_from(places(changed) + fields))
        if data.draw(st.booleans()) and isinstance(container, dict):
            container.pop(key, None)
        else:
            container[key] = data.draw(_JSON)
    error = refusal(api, changed)
    assert error is None or (error.param and "\n" not in error.message)


def refusal(api: str, body: dict[str, Any]) -> InvalidRequest | None:
    try:
        read(api, body)
    except InvalidRequest as error:
        return error
    return None


WRONG_NUMBERS = [1.5] * 3


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("completions", {"prompt": WRONG_NUMBERS}),
        ("chat", {"messages": [USER], "modalities": WRONG_NUMBERS}),
        ("chat", {"messages": [USER], "structured_outputs": {"choice": WRONG_NUMBERS}}),
        ("chat", {"messages": [USER], "logit_bias": {"1": "a", "2": "b"}}),
        ("chat", {"messages": [USER], "tools": [{"type": "function", "function": {"name": 1}}] * 3}),
        ("messages", {"max_tokens": 1, "messages": [USER], "system": [{"type": "text", "text": 1}] * 3}),
        ("responses", {"input": "hello", "include": WRONG_NUMBERS}),
    ],
)
def test_a_list_is_read_up_to_its_first_error(api: str, fields: dict[str, Any]) -> None:
    """Each takes two kilobytes, and a body may have two million values. A wrong integer is two errors."""
    with pytest.raises(ValidationError) as caught:
        APIS[api][0].body.model_validate_json(json.dumps(fields))
    assert caught.value.error_count() <= 2

"""What OpenAI's bodies ask of the cache, and chats and prompts in neutral words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diskprefix.daemon.api.fields import MAX_TTL_S, cache_options
from diskprefix.daemon.api.openai import CompletionRequest
from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.chat.messages import CacheMark, ImagePart
from diskprefix.daemon.server.body import parse_json
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.values import SHARED, CacheOptions, Scope, Tenant

USER = {"role": "user", "content": "hello"}
BEGUN = [USER, {"role": "assistant", "content": "The answer is"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MARK = {"cache_control": {"type": "ephemeral"}}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]


def chat(**fields: Any) -> ChatRequest:
    return parse_json(json.dumps({"messages": [USER]} | fields).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse_json(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest)


def test_fields_that_other_servers_know_are_ignored_and_null_means_absent() -> None:
    ignored = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "verbosity": "low", "new": [1]}
    names = ("temperature", "stop", "tools", "seed", "stream_options", "prefix_cache", "logit_bias", "cache_control")
    nulls: dict[str, Any] = dict.fromkeys(names)
    said = {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}
    marked = {"messages": [{"role": "assistant", "tool_calls": [CALL | {"cache_control": None}]}]}
    assert chat(**ignored, **nulls, **marked).conversation == chat(**said).conversation
    assert completion(cache_control=None).prompt == "x"


def test_tools_keep_their_keys_and_lose_their_marks() -> None:
    parameters = {"properties": {"cache_control": {"type": "string"}, "a": {}}}
    function = {"parameters": parameters, "strict": True, "name": "f"}
    plain = {"function": function, "type": "function"}
    tools = [CALL, plain, MARK | {"function": MARK | function, "type": "function"}]
    parsed = chat(tools=[*tools, {"function": {"name": "g"} | MARK, "type": "function"}]).conversation
    assert json.dumps(parsed.tools) == json.dumps([CALL, plain, plain, {"function": {"name": "g"}, "type": "function"}])
    assert [index for index, _ in parsed.tool_marks] == [2, 2, 3]


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, "reply"),
        ({"add_generation_prompt": False}, "none"),
        ({"messages": BEGUN}, "continue"),
        ({"messages": BEGUN, "continue_final_message": True}, "continue"),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}, "continue"),
        ({"messages": BEGUN, "continue_final_message": False}, "reply"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "reply"),
        ({"messages": BEGUN, "add_generation_prompt": False}, "none"),
        ({"messages": [*BEGUN, USER]}, "reply"),
        ({"messages": [USER, {"role": "assistant", "content": "So:", "tool_calls": [CALL]}]}, "reply"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "reply"),
    ],
)
def test_an_assistants_text_at_the_end_is_gone_on_with(fields: dict[str, Any], ending: str) -> None:
    assert chat(**fields).conversation.ending == ending


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_by_either_name_and_needs_no_content(name: str) -> None:
    conversation = chat(messages=[USER, {"role": "assistant", name: "hm"}, USER]).conversation
    assert (conversation.messages[1].reasoning, conversation.messages[1].content) == ("hm", ())


def test_each_part_knows_its_path() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "see"}, image | MARK]
    conversation = chat(messages=[USER, {"role": "user", "content": parts}], tools=TOOLS).conversation
    assert [part.path for message in conversation.messages for part in message.content] == [
        "messages.0.content",
        "messages.1.content.0.text",
        "messages.1.content.1",
    ]
    assert [message.mark for message in conversation.messages] == [None, CacheMark()], "a mark on a picture is on it"
    assert list(conversation.tool_paths) == ["tools.0.function.parameters", "tools.1.function.parameters"]


@pytest.mark.parametrize(
    ("asked", "detail"),
    [({}, "auto"), ({"detail": None}, "auto"), ({"detail": "low"}, "low"), ({"detail": "original"}, "high")],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_an_image_is_looked_at_as_closely_as_was_asked(asked: Any, detail: Any, role: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"} | asked}
    [part] = chat(messages=[{"role": role, "content": [image]}]).conversation.messages[0].content
    path = "messages.0.content.0"
    assert part == ImagePart("data:x", path, f"{path}.image_url.url", detail, in_history=role == "tool")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["text"], ["text"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], "b", [2, 3]], [[1], "b", [2, 3]]),
    ],
)
def test_a_body_has_one_prompt_or_a_list_of_them(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


KEY = Tenant.of_key("0123456789abcdef")
AUTO = Scope("auto", 30)


def options_of(caller: Tenant = SHARED, scope: Scope = AUTO, **fields: Any) -> CacheOptions:
    of_chat, of_text = (
        cache_options(body, scope=scope, caller=caller) for body in (chat(**fields), completion(**fields))
    )
    assert of_chat == of_text
    return of_chat


@pytest.mark.parametrize(
    ("options", "default", "expected"),
    [
        ({}, Scope("full"), "full"),
        ({"scope": "off"}, Scope("full"), "off"),
        ({"scope": " Auto "}, Scope("full"), "auto:30"),
        ({"scope": 1000}, Scope("full"), "1000"),
        ({"scope": "1000"}, Scope("full"), "1000"),
        ({"scope": "auto:5", "window": 8}, Scope("full"), "auto:8"),
        ({"window": 8}, AUTO, "auto:8"),
    ],
)
def test_the_scope_of_a_request_replaces_the_daemons(options: dict[str, Any], default: Scope, expected: str) -> None:
    parsed = options_of(scope=default, prefix_cache=options)
    assert (str(parsed.scope), parsed.is_asked) == (expected, bool(options))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prefix_cache": None, "prompt_cache_key": None, "prompt_cache_retention": None, "cache_salt": None},
        {"prefix_cache": {"salt": None}},
        {"prefix_cache": {"save": True}},
        {"user": "a"},
    ],
)
def test_a_request_that_says_nothing_leaves_the_cache_to_the_daemon(fields: dict[str, Any]) -> None:
    for caller in (SHARED, KEY):
        assert options_of(caller, **fields) == CacheOptions(scope=AUTO, tenant=caller)
    assert not options_of(**fields | {"prefix_cache": {"save": False}}).save


@pytest.mark.parametrize(
    ("fields", "ttl_s"),
    [
        ({"prompt_cache_retention": "in_memory"}, 3600),
        ({"prompt_cache_retention": "in-memory"}, 3600),
        ({"prompt_cache_retention": "24h"}, 86400),
        ({"prefix_cache": {"ttl": "5m"}}, 300),
        ({"prefix_cache": {"ttl": "1.5h"}}, 5400),
        ({"prefix_cache": {"ttl": " 7d "}}, 7 * 86400),
        ({"prefix_cache": {"ttl": "90"}}, 90),
        ({"prefix_cache": {"ttl": 1}}, 1),
        ({"prefix_cache": {"ttl": 2.5}}, 2.5),
        ({"prefix_cache": {"ttl": MAX_TTL_S}}, MAX_TTL_S),
        ({"prefix_cache": {"ttl": "5m"}, "prompt_cache_retention": "24h"}, 300),
        ({"prefix_cache": {"scope": "full"}, "prompt_cache_retention": "24h"}, 86400),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 1800),
        ({"prompt_cache_options": {"ttl": "30m"}, "prefix_cache": {"ttl": "12h"}}, 43200),
    ],
)
def test_a_request_says_how_long_it_is_kept(fields: dict[str, Any], ttl_s: float) -> None:
    options = options_of(**fields)
    assert (options.ttl_s, options.is_asked) == (ttl_s, True)
    assert recorded_ttl(MAX_TTL_S) == recorded_ttl(MAX_TTL_S + 1) == MAX_TTL_S, "the longest that the store holds"


@pytest.mark.parametrize(
    ("fields", "scope"),
    [
        ({"prompt_cache_options": {}}, "auto:30"),
        ({"prompt_cache_options": {"mode": "implicit", "prewarm": False}}, "auto:30"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "1"),
        ({"prompt_cache_options": {"mode": "explicit", "prewarm": True}}, "1"),
        ({"prompt_cache_options": {"prewarm": True}}, "full"),
        ({"prompt_cache_options": {"prewarm": True}, "prefix_cache": {"scope": "auto:8"}}, "auto:8"),
    ],
)
def test_openais_options_of_the_cache_choose_a_scope(fields: dict[str, Any], scope: str) -> None:
    assert str(options_of(**fields).scope) == scope
    # They ask for what is kept, not whether anything is.
    assert str(options_of(scope=Scope("off"), **fields).scope) == ("auto:8" if "prefix_cache" in fields else "off")


def test_the_session_of_an_agent_is_the_group_of_a_request_without_a_key() -> None:
    groups = [
        cache_options(chat(**fields), scope=AUTO, caller=SHARED, session="a").group
        for fields in ({}, {"prompt_cache_key": "b"})
    ]
    assert groups == [options_of(prompt_cache_key=key).group for key in "ab"]


def test_requests_with_the_same_cache_key_are_a_group_of_any_tenant() -> None:
    keys = ["a", "b", "a" * 512, "\u00fc", "\0", " "]
    parsed = [options_of(prompt_cache_key=key) for key in keys]
    assert parsed == [options_of(prompt_cache_key=key) for key in keys]
    assert len({options.group for options in parsed}) == len(keys)
    assert {(len(options.group), options.tenant) for options in parsed} == {(8, SHARED)}
    assert options_of(prompt_cache_key="a", cache_salt="a").group == parsed[0].group


@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({"prefix_cache": {"salt": "a"}}, "a"),
        ({"prefix_cache": {"salt": "a"}, "cache_salt": "a"}, "a"),
        ({"prefix_cache": {"salt": "a"}, "cache_salt": None}, "a"),
        ({"prefix_cache": {"scope": "full"}, "cache_salt": "a"}, "a"),
        ({"prefix_cache": None, "cache_salt": "a"}, "a"),
        *(({"cache_salt": salt}, salt) for salt in (" ", "\0", "x" * 256, "\u00fc", "\U0001f980", "a/b")),
    ],
)
def test_either_salt_names_the_tenant(fields: dict[str, Any], salt: str) -> None:
    for caller in (SHARED, KEY):
        assert options_of(caller, **fields).tenant == caller.with_salt(salt)

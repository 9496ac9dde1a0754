"""The fields that a body may have, and the errors of one that holds something else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from diskprefix.api.anthropic import MessagesRequest
from diskprefix.api.fields import MAX_TTL_S, cache_options, tenant_of
from diskprefix.api.openai import CompletionRequest
from diskprefix.api.openai_chat import ChatRequest
from diskprefix.api.responses import ResponseRequest
from diskprefix.errors import InvalidRequest
from diskprefix.nouns import SHARED, CacheOptions, Scope, Tenant
from diskprefix.server.body import parse_json
from diskprefix.store.eviction import recorded_ttl

USER = {"role": "user", "content": "hello"}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> ChatRequest:
    return parse_json(json.dumps({"messages": [USER]} | fields).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse_json(json.dumps(fields).encode(), CompletionRequest)


def test_content_of_every_known_kind_is_understood() -> None:
    """The model is asked later whether it takes them."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "see:"},
        {"type": "image_url", "image_url": {"url": "data:", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {"file_id": "x"}},
    ]
    content = chat(messages=[{"role": "user", "content": parts}]).messages[0].content
    assert [part.type for part in content or () if not isinstance(part, str)] == [part["type"] for part in parts]


def test_fields_that_other_servers_know_are_ignored_and_null_means_absent() -> None:
    ignored = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "verbosity": "low", "new": [1]}
    nulls = dict.fromkeys(("temperature", "stop", "tools", "seed", "stream_options", "prefix_cache", "logit_bias"))
    body = chat(**ignored, **nulls)
    assert body.temperature is None
    assert body.prefix_cache is None


def test_tools_keep_the_order_and_the_fields_of_the_client() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "strict": True, "name": "f"}, "type": "function"}
    assert json.dumps(chat(tools=[tool]).conversation.tools) == json.dumps([tool])


MARK = {"cache_control": {"type": "ephemeral"}}


def test_a_mark_on_a_tool_or_its_function_is_not_offered_to_the_model() -> None:
    parameters = {"properties": {"cache_control": {"type": "string"}}}
    plain = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    marked = MARK | {"type": "function", "function": MARK | {"name": "f", "parameters": parameters}}
    in_function = {"type": "function", "function": {"name": "g"} | MARK}
    body = chat(tools=[CALL, marked, in_function])
    assert json.dumps(body.conversation.tools) == json.dumps(
        [CALL, plain, {"type": "function", "function": {"name": "g"}}]
    )
    assert [index for index, _ in body.conversation.tool_marks] == [1, 1, 2]


def test_null_is_no_mark() -> None:
    call = CALL | {"cache_control": None}
    assert chat(messages=[{"role": "assistant", "tool_calls": [call]}], cache_control=None).messages
    assert completion(prompt="x", cache_control=None).prompt == "x"


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
def test_no_tools_are_offered_where_there_are_none_or_they_are_not_to_be_used(fields: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(**({"tools": tools} | fields)).conversation.tools is None


def test_an_assistant_message_with_tool_calls_needs_no_content() -> None:
    assert chat(messages=[{"role": "assistant", "tool_calls": [CALL]}]).messages[0].content is None


@pytest.mark.parametrize(
    ("options", "default", "expected"),
    [
        ({}, "full", "full"),
        ({"scope": "off"}, "full", "off"),
        ({"scope": " Auto "}, "full", "auto:30"),
        ({"scope": 1000}, "full", "1000"),
        ({"scope": "1000"}, "full", "1000"),
        ({"scope": "auto:5", "window": 8}, "full", "auto:8"),
        ({"window": 8}, "auto", "auto:8"),
    ],
)
def test_the_scope_of_a_request_replaces_the_daemons(options: dict[str, Any], default: str, expected: str) -> None:
    defaults = {"full": Scope("full"), "auto": Scope("auto", 30)}
    body = chat(prefix_cache=options)
    found = cache_options(body, scope=defaults[default], caller=SHARED)
    assert str(found.scope) == expected


def test_a_window_beside_a_scope_without_one_is_refused() -> None:
    body = chat(prefix_cache={"scope": "full", "window": 8})
    with pytest.raises(InvalidRequest) as caught:
        cache_options(body, scope=Scope("auto", 30), caller=SHARED)
    assert caught.value.param == "prefix_cache.window"


def options_of(**fields: Any) -> CacheOptions:
    default = Scope("auto", 30)
    of_chat, of_text = (
        cache_options(body, scope=default, caller=SHARED) for body in (chat(**fields), completion(prompt="x", **fields))
    )
    assert of_chat == of_text
    return of_chat


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prefix_cache": None, "prompt_cache_key": None, "prompt_cache_retention": None},
        {"prefix_cache": {}},
        {"prefix_cache": {"save": True}},
    ],
)
def test_a_request_that_says_nothing_leaves_the_cache_to_the_daemon(fields: dict[str, Any]) -> None:
    assert options_of(**fields) == CacheOptions(scope=Scope("auto", 30))


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
    ],
)
def test_a_request_says_how_long_it_is_kept(fields: dict[str, Any], ttl_s: float) -> None:
    options = options_of(**fields)
    assert (options.ttl_s, options.is_asked) == (ttl_s, True)


@pytest.mark.parametrize(
    ("asked", "is_asked"), [({"window": 7}, True), ({"scope": "full"}, True), ({"save": True}, False)]
)
def test_a_request_that_says_what_to_keep_asks_for_it(asked: dict[str, Any], *, is_asked: bool) -> None:
    assert options_of(prefix_cache=asked).is_asked == is_asked


def test_the_longest_time_that_can_be_asked_for_is_the_longest_that_the_store_holds() -> None:
    assert recorded_ttl(MAX_TTL_S) == recorded_ttl(MAX_TTL_S + 1) == MAX_TTL_S


def test_a_request_that_saves_nothing_only_reads() -> None:
    assert not options_of(prefix_cache={"save": False}).save


def test_requests_with_the_same_cache_key_are_a_group() -> None:
    keys = ["a", "b", "a" * 512, "\u00fc", "\0", " "]
    groups = [options_of(prompt_cache_key=key).group for key in keys]
    assert groups == [options_of(prompt_cache_key=key).group for key in keys]
    assert len(set(groups)) == len(keys)
    assert {len(group) for group in groups} == {8}
    assert options_of(prompt_cache_key="a", cache_salt="a").group == groups[0]


def test_a_cache_key_is_no_salt() -> None:
    assert options_of(prompt_cache_key="a").tenant == SHARED


KEY = Tenant.of_key("0123456789abcdef")


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_cache": {"salt": "a"}},
        {"cache_salt": "a"},
        {"prefix_cache": {"salt": "a"}, "cache_salt": "a"},
        {"prefix_cache": {"salt": "a"}, "cache_salt": None},
        {"prefix_cache": {"scope": "full"}, "cache_salt": "a"},
        {"prefix_cache": None, "cache_salt": "a"},
    ],
)
def test_either_salt_names_the_tenant(fields: dict[str, Any]) -> None:
    for body in (chat(**fields), completion(prompt="x", **fields)):
        assert tenant_of(body, SHARED) == SHARED.with_salt("a")
        assert tenant_of(body, KEY) == KEY.with_salt("a")


@pytest.mark.parametrize(
    "fields", [{}, {"cache_salt": None}, {"prefix_cache": {}}, {"prefix_cache": {"salt": None}}, {"user": "a"}]
)
def test_without_a_salt_the_tenant_is_the_callers(fields: dict[str, Any]) -> None:
    assert tenant_of(chat(**fields), SHARED) == SHARED
    assert tenant_of(chat(**fields), KEY) == KEY


@pytest.mark.parametrize("salt", [" ", "\0", "x" * 256, "\u00fc", "\U0001f980", "a/b"])
def test_any_text_of_up_to_256_characters_is_a_salt(salt: str) -> None:
    assert tenant_of(chat(cache_salt=salt), SHARED) == SHARED.with_salt(salt)


def test_two_salts_that_differ_are_refused() -> None:
    body = chat(prefix_cache={"salt": "swordfish"}, cache_salt="swordfisch")
    with pytest.raises(InvalidRequest) as caught:
        tenant_of(body, SHARED)
    assert (caught.value.param, caught.value.http_status) == ("cache_salt", 400)
    assert "sword" not in caught.value.message


@pytest.mark.parametrize("salt", ["swordfish" * 40, ["swordfish"], {"swordfish": 1}])
def test_a_salt_that_is_refused_is_not_repeated(salt: Any) -> None:
    for fields in ({"cache_salt": salt}, {"prefix_cache": {"salt": salt}}):
        with pytest.raises(InvalidRequest) as caught:
            chat(**fields)
        assert "sword" not in caught.value.message


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


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], 5, None, [1, "a"], ["a", 1], [1.5], [True], ["a", ""], [[1], [True]], ["a"] * 257]
)
def test_no_prompt_and_other_things_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert str(caught.value.param).startswith("prompt")


def test_a_byte_order_mark_is_no_error() -> None:
    assert parse_json(b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "x"}]}', ChatRequest)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields}))


@given(st.dictionaries(_FIELDS, _JSON, max_size=6))
def test_any_json_is_either_accepted_or_refused_with_a_param(fields: dict[str, Any]) -> None:
    for model in (ChatRequest, CompletionRequest):
        error = error_of(fields, model)
        assert error is None or (error.param and "\n" not in error.message)


@given(st.dictionaries(_FIELDS, _JSON, max_size=3), st.sampled_from([None, "auto", "none", "required", NAMED]))
def test_any_chat_that_is_read_says_what_it_asks_for_or_is_refused_with_a_param(
    fields: dict[str, Any], tool_choice: Any
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = error_of(fields | {"messages": [USER], "tools": tools, "tool_choice": tool_choice}, ChatRequest)
    assert error is None or (error.param and "\n" not in error.message)


def error_of(fields: dict[str, Any], model: type[BaseModel]) -> InvalidRequest | None:
    try:
        body = parse_json(json.dumps(fields).encode(), model)
        if isinstance(body, ChatRequest):
            _ = body.conversation, body.choice, body.text_format
    except InvalidRequest as error:
        return error
    return None


WRONG_PARTS = [{"role": "user", "content": [{"type": "text", "text": 1}] * 3}] * 3
WRONG_NUMBERS = [1.5] * 3


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": WRONG_NUMBERS}),
        (ChatRequest, {"messages": WRONG_PARTS}),
        (ChatRequest, {"messages": [USER], "modalities": WRONG_NUMBERS}),
        (ChatRequest, {"messages": [USER], "structured_outputs": {"choice": WRONG_NUMBERS}}),
        (ChatRequest, {"messages": [USER], "logit_bias": {"1": "a", "2": "b"}}),
        (ChatRequest, {"messages": [USER], "tools": [{"type": "function", "function": {"name": 1}}] * 3}),
        (MessagesRequest, {"max_tokens": 1, "messages": WRONG_PARTS}),
        (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}] * 3}] * 3}),
        (ResponseRequest, {"input": "hello", "include": WRONG_NUMBERS}),
    ],
)
def test_a_list_is_read_up_to_its_first_error(model: type[BaseModel], fields: dict[str, Any]) -> None:
    """Each takes two kilobytes, and a body may have two million values."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(fields))
    assert caught.value.error_count() == 1

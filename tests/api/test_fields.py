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


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages.1.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": 5}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -5e-324}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.01}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"repetition_penalty": 0.0099}, "repetition_penalty"),
        ({"repetition_penalty": 100.1}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["a", "x" * 1025]}, "stop.1"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"return_progress": 1}, "return_progress"),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"prefix_cache": "full"}, "prefix_cache"),
        ({"prefix_cache": {"scope": "sometimes"}}, "prefix_cache.scope"),
        ({"prefix_cache": {"scope": ["auto"]}}, "prefix_cache.scope"),
        ({"prefix_cache": {"scope": True}}, "prefix_cache.scope"),
        ({"prefix_cache": {"scope": 1.5}}, "prefix_cache.scope"),
        ({"prefix_cache": {"scope": 0}}, "prefix_cache.scope"),
        ({"prefix_cache": {"scope": None}}, "prefix_cache.scope"),
        ({"prefix_cache": {"window": "8"}}, "prefix_cache.window"),
        ({"prefix_cache": {"window": 0}}, "prefix_cache.window"),
        ({"prefix_cache": {"window": 10**4000}}, "prefix_cache.window"),
        ({"prefix_cache": {"window": None}}, "prefix_cache.window"),
        ({"prefix_cache": {"widow": 8}}, "prefix_cache.widow"),
        ({"prefix_cache": {"save": "false"}}, "prefix_cache.save"),
        ({"prefix_cache": {"save": None}}, "prefix_cache.save"),
        ({"prefix_cache": {"ttl": None}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": ""}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": "soon"}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": "-5m"}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": "5M"}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": "\u0665m"}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": 2**31}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": "0.5s"}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": "24856d"}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": "9" * 5000}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": 0}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": 10**400}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": True}}, "prefix_cache.ttl"),
        ({"prefix_cache": {"ttl": ["5m"]}}, "prefix_cache.ttl"),
        ({"prompt_cache_key": ""}, "prompt_cache_key"),
        ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prompt_cache_retention": ""}, "prompt_cache_retention"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        ({"prefix_cache": {"salt": ""}}, "prefix_cache.salt"),
        ({"prefix_cache": {"salt": ["a"]}}, "prefix_cache.salt"),
        ({"prefix_cache": {"salt": "x" * 257}}, "prefix_cache.salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": {"salt": "a"}}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert error.http_status == 400


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": "data:"}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "some"}}, ".image_url.detail"),
        ({"type": "input_audio", "input_audio": {"data": "x"}}, ".input_audio.format"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, ".input_audio.data"),
        ({"type": "smell"}, ".type"),
        ({"type": 5}, ".type"),
        ({"type": ["text"]}, ".type"),
        ({}, ".type"),
        ("see", ""),
    ],
)
def test_a_wrong_content_part_is_named_by_its_path(part: dict[str, Any], param: str) -> None:
    error = refusal(messages=[{"role": "user", "content": [{"type": "text", "text": "see:"}, part]}])
    assert error.param == f"messages.0.content.1{param}"


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


def test_the_value_at_fault_is_shown_if_it_is_short() -> None:
    assert "(got -5)" in refusal(max_tokens=-5).message
    assert len(refusal(seed="9" * 10_000).message) < 200


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


MARKED_FUNCTION = {"name": "f", "arguments": "{}"} | MARK
MARKED_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:"} | MARK},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"} | MARK},
]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (MARK, ""),
        ({"cache_control": "ephemeral"}, ""),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL, CALL | MARK]}]}, "messages.0.tool_calls.1."),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": MARKED_FUNCTION}]}]},
            "messages.0.tool_calls.0.function.",
        ),
        ({"messages": [{"role": "user", "content": MARKED_PARTS[:1]}]}, "messages.0.content.0.image_url."),
        ({"messages": [{"role": "user", "content": MARKED_PARTS[1:]}]}, "messages.0.content.0.input_audio."),
    ],
)
def test_a_mark_where_nothing_can_be_marked_is_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == f"{param}cache_control"
    assert error.message == f"{error.param}: is not allowed here; mark a message, a content part or a tool"


def test_raw_prompts_are_not_marked_and_null_is_no_mark() -> None:
    with pytest.raises(InvalidRequest, match="cache_control: is not allowed here"):
        completion(prompt="x", **MARK)
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
        assert "sword" not in refusal(**fields).message


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


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": 5}, {"logprobs": 21}, {"best_of": 0}])
def test_what_completions_do_not_support_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt="x", **fields)
    assert caught.value.param == next(iter(fields))


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

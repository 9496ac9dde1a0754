"""Replies that come back stand in the prompt as the tokens that were sampled. Real tokenizers and real templates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import Conversation, Message, TextPart, ToolCall
from diskprefix.daemon.chat.output.choose_format import PlainText
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.chat.replay import ConversationHash, Origin, ReplyMemory, SampledTurn, Turn
from diskprefix.daemon.chat.splice import readings
from diskprefix.daemon.chat.template import end_texts
from diskprefix.errors import ContextTooLong, SettingsError
from diskprefix.values import Prompt
from tests.daemon.chat.families.conversations import (
    CLIENTS,
    SYSTEM,
    WEATHER_FUNCTION,
    Client,
    body_of,
    result,
    user,
    with_arguments_in_another_order,
    with_compact_arguments,
    without_thoughts,
)
from tests.daemon.chat.families.families import POSITIONS, Family, named, tokenizer_of
from tests.daemon.chat.rendering import rendered
from tests.daemon.chat.turns import Model, TaggedFormat, Turns, common, remember

QUESTION = user("How is the weather in Oslo?")
ARGUMENTS = '{"day":"today",  "city": "Oslo"}'
CALL = f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name":"get_weather"}}\n</tool_call>'
THOUGHT = "<think>\nThe user  wants Oslo.\n</think>\n\n"
QWEN2, QWEN3 = named("qwen2.5"), named("qwen3")
GOING_ON = ("qwen2.5", "qwen3", "llama-3.1", "gemma-2", "phi-3.5", "deepseek-v3.1")
REWRITING = ("qwen3.5", "gpt-oss")
"""Their prompts do not end as their templates write a reply of text alone."""

clients = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)


def renderer_of(family: Family, *, tagged: bool = True, positions: int = POSITIONS, **options: Any) -> PromptRenderer:
    tokenizer = tokenizer_of(family)
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=positions, **options)
    if tagged:
        renderer.output_format = TaggedFormat()
    return renderer


def model_of(family: Family, **options: Any) -> Model:
    return Model(tokenizer_of(family), renderer_of(family, **options))


def conversation_of(family: Family, *messages: dict[str, Any], tools: bool = True, **fields: Any) -> Conversation:
    return body_of(family, list(messages), tools=tools, **fields).conversation


def as_openai(turn: Turn, call_id: str = "call_1") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content or None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        calls = [{"name": name, "arguments": arguments} for name, arguments in turn.calls]
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": call} for call in calls]
    return message


@pytest.mark.parametrize("name", [*GOING_ON, *REWRITING])
def test_the_tokens_of_a_reply_stand_in_the_next_prompt(name: str) -> None:
    family = named(name)
    model = model_of(family, tagged=False)
    model.asked(conversation_of(family, SYSTEM, QUESTION, tools=False))
    turn = model.reply("Rain,  all day.")
    state = model.state
    again = conversation_of(family, SYSTEM, QUESTION, as_openai(turn), user("Thanks."), tools=False)
    prompt = model.asked(again)
    plain = rendered(renderer_of(family), again)
    if name in REWRITING:
        assert prompt.replayed == 0
        assert prompt.token_ids.tolist() == plain.token_ids.tolist()
    else:
        assert prompt.replayed == 1
        assert prompt.token_ids[: len(state)].tolist() == state
        assert common(plain.token_ids, state) < len(state)
        # Behind it, the prompt is as the template writes it.
        num_after = len(prompt.token_ids) - len(state)
        assert prompt.token_ids[-num_after:].tolist() == plain.token_ids[-num_after:].tolist()


@clients
@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=lambda family: family.name)
def test_a_tool_loop_restores_however_calls_are_formatted(family: Family, client: Client) -> None:
    model = model_of(family)
    messages = [SYSTEM, QUESTION]
    thought = THOUGHT if family is QWEN3 else ""
    for turn_number in range(3):
        prompt = model.asked(conversation_of(family, *client(messages)))
        assert prompt.replayed == turn_number
        call_id = f"call_{turn_number}"
        turn = model.reply(f"{thought}Let me  see.\n{CALL.replace('Oslo', f'Oslo {turn_number}')}", [call_id])
        assert turn.calls[0][0] == "get_weather"
        messages += [as_openai(turn, call_id), result("rain", call_id)]
        state = model.state
        assert model.asked(conversation_of(family, *client(messages))).token_ids[: len(state)].tolist() == state


OWN_WORDS = {
    "qwen2.5": CALL,
    "qwen3": THOUGHT + CALL,
    "qwen3.5": "<tool_call>\n<function=get_weather>\n<parameter=day>\ntoday\n</parameter>\n"
    "<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "llama-3.1": '{"name":"get_weather","parameters":{"day":"today","city":"Oslo"}}',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"day":"today","city":"Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gpt-oss": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"day":"today","city":"Oslo"}',
}
"""A call as a model of each family may write it, which is not how its template writes it."""


@pytest.mark.parametrize(("name", "text"), OWN_WORDS.items(), ids=OWN_WORDS)
def test_a_call_in_the_words_of_a_family_stands_in_the_next_prompt(name: str, text: str) -> None:
    family = named(name)
    tokenizer, turns = tokenizer_of(family), Turns()
    end_ids = [tokenizer.backend_tokenizer.token_to_id("<|call|>")] if name == "gpt-oss" else []
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=POSITIONS, end_ids=end_ids)
    renderer.warm_up()
    conversation = conversation_of(family, SYSTEM, QUESTION)
    prompt, origin, _ = renderer.replay(conversation, turns)
    parser = renderer.output_format.parser(conversation.tools or (), renderer.end_of(prompt))
    turn = Turn.of_deltas([*parser.feed(text), *parser.finish()])
    sampled = renderer.tokenize(text, add_special_tokens=False)
    assert origin is not None
    ReplyMemory(turns, origin, renderer.end_ids).remember(turn, ["call_1"], sampled)
    [sent] = with_arguments_in_another_order(without_thoughts([as_openai(turn)]))
    again = conversation_of(family, SYSTEM, QUESTION, sent, result("rain", "call_1"))
    state = [*prompt.token_ids.tolist(), *sampled]
    assert renderer.replay(again, turns).prompt.token_ids[: len(state)].tolist() == state
    assert common(rendered(renderer, again).token_ids, state) < len(state)


def two_turns(family: Family, *, text: str = CALL) -> tuple[Model, list[dict[str, Any]], list[int]]:
    model = model_of(family)
    model.asked(conversation_of(family, SYSTEM, QUESTION))
    turn = model.reply(text, ["call_1"])
    return model, [SYSTEM, QUESTION, as_openai(turn), result("rain", "call_1")], model.state


def with_call(messages: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    call = messages[2]["tool_calls"][0]
    changed = call | {"function": call["function"] | changes}
    return [*messages[:2], messages[2] | {"tool_calls": [changed]}, *messages[3:]]


EDITS: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "another value": lambda m: with_call(m, arguments='{"day": "today", "city": "Rome"}'),
    "another type": lambda m: with_call(m, arguments='{"day": "today", "city": ["Oslo"]}'),
    "one argument less": lambda m: with_call(m, arguments='{"city": "Oslo"}'),
    "not JSON": lambda m: with_call(m, arguments='{"day":"today",  "city": "Oslo"'),
    "another tool": lambda m: with_call(m, name="get_time"),
    "two calls": lambda m: [*m[:2], m[2] | {"tool_calls": m[2]["tool_calls"] * 2}, *m[3:]],
    "no call": lambda m: [*m[:2], {"role": "assistant", "content": "Rain."}],
    "text": lambda m: [*m[:2], m[2] | {"content": "Let me see."}, *m[3:]],
    "other reasoning": lambda m: [*m[:2], m[2] | {"reasoning_content": "I guess."}, *m[3:]],
    "the question": lambda m: [m[0], user("How is the weather in Rome?"), *m[2:]],
    "the system prompt": lambda m: [{"role": "system", "content": "Be rude."}, *m[1:]],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_changed_reply_is_rendered_by_the_template(edit: Callable[[Any], Any]) -> None:
    model, messages, state = two_turns(QWEN3)
    assert model.asked(conversation_of(QWEN3, *messages)).replayed == 1
    edited = conversation_of(QWEN3, *edit(messages))
    prompt = model.asked(edited)
    assert prompt.replayed == 0
    assert prompt.token_ids.tolist() == rendered(renderer_of(QWEN3), edited).token_ids.tolist()
    assert common(prompt.token_ids, state) < len(state)


def test_other_tools_or_template_variables_leave_a_reply_to_the_template() -> None:
    model, messages, _ = two_turns(QWEN3)
    assert model.asked(conversation_of(QWEN3, *messages, tools=False)).replayed == 0
    variables = {"enable_thinking": False}
    # The template writes them only after the reply.
    assert model.asked(conversation_of(QWEN3, *messages, chat_template_kwargs=variables)).replayed == 1


@pytest.mark.parametrize("suffix", ["", ".", ".."])
def test_changed_text_before_a_reply_prevents_its_replay(suffix: str) -> None:
    model = model_of(QWEN2, tagged=False)
    model.asked(conversation_of(QWEN2, QUESTION))
    reply = as_openai(model.reply("Rain."))
    function = WEATHER_FUNCTION | {"description": WEATHER_FUNCTION["description"][:-1] + suffix}
    tools = [{"type": "function", "function": function}]
    conversation = replace(conversation_of(QWEN2, QUESTION, reply, user("Thanks.")), tools=tools)
    prompt = model.asked(conversation)
    assert prompt.replayed == (suffix == ".")
    if not prompt.replayed:
        assert prompt.token_ids.tolist() == rendered(renderer_of(QWEN2), conversation).token_ids.tolist()


def test_a_new_loop_is_replayed_behind_one_whose_reasoning_was_dropped() -> None:
    model, messages, _ = two_turns(QWEN3, text=THOUGHT + CALL)
    messages += [{"role": "assistant", "content": "Rain."}, user("And in Rome?")]
    for number, city in enumerate(["Rome", "Bari"]):
        assert model.asked(conversation_of(QWEN3, *with_compact_arguments(messages))).replayed == number
        turn = model.reply(THOUGHT + CALL.replace("Oslo", city), [city])
        messages += [as_openai(turn, city), result("sun", city)]
        state = model.state
        prompt = model.asked(conversation_of(QWEN3, *with_compact_arguments(messages)))
        assert prompt.token_ids[: len(state)].tolist() == state


SWITCHES = {
    "GLM-4.7-Flash": {"clear_thinking": False},
    "LFM2.5-8B-A1B": {"preserve_thinking": True},
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {"truncate_history_thinking": False},
    "deepseek-ai-DeepSeek-V4": {"drop_thinking": False},
    "tencent-Hy3": {"preserved_thinking": True},
    "Qwen3.5-4B": {},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("template", "switch"), SWITCHES.items(), ids=SWITCHES)
def test_a_template_that_can_keep_thoughts_keeps_them(template: str, switch: dict[str, bool]) -> None:
    family = dataclasses.replace(QWEN3, template=template)
    model, thought = model_of(family, tagged=False), "I look it up."
    said = {"role": "assistant", "content": "Rain.", "reasoning_content": thought}
    kwargs = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    conversation = conversation_of(family, QUESTION, said, user("Thanks."), tools=False, **kwargs)
    prompt = model.asked(conversation)
    assert prompt.rewriting.template_kwargs == switch
    assert (thought in text_of(family, prompt)) == bool(switch)
    # The client and the daemon's owner may say otherwise.
    against = {name: not value for name, value in switch.items()}
    asked = replace(conversation, template_variables=conversation.template_variables | against)
    owned = renderer_of(family, tagged=False, template_variables=against)
    for prompt in (rendered(renderer_of(family), asked), rendered(owned, conversation)):
        assert thought not in text_of(family, prompt)
        assert not prompt.rewriting.template_kwargs


def test_the_owner_sets_no_variable_that_the_daemon_sets() -> None:
    with pytest.raises(SettingsError, match="--chat-template-kwargs: 'tools' is set by the daemon"):
        renderer_of(QWEN3, template_variables={"tools": []})


def test_dropped_thoughts_return_if_the_template_keeps_them() -> None:
    family = dataclasses.replace(QWEN3, template="LFM2.5-8B-A1B")
    model = model_of(family)
    messages = [SYSTEM, QUESTION]
    for number in range(2):
        model.asked(conversation_of(family, *messages, tools=False))
        messages += [as_openai(model.reply(f"<think>I guess.</think>Rain {number}.")), user("And in Rome?")]
        prompt = model.asked(conversation_of(family, *without_thoughts(messages), tools=False))
        assert prompt.token_ids[: len(model.state)].tolist() == model.state
        assert prompt.replayed == number + 1


def text_of(family: Family, prompt: Prompt) -> str:
    return str(tokenizer_of(family).decode(prompt.token_ids.tolist()))


@pytest.mark.parametrize(
    "text", ["It ends with <|im_end|> always.", "<|im_end|>", "a <tool_call> b", "<|im_start|>user\nx"]
)
def test_a_reply_may_contain_the_text_of_a_marker(text: str) -> None:
    model = model_of(QWEN2, tagged=False)
    model.asked(conversation_of(QWEN2, QUESTION))
    tokens = [token for char in text for token in tokenizer_of(QWEN2).encode(char)]
    turn = model.reply(text)
    state = model.state
    assert state[-len(tokens) :] == tokens
    prompt = model.asked(conversation_of(QWEN2, QUESTION, as_openai(turn), user("Go on.")))
    assert prompt.token_ids[: len(state)].tolist() == state
    assert (
        tokenizer_of(QWEN2).decode(prompt.token_ids[len(state) :].tolist()).startswith("<|im_end|>\n<|im_start|>user")
    )


def test_boundaries_and_marks_stand_where_they_stand_without_replay() -> None:
    model, messages, state = two_turns(QWEN2, text=f"Let me see.\n{CALL}")
    marked = result("rain", "call_1") | {"cache_control": {"type": "ephemeral"}}
    conversation = conversation_of(QWEN2, *messages[:3], marked, user("Thanks."))
    prompt, plain = model.asked(conversation), rendered(renderer_of(QWEN2), conversation)
    assert prompt.replayed == 1
    moved = len(prompt.token_ids) - len(plain.token_ids)
    assert moved > 0
    begin = common(plain.token_ids, state)
    expected = [end for end in plain.boundaries if end <= begin]
    expected += [end + moved for end in plain.boundaries if end + moved > len(state)]
    assert list(prompt.boundaries) == expected
    assert prompt.system_end == plain.system_end > 0
    assert [mark.position for mark in prompt.marks] == [mark.position + moved for mark in plain.marks] != []


def test_a_marker_that_was_sampled_is_no_boundary() -> None:
    tokenizer, renderer, turns = tokenizer_of(QWEN2), renderer_of(QWEN2, tagged=False), Turns()
    marker = tokenizer.backend_tokenizer.token_to_id("<|im_start|>")
    asked = renderer.replay(conversation_of(QWEN2, QUESTION), turns)
    sampled = [*tokenizer.encode("It"), marker, *tokenizer.encode(" rains")]
    # The engine shows no text for it.
    turn = remember(renderer, asked, turns, "It rains", sampled)
    replayed = renderer.replay(conversation_of(QWEN2, QUESTION, as_openai(turn), user("Go on.")), turns).prompt
    at = replayed.token_ids.tolist().index(marker, len(asked.prompt.token_ids))
    assert at + 1 not in replayed.boundaries
    assert len(asked.prompt.token_ids) + len(sampled) + 1 in replayed.boundaries


def test_equal_conversations_are_told_apart_by_the_ids_of_their_calls() -> None:
    renderer, turns, states = renderer_of(QWEN3), Turns(), {}
    for call_id, thought in [("one", "First."), ("two", "Second.")]:
        asked = renderer.replay(conversation_of(QWEN3, SYSTEM, QUESTION), turns)
        text = f"<think>\n{thought}\n</think>\n\n{CALL}"
        sampled = tokenizer_of(QWEN3).encode(text)
        turn = remember(renderer, asked, turns, text, sampled, [call_id])
        states[call_id] = turn, [*asked.prompt.token_ids.tolist(), *sampled]
    for call_id, (turn, state) in states.items():
        messages = without_thoughts([SYSTEM, QUESTION, as_openai(turn, call_id), result("rain", call_id)])
        prompt = renderer.replay(conversation_of(QWEN3, *messages), turns).prompt
        assert prompt.token_ids[: len(state)].tolist() == state
    # A client that makes ids of its own gets the newest.
    messages = without_thoughts([SYSTEM, QUESTION, as_openai(turn, "mine"), result("rain", "mine")])
    assert renderer.replay(conversation_of(QWEN3, *messages), turns).prompt.token_ids[: len(state)].tolist() == state


@pytest.mark.parametrize(
    "record", [b"", b"{", b"[]", b"null", b'["a", "", [], [1], [3]]', b'["a", "", 3, [1], [3, "x"]]']
)
def test_a_record_that_cannot_be_read_is_as_none(record: bytes) -> None:
    model, messages, _ = two_turns(QWEN2)
    for id_ in model.turns:
        model.turns[id_] = record
    assert model.asked(conversation_of(QWEN2, *messages)).replayed == 0


def test_reasoning_that_does_not_fit_any_more_is_left_out() -> None:
    model, messages, _ = two_turns(QWEN3, text=f"<think>\n{'Well. ' * 200}\n</think>\n\n{CALL}")
    messages = without_thoughts(messages)
    small = renderer_of(QWEN3, positions=400)
    prompt = small.replay(conversation_of(QWEN3, *messages), model.turns).prompt
    assert prompt.replayed == 0
    with pytest.raises(ContextTooLong):
        small.replay(conversation_of(QWEN3, *messages, user("Well. " * 400)), model.turns)


def test_records_omit_the_end_token_and_empty_replies() -> None:
    turns = Turns()
    memory = ReplyMemory(turns, Origin.of(hash_of(message("user", "Hello")), "Hello"), frozenset({9}))
    for token_ids, remembered in [([9], []), ([1, 2, 9], [(1, 2)]), ([1, 2, 3], [(1, 2, 3)]), ([], [(1, 2, 3)])]:
        memory.remember(Turn("Hi"), [], token_ids)
        assert [SampledTurn.decode(record).token_ids for record in turns.values()] == remembered


@pytest.mark.parametrize("turn", [Turn(""), Turn("\n")])
def test_a_reply_that_says_nothing_is_not_remembered(turn: Turn) -> None:
    turns = Turns()
    memory = ReplyMemory(turns, Origin.of(hash_of(message("user", "Hello")), "Hello"), frozenset())
    memory.remember(turn, [], [7])
    assert not turns


def message(role: Any, text: str, *calls: ToolCall) -> Message:
    return Message(role=role, content=(TextPart(text, ""),), tool_calls=calls, path="")


def hash_of(*messages: Message) -> ConversationHash:
    conversation = ConversationHash()
    for each in messages:
        conversation.add_message(each)
    return conversation


def id_of(*messages: Message) -> str:
    conversation = hash_of(*messages)
    return conversation.ids([])[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: reversed_keys(member) for name, member in reversed(value.items())}
    return [reversed_keys(member) for member in value] if isinstance(value, list) else value


@given(OBJECTS)
def test_the_formatting_of_arguments_makes_no_difference(arguments: dict[str, Any]) -> None:
    forms: list[dict[str, Any] | str] = [
        arguments,
        json.dumps(arguments),
        json.dumps(reversed_keys(arguments), indent=2),
        json.dumps(arguments, ensure_ascii=False, separators=(",", ":")),
    ]
    assert len({id_of(message("assistant", "", ToolCall(None, "f", form))) for form in forms}) == 1


@given(OBJECTS, OBJECTS)
def test_other_arguments_make_a_difference(arguments: dict[str, Any], others: dict[str, Any]) -> None:
    ids = {id_of(message("assistant", "", ToolCall(None, "f", form))) for form in (arguments, others)}
    if arguments != others:
        assert len(ids) == 2


SAME = {"1.0": "1", "1e3": "1000", "1e999": "1e998", "[1.0, 2]": "[1, 2.0]"}
OTHER = {"1.5": "1", "1": "true", "2": '"2"', "9007199254740993": "9007199254740992", '"a "': '"a"'}


@pytest.mark.parametrize(("number", "other"), [*SAME.items(), *OTHER.items()])
def test_numbers_are_compared_by_value_and_everything_else_as_it_is(number: str, other: str) -> None:
    ids = {id_of(message("assistant", "", ToolCall(None, "f", f'{{"x": {value}}}'))) for value in (number, other)}
    assert len(ids) == (1 if number in SAME else 2)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=6)), max_size=4), st.data())
def test_the_messages_before_make_a_difference(said: list[tuple[str, str]], data: st.DataObject) -> None:
    other = data.draw(st.permutations(said))
    ids = {id_of(*(message(role, text) for role, text in listed)) for listed in (said, other)}
    stripped, others = ([(role, text.strip()) for role, text in listed] for listed in (said, other))
    assert (len(ids) == 1) == (stripped == others)


def test_hidden_special_tokens_in_a_rendering_still_fit() -> None:
    read = readings(PlainText(), [], ["<|channel|>", "<|end|>"], "Hi<|end|><|channel|>Rain.<|end|>", 9, 25)
    assert [turn.content for turn in read] == ["<|channel|>Rain.", "Rain."]


def test_reply_ends_are_tokens_at_any_place() -> None:
    def write(messages: Sequence[dict[str, Any]], _add_generation_prompt: bool) -> str:
        return "".join(f"{each['content']}<end>\n" for each in messages)

    added = {"<end>": 5, "<eos>": 6, "<other>": 7}
    assert end_texts(added, {6}, write, lambda text: added[text.partition("\n")[0]]) == {"<end>", "<eos>"}
    # A tokenizer that joins it with what follows.
    assert end_texts(added, {6}, write, lambda text: 6 if text.startswith("<eos>") else 99) == {"<eos>"}

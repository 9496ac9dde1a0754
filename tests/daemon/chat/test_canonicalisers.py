"""Changes that clients make in each request, undone or named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.daemon.api.anthropic import CountTokensRequest
from diskprefix.daemon.chat.canonicalisers import CANONICALISERS, Canonicalisers, helpful_canonicalisers, shape_of
from diskprefix.daemon.chat.messages import CacheMark, Conversation, TextPart
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.cache.policy.breaks import find_break
from diskprefix.prefixstore.simulate.geometry import TOKEN
from diskprefix.prefixstore.simulate.simulator import Policy, Simulator
from diskprefix.prefixstore.simulate.trace import TraceRequest
from diskprefix.tokens import common_prefix_length
from diskprefix.values import Change, Prompt, Rewriting, Scope
from tests.agent_bodies import TOOLS, asked, billing_header, said, shuffled, words
from tests.daemon.chat.rendering import rendered
from tests.daemon.server.chat_model import VOCAB_SIZE

NAMES = [canonicaliser.name for canonicaliser in CANONICALISERS]
SYSTEM = "You are a coding agent.\n" + words(1, 300)


def canonicalised(conversation: Conversation, text: str = "on") -> tuple[Conversation, Rewriting]:
    return Canonicalisers.parse(text, param="--canonicalise").apply(conversation)


def system_texts(conversation: Conversation) -> list[str]:
    return [part.text for part in conversation.messages[0].content if isinstance(part, TextPart)]


COUNT = "<total_tokens>14999436 tokens left</total_tokens>"
NUDGE = (
    "The task tools haven't been used recently. If you're working on tasks that would benefit from tracking progress, "
    "consider using TaskCreate to add new tasks. This is just a gentle reminder - ignore if not applicable.\n\n"
    "Here are the existing tasks:\n\n#1. [in_progress] Read the tests"
)
COUNTS = [COUNT.replace("436", f"{436 - 13 * k}") for k in range(8)]
PLAN = "Plan mode is active. The user does not want you to execute yet."
"""What Claude Code 2.1.223 writes between the messages as a system message, cut."""
EXPLAINED = """Be brief.
<system-reminder> tags carry hints and end with </system-reminder>, or are
<system-reminder>
left open. Their text:
Plan mode is active now and then.
The date has changed. Today's date is now and then wrong."""


HEADER = billing_header(1)
CHANGED = [
    ("billing-header", [HEADER, "You are Claude Code.", SYSTEM], ["You are Claude Code.", SYSTEM]),
    ("billing-header", [f"{HEADER}\n\nYou are Claude Code.\nBe brief."], ["You are Claude Code.\nBe brief."]),
    *(
        ("clock", [f"Be brief.\n{line}\nBye."], [f"Be brief.\n{becomes}\nBye."])
        for line, becomes in [
            ("Current time: 2026-11-21T05:04:35.123Z", "Current time: 2026-11-21T05:00:00.000Z"),
            ("Today's date is Sat Nov 21 2026 5:04 PM", "Today's date is Sat Nov 21 2026 5:00 PM"),
            ("2026-11-21 23:59:59", "2026-11-21 23:00:00"),
            ("It is now 23:59.", "It is now 23:00."),
            ("The current date and time is Saturday, 5:04 AM.", "The current date and time is Saturday, 5:00 AM."),
        ]
    ),
    ("total-tokens", [f"Be brief.\n\n{COUNT}"], ["Be brief."]),
    ("total-tokens", [f"{COUNT}\n{COUNT}\nBe brief.", "Bye."], ["Be brief.", "Bye."]),
    ("total-tokens", [f"{COUNT}\r\nBe brief.\r\n\r\n{COUNT} \r\nBye."], ["Be brief.\r\nBye."]),
    ("total-tokens", [f"Be brief.\n{COUNT}\n\n{COUNT}\nBye."], ["Be brief.\nBye."]),
]


@pytest.mark.parametrize(("name", "system", "becomes"), CHANGED)
def test_meaningless_text_is_removed_from_the_system_prompt_only(
    name: str, system: list[str], becomes: list[str]
) -> None:
    sent = asked(system, f"What time is it now, 05:04?\n{COUNT}", HEADER, tools=TOOLS)
    changed, rewriting = canonicalised(sent, f"off,{name}=on")
    assert system_texts(changed) == becomes
    assert replace(changed, messages=changed.messages[1:]) == replace(sent, messages=sent.messages[1:])
    assert rewriting == Rewriting(changes=(Change(name, "system.0"),))


def test_a_system_message_that_was_the_billing_header_alone_is_taken_out() -> None:
    changed, _ = canonicalised(asked([HEADER], "hello"))
    assert [message.role for message in changed.messages] == ["user"]


STAYING = {
    "a header in another place": asked(["You are Claude Code.", HEADER], "hello"),
    "a header inside a line": asked([f"Never repeat this: {HEADER}"], "hello"),
    "a header of a user": Conversation(messages=[said("user", HEADER)]),
    "a header alone": Conversation(messages=[said("system", HEADER)]),
    "an empty system message": asked([], "hello"),
    "a date": asked(["Today is 2026-11-21."], "hello"),
    "a ratio": asked(["Use a 16:09 picture."], "hello"),
    "four numbers": asked(["Now run 12:34:56:78."], "hello"),
    "no minutes": asked(["The time is 7."], "hello"),
    "no time of a day": asked(["now 25:61"], "hello"),
    "a count inside a line": asked([f"Write {COUNT}"], "hello"),
    "a count before words": asked([f"{COUNT} or so"], "hello"),
    "a count without a number": asked(["<total_tokens>many tokens left</total_tokens>"], "hello"),
    "a count alone": Conversation(messages=[said("system", COUNT)]),
    "a nudge at the very beginning": asked([NUDGE, "Be brief."], "hello"),
    "a nudge behind empty lines alone": asked([f"\n\n{NUDGE}"], "hello"),
    "a nudge inside a line": asked(["Results hold <system-reminder> tags. Plan mode is active at times."], "hello"),
    "a nudge that is explained": asked([EXPLAINED], "hello"),
    "a nudge between the messages": replace(
        asked(["Be brief."], "hello"), messages=[*asked(["Be brief."], "hello").messages, said("system", PLAN)]
    ),
    "a nudge without other messages": Conversation(messages=[said("system", "Be brief."), said("developer", PLAN)]),
}


@pytest.mark.parametrize("conversation", STAYING.values(), ids=STAYING)
def test_similar_text_stays(conversation: Conversation) -> None:
    assert canonicalised(conversation) == (conversation, Rewriting())


def test_a_system_message_with_only_a_count_is_removed() -> None:
    sent = asked(["Be brief.", COUNT], "hello", "hi", "go on")
    late = said("system", COUNT, "messages.9")
    changed, rewriting = canonicalised(replace(sent, messages=[*sent.messages[:2], late, *sent.messages[2:], late]))
    assert changed == asked(["Be brief."], "hello", "hi", "go on")
    assert [change.path for change in rewriting.changes] == ["system.1", "messages.9", "messages.9"]


@pytest.mark.parametrize("is_one_text", [True, False])
def test_nudges_behind_the_system_prompt_go_to_the_end(is_one_text: bool) -> None:
    texts = ["Be brief.", NUDGE, "<system-reminder>\nA file changed.\n</system-reminder>"]
    sent = asked(["\n\n".join(texts)] if is_one_text else texts, "hello", "hi", "go on")
    changed, rewriting = canonicalised(sent, "off,hoisted-nudges=on")
    assert system_texts(changed) == ["Be brief."]
    assert changed.messages[1:-1] == sent.messages[1:]
    last = changed.messages[-1]
    assert last.role == "system"
    assert [part.text for part in last.content if isinstance(part, TextPart)] == (
        ["\n\n".join(texts[1:])] if is_one_text else texts[1:]
    )
    assert {change.path for change in rewriting.changes} == {part.path for part in last.content}


def test_a_mark_behind_the_first_nudge_stays_at_its_beginning() -> None:
    sent = asked(["Be brief.", NUDGE, PLAN], "hello")
    system = sent.messages[0]
    last = system.content[-1]
    assert isinstance(last, TextPart)
    parts = [*system.content[:-1], replace(last, mark=CacheMark(3600.0))]
    changed, _ = canonicalised(replace(sent, messages=[replace(system, content=parts), *sent.messages[1:]]))
    assert [message.mark for message in changed.messages] == [CacheMark(3600.0), None, None]
    assert not any(part.mark for message in changed.messages for part in message.content if isinstance(part, TextPart))


def test_nudges_stand_before_the_beginning_of_a_reply() -> None:
    changed, _ = canonicalised(asked(["Be brief.", PLAN], "hello", "I say"))
    assert [message.role for message in changed.messages] == ["system", "user", "system", "assistant"]


def as_sent(tools: Any) -> str:
    return json.dumps(tools)


def test_schemas_whose_keys_come_in_another_order_become_the_same_text() -> None:
    sent = [asked([SYSTEM], "hello", tools=shuffled(TOOLS, random.Random(seed))) for seed in range(20)]
    assert len({as_sent(conversation.tools) for conversation in sent}) == 20
    changed = [canonicalised(conversation, "off,schema-keys=on")[0] for conversation in sent]
    assert [conversation.tools for conversation in changed] == [conversation.tools for conversation in sent]
    [text] = {as_sent(conversation.tools) for conversation in changed}
    keys = re.findall(r'"(\w+)":', text.partition('"name": "Write"')[0])
    of_property = ["type", "description"]
    of_properties = ["file_path", *of_property, "content", *of_property, "limit", "type", "default", "minimum"]
    of_schema = ["type", "properties", *of_properties, "required"]
    assert keys == ["type", "function", "name", "description", "parameters", *of_schema, "type", "function"]


def test_properties_come_in_the_order_in_which_they_are_required() -> None:
    properties: dict[str, Any] = {"b": {}, "a": {}, "thought": {}, "answer": {}}
    schema = {"properties": properties, "required": ["thought", "answer", "gone"], "type": "object"}
    tools = [{"function": {"parameters": schema, "name": "f"}, "type": "function"}]
    changed, rewriting = canonicalised(asked(["x"], "hello", tools=tools))
    assert changed.tools is not None
    assert list(changed.tools[0]["function"]["parameters"]["properties"]) == ["thought", "answer", "a", "b"]
    assert rewriting.changes == (Change("schema-keys", "tools.0"),)


def test_a_property_that_is_named_like_a_keyword_is_a_property() -> None:
    schema = {"type": "object", "properties": {"type": {"type": "string"}, "description": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    changed, _ = canonicalised(asked(["x"], "hello", tools=tools))
    assert changed.tools is not None
    assert list(changed.tools[0]["function"]["parameters"]["properties"]) == ["description", "type"]


def test_reordered_tools_become_one_list_and_marks_stay() -> None:
    marks = ((len(TOOLS) - 1, CacheMark()),)
    sent = [
        replace(asked([SYSTEM], "hello", tools=tools), tool_marks=marks, tool_paths=[f"t.{i}" for i in range(6)])
        for tools in (TOOLS, TOOLS[::-1])
    ]
    changed, backwards = (canonicalised(conversation, "off,tool-order=on")[0] for conversation in sent)
    assert changed.tools is not None
    assert [tool["function"]["name"] for tool in changed.tools] == sorted(t["function"]["name"] for t in TOOLS)
    assert as_sent(changed.tools) == as_sent(backwards.tools)
    assert changed.tool_marks == marks
    assert changed.tool_paths == ["t.2", "t.3", "t.0", "t.4", "t.5", "t.1"]


def test_report_changes_nothing_and_says_what_would_change() -> None:
    sent = asked([billing_header(1), "Current time: 05:04"], "hello", tools=TOOLS[::-1])
    changed, rewriting = canonicalised(sent, "report")
    assert changed is sent
    assert rewriting == Rewriting(would_change=("billing-header", "clock", "schema-keys", "tool-order"))
    assert canonicalised(sent, "off") == (sent, Rewriting())


def test_a_canonicalised_conversation_stays_as_it_is() -> None:
    sent = asked([billing_header(1), "Current time: 05:04"], "hello", tools=shuffled(TOOLS, random.Random(1))[::-1])
    changed, _ = canonicalised(sent)
    assert canonicalised(changed) == (changed, Rewriting())


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("report", ["report"] * 6),
        ("off", ["off"] * 6),
        (" ON , clock = off", ["on", "on", "on", "off", "on", "on"]),
        ("tool-order=on,schema-keys=off", ["report", "report", "report", "report", "off", "on"]),
    ],
)
def test_modes_are_given_by_name_or_for_all(text: str, modes: Sequence[str]) -> None:
    assert [Canonicalisers.parse(text, param="--canonicalise").modes[name] for name in NAMES] == modes


@pytest.mark.parametrize(
    "text", ["", "yes", "clock", "clocks=on", "clock=maybe", "clock=on,clock=off", "on,off", "=on"]
)
def test_another_text_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--canonicalise: .*billing-header, total-tokens, hoisted-nudges, clock"):
        Canonicalisers.parse(text, param="--canonicalise")


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        (
            "x-anthropic-billing-header: cc_version=2.1.39.f2a; cch=0c6e1;",
            "x-xxxxxxxxx-xxxxxxx-xxxxxx: cc_version=#.#.##.x#x; cch=#x#x#;",
        ),
        ("Current time: 2026-11-21T05:04:35Z", "xxxxxxx xxxx: ####-##-##x##:##:##x"),
        ("  # Time: 2026-11-21", "# Time: ####-##-##"),
        ("Authorization: Bearer c2VjcmV0LWtleS12YWx1ZQ==", "Authorization: xxxxxx x#xxxxx#xxxxxx##xxx#xx=="),
        *((f"key c2Vj/VjcmV{end}", f"xxx x#xx/xxxxx{end}") for end in ("=", "==", "= -", "=.", "=&")),
        ("key sk_live-VjcmV=", "xxx xx_xxxx-xxxxx="),
        ("My door code 4711 for the house: keep it", "xx xxxx xxxx #### xxx xxx xxxxx: xxxx xx"),
        ("password hunter2=old", "xxxxxxxx xxxxxx#=xxx"),
        ("hunter2x: old, x9y=1, a.b=1", "xxxxxx#x: xxx, x#x=#, x.x=#"),
        (f"{'k' * 25}=1 {'k' * 24}=1", f"{'x' * 25}=# {'k' * 24}=#"),
        ('{"%s": 1, "hunter2": 1, hunter": 1}' % ("k" * 25), '{"%s": #, "xxxxxx#": #, xxxxxx": #}' % ("x" * 25)),
        ("my key is sk-Secret123", "xx xxx xx xx-xxxxxx###"),
        ('{"type": "secret", "n": 17}', '{"type": "xxxxxx", "n": ##}'),
        ("  Überraschung\x1b[31m\t! ", "xxxxxxxxxxxx[##x !"),
        ("word " * 1000, "xxxx " * 19 + "xxxx…"),
        ("", ""),
    ],
)
def test_the_shape_of_a_line_keeps_its_names_and_no_values(line: str, shape: str) -> None:
    assert shape_of(line) == shape


@pytest.fixture(scope="module")
def render(tokenizer: Any) -> Callable[[Conversation, str], Prompt]:
    def written(conversation: Conversation, modes: str) -> Prompt:
        canonicalisers = Canonicalisers.parse(modes, param="--canonicalise")
        renderer = PromptRenderer(
            tokenizer, vocab_size=VOCAB_SIZE, max_positions=1 << 20, canonicalisers=canonicalisers
        )
        return rendered(renderer, conversation)

    return written


def turns(change: Callable[[int], dict[str, Any]]) -> list[Conversation]:
    """Eight turns of an agent, each with what `change` says of the request's system texts and tools."""
    texts: list[str] = []
    conversations = []
    for turn in range(8):
        texts += [words(100 + turn, 40)] if turn == 0 else [words(200 + turn, 20), words(100 + turn, 40)]
        sent: dict[str, Any] = {"system": [SYSTEM], "tools": TOOLS} | change(turn)
        conversations.append(asked(sent["system"], *texts, tools=sent["tools"]))
    return conversations


CHANGES: dict[str, Callable[[int], dict[str, Any]]] = {
    "billing-header": lambda turn: {"system": [billing_header(turn), SYSTEM], "tools": None},
    "clock": lambda turn: {"system": [f"Current time: 2026-11-21 05:{4 * turn + 1:02}:00\n{SYSTEM}"], "tools": None},
    "total-tokens": lambda turn: {"system": ["Be brief.", *COUNTS[: turn + 1]], "tools": None},
    "hoisted-nudges": lambda turn: {"system": ["Be brief.", *[PLAN] * turn], "tools": None},
    "schema-keys": lambda turn: {"tools": shuffled(TOOLS, random.Random(turn))},
    "tool-order": lambda turn: {"tools": random.Random(turn).sample(TOOLS, len(TOOLS))},
}


def restored_share(prompts: list[Prompt]) -> float:
    simulator = Simulator(Policy(scope=Scope("auto", 30), block_size=16, min_tokens=16), TOKEN)
    for prompt in prompts:
        simulator.step(TraceRequest(0.0, prompt))
    return simulator.totals.restored_share


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_turns_of_a_changing_client_hit_with_its_canonicaliser(
    render: Callable[[Conversation, str], Prompt], name: str
) -> None:
    conversations = turns(CHANGES[name])
    share = {
        modes: restored_share([render(conversation, modes) for conversation in conversations])
        for modes in ("off", "report", f"off,{name}=on")
    }
    same_every_time = restored_share(
        [render(conversation, "off") for conversation in turns(lambda _: CHANGES[name](0))]
    )
    assert share["off"] == share["report"] < 0.2
    # Seven nudges are computed again in the last turn.
    missing = 0.11 if name == "hoisted-nudges" else 0.0
    assert share[f"off,{name}=on"] == pytest.approx(same_every_time - missing, abs=0.03)
    assert same_every_time > 0.7


def test_report_names_the_keys_of_many_small_schemas(render: Callable[[Conversation, str], Prompt]) -> None:
    """No run of 32 tokens of them is what it was."""

    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: backwards(value[key]) for key in reversed(value)}
        return [backwards(item) for item in value] if isinstance(value, list) else value

    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": words(number, 4),
                "parameters": {"type": "object", "properties": {words(90 + number, 1): {"type": "string"}}},
            },
        }
        for number in range(12)
    ]
    earlier, prompt = (
        render(asked([SYSTEM], "hello", tools=sent), "report") for sent in (tools, [backwards(tool) for tool in tools])
    )
    prefix_break = find_break(prompt.token_ids, [earlier.token_ids], known=0)
    assert prefix_break is not None
    assert prompt.source is not None
    broken = prompt.source.line_at(prefix_break.at)
    assert "schema-keys" in helpful_canonicalisers(broken, prompt.rewriting)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("billing-header", "x-xxxxxxxxx-xxxxxxx-xxxxxx: cc_version=#.#.##."),
        ("clock", "xxxxxxx xxxx: ####-##-## ##:##:##"),
        ("total-tokens", "<xxxxx_xxxxxx>######## xxxxxx xxxx</xxxxx_xxxxxx>"),
        ("hoisted-nudges", "xxxx xxxx xx xxxxxx. xxx xxxx"),
        ("schema-keys", 'xxx xxx xxxx xxxxx xxxxxxxxx:{"'),
        ("tool-order", 'xxx xxx xxxx xxxxx xxxxxxxxx:{"type": "xxxxxxxx", "function": {"name": "xxxx'),
    ],
)
def test_report_names_the_line_that_broke_the_prefix(
    render: Callable[[Conversation, str], Prompt], name: str, line: str
) -> None:
    earlier, prompt = (render(conversation, "report") for conversation in turns(CHANGES[name])[3:5])
    prefix_break = find_break(prompt.token_ids, [earlier.token_ids], known=0)
    assert prefix_break is not None
    assert prompt.source is not None
    broken = prompt.source.line_at(prefix_break.at)
    assert shape_of(broken).startswith(line)
    assert name in helpful_canonicalisers(broken, prompt.rewriting)
    assert prefix_break.num_tokens >= 256


RECORDED = json.loads(Path(__file__).with_name("claude_code_sessions.json").read_text(encoding="utf-8"))
"""First requests of Claude Code 2.1.197, long texts cut: at first; again; with another question; in another folder;
a day later. Between all of them is a commit."""


def first_request(session: str) -> Conversation:
    sent = RECORDED["sessions"][session]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in sent["user"]]},
        {"role": "system", "content": RECORDED["late_system"]},
    ]
    system = [{"type": "text", "text": text} for text in sent["system"]]
    body = {"system": system, "messages": messages, "tools": RECORDED["tools"]}
    return CountTokensRequest.model_validate(body).conversation


def test_claude_code_shares_its_prompt_up_to_the_commits(
    render: Callable[[Conversation, str], Prompt],
) -> None:
    def changed_line(modes: str, session: str = "question") -> str:
        first, second = (render(first_request(text), modes) for text in ("first", session))
        at = common_prefix_length(second.token_ids, first.token_ids)
        assert second.source is not None
        return second.source.line_at(at)

    assert changed_line("report").startswith("x-anthropic-billing-header: cc_version=2.1.197.1b1;")
    assert helpful_canonicalisers(changed_line("report"), canonicalised(first_request("question"), "report")[1]) == [
        "billing-header"
    ]
    assert changed_line("billing-header=on").startswith("a7ed74e A sum"), "the newest commit of the repository"
    assert changed_line("on") == changed_line("billing-header=on"), "no other canonicaliser has anything to do"
    assert changed_line("report", "again").startswith("2b4da9c A sum"), "the header depends on the question"
    assert "/home/user/.claude/projects/-home-user-two/memory" in changed_line("on", "folder")


def test_the_turns_of_a_client_that_changes_nothing_report_nothing(
    render: Callable[[Conversation, str], Prompt],
) -> None:
    earlier, prompt = (render(conversation, "report") for conversation in turns(lambda _: {})[3:5])
    assert find_break(prompt.token_ids, [earlier.token_ids], known=0) is None


def test_text_is_not_kept_with_a_prompt_if_nobody_asks(render: Callable[[Conversation, str], Prompt]) -> None:
    conversation = asked(["Be brief."], "hello")
    assert render(conversation, "off").source is None
    assert render(conversation, "report").source is not None

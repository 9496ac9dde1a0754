"""Each template writes a late tool in its own form, and finds the call of it."""

from __future__ import annotations

import json
from functools import cache

import pytest
from msgspec.structs import replace

from diskprefix.daemon.chat.late_tools import TextOfTools
from diskprefix.daemon.chat.messages import Conversation, Ending, Message, NewTool, TextPart, ToolCall
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.chat.replay import Turn
from diskprefix.daemon.chat.splice import readings
from diskprefix.daemon.chat.template_input import TemplateInput, common_chars
from diskprefix.tokens import common_prefix_length
from tests.daemon.chat.families.conversations import text_of
from tests.daemon.chat.families.families import FAMILIES, POSITIONS, Family, renderer_of, tokenizer_of

FIRST, LATE = (
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks at a {name}.",
            "parameters": {"type": "object", "properties": {place: {"type": "string", "description": f"A {place}."}}},
        },
    }
    for name, place in (("window", "street"), ("garden", "valley"))
)
families = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.takes_tools], ids=lambda family: family.name
)


@cache
def warm_renderer_of(family: Family) -> PromptRenderer:
    tokenizer = tokenizer_of(family)
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=POSITIONS)
    renderer.warm_up()
    return renderer


def said(role: str, text: str, **fields: object) -> Message:
    return Message(role=role, content=(TextPart(text, "x"),), path="x", **fields)  # type: ignore[arg-type]


@families
@pytest.mark.parametrize("are_first", [False, True])
def test_a_template_writes_a_late_tool_in_its_own_form(family: Family, are_first: bool) -> None:
    template = renderer_of(family)._template
    text_of_tools = TextOfTools(template)
    text = text_of_tools([LATE], are_first=are_first)
    assert all(word in text for word in ("garden", "valley", "Looks at a garden."))
    assert "diskprefix" not in text, "the tool before it"
    assert "window" not in text
    alone = text_of_tools([FIRST], are_first=are_first)
    both = text_of_tools([FIRST, LATE], are_first=are_first)
    assert len(both) <= len(alone) + len(text) + 2
    assert not [token for token in template.special if token.strip() and token in text]


@families
def test_a_late_system_message_stays_behind_what_came_before_it(family: Family) -> None:
    """Some templates write all system messages at the beginning, which would change the prompt from there on."""
    turns = [said("user", "A question."), said("assistant", "An answer."), said("system", "A late rule.")]
    messages = [said("system", "Be brief."), *turns, said("user", "Another one.")]
    text = text_of(family, warm_renderer_of(family).replay(Conversation(messages=messages, tools=[FIRST]), None).prompt)
    places = [text.index(word) for word in ("A question.", "An answer.", "A late rule.", "Another one.")]
    assert places == sorted(places)


@pytest.mark.parametrize("are_first", [False, True])
def test_the_template_is_rendered_once_for_each_message_with_tools(
    monkeypatch: pytest.MonkeyPatch, are_first: bool
) -> None:
    """And once for what is before them, which is the same for all."""
    template = renderer_of(next(family for family in FAMILIES if family.takes_tools))._template
    text_of_tools, rendered, render = TextOfTools(template), list[TemplateInput](), template.try_render

    def counted(asked: TemplateInput, ending: Ending) -> str:
        rendered.append(asked)
        return render(asked, ending)

    monkeypatch.setattr(template, "try_render", counted)
    texts = [text_of_tools([LATE], are_first=are_first) for _ in range(5)]
    assert len({*texts}) == 1
    assert len(rendered) == len(texts) + 1


@families
def test_a_late_tool_leaves_the_prompt_before_it(family: Family) -> None:
    renderer = renderer_of(family)
    searched = Message(role="assistant", tool_calls=(ToolCall("abcdefgh1", "window", {"street": "x"}),), path="x")
    result = said("tool", "Found: garden.", tool_call_id="abcdefgh1", new_tools=(NewTool("garden"),))
    opening = [said("system", "Rules. " * 20), said("user", "Look!")]
    plain = replace(result, new_tools=())
    before = renderer.replay(Conversation(messages=[*opening, searched, plain], tools=[FIRST]), None).prompt
    asked = Conversation(messages=[*opening, searched, result], tools=[FIRST, LATE], late=frozenset({"garden"}))
    after = renderer.replay(asked, None).prompt
    same = common_prefix_length(before.token_ids, after.token_ids)
    assert "Found: garden" in text_of(family, before, same)
    written = renderer.text_of(asked)
    assert written.index("Looks at a garden.") > written.index("Found: garden.")


@families
@pytest.mark.parametrize("value", ["Green", 'It\'s "deep",\nand wide: {1}'], ids=["word", "quotes"])
def test_a_call_of_a_late_tool_has_the_familys_form_and_is_read(family: Family, value: str) -> None:
    renderer = warm_renderer_of(family)
    template, tools = renderer._template, [FIRST, LATE]
    searched = Message(role="assistant", tool_calls=(ToolCall("abcdefgh1", "window", {"street": "x"}),), path="x")
    result = said("tool", "Found: garden.", tool_call_id="abcdefgh1", new_tools=(NewTool("garden"),))
    called = Message(role="assistant", tool_calls=(ToolCall("abcdefgh2", "garden", {"valley": value}),), path="x")
    before, wanted = (
        [said("user", "Look!"), searched, result],
        Turn("", "", (("garden", json.dumps({"valley": value})),)),
    )
    written = set()
    for late in (frozenset({"garden"}), frozenset[str]()):
        asked = Conversation(messages=before, tools=tools, late=late)
        prompt = renderer.text_of(asked)
        text = renderer.text_of(replace(asked, messages=[*before, called], ending="none"))
        begin = common_chars(prompt, text)
        turns = readings(renderer.output_format, tools, template.special, text, begin, len(text))
        assert wanted.canonical()[2] in [turn.canonical()[2] for turn in turns], text[begin:]
        written.add(text[begin:])
    assert len(written) == 1, "late or not"

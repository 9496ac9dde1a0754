"""The forms in which chat templates take messages; which real template needs which is in `output/test_choose.py`."""

from __future__ import annotations

from typing import Any

from diskprefix.chat.template_input import MessageForm


def applied(form: MessageForm, call_id: str = "abcdefgh1", arguments: Any = None, content: str = "") -> Any:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments or {}}}
    spoken = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call_id, "content": "done"}
    before = [{**spoken, "tool_calls": [call]}, dict(result)]
    after = form.applied([spoken, result])
    assert [spoken, result] == before, "what the client sent stays as it is"
    return after


def test_a_template_that_needs_nothing_gets_messages_as_they_are() -> None:
    spoken, result = applied(MessageForm(), arguments={"a": 1})
    assert spoken["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (spoken["content"], result["tool_call_id"]) == ("", "abcdefgh1")


def test_a_short_id_is_the_same_in_a_call_and_its_result_and_another_for_another_call() -> None:
    ids = set()
    for sent in ("toolu_01-A", "toolu_01-B", "call_1"):
        spoken, result = applied(MessageForm(short_ids=True), call_id=sent)
        assert spoken["tool_calls"][0]["id"] == result["tool_call_id"]
        ids.add(result["tool_call_id"])
    assert len(ids) == 3
    assert all(len(short) == 9 and short.isalnum() for short in ids)
    assert applied(MessageForm(short_ids=True))[1]["tool_call_id"] == "abcdefgh1"


def test_arguments_are_text_or_an_object_as_the_template_needs_it() -> None:
    def written(form: MessageForm, arguments: Any) -> Any:
        return applied(form, arguments=arguments)[0]["tool_calls"][0]["function"]["arguments"]

    assert written(MessageForm(text_arguments=True), {"a": "é"}) == '{"a": "é"}'
    assert written(MessageForm(text_arguments=True), "{?") == "{?"
    assert written(MessageForm(objects_only=True), "{?") == {"arguments": "{?"}
    assert written(MessageForm(objects_only=True), {"a": 1}) == {"a": 1}


def test_only_a_message_that_says_nothing_has_no_content() -> None:
    assert applied(MessageForm(null_content=True))[0]["content"] is None
    assert applied(MessageForm(null_content=True), content="I look.")[0]["content"] == "I look."

"""The forms in which we give a conversation to a chat template, each as a change of what the client sent.

The changes are written here a second time, independent of `diskprefix/daemon/chat`. A text that we serve is explained
if transformers writes it from the changed conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import combinations, product
from typing import Any, TypeAlias

from tools.benchmarks.template_engines import Engine, Given, Written

Message: TypeAlias = dict[str, Any]
Form: TypeAlias = Callable[[Given], Given]

_REFUSAL = "refuses the messages: "
"""Stands in our messages before those of the template."""
_NOTHING = "the prompt has no tokens"
"""Our reason where a template writes nothing of a conversation."""
_CLASS = re.compile(r"'[\w.]+ object'")
"""A class in a message of Python: the dict of a template has another one here than in transformers."""
MOST_FORMS = 4
"""The most changes that are tried together."""
_SWITCH = re.compile(r"\b\w*(?:think|thought|reason)\w*\b")


def _each(change: Callable[[Message], Message]) -> Form:
    return lambda given: given.with_messages([change(message) for message in given.messages])


def _with_calls(change: Callable[[Message], Message]) -> Form:
    def changed(message: Message) -> Message:
        calls = message.get("tool_calls")
        return message if not calls else {**message, "tool_calls": [change(call) for call in calls]}

    return _each(changed)


def _parsed(call: Message) -> Message:
    function = call["function"]
    arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": json.loads(arguments) if arguments else {}}}


def _empty_text(message: Message) -> Message:
    return {**message, "content": ""} if message.get("tool_calls") and message["content"] is None else message


def _joined(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _image(message: Message) -> Message:
    if not isinstance(message["content"], list):
        return message
    return {
        **message,
        "content": [part if part["type"] == "text" else {"type": "image"} for part in message["content"]],
    }


def _nine(name: str) -> str:
    return hashlib.blake2b(name.encode()).hexdigest()[:9]


def _short_ids(given: Given) -> Given:
    given = _with_calls(lambda call: {**call, "id": _nine(call["id"])})(given)
    return _each(lambda m: {**m, "tool_call_id": _nine(m["tool_call_id"])} if "tool_call_id" in m else m)(given)


def _named_ids(given: Given) -> Given:
    """Numbers all calls. No conversation has an id twice."""
    calls = [call for message in given.messages for call in message.get("tool_calls") or ()]
    ids = {call["id"]: f"functions.{call['function']['name']}:{number}" for number, call in enumerate(calls)}
    given = _with_calls(lambda call: {**call, "id": ids[call["id"]]})(given)
    return _each(lambda m: {**m, "tool_call_id": ids[m["tool_call_id"]]} if "tool_call_id" in m else m)(given)


def _named_results(given: Given) -> Given:
    calls = [call for message in given.messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    return _each(lambda m: {**m, "name": names[m["tool_call_id"]]} if "tool_call_id" in m else m)(given)


def _system_as_user(given: Given, *, first: bool) -> Given:
    """Gives system messages to the user: all but the first message, or this one too."""
    kept: list[Message] = []
    joins = False
    for index, message in enumerate(given.messages):
        is_moved = message["role"] == "system" and (first or index > 0)
        message = {**message, "role": "user"} if is_moved else message
        if kept and kept[-1]["role"] == message["role"] == "user" and (joins or is_moved) and not first:
            kept[-1] = {**message, "content": _together(kept[-1], message, "\n")}
        else:
            kept.append(message)
        joins = is_moved
    return given.with_messages(kept)


def _together(first: Message, second: Message, between: str) -> str | list[Message]:
    if isinstance(first["content"], str) and isinstance(second["content"], str):
        return f"{first['content']}{between}{second['content']}"
    whole = [
        [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        for m in (first, second)
    ]
    return [*whole[0], *whole[1]]


def _alternating(given: Given, *, reply: str, counts_calls: bool, counts_results: bool) -> Given:
    """Joins neighbouring messages of the user, and separates others that the template counts by a short reply."""
    turns: list[Message] = []
    wanted, of_user = "user", False
    for message in given.messages:
        is_result = counts_results and message["role"] == "tool"
        of_user = is_result and (wanted == "user" or of_user)
        if of_user:
            message = {"role": "user", "content": message["content"]}
        elif not (counts_calls if message.get("tool_calls") else message["role"] in ("user", "assistant") or is_result):
            turns.append(message)
            continue
        speaker = "user" if message["role"] == "user" else "assistant"
        if speaker != wanted and speaker == "user" and turns and turns[-1]["role"] == "user":
            turns[-1] = {**message, "content": _together(turns[-1], message, "\n\n")}
            continue
        if speaker != wanted:
            turns.append({"role": wanted, "content": reply})
        turns.append(message)
        wanted = "assistant" if speaker == "user" else "user"
    return given.with_messages(turns)


def _alternations() -> Iterator[Form]:
    for reply, counts_calls, counts_results in product(("", "OK."), (False, True), (False, True)):
        yield partial(_alternating, reply=reply, counts_calls=counts_calls, counts_results=counts_results)


def _with_variable(name: str, value: bool) -> Form:
    return lambda given: Given(given.messages, given.tools, {**given.variables, name: value})


with_objects: Form = _with_calls(_parsed)
with_empty_text: Form = _each(_empty_text)
ALTERNATING = "turns alternate"
FORMS: dict[str, tuple[Form, ...]] = {
    "arguments as objects": (with_objects,),
    "empty text for none": (with_empty_text,),
    "parts as one text": (_each(_joined),),
    "picture as type image": (_each(_image),),
    "late system message as user": (lambda given: _system_as_user(given, first=False),),
    "system message as user": (lambda given: _system_as_user(given, first=True),),
    ALTERNATING: tuple(_alternations()),
    "text as parts": (_each(_in_parts),),
    "name of the tool in results": (_named_results,),
    "ids of nine characters": (_short_ids,),
    "ids with the name of the tool": (_named_ids,),
}
"""The changes by their names, in the order in which they are made, with their variants, of which one applies."""
THOUGHTS_KEPT = "thoughts of earlier turns kept"
"""Sets the template's own switch, a variable in its source."""


def forms_of(source: str) -> dict[str, tuple[Form, ...]]:
    """Returns the forms for a template."""
    names = sorted(set(_SWITCH.findall(source)) - {"enable_thinking", "thinking", "reasoning_content", "reasoning"})
    switches = tuple(_with_variable(name, value) for name in names for value in (True, False))
    return {**FORMS, **({THOUGHTS_KEPT: switches} if switches else {})}


def explained(source: str, given: Given, served: Written, transformers: Engine) -> tuple[tuple[str, ...], Given] | None:
    """Returns the fewest forms with which transformers does what we do, and what it was given; None if there are none.
    It writes the text that we serve, or refuses in the same words. The tuple is empty if it does so with what the
    client sent."""
    # Whether turns alternate depends on the other forms.
    known = {
        name: [form for form in forms if name == ALTERNATING or form(given) != given]
        for name, forms in forms_of(source).items()
    }
    names = [name for name, forms in known.items() if forms]
    for number in range(min(MOST_FORMS, len(names)) + 1):
        for chosen in combinations(names, number):
            for forms in _variants([known[name] for name in chosen]):
                changed = reduce(lambda now, form: form(now), forms, given)
                if _agree(transformers.write(source, changed), served):
                    return chosen, changed
    return None


def _agree(theirs: Written, ours: Written) -> bool:
    if ours.text is None and theirs.text == "":
        return ours.error.endswith(_NOTHING)
    if ours.text is not None or theirs.text is not None:
        return ours.text == theirs.text
    reason, error = (_CLASS.sub("'object'", said) for said in (ours.error.partition(_REFUSAL)[2], theirs.error))
    return bool(reason) and reason.removesuffix("…") in " ".join(error.split())


def _variants(forms: Sequence[Iterable[Form]]) -> Iterator[list[Form]]:
    if not forms:
        yield []
        return
    for form in forms[0]:
        for others in _variants(forms[1:]):
            yield [form, *others]

"""From what a request asks of its reply to a constraint of the engine, and the check that it can be met."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Protocol

from diskprefix.api.dialect import Asked
from diskprefix.api.fields import TextFormat
from diskprefix.chat.messages import Conversation, JsonObject
from diskprefix.chat.output.format import OutputFormat, ReasoningDelta
from diskprefix.engine.request import Constraint, FreeText

_START = re.compile(r"^start\b(?=\s*:)", re.MULTILINE)


class Check(Protocol):
    """Returns what the engine is given for a constraint. Raises `InvalidRequest`, with a path below `param`, for one
    that cannot be compiled; below a key of `parts` if that schema is at fault."""

    def __call__(self, constraint: Constraint, *, param: str, parts: Mapping[str, str] = ...) -> Constraint: ...


def constraint_of(asked: Asked, output_format: OutputFormat, prompt_end: str, check: Check) -> Constraint | None:
    """Returns what the reply must be; None: anything.

    A reply that may call tools but need not is constrained only where the client asks for JSON: then it is either that,
    or calls. Raises `InvalidRequest` for what cannot be compiled; this may take seconds.
    """
    if not isinstance(asked.prompt, Conversation):
        return None if asked.text_format is None else _checked_text(asked.text_format, None, check)
    tools, choice = asked.tool_choice.allowed(asked.prompt.tools or ()), asked.tool_choice
    thought = _thought_before(output_format, prompt_end)
    if choice.mode == "required":
        grammar = output_format.call_grammar(tools, many=choice.many)
        if thought is not None and thought.begin is None and not _is_thinking(output_format, prompt_end):
            # What ends this thought begins an answer, and a model that is to call must not begin one.
            thought = None
        return _checked_calls(asked.prompt, Constraint(kind="lark", source=grammar, before=thought), check)
    if asked.text_format is None:
        return None
    constraint = _checked_text(asked.text_format, thought, check)
    if not tools or constraint.kind not in ("json_schema", "json_object"):
        return constraint
    grammar = _either(output_format.call_grammar(tools, many=choice.many), constraint)
    return _checked_calls(asked.prompt, Constraint(kind="lark", source=grammar, before=thought), check)


def _thought_before(output_format: OutputFormat, prompt_end: str) -> FreeText | None:
    """Returns the thought that comes first: in any case if the template has opened it, else if the model begins one."""
    tags = output_format.thought
    if tags is None:
        return None
    if _is_thinking(output_format, prompt_end):
        return FreeText(end=tags.end)
    if prompt_end.rstrip().endswith(tags.end):
        # The template has closed the thought: this model was told not to think.
        return None
    return FreeText(end=tags.end, begin=tags.begin)


def _is_thinking(output_format: OutputFormat, prompt_end: str) -> bool:
    """Whether the prompt ends inside a thought."""
    parser = output_format.parser((), prompt_end)
    return any(isinstance(delta, ReasoningDelta) for delta in [*parser.feed("x"), *parser.finish()])


def _checked_text(wanted: TextFormat, before: FreeText | None, check: Check) -> Constraint:
    return check(Constraint(kind=wanted.kind, source=wanted.source, before=before), param=wanted.path)


def _checked_calls(conversation: Conversation, constraint: Constraint, check: Check) -> Constraint:
    """Raises `InvalidRequest`, with the path of the schema at fault if it is that of one tool's arguments."""
    schemas = (tool["function"].get("parameters") or {} for tool in conversation.tools or ())
    parts = dict(zip(conversation.tool_paths, map(json.dumps, schemas), strict=False))
    return check(constraint, param="tools", parts=parts)


def _either(calls: str, text: Constraint) -> str:
    """Returns the grammar of what `calls` describes, or the JSON of `text`."""
    schema: JsonObject = json.loads(text.source) if text.kind == "json_schema" else {"type": "object"}
    compact = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    return f"{_START.sub('calls', calls)}\nstart: calls | json_text\njson_text: %json {json.dumps(schema | compact)}\n"

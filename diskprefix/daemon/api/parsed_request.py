"""A request in the neutral form that all APIs share, and the engine's constraint on its reply."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.chat.fill_in import FillIn
from diskprefix.daemon.chat.messages import Conversation, JsonObject
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.format import ReasoningDelta, ThoughtWatch
from diskprefix.daemon.engine.constraints.kept_schema import MAX_CHARS, Loosened, with_any_of
from diskprefix.daemon.engine.request import Constraint, FreeText, SamplingParams
from diskprefix.daemon.engine.thought_limit import ThoughtBudget
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.printable import shown
from diskprefix.values import LeftOut

log = logging.getLogger("diskprefix")

_MAX_KINDS = 32
_logged: defaultdict[str, set[str]] = defaultdict(set)
"""The texts that were logged with each message."""
_SHOWN_CHARS = 200
OF_ONE_OF = "`true`: a `oneOf` whose branches may overlap is an error. Otherwise it is served as `anyOf`."
"""The effect of `strict` on the schema of a text, for `/docs`."""
_START = re.compile(r"^start\b(?=\s*:)", re.MULTILINE)


class TextFormat(Struct, frozen=True):
    """The format of the text of a reply. `path` is the field of the request that asks for it.

    `source` is JSON text of a schema, or a JSON list of texts. If it is not strict, branches of a `oneOf` may overlap.
    """

    kind: Literal["json_schema", "json_object", "choice"]
    source: str
    path: str
    is_strict: bool = False

    @classmethod
    def of_json(
        cls,
        kind: Literal["text", "json_object", "json_schema"],
        schema: JsonObject | None,
        path: str,
        of_schema: str,
        *,
        strict: bool | None = False,
    ) -> TextFormat | None:
        """Returns OpenAI's format at `path`; None for any text. `of_schema` is the path of its schema below `path`. As
        in llama.cpp, `json_object` may have a schema too. Raises `InvalidRequest` for `text` with a schema."""
        if kind == "text":
            if schema is not None:
                raise InvalidRequest.at(path + of_schema, "needs the type json_schema or json_object")
            return None
        if schema is None:
            return cls("json_object", "", path)
        whole = schema if kind == "json_schema" else {"type": "object"} | schema
        return cls("json_schema", json.dumps(whole), path + of_schema, bool(strict))


class ToolChoice(Struct, frozen=True):
    """The offered tools that may be called, or the requirement to call one of them.

    If `names` is None, all tools may be called. Without `many`, a reply has one call at most. `path` is the field of
    the request. A request is refused if no grammar can enforce the schema of a `strict` tool.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None
    many: bool = True
    path: str = "tool_choice"
    strict: frozenset[str] = frozenset()

    def allowed(self, tools: Sequence[JsonObject]) -> list[JsonObject]:
        """Returns the tools that may be called."""
        if self.mode == "none":
            return []
        return [tool for tool in tools if self.names is None or tool["function"]["name"] in self.names]

    def without(self, withdrawn: frozenset[str], offered: Iterable[str]) -> ToolChoice:
        """Returns the choice without the tools `withdrawn`; `offered` are the names of all tools."""
        if not withdrawn:
            return self
        return replace(self, names=(frozenset(offered) if self.names is None else self.names) - withdrawn)

    def check(self, tools: Sequence[JsonObject]) -> None:
        """Raises `InvalidRequest` if `names` has a tool that is not offered, or a call is required without tools."""
        offered = {tool["function"]["name"] for tool in tools}
        if missing := sorted((self.names or frozenset()) - offered):
            problem = f"names {shown(missing[0])!r}, which is not among the tools of the request"
            raise InvalidRequest.at(self.path, problem)
        if self.mode == "required" and not self.allowed(tools):
            raise InvalidRequest.at(self.path, "asks for a tool call, but no tool is offered")


def note_left_out(left_out: Iterable[LeftOut]) -> None:
    """Logs the types of what is left out of prompts."""
    _log_once("left out of prompts, as this server does not read or run it: %s", {each.type for each in left_out})


def note_num_ctx(num_ctx: int, max_positions: int) -> None:
    """Logs an `options.num_ctx` above the positions that the model has here."""
    _log_once("options.num_ctx is more than this model takes here: %s", [f"{num_ctx} of {max_positions}"])


def note_misspelt(names: Collection[str]) -> None:
    """Logs fields that are not read, each with the known one that is like it."""
    _log_once("fields that are not known, so not read: %s", names)


def _log_once(message: str, texts: Collection[str]) -> None:
    """Logs each text of a client once, because agents repeat them, and at most 32 texts for each message."""
    logged = _logged[message]
    new = sorted({shown(text, _SHOWN_CHARS) for text in texts} - logged)[: _MAX_KINDS - len(logged)]
    if new:
        logged.update(new)
        log.info(f"[server] {message}", ", ".join(new))


class NamesTools(Protocol):
    """A tool choice that is an object."""

    def neutral(self, *, many: bool) -> ToolChoice:
        """Returns the choice in the neutral form. Without `many`, a reply has one call at most."""


def openai_choice(
    tool_choice: Literal["auto", "none", "required"] | NamesTools | None,
    *,
    parallel: bool | None,
    tools: Sequence[JsonObject],
    strict: frozenset[str] = frozenset(),
) -> ToolChoice:
    """Returns OpenAI's `tool_choice` and `parallel_tool_calls` in the neutral form. Raises the errors of `check`."""
    many = parallel is not False
    choice = (
        ToolChoice(tool_choice or "auto", many=many)
        if isinstance(tool_choice, str | None)
        else tool_choice.neutral(many=many)
    )
    choice.check(tools)
    return replace(choice, strict=strict)


class ParsedRequest(Struct, frozen=True, kw_only=True):
    """A request in the neutral form. The reply continues a `prompt` of text or token ids, and fills the gap of a
    `FillIn`. The reply to such a prompt is not parsed for reasoning and calls.
    """

    prompt: Conversation | str | list[int] | FillIn
    more_prompts: tuple[str | list[int] | FillIn, ...] = ()
    """Further prompts. Each gets its own replies, as if it came alone."""
    sampling: SamplingParams
    num_ctx: int | None = None
    """The most tokens of prompt and reply together, from `options.num_ctx`."""
    tool_choice: ToolChoice = ToolChoice()
    text_format: TextFormat | None = None
    thinking_budget: int | None = None
    """The most tokens of the reply's thoughts."""
    return_progress: bool = False
    echo: bool = False
    """True if the tokens of the prompt are part of the reply, with log probabilities if the reply has them."""
    limit_path: str = "max_tokens"
    """The field of the request that limits the tokens of a choice."""

    def without_reply(self) -> ParsedRequest:
        """Returns the request that only computes and saves the prompt."""
        sampling = replace(self.sampling, max_tokens=0, n=1, logprobs=None)
        choice = replace(self.tool_choice, mode="auto", strict=frozenset())
        return replace(self, sampling=sampling, tool_choice=choice, text_format=None)

    @property
    def tools(self) -> list[JsonObject]:
        """The tools that may be called."""
        return self.tool_choice.allowed(self.prompt.newest_tools) if isinstance(self.prompt, Conversation) else []

    @property
    def is_constrained(self) -> bool:
        """Returns whether the client constrains the reply. A constraint must then compile before the reply begins."""
        choice = self.tool_choice
        has_tools = isinstance(self.prompt, Conversation) and bool(self.prompt.tools)
        return self.text_format is not None or (choice.mode != "auto" and has_tools) or bool(choice.strict)


ConstraintCheck: TypeAlias = Callable[..., Mapping[str, Loosened]]
"""See `engine.constraints.trial.Trials.run`."""


def constraint_of(
    request: ParsedRequest, output_format: OutputFormat, prompt_end: str, check: ConstraintCheck
) -> Constraint | None:
    """Returns the constraint on the reply, None if there is none.

    If tools are offered and none may be called, the reply cannot begin a call, and its parser reads no calls. If calls
    are optional, a call in the reply names an offered tool, and its arguments follow the schema; if the client asks for
    JSON, the reply is either JSON or calls. May take seconds, unless `is_constrained` is False. Raises `InvalidRequest`
    for a constraint that cannot be compiled.
    """
    if not isinstance(request.prompt, Conversation):
        return None if request.text_format is None else _checked_text(request.text_format, None, check)
    conversation, choice, text = request.prompt, request.tool_choice, request.text_format
    tools = choice.allowed(conversation.newest_tools)
    thought = _thought_before(output_format, prompt_end)
    may_call = choice.mode == "auto" and text is None and bool(tools)
    if (choice.mode == "required" or may_call) and thought is not None and thought.begin is None:
        # Such a template ends a thought by starting the answer. A reply with a call has no answer, so the grammar must
        # not wait for the end of the thought.
        thought = thought if _is_thinking(output_format, prompt_end) else None
    if choice.mode == "required":
        forced = partial(output_format.call_grammar, many=choice.many)
        return _checked_calls(conversation, choice, forced, thought, check)
    if may_call:
        return _begun_calls(conversation, choice, output_format, thought, check)
    if text is None and choice.mode == "none" and conversation.tools:
        grammar = output_format.no_call_grammar(conversation.tools)
        try:
            return _checked_calls(conversation, choice, lambda _: grammar, thought, check)
        except InvalidRequest as error:
            # The parser takes a text that looks like a call for content anyway.
            _log_once("calls cannot be forbidden: %s", [error.message])
            return None
    if text is None:
        return None
    constraint = _checked_text(text, thought, check)
    if not tools or constraint.kind == "choice":
        return constraint

    schema: JsonObject = json.loads(constraint.source) if constraint.kind == "json_schema" else {"type": "object"}
    compact = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}

    def either(tools: Sequence[JsonObject]) -> str:
        calls = _START.sub("calls", output_format.call_grammar(tools, many=choice.many))
        return f"{calls}\nstart: calls | json_text\njson_text: %json {json.dumps(schema | compact)}\n"

    return _checked_calls(conversation, choice, either, thought, check)


def thought_budget_of(
    request: ParsedRequest,
    output_format: OutputFormat,
    prompt_end: str,
    encode: Callable[[str], list[int]],
    end_ids: Collection[int],
) -> ThoughtBudget | None:
    """Returns the budget of the reply's thoughts; None for a model without thoughts. `end_ids` end a reply."""
    tags = output_format.thought
    if tags is None:
        return None
    is_open = _is_thinking(output_format, prompt_end)

    closing = tags.before_end + tags.end
    first = closing[: closing.find(">") + 1] or closing

    def new_watch() -> Callable[[str], bool]:
        parser, watch, tail = output_format.parser(request.tools, prompt_end), ThoughtWatch(is_open=is_open), ""

        def see(text: str) -> bool:
            nonlocal tail
            seen = tail + text
            if first in seen:
                # The parser does not report a tag until something follows it.
                num_after = len(seen) - seen.rindex(first) - len(first)
                parser.feed(text[: len(text) - num_after])
                text, watch.is_open = text[len(text) - num_after :], False
            tail = seen[1 - len(first) :]
            return watch.see(parser.feed(text), parser)

        return see

    return ThoughtBudget(
        max_tokens=request.thinking_budget, closing=tuple(encode(closing)), new_watch=new_watch, end_ids=end_ids
    )


def _thought_before(output_format: OutputFormat, prompt_end: str) -> FreeText | None:
    """Returns the thought before the reply: required if the template has opened it, else optional; None for none."""
    tags = output_format.thought
    if tags is None:
        return None
    if _is_thinking(output_format, prompt_end):
        return FreeText(end=tags.end)
    if prompt_end.rstrip().endswith(tags.end):
        # The template has closed the thought: thinking is off.
        return None
    return FreeText(end=tags.end, begin=tags.begin)


def _is_thinking(output_format: OutputFormat, prompt_end: str) -> bool:
    """Returns whether the prompt ends inside a thought."""
    parser = output_format.parser((), prompt_end)
    return any(isinstance(delta, ReasoningDelta) for delta in [*parser.feed("x"), *parser.finish()])


def _checked_text(wanted: TextFormat, before: FreeText | None, check: ConstraintCheck) -> Constraint:
    is_loose = wanted.kind == "json_schema" and not wanted.is_strict and len(wanted.source) <= MAX_CHARS
    source = _with_any_of(wanted) if is_loose else wanted.source
    constraint = Constraint(kind=wanted.kind, source=source, before=before)
    check(constraint, param=wanted.path)
    return constraint


def _with_any_of(wanted: TextFormat) -> str:
    """Returns the source of a schema with `anyOf` for `oneOf`."""
    try:
        schema, wider = with_any_of(json.loads(wanted.source), only_proven=False)
    except (ValueError, RecursionError):
        # The check that follows raises the error.
        return wanted.source
    places = [".".join(map(str, (wanted.path, *path))) for path in wider]
    _log_once("a value may fit several branches, as of anyOf: %s", places)
    return json.dumps(schema)


def _begun_calls(
    conversation: Conversation,
    choice: ToolChoice,
    output_format: OutputFormat,
    before: FreeText | None,
    check: ConstraintCheck,
) -> Constraint | None:
    """Returns the constraint of calls, which begins with a call. It is checked now if a tool is strict."""
    tools = choice.allowed(conversation.newest_tools)
    begins = output_format.beginning_of_calls(tools)
    if begins is None:
        return None

    def make_source() -> str:
        return _checked_calls(conversation, choice, output_format.begun_grammar, None, check).source

    def try_to_make() -> str:
        try:
            if not output_format.holds_calls:
                raise InvalidRequest("this model's chat template writes calls in a form that the grammar does not hold")
            return make_source()
        except DiskPrefixError as error:
            _log_once("calls are not constrained: %s", [error.message])
            raise

    constraint = Constraint(kind="lark", before=before, begins=begins)
    if choice.strict.isdisjoint(map(_name, tools)):
        return replace(constraint, make_source=try_to_make)
    return replace(constraint, source=make_source())


def _checked_calls(
    conversation: Conversation,
    choice: ToolChoice,
    grammar: Callable[[Sequence[JsonObject]], str],
    before: FreeText | None,
    check: ConstraintCheck,
) -> Constraint:
    """Returns the constraint of `grammar`, which makes a grammar of the tools that may be called. Parts of schemas that
    a grammar cannot enforce are left out and logged, unless the tool is strict.

    Raises `InvalidRequest`, with the path of the schema if the schema of one tool's arguments is at fault.
    """
    offered = zip(conversation.tool_paths, conversation.newest_tools, strict=False)
    tools = {path: tool for path, tool in offered if choice.allowed([tool])}
    strict = [path for path, tool in tools.items() if _name(tool) in choice.strict]
    while True:
        constraint = Constraint(kind="lark", source=grammar([*tools.values()]), before=before)
        parts = {path: json.dumps(tool["function"].get("parameters") or {}) for path, tool in tools.items()}
        if not (loosened := check(constraint, param="tools", parts=parts, strict=strict)):
            return constraint
        for path, (schema, left_out) in loosened.items():
            function = tools[path]["function"] | {"parameters": json.loads(schema)}
            tools[path] = tools[path] | {"function": function}
            _log_once(
                "no grammar can enforce %s",
                [f"{path}.{place}" if place[0] != ":" else f"{path}{place}" for place in left_out],
            )


def _name(tool: JsonObject) -> str:
    return str(tool["function"]["name"])

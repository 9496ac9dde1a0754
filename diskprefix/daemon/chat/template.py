"""The chat template of a model: renders conversations, and finds the tokens around messages and replies."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, product, starmap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from jinja2.exceptions import TemplateError
from msgspec.structs import replace

from diskprefix.daemon.chat.client_text import Author, TextRules, TokenTexts, private_characters, with_stand_ins
from diskprefix.daemon.chat.control_tokens import IN_SYSTEM_MESSAGES, control_texts, looks_like_a_marker
from diskprefix.daemon.chat.draft import PromptDraft, Rendering
from diskprefix.daemon.chat.messages import (
    Conversation,
    Ending,
    JsonObject,
    has_late_system,
    joined,
    late_system_as_user,
)
from diskprefix.daemon.chat.template_input import (
    MessageForm,
    TemplateInput,
    common_chars,
    message_for_template,
    text_for_template,
    variables_for_template,
    visit_texts,
)
from diskprefix.errors import InvalidRequest, SettingsError
from diskprefix.printable import shown
from diskprefix.runtime.files.chat_template import SET_BY_THE_DAEMON, render_template
from diskprefix.thread_work import CHAT_TEMPLATE, in_step

if TYPE_CHECKING:
    from diskprefix.runtime.files.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger("diskprefix")

_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Raised by templates for messages that they were not written for."""

_REASON_CHARS = 200
_TEXT = "diskprefix"
_SYSTEM: JsonObject = {"role": "system", "content": _TEXT}
_TURNS: list[JsonObject] = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
_ANSWER = "A reply."
_FIRST_SYSTEM: JsonObject = {"role": "system", "content": _ANSWER}
_LATE_SYSTEM: JsonObject = {"role": "system", "content": "A late rule."}
_CUTS = re.compile(r"""(?:split|replace)\(\s*('[^'\\]+'|"[^"\\]+"|'\\n'|"\\n")""")
"""Texts that a template removes from others, joining the text around them."""

Write: TypeAlias = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders messages, with the beginning of a reply if the second argument is true. "" if the template refuses them."""

SOME_USER = {"role": "user", "content": _TEXT}
SOME_REPLY = {"role": "assistant", "content": _TEXT}
_CALL_ID = "diskprefx"
"""Nine letters, which Mistral's templates demand."""
_CALLED = {"id": _CALL_ID, "type": "function", "function": {"name": _TEXT, "arguments": {}}}
SOME_CALL = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
SOME_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "content": _TEXT}
_AROUND_LATE_SYSTEM = (
    ([SOME_USER], [SOME_REPLY, SOME_USER]),
    ([SOME_USER, SOME_REPLY], [SOME_USER]),
    ([SOME_USER, SOME_CALL, SOME_RESULT], [SOME_REPLY, SOME_USER]),
)
"""Messages before and after a late system message. Mistral's templates accept one only after the user's messages."""
_GROWING = (
    ((SOME_USER, SOME_REPLY, SOME_USER), (SOME_USER, SOME_REPLY, SOME_USER, SOME_REPLY, SOME_USER)),
    ((SOME_USER, SOME_CALL, SOME_RESULT), (SOME_USER, SOME_CALL, SOME_RESULT, SOME_CALL, SOME_RESULT)),
)
"""Pairs of a conversation and the same conversation after more turns."""
_SWITCH = re.compile(r"\b(?=\w*(?:think|thought|reason))\w*(?:preserve|keep|clear|drop|truncate)\w*")
"""Names for a variable that keeps or drops the thoughts of earlier turns."""
_THINKING = {"enable_thinking": True, "thinking": True}
_THOUGHT = {"reasoning_content": _ANSWER}
_THOUGHTFUL = (
    (SOME_USER, SOME_REPLY | _THOUGHT, SOME_USER),
    (SOME_USER, SOME_CALL | _THOUGHT, SOME_RESULT, SOME_REPLY, SOME_USER),
)
"""Conversations with a thought before the last question."""


class ChatTemplate:
    """The chat template of one model. Thread-safe. `end_ids` end replies, `placeholders` stand for images. The daemon's
    owner sets `variables`; a client's variables override them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_ids: Collection[int],
        placeholders: Collection[str] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        for name in SET_BY_THE_DAEMON & variables.keys():
            raise SettingsError(f"--chat-template-kwargs: {name!r} is set by the daemon and cannot be changed")
        self._variables = variables
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special = special | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        """Token ids of the special tokens, by their texts."""
        self.added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()} | self.special
        """Token ids of all added tokens, by their texts."""
        self._placeholders = frozenset(placeholders)
        self._control = control_texts(tokenizer.added_tokens_decoder) | self._placeholders
        self._control |= {text for text in self.special if text.strip()}
        self.form = MessageForm()
        self._markers: dict[str, dict[str, int]] = {}
        self._reply_ends: dict[str, frozenset[str]] = {}
        self._rules: dict[tuple[str, bool, bool], TextRules] = {}
        self._switches: dict[str, dict[str, bool]] = {}
        self._learned: dict[tuple[Callable[[Write], Any], str], Any] = {}
        self._warned_of_tools = False

    def for_trial(self) -> ChatTemplate:
        """Returns a copy for made-up conversations. It learns and logs separately."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(other, name, value.copy())
        other._warned_of_tools = True
        return other

    @property
    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def source_for(self, tools: list[JsonObject] | None, path: str = "messages") -> str:
        """Returns the template for conversations with `tools`. Raises `InvalidRequest` if the model has none."""
        if not self._tokenizer.chat_template:
            problem = (
                "this model has no chat template; use /v1/completions, or start the daemon with --chat-template FILE"
            )
            raise InvalidRequest(problem, param=path, code="no_chat_template")
        return self._tokenizer.get_chat_template(tools=tools)

    def reads_clock(self, tools: list[JsonObject] | None) -> bool:
        """Returns whether the template may write the date or the time."""
        return self.exists and "strftime_now" in self.source_for(tools)

    def input_of(self, conversation: Conversation, with_pictures: bool) -> TemplateInput:
        """Returns the template's input. Raises `InvalidRequest` for a variable that the daemon sets."""
        tools = conversation.first_tools
        template = self.source_for(tools, conversation.path)
        if tools and "tools" not in template and not self._warned_of_tools:
            self._warned_of_tools = True
            log.warning(
                "a request offers tools, but the model was not trained to call them: its template leaves them out; "
                "this is logged once"
            )
        for name in SET_BY_THE_DAEMON & conversation.template_variables.keys():
            raise InvalidRequest.at(f"chat_template_kwargs.{name}", "is set by the daemon and cannot be changed")
        knows_developer = "developer" in template and self.writes_developer
        messages = [message_for_template(message, knows_developer, with_pictures) for message in conversation.messages]
        variables = {**self.switch_of(tools), **self._variables, **variables_for_template(conversation)}
        template_input = TemplateInput(messages, tools, variables, conversation.path)
        rules = self.rules_of(tools, conversation.special_tokens_in_text, with_pictures)
        changed, stand_ins = with_stand_ins(template_input, rules, visit_texts)
        return changed._replace(stand_ins=stand_ins)

    def render(self, template_input: TemplateInput, ending: Ending) -> str:
        """Returns the messages as text. Raises `InvalidRequest` if the template refuses them."""
        template_input = template_input._replace(messages=self.form.applied(template_input.messages))
        written, stand_ins = self._written(template_input, ending), template_input.stand_ins
        if stand_ins is None or not stand_ins.are_escaped_in(written):
            return written
        # A client may have typed an escape. With other stand-ins, only the escapes of stand-ins differ.
        others = stand_ins.others()
        moved = visit_texts(template_input, lambda _, text: stand_ins.moved(text, others))
        return stand_ins.unescaped(written, others, self._written(moved, ending))

    def _written(self, template_input: TemplateInput, ending: Ending) -> str:
        stand_ins = template_input.stand_ins
        try:
            with in_step(CHAT_TEMPLATE):
                return render_template(
                    self.source_for(template_input.tools),
                    template_input.messages,
                    tools=template_input.tools,
                    add_generation_prompt=ending == "reply",
                    continue_final_message=ending == "continue",
                    variables={**self._tokenizer.special_tokens_map, **template_input.variables},
                )
        except _TEMPLATE_FAULTS as error:
            message = str(error) if stand_ins is None else stand_ins.text(str(error))
            reason = shown(" ".join(message.split()), _REASON_CHARS) or type(error).__name__
            problem = f"the chat template refuses the messages: {reason}"
            raise InvalidRequest.at(template_input.path, problem, "template_error") from error

    def try_render(self, template_input: TemplateInput, ending: Ending) -> str:
        """Renders to find boundaries. Returns "" if the template refuses."""
        try:
            return self.render(template_input, ending)
        except InvalidRequest as error:
            log.debug("no boundaries are known: %s", error.message)
            return ""

    @cached_property
    def writes_late_system(self) -> bool:
        """True if the template writes a system message after messages of any other role, where it came, without losing
        a leading one (if it accepts both). Some write all system messages at the beginning, which changes the prompt
        from there on."""
        return all(starmap(self._writes_late_system, _AROUND_LATE_SYSTEM))

    def _writes_late_system(self, before: list[JsonObject], after: list[JsonObject]) -> bool:
        messages = [*before, _LATE_SYSTEM, *after]
        if not self._written_plainly([*before, *after]):
            return True  # It takes no calls.
        with_first, written = self._written_plainly([_FIRST_SYSTEM, *messages]), self._written_plainly(messages)
        if with_first and _FIRST_SYSTEM["content"] not in with_first:
            return False
        text = with_first or written
        return 0 <= text.find(_TEXT) < text.find(_LATE_SYSTEM["content"])

    @cached_property
    def writes_second_system(self) -> bool:
        """True if the template writes a second system message, without losing the first one."""
        text = self._written_plainly([_FIRST_SYSTEM, _SYSTEM, *_TURNS])
        return _TEXT in text and _ANSWER in text

    @cached_property
    def writes_developer(self) -> bool:
        """True if the template writes a first message of the role `developer`."""
        return _TEXT in self._written_plainly([_SYSTEM | {"role": "developer"}, *_TURNS])

    @cached_property
    def refuses_system(self) -> bool:
        """True if the template accepts no system message."""
        with_system, without = ([_SYSTEM, SOME_USER], [SOME_USER])
        return not self._written_plainly(with_system) and bool(self._written_plainly(without))

    def _written_plainly(self, messages: list[JsonObject]) -> str:
        """Returns messages without tools as text; "" if the template refuses them."""
        return self.try_render(TemplateInput(messages, None, {}), "reply")

    def learned(self, learn: Callable[[Write], T], tools: list[JsonObject] | None) -> T:
        """Returns the result of `learn` for the template for `tools`, computed once. `learn` gets a function that
        renders."""
        key = learn, self.source_for(tools)
        if key not in self._learned:
            self._learned[key] = learn(self._writer(tools))
        value: T = self._learned[key]
        return value

    def writes_in_result(self, mark: str) -> bool:
        """Returns whether the template writes the `mark` of an image in the result of a call."""
        result = SOME_RESULT | {"content": [{"type": "image"}]}
        return mark in self.try_render(TemplateInput([SOME_USER, SOME_CALL, result], None, {}), "none")

    def loses_plain_text(self) -> bool:
        """Returns whether the template writes texts only from lists of content parts."""
        plain, in_parts = (
            _TEXT in self.try_render(TemplateInput([{"role": "user", "content": content}], None, {}), "reply")
            for content in (_TEXT, text_for_template(_TEXT))
        )
        return in_parts and not plain

    def markers_of(self, tools: list[JsonObject] | None) -> dict[str, int]:
        """Returns the token ids of the template's markers by their texts. A model may have a template for tools."""
        template = self.source_for(tools)
        if template not in self._markers:
            texts = template_markers(self.special.keys(), self.added.keys() - self.special.keys(), self._writer(tools))
            self._markers[template] = {text: self.added[text] for text in texts}
        return self._markers[template]

    def reply_ends_of(self, tools: list[JsonObject] | None) -> frozenset[str]:
        """Returns the texts of tokens that may follow a reply."""
        template = self.source_for(tools)
        if template not in self._reply_ends:
            self._reply_ends[template] = end_texts(self.added, self._end_ids, self._writer(tools), self._first_token)
        return self._reply_ends[template]

    def switch_of(self, tools: list[JsonObject] | None) -> dict[str, bool]:
        """Returns the variable that makes the template keep the thoughts of earlier turns; {} without one, or if the
        template always keeps them."""
        template = self.source_for(tools)

        def keeps(switch: dict[str, bool]) -> bool:
            written = (
                self.try_render(TemplateInput([*messages], None if tools is None else [], _THINKING | switch), "reply")
                for messages in _THOUGHTFUL
            )
            texts = [text for text in written if text]
            return bool(texts) and all(_ANSWER in text for text in texts)

        if template not in self._switches:
            names = sorted(set(_SWITCH.findall(template)))
            switches = ({name: value} for name, value in product(names, (True, False)))
            self._switches[template] = {} if not names or keeps({}) else next(filter(keeps, switches), {})
        return self._switches[template]

    @cached_property
    def text_rules(self) -> TextRules:
        """The rules for texts without a conversation: they spell no control token."""
        return TextRules(TokenTexts(self._control), (), lambda _: self._control)

    def rules_of(
        self, tools: list[JsonObject] | None, special_tokens_in_text: bool = False, with_pictures: bool = False
    ) -> TextRules:
        """Returns the rules for a conversation's texts."""
        template = self.source_for(tools)
        key = template, special_tokens_in_text, with_pictures
        if key not in self._rules:
            cuts = (literal[1:-1].replace("\\n", "\n") for literal in _CUTS.findall(template))
            tokens = TokenTexts(self._control, cuts)
            never: Callable[[Author], Collection[str]] = partial(self._never, tools)
            if special_tokens_in_text:
                # A placeholder without an image would be an error.
                never = partial(lambda texts, _: texts, self._placeholders if with_pictures else ())
            self._rules[key] = TextRules(tokens, self.markers_of(tools), never, joins=special_tokens_in_text)
        return self._rules[key]

    def _never(self, tools: list[JsonObject] | None, author: Author) -> Collection[str]:
        """Returns the tokens that the texts of an author must not spell."""
        if author == "client":
            return self._control
        turns = turn_texts(self._control, self.special.keys(), self._writer(tools)) | self._placeholders
        turns |= self.reply_ends_of(tools) | {text for text, i in self.added.items() if i in self._end_ids}
        if author == "reply":
            return turns
        return self._control - (frozenset(chain(*IN_SYSTEM_MESSAGES.values())) - turns)

    def _writer(self, tools: list[JsonObject] | None) -> Write:
        """Returns a function that renders made-up conversations with the template for `tools`."""
        # An empty list selects the same template as the real tools.
        some_tools: list[JsonObject] | None = None if tools is None else []

        def write(messages: Sequence[JsonObject], add_generation_prompt: bool) -> str:
            ending: Ending = "reply" if add_generation_prompt else "none"
            for listed in ([_SYSTEM, *messages], list(messages)):
                if rendered := self.try_render(TemplateInput(listed, some_tools, {}), ending):
                    return rendered
            return ""

        return write

    def _first_token(self, text: str) -> int | None:
        return next(iter(self._tokenizer.encode(text, add_special_tokens=False)), None)


def place(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Joins leading system messages, and gives later ones to the user, unless the template writes them unchanged. If
    the template accepts no system message, all are the user's."""
    conversation, leading = draft.conversation, draft.conversation.num_leading
    if leading and template.refuses_system:
        as_users = [replace(message, role="user") for message in conversation.messages[:leading]]
        conversation, leading = replace(conversation, messages=[*as_users, *conversation.messages[leading:]]), 0
    if leading > 1 and not template.writes_second_system:
        first = joined(conversation.messages[:leading])
        conversation = replace(conversation, messages=[first, *conversation.messages[leading:]])
    if has_late_system(conversation.messages) and not template.writes_late_system:
        conversation = late_system_as_user(conversation)
    return replace(draft, conversation=conversation)


def render(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Renders the conversation in the words of its recorded replies; "" if the template refuses them."""
    template_input = template.input_of(draft.replayed_conversation, bool(draft.pictures))
    write = template.try_render if draft.remembered else template.render
    rendering = Rendering(template_input, write(template_input, draft.conversation.ending))
    switch, variables = template.switch_of(template_input.tools), template_input.variables
    ours = {name: value for name, value in switch.items() if variables.get(name) is value}
    rewriting = replace(draft.prompt.rewriting, template_kwargs=ours)
    return replace(draft, rendering=rendering, spans=()).with_prompt(rewriting=rewriting)


def turn_texts(control: Collection[str], special: Collection[str], write: Write) -> set[str]:
    """Returns the texts of tokens that begin or end turns. The template writes them around plain messages and results
    of calls; tags of thoughts and calls do not count. If it refuses plain conversations, all special tokens count."""
    plain = write((SOME_USER, SOME_REPLY, SOME_USER), False)
    if not plain:
        return set(control) & set(special)
    around = {text for text in control if text in plain}
    tags = _interpreted(sorted(around - set(special)), write)
    # Some templates react only to the end of a thought.
    around -= tags | {tag.replace("/", "", 1) for tag in tags}
    called, answered = (
        write(messages, False) for messages in ((SOME_USER, SOME_CALL), (SOME_USER, SOME_CALL, SOME_RESULT))
    )
    return around | {text for text in control if text in answered and text not in called}


def template_markers(special_texts: Collection[str], other_texts: Collection[str], write: Write) -> frozenset[str]:
    """Returns the texts of the added tokens after which a conversation of this template may be cut.

    Tokens that are not special count only if special tokens do not separate messages, if the template writes them
    around messages, and if they stay when the conversation continues. A token whose text in a message changes the
    rendering (templates move or drop reasoning) counts only if it is special and separates messages. If the template
    refuses plain conversations, all special tokens count.
    """
    special = frozenset(filter(None, special_texts))
    prompts = [[write(messages, True) for messages in pair] for pair in _GROWING]
    common = [now[: common_chars(now, later)] for now, later in prompts]
    if not (common[0] and write((SOME_USER, SOME_REPLY), False)):
        return special
    unseparated = [text for text in common if max(map(text.rfind, special), default=-1) < text.rfind(_TEXT)]
    others = {
        token for token in other_texts if looks_like_a_marker(token) and any(token in text for text in unseparated)
    }
    separating = {token for token in special if any(token in text for text in common)}
    return special.union(others) - (_interpreted(sorted(special.union(others)), write) - separating)


def _interpreted(tokens: list[str], write: Write) -> set[str]:
    """Returns the `tokens` whose text in a message changes the rendering around it."""

    def differ(tokens: list[str], suffix: str) -> list[str]:
        if not tokens or not _makes_a_difference(tokens, suffix, write):
            return []
        half = len(tokens) // 2
        return differ(tokens[:half], suffix) + differ(tokens[half:], suffix) if half else tokens

    interpreted = set(differ(tokens, ""))
    # A template may react to an opening tag only if the closing tag follows.
    for closing in sorted(interpreted):
        interpreted |= set(differ([token for token in tokens if token not in interpreted], closing))
    return interpreted


def _makes_a_difference(tokens: list[str], suffix: str, write: Write) -> bool:
    content = f"a{'a'.join(tokens)}a"
    characters = sorted(map(ord, set(content)))
    stand_ins = dict(zip(characters, private_characters(len(characters), content), strict=True))
    originals = {code: char for char, code in stand_ins.items()}
    rendered, written = (
        write([{**message, "content": f"{text}{suffix}a"} for message in (SOME_USER, SOME_REPLY) * 2], False)
        for text in (content, content.translate(stand_ins))
    )
    return rendered != written.translate(originals)


def end_texts(
    added: Mapping[str, int], end_ids: Collection[int], write: Write, first_token: Callable[[str], int | None]
) -> frozenset[str]:
    """Returns the texts of the tokens that may end a reply: `end_ids`, and the token that the template writes after a
    reply. A token counts only if it is the `first_token` of its own text, so that earlier tokens cannot merge with
    it."""
    texts = {text for text, token_id in added.items() if token_id in end_ids}
    user = {"role": "user", "content": "A question?"}
    after = write([user, {"role": "assistant", "content": _ANSWER}, user], False).partition(_ANSWER)[2].lstrip()
    texts.add(max((text for text in added if after.startswith(text)), key=len, default=""))
    return frozenset(text for text in texts if text and first_token(f"{text}\nx") == added[text])

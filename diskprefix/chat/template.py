"""Renders a conversation or a text into a `Prompt`: chat template, token ids, safe boundaries and marks.

`README.md` describes the steps. This is CPU work that may take long for a long prompt; the server calls it in a thread.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from jinja2.exceptions import TemplateError

from diskprefix.chat.boundaries import (
    Write,
    neutralise,
    system_end,
    template_boundaries,
    template_markers,
    text_boundaries,
)
from diskprefix.chat.compression import shortened
from diskprefix.chat.content import UNSUPPORTED, Media, holds_media, parts_for_template, read_media, text_for_template
from diskprefix.chat.encoder import Encoded, Encoder, ReplySpan
from diskprefix.chat.late_system import has_late_system, late_system_as_user
from diskprefix.chat.marks import find_marks, mark_targets
from diskprefix.chat.messages import Conversation, Ending, JsonObject
from diskprefix.chat.normalisers import Normalisers
from diskprefix.chat.output.choose_format import Chosen, choose_format
from diskprefix.chat.output.format import OutputFormat, PlainText
from diskprefix.chat.preview import preview_of_chat, preview_of_text
from diskprefix.chat.replay import ConversationHash, Origin, RecordStore, Replayed, SampledTurn, find_turns
from diskprefix.chat.splice import end_texts, find_spans, readings, with_turns
from diskprefix.chat.template_input import (
    MessageForm,
    TemplateInput,
    message_for_template,
    probe_of,
    require_few_arguments,
    variables_for_template,
    without_media,
)
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.nouns import LeftOut, Mark, Prompt, Rewriting, SourceText
from diskprefix.printable import shown
from diskprefix.tokens import as_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from diskprefix.model.load.media import MediaProcessor

log = logging.getLogger("diskprefix")

_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RecursionError,
)
"""Raised by templates for messages that they were not written for."""

_REASON_CHARS = 200
_END_TOKENS = 32
"""Enough to see whether the template opened a thought, and whether it closed it."""
_MAX_RENDERINGS = 4
"""To find out which remembered turns fit."""
_PROBE_TEXT = "diskprefix"
_SYSTEM: JsonObject = {"role": "system", "content": _PROBE_TEXT}
_TURNS: list[JsonObject] = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
_LATE_SYSTEM = TemplateInput([_TURNS[0], _SYSTEM, *_TURNS[1:]], None, {})


class _Rendered(NamedTuple):
    """What the template wrote for a conversation."""

    conversation: Conversation
    template_input: TemplateInput
    text: str
    spans: tuple[ReplySpan, ...] = ()
    """Of replies in whose place sampled tokens stand."""


class _Written(NamedTuple):
    """What the template wrote, as text and as tokens. `said` is None if no replies are remembered."""

    rendered: _Rendered
    encoded: Encoded
    said: ConversationHash | None


class PromptRenderer:
    """Renders and tokenises the prompts of one model. May be called from several threads.

    `media` is the processor of a multimodal model. `normalisers` change conversations before they are rendered.
    Aged messages of a conversation with more than `compress_above` tokens are left out. `end_ids` are the tokens with
    which the model ends a reply.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        vocab_size: int,
        max_positions: int,
        media: MediaProcessor | None = None,
        normalisers: Normalisers = Normalisers(),  # noqa: B008 (immutable)
        compress_above: int | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._normalisers = normalisers
        self._compress_above = compress_above
        self._media = media
        self._encoder = Encoder(tokenizer, vocab_size=vocab_size, max_positions=max_positions)
        special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._special = special | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()} | self._special
        self._markers: dict[str, dict[str, int]] = {}
        self._endings: dict[str, frozenset[str]] = {}
        self.end_ids = frozenset({*end_ids, tokenizer.eos_token_id} - {None})
        self.vocab_size = vocab_size
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        self._warned_of_tools = False
        self._form = MessageForm()
        self._form = MessageForm(parts_only=self._loses_plain_text())
        self.output_format: OutputFormat = PlainText()
        """How the model writes reasoning and calls of tools. `warm_up` finds it out."""

    def warm_up(self) -> None:
        """Compiles the template and fills the tokenizer's caches, so that the first request does not wait for that."""
        if self._tokenizer.chat_template:
            self._markers_of(None)
            self.output_format, form = self._verified_format()
            self._form = replace(form, parts_only=self._form.parts_only)
        self._encoder.warm_up()

    def _verified_format(self) -> Chosen:
        def render(messages: list[JsonObject], tools: list[JsonObject], add_generation_prompt: bool) -> str:
            return self._try_render(TemplateInput(messages, tools, {}), "reply" if add_generation_prompt else "none")

        return choose_format(self._template([]), render, special=self._special, added=self._added)

    def chat(self, conversation: Conversation) -> Prompt:
        """Returns the prompt of a conversation, all of it as the template writes it.

        Raises `InvalidRequest` if the template or the model refuses the conversation, and `ContextTooLong` if the
        prompt exceeds the model's positions.
        """
        return self.replay(conversation, None).prompt

    def replay(
        self, conversation: Conversation, turns: RecordStore | None, encodings: RecordStore | None = None
    ) -> Replayed:
        """Returns the prompt of a conversation, with the tokens of the replies that `turns` remembers. Texts that
        `encodings` has are not encoded again.

        Raises as `chat` does, for what `chat` raises.
        """
        require_few_arguments(conversation)
        conversation, rewriting = self._normalisers.apply(self._placed(conversation))
        media = read_media(conversation.messages, self._media)
        if media is not None:
            return Replayed(replace(self._chat_with_media(conversation, media), rewriting=rewriting))
        written, left_out = self._fitting(conversation, turns, encodings)
        prompt = self._prompt(written, replace(rewriting, left_out=left_out))
        if written.said is None or conversation.ending != "reply":
            return Replayed(prompt)
        return Replayed(prompt, Origin.of(written.said, written.rendered.text))

    def _placed(self, conversation: Conversation) -> Conversation:
        """Returns the conversation without late system messages, unless the template writes those."""
        if not has_late_system(conversation.messages) or self._try_render(_LATE_SYSTEM, "reply").count(_PROBE_TEXT):
            return conversation
        return late_system_as_user(conversation)

    def _fitting(
        self, conversation: Conversation, turns: RecordStore | None, encodings: RecordStore | None
    ) -> tuple[_Written, LeftOut | None]:
        """Writes a conversation without media. Its aged messages are left out above `compress_above` tokens."""
        limit = self._compress_above
        if limit is None:
            return self._written(conversation, turns, encodings), None
        written: _Written | None = None
        with suppress(ContextTooLong):
            written = self._written(conversation, turns, encodings)
        if written is not None and len(written.encoded.token_ids) <= limit:
            return written, None
        conversation, left_out = shortened(conversation, limit, self._encoder.count)
        if written is None or left_out is not None:
            written = self._written(conversation, turns, encodings)
        return written, left_out

    def _written(
        self, conversation: Conversation, turns: RecordStore | None, encodings: RecordStore | None
    ) -> _Written:
        found, said = ({}, None) if turns is None else find_turns(conversation.messages, turns)
        if found:
            # Reasoning that the client left out may be too long.
            with suppress(ContextTooLong):
                return self._encoded(self._rendered(conversation, found), said, encodings)
        return self._encoded(self._rendered(conversation, {}), said, encodings)

    def _encoded(self, rendered: _Rendered, said: ConversationHash | None, encodings: RecordStore | None) -> _Written:
        text, param = rendered.text, rendered.conversation.path
        encoded = self._encoder.encode_spliced(
            text, rendered.spans, adds_bos=self._adds_bos(text), param=param, store=encodings
        )
        return _Written(rendered, encoded, said)

    def _rendered(self, conversation: Conversation, found: Mapping[int, SampledTurn]) -> _Rendered:
        """Renders with those of the remembered turns that fit."""
        for _ in range(_MAX_RENDERINGS):
            if not found:
                break
            said = replace(conversation, messages=with_turns(conversation.messages, found))
            template_input = self._template_input(said)
            text = self._try_render(template_input, said.ending)
            read = partial(readings, self.output_format, said.tools or (), self._special, text)
            spans = find_spans(text, found, self._endings_of(said.tools), read)
            if len(spans) == len(found):
                return _Rendered(said, template_input, text, tuple(spans.values()))
            # What does not fit stands as the client sent it, which is not the text before that what does fit.
            found = {index: found[index] for index in spans}
        template_input = self._template_input(conversation)
        return _Rendered(conversation, template_input, self._render(template_input, conversation.ending))

    def _prompt(self, written: _Written, rewriting: Rewriting) -> Prompt:
        (conversation, template_input, rendered, spans), encoded, _ = written
        markers = self._markers_of(template_input.tools)
        neutral_parts, changed = neutralise(list(template_input), markers)
        neutral_input = TemplateInput(*neutral_parts)
        neutral = self._try_render(neutral_input, conversation.ending) if changed else None
        offsets = encoded.offsets
        boundaries = template_boundaries(encoded.templates_ids, offsets, markers.values(), rendered, neutral)
        probe = self._try_render(probe_of(template_input), "reply")
        marks: tuple[Mark, ...] = ()
        if targets := mark_targets(conversation):
            shown_as = template_input, rendered
            if neutral and len(neutral) == len(rendered):
                # The text of a message must not pass for what the template writes at the end of a message.
                shown_as = neutral_input, neutral
            render = partial(self._try_render, ending="none")
            marks = find_marks(targets, *shown_as, offsets, len(offsets), render)
        return Prompt(
            token_ids=encoded.token_ids,
            boundaries=boundaries,
            system_end=system_end(boundaries, offsets, rendered, probe) if probe else 0,
            text=preview_of_chat(template_input.messages),
            marks=marks,
            source=None if self._normalisers.is_off else SourceText.of(rendered, offsets),
            rewriting=rewriting,
            replayed=len(spans),
        )

    def _chat_with_media(self, conversation: Conversation, media: Media) -> Prompt:
        """Returns a prompt without boundaries: the cache is not used for prompts with media."""
        assert self._media is not None, "a model without media has refused them"
        template_input = self._template_input(conversation)
        for message, sent in zip(template_input.messages, conversation.messages, strict=True):
            message["content"] = parts_for_template(sent.content) or text_for_template("")
        rendered = self._render(template_input, conversation.ending)
        if rendered == self._try_render(without_media(template_input), conversation.ending):
            raise InvalidRequest(
                f"{conversation.path}: the chat template leaves images and sounds out; use another one with "
                "--chat-template",
                param=conversation.path,
                code=UNSUPPORTED,
            )
        # The text alone may be too long; that is cheaper to find than to prepare the images.
        self._encoder.encode(rendered, param=conversation.path)
        prepared = self._media.prepare(rendered, media.images, media.audio)
        self._encoder.check_positions(len(prepared.token_ids), conversation.path)
        return Prompt(token_ids=prepared.token_ids, media=prepared.tensors)

    def _adds_bos(self, rendered: str) -> bool:
        """Whether the tokenizer must add a BOS that the template did not write.

        Processors of multimodal models do so, and a text must begin the same with and without an image.
        """
        bos = self._tokenizer.bos_token
        return self._media is not None and not (bos and rendered.startswith(bos))

    def _loses_plain_text(self) -> bool:
        """Whether the template takes lists of content parts only, and would leave out a plain text."""
        if self._media is None or not self._tokenizer.chat_template:
            return False
        contents = (_PROBE_TEXT, text_for_template(_PROBE_TEXT))
        inputs = (TemplateInput([{"role": "user", "content": content}], None, {}) for content in contents)
        plain, in_parts = (_PROBE_TEXT in self._try_render(template_input, "reply") for template_input in inputs)
        return in_parts and not plain

    def completion(self, prompt: str | list[int], encodings: RecordStore | None = None) -> Prompt:
        """Returns the prompt of a text or of token ids, without a chat template. Texts that `encodings` has are not
        encoded again.

        Raises `InvalidRequest` for an unknown token id or an empty prompt, and `ContextTooLong` if the prompt exceeds
        the model's positions.
        """
        num_added = 0, 0
        if isinstance(prompt, str):
            text = prompt
            token_ids = self._encoder.encode(text, adds_special=True, param="prompt", store=encodings).token_ids
            num_added = len(self._encoder.added[0]), len(self._encoder.added[1])
        else:
            self._encoder.check_positions(len(prompt), param="prompt")
            self._encoder.check_vocabulary(prompt)
            token_ids = as_token_ids(prompt)
            ends = prompt if len(prompt) <= 120 else [*prompt[:60], *prompt[-60:]]
            text = str(self._tokenizer.decode(ends))
        preview = preview_of_text(text)
        marker_ids = self._markers_of(None).values() if self._tokenizer.chat_template else ()
        marks = {*marker_ids, *self._special.values()}
        boundaries = text_boundaries(token_ids, num_added, marks, self._tokenizer.bos_token_id)
        return Prompt(token_ids=token_ids, boundaries=boundaries, text=preview)

    def text_of(self, conversation: Conversation) -> str:
        """Returns what the template writes, without images and sounds. Raises `InvalidRequest` as `chat` does."""
        require_few_arguments(conversation)
        conversation, _ = self._normalisers.apply(self._placed(conversation))
        if self._compress_above is None or holds_media(conversation.messages):
            return self._render(self._template_input(conversation), conversation.ending)
        return self._fitting(conversation, None, None)[0].rendered.text

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of any text, however long."""
        encoding = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(token_id) for token_id in encoding["input_ids"]]

    def detokenize(self, token_ids: list[int]) -> str:
        """Returns the text of tokens, special ones included. Raises `InvalidRequest` for an unknown token id."""
        self._encoder.check_vocabulary(token_ids, param="tokens")
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def end_of(self, prompt: Prompt) -> str:
        """Returns the last characters of a prompt, with its special tokens."""
        return str(self._tokenizer.decode(prompt.token_ids[-_END_TOKENS:].tolist(), skip_special_tokens=False))

    def _template_input(self, conversation: Conversation) -> TemplateInput:
        tools = conversation.tools
        template = self._template(tools, conversation.path)
        if tools and "tools" not in template and not self._warned_of_tools:
            self._warned_of_tools = True
            log.warning("a request offers tools, but the model's chat template ignores them; this is logged once")
        for name in self._reserved & conversation.template_variables.keys():
            param = f"{conversation.variables_path}.{name}"
            raise InvalidRequest(f"{param}: is set by the daemon and cannot be changed", param=param)
        developer_is_known = "developer" in template
        messages = [message_for_template(message, developer_is_known) for message in conversation.messages]
        return TemplateInput(messages, tools, variables_for_template(conversation), conversation.path)

    def _template(self, tools: list[JsonObject] | None, path: str = "messages") -> str:
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or start the daemon with --chat-template FILE",
                param=path,
                code="no_chat_template",
            )
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _markers_of(self, tools: list[JsonObject] | None) -> dict[str, int]:
        """Returns the token ids of the template's markers, by their texts. Templates for tools may be other ones."""
        template = self._template(tools)
        if template not in self._markers:
            texts = template_markers(
                self._special.keys(), self._added.keys() - self._special.keys(), self._writer(tools)
            )
            self._markers[template] = {text: self._added[text] for text in texts}
        return self._markers[template]

    def _endings_of(self, tools: list[JsonObject] | None) -> frozenset[str]:
        """Returns what may stand behind a reply."""
        template = self._template(tools)
        if template not in self._endings:
            self._endings[template] = end_texts(
                self._added, self.end_ids, self._writer(tools), self._encoder.first_token
            )
        return self._endings[template]

    def _writer(self, tools: list[JsonObject] | None) -> Write:
        """Returns what renders made-up conversations, to see what the template of `tools` writes."""
        # An empty list selects the same template as the real tools.
        some_tools: list[JsonObject] | None = None if tools is None else []

        def write(messages: Sequence[JsonObject], add_generation_prompt: bool) -> str:
            ending: Ending = "reply" if add_generation_prompt else "none"
            for listed in ([_SYSTEM, *messages], list(messages)):
                if rendered := self._try_render(TemplateInput(listed, some_tools, {}), ending):
                    return rendered
            return ""

        return write

    def _render(self, template_input: TemplateInput, ending: Ending) -> str:
        """Renders, with messages in the form that the template takes. Raises `InvalidRequest` as `_apply` does."""
        return self._apply(template_input._replace(messages=self._form.applied(template_input.messages)), ending)

    def _apply(self, template_input: TemplateInput, ending: Ending) -> str:
        """Raises `InvalidRequest` if the template refuses its input."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    template_input.messages,
                    tools=template_input.tools,
                    tokenize=False,
                    add_generation_prompt=ending == "reply",
                    continue_final_message=ending == "continue",
                    **template_input.variables,
                )
            )
        except _TEMPLATE_FAULTS as error:
            reason = shown(" ".join(str(error).split()), _REASON_CHARS) or type(error).__name__
            path = template_input.path
            raise InvalidRequest(
                f"{path}: the chat template refuses the messages: {reason}", param=path, code="template_error"
            ) from error

    def _try_render(self, template_input: TemplateInput, ending: Ending) -> str:
        """Renders to find boundaries. Returns an empty text, which leads to no boundary, if the template refuses."""
        try:
            return self._render(template_input, ending)
        except InvalidRequest as error:
            log.debug("no boundaries are known: %s", error.message)
            return ""

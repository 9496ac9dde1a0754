"""Renders a conversation or a text into a `Prompt`, by the steps in `README.md`. A long prompt may take seconds."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from diskprefix.daemon.chat.alternation import alternate, alternation_of
from diskprefix.daemon.chat.boundaries import bound
from diskprefix.daemon.chat.canonicalisers import Canonicalisers, canonicalise
from diskprefix.daemon.chat.client_text import with_stand_ins
from diskprefix.daemon.chat.content import note_unread, place_pictures, read_pictures
from diskprefix.daemon.chat.draft import Compress, DraftStep, PromptDraft, run_steps
from diskprefix.daemon.chat.earlier_prompts import heed_records, new_tools
from diskprefix.daemon.chat.encoder import Encoder, encode
from diskprefix.daemon.chat.fill_in import FillIn, fill_in_tags
from diskprefix.daemon.chat.known_parts import KnownParts, OwnedParts
from diskprefix.daemon.chat.late_tools import place_tools
from diskprefix.daemon.chat.marks import mark
from diskprefix.daemon.chat.messages import Conversation, JsonObject, Message, Role, TextPart
from diskprefix.daemon.chat.output.choose_format import OutputFormat, PlainText, choose_format
from diskprefix.daemon.chat.replay import Origin, RecordStore, Replayed
from diskprefix.daemon.chat.splice import splice
from diskprefix.daemon.chat.template import ChatTemplate, place, render
from diskprefix.daemon.chat.template_date import TemplateClock, set_date, written_dates
from diskprefix.daemon.chat.template_input import PART_SEPARATOR, MessageForm, TemplateInput, require_few_arguments
from diskprefix.errors import InvalidRequest
from diskprefix.printable import printable_only
from diskprefix.tokens import as_token_ids, common_prefix_length, raw_boundaries, text_boundaries
from diskprefix.values import NO_ASKER, Asker, Picture, Prompt, SourceText

if TYPE_CHECKING:
    from diskprefix.runtime.files.tokenizer import Tokenizer
    from diskprefix.runtime.pictures.picture_processor import PictureProcessor

_END_TOKENS = 32
"""Enough to see whether the template opened or closed a thought."""
_PREVIEW_CHARS = 100
_SCANNED_CHARS = 10_000
_BEFORE_CONTINUED: tuple[tuple[Role, str], ...] = (("user", "x"), ("assistant", "x"), ("assistant", "y"))
"""A question, and two replies that differ: what follows both is equal from the end of the reply on."""
_COUNTED_TOKENS = 1 << 20
"""The longest prompt whose tokens are counted. Encoding it takes two seconds and 200 MB."""


class PromptRenderer:
    """Renders and tokenises the prompts of one model. Thread-safe.

    Multimodal models have a `processor`. `compress` shortens conversations that have too many tokens. The model ends
    its replies with one of `end_ids`. With `finds_question`, prompts have the end of the user's last message, for one
    or two more renderings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_positions: int,
        positions_limit: str = "the context of this model",
        processor: PictureProcessor | None = None,
        canonicalisers: Canonicalisers = Canonicalisers(),  # noqa: B008 (immutable)
        compress: Compress | None = None,
        end_ids: Collection[int] = (),
        finds_question: bool = True,
        template_variables: Mapping[str, Any] = MappingProxyType({}),
        clock: TemplateClock = TemplateClock(),  # noqa: B008 (immutable)
    ) -> None:
        self._tokenizer = tokenizer
        self._canonicalisers = canonicalisers
        self._compress = compress
        self._finds_question = finds_question
        self._clock = clock
        self._processor = processor
        make = partial(Encoder, tokenizer, vocab_size=vocab_size, processor=processor)
        self._encoder = make(max_positions=max_positions, positions_limit=positions_limit)
        self._make_counting = partial(make, max_positions=_COUNTED_TOKENS, positions_limit="the most that are counted")
        self.known_parts = KnownParts()
        """The encoded texts of earlier prompts."""
        own_end = tokenizer.eos_token_id
        self.end_ids = frozenset(end_ids) | ({own_end} if own_end is not None else set())
        self.vocab_size = vocab_size
        placeholders = () if processor is None or processor.problem else {*processor.placeholders, processor.mark}
        self._template = ChatTemplate(tokenizer, self.end_ids, placeholders, template_variables)
        if self._template.exists:
            self._template.form = MessageForm(parts_only=self._template.loses_plain_text())
        self.output_format: OutputFormat = PlainText()
        """The format of reasoning and tool calls, set by `warm_up`."""

    def for_trial(self) -> PromptRenderer:
        """Returns a copy for made-up conversations. It learns about the template separately."""
        other = copy.copy(self)
        other._template = self._template.for_trial()
        return other

    def today(self) -> date:
        """Returns the local day, whether or not the template writes another one."""
        return self._clock.now().date()

    @property
    def writes_today(self) -> bool:
        """Returns whether the chat template writes the day on which a conversation begins."""
        return self._clock.day is None and self._template.reads_clock(None)

    @property
    def template_source(self) -> str:
        """The chat template for conversations without tools; "" if there is none."""
        return self._template.source_for(None) if self._template.exists else ""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The named special tokens, such as `bos_token`, which the template sees."""
        return self._tokenizer.special_tokens_map

    @cached_property
    def counting(self) -> PromptRenderer:
        """A copy for prompts that are only counted, and may exceed the model's positions."""
        other = copy.copy(self)
        other._encoder = self._make_counting()
        return other

    def warm_up(self) -> None:
        """Compiles the template and fills the tokenizer's caches, so that the first request does not wait for them."""
        template = self._template

        def write(messages: list[JsonObject], tools: list[JsonObject], add_generation_prompt: bool) -> str:
            return template.try_render(TemplateInput(messages, tools, {}), "reply" if add_generation_prompt else "none")

        if template.exists:
            source = template.source_for([])
            chosen = choose_format(source, write, special=template.special, added=template.added)
            self.output_format = chosen.format
            template.form = replace(chosen.form, parts_only=template.form.parts_only)
            template.rules_of(None)
            template.learned(alternation_of, None)
        self._encoder.warm_up()

    def replay(
        self,
        conversation: Conversation,
        replies: RecordStore | None,
        known: OwnedParts | None = None,
        asker: Asker = NO_ASKER,
    ) -> Replayed:
        """Returns the prompt of a conversation of `asker`, with the sampled tokens of `replies`. `known` texts are not
        encoded again. Raises `ContextTooLong`, `InvalidRequest` if the template or the model refuses the conversation,
        and `RecordsUnread`."""
        require_few_arguments(conversation)
        if conversation.before:
            return Replayed(self._continued(conversation, known, asker))
        draft = PromptDraft(conversation=conversation, replies=replies, known=known, asker=asker)
        draft = run_steps(self._steps(), draft)
        origin = None
        if draft.conversation_hash is not None and draft.conversation.ending == "reply":
            tools = new_tools(draft.conversation, draft.known_tools)
            origin = Origin.of(draft.conversation_hash, draft.rendering.text, draft.began, tools)
        return Replayed(draft.prompt, origin, draft.tool_order)

    def _continued(self, conversation: Conversation, known: OwnedParts | None, asker: Asker) -> Prompt:
        """Returns the tokens that the conversation continues, and what the template writes of the messages after a
        reply. Raises the errors of `replay`, and `InvalidRequest` for an unknown token id."""
        before, path = [*conversation.before], "context"
        self._encoder.check_positions(len(before), param=path)
        self._encoder.check_vocabulary(before, param=path)
        # The template writes the end of the reply.
        while before and before[-1] in self.end_ids:
            before.pop()
        question, *replies = (
            Message(role=role, content=(TextPart(text, ""),), path="") for role, text in _BEFORE_CONTINUED
        )
        rests = (replace(conversation, messages=[question, reply, *conversation.messages]) for reply in replies)
        drafts = (PromptDraft(conversation=rest, known=known, asker=asker) for rest in rests)
        made, other = (run_steps(self._steps(), draft).prompt for draft in drafts)
        num_equal = common_prefix_length(made.token_ids[::-1], other.token_ids[::-1])
        begin = len(made.token_ids) - num_equal
        shift = len(before) - begin
        token_ids = np.concatenate([as_token_ids(before), made.token_ids[begin:]])
        self._encoder.check_positions(len(token_ids), param=path)
        markers = {*self._template.markers_of(conversation.first_tools).values()}
        return replace(
            made,
            token_ids=token_ids,
            boundaries=(
                *raw_boundaries(before, markers),
                *(position + shift for position in made.boundaries if position > begin),
            ),
            system_end=0,
            question_end=made.question_end + shift if made.question_end > begin else 0,
            marks=tuple(mark._replace(position=mark.position + shift) for mark in made.marks if mark.position > begin),
            source=None,
        )

    def ahead(
        self, conversation: Conversation, reply: Message, replies: RecordStore | None, known: OwnedParts | None = None
    ) -> Prompt | None:
        """Returns the tokens that begin the next question's prompt, whatever the question is. `reply` is the reply as
        the client sends it back. Returns None if the template accepts no question there."""
        return self._before_question((*conversation.messages, reply), conversation, replies, known)

    def opening(
        self, conversation: Conversation, replies: RecordStore | None, known: OwnedParts | None = None
    ) -> Prompt | None:
        """Returns the prompt of a conversation's first request with the date of today. If the model's states cannot be
        cut, it ends before the last message, which will be another one. Returns None if the template refuses it. Raises
        `RecordsUnread`."""
        *before, last = conversation.messages
        if self._finds_question and last.role == "user":
            return self._before_question(before, conversation, replies, known)
        try:
            return self.replay(conversation, replies, known).prompt
        except InvalidRequest:
            return None

    def _before_question(
        self,
        messages: Sequence[Message],
        conversation: Conversation,
        replies: RecordStore | None,
        known: OwnedParts | None,
    ) -> Prompt | None:
        questions = (Message(role="user", content=(TextPart(text, ""),), path="") for text in "xy")
        try:
            first, second = (
                self.replay(replace(conversation, messages=(*messages, question)), replies, known).prompt
                for question in questions
            )
        except InvalidRequest:
            return None
        end = first.last_safe(common_prefix_length(first.token_ids, second.token_ids))
        return Prompt(first.token_ids[:end], system_end=first.system_end) if end >= max(first.system_end, 1) else None

    def text_of(self, conversation: Conversation) -> str:
        """Returns the text that the template writes, without images. Raises the errors of `replay`."""
        require_few_arguments(conversation)
        compresses = self._compress is not None and not conversation.has_pictures
        steps = self._writing_steps() if compresses else self._rendering_steps()
        draft = PromptDraft(conversation=conversation)
        rewriting: list[DraftStep] = [partial(canonicalise, self._canonicalisers), *self._rewriting_steps()]
        return run_steps([*rewriting, partial(alternate, self._template), *steps], draft).rendering.text

    def _steps(self) -> list[DraftStep]:
        arranging: list[DraftStep] = [
            *self._rewriting_steps(),
            partial(read_pictures, self._processor),
            partial(place_pictures, self._template, self._processor),
            partial(alternate, self._template),
        ]
        return [
            partial(canonicalise, self._canonicalisers),
            partial(heed_records, self._processor, arranging),
            *self._writing_steps(),
            partial(bound, self._template, self._finds_question),
            partial(mark, self._template),
            partial(describe, any(mode != "off" for mode in self._canonicalisers.modes.values())),
        ]

    def _rewriting_steps(self) -> list[DraftStep]:
        return [
            partial(place_tools, self._template),
            partial(note_unread, self._processor),
            partial(place, self._template),
        ]

    def _writing_steps(self) -> list[DraftStep]:
        steps: list[DraftStep] = [
            *self._rendering_steps(),
            partial(splice, self._template, self.output_format),
            partial(encode, self._encoder, self._template),
        ]
        return steps if self._compress is None else [partial(self._compress, steps, self._encoder.count)]

    def _rendering_steps(self) -> list[DraftStep]:
        return [partial(set_date, self._template, self._clock), partial(render, self._template)]

    def fill_in_ends(self, gap: FillIn) -> tuple[str, ...]:
        """Returns the added tokens that end the filling of a gap. Raises `InvalidRequest` like `completion`."""
        return fill_in_tags(self._template.added, gap).ends

    def completion(
        self,
        prompt: str | list[int] | FillIn,
        known: OwnedParts | None = None,
        *,
        special_tokens_in_text: bool = True,
        param: str = "prompt",
        at_most: int | None = None,
    ) -> Prompt:
        """Returns the prompt of a text, of token ids or of a text with a gap, without a chat template.

        `known` texts are not encoded again. A text spells control tokens only with `special_tokens_in_text`, a `FillIn`
        only with its field of this name. `param` is the path in the body. A prompt is truncated to `at_most` tokens, in
        which the tokens that the tokenizer adds remain. Raises `InvalidRequest` for an unknown token id, an empty
        prompt, or a gap that the model was not trained to fill, and `ContextTooLong`.
        """
        template, bos_id, num_added = self._template, self._tokenizer.bos_token_id, (0, 0)
        markers = {*(template.markers_of(None).values() if template.exists else ()), *template.special.values()}
        if isinstance(prompt, list):
            prompt = prompt[:at_most]
            self._encoder.check_positions(len(prompt), param=param)
            self._encoder.check_vocabulary(prompt, param=param)
            token_ids = as_token_ids(prompt)
            preview = self.preview_of_tokens(prompt)
        else:
            text, for_tokens = self._text_of(prompt, special_tokens_in_text)
            token_ids = self._encoder.encode(
                text, for_tokens, adds_special=True, param=param, known=known, at_most=at_most
            ).token_ids
            num_added = len(self._encoder.added[0]), len(self._encoder.added[1])
            preview = _preview_of_text(text)
        boundaries = text_boundaries(token_ids, num_added, markers, bos_id)
        return Prompt(token_ids=token_ids, boundaries=boundaries, text=preview)

    def _text_of(self, prompt: str | FillIn, special_tokens_in_text: bool) -> tuple[str, str | None]:
        """Returns a text, and the text with stand-ins for the tokens in it; None if it may spell tokens."""
        gap = prompt if isinstance(prompt, FillIn) else FillIn(prompt, "", "", (), "", special_tokens_in_text)
        write = fill_in_tags(self._template.added, gap).text_of if gap is prompt else attrgetter("prefix")
        if gap.special_tokens_in_text:
            return write(gap), None
        rules = self._template.text_rules
        gap, stand_ins = with_stand_ins(gap, rules, lambda gap, change: gap.changed(partial(change, "client")))
        written = write(gap)
        return (written, written) if stand_ins is None else stand_ins.read(written)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of any text, however long."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: list[int]) -> str:
        """Returns the text of tokens, special ones included. Raises `InvalidRequest` for an unknown token id."""
        self._encoder.check_vocabulary(token_ids, param="tokens")
        return self._tokenizer.decode(token_ids)

    def preview_of_tokens(self, token_ids: list[int]) -> str:
        """Returns the preview of a prompt of which only its tokens are known, which the model must have."""
        ends = token_ids if len(token_ids) <= 120 else [*token_ids[:60], *token_ids[-60:]]
        return _preview_of_text(self._tokenizer.decode(ends))

    def end_of(self, prompt: Prompt) -> str:
        """Returns the last characters of a prompt, with its special tokens, without images."""
        last = prompt.token_ids[-_END_TOKENS:]
        return self._tokenizer.decode(last[last >= 0])


def describe(keeps_source: bool, draft: PromptDraft) -> PromptDraft:
    """Sets the preview of the prompt and, if `keeps_source`, its text."""
    source = None
    if keeps_source:
        conversation, starts = draft.conversation, draft.offsets[:, 0].copy()
        tools, results, dates = conversation.tool_names, conversation.tool_results, written_dates(draft)
        source = SourceText(draft.rendering.text, starts, tools, results, dates)
    return draft.with_prompt(text=preview_of_chat(draft.rendering.template_input, draft.pictures), source=source)


def preview_of_chat(template_input: TemplateInput, pictures: Sequence[Picture]) -> str:
    """Returns the beginnings of the first message and of the user's newest message, for people."""
    left, messages, stand_ins = iter(pictures), template_input.messages, template_input.stand_ins
    texts = [_shown(message["content"], left) for message in messages]
    newest = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    shown = (texts[0], texts[newest] if newest else "")
    return _preview(*(shown if stand_ins is None else map(stand_ins.text, shown)))


def _shown(content: str | Sequence[JsonObject], pictures: Iterator[Picture]) -> str:
    """Returns a message's text. The size of the next of `pictures` stands for each picture."""
    if isinstance(content, str):
        return content
    shown = (f"[image {picture.size}]" for picture in pictures)
    return PART_SEPARATOR.join(part["text"] if part["type"] == "text" else next(shown) for part in content)


def _preview_of_text(text: str) -> str:
    return _preview(text, text[_PREVIEW_CHARS:][-_PREVIEW_CHARS:])


def _preview(first: str, last: str) -> str:
    parts = [printable_only(text[:_SCANNED_CHARS])[:_PREVIEW_CHARS] for text in (first, last)]
    return " … ".join(part for part in parts if part)

"""From messages or text to a `Prompt`: the chat template is rendered, the text tokenised, the safe boundaries found.

All of it is CPU work that may take long for a long prompt; the server calls it in a thread. The template is rendered
once for the prompt itself, a second time only if a message holds marker text (see `policy.boundary`), once over the
leading system messages alone to see where they end, and once or twice for each mark (see `marks`). What its markers are
is found out once, over made-up conversations.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from jinja2.exceptions import TemplateError

from diskprefix.chat.boundaries import neutralise, system_end, template_boundaries, template_markers
from diskprefix.chat.content import UNSUPPORTED, Media, parts_for_template, read_media
from diskprefix.chat.conversation import Conversation, going_on_otherwise, message_for_template
from diskprefix.chat.marks import find_marks, places_of
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.printable import printable_only, shown
from diskprefix.prompt import Mark, Prompt, raw_boundaries
from diskprefix.server.schemas import ChatRequest, CompletionRequest, JsonObject
from diskprefix.tokens import TokenIds, as_token_ids

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerFast

    from diskprefix.model.media import MediaProcessor

log = logging.getLogger("diskprefix")

_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)
"""What a template can raise over messages that it was not written for."""

_PROBED_CHARS_PER_POSITION = 32
"""A text of more characters is first judged by so many. Real text has about four characters to a token."""

_PREVIEW_HEAD_CHARS = 100
_PREVIEW_SCANNED_CHARS = 10_000
_REASON_CHARS = 200
_NOWHERE = (0, 0)
_PROBE_TEXT = "diskprefix"
_SYSTEM: JsonObject = {"role": "system", "content": _PROBE_TEXT}


class _Markers(NamedTuple):
    """The added tokens that a template parts turns with."""

    texts: frozenset[str]
    ids: frozenset[int]


class _Offsets:
    """Token index → character span, computed for the few tokens that are asked about."""

    def __init__(self, encoding: BatchEncoding) -> None:
        self._encoding = encoding

    def __getitem__(self, index: int) -> tuple[int, int]:
        span = self._encoding.token_to_chars(index)
        return (span.start, span.end) if span is not None else _NOWHERE


class PromptRenderer:
    """Renders and tokenises for one tokenizer and its model's sizes. Safe to call from several threads.

    `media` is the processor of a multimodal model.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        vocab_size: int,
        max_positions: int,
        media: MediaProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._media = media
        self._max_positions = max_positions
        special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._special = special | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()} | self._special
        self._markers: dict[str, _Markers] = {}
        self.vocab_size = vocab_size
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        self._warned_of_tools = False
        self._takes_parts_only = self._loses_plain_text()

    def warm_up(self) -> None:
        """Compiles the template and fills the tokenizer's caches, so that the first request need not."""
        if self._tokenizer.chat_template:
            self._markers_of(None)
        self._tokenizer("warm up", verbose=False)

    def chat(self, body: ChatRequest) -> Prompt:
        """The prompt of a chat request.

        Raises `InvalidRequest` where the template cannot render it or the model does not take it, `ContextTooLong` if
        it exceeds the positions.
        """
        media = read_media(body.messages, self._media)
        if media is not None:
            return self._chat_with_media(body, media)
        conversation = self._conversation(body)
        rendered = self._render(conversation, body.add_generation_prompt)
        markers = self._markers_of(conversation.tools)
        neutral_parts, changed = neutralise(list(conversation), markers.texts)
        neutral = None
        if changed:
            neutral = self._try_render(Conversation(*neutral_parts), body.add_generation_prompt)
        encoding = self._encode(rendered, add_special_tokens=self._adds_bos(rendered), param="messages")
        token_ids = as_token_ids(encoding["input_ids"])
        offsets = _Offsets(encoding)
        boundaries = template_boundaries(token_ids, offsets, markers.ids, rendered, neutral)
        probe = self._try_render(_probe(conversation), body.add_generation_prompt)
        marks: tuple[Mark, ...] = ()
        if places := places_of(body):
            shown_as = conversation, rendered
            if neutral and len(neutral) == len(rendered):
                # So that no text in a message is taken for what the template writes at the end of one.
                shown_as = Conversation(*neutral_parts), neutral
            render = partial(self._try_render, add_generation_prompt=False)
            marks = find_marks(places, *shown_as, offsets, len(token_ids), render)
        return Prompt(
            token_ids=token_ids,
            boundaries=boundaries,
            system_end=system_end(boundaries, offsets, rendered, probe) if probe else 0,
            text=_chat_preview(conversation.messages),
            marks=marks,
        )

    def _chat_with_media(self, body: ChatRequest, media: Media) -> Prompt:
        """Without boundaries: what they are for, the cache, is not used for it."""
        assert self._media is not None, "who takes no media has refused them"
        conversation = self._conversation(body)
        for message, sent in zip(conversation.messages, body.messages, strict=True):
            message["content"] = parts_for_template(sent.content or "")
        rendered = self._render(conversation, body.add_generation_prompt)
        if rendered == self._try_render(_without_media(conversation), body.add_generation_prompt):
            raise InvalidRequest(
                "messages: the chat template leaves images and sounds out; give another with --chat-template",
                param="messages",
                code=UNSUPPORTED,
            )
        # The text alone may be too long: that is found before the work on the images.
        self._encode(rendered, add_special_tokens=False, param="messages")
        prepared = self._media.prepare(rendered, media.images, media.audio)
        self._check_positions(len(prepared.token_ids), "messages")
        return Prompt(token_ids=prepared.token_ids, media=prepared.tensors)

    def _adds_bos(self, rendered: str) -> bool:
        """Processors of multimodal models add a BOS where the template wrote none; tokenizers leave it to the template.

        So text alone begins as text beside an image does.
        """
        bos = self._tokenizer.bos_token
        return self._media is not None and not (bos and rendered.startswith(bos))

    def _loses_plain_text(self) -> bool:
        """Whether the template takes lists of content parts only. Of a plain text it would render nothing."""
        if self._media is None or not self._tokenizer.chat_template:
            return False
        return not self._passes_on(_PROBE_TEXT) and self._passes_on(parts_for_template(_PROBE_TEXT))

    def _passes_on(self, content: str | list[JsonObject]) -> bool:
        """Whether the template, given just this, writes the text in it."""
        try:
            return _PROBE_TEXT in self._apply(Conversation([{"role": "user", "content": content}], None, {}), True)
        except InvalidRequest:
            return False

    def completion(self, body: CompletionRequest) -> Prompt:
        """The prompt of a completion request: text, or token ids.

        Raises `InvalidRequest` for unknown ids, `ContextTooLong` if it exceeds the positions.
        """
        prompt = body.one_prompt
        offsets = None
        if isinstance(prompt, str):
            encoding = self._encode(prompt, add_special_tokens=True, param="prompt")
            token_ids, offsets = as_token_ids(encoding["input_ids"]), _Offsets(encoding)
            text = prompt
        else:
            self._check_positions(len(prompt), param="prompt")
            self._check_vocabulary(prompt)
            token_ids = as_token_ids(prompt)
            ends = prompt if len(prompt) <= 120 else [*prompt[:60], *prompt[-60:]]
            text = str(self._tokenizer.decode(ends))
        return Prompt(token_ids=token_ids, boundaries=self._boundaries_of_text(token_ids, offsets), text=_preview(text))

    def _boundaries_of_text(self, token_ids: TokenIds, offsets: _Offsets | None) -> tuple[int, ...]:
        """Those of the special tokens and the template's markers that the client wrote.

        What the tokenizer adds by itself stands nowhere in the text, and a token that begins every text parts nothing.
        Were it a boundary, it would be the only one of a plain text, and nothing of it would ever be saved.
        """
        marker_ids = self._markers_of(None).ids if self._tokenizer.chat_template else frozenset()
        boundaries = raw_boundaries(token_ids, marker_ids.union(self._special.values()))
        if offsets is not None:
            boundaries = tuple(end for end in boundaries if offsets[end - 1] != _NOWHERE)
        bos = self._tokenizer.bos_token_id
        first = next((i for i, token_id in enumerate(token_ids.tolist()) if token_id != bos), len(token_ids))
        return boundaries if any(end > first for end in boundaries) else ()

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> BatchEncoding:
        """Token ids and offsets of `text`.

        Megabytes of text would keep a core busy for many seconds and take gigabytes of memory only to be refused. So
        the beginning of such a text is encoded first, and the whole only if that leaves a doubt.
        """
        limit = self._max_positions * _PROBED_CHARS_PER_POSITION
        if len(text) > limit:
            begins = self._tokenizer(text[:limit], add_special_tokens=False, verbose=False)["input_ids"]
            # Twice: where the text is cut, the last few tokens are not those of the whole.
            if len(begins) >= 2 * self._max_positions:
                raise self._too_long(f"more than {len(begins) // 2}", param)
        encoding = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        num_tokens = len(encoding["input_ids"])
        if not num_tokens:
            raise InvalidRequest(f"{param}: the prompt has no tokens; there is nothing to continue", param=param)
        self._check_positions(num_tokens, param)
        return encoding

    def _check_positions(self, num_tokens: int, param: str) -> None:
        if num_tokens >= self._max_positions:
            raise self._too_long(str(num_tokens), param)

    def _too_long(self, num_tokens: str, param: str) -> ContextTooLong:
        return ContextTooLong(
            f"{param}: the prompt has {num_tokens} tokens, and this model has {self._max_positions} positions for "
            "prompt and reply together",
            param=param,
        )

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"prompt.{index}: {token_id} is not a token id of this model (0 to {self.vocab_size - 1})",
                    param=f"prompt.{index}",
                )

    def _conversation(self, body: ChatRequest) -> Conversation:
        tools = body.offered_tools
        template = self._template(tools)
        if tools and "tools" not in template:
            self._warn_of_tools()
        variables = body.chat_template_kwargs or {}
        for name in self._reserved & variables.keys():
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param}: is set by the daemon and cannot be overridden", param=param)
        developer_is_known = "developer" in template
        return Conversation([message_for_template(m, developer_is_known) for m in body.messages], tools, variables)

    def _template(self, tools: list[JsonObject] | None) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or start the daemon with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _markers_of(self, tools: list[JsonObject] | None) -> _Markers:
        """The markers of the template that serves conversations with such tools, or with none."""
        template = self._template(tools)
        if template not in self._markers:

            def write(messages: Sequence[JsonObject], *, add_generation_prompt: bool) -> str:
                # An empty list chooses the same template as the real tools do.
                some_tools: list[JsonObject] | None = None if tools is None else []
                for listed in ([_SYSTEM, *messages], list(messages)):
                    rendered = self._try_render(Conversation(listed, some_tools, {}), add_generation_prompt)
                    if rendered:
                        return rendered
                return ""

            texts = template_markers(self._special.keys(), self._added.keys() - self._special.keys(), write)
            self._markers[template] = _Markers(texts, frozenset(self._added[text] for text in texts))
        return self._markers[template]

    def _warn_of_tools(self) -> None:
        if not self._warned_of_tools:
            self._warned_of_tools = True
            log.warning("a request offers tools, but the model's chat template ignores them (said once)")

    def _render(self, conversation: Conversation, add_generation_prompt: bool) -> str:
        """In the form of content that the template takes. Raises what `_apply` does."""
        if self._takes_parts_only:
            conversation = conversation._replace(messages=self._in_parts(conversation.messages))
        return self._apply(conversation, add_generation_prompt)

    def _apply(self, conversation: Conversation, add_generation_prompt: bool) -> str:
        """Raises `InvalidRequest` for what the template refuses."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation.messages,
                    tools=conversation.tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **conversation.variables,
                )
            )
        except _TEMPLATE_FAULTS as error:
            reason = shown(" ".join(str(error).split()), _REASON_CHARS) or type(error).__name__
            raise InvalidRequest(
                f"messages: the chat template refuses them: {reason}", param="messages", code="template_error"
            ) from error

    @staticmethod
    def _in_parts(messages: list[JsonObject]) -> list[JsonObject]:
        return [
            {**message, "content": parts_for_template(message["content"])}
            if isinstance(message["content"], str)
            else message
            for message in messages
        ]

    def _try_render(self, conversation: Conversation, add_generation_prompt: bool) -> str:
        """A rendering that only helps to find boundaries: empty where the template refuses it, so none is trusted."""
        try:
            return self._render(conversation, add_generation_prompt)
        except InvalidRequest as error:
            log.debug("no boundaries from this conversation: %s", error.message)
            return ""


def _without_media(conversation: Conversation) -> Conversation:
    return conversation._replace(
        messages=[
            {**message, "content": [part for part in message["content"] if part["type"] == "text"]}
            for message in conversation.messages
        ]
    )


def _probe(conversation: Conversation) -> Conversation:
    """The same system messages and tools before a user message that begins differently from the real one."""
    leading = conversation.leading_system
    return conversation._replace(messages=going_on_otherwise(leading, conversation.messages[len(leading) :]))


def _chat_preview(messages: list[JsonObject]) -> str:
    """How the conversation begins, and the newest message of the user."""
    newest = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
    return _join_preview(messages[0]["content"], newest["content"] if newest is not messages[0] else "")


def _preview(text: str) -> str:
    head = printable_only(text[:_PREVIEW_SCANNED_CHARS])
    if len(text) <= _PREVIEW_SCANNED_CHARS and len(head) <= 2 * _PREVIEW_HEAD_CHARS:
        return head
    return f"{head[:_PREVIEW_HEAD_CHARS]} … {printable_only(text[-_PREVIEW_SCANNED_CHARS:])[-_PREVIEW_HEAD_CHARS:]}"


def _join_preview(first: str, last: str) -> str:
    parts = [printable_only(text[:_PREVIEW_SCANNED_CHARS])[:_PREVIEW_HEAD_CHARS] for text in (first, last)]
    return " … ".join(part for part in parts if part)

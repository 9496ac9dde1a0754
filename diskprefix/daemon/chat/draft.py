"""A prompt while it is made: each step of a rendering takes a draft and returns it with more fields set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.replay import ConversationHash, RecordStore, SampledTurn, with_turn
from diskprefix.daemon.chat.template_input import TemplateInput
from diskprefix.daemon.chat.tool_order import ToolOrder
from diskprefix.thread_work import begin_step
from diskprefix.tokens import TokenIds, as_token_ids
from diskprefix.values import NO_ASKER, Asker, Picture, Prompt

if TYPE_CHECKING:
    from diskprefix.daemon.chat.known_parts import OwnedParts


class Rendering(Struct, frozen=True, dict=True):
    """The text that the chat template has `written` for an input. It is as long as `text`, with some stand-ins."""

    template_input: TemplateInput
    written: str

    @property
    def text(self) -> str:
        """The text of the prompt."""
        return self._read[0]

    @property
    def for_tokens(self) -> str:
        """The text with stand-ins for characters that must not become tokens."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[str, str]:
        stand_ins = self.template_input.stand_ins
        return (self.written, self.written) if stand_ins is None else stand_ins.read(self.written)


class ReplySpan(NamedTuple):
    """The characters of a replayed reply in the rendered text (`end` is exclusive), and its sampled tokens."""

    begin: int
    end: int
    token_ids: tuple[int, ...]


class PromptDraft(Struct, frozen=True, kw_only=True):
    """A prompt while it is made. Comments name the step that sets the fields. `replies` has the records of earlier
    replies, `known` the encoded texts of earlier prompts; both are None if the request does not use them."""

    conversation: Conversation
    """Set by the caller; `canonicalise`, `place`, `fit` and `set_date` change it."""
    replies: RecordStore | None = None
    known: OwnedParts | None = None
    asker: Asker = NO_ASKER
    """Whose prompt it is, for the results that stay in memory."""

    # canonicalise
    tool_order: ToolOrder | None = None
    """The tenant's order of tools after this prompt; None if it stays as it is."""

    # heed_records
    known_tools: Collection[str] | None = None
    """The digests of the names of the tools of earlier prompts of the conversation; None if no prompt is known."""

    # recall
    remembered: Mapping[int, SampledTurn] = field(default_factory=dict)
    """Recorded replies by the index of their message, ascending."""
    conversation_hash: ConversationHash | None = None

    # set_date
    began: datetime | None = None
    """The moment that the template writes; None if it writes none."""

    # read_pictures
    pictures: Sequence[Picture] = ()
    """The pictures, in the order of the conversation."""

    # render
    rendering: Rendering = field(default_factory=lambda: Rendering(TemplateInput([], None, {}), ""))

    # splice
    spans: tuple[ReplySpan, ...] = ()
    """Parts of the rendered text that sampled tokens replace, ascending."""

    # encode
    offsets: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """As in `Encoding`. A sampled token has the offsets of its whole span."""
    written_ids: TokenIds = field(default_factory=lambda: as_token_ids([]))
    """The token ids that the template wrote: -1 for sampled tokens and for all but the last token of a picture."""

    prompt: Prompt = field(default_factory=lambda: Prompt(token_ids=as_token_ids([])))
    """The result. Each step sets its own fields."""

    @property
    def replayed_conversation(self) -> Conversation:
        """The conversation in the words of the recorded replies."""
        messages = list(self.conversation.messages)
        for index, sampled in self.remembered.items():
            messages[index] = with_turn(messages[index], sampled.turn)
        return replace(self.conversation, messages=messages)

    def with_prompt(self, **fields: Any) -> PromptDraft:
        """Returns the draft with these fields of its prompt set."""
        return replace(self, prompt=replace(self.prompt, **fields))


DraftStep: TypeAlias = Callable[[PromptDraft], PromptDraft]
CountTokens: TypeAlias = Callable[[Sequence[str]], Sequence[int]]
"""Returns the number of tokens of each text."""
Compress: TypeAlias = Callable[[Sequence[DraftStep], CountTokens, PromptDraft], PromptDraft]
"""Runs the steps that encode a conversation. May shorten a conversation with too many tokens."""


def run_steps(steps: Sequence[DraftStep], draft: PromptDraft) -> PromptDraft:
    """Returns the draft after all `steps`. Raises `NobodyWaits` between two of them if the client has left."""

    def run(done: PromptDraft, step: DraftStep) -> PromptDraft:
        function: Any = step.func if isinstance(step, partial) else step
        begin_step(getattr(function, "__name__", "compress"))
        return step(done)

    return reduce(run, steps, draft)

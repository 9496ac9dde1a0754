"""The moment that a chat template writes: now, a fixed day, or the moment at which the conversation began."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time

from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.template import ChatTemplate

CLOCK = "strftime_now"
"""The function with which templates read the time."""


class WrittenMoment(Struct, frozen=True, eq=False):
    """`strftime_now` for one prompt. `texts` are the texts that it returned, in order."""

    moment: datetime
    texts: dict[str, None] = field(default_factory=dict)

    def __call__(self, form: str) -> str:
        text = self.moment.strftime(form)
        self.texts[text] = None
        return text


class TemplateClock(Struct, frozen=True):
    """`now` returns the local time. With a `day`, templates write the midnight at its beginning instead."""

    day: date | None = None
    now: Callable[[], datetime] = datetime.now

    def moment(self) -> datetime:
        return self.now().replace(microsecond=0) if self.day is None else datetime.combine(self.day, time())


def set_date(template: ChatTemplate, clock: TemplateClock, draft: PromptDraft) -> PromptDraft:
    """Chooses the moment that the template writes, if it reads the clock: that of the first recorded reply, so that a
    conversation goes on with the day that it began with; for a new conversation that of `clock`. A client's own
    variable comes first."""
    conversation = draft.conversation
    if CLOCK in conversation.template_variables or not template.reads_clock(conversation.tools):
        return draft
    replies = (sampled for _, sampled in sorted(draft.remembered.items()))
    moment = next((sampled.began for sampled in replies if sampled.began is not None), None) or clock.moment()
    variables = {CLOCK: WrittenMoment(moment), **conversation.template_variables}
    return replace(draft, conversation=replace(conversation, template_variables=variables), began=moment)


def written_dates(draft: PromptDraft) -> tuple[str, ...]:
    """Returns the texts that the template's clock wrote."""
    written = draft.conversation.template_variables.get(CLOCK)
    return tuple(written.texts) if isinstance(written, WrittenMoment) else ()

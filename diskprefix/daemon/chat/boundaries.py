"""Finds the positions at which a prompt may be cut safely: directly after a marker that the chat template wrote.

`README.md` describes markers. A marker that the text of a message spells has stand-ins, so it is no boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.template import ChatTemplate
from diskprefix.daemon.chat.template_input import TemplateInput, common_chars, probe_of, question_probes_of
from diskprefix.tokens import TokenIds, raw_boundaries

Offsets: TypeAlias = Sequence[tuple[int, int]] | npt.NDArray[np.int32]
"""Token index → (start, end) in characters of the rendered text; `end` is exclusive. (0, 0): a token without text."""


def bound(template: ChatTemplate, finds_question: bool, draft: PromptDraft) -> PromptDraft:
    """Finds the boundaries, the end of the system part and, with `finds_question`, the end of the user's last
    message."""
    template_input, written = draft.rendering.template_input, draft.rendering.written
    markers = template.markers_of(template_input.tools)
    boundaries = template_boundaries(draft.written_ids, draft.offsets, markers.values(), draft.rendering.text, written)

    def last_end(probes: Sequence[TemplateInput]) -> int:
        rendered = (template.try_render(probe, "reply") for probe in probes)
        ends = (last_agreed(boundaries, draft.offsets, written, probe) if probe else 0 for probe in rendered)
        return min(ends, default=0)

    question_end = last_end(question_probes_of(template_input)) if finds_question else 0
    return draft.with_prompt(
        boundaries=boundaries, system_end=last_end([probe_of(template_input)]), question_end=question_end
    )


def template_boundaries(
    token_ids: TokenIds | Sequence[int], offsets: Offsets, marker_ids: Collection[int], text: str, written: str
) -> tuple[int, ...]:
    """Returns the positions after the markers that the chat template wrote, ascending.

    `token_ids` and `offsets` belong to `text`; `written` is `text` with stand-ins. Tokens without text (offsets
    (0, 0)), which the tokenizer adds, count as the template's.
    """

    def is_written(position: int) -> bool:
        start, end = offsets[position - 1]
        return written[start:end] == text[start:end]

    return tuple(filter(is_written, raw_boundaries(token_ids, marker_ids)))


def last_agreed(boundaries: Sequence[int], offsets: Offsets, rendered: str, probe_rendered: str) -> int:
    """Returns the last of `boundaries` before the first difference from a probe's rendering; 0 if there is none.

    `boundaries` and `offsets` belong to `rendered`. The text up to the first difference does not depend on later
    messages. If the template writes the system message inside the first user turn, a probe of `probe_of` differs at the
    start of this turn.
    """
    agreed_chars = common_chars(rendered, probe_rendered)
    return max(takewhile(lambda end: offsets[end - 1][1] <= agreed_chars, boundaries), default=0)

"""Asks the policy with its rules as keywords, and earlier prompts as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diskprefix.cache.policy.seen import Earlier, SeenPrompt, Sighting
from diskprefix.cache.policy.select import Rules
from diskprefix.cache.policy.select import select as select_by
from diskprefix.nouns import Prompt, Scope, Selection
from diskprefix.tokens import TokenIds, common_prefix_length


def earlier(prompt: Prompt, token_ids: TokenIds) -> Earlier:
    return Earlier(SeenPrompt((), token_ids.tobytes()), common_prefix_length(prompt.token_ids, token_ids))


def select(
    scope: Scope,
    prompt: Prompt,
    recent: Sequence[TokenIds],
    *,
    restored: int = 0,
    sighting: Sighting = Sighting(),  # noqa: B008 (immutable)
    older: TokenIds | None = None,
    **rules: Any,
) -> Selection:
    window = recent[: scope.value] if scope.kind == "auto" else recent
    seen = replace(
        sighting,
        recent=tuple(earlier(prompt, token_ids) for token_ids in window),
        older=None if older is None else earlier(prompt, older),
    )
    return select_by(scope, prompt, Rules(**rules), seen, restored=restored)

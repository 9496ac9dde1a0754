"""Asks the policy with its rules as keywords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diskprefix.cache.policy.select import Rules
from diskprefix.cache.policy.select import select as select_by
from diskprefix.cache.policy.sightings import Sighting
from diskprefix.nouns import Prompt, Scope, Selection
from diskprefix.tokens import TokenIds


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
    return select_by(scope, prompt, recent, Rules(**rules), restored=restored, sighting=sighting, older=older)

"""The tokens that end a reply or never come in one, by a model's files."""

from __future__ import annotations

from msgspec import Struct


class ReplyTokens(Struct, frozen=True):
    """The tokens that end a reply, and those that never come. Tokens outside the vocabulary mean nothing."""

    stops: list[int]
    suppressed: list[int]

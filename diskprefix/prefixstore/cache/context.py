"""The prompt, the tenant and the cache of one request, which both restoring and saving need."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.choosing import ttl_at
from diskprefix.prefixstore.cache.cost_model import Use
from diskprefix.prefixstore.cache.namespaces import Beginning
from diskprefix.prefixstore.kv.layout import is_out_of_memory
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.prefixstore.store.schema import EntryKind, EntryRecord
from diskprefix.tokens import PromptDigest
from diskprefix.values import CacheOptions, Prompt

log = logging.getLogger("diskprefix")


class PromptOrigin(Struct, frozen=True):
    """The origin of a prompt: the `kind` of its entry, and the prompt that it was made of, None for itself."""

    kind: EntryKind = "saved"
    prompt: PromptDigest | None = None


SENT = PromptOrigin()
"""The origin of a prompt that somebody sent."""


@dataclass(eq=False)
class RequestContext:
    """A prompt with its options, what it `began` with, and the cache. `is_prefix_only`: the prompt ends at a grid point
    and is only a beginning, so its end is not kept. `of_any_build`: the stored state of every build is restored, to be
    compared."""

    cache: PrefixCache
    began: Beginning
    prompt: Prompt
    options: CacheOptions
    is_prefix_only: bool = False
    origin: PromptOrigin = SENT
    of_any_build: bool = False

    def __post_init__(self) -> None:
        # What waits to be written is of this build.
        self.tiers = self.cache.tiered.tiers[-1:] if self.of_any_build else self.cache.tiers
        self.namespace, self.epoch = self.began
        """The tenant's namespace, and its epoch in which the request began."""
        self._let_through: dict[Use, bool] = {}
        """The cost model's answers for the uses that do not pay."""

    @cached_property
    def came_from(self) -> PromptDigest:
        """The prompt that the stored state comes from."""
        return self.origin.prompt or PromptDigest.of(self.epoch.secret, self.prompt.token_ids)

    def entry(self, reason: str = "", num_tokens: int = 0) -> EntryRecord:
        """Returns the prompt's entry if its first `num_tokens` tokens are all that is kept of it, else, without that
        number, the entry of a part. What nobody has sent has its own kind from the beginning."""
        is_part = not num_tokens and self.origin.kind == "saved"
        return EntryRecord(
            root=self.namespace.root,
            num_tokens=num_tokens,
            scope=str(self.options.scope),
            preview=self.prompt.text,
            created_at=time.time(),
            reason=reason,
            kind="partial" if is_part else self.origin.kind,
            came_from=self.came_from,
            ttl_s=recorded_ttl(self.options.ttl_s),
            share=self.options.share,
        )

    @property
    def bypass(self) -> Literal["unsupported", "off", "upgraded"] | None:
        """The reason why the request does without the cache."""
        if self.cache.layout.unsupported:
            return "unsupported"
        if not self.cache.bits.is_current(self.namespace.record):
            return "upgraded"
        return "off" if self.options.scope.kind == "off" else None

    def allows(self, use: Use, *, pays: bool) -> bool:
        """Returns True if the use pays, or if the cost model lets it through to measure it. The model is asked once per
        request."""
        if not pays and use not in self._let_through:
            self._let_through[use] = self.cache.cost_model.lets_through(use)
        return pays or self._let_through[use]

    @contextmanager
    def guarded(self, consequence: str) -> Iterator[None]:
        """Logs and counts errors of the cache in the block, and goes on: the request does without the cache. No other
        place does so."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CacheError) and not is_out_of_memory(error):
                raise
            self.cache.count("errors")
            log.warning("[disk-cache] going on without the cache, %s: %s", consequence, error or type(error).__name__)

    def ttl_at(self, position: int) -> float | None:
        """Returns the time to live of a node that ends at a position; see `choosing.ttl_at`."""
        return ttl_at(position, self.prompt.marks, self.options.ttl_s)

    def notes(self, ttl_s: float | None = None) -> TenantNotes:
        """Returns the tenant's notes; see `PrefixCache.notes_of`."""
        notes = self.cache.notes_of(self.namespace.root, self.namespace.record, ttl_s, self.epoch)
        return replace(notes, share=self.options.share)

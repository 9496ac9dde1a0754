"""A draft model: a small model with the vocabulary of the served one, which guesses its next tokens.

It has its own KV memory, and its own prefix cache in the same store. A reply is not guessed if there is no memory for
it, after an error, or near the last position of the draft model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.running_request import Reply
from diskprefix.errors import ContextTooLong
from diskprefix.kv.page_cache import PageCache
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.exact import runner
from diskprefix.model.load.loader import LoadedModel
from diskprefix.printable import first_line
from diskprefix.tokens import TokenIds, as_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")


class LoadedDraft(NamedTuple):
    """A loaded draft model, and its cache in the store of the served model."""

    loaded: LoadedModel
    cache: PrefixCache


@dataclass(eq=False)
class DraftSequence:
    """The draft model's state of one reply. `cached` is the draft model's request to its cache, of a first reply."""

    state: KVSequence
    cached: CachedRequest | None = None
    fetch: Future[None] | None = None
    """The fetch of stored state. None once its result was used."""
    prefill_s: float = 0.0
    num_known: int = 0
    """The known tokens of the reply when it was guessed last."""
    drafted: list[int] = field(default_factory=list)
    """The guesses behind them. The last one is not computed."""


class DraftModel:
    """A draft model, its memory and its cache. For the engine's thread."""

    def __init__(self, model: PreTrainedModel, cache: PrefixCache, pages: PageCache, max_positions: int) -> None:
        self.cache, self.pages = cache, pages
        self.max_positions = max_positions
        self.sequences: dict[Reply, DraftSequence] = {}
        """The replies that the model guesses."""
        self._model = model
        self._packs = cache.layout.packs
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="draft-fetch")
        self._abandoned: list[DraftSequence] = []
        """Sequences of replies that ended before their fetch."""

    def close(self) -> None:
        """Ends the thread and the cache, but not the store."""
        self._fetcher.shutdown()
        self._release_abandoned()
        self.cache.close(0)

    def ready_sequence(self, reply: Reply) -> DraftSequence | None:
        """Returns the sequence of a reply, None while its state is fetched, and if there is no memory for it."""
        self._release_abandoned()
        sequence = self.sequences.get(reply) or self._begin(reply)
        if sequence is None or (sequence.fetch is not None and not sequence.fetch.done()):
            return None
        if sequence.fetch is not None:
            fetch, sequence.fetch = sequence.fetch, None
            fetch.result()
            assert sequence.cached is not None
            sequence.cached.choose(sequence.state)
            self._count_ready(sequence)
            _publish_if_complete(reply, sequence)
        return sequence

    def take_back_guesses(self, reply: Reply) -> None:
        """Forgets what was computed for guesses that were wrong."""
        sequence = self.sequences[reply]
        sampled = reply.token_ids[sequence.num_known - reply.prompt_tokens :]
        num_right = next(
            (n for n, pair in enumerate(zip(sequence.drafted, sampled, strict=False)) if pair[0] != pair[1]),
            min(len(sequence.drafted), len(sampled)),
        )
        num_valid = sequence.num_known + num_right
        if sequence.drafted and num_valid < sequence.state.num_tokens:
            sequence.state.take_back(num_valid)
        sequence.drafted = []

    def has_room(self, reply: Reply, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens of a reply. Returns False if there is none."""
        sequence = self.sequences[reply]
        return num_tokens <= self.max_positions and sequence.state.has_room(num_tokens)

    def compute(self, step: Sequence[tuple[Reply, torch.Tensor]]) -> torch.Tensor:
        """Computes more tokens, int64 [1, n], of some replies. Returns the next-token logits, [replies, vocab], without
        waiting for the device."""
        rows = [runner.Rows(self.sequences[reply].state, ids) for reply, ids in step]
        groups = [rows] if self._packs else [[one] for one in rows]
        return torch.cat([one for group in groups for one in runner.run(self._model, group)])

    def record_prefill(self, reply: Reply, seconds: float) -> None:
        """Records that more known tokens were computed, and has complete blocks saved."""
        sequence = self.sequences[reply]
        self._count_ready(sequence)
        if sequence.cached is not None and not sequence.cached.is_published:
            sequence.prefill_s += seconds
            sequence.cached.after_step(sequence.state)
            _publish_if_complete(reply, sequence)

    def release(self, reply: Reply, *, keep: bool) -> None:
        """Ends the sequence of a reply, if it has one. `keep`: the next turn may begin there. Raises `DeviceLost`."""
        if (sequence := self.sequences.get(reply)) is None:
            return
        if sequence.fetch is not None:
            self._abandoned.append(self.sequences.pop(reply))
            return
        try:
            self.take_back_guesses(reply)
            self._keep(reply, sequence, keep=keep)
        except Exception as error:  # noqa: BLE001 (as in `give_up`)
            raise_if_lost(error)
            log.warning(
                "[engine] %s: the draft model's state is not kept: %s", reply.running.request.id, first_line(error)
            )
            keep = False
        del self.sequences[reply]
        options, state = reply.running.request.cache, sequence.state
        state.token_ids = _computed_ids(reply, sequence)
        state.num_ready = state.num_exact = len(state.token_ids)
        state.expires_at = time.monotonic() + self.cache.lasts_s(options.ttl_s)
        self.pages.end(state, keep=keep, options=options)

    def _count_ready(self, sequence: DraftSequence) -> None:
        sequence.state.num_ready = sequence.state.num_tokens
        self.pages.name_blocks(sequence.state)

    def _keep(self, reply: Reply, sequence: DraftSequence, *, keep: bool) -> None:
        """Ends the request to the cache, which may save what was computed."""
        if sequence.cached is None:
            return
        try:
            if keep and sequence.cached.is_published and reply.is_finished:
                sequence.cached.publish_reply(sequence.state, _computed_ids(reply, sequence))
            elif keep and not sequence.cached.is_published:
                sequence.cached.leave(sequence.state, _computed_ids(reply, sequence))
        finally:
            sequence.cached.close()

    def give_up(self, reply: Reply, error: Exception) -> None:
        """Stops guessing a reply. A draft model that fails fails no request. Raises `DeviceLost`."""
        raise_if_lost(error)
        log.warning("[engine] %s goes on without the draft model: %s", reply.running.request.id, first_line(error))
        if reply.guesser is not None:
            reply.guesser.draft_rate = None
        if (sequence := self.sequences.get(reply)) is not None:
            sequence.drafted = []
            self.pages.forget(sequence.state)
            sequence.state.truncate(0)
            self.release(reply, keep=False)

    def _begin(self, reply: Reply) -> DraftSequence | None:
        prompt, options = reply.running.request.prompt, reply.running.request.cache
        if reply.num_known >= self.max_positions:
            return None
        owner = None if options.scope.kind == "off" else self.cache.owner(options.tenant)
        expires_at = time.monotonic() + self.cache.lasts_s(options.ttl_s)
        try:
            state = self.pages.begin(owner, prompt.token_ids, expires_at=expires_at)
        except ContextTooLong:
            return None
        if not isinstance(state, KVSequence):
            return None
        if not options.save:
            state.owner = None
        sequence = DraftSequence(state)
        if reply.index == 0:
            have, state.num_ready = state.num_ready, 0
            try:
                sequence.cached = self.cache.begin(prompt, options, goes_on=True)
                sequence.fetch = self._fetcher.submit(_fetch, sequence.cached, state, have)
            except BaseException:
                self.pages.end(state, keep=False)
                raise
        else:
            state.truncate(state.num_ready)
        self.sequences[reply] = sequence
        return sequence

    def _release_abandoned(self) -> None:
        for sequence in [one for one in self._abandoned if one.fetch is not None and one.fetch.done()]:
            self._abandoned.remove(sequence)
            if sequence.cached is not None:
                sequence.cached.close()
            self.pages.end(sequence.state, keep=False)


def _computed_ids(reply: Reply, sequence: DraftSequence) -> TokenIds:
    """Returns the tokens whose state the draft model has."""
    known = np.concatenate([reply.running.request.prompt.token_ids, as_token_ids(reply.token_ids)])
    return known[: sequence.state.num_tokens]


def _fetch(cached: CachedRequest, state: KVSequence, have: int) -> None:
    with torch.inference_mode():
        cached.fetch(state, have=have)


def _publish_if_complete(reply: Reply, sequence: DraftSequence) -> None:
    """Has the prompt saved once all of it is computed."""
    if sequence.cached is not None and sequence.state.num_tokens == reply.prompt_tokens:
        sequence.cached.publish(sequence.state, None, sequence.prefill_s)

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
from diskprefix.kv.arena import KVArena
from diskprefix.kv.pool import KVAllocation, KVPool
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

    allocation: KVAllocation
    cached: CachedRequest | None = None
    fetch: Future[None] | None = None
    """The fetch of stored state. None once its result was used."""
    prefill_s: float = 0.0
    num_known: int = 0
    """The known tokens of the reply when it was guessed last."""
    drafted: list[int] = field(default_factory=list)
    """The guesses behind them. The last one is not computed."""

    @property
    def arena(self) -> KVArena:
        return self.allocation.arena


class DraftModel:
    """A draft model, its memory and its cache. For the engine's thread."""

    def __init__(self, model: PreTrainedModel, cache: PrefixCache, pool: KVPool, max_positions: int) -> None:
        self.cache, self.pool = cache, pool
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
            sequence.cached.choose(sequence.arena)
            sequence.allocation.num_computed = sequence.cached.restored.num_tokens
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
        if sequence.drafted and num_valid < sequence.arena.num_tokens:
            sequence.arena.take_back(num_valid)
        sequence.drafted = []

    def has_room(self, reply: Reply, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens of a reply. Returns False if there is none."""
        sequence = self.sequences[reply]
        if num_tokens > self.max_positions or not self.pool.grow(sequence.allocation, num_tokens):
            return False
        # At once: a window that has moved on cannot be taken back.
        sequence.arena.make_room(num_tokens)
        return True

    def compute(self, step: Sequence[tuple[Reply, torch.Tensor]]) -> torch.Tensor:
        """Computes more tokens, int64 [1, n], of some replies. Returns the next-token logits, [replies, vocab], without
        waiting for the device."""
        rows = [runner.Rows(self.sequences[reply].arena, ids) for reply, ids in step]
        groups = [rows] if self._packs else [[one] for one in rows]
        return torch.cat([one for group in groups for one in runner.run(self._model, group)])

    def record_prefill(self, reply: Reply, seconds: float) -> None:
        """Records that more known tokens were computed, and has complete blocks saved."""
        sequence = self.sequences[reply]
        sequence.allocation.num_computed = sequence.arena.num_tokens
        if sequence.cached is not None and not sequence.cached.is_published:
            sequence.prefill_s += seconds
            sequence.cached.after_step(sequence.arena)
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
        allocation, token_ids = sequence.allocation, _computed_ids(reply, sequence)
        options = reply.running.request.cache
        allocation.token_ids, allocation.num_computed, allocation.num_exact = token_ids, len(token_ids), len(token_ids)
        allocation.expires_at = time.monotonic() + self.cache.lasts_s(options.ttl_s)
        allocation.options = options
        self.pool.release(allocation, keep=keep and options.save and options.scope.kind != "off")

    def _keep(self, reply: Reply, sequence: DraftSequence, *, keep: bool) -> None:
        """Ends the request to the cache, which may save what was computed."""
        if sequence.cached is None:
            return
        try:
            if keep and sequence.cached.is_published and reply.is_finished:
                sequence.cached.publish_reply(sequence.arena, _computed_ids(reply, sequence))
            elif keep and not sequence.cached.is_published:
                sequence.cached.leave(sequence.arena)
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
            sequence.arena.truncate(0)
            self.release(reply, keep=False)

    def _begin(self, reply: Reply) -> DraftSequence | None:
        prompt, options = reply.running.request.prompt, reply.running.request.cache
        if reply.num_known >= self.max_positions:
            return None
        is_off = options.scope.kind == "off"
        owner = reply.running if is_off else self.cache.owner(options.tenant)
        found = self.pool.match_prefix(owner, prompt.token_ids)
        if found is not None and found.is_worth_waiting_for:
            return None
        allocation = self.pool.extend(found, reply.num_known) if found else self.pool.allocate(reply.num_known)
        if allocation is None:
            return None
        allocation.owner, allocation.token_ids, allocation.num_exact = owner, prompt.token_ids, len(prompt.token_ids)
        sequence = DraftSequence(allocation)
        if reply.index == 0:
            sequence.cached = self.cache.begin(prompt, options, goes_on=True)
            have, allocation.num_computed = allocation.num_computed, 0
            sequence.fetch = self._fetcher.submit(_fetch, sequence.cached, allocation.arena, have)
        self.sequences[reply] = sequence
        return sequence

    def _release_abandoned(self) -> None:
        for sequence in [one for one in self._abandoned if one.fetch is not None and one.fetch.done()]:
            self._abandoned.remove(sequence)
            if sequence.cached is not None:
                sequence.cached.close()
            self.pool.release(sequence.allocation, keep=False)


def _computed_ids(reply: Reply, sequence: DraftSequence) -> TokenIds:
    """Returns the tokens whose state the draft model has."""
    known = np.concatenate([reply.running.request.prompt.token_ids, as_token_ids(reply.token_ids)])
    return known[: sequence.arena.num_tokens]


def _fetch(cached: CachedRequest, arena: KVArena, have: int) -> None:
    with torch.inference_mode():
        cached.fetch(arena, have=have)


def _publish_if_complete(reply: Reply, sequence: DraftSequence) -> None:
    """Has the prompt saved once all of it is computed."""
    if sequence.cached is not None and sequence.arena.num_tokens == reply.prompt_tokens:
        sequence.cached.publish(sequence.arena, None, sequence.prefill_s)

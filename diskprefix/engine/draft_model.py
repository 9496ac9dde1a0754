"""A draft model: a small model with the vocabulary of the served one, which guesses its next tokens.

It has its own KV memory, and its own prefix cache in the same store. A reply is not guessed if there is no memory for
it, after an error, or near the last position of the draft model. What it lacks of a conversation when a reply ends is
computed while nothing else runs, so that it guesses the next reply from its first token on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.device import raise_if_lost, synchronize
from diskprefix.engine.fetches import RunningFetch
from diskprefix.engine.running_request import Reply
from diskprefix.errors import ContextTooLong, StoreUnavailable
from diskprefix.kv.page_cache import PageCache
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.exact import runner
from diskprefix.model.load.loader import LoadedModel
from diskprefix.printable import first_line
from diskprefix.store.store_identity import Epoch
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from diskprefix.values import CacheOptions, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")

_MOST_LACKING = 8
"""The conversations that are remembered to be computed when nothing else runs."""
LEAST_LACKING = 32
"""The next turn computes fewer tokens at once."""
_AHEAD_ROWS = 64
"""A request that comes waits for a step of so many rows. Larger ones are hardly faster."""


class LoadedDraft(NamedTuple):
    """A loaded draft model, and its cache in the store of the served model."""

    loaded: LoadedModel
    cache: PrefixCache


@dataclass(frozen=True, eq=False)
class LackingConversation:
    """A conversation that the draft model lacks a part of: `token_ids` of a prompt and the reply to it. The request
    began in `epoch`. `expires_at` is on the clock of `time.monotonic`."""

    prompt: Prompt
    options: CacheOptions
    epoch: Epoch
    token_ids: TokenIds
    expires_at: float


@dataclass(eq=False)
class DraftSequence:
    """The draft model's state of a prompt and a reply. `cached` is the draft model's request to its cache, of a first
    reply."""

    prompt: Prompt
    options: CacheOptions
    state: KVSequence
    cached: CachedRequest | None = None
    fetch: RunningFetch | None = None
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
        self.begin_read: Callable[[RunningFetch], None]
        """Begins a fetch. Set by the engine's loop."""
        self._left: set[DraftSequence] = set()
        """Sequences that ended before their fetch."""
        self._lacking: deque[LackingConversation] = deque(maxlen=_MOST_LACKING)
        """The latest last."""
        self._ahead: tuple[LackingConversation, DraftSequence] | None = None
        """What is computed while nothing else runs."""

    def ready_sequence(self, reply: Reply) -> DraftSequence | None:
        """Returns the sequence of a reply, None while its state is fetched, and if there is no memory for it."""
        sequence = self.sequences.get(reply)
        if sequence is None:
            request = reply.running.request
            if reply.num_known >= self.max_positions or request.prompt.pictures:
                return None
            # It may be the same conversation.
            self.stop_ahead()
            epoch = reply.running.cached.epoch
            sequence = self._start_sequence(request.prompt, request.cache, epoch, is_first=reply.index == 0)
            if sequence is None:
                return None
            self.sequences[reply] = sequence
        return sequence if self._is_fetched(sequence) else None

    def _is_fetched(self, sequence: DraftSequence) -> bool:
        """Returns whether the stored state is there, and takes it over. Raises what the fetch raised."""
        if (one := sequence.fetch) is None:
            return True
        if not one.is_over:
            return False
        sequence.fetch = None
        assert sequence.cached is not None
        sequence.cached.take(one.fetch, gave_up=one.is_given_up)
        if one.error is not None or (one.is_given_up and one.has_begun_to_load):
            raise one.error or StoreUnavailable("the disk did not answer in time")
        sequence.cached.choose(sequence.state)
        self._count_ready(sequence)
        _publish_if_complete(sequence)
        return True

    def _end_fetch(self, sequence: DraftSequence, one: RunningFetch) -> None:
        """Ends a sequence that was left, once no thread writes to it any more."""
        if one.is_late:
            one.close()
        if one.is_over and sequence in self._left:
            self._left.remove(sequence)
            one.close()
            if sequence.cached is not None:
                sequence.cached.close()
            self.pages.end(sequence.state, keep=False)

    def take_back_guesses(self, reply: Reply) -> None:
        """Forgets what was computed for guesses that were wrong."""
        sequence = self.sequences.get(reply)
        if sequence is None or not sequence.drafted:
            return
        sampled = reply.token_ids[sequence.num_known - reply.prompt_tokens :]
        num_right = common_prefix_length(as_token_ids(sequence.drafted), as_token_ids(sampled))
        # The last known token is computed again, if it was a guess that no row was computed for: its logits are needed.
        num_valid = min(sequence.num_known + num_right, reply.num_known - 1)
        if num_valid < sequence.state.num_tokens:
            sequence.state.take_back(num_valid)
        sequence.drafted = []

    def make_room(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens. Returns False if there is none."""
        return num_tokens <= self.max_positions and sequence.state.make_room(num_tokens)

    def compute(self, step: Sequence[tuple[DraftSequence, torch.Tensor]]) -> torch.Tensor:
        """Computes more tokens, int64 [1, n], of some sequences. Returns the next-token logits, [sequences, vocab],
        without waiting for the device."""
        rows = [runner.Rows(sequence.state, ids) for sequence, ids in step]
        groups = [rows] if self.cache.layout.packs else [[one] for one in rows]
        return torch.cat([one for group in groups for one in runner.run(self._model, group)])

    def record_prefill(self, sequence: DraftSequence, seconds: float) -> None:
        """Records that more known tokens were computed, and has complete blocks saved."""
        self._count_ready(sequence)
        if sequence.cached is not None and not sequence.cached.is_published:
            sequence.prefill_s += seconds
            sequence.cached.after_step(sequence.state)
            _publish_if_complete(sequence)

    def release(self, reply: Reply, *, keep: bool) -> None:
        """Ends the sequence of a reply, if it has one. `keep`: the next turn may begin there, and what is lacking is
        computed when nothing else runs. Raises `DeviceLost`."""
        request, sequence = reply.running.request, self.sequences.get(reply)
        token_ids = np.concatenate([request.prompt.token_ids, as_token_ids(reply.token_ids)])
        if keep and reply.index == 0 and reply.guesser.rates:
            num_computed = 0 if sequence is None or sequence.fetch is not None else sequence.state.num_tokens
            epoch, expires_at = reply.running.cached.epoch, time.monotonic() + self.cache.lasts_s(request.cache.ttl_s)
            self._note_lacking(
                LackingConversation(request.prompt, request.cache, epoch, token_ids, expires_at), num_computed
            )
        if sequence is None:
            return
        try:
            self.take_back_guesses(reply)
        except Exception as error:  # noqa: BLE001 (a draft model that fails fails no request)
            _log_lost(request.id, error)
            keep = False
        del self.sequences[reply]
        self._end(sequence, token_ids, keep=keep, is_finished=reply.is_finished, name=request.id)

    def _note_lacking(self, one: LackingConversation, num_computed: int) -> None:
        """Notes what to compute when nothing else runs. Earlier turns of the same conversation are forgotten."""
        for other in list(self._lacking):
            prompt = other.prompt.token_ids
            is_same = (other.options.tenant, other.epoch) == (one.options.tenant, one.epoch)
            if is_same and np.array_equal(prompt, one.token_ids[: len(prompt)]):
                self._lacking.remove(other)
        is_kept = one.options.save and one.options.scope.kind != "off" and not one.prompt.pictures
        if is_kept and num_computed + LEAST_LACKING <= len(one.token_ids) < self.max_positions:
            self._lacking.append(one)

    def work_ahead(self) -> int:
        """Computes a part of what the latest conversation lacks. Returns its rows, 0 if there is nothing to do."""
        if self._ahead is None and not self._lacking:
            return 0
        try:
            return self._worked_ahead()
        except Exception as error:  # noqa: BLE001 (a draft model that fails fails no request)
            _log_lost("a conversation", error)
            self._lacking.clear()
            ahead, self._ahead = self._ahead, None
            if ahead is not None:
                self._drop(ahead[1])
            return 0

    def _worked_ahead(self) -> int:
        if self._ahead is None:
            # One of those may be of the same conversation.
            if self._left:
                return 0
            one = self._lacking[-1]
            sequence = self._start_sequence(one.prompt, one.options, one.epoch, is_first=True)
            if sequence is not None:
                self._ahead = one, sequence
            self._lacking.pop()
            if self._ahead is None:
                return 1
        one, sequence = self._ahead
        if not self._is_fetched(sequence):
            return 0
        start, prompt_tokens = sequence.state.num_tokens, len(one.prompt.token_ids)
        end = min(start + _AHEAD_ROWS, prompt_tokens if start < prompt_tokens else len(one.token_ids))
        if end > start and self.make_room(sequence, end):
            started = time.perf_counter()
            logits = self.compute([(sequence, torch.from_numpy(one.token_ids[start:end]).long()[None])])
            synchronize(logits.device)
            self.record_prefill(sequence, time.perf_counter() - started)
            if end < len(one.token_ids):
                return end - start
        self._ahead = None
        self._end(sequence, one.token_ids, keep=True, is_finished=True, name="a conversation")
        return max(1, end - start)

    def stop_ahead(self) -> None:
        """Ends what is computed ahead, because a request has come. It goes on later."""
        if self._ahead is not None:
            (one, sequence), self._ahead = self._ahead, None
            self._end(sequence, one.token_ids, keep=True, is_finished=False, name="a conversation")
            self._lacking.append(one)

    def drop_gone(self) -> None:
        """Forgets what is lacking of conversations that were purged or have expired."""
        for one in [one for one in self._lacking if self._is_gone(one)]:
            self._lacking.remove(one)
        if self._ahead is not None and self._is_gone(self._ahead[0]):
            (_, sequence), self._ahead = self._ahead, None
            self._drop(sequence)

    def _is_gone(self, one: LackingConversation) -> bool:
        return one.epoch.purged_at != self.cache.namespaces.purged_at or one.expires_at <= time.monotonic()

    def _end(self, sequence: DraftSequence, token_ids: TokenIds, *, keep: bool, is_finished: bool, name: str) -> None:
        """Ends a sequence, which has the first ones of these tokens: after its fetch."""
        if sequence.fetch is not None:
            self._left.add(sequence)
            self._end_fetch(sequence, sequence.fetch)
            return
        token_ids, state, options = token_ids[: sequence.state.num_tokens], sequence.state, sequence.options
        try:
            self._save(sequence, token_ids, keep=keep, is_finished=is_finished)
        except Exception as error:  # noqa: BLE001 (a draft model that fails fails no request)
            _log_lost(name, error)
            keep = False
        expires_at = time.monotonic() + self.cache.lasts_s(options.ttl_s)
        self.pages.end(state, keep=keep, token_ids=token_ids, expires_at=expires_at, options=options)

    def _drop(self, sequence: DraftSequence) -> None:
        """Ends a sequence that failed, or is not wanted any more."""
        if sequence.fetch is None:
            self.pages.forget(sequence.state)
            sequence.state.truncate(0)
        self._end(sequence, sequence.prompt.token_ids, keep=False, is_finished=False, name="a conversation")

    def _count_ready(self, sequence: DraftSequence) -> None:
        self.pages.set_ready(sequence.state, sequence.state.num_tokens)

    def _save(self, sequence: DraftSequence, token_ids: TokenIds, *, keep: bool, is_finished: bool) -> None:
        """Ends the request to the cache, which may save what was computed."""
        if sequence.cached is None:
            return
        try:
            if keep and sequence.cached.is_published and is_finished:
                sequence.cached.publish_reply(sequence.state, token_ids)
            elif keep and not sequence.cached.is_published:
                sequence.cached.save_partial(sequence.state, token_ids)
        finally:
            sequence.cached.close()

    def forget(self, reply: Reply) -> None:
        """Drops what was computed for a reply."""
        if (sequence := self.sequences.pop(reply, None)) is not None:
            self._drop(sequence)

    def _start_sequence(
        self, prompt: Prompt, options: CacheOptions, epoch: Epoch, *, is_first: bool
    ) -> DraftSequence | None:
        """Returns a new sequence for a request that began in `epoch`; None if there is no memory for it, or if a purge
        came later, of which nothing may be kept. `is_first`: its prompt is fetched and saved."""
        cached = CachedRequest(self.cache, prompt, options, goes_on=True)
        if cached.epoch != epoch:
            return None
        owner = None if options.scope.kind == "off" else self.cache.owner(options.tenant)
        expires_at = time.monotonic() + self.cache.lasts_s(options.ttl_s)
        try:
            state = self.pages.begin(owner, prompt.token_ids, expires_at=expires_at, is_shared=options.save)
        except ContextTooLong:
            return None
        if not isinstance(state, KVSequence):
            return None
        sequence = DraftSequence(prompt, options, state)
        if not is_first:
            return sequence
        have = state.num_tokens
        self.pages.set_ready(state, 0)
        try:
            sequence.cached = cached
            one = sequence.fetch = RunningFetch(lambda: sequence not in self._left, partial(self._end_fetch, sequence))
            one.fetch = cached.begin_fetch(state, prompt.token_ids, have, is_wanted=one.is_wanted)
            one.steps = iter([("draft", one.fetch.run)])
            self.begin_read(one)
        except BaseException:
            self.pages.end(state, keep=False)
            raise
        return sequence


def _log_lost(name: str, error: Exception) -> None:
    """Logs that the state of `name` is not kept. Raises `DeviceLost`."""
    raise_if_lost(error)
    log.warning("[engine] %s: the draft model's state is not kept: %s", name, first_line(error))


def _publish_if_complete(sequence: DraftSequence) -> None:
    """Has the prompt saved once all of it is computed."""
    if sequence.cached is not None and sequence.state.num_tokens == len(sequence.prompt.token_ids):
        sequence.cached.publish(sequence.state, None, sequence.prefill_s)

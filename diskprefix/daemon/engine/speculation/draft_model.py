"""A draft model: a small model with the vocabulary of the served model. It guesses the next tokens of replies.

It has its own KV memory, and its own prefix cache in the same store. A reply gets no guesses if there is no memory for
its draft sequence, after an error, or near the last position of the draft model. After a reply has ended, the draft
model computes the rest of the conversation while the engine is idle. So it can guess the next reply from the first
token on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.fetches import ReadJob
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob, AheadJobs
from diskprefix.daemon.engine.running_request import Reply, RunningRequest
from diskprefix.daemon.engine.stay import Stay
from diskprefix.errors import ContextTooLong, NotReady, StoreUnavailable
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.printable import first_line
from diskprefix.runtime.contract import Rows, Runtime
from diskprefix.tokens import Logits, TokenIds, as_token_ids, common_prefix_length
from diskprefix.values import CacheOptions, Prompt

log = logging.getLogger("diskprefix")

MIN_LACKING = 32
"""The minimum number of tokens that are worth computing ahead. The next turn computes fewer tokens at once."""


class DraftSequence(Struct, eq=False):
    """The draft model's state of a prompt and a reply. `cached` is the draft model's request to its cache; only the
    first reply of a request has one."""

    prompt: Prompt
    options: CacheOptions
    stay: Stay
    cached: CachedRequest | None = None
    is_restored: bool = True
    """False until stored state was read and is used."""
    prefill_s: float = 0.0
    num_known: int = 0
    """The number of known tokens of the reply when it was last guessed for."""
    drafted: list[int] = field(default_factory=list)
    """The guesses after these tokens. The state of the last guess is not computed."""

    @property
    def state(self) -> KVSequence:
        return self.stay.sequence


class DraftModel:
    """A draft model, its memory and its cache. For the engine's thread."""

    def __init__(
        self, runtime: Runtime, cache: PrefixCache, pages: PageCache, max_positions: int, ahead: AheadJobs
    ) -> None:
        self.runtime, self.cache, self.pages = runtime, cache, pages
        self.max_positions = max_positions
        self.sequences: dict[Reply, DraftSequence] = {}
        """The draft sequences of the replies that the model guesses for."""
        self._ahead = ahead
        self.begin_read: Callable[[ReadJob], None]
        """Begins a restore. Set by the engine's loop."""

    def ready_sequence(self, reply: Reply) -> DraftSequence | None:
        """Returns the sequence of a reply; None while its state is restored, or if there is no memory for it."""
        sequence = self.sequences.get(reply)
        if sequence is None:
            request = reply.running.request
            if reply.num_known >= self.max_positions or request.prompt.pictures:
                return None
            epoch = reply.running.cached.epoch
            sequence = self._start_sequence(request.prompt, request.cache, epoch, is_first=reply.index == 0)
            if sequence is None:
                return None
            self.sequences[reply] = sequence
        return sequence if self._is_restored(sequence) else None

    def _is_restored(self, sequence: DraftSequence) -> bool:
        """Returns True if the restore has ended. When it ends, adopts the restored state. Raises the error of the
        restore."""
        job, cached = sequence.stay.job, sequence.cached
        if sequence.is_restored or job is None or cached is None:
            return True
        if not job.is_over:
            return False
        if job.is_given_up and job.has_begun_to_load:
            raise StoreUnavailable("the disk did not answer in time")
        sequence.stay.take_restored()
        sequence.is_restored = True
        cached.choose(sequence.state)
        self._count_ready(sequence)
        _publish_if_complete(sequence)
        return True

    def take_back_guesses(self, reply: Reply) -> None:
        """Forgets the state of wrong guesses."""
        sequence = self.sequences.get(reply)
        if sequence is None or not sequence.drafted:
            return
        sampled = reply.token_ids[sequence.num_known - reply.prompt_tokens :]
        num_right = common_prefix_length(as_token_ids(sequence.drafted), as_token_ids(sampled))
        # The last known token is computed again even if it was a right guess, because its logits are needed.
        num_valid = min(sequence.num_known + num_right, reply.num_known - 1)
        if num_valid < sequence.state.num_tokens:
            sequence.state.take_back(num_valid)
        sequence.drafted = []

    def take_pages_to(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens. Returns False if there is none."""
        return num_tokens <= self.max_positions and sequence.state.take_pages_to(num_tokens)

    def compute(self, step: Sequence[tuple[DraftSequence, npt.NDArray[np.int64]]]) -> Logits:
        """Computes more tokens of some sequences. Returns the next-token logits, [sequences, vocab]."""
        rows = [Rows(sequence.state, ids) for sequence, ids in step]
        groups = [rows] if self.cache.layout.packs else [[row] for row in rows]
        return np.concatenate([row for group in groups for row in self.runtime.run(group).logits])

    def record_prefill(self, sequence: DraftSequence, seconds: float) -> None:
        """Records that more known tokens were computed, and has complete blocks saved. `seconds` is the time that they
        took."""
        self._count_ready(sequence)
        if sequence.cached is not None and not sequence.cached.is_published:
            sequence.prefill_s += seconds
            sequence.cached.after_step(sequence.state)
            _publish_if_complete(sequence)

    def end_reply(self, reply: Reply, *, keep: bool, pays: bool) -> None:
        """Ends the sequence of a reply, if it has one. `keep`: the next turn may begin with its state. If guessing also
        `pays`, the tokens that it lacks are computed while the engine is idle. Raises `DeviceLost`."""
        request, sequence = reply.running.request, self.sequences.get(reply)
        token_ids = np.concatenate([request.prompt.token_ids, as_token_ids(reply.token_ids)])
        if keep and pays and reply.index == 0 and reply.guesser.rates:
            num_computed = sequence.state.num_tokens if sequence is not None and sequence.is_restored else 0
            self._compute_ahead(reply.running, token_ids, num_computed)
        if sequence is None:
            return
        try:
            self.take_back_guesses(reply)
        except Exception as error:  # noqa: BLE001 (a draft model that fails fails no request)
            _log_lost(request.id, error)
            keep = False
        del self.sequences[reply]
        self._end_sequence(sequence, token_ids, keep=keep, is_finished=reply.is_finished, name=request.id)

    def _compute_ahead(self, running: RunningRequest, token_ids: TokenIds, num_computed: int) -> None:
        """Queues a conversation so that its uncomputed tokens are computed while the engine is idle."""
        options, prompt = running.request.cache, running.request.prompt
        may_keep = options.save and options.scope.kind != "off" and not prompt.pictures
        if may_keep and num_computed + MIN_LACKING <= len(token_ids) < self.max_positions:
            owner = self.cache.owner(options.tenant)._replace(last_purge=running.cached.epoch.last_purge)
            content, expires_at = prompt.token_ids.tobytes(), self.cache.expires_at(options.ttl_s)
            self._ahead.pause()
            self._ahead.add_job(AheadJob(self, lambda: Prompt(token_ids), options, owner, content, expires_at))

    def _end_sequence(
        self, sequence: DraftSequence, token_ids: TokenIds, *, keep: bool, is_finished: bool, name: str
    ) -> None:
        """Ends a sequence, which has the first of `token_ids`, once its stored state was read."""
        token_ids, options = token_ids[: sequence.state.num_tokens], sequence.options
        keep = keep and sequence.is_restored
        try:
            self._save(sequence, token_ids, keep=keep, is_finished=is_finished)
        except Exception as error:  # noqa: BLE001 (a draft model that fails fails no request)
            _log_lost(name, error)
            keep = False
        expires_at = self.cache.expires_at(options.ttl_s)
        sequence.stay.end_stay(keep=keep, token_ids=token_ids, expires_at=expires_at, options=options)

    def _count_ready(self, sequence: DraftSequence) -> None:
        self.pages.set_ready(sequence.state, sequence.state.num_tokens)

    def _save(self, sequence: DraftSequence, token_ids: TokenIds, *, keep: bool, is_finished: bool) -> None:
        """Ends the request to the cache, and saves the computed state if `keep`."""
        if sequence.cached is None:
            return
        try:
            if keep and sequence.cached.is_published and is_finished:
                sequence.cached.publish_reply(sequence.state, token_ids)
            elif keep and not sequence.cached.is_published:
                sequence.cached.save_partial(sequence.state, token_ids)
        finally:
            sequence.cached.close()

    def drop_reply(self, reply: Reply) -> None:
        """Drops the sequence of a reply, which failed or is no longer wanted."""
        if (sequence := self.sequences.pop(reply, None)) is None:
            return
        try:
            if sequence.cached is not None:
                sequence.cached.close()
        finally:
            sequence.stay.end_stay(is_sound=not sequence.is_restored)

    def _start_sequence(
        self, prompt: Prompt, options: CacheOptions, epoch: Epoch, *, is_first: bool
    ) -> DraftSequence | None:
        """Returns a new sequence for a request that began in `epoch`. Returns None if there is no memory for it, or if
        the epoch is over, so that no state may be kept. `is_first`: the prompt is restored and saved."""
        cached = CachedRequest(self.cache, prompt, options, is_prefix_only=True)
        if self.cache.epochs.is_over(epoch):
            return None
        # The state is as old as the request, also if a purge is noticed now.
        own = self.cache.owner(options.tenant)._replace(last_purge=epoch.last_purge)
        owner = None if options.scope.kind == "off" else own
        expires_at = self.cache.expires_at(options.ttl_s)
        try:
            state = self.pages.begin_sequence(owner, prompt.token_ids, expires_at=expires_at, is_shared=options.save)
        except (ContextTooLong, NotReady):
            return None
        if not isinstance(state, KVSequence):
            return None
        sequence = DraftSequence(prompt, options, Stay(self.pages, state))
        if is_first:
            try:
                job = ReadJob(lambda: True)
                restore = cached.begin_restore(state, prompt.token_ids, state.num_tokens, is_wanted=job.is_wanted)
                job.steps = iter([("draft", restore.run)])
                sequence.cached, sequence.is_restored = cached, False
                sequence.stay.read(self.begin_read, job, cached, restore)
            except BaseException:
                sequence.stay.end_stay()
                raise
        return sequence


def _log_lost(name: str, error: Exception) -> None:
    """Logs that the state of `name` is not kept. Raises `DeviceLost`."""
    raise_if_lost(error)
    log.warning("[engine] %s: the draft model's state is not kept: %s", name, first_line(error))


def _publish_if_complete(sequence: DraftSequence) -> None:
    """Publishes the prompt to the cache once it is computed to its end."""
    if sequence.cached is not None and sequence.state.num_tokens == len(sequence.prompt.token_ids):
        sequence.cached.publish(sequence.state, None, sequence.prefill_s)

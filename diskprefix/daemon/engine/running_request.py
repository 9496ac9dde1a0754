"""A running request and its replies. Each reply takes its logits, samples tokens, sends them, and ends.

A reply calls the sampler, the cache and the client. It never calls the loop: each step returns a `ReplyState`, and the
loop acts on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from diskprefix.daemon.engine.detokenize import TextStream
from diskprefix.daemon.engine.gauges import Activity, ActivityState, EngineFigures
from diskprefix.daemon.engine.inbox import Ticket
from diskprefix.daemon.engine.pictures.prompt_pictures import PromptPictures
from diskprefix.daemon.engine.request import (
    DoneEvent,
    EchoEvent,
    Event,
    FinishEvent,
    FinishReason,
    GenerateRequest,
    ProgressEvent,
    ReadEvent,
    Timings,
    TokenLogprob,
    Usage,
)
from diskprefix.daemon.engine.sampler import Sampler, log_probability
from diskprefix.daemon.engine.scheduler import Chunk, ScheduledReply
from diskprefix.daemon.engine.speculation.guesser import Guesser
from diskprefix.daemon.engine.stay import Stay
from diskprefix.daemon.engine.thought_limit import ThoughtLimit
from diskprefix.errors import NonFiniteLogits
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.page_cache import MemoryWait, PageCache, PrefixWait
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Hidden, State
from diskprefix.tokens import Logits, TokenIds, as_token_ids
from diskprefix.values import CacheReport

log = logging.getLogger("diskprefix")

PROGRESS_S = 1.0
"""The seconds between two reports of progress."""
LOGGED_S = 5.0
"""The seconds of a prefill before its progress is logged. Each further line comes after twice the time of the line
before."""

ReplyState: TypeAlias = Literal["computing", "waiting", "finished"]
"""The state of a reply after a step. `computing`: the next step computes it. `waiting`: no step computes it until the
mask of its constraint is ready."""


Stage: TypeAlias = Literal["waiting", "reading", "computing", "over"]
"""The stages of a reply: it waits for memory, stored state is read into its memory, it has memory and may be computed,
or it has left. Before, while no engine has accepted its request, there is only a `Ticket`."""


class HeldLogits(Struct, eq=False):
    """Logits to sample from, shape [1 + guesses, vocab], immediately or once the mask of a constraint is ready."""

    logits: Logits
    guesses: list[int]
    """The guessed tokens of the rows after the first row."""
    had_guesses: bool
    """True if guesses must be taken back, in these rows or in earlier rows."""


class Reply(ScheduledReply, eq=False, kw_only=True):
    """One of the `n` replies to a request. It has a `state` while it has memory."""

    running: RunningRequest
    index: int
    sampler: Sampler
    text: TextStream
    state: State | None = None
    token_ids: list[int] = field(default_factory=list)
    """The sampled tokens. Once the reply has ended, without its last token."""
    guesser: Guesser = field(default_factory=Guesser)
    thought_limit: ThoughtLimit | None = None
    sampled_early: tuple[int, FinishReason | None] | None = None
    """The first token, if it was sent while the prompt was being restored, and why the reply ends with it."""
    hidden: npt.NDArray[np.float64] | None = None
    """For a request with a `Reading`: the last hidden state of the last computed token, or the sum of the last hidden
    states of all computed tokens. Shape [hidden_size]."""
    held: HeldLogits | None = None
    """The logits to sample from, while the reply is `waiting`."""
    wait: PrefixWait | MemoryWait | None = None
    """The reason why the reply waits while it has no memory; see `Ticket.wait`."""
    has_begun: bool = False
    """True if the reply has or had memory."""
    stay: Stay | None = None
    """The stay of the reply's sequence, while it has one."""
    is_finished: bool = False
    """The reply is whole."""
    is_over: bool = False

    @property
    def stage(self) -> Stage:
        """The stage of the reply. A preempted reply waits again."""
        if self.is_over:
            return "over"
        if self.state is None:
            return "waiting"
        return "reading" if self.stay is not None and self.stay.is_reading else "computing"

    def begin(self, state: State) -> None:
        """Gives the reply its memory."""
        self.state, self.has_begun = state, True
        self.stay = Stay(self.running.pages, state) if isinstance(state, KVSequence) else None

    def ids(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the tokens between two positions. Guesses follow the last known token."""
        of_prompt = self.running.prompt_ids[start:end]
        first, last = (max(0, position - self.prompt_tokens) for position in (start, end))
        if first == last:
            return of_prompt
        tokens = self.token_ids[first:last]
        tokens += self.draft[: last - first - len(tokens)]
        return np.concatenate([of_prompt, np.array(tokens, np.int64)])

    @property
    def room_for_draft(self) -> int:
        """The number of tokens that may be computed after the last known token. No memory is allocated for guesses."""
        if not isinstance(self.state, KVSequence):
            return 0
        return min(self.guesser.max_computed, self.state.capacity) - self.num_known

    def computed_ids(self) -> TokenIds:
        """Returns the tokens whose state is in memory."""
        tokens = np.concatenate([self.running.request.prompt.token_ids, as_token_ids(self.token_ids)])
        return tokens[: self.num_computed]

    def restorable_ids(self) -> TokenIds:
        """Returns the tokens whose state may be restored. With a model on the grid, the state of a reply has other bits
        than a prefill computes, so only the prompt may be restored."""
        layout, token_ids = self.running.cached.cache.layout, self.running.request.prompt.token_ids
        if layout.exact_at != "token" or not self.token_ids:
            return token_ids
        return np.concatenate([token_ids, as_token_ids(self.token_ids)])

    def add_hidden(self, start: int, hidden: Hidden) -> None:
        """Takes the last hidden states of the tokens from position `start` on, shape [num_rows, hidden_size]. The sum
        is computed token by token, so its bits do not depend on the steps."""
        if self.running.pooling == "last":
            self.hidden = hidden[-1].astype(np.float64)
            return
        rows = hidden.astype(np.float64)
        total = rows[0] if start == 0 or self.hidden is None else self.hidden + rows[0]
        for row in rows[1:]:
            total = total + row
        self.hidden = total

    def scores(self, chunk: Chunk[Reply]) -> bool:
        """Returns whether all rows of a chunk have logits, for the log probabilities of the prompt."""
        return self.running.request.scores_prompt and not self.index and chunk.end <= self.prompt_tokens

    def _score(self, chunk: Chunk[Reply], logits: Logits) -> None:
        """Keeps the log probabilities of the next tokens after each token of a chunk, not the logits. If the reply was
        preempted, tokens come a second time and are skipped."""
        scored, prompt, echo = self.running.scored, self.running.request.prompt.token_ids, self.running.request.echo
        assert echo is not None
        assert echo.logprobs is not None
        for position, row in enumerate(logits, start=chunk.start + 1):
            if position == len(scored) + 1 < len(prompt):
                scored.append(log_probability(row, int(prompt[position]), echo.logprobs))

    def _send_echo(self) -> None:
        request = self.running.request
        if request.echo is None:
            return
        first, *others = request.prompt.token_ids.tolist()
        scored = self.running.scored or [TokenLogprob(token, b"", 0.0) for token in others]
        tokens = self.text.named([TokenLogprob(first, b"", 0.0), *scored])
        self.running.ticket.emit(EchoEvent(self.index, tokens))

    # Each of these takes logits and returns the state of the reply after them.

    def take_step(self, chunk: Chunk[Reply], logits: Logits, seconds: float) -> ReplyState:
        """Takes the logits that a step computed for `chunk`, shape [1 + guesses, vocab]. Has the computed state saved,
        and samples if all known tokens are computed. `seconds` is the part of the step's time that `chunk` took."""
        running, state = self.running, self.state
        if not chunk.num_drafted:
            self.count_ready()
        if self.scores(chunk):
            self._score(chunk, logits)
        if chunk.start < self.prompt_tokens and self.index == 0:
            running.prefill_s += seconds
            running.report_progress(chunk.end)
            if running.pictures is not None and running.request.sampling.n == 1:
                running.pictures.release_rows(chunk.end)
            if isinstance(state, KVSequence) and not running.cached.is_published:
                running.cached.after_step(state)
        if chunk.end < self.num_known:
            self.sampler.prepare()
            return "computing"
        if chunk.end == self.prompt_tokens:
            return self.end_prompt(logits[-1])
        return self._extend(logits)

    def end_prompt(self, logits: Logits) -> ReplyState:
        """Samples the first token from the logits at the end of the prompt, shape [vocab]. The token of the first reply
        is sent before the prompt is published."""
        running, state = self.running, self.state
        # A view would keep the logits of all sequences of the step.
        logits = logits.copy()
        if isinstance(state, KVSequence):
            running.pages.keep_logits(state, logits)
            if not all(reply.has_begun for reply in running.replies):
                running.pages.keep_prompt(state)
        return self._extend(logits[None])

    def resume(self) -> ReplyState:
        """Samples from the logits that were held, if the mask of the constraint is ready."""
        if self.held is None or not self.sampler.is_ready:
            return "waiting"
        held, self.held = self.held, None
        return self._sample(held)

    def drop_held(self) -> None:
        """Drops held logits, and takes back the guesses that they belong to."""
        held, self.held = self.held, None
        if held is not None and held.had_guesses:
            self._take_back_guesses()

    def sample_early(self, logits: Logits) -> None:
        """Samples and sends the first token while the prompt is being restored. `logits` are the next-token logits at
        the end of the prompt, shape [vocab]."""
        running = self.running
        # Progress is reported before the first token.
        is_possible = self.stage == "reading" and not running.request.reports_progress and running.reply_limit > 0
        # After a preemption, this may be a second fetch.
        is_possible = is_possible and self.sampled_early is None and not self.token_ids
        if not is_possible or not self.sampler.is_ready:
            return
        self.sampled_early = self._send_next(logits)

    def _extend(self, logits: Logits) -> ReplyState:
        """Samples and sends the next tokens. The row after a guess counts only if the guess equals the token that was
        sampled. All other guesses are taken back."""
        draft = self.draft[: len(logits) - 1]
        if draft:
            self.running.num_drafted += len(draft)
            self.running.drafted_by.add(self.guesser.proposer)
        return self._sample(HeldLogits(logits, draft, had_guesses=bool(draft)))

    def _sample(self, held: HeldLogits) -> ReplyState:
        for row, guessed in enumerate([*held.guesses, None]):
            is_known = self.sampled_early is not None or not self.running.reply_limit
            if not is_known and not self.sampler.is_ready:
                # A view would keep the logits of all sequences of the step.
                self.held = HeldLogits(held.logits[row:].copy(), held.guesses[row:], held.had_guesses)
                return "waiting"
            try:
                token, reason = self._next(held.logits[row])
            except NonFiniteLogits:
                if not held.had_guesses:
                    raise
                return self._compute_again()
            if reason is not None or token != guessed:
                break
            self.num_computed += 1
            self.running.num_accepted += 1
        if held.had_guesses:
            self._take_back_guesses()
        return "computing" if reason is None else self._finish(reason)

    def _compute_again(self) -> ReplyState:
        """Has the last token computed again, without guesses. The state of a guess may be infinite. Then earlier rows
        are wrong too, because attention multiplies this state by 0, which gives NaN."""
        self.guesser = Guesser()
        self.num_computed = self.num_known - 1
        self._take_back_guesses()
        return "computing"

    def _take_back_guesses(self) -> None:
        """Takes back the state after the last right token."""
        if isinstance(self.state, KVSequence):
            self.state.take_back(self.num_computed)
        self.count_ready()

    def count_ready(self) -> None:
        """Lets other sequences share the tokens that are computed and right."""
        if isinstance(state := self.state, KVSequence):
            self.running.pages.set_ready(state, self.num_computed - len(state.undrafted), self.computed_ids)

    def _next(self, logits: Logits) -> tuple[int | None, FinishReason | None]:
        """Samples and sends a token. Returns the token, and the reason why the reply ends with it, or None if the reply
        goes on. The token is None if the reply has no tokens."""
        if not self.running.reply_limit:
            self.running.first_token_at = self.running.last_token_at = time.perf_counter()
            self._publish_prompt(logits)
            self._send_reading()
            return None, "length"
        early, self.sampled_early = self.sampled_early, None
        token, reason = early or self._send_next(logits)
        self._publish_prompt(logits)
        if reason is None:
            self.token_ids.append(token)
            self.num_known += 1
            self.guesser.record_token(token)
        return token, reason

    def _send_next(self, logits: Logits) -> tuple[int, FinishReason | None]:
        running = self.running
        token = self.sampler.sample(logits, self.thought_limit)
        running.count_token()
        logprobs = self.sampler.logprobs(logits, token)
        is_last = len(self.token_ids) + 1 == running.reply_limit
        end: FinishReason | None = "stop" if self.sampler.is_complete else "length" if is_last else None
        event, reason = self.text.event(self.index, token, logprobs, end)
        running.ticket.emit(event)
        self.sampler.record_text(event.text)
        if self.thought_limit is not None:
            self.thought_limit.record_text(event.text)
        return token, reason

    def _send_reading(self) -> None:
        reading = self.running.request.reading
        if reading is None or self.hidden is None:
            return
        values = (self.hidden / (self.prompt_tokens if reading.pooling == "mean" else 1)).astype(np.float32)
        if not np.isfinite(values).all():
            raise NonFiniteLogits("the model computed NaN or infinity")
        self.running.ticket.emit(ReadEvent(values))

    def _publish_prompt(self, logits: Logits) -> None:
        """Publishes the prompt to the cache, once. From then on, the other replies may begin."""
        running = self.running
        if self.index == 0 and not running.cached.is_published:
            self._send_echo()
            sequence = self.state if isinstance(self.state, KVSequence) else None
            running.cached.publish(sequence, logits, running.prefill_s)

    def _finish(self, reason: FinishReason) -> ReplyState:
        if self.index == 0 and isinstance(self.state, KVSequence):
            self.running.cached.publish_reply(self.state, self.computed_ids())
        self.is_finished = True
        self.running.ticket.emit(FinishEvent(self.index, reason, self.text.stopped_by))
        return "finished"


class RunningRequest(Struct, eq=False):
    """A request that the engine has accepted. Times are in seconds on the clock of `time.perf_counter`."""

    ticket: Ticket
    cached: CachedRequest
    pages: PageCache
    figures: EngineFigures
    reply_limit: int
    """The maximum number of tokens of a reply."""
    prompt_ids: npt.NDArray[np.int64]
    """The prompt."""
    pictures: PromptPictures | None = None
    """The pictures of the prompt."""
    started: float = field(default_factory=time.perf_counter)
    replies: list[Reply] = field(default_factory=list)
    """All replies. The others begin once the first one has computed the prompt."""
    exits: ExitStack = field(default_factory=ExitStack)
    """Leaves all lists that have the request or its replies, and gives their memory back. Filled where the request
    enters them; closed by `ActiveRequests.end_request`, once."""
    is_over: bool = False
    last_event: Callable[[CacheReport], Event | None] = lambda _: None
    """Makes the last event of the request, None for a client that has gone. Set at the end."""
    is_kept: bool = False
    """At the end, the state of the first reply is kept. Set at the end."""
    prefill_s: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_generated: int = 0
    num_drafted: int = 0
    """The number of guessed tokens that were computed, in all replies."""
    num_accepted: int = 0
    """The number of guessed tokens that were sampled."""
    drafted_by: set[str] = field(default_factory=set)
    """The names of the proposers of the computed guesses."""
    draft_s: float = 0.0
    """The seconds of guessing."""
    prefill_began_at: float = 0.0
    prefilled_at: float = 0.0
    """The end of the last step of the prefill."""
    reported_at: float = float("-inf")
    num_logged: int = 0
    scored: list[TokenLogprob] = field(default_factory=list)
    """The log probabilities of the prompt's tokens from the second token on that are computed so far, if the request
    asks for them."""

    @property
    def request(self) -> GenerateRequest:
        return self.ticket.request

    @property
    def known_ids(self) -> TokenIds:
        """The prompt, with the placeholder token of the model's vocabulary in place of pictures."""
        return self.request.prompt.token_ids if self.pictures is None else as_token_ids(self.prompt_ids)

    @property
    def pooling(self) -> Literal["last", "mean"] | None:
        """The pooling of the request's `Reading`."""
        reading = self.request.reading
        return None if reading is None else reading.pooling

    def activity(self) -> Activity:
        """Returns the activity of the request. For any thread."""
        now, replies, num_generated = time.perf_counter(), list(self.replies), self.num_generated
        prompt_tokens, decode_s = len(self.request.prompt.token_ids), self.last_token_at - self.first_token_at
        computed = max((reply.num_computed for reply in replies), default=0)
        speed, seconds_left = (None, None) if num_generated else self._prefill_speed(min(computed, prompt_tokens), now)
        if num_generated > 1 and decode_s > 0:
            speed = (num_generated - 1) / decode_s
        return Activity(
            id=self.request.id,
            state=self._state(replies, has_reply=num_generated > 0 and computed >= prompt_tokens),
            scope=self.request.cache.scope,
            prompt_tokens=prompt_tokens,
            restored_tokens=self.cached.restored.num_tokens,
            ready_tokens=min(computed, prompt_tokens),
            reply_tokens=num_generated,
            elapsed_s=now - self.ticket.arrived_at,
            queue_s=self.started - self.ticket.arrived_at,
            ttft_s=self.first_token_at - self.ticket.arrived_at if num_generated else None,
            tokens_per_s=speed,
            seconds_left=seconds_left,
        )

    def _prefill_speed(self, ready_tokens: int, now: float) -> tuple[float | None, float | None]:
        """Returns the tokens per second of the prefill, and the estimated seconds until its end; None for both before
        the first step has ended."""
        computed, seconds = ready_tokens - self.cached.restored.num_tokens, self.prefilled_at - self.prefill_began_at
        if computed <= 0 or seconds <= 0:
            return None, None
        left_s = (len(self.request.prompt.token_ids) - ready_tokens) * seconds / computed
        return computed / seconds, max(0.0, left_s - (now - self.prefilled_at))

    def _state(self, replies: list[Reply], *, has_reply: bool) -> ActivityState:
        stages = {reply.stage for reply in replies}
        if "reading" in stages:
            return "restoring"
        if stages <= {"waiting", "over"}:
            return "waiting"
        if has_reply:
            return "decoding"
        return "encoding" if any(reply.num_computed >= reply.limit for reply in replies) else "prefilling"

    def count_token(self) -> None:
        now = time.perf_counter()
        if self.num_generated:
            self.figures.gap_s.observe(now - self.last_token_at)
        else:
            self.first_token_at = now
        self.last_token_at = now
        self.num_generated += 1

    def report_progress(self, processed: int) -> None:
        """Records that `processed` tokens of the prompt are restored or computed. Logs the progress if the prefill
        takes long. Sends it to a client that wants it, once per second and at the end."""
        total, now = len(self.request.prompt.token_ids), time.perf_counter()
        self.prefilled_at, self.prefill_began_at = now, self.prefill_began_at or now
        speed, seconds_left = self._prefill_speed(processed, now)
        is_long = now - self.prefill_began_at > LOGGED_S * 2**self.num_logged
        if is_long and speed and seconds_left and seconds_left > LOGGED_S / 5:
            self.num_logged += 1
            figures = f"{processed:,} of {total:,} tokens · {speed:.0f} tokens/s · {seconds_left:.0f} s left"
            log.info("[engine] %s computes its prompt: %s", self.request.id, figures)
        if not self.request.reports_progress or (processed < total and now - self.reported_at < PROGRESS_S):
            return
        self.reported_at = now
        elapsed_ms = (now - self.started) * 1e3
        restored, kept = self.cached.restored, self.cached.selection.kept
        self.ticket.emit(ProgressEvent(total, restored.num_tokens, processed, kept, elapsed_ms, restored.source))

    def done_event(self, report: CacheReport) -> DoneEvent:
        """Returns the last event of a request that ended well."""
        prompt_tokens, decode_s = len(self.prompt_ids), self.last_token_at - self.first_token_at
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=self.num_generated, cached_tokens=report.restored)
        restored, ttft_ms = self.cached.restored, (self.first_token_at - self.ticket.arrived_at) * 1e3
        queue_ms = (self.started - self.ticket.arrived_at) * 1e3
        # The first token of a stored prompt may come before the lookup, the read, or (with several replies) the prefill
        # has ended.
        parts, left_ms = list[float](), ttft_ms - queue_ms
        for part_ms in (restored.lookup_ms, restored.restore_ms, self.prefill_s * 1e3):
            parts.append(min(part_ms, max(0.0, left_ms)))
            left_ms -= parts[-1]
        lookup_ms, restore_ms, prefill_ms = parts
        timings = Timings(
            queue_ms=queue_ms,
            lookup_ms=lookup_ms,
            restore_ms=restore_ms,
            late_restore_ms=restored.restore_ms - restore_ms,
            prefill_ms=prefill_ms,
            ttft_ms=ttft_ms,
            decode_ms=decode_s * 1e3,
            decode_tokens_per_s=(self.num_generated - 1) / decode_s if decode_s > 0 else 0.0,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            drafted_by=",".join(sorted(self.drafted_by)),
            draft_ms=self.draft_s * 1e3,
            **({} if self.pictures is None else self.pictures.timings()),
        )
        return DoneEvent(usage, report, timings)

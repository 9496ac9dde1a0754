"""One request in the engine: its way through the cache, its choices, and what is measured of it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from diskprefix.cache.request import CachedRequest
from diskprefix.engine.activity import Activity, RequestState
from diskprefix.engine.detokenize import TextStream
from diskprefix.engine.figures import EngineFigures
from diskprefix.engine.inbox import Ticket
from diskprefix.engine.request import FinishReason, GenerateRequest, ProgressEvent, Stage, Timings, Usage
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.sequence import Sequence
from diskprefix.engine.speculation import Guesser
from diskprefix.kv.arena import KVArena
from diskprefix.kv.pool import Slot
from diskprefix.model.exact.runner import State
from diskprefix.tokens import TokenIds, as_token_ids

PROGRESS_S = 1.0
"""Least time between two reports of progress."""


@dataclass(eq=False)
class DraftSequence:
    """What the draft model has of one sequence. `cached` is its way through the cache: that of the first choice."""

    slot: Slot
    cached: CachedRequest | None
    fetch: Future[None] | None
    """What is stored is being fetched; None once that was looked at."""
    prefill_s: float = 0.0
    num_known: int = 0
    """The known tokens of the sequence when it was guessed last."""
    drafted: list[int] = field(default_factory=list)
    """What was guessed behind them. The last of these is not computed."""

    @property
    def arena(self) -> KVArena:
        return self.slot.arena


@dataclass(eq=False)
class HeldLogits:
    """Logits whose tokens are sampled when it is known what the constraint allows."""

    logits: torch.Tensor
    """Shape [1 + guesses, vocab]."""
    guesses: list[int]
    """The tokens that the rows behind the first one were computed with."""
    had_guesses: bool
    """Whether guesses must be taken back, of these or of rows before."""


@dataclass(eq=False, kw_only=True)
class Choice(Sequence):
    """One of the `n` replies to a request. It has a `state` while it is computed, and a `slot` if that is an arena."""

    job: Job
    index: int
    sampler: Sampler
    text: TextStream
    state: State | None = None
    slot: Slot | None = None
    reply: list[int] = field(default_factory=list)
    """The sampled tokens, but for the last one of a reply that has ended."""
    guesser: Guesser | None = None
    shadow: DraftSequence | None = None
    """What the draft model has of it."""
    foretold: tuple[int, FinishReason | None] | None = None
    """The first token, and why the reply ends with it, if it was sent while the prompt was being restored."""
    held: HeldLogits | None = None
    """It is in no step meanwhile."""
    is_finished: bool = False

    def place(self, slot: Slot) -> None:
        """Gives it memory."""
        self.slot, self.state = slot, slot.arena

    def ids(self, start: int, end: int) -> torch.Tensor:
        """Returns the tokens between two positions, guesses behind the last known one included, int64 of shape [1,
        end - start], on the model's device."""
        of_prompt = self.job.prompt_ids[:, start:end]
        first, last = (max(0, position - self.prompt_tokens) for position in (start, end))
        if first == last:
            return of_prompt
        tokens = self.reply[first:last]
        tokens += self.draft[: last - first - len(tokens)]
        of_reply = torch.tensor([tokens], device=of_prompt.device)
        return torch.cat([of_prompt, of_reply], dim=1) if of_prompt.shape[1] else of_reply

    @property
    def room_for_draft(self) -> int:
        """How many tokens may be computed behind the last known one. No memory is taken for guesses."""
        if self.guesser is None or self.slot is None:
            return 0
        return min(self.guesser.most_computed, self.slot.arena.capacity) - self.num_known

    def take_back(self) -> None:
        """Forgets the state of tokens behind those that are computed: of guesses that were wrong."""
        if isinstance(self.state, KVArena):
            self.state.take_back(self.num_computed)
        if self.slot is not None:
            self.slot.num_computed = self.num_computed

    def computed_ids(self) -> TokenIds:
        """Returns the tokens whose state is in memory."""
        tokens = np.concatenate([self.job.request.prompt.token_ids, as_token_ids(self.reply)])
        return tokens[: self.num_computed]


@dataclass(eq=False)
class Job:
    """A request that the engine has taken. Times are in seconds on the clock of `time.perf_counter`."""

    ticket: Ticket
    cached: CachedRequest
    figures: EngineFigures
    prompt_ids: torch.Tensor
    """int64 of shape [1, prompt_tokens], on the model's device."""
    num_adopted: int = 0
    """Tokens of the prompt that its slot held from the beginning."""
    started: float = field(default_factory=time.perf_counter)
    choices: list[Choice] = field(default_factory=list)
    """Those that have begun."""
    unforked: list[Choice] = field(default_factory=list)
    """Those that will begin with a copy of the prompt's state, or in its place."""
    source: Choice | None = None
    """The choice in whose memory the prompt's end is marked, while others are to begin from it."""
    logits: torch.Tensor | None = None
    """The next-token logits at the prompt's end, shape [vocab]."""
    is_fetching: bool = False
    fetched_from: float | None = None
    """When the fetch began, and below when what was not restored began to be computed."""
    computed_from: float | None = None
    is_published: bool = False
    is_over: bool = False
    error: Exception | None = None
    """What the fetch raised."""
    prefill_s: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_generated: int = 0
    num_drafted: int = 0
    """Guessed tokens that were computed, in all choices."""
    num_accepted: int = 0
    """Those of them that were sampled."""
    reported_at: float = float("-inf")

    @property
    def request(self) -> GenerateRequest:
        return self.ticket.request

    @property
    def all_choices(self) -> list[Choice]:
        return [*self.choices, *self.unforked]

    @property
    def turn(self) -> Hashable:
        """Those who share one turn: a caller with an API key, whatever its salts."""
        return self.request.cache.tenant.ids[:1]

    def activity(self) -> Activity:
        """Returns what it is doing; for any thread."""
        now, choices, num_generated = time.perf_counter(), list(self.choices), self.num_generated
        prompt_tokens = len(self.request.prompt.token_ids)
        computed = max((choice.num_computed for choice in choices), default=0)
        decode_s = self.last_token_at - self.first_token_at
        return Activity(
            id=self.request.id,
            state=self._state(choices, has_reply=num_generated > 0 and computed >= prompt_tokens),
            scope=self.request.cache.scope,
            prompt_tokens=prompt_tokens,
            restored_tokens=self.cached.restored.num_tokens,
            ready_tokens=min(computed, prompt_tokens),
            reply_tokens=num_generated,
            elapsed_s=now - self.ticket.arrived_at,
            queue_s=self.started - self.ticket.arrived_at,
            ttft_s=self.first_token_at - self.ticket.arrived_at if num_generated else None,
            tokens_per_s=(num_generated - 1) / decode_s if num_generated > 1 and decode_s > 0 else None,
        )

    def _state(self, choices: list[Choice], *, has_reply: bool) -> RequestState:
        if self.is_fetching:
            return "restoring"
        if all(choice.state is None for choice in choices):
            return "waiting"
        return "decoding" if has_reply else "prefilling"

    def count_token(self) -> None:
        now = time.perf_counter()
        if self.num_generated:
            self.figures.gap_s.add(now - self.last_token_at)
        else:
            self.first_token_at = now
        self.last_token_at = now
        self.num_generated += 1

    def end_without_tokens(self) -> None:
        """What is measured up to the first token is measured up to here."""
        self.first_token_at = self.last_token_at = time.perf_counter()

    def report_progress(self, processed: int) -> None:
        """Tells how much of the prompt is there, if that is wanted: once a second at most, and at the end."""
        total, now = len(self.request.prompt.token_ids), time.perf_counter()
        if not self.request.reports_progress or (processed < total and now - self.reported_at < PROGRESS_S):
            return
        self.reported_at = now
        elapsed_ms = (now - self.started) * 1e3
        cached, kept = self.cached.restored.num_tokens, self.cached.selection.kept
        self.ticket.emit(ProgressEvent(total, cached, processed, kept, elapsed_ms))

    def stages(self) -> Iterator[Stage]:
        """Yields the stages that it has been through, with their times."""
        restored, prompt_tokens, now = self.cached.restored, len(self.request.prompt.token_ids), time.perf_counter()
        yield Stage("queue", self.ticket.arrived_at, self.started)
        if self.fetched_from is not None:
            matched = self.fetched_from + restored.lookup_ms / 1e3
            yield Stage("match", self.fetched_from, matched, {"tokens": restored.matched})
            facts: dict[str, int | str] = {"tokens": restored.num_tokens, "bytes": restored.num_bytes}
            if restored.num_tokens:
                ended = matched + restored.restore_ms / 1e3
                yield Stage("restore", matched, ended, facts | {"source": restored.source})
        if self.computed_from is not None and (computed := prompt_tokens - restored.num_tokens):
            # The first token was sent before, if what was to be restored turned out to be damaged.
            ended = max(self.first_token_at or now, self.computed_from + self.prefill_s)
            yield Stage("prefill", self.computed_from, ended, {"tokens": computed})
        if self.num_generated:
            yield Stage("decode", self.first_token_at, self.last_token_at, {"tokens": self.num_generated})

    def usage(self, cached_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt.token_ids),
            completion_tokens=self.num_generated,
            cached_tokens=cached_tokens,
        )

    def timings(self) -> Timings:
        decode_s = self.last_token_at - self.first_token_at
        return Timings(
            queue_ms=(self.started - self.ticket.arrived_at) * 1e3,
            lookup_ms=self.cached.restored.lookup_ms,
            restore_ms=self.cached.restored.restore_ms,
            prefill_ms=self.prefill_s * 1e3,
            ttft_ms=(self.first_token_at - self.ticket.arrived_at) * 1e3,
            decode_ms=decode_s * 1e3,
            decode_tokens_per_s=(self.num_generated - 1) / decode_s if decode_s > 0 else 0.0,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
        )

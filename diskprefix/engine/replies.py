"""The replies to the requests that run: how each begins, gets its tokens, and ends."""

from __future__ import annotations

import torch

from diskprefix.engine.job import Choice, HeldLogits, Job
from diskprefix.engine.request import DoneEvent, FinishEvent, FinishReason
from diskprefix.engine.running import Running
from diskprefix.engine.scheduler import Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import NonFiniteLogits
from diskprefix.kv.arena import KVArena


class Replies:
    """Samples tokens from logits, and sends them."""

    def __init__(self, served: ServedModel, running: Running, scheduler: Scheduler[Choice]) -> None:
        self._served, self._running, self._scheduler = served, running, scheduler

    def end_prompt(self, choice: Choice, logits: torch.Tensor) -> None:
        """Begins a reply with its first token. That of the first choice goes out before the prompt is published.
        `logits` are those at the prompt's end, shape [vocab]."""
        job, state = choice.job, choice.state
        assert state is not None
        # A view would keep the logits of all sequences of the step.
        logits = logits.clone()
        if choice.slot is not None:
            choice.slot.logits_at, choice.slot.logits = choice.prompt_tokens, logits
        if job.unforked or (choice.slot is not None and self._served.cache.layout.is_sliceable):
            # Now: the next step changes states in place. The next turn may go on here too.
            state.mark()
        if job.unforked:
            job.source, job.logits = choice, logits
        self.go_on(choice, logits[None])

    def foretell(self, job: Job, logits: torch.Tensor) -> None:
        """Samples and sends the first token while the prompt is being restored: it needs only `logits`, which are those
        at the prompt's end, shape [vocab]. What goes wrong fails the job when the fetch, which fills its memory, is
        over."""
        # Progress is told before the first token; a reply of no tokens has none.
        if not job.is_fetching or job.request.reports_progress or not self._served.reply_limit(job.request):
            return
        choice = job.choices[0]
        if not choice.sampler.is_ready:
            return
        try:
            choice.foretold = self._send_next(choice, logits)
        except Exception as error:  # noqa: BLE001 (the loop raises it)
            job.error = error

    def go_on(self, choice: Choice, logits: torch.Tensor) -> None:
        """Samples and sends the next tokens of a reply. `logits` has shape [1 + guesses, vocab], and those behind a
        guess count if it is what was sampled. All other guesses are taken back."""
        draft = choice.draft[: len(logits) - 1]
        choice.job.num_drafted += len(draft)
        self._sample(choice, HeldLogits(logits, draft, had_guesses=bool(draft)))

    def resume(self, choice: Choice) -> None:
        """Goes on with a reply whose logits were held, if it is known by now what its constraint allows."""
        if choice.held is not None and choice.sampler.is_ready:
            held, choice.held = choice.held, None
            self._sample(choice, held)

    def _sample(self, choice: Choice, held: HeldLogits) -> None:
        for row, guessed in enumerate([*held.guesses, None]):
            if not self._can_sample(choice):
                # A view would keep the logits of all sequences of the step.
                choice.held = HeldLogits(held.logits[row:].clone(), held.guesses[row:], held.had_guesses)
                self._scheduler.remove(choice)
                return
            try:
                token, reason = self._next(choice, held.logits[row])
            except NonFiniteLogits:
                if not held.had_guesses:
                    raise
                self._compute_again(choice)
                return
            if reason is not None or token != guessed:
                break
            choice.num_computed += 1
            choice.job.num_accepted += 1
        if held.had_guesses:
            choice.take_back()
        if reason is None:
            self._scheduler.add(choice)
        else:
            self._finish(choice, reason)

    def _can_sample(self, choice: Choice) -> bool:
        """Whether the next token is known without waiting for what the constraint allows."""
        is_known = choice.foretold is not None or not self._served.reply_limit(choice.job.request)
        return is_known or choice.sampler.is_ready

    def fork(self, job: Job) -> None:
        """Begins the other choices, as many as there is memory for, with a copy of the prompt's state."""
        source = job.source
        while source is not None and source.slot is not None and job.unforked and self._running.has_place:
            with self._running.failing(job):
                slot = self._served.pool.fork(source.slot, source.prompt_tokens)
                if slot is None:
                    return
                choice = job.unforked.pop(0)
                choice.place(slot)
                self._begin(choice)
        if not job.unforked:
            job.source = None

    def _compute_again(self, choice: Choice) -> None:
        """Has the last token computed without guesses. The state of a guess may be infinite: then those before it are
        wrong too, because attention multiplies it by 0."""
        choice.guesser = None
        choice.num_computed = choice.num_known - 1
        choice.take_back()
        self._scheduler.add(choice)

    def _next(self, choice: Choice, logits: torch.Tensor) -> tuple[int | None, FinishReason | None]:
        """Samples and sends a token. Returns it, and why the reply ends with it, or without one (None); the second is
        None if it goes on."""
        if not self._served.reply_limit(choice.job.request):
            choice.job.end_without_tokens()
            self._publish(choice, logits)
            return None, "length"
        foretold, choice.foretold = choice.foretold, None
        token, reason = foretold or self._send_next(choice, logits)
        self._publish(choice, logits)
        if reason is None:
            choice.reply.append(token)
            choice.num_known += 1
            if choice.guesser is not None:
                choice.guesser.note(token)
        return token, reason

    def _send_next(self, choice: Choice, logits: torch.Tensor) -> tuple[int, FinishReason | None]:
        job = choice.job
        token = choice.sampler.sample(logits)
        job.count_token()
        logprobs = choice.sampler.logprobs(logits, token)
        is_last = len(choice.reply) + 1 == self._served.reply_limit(job.request)
        end: FinishReason | None = "stop" if choice.sampler.is_complete else "length" if is_last else None
        event, reason = self._served.token_event(choice.index, token, logprobs, choice.text, end)
        job.ticket.emit(event)
        return token, reason

    def _publish(self, choice: Choice, logits: torch.Tensor) -> None:
        """Has the prompt kept, once."""
        job = choice.job
        if choice.index == 0 and not job.is_published and isinstance(choice.state, KVArena):
            job.is_published = True
            job.cached.publish(choice.state, logits, job.prefill_s)

    def _begin(self, choice: Choice) -> None:
        """Begins a choice whose memory holds the prompt's state."""
        job = choice.job
        assert job.logits is not None
        job.choices.append(choice)
        choice.num_computed = choice.prompt_tokens
        self.go_on(choice, job.logits[None])

    def _finish(self, choice: Choice, reason: FinishReason) -> None:
        job = choice.job
        if choice.index == 0 and isinstance(choice.state, KVArena):
            job.cached.publish_reply(choice.state, choice.computed_ids())
        choice.is_finished = True
        job.ticket.emit(FinishEvent(choice.index, reason, choice.text.stopped_by))
        self._scheduler.remove(choice)
        if job.source is choice and job.unforked:
            self._hand_over(choice, job.unforked.pop(0))
        else:
            self._running.release(choice, keep=choice.index == 0)
        are_done = all(other.is_finished for other in job.all_choices)
        if are_done and not job.is_over:
            self._running.end(job, lambda report: DoneEvent(job.usage(report.restored), report, job.timings()))

    def _hand_over(self, choice: Choice, following: Choice) -> None:
        """Begins the next choice in the memory of one that has ended."""
        assert choice.state is not None
        self._served.release_draft(choice, keep=True)
        if isinstance(choice.state, KVArena):
            # What is captured of the reply is overwritten now.
            choice.state.settle(drop=True)
        choice.state.rewind()
        following.state, following.slot = choice.state, choice.slot
        choice.state = choice.slot = None
        choice.job.source = following if choice.job.unforked else None
        self._begin(following)

"""Constrains replies: llguidance parses the tokens of a reply, and computes the mask of the tokens that may follow.

A mask depends only on the tokens before it. A thread of the request computes the mask while the engine computes the
logits that the mask applies to. If the mask takes longer, the engine computes other replies: see
`ConstrainedReply.is_ready`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from copy import copy
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import replace

from diskprefix.daemon.engine.constraints.constraint_grammar import (
    Forbidden,
    explained,
    forbidden_by,
    grammar_of,
    matcher_of,
)
from diskprefix.daemon.engine.constraints.kept_schema import Loosened
from diskprefix.daemon.engine.constraints.trial import TokenizerText, Trials
from diskprefix.daemon.engine.request import Constraint, FreeText
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.fair_cache import FairCache
from diskprefix.printable import first_line
from diskprefix.thread_pool import ThreadPool, Work
from diskprefix.values import NO_ASKER, Asker, Tenant

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
_MERGES = '"merges":['
_MAX_COMPILED = 8
_MAX_THREADS = 1024
"""More than the requests of an engine that run at a time: a grammar delays no other request."""
_MAX_BEGINNING = 1024
"""The maximum number of characters of a text that begins a call."""


class ConstraintCompiler:
    """Compiles constraints for the tokenizer of one model. For any thread."""

    def __init__(self, tokenizer: Any, eos: Collection[int], vocab_size: int) -> None:
        """Makes a compiler. `eos` are the tokens that end a reply. `vocab_size` is the number of logits."""
        self.vocab_size = vocab_size
        self._hf_tokenizer = tokenizer
        self.eos = eos
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | InvalidRequest | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """A function that is called on another thread when a mask is ready."""
        self._trials = Trials(self._tokenizer_text)
        self.threads = ThreadPool(_MAX_THREADS, "masks").start()
        """The threads that compile constraints and compute masks, one at a time for each request."""
        # An agent sends its tools again and again.
        self._compiled: FairCache[tuple[Tenant, str], LLMatcher] = FairCache(_MAX_COMPILED)

    @property
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer of llguidance, made at first use. Raises `InvalidRequest` if it cannot be made."""
        with self._lock:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                # The server of the trials makes the same tokenizer. That takes up to a second and holds Python's lock,
                # so start it first.
                self._trials.start()
                try:
                    text, num_tokens, eos = self._tokenizer_text()
                    self._tokenizer = LLTokenizer(text, n_vocab=num_tokens, eos_token=eos)
                except Exception as error:  # noqa: BLE001 (llguidance raises ValueError, tokenizers nothing narrower)
                    message = f"this model's tokenizer cannot be used to constrain a reply: {first_line(error)}"
                    self._tokenizer = InvalidRequest(message, code="unsupported")
            if isinstance(self._tokenizer, InvalidRequest):
                raise self._tokenizer
            return self._tokenizer

    def check_constraint(
        self,
        constraint: Constraint,
        *,
        param: str,
        parts: Mapping[str, str] = MappingProxyType({}),
        strict: Collection[str] = (),
        asker: Asker = NO_ASKER,
    ) -> dict[str, Loosened]:
        """Tries a constraint of `asker`. Returns the result of `Trials.run`, and raises its errors. May take seconds,
        so it must not be called on the event loop."""
        # Raises if the tokenizer cannot be used. The process of the trials would only end.
        _ = self.tokenizer
        return self._trials.run(constraint, param, parts, strict, asker)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Returns a matcher at its beginning. Raises `InvalidRequest` for a constraint that `check_constraint` refuses.
        A constraint that `check_constraint` has not seen may take any time and memory."""
        grammar = grammar_of(constraint, "constraint")
        key, share = (constraint.asker.tenant, grammar), constraint.asker.share
        compiled = self._compiled.get_or_make(key, share, lambda: matcher_of(self.tokenizer, grammar))
        if compiled.is_error():
            raise explained(self.tokenizer, constraint, "constraint", compiled.get_error())
        # The copy shares the computed parts of the constraint.
        return compiled.deep_copy()

    def close(self) -> None:
        self._trials.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def begin_reply(self, constraint: Constraint) -> ConstrainedReply | ConstrainedCalls:
        """Returns the first reply to a request, at its beginning. Another thread compiles the constraint."""
        kind = ConstrainedReply if constraint.begins is None else ConstrainedCalls
        return kind(self, constraint, _Beginning(self, constraint))

    def tokens_of(self, tag: str) -> list[int]:
        """Returns the tokens of a tag; [] if the model has no logits for one of them."""
        tokens: list[int] = self._hf_tokenizer.encode(tag, add_special_tokens=False)
        return tokens if max(tokens, default=0) < self.vocab_size else []

    def _tokenizer_text(self) -> TokenizerText:
        known = len(self._hf_tokenizer)
        backend = copy(self._hf_tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        text = backend.to_str()
        if (at := text.rfind(_MERGES)) >= 0 and text.endswith("]}}"):
            # Only the texts of tokens matter here, and the merges would take as much time and memory again.
            text = f"{text[:at]}{_MERGES}]}}}}"
        eos = sorted(token for token in self.eos if token < known) or None
        return TokenizerText(text, max(known, self.vocab_size), eos)


class _Beginning:
    """The compiled constraint that the replies to one request share, and their work, which is done in order by one
    thread at a time."""

    def __init__(self, compiler: ConstraintCompiler, constraint: Constraint) -> None:
        self._compiler, self._constraint = compiler, constraint
        self._lock = threading.Lock()
        self._waiting: deque[Work[Any]] = deque()
        """The work that has not ended. The first one runs."""

    @cached_property
    def matcher(self) -> LLMatcher:
        """The compiled constraint, for submitted work."""
        constraint = self._constraint
        if constraint.make_source is not None:
            constraint = replace(constraint, source=constraint.make_source())
        return self._compiler.matcher(constraint)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on another thread, after all work submitted before."""
        queued, on_ready = Work(work), self._compiler.on_ready
        queued.future.add_done_callback(lambda _: on_ready())
        with self._lock:
            self._waiting.append(queued)
            if len(self._waiting) == 1:
                self._compiler.threads.submit(self._work)
        return queued.future

    def _work(self) -> None:
        has_more = True
        # Bound: each round completes a piece of work. A reply submits its next piece when it has used the last one.
        while has_more:
            self._waiting[0].complete()
            with self._lock:
                self._waiting.popleft()
                has_more = bool(self._waiting)


class ConstrainedReply:
    """A reply under a constraint. For each token, call `forbidden`, then `accept_token` with the chosen token. Both
    wait until `is_ready`. Both raise `InvalidRequest` for a constraint that does not compile or becomes too complex."""

    def __init__(self, compiler: ConstraintCompiler, constraint: Constraint, beginning: _Beginning) -> None:
        self._compiler = compiler
        self._constraint = constraint
        self._beginning = beginning
        self._matcher: LLMatcher
        """The matcher, set by the first task. Only one thread uses it at a time, because each use waits for the use
        before."""
        self._before = constraint.before
        self._free: _FreeText | None = None
        """The free text, while the reply is in it."""
        self._opening: list[int] = []
        """The remaining tokens that open free text, while they may come."""
        self._may_be_text = True
        """True if the tokens of the opening so far may also begin the constrained text."""
        if self._before is not None and self._before.begin is None:
            self._free = _FreeText(self._before.end)
        self._next: Future[Forbidden] = beginning.submit(self._start)
        self.is_complete = False
        """True if the reply can only end here."""

    def another(self) -> ConstrainedReply:
        """Returns another reply to the same request, at its beginning."""
        return ConstrainedReply(self._compiler, self._constraint, self._beginning)

    @property
    def is_ready(self) -> bool:
        """True if `forbidden` and `accept_token` return immediately. `ConstraintCompiler.on_ready` is called when that
        changes to True."""
        return self._next.done()

    @property
    def is_free(self) -> bool:
        """True in the free text before the constrained text."""
        return self._free is not None

    def forbidden(self) -> Forbidden:
        """Returns the mask of the next token. The caller may change it."""
        if self._free is not None:
            # Free text must not end the reply.
            forbidden = np.zeros(self._compiler.vocab_size, np.bool_)
            forbidden[[token for token in self._compiler.eos if token < len(forbidden)]] = True
            return forbidden
        forbidden = self._next.result()
        forbidden[self._opening[:1]] = False
        return forbidden

    def accept_token(self, token: int) -> bool:
        """Moves past a token that is not forbidden. Returns False, and does not move, for a token that ends the free
        text and continues with text that the constraint does not allow. Then another token must be chosen."""
        if self._free is not None:
            return self._accept_free(self._free, token)
        if self._before is not None and self._opening[:1] == [token]:
            self._open(self._before, token)
        else:
            self._opening = []
            self._advance([token])
        return True

    def _open(self, before: FreeText, token: int) -> None:
        """Moves past a token of the opening. Until the opening is complete, the tokens may also be constrained text."""
        del self._opening[0]
        if self._opening:
            self._may_be_text = self._may_be_text and self._matcher.try_consume_tokens([token]) == 1
        else:
            self._matcher.reset()
            self._free, self._may_be_text = _FreeText(before.end), True
        self._next = self._beginning.submit(self._mask)

    def _accept_free(self, free: _FreeText, token: int) -> bool:
        tokenizer = self._compiler.tokenizer
        rest = free.rest_after(tokenizer.decode_bytes([token]))
        if rest is None:
            return True
        self._next.result()
        tokens = tokenizer.tokenize_bytes(rest)
        if self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        self._free = None
        if tokens:
            self._advance(tokens)
        return True

    def _advance(self, tokens: list[int]) -> None:
        # The text could only end here, or continue as an opening. It does not continue as an opening, so it ends.
        has_ended = self._matcher.is_stopped() and not self._matcher.is_error()
        if not has_ended and not self._matcher.consume_tokens(tokens):
            reason = self._matcher.get_error().partition("\n")[0]
            message = f"the reply cannot be constrained any further: {reason}"
            raise InvalidRequest(message, code="constraint_too_complex")
        self.is_complete = self._matcher.is_stopped()
        if not self.is_complete:
            self._next = self._beginning.submit(self._mask)

    def _start(self) -> Forbidden:
        self._matcher = self._beginning.matcher.deep_copy()
        if self._before is not None and self._before.begin is not None:
            self._opening = self._compiler.tokens_of(self._before.begin)
        return self._mask()

    def _mask(self) -> Forbidden:
        if not self._may_be_text:
            return np.ones(self._compiler.vocab_size, np.bool_)
        return forbidden_by(self._matcher, self._compiler.vocab_size)


class ConstrainedCalls:
    """A reply that is free text except for calls. A call is constrained from the text that begins it up to its end. Use
    it like `ConstrainedReply`, and also call `record_text` after each token."""

    is_complete = False

    def __init__(self, compiler: ConstraintCompiler, constraint: Constraint, beginning: _Beginning) -> None:
        self._compiler, self._constraint, self._beginning = compiler, constraint, beginning
        self._matcher: LLMatcher
        """The matcher of the call that has begun. Only the thread uses it."""
        self._next: Future[Forbidden | None] | None = None
        """The mask of the next token of a call, with the result None after the end of the call; no future in free
        text."""
        self._tail = ""
        """The text in which a call may begin, or in which a thought may end."""
        self._in_thought = constraint.before is not None and constraint.before.begin is None
        self._is_prepared = False

    def another(self) -> ConstrainedCalls:
        """Returns another reply to the same request, at its beginning."""
        return ConstrainedCalls(self._compiler, self._constraint, self._beginning)

    def prepare(self) -> None:
        """Begins to make the grammar before a call begins."""
        if not self._is_prepared:
            self._is_prepared = True
            self._beginning.submit(lambda: self._beginning.matcher)

    @property
    def is_ready(self) -> bool:
        return self._next is None or self._next.done()

    @property
    def is_free(self) -> bool:
        return self.forbidden() is None

    def forbidden(self) -> Forbidden | None:
        """Returns the mask of the next token, None in free text. The caller may change it."""
        forbidden = None if self._next is None else self._next.result()
        if forbidden is None:
            self._next = None
        return forbidden

    def accept_token(self, token: int) -> bool:
        if self._next is not None:
            self._next = self._beginning.submit(partial(self._advance, token))
        return True

    def record_text(self, text: str) -> None:
        """Records the text that a token completed."""
        if self._next is None and (begun := self._begun_after(text)):
            self._next = self._beginning.submit(partial(self._begin_call, begun))

    def _begun_after(self, text: str) -> str:
        """Adds a piece of free text. Returns the beginning of a call that this piece completes, or an empty text."""
        thought, begins = self._constraint.before, self._constraint.begins
        assert begins is not None
        self._tail += text
        # Bound: each round after the first removes the end of a thought from the text.
        while True:
            if self._in_thought and thought is not None:
                _, end, rest = self._tail.partition(thought.end)
                self._in_thought, self._tail = not end, rest if end else self._tail[-len(thought.end) :]
                if not end:
                    return ""
            match = begins.search(self._tail)
            opened = self._tail.find(thought.begin) if thought is not None and thought.begin is not None else -1
            if opened < 0 or (match and match.start() < opened):
                break
            self._in_thought, self._tail = True, self._tail[opened:]
        if match is None:
            self._tail = self._tail[-_MAX_BEGINNING:]
            return ""
        tag, rest, self._tail = match[0], self._tail[match.end() :], ""
        return f"{match.lastindex or tag}{rest}"

    def _begin_call(self, begun: str) -> Forbidden | None:
        try:
            self._matcher = self._beginning.matcher.deep_copy()
        except DiskPrefixError:
            # Without a grammar, calls are not constrained.
            return None
        return self._advance(*self._compiler.tokenizer.tokenize_bytes(begun.encode()))

    def _advance(self, *tokens: int) -> Forbidden | None:
        if not self._matcher.consume_tokens([*tokens]) or self._matcher.is_stopped():
            return None
        return forbidden_by(self._matcher, self._compiler.vocab_size)


class _FreeText:
    """The text before a constraint, up to the first occurrence of `end`."""

    def __init__(self, end: str) -> None:
        self._end = end.encode()
        self._tail = b""

    def rest_after(self, piece: bytes) -> bytes | None:
        """Adds a piece and returns None; if it completes `end`, adds nothing and returns the bytes after `end`."""
        text = self._tail + piece
        at = text.find(self._end)
        if at >= 0:
            return text[at + len(self._end) :]
        self._tail = text[max(0, len(text) - len(self._end) + 1) :]
        return None

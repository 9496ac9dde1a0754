"""Constrains replies: llguidance parses the tokens of a reply, and computes the mask of those that may follow.

A mask depends only on the tokens before it. A thread of the request computes it while the engine computes the logits
that it applies to. If the mask takes longer, the engine computes other replies: see `ConstrainedReply.is_ready`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from diskprefix.engine.constraint_grammar import explained, grammar_of, matcher_of
from diskprefix.engine.kept_schema import Loosened
from diskprefix.engine.request import Constraint, FreeText
from diskprefix.engine.trial import TokenizerText, Trials
from diskprefix.errors import InvalidRequest
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
Forbidden: TypeAlias = npt.NDArray[np.bool_]
"""A mask of shape [vocab_size], True for tokens that must not come next."""


class ConstraintCompiler:
    """Compiles constraints for the tokenizer of one model. For any thread."""

    def __init__(self, tokenizer: Any, eos: Collection[int], vocab_size: int) -> None:
        """Makes a compiler. `eos` are the tokens that end a reply. `vocab_size` is the number of logits."""
        self.vocab_size = vocab_size
        self._hf_tokenizer = tokenizer
        self.eos = eos
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """A function that is called on another thread when a mask is ready."""
        self._trials = Trials(self._tokenizer_text)

    @property
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer of llguidance, made at first use. Raises `InvalidRequest` if it cannot be made."""
        with self._lock:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                text, num_tokens, eos = self._tokenizer_text()
                try:
                    self._tokenizer = LLTokenizer(text, n_vocab=num_tokens, eos_token=eos)
                except Exception as error:  # llguidance raises ValueError, and tokenizers raises nothing narrower
                    message = f"this model's tokenizer cannot be used to constrain a reply: {first_line(error)}"
                    raise InvalidRequest(message, code="unsupported") from error
            return self._tokenizer

    def check(
        self,
        constraint: Constraint,
        *,
        param: str,
        parts: Mapping[str, str] = MappingProxyType({}),
        strict: Collection[str] = (),
    ) -> dict[str, Loosened]:
        """Tries a constraint. Returns what `Trials.run` returns, and raises its errors. Takes at most seconds, so it is
        not for the event loop."""
        # Raises if the tokenizer cannot be used. The process of the trials would only end.
        _ = self.tokenizer
        return self._trials.run(constraint, param, parts, strict)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Returns a matcher at its beginning. Raises `InvalidRequest` for a constraint that `check` refuses. One that
        `check` has not seen may take any time and memory."""
        matcher = matcher_of(self.tokenizer, grammar_of(constraint, "constraint"))
        if matcher.is_error():
            raise explained(constraint, "constraint", matcher.get_error())
        return matcher

    def close(self) -> None:
        self._trials.close()

    def begin_reply(self, constraint: Constraint) -> ConstrainedReply:
        """Returns the first reply to a request, at its beginning. Another thread compiles the constraint."""
        return ConstrainedReply(self, constraint, _Beginning(self, constraint))

    def tokens_of(self, tag: str) -> list[int]:
        """Returns the tokens of a tag; [] if the model has no logits for one of them."""
        tokens = self.tokenizer.tokenize_str(tag, parse_special=True)
        return tokens if max(tokens, default=0) < self.vocab_size else []

    def _tokenizer_text(self) -> TokenizerText:
        known = len(self._hf_tokenizer)
        backend = copy(self._hf_tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos = sorted(token for token in self.eos if token < known) or None
        return TokenizerText(backend.to_str(), max(known, self.vocab_size), eos)


class _Beginning:
    """The thread and the compiled constraint that the replies to one request share. The thread is theirs alone, so a
    grammar delays no other request. It ends with the last reference to this object."""

    def __init__(self, compiler: ConstraintCompiler, constraint: Constraint) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self.matcher: Future[LLMatcher] = self._thread.submit(compiler.matcher, constraint)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on the thread, after all work that was submitted before."""
        future = self._thread.submit(work)
        on_ready = self._compiler.on_ready
        future.add_done_callback(lambda _: on_ready())
        return future


class ConstrainedReply:
    """A reply under a constraint. For each token, call `forbidden`, then `accept` with the chosen token. Both wait
    until `is_ready`. Both raise `InvalidRequest` for a constraint that does not compile or becomes too complex."""

    def __init__(self, compiler: ConstraintCompiler, constraint: Constraint, beginning: _Beginning) -> None:
        self._compiler = compiler
        self._constraint = constraint
        self._beginning = beginning
        self._matcher: LLMatcher
        """The matcher, set by the first task. Only one thread uses it at a time: each waits for the one before."""
        self._before = constraint.before
        self._free: _FreeText | None = None
        """The free text, while the reply is in it."""
        self._opening: list[int] = []
        """The remaining tokens that open free text, while they may come."""
        self._may_be_text = True
        """True if the tokens of the opening so far may begin the constrained text too."""
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
        """True if `forbidden` and `accept` return at once. `ConstraintCompiler.on_ready` tells when."""
        return self._next.done()

    @property
    def is_free(self) -> bool:
        """True in the free text before the constrained one."""
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

    def accept(self, token: int) -> bool:
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
        """Moves past a token of the opening. Until the opening is complete, the constrained text may continue too."""
        del self._opening[0]
        if self._opening:
            self._may_be_text = self._may_be_text and self._matcher.try_consume_tokens([token]) == 1
        else:
            self._matcher.reset()
            self._free, self._may_be_text = _FreeText(before.end), True
        self._next = self._beginning.submit(self._mask)

    def _accept_free(self, free: _FreeText, token: int) -> bool:
        tokenizer = self._compiler.tokenizer
        rest = free.rest_behind(tokenizer.decode_bytes([token]))
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
        # A text that could only end, or continue as an opening, ends.
        has_ended = self._matcher.is_stopped() and not self._matcher.is_error()
        if not has_ended and not self._matcher.consume_tokens(tokens):
            reason = self._matcher.get_error().partition("\n")[0]
            message = f"the reply cannot be constrained any further: {reason}"
            raise InvalidRequest(message, code="constraint_too_complex")
        self.is_complete = self._matcher.is_stopped()
        if not self.is_complete:
            self._next = self._beginning.submit(self._mask)

    def _start(self) -> Forbidden:
        # The copy shares what is computed of the constraint.
        self._matcher = self._beginning.matcher.result().deep_copy()
        if self._before is not None and self._before.begin is not None:
            self._opening = self._compiler.tokens_of(self._before.begin)
        return self._mask()

    def _mask(self) -> Forbidden:
        if not self._may_be_text:
            return np.ones(self._compiler.vocab_size, np.bool_)
        return forbidden_by(self._matcher, self._compiler.vocab_size)


def forbidden_by(matcher: LLMatcher, vocab_size: int) -> Forbidden:
    """Returns the mask of the next token. If it is too complex to compute, only the end may come, and the matcher
    refuses that."""
    allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(~allowed, count=vocab_size, bitorder="little").view(np.bool_)


class _FreeText:
    """The text before a constraint, up to the first occurrence of `end`."""

    def __init__(self, end: str) -> None:
        self._end = end.encode()
        self._tail = b""

    def rest_behind(self, piece: bytes) -> bytes | None:
        """Adds a piece and returns None; if it completes `end`, adds nothing and returns the bytes after `end`."""
        text = self._tail + piece
        at = text.find(self._end)
        if at >= 0:
            return text[at + len(self._end) :]
        self._tail = text[max(0, len(text) - len(self._end) + 1) :]
        return None

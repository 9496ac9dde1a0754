"""The engine: one model, its KV memory and its prefix cache; one request from token ids to a stream of tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diskprefix.cache_report import CacheReport
from diskprefix.engine.detokenize import TextStream
from diskprefix.engine.device import is_device_lost
from diskprefix.engine.prefill import Cancelled, State, prefill
from diskprefix.engine.request import (
    DoneEvent,
    Event,
    FinishEvent,
    FinishReason,
    GenerateRequest,
    TextEvent,
    Timings,
    TokenLogprob,
    Usage,
)
from diskprefix.engine.sampler import Sampler
from diskprefix.errors import ContextTooLong, DiskPrefixError, InvalidRequest, ModelError
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.kv.uncached import TransformersState, forget_media
from diskprefix.model.invariant import as_it_was
from diskprefix.model.loader import LoadedModel
from diskprefix.model.memory import available_bytes, kv_bytes
from diskprefix.prefix_cache.cache import PrefixCache
from diskprefix.prefix_cache.recording import Recorder
from diskprefix.prefix_cache.request import CachedRequest
from diskprefix.printable import first_line
from diskprefix.tokens import as_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")

_UNLIMITED_POSITIONS = 1 << 20
"""For models whose config names no maximum (recurrent ones)."""
_TOUCHED_AT_START_BYTES = 1 << 30
"""KV memory that is allocated and touched before the first request: fresh pages would slow down its restore."""
_FLUSH_TIMEOUT_S = 30.0


class Engine:
    """Runs requests one at a time on the thread that calls `run`."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: PrefixCache,
        *,
        recorder: Recorder | None = None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        """Allocates the KV memory. The engine closes `cache` and `recorder`.

        `identity` holds the fingerprint's fields, for `/props`. Raises `ModelError` for a model that transformers
        cannot run step by step, and whatever torch raises when memory runs out.
        """
        self.model: PreTrainedModel = loaded.model
        self.tokenizer: Any = loaded.tokenizer
        self.media = loaded.media
        """The processor of images and sounds, None for a model of text alone."""
        self.model_name = loaded.name
        self.cache = cache
        self.recorder = recorder
        self.identity = identity or {}
        self.max_positions = _max_positions(self.model)
        self.startup_timings: dict[str, float] = {}
        """Seconds by step of loading."""
        self._eos = _eos_ids(self.model, self.tokenizer)
        layout = cache.layout
        self._state: State = self._uncached_state(layout) if layout.unsupported else self._arena(layout)

    def warm_up(self) -> None:
        """Runs the code of a restore once, so that the first request does not wait for it."""
        if isinstance(self._state, KVArena):
            self.cache.warm_up(self._state)

    def run(
        self,
        request: GenerateRequest,
        emit: Callable[[Event], None],
        is_cancelled: Callable[[], bool],
        arrived_at: float,
    ) -> None:
        """Runs one request to its end and emits its events. `arrived_at` is on the clock of `time.perf_counter`.

        Raises `InvalidRequest` for an empty prompt, `ContextTooLong` for one that exceeds the positions or the memory,
        or `Cancelled` within one step of `is_cancelled()` turning true.
        """
        self._check_length(request)
        run = _Run(request, arrived_at, started=time.perf_counter())
        cached = self.cache.begin(request.prompt, request.cache)
        try:
            with torch.inference_mode(), self._state_for(request):
                logits = self._prefill(run, cached, is_cancelled)
                for choice in range(request.sampling.n):
                    self._decode(run, choice, logits, emit, is_cancelled, cached if choice == 0 else None)
        finally:
            report = cached.close()
            if self.recorder is not None:
                self._record(self.recorder, run, cached, report)
        emit(DoneEvent(run.usage(report.restored), report, run.timings(cached)))

    def close(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> bool:
        """Flushes and closes the cache. Returns False if unsaved state was lost to the time limit."""
        if self.recorder is not None:
            self.recorder.close()
        return self.cache.close(timeout_s)

    def _record(self, recorder: Recorder, run: _Run, cached: CachedRequest, report: CacheReport) -> None:
        # Of a prompt without media, by a model of which nothing can be published.
        is_supported, media = isinstance(self._state, KVArena), run.request.prompt.media
        is_computed_uncached = run.num_generated > 0 and not is_supported and not media
        recorder.note(
            run.request.prompt,
            run.request.cache,
            report,
            root=cached.namespace.root,
            when=time.time() - (time.perf_counter() - run.arrived_at),
            output_tokens=run.num_generated,
            prefill_ms=run.prefill_s * 1e3,
            remembered=cached.is_published or is_computed_uncached,
        )

    def _arena(self, layout: Layout) -> KVArena:
        device = self.model.device
        arena = KVArena(layout, device, partial(kv_bytes, device))
        affordable = min(_TOUCHED_AT_START_BYTES, available_bytes(device) // 4)
        try:
            arena.reserve(min(self.max_positions, affordable // max(layout.bytes_per_token, 1)))
        except ContextTooLong as error:
            # Only a head start: a request takes what it needs.
            log.info("[engine] no KV memory taken ahead: %s", error)
        return arena

    def _uncached_state(self, layout: Layout) -> TransformersState:
        """Raises `ModelError` if transformers cannot run this model step by step at all."""
        log.warning("[disk-cache] bypassed: this model is not supported yet (%s)", ", ".join(layout.unsupported))
        state = TransformersState(self.model)
        try:
            with torch.inference_mode():
                for num_tokens in (2, 1):
                    state.forward(self.model, torch.zeros((1, num_tokens), dtype=torch.long, device=self.model.device))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"transformers cannot run {type(self.model).__name__} step by step: {first_line(error)}"
            ) from error
        return state

    @contextmanager
    def _state_for(self, request: GenerateRequest) -> Iterator[None]:
        """For a prompt with media, transformers' own state in the place of the engine's, which stays as it is."""
        if not request.prompt.media:
            yield
            return
        log.info("[disk-cache] %s: bypassed, the prompt holds media (%s)", request.id, ", ".join(request.prompt.media))
        own = self._state
        try:
            self._state = TransformersState(self.model, request.prompt.media)
            with as_it_was(self.model):
                yield
        finally:
            self._state = own
            forget_media(self.model)

    def _check_length(self, request: GenerateRequest) -> None:
        num_tokens = len(request.prompt.token_ids)
        if not num_tokens:
            raise InvalidRequest("the prompt is empty")
        if num_tokens >= self.max_positions:
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens; this model has {self.max_positions} positions, "
                "and at least one must be left for the reply"
            )

    def _prefill(self, run: _Run, cached: CachedRequest, is_cancelled: Callable[[], bool]) -> torch.Tensor:
        """Restores what is stored and computes the rest. Returns the next-token logits."""
        token_ids, state = run.request.prompt.token_ids, self._state
        logits, start = None, 0
        if isinstance(state, KVArena):
            state.settle(drop=True)
        state.truncate(0)
        state.reserve(len(token_ids))
        if isinstance(state, KVArena):
            restored = cached.restore(state)
            logits, start = restored.logits, restored.num_tokens
        started = time.perf_counter()
        if logits is None:
            with _naming_media(run.request):
                logits = prefill(
                    self.model,
                    state,
                    token_ids,
                    start=start,
                    block_size=self.cache.settings.block_size,
                    is_cancelled=is_cancelled,
                    after_step=cached.after_step,
                )
        run.prefill_s = time.perf_counter() - started
        if run.request.sampling.n > 1:
            state.mark()
        return logits

    def _decode(
        self,
        run: _Run,
        choice: int,
        logits: torch.Tensor,
        emit: Callable[[Event], None],
        is_cancelled: Callable[[], bool],
        cached: CachedRequest | None,
    ) -> None:
        """Decodes one choice. The prompt's state is published after the first token: saving delays the client less."""
        sampling, prompt = run.request.sampling, run.request.prompt.token_ids
        reply: list[int] = []
        sampler = Sampler(sampling, prompt, self.model.device, choice)
        text = TextStream(self.tokenizer, sampling.stop)
        limit = self._reply_limit(run.request)
        prompt_logits = logits
        if choice > 0:
            if isinstance(self._state, KVArena):
                # What is captured of the first choice is overwritten now.
                self._state.settle(drop=True)
            self._state.rewind()
        for step in range(1, limit + 1):
            if is_cancelled():
                raise Cancelled
            token = sampler.sample(logits)
            run.count_token()
            reason = self._emit_token(choice, token, sampler.logprobs(logits, token), text, step == limit, emit)
            if cached is not None and step == 1 and isinstance(self._state, KVArena):
                cached.publish(self._state, prompt_logits, run.prefill_s)
            if reason is not None:
                if cached is not None and isinstance(self._state, KVArena):
                    cached.publish_reply(self._state, np.concatenate([prompt, as_token_ids(reply)]))
                emit(FinishEvent(choice, reason))
                return
            self._state.reserve(len(prompt) + step)
            logits = self._state.forward(self.model, torch.tensor([[token]], device=self.model.device))
            reply.append(token)
            if cached is not None and isinstance(self._state, KVArena):
                cached.after_decode(self._state)

    def _emit_token(
        self,
        choice: int,
        token: int,
        logprobs: tuple[TokenLogprob, ...],
        text: TextStream,
        is_last: bool,
        emit: Callable[[Event], None],
    ) -> FinishReason | None:
        """Emits one token's text. Returns why the reply ends with it, if it does."""
        if token in self._eos:
            emit(TextEvent(choice, text.finish(), (token,)))
            return "stop"
        new_text = text.push(token)
        reason: FinishReason | None = "stop" if text.stopped else "length" if is_last else None
        if reason == "length":
            new_text += text.finish()
        emit(TextEvent(choice, new_text, (token,), tuple(self._with_text(item) for item in logprobs)))
        return reason

    def _with_text(self, item: TokenLogprob) -> TokenLogprob:
        text = self.tokenizer.decode([item.token_id])
        return replace(item, text=text, top=tuple(self._with_text(other) for other in item.top))

    def _reply_limit(self, request: GenerateRequest) -> int:
        room = self.max_positions - len(request.prompt.token_ids)
        return room if request.sampling.max_tokens is None else min(request.sampling.max_tokens, room)


@dataclass
class _Run:
    """What is measured of one request; times in seconds on the clock of `time.perf_counter`."""

    request: GenerateRequest
    arrived_at: float
    started: float
    prefill_s: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_generated: int = 0

    def count_token(self) -> None:
        self.last_token_at = time.perf_counter()
        if not self.num_generated:
            self.first_token_at = self.last_token_at
        self.num_generated += 1

    def usage(self, cached_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt.token_ids),
            completion_tokens=self.num_generated,
            cached_tokens=cached_tokens,
        )

    def timings(self, cached: CachedRequest) -> Timings:
        decode_s = self.last_token_at - self.first_token_at
        return Timings(
            queue_ms=(self.started - self.arrived_at) * 1e3,
            lookup_ms=cached.restored.lookup_ms,
            restore_ms=cached.restored.restore_ms,
            prefill_ms=self.prefill_s * 1e3,
            ttft_ms=(self.first_token_at - self.arrived_at) * 1e3,
            decode_ms=decode_s * 1e3,
            decode_tokens_per_s=(self.num_generated - 1) / decode_s if decode_s > 0 else 0.0,
        )


@contextmanager
def _naming_media(request: GenerateRequest) -> Iterator[None]:
    """Turns what a model's own code raises over images and sounds into an `InvalidRequest` that names them."""
    try:
        yield
    except (DiskPrefixError, Cancelled):
        raise
    except Exception as error:
        if not request.prompt.media or is_out_of_memory(error) or is_device_lost(error):
            raise
        log.warning("[engine] %s: the model's own code fails over its media: %s", request.id, first_line(error))
        raise InvalidRequest(
            f"messages: the model's own code fails over these images or sounds: {first_line(error)}",
            param="messages",
            code="unsupported_content",
        ) from error


def _max_positions(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or _UNLIMITED_POSITIONS


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in (*listed, tokenizer.eos_token_id) if i is not None)

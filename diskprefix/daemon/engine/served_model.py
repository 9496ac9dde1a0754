"""A model with the parts that its requests share: the memory of sequences, the prefix cache, and the limits of a
request."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from diskprefix.daemon.engine.constraints.constrained_reply import ConstraintCompiler
from diskprefix.daemon.engine.detokenize import TextStream, special_tokens
from diskprefix.daemon.engine.gauges import EngineFigures
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJobs
from diskprefix.daemon.engine.pictures.prompt_pictures import PromptPictures
from diskprefix.daemon.engine.pools import EnginePools
from diskprefix.daemon.engine.request import GenerateRequest
from diskprefix.daemon.engine.running_request import Reply, RunningRequest
from diskprefix.daemon.engine.scheduler import MAX_ROWS, Chunk, Pace
from diskprefix.daemon.engine.speculation.choose_drafts import Speculation
from diskprefix.daemon.engine.speculation.draft_model import DraftModel
from diskprefix.daemon.engine.speculation.drafting import ChainProposer
from diskprefix.daemon.engine.speculation.guesser import Guesser
from diskprefix.daemon.engine.speculation.layer_proposer import LayerProposer
from diskprefix.daemon.engine.speculation.model_proposer import ModelProposer
from diskprefix.daemon.engine.speculation.ngram import NgramProposer
from diskprefix.daemon.engine.speculation.step_times import StepTimes
from diskprefix.daemon.engine.stay import Stay
from diskprefix.daemon.settings import Settings
from diskprefix.errors import CacheError, ContextTooLong, InvalidRequest, ModelError, NotReady, SettingsError
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.cached_request import save_idle
from diskprefix.prefixstore.cache.encoded_pictures import EncodedPictures
from diskprefix.prefixstore.kv.kept_blocks import KeptBlock
from diskprefix.prefixstore.kv.layout import Layout, is_out_of_memory
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.recording.recording import RequestRecorder
from diskprefix.printable import first_line
from diskprefix.runtime.choose_runtime import LoadedDraft
from diskprefix.runtime.contract import Rows, Runtime
from diskprefix.runtime.fetch.recommended_sampling import recommended_stop
from diskprefix.runtime.load.loader import LoadedModel
from diskprefix.runtime.memory import kv_bytes, trim_heap
from diskprefix.runtime.plan.families.decoder_options import pictures_problem
from diskprefix.units import counted, format_size
from diskprefix.values import CacheReport

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from diskprefix.runtime.pictures.vision_encoder import VisionEncoder

log = logging.getLogger("diskprefix")

_UNLIMITED_POSITIONS = 1 << 20
"""The number of positions of models whose config has no limit (recurrent models)."""
_AHEAD_BYTES = 1 << 30
"""The most KV memory that is allocated and touched before the first request, because fresh pages would slow down its
restore. More memory would slow it down too: a huge page then holds few tokens of a head, and a restore touches more
memory than it fills."""
_TURN_TOKENS = 2048
"""Memory is allocated ahead for the longest saved prompt (among 1 000, of any model) and a turn of this many tokens
after it."""
_FLUSH_TIMEOUT_S = 30.0
_SAVE_IDLE_S = 20.0
_LAST_SAVE_S = 5.0


class ServedModel:
    """A model, its KV memory and its cache, and the limits of a request."""

    def __init__(
        self,
        loaded: LoadedModel,
        runtime: Runtime,
        cache: PrefixCache,
        settings: Settings,
        *,
        recorder: RequestRecorder | None = None,
        identity: dict[str, Any] | None = None,
        draft: LoadedDraft | None = None,
    ) -> None:
        """Allocates KV memory. `close` closes `cache` and `recorder`. `identity` holds the fields of the fingerprint,
        for `/props`. Raises `ModelError` for a model that cannot be run step by step, `SettingsError` if KV
        memory has no room for a block, and the errors of torch when memory runs out."""
        self.runtime, self.settings = runtime, settings
        self.config, self.dtype, self.device = loaded.config, loaded.dtype, loaded.device
        self.tokenizer: Any = loaded.tokenizer
        self.processor = loaded.processor
        """The processor of images; None for a text-only model."""
        self._read_encoder, self._reading_encoder = loaded.encoder, threading.Lock()
        self.model_name = loaded.name
        self.origin = loaded.origin
        """The folder or the `.gguf` file of the model. Extras read its small files."""
        self.cache = cache
        self._check_pictures()
        self.figures, self.recorder, self._identity = EngineFigures(), recorder, identity or {}
        self.max_sequences = settings.max_sequences
        self.packs = cache.layout.packs
        """True if one step can compute several sequences."""
        self.max_rows = MAX_ROWS
        """The maximum number of rows of a step."""
        self.pace, self.clock = Pace(), time.perf_counter
        """The clock that measures steps."""
        self.fit, self._finish_load = loaded.fit, loaded.finish
        self._models = (loaded,) if draft is None else (loaded, draft.loaded)
        self.in_memory = loaded.in_memory
        """A future that is done once all weights are in memory. No step is computed before."""
        self._kv_limit = self._share_kv_memory(draft)
        self.pages = self._make_pages(cache, None if draft is None else draft.cache.layout)
        self.model_positions = self._limit_positions()
        """The number of positions of the model, or fewer with --context."""
        self.max_positions = self._fit_positions()
        """The length in tokens of the longest sequence that is served. The positions of the model and the room in KV
        memory limit it."""
        self.ahead = self._make_ahead()
        self.draft = None if draft is None else self._make_draft(draft)
        self.speculation = self._make_speculation()
        self.startup_timings: dict[str, float] = {}
        """The seconds of each step of loading."""
        self.end_ids = _end_ids(loaded.stops, recommended_stop(settings, loaded.origin), self.tokenizer)
        """The tokens that end a reply."""
        self.suppressed = np.array(sorted({*loaded.suppressed} & {*range(runtime.vocab_size)}), np.int64)
        """The tokens of the vocabulary that never come in a reply."""
        self._special_tokens = special_tokens(self.tokenizer)
        self.constraints = ConstraintCompiler(self.tokenizer, self.end_ids, runtime.vocab_size)
        self.pools = EnginePools(self.max_sequences)
        self._log_limit()
        if cache.layout.unsupported:
            self._require_uncached()
        else:
            self._touch_memory()

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of the fingerprint and the root, for people."""
        return {**self._identity, "root": self.cache.root.hex()}

    def warm_up(self) -> None:
        """Prepares the runtime for steps, and runs the code of a restore once. Both make the first request faster."""
        if self.cache.layout.unsupported:
            return
        self.runtime.prepare()
        try:
            sequence = self.pages.begin_sequence(None, np.zeros(self.cache.settings.block_size, np.int32))
            assert isinstance(sequence, KVSequence), "no other sequence has memory yet"
            with Stay(self.pages, sequence):
                for group in range(len(self.cache.layout.groups)):
                    sequence.prepare_restore(group, 0, self.cache.settings.block_size)
                self.cache.warm_up(sequence)
        except (ContextTooLong, NotReady, MemoryError) as error:
            log.warning("[engine] there is no memory for any request: %s", error)

    def keep_weights(self) -> Iterator[None]:
        """Writes packed weights for later starts, a piece at a time. For after `in_memory`."""
        for model in self._models:
            yield from model.keep_weights()

    def finish_load(self) -> None:
        """Waits until all weights are in memory. Raises the errors of `begin_load`."""
        self._finish_load()
        trim_heap()

    def on_request(self) -> None:
        """Stops work done ahead of requests, because a request has come. For any thread."""
        self.pages.stop_populating()
        self.ahead.pause()
        if self.draft is not None:
            self.draft.pages.stop_populating()

    def drop_gone(self) -> None:
        """Drops kept state that has expired or was purged. For the engine's thread."""
        for cache, pages in self._caches():
            pages.forget_expired(cache.epochs.purges)

    def expires_in_s(self) -> float | None:
        """Returns the seconds until `drop_gone` has something to drop, None if nothing expires."""
        expires_at = min(pages.kept.expires_at for _, pages in self._caches())
        return None if expires_at == math.inf else max(0.0, expires_at - time.monotonic())

    def save_idle(self, timeout_s: float = _SAVE_IDLE_S) -> None:
        """Queues for saving the state of ended sequences that only memory has, the latest first, for at most
        `timeout_s` seconds. Leaves out state that has expired or was purged. The engine's thread must have ended. Does
        not wait for a disk that does not answer."""
        if self.cache.store.reads.stalled is None:
            saving = self.pools.idle.submit(self._save_all_idle, timeout_s)
            if wait([saving], timeout_s + _LAST_SAVE_S).not_done and not saving.cancel():
                log.warning("[disk-cache] the disk does not answer: not all conversations in memory were saved")

    def _save_all_idle(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for cache, _ in self._caches():
            cache.namespaces.forget_deleted()
        self.drop_gone()
        ended = [(cache, pages, block) for cache, pages in self._caches() for block in pages.kept.sequence_ends()]
        for number, (cache, pages, block) in enumerate(ended):
            if time.monotonic() > deadline:
                log.warning("[disk-cache] %d conversations in memory were not saved in time", len(ended) - number)
                return
            try:
                _save_idle(cache, pages, block)
            except Exception:
                # The next turn of this conversation computes the state again. The other conversations must still be
                # saved, and the cache closed.
                log.exception("[disk-cache] a conversation that only memory had was not saved")

    def _caches(self) -> list[tuple[PrefixCache, PageCache]]:
        """Returns the caches on disk and in memory of the model and of the draft model."""
        return [(self.cache, self.pages), *([] if self.draft is None else [(self.draft.cache, self.draft.pages)])]

    def close(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> bool:
        """Flushes and closes the cache. Returns False if unsaved state was lost to the time limit."""
        self.constraints.close()
        self.pools.close()
        if self.recorder is not None:
            self.recorder.close()
        return self.cache.close(timeout_s)

    def check_length(self, request: GenerateRequest) -> None:
        """Raises `InvalidRequest` for an empty prompt, and `ContextTooLong` for a prompt that leaves no position for a
        reply."""
        num_tokens = len(request.prompt.token_ids)
        if not num_tokens:
            raise InvalidRequest("the prompt is empty")
        if num_tokens >= self.max_positions:
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens, of {self.max_positions}, {self.positions_limit} for prompt and "
                "reply together"
            )

    def _limit_positions(self) -> int:
        """Returns the number of positions of the model, or fewer with --context."""
        context, has = self.settings.context, _max_positions(self.config)
        if context is not None and context > has:
            log.warning("[engine] --context %d is more than the %d tokens that this model takes", context, has)
        return has if context is None else min(context, has)

    def _fit_positions(self) -> int:
        """Returns the length in tokens of the longest sequence for which there is memory. Raises `SettingsError` if
        there is none for a block."""
        if self.cache.layout.unsupported:
            longest = min(self.fit.context, self.model_positions)
        else:
            longest = min(self.pages.longest(self.model_positions), self.model_positions)
        pool = self.pages.pool
        if longest < min(pool.block_size, self.model_positions):
            num_tokens = min(_TURN_TOKENS, self.model_positions)
            raise SettingsError(
                f"--kv-memory: {format_size(pool.limit_bytes)} has no room for a block of {pool.block_size} tokens; "
                f"a context of {num_tokens:,} tokens takes {format_size(pool.sequence_bytes(num_tokens))}"
            )
        return longest

    def _log_limit(self) -> None:
        """Logs it if memory limits the length of a sequence."""
        if (length := self.max_positions) < self.model_positions:
            log.info("[engine] the context is %d of %d tokens, %s", length, self.model_positions, self.positions_limit)

    @property
    def positions_limit(self) -> str:
        """A text for errors that gives the reason for `max_positions`."""
        if self.max_positions == self.model_positions:
            is_limited = self.model_positions < _max_positions(self.config)
            return "as --context says" if is_limited else "the context of this model"
        beside = "" if self.draft is None else " beside the draft model's"
        return f"the room in KV memory ({format_size(self.pages.pool.limit_bytes)}{beside}, see --kv-memory)"

    def reply_limit(self, request: GenerateRequest) -> int:
        """Returns the maximum number of tokens of a reply."""
        room = self.max_positions - len(request.prompt.token_ids)
        return room if request.sampling.max_tokens is None else min(request.sampling.max_tokens, room)

    def text_stream(self, request: GenerateRequest) -> TextStream:
        """Returns the text stream of one reply to a request."""
        special = self._special_tokens.items()
        hidden = {token for text, token in special if text not in request.shown_special_tokens}
        hidden |= self.end_ids.difference(token for _, token in special)
        return TextStream(self.tokenizer, request.sampling.stop or (), hidden, self.end_ids)

    def guesser(self, request: GenerateRequest) -> Guesser:
        """Returns the guesser of one reply to a request."""
        if request.reading is not None:
            return Guesser()
        longest = len(request.prompt.token_ids) + self.reply_limit(request) - 1
        return self.speculation.guesser(longest, self._never_guessed)

    @cached_property
    def _never_guessed(self) -> frozenset[int]:
        return frozenset(self.suppressed.tolist())

    def pictures_of(self, request: GenerateRequest) -> PromptPictures | None:
        """Returns the pictures of a prompt, None if it has none. Raises `InvalidRequest` if the model takes text
        only."""
        if not request.prompt.pictures:
            return None
        if self.processor is None or self.processor.problem is not None:
            raise InvalidRequest("this model takes text only", code="unsupported_content")
        return PromptPictures.of(request.prompt, self.encoder, request.patience)

    def memory_stats(self) -> dict[str, int]:
        """Returns `PageCache.stats`. The limit and the used bytes include the draft model's pages."""
        stats = self.pages.stats()
        if self.draft is not None:
            others = self.draft.pages.stats()
            stats |= {name: stats[name] + others[name] for name in ("limit_bytes", "used_bytes")}
        return stats

    def check_memory(self) -> list[str]:
        """Returns the faults in the pages of the model and of the draft model, and logs them. For any thread: each
        change of pages is complete when the lock of the pages is released."""
        wrong: list[str] = []
        for _, pages in self._caches():
            faults, stats = pages.check(), pages.stats()
            level, verdict = (logging.ERROR, "; ".join(faults)) if faults else (logging.INFO, "all counts right")
            kept = stats["kept_bytes"]
            used = f"{format_size(stats['used_bytes'] - kept)} in use by {counted(stats['running'], 'sequence')}"
            log.log(level, "[engine] KV pages: %s, %s kept, %s", used, format_size(kept), verdict)
            wrong += faults
        return wrong

    def record_step(self, step: Sequence[Chunk[Reply]], seconds: float) -> None:
        """Records the time of a step, to plan the next ones."""
        num_rows = sum(chunk.num_rows for chunk in step)
        self.figures.record_step(num_rows, seconds)
        decoding = [chunk.sequence for chunk in step if chunk.sequence.packs and chunk.sequence.is_decoding]
        if step[0].sequence.packs:
            prompt_rows = sum(chunk.num_rows for chunk in step if not chunk.sequence.is_decoding)
            self.pace.record_step(len(decoding), prompt_rows, seconds)
        if len(decoding) == len(step):
            self.speculation.record_step(decoding, num_rows, sum(chunk.num_drafted for chunk in step), seconds)

    def record_request(self, running: RunningRequest, report: CacheReport) -> None:
        """Records an ended request if `--record` is on."""
        if self.recorder is None:
            return
        # A model whose state cannot be cached remembers a prompt once its reply has begun.
        is_uncached = self.cache.layout.unsupported
        self.recorder.record_request(
            running.request.prompt,
            running.request.cache,
            report,
            root=running.cached.namespace.root,
            when=time.time() - (time.perf_counter() - running.ticket.arrived_at),
            reply=running.cached.reply,
            prefill_ms=running.prefill_s * 1e3,
            remembered=bool(running.num_generated) if is_uncached else running.cached.is_published,
        )

    @cached_property
    def encoder(self) -> VisionEncoder:
        """The encoder of a model that takes pictures."""
        from diskprefix.runtime.pictures.vision_encoder import VisionEncoder

        processor, read = self.processor, self._read_encoder
        assert processor is not None, "a model of text gets no pictures"
        assert read is not None, "its processor has no problem"
        return VisionEncoder(read(), processor.token_id, is_exact=self.cache.layout.exact_at == "token")

    def read_encoder(self) -> None:
        """Reads the encoder, once. This may take seconds, and starts threads: call it before a request with pictures
        comes to the engine's thread. For any thread."""
        with self._reading_encoder:
            _ = self.encoder

    @cached_property
    def encoded(self) -> EncodedPictures:
        """The stored output of the encoder."""
        return EncodedPictures(self.cache, self.encoder.levels, self.encoder.hidden, self.encoder.dtype)

    def _check_pictures(self) -> None:
        """Sets the processor's problem if the model cannot take pictures with the layout of its state."""
        if self.processor is not None and self.processor.problem is None:
            self.processor.problem = pictures_problem(self.config, self.cache.layout)
            if self.processor.problem is not None:
                log.warning("this model is served for text only: %s", self.processor.problem)

    def _share_kv_memory(self, draft: LoadedDraft | None) -> int:
        """Returns the limit, in bytes, for the pages of the model and of the draft model."""
        if draft is None or self.settings.kv_memory is not None:
            return self.fit.kv_limit
        return min(self.fit.kv_limit, draft.loaded.fit.kv_limit)

    def _make_ahead(self) -> AheadJobs:
        cache = self.cache
        jobs = AheadJobs(0.0 if cache.layout.unsupported else self.settings.ahead_s)
        cache.on_forget.append(jobs.drop_gone)
        return jobs

    def _make_draft(self, draft: LoadedDraft) -> DraftModel:
        pages = self._make_pages(draft.cache, self.cache.layout)
        return DraftModel(draft.runtime, draft.cache, pages, _max_positions(draft.loaded.config), self.ahead)

    def _make_speculation(self) -> Speculation:
        """Makes the proposers. Raises `ModelError` if the settings ask for a draft layer that the model lacks."""
        wanted, has_layer = self.settings.speculative, self.cache.layout.has_draft_layer
        if wanted == "mtp" and not has_layer:
            raise ModelError(
                f"--speculative mtp: {self.model_name} has no draft layer that is used on {self.device}; "
                "choose auto, ngram or off"
            )
        times, clock = StepTimes(), lambda: self.clock()
        if wanted == "off" or not self.packs:
            if self.draft is not None or wanted in ("ngram", "mtp"):
                log.warning("[engine] nothing is guessed: with this model, guesses could change the reply")
            return Speculation(None, [], times, clock)
        chains: list[ChainProposer] = [] if self.draft is None else [ModelProposer(self.draft, times, clock)]
        if has_layer:
            chains.append(LayerProposer(self.runtime, times, clock))
        speculation = Speculation(None if wanted == "mtp" else NgramProposer(), chains, times, clock)
        log.debug(
            "[engine] speculative decoding: drafts from %s",
            ", ".join(proposer.what for proposer in speculation.proposers),
        )
        return speculation

    def _make_pages(self, cache: PrefixCache, beside: Layout | None) -> PageCache:
        """Makes the pages of a model. `beside` is the layout of another model that gets pages for the same number of
        tokens."""
        layout = cache.layout
        share = 1.0 if beside is None else layout.bytes_per_token / (layout.bytes_per_token + beside.bytes_per_token)
        return PageCache(
            layout,
            block_size=cache.settings.block_size,
            limit_bytes=int(share * self._kv_limit),
            free_bytes=kv_bytes,
            keeps=self.settings.kv_memory_keeps,
        )

    def _touch_memory(self) -> None:
        longest, store = 0, self.cache.store
        with suppress(CacheError):
            longest = store.reads.ask(store.longest_prompt)
        if not longest:
            # Nothing can be restored.
            return
        self.pages.make_ahead(_AHEAD_BYTES, min(longest + _TURN_TOKENS, self.max_positions))

    def _require_uncached(self) -> None:
        """Raises `ModelError` if this model cannot be run step by step."""
        reasons = ", ".join(self.cache.layout.unsupported)
        log.warning("[disk-cache] bypassed: this model is not supported yet (%s)", reasons)
        try:
            state = self.runtime.new_state()
            for num_tokens in (2, 1):
                self.runtime.run([Rows(state, np.zeros(num_tokens, np.int64))])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"a model of type {self.config.model_type} cannot be run step by step: {first_line(error)}"
            ) from error


def _save_idle(cache: PrefixCache, pages: PageCache, block: KeptBlock) -> None:
    """Queues the state of a sequence that has ended."""
    token_ids, sequence = pages.kept.token_ids_of(block), pages.resume(block)
    if token_ids is not None and sequence is not None:
        try:
            assert block.options is not None, "it is the end of a sequence"
            save_idle(cache, sequence, token_ids[: sequence.num_tokens], block.options, block.owner)
        finally:
            pages.end_sequence(sequence, keep=False)


def _max_positions(config: PreTrainedConfig) -> int:
    config = config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or _UNLIMITED_POSITIONS


_CALL_ENDS = ("<|call|>", "<|calls|>", "<|eom_id|>", "<|tool_response>")
"""The tokens that end a reply with calls in gpt-oss, Solar, Llama 3 and Gemma 4. Some models do not list them."""


def _end_ids(stops: Sequence[int], stop: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """Returns `stops` with the ids of the special tokens among the `stop` texts, which have no text in a reply."""
    added, special = tokenizer.get_added_vocab(), special_tokens(tokenizer)
    ends = (added.get(token) for token in _CALL_ENDS)
    of_texts = (special.get(text) for text in stop)
    return frozenset(i for i in (*stops, *ends, *of_texts, tokenizer.eos_token_id) if i is not None)

"""The library: a session around a transformers model with a prefix cache. diskprefix/README.md has an example.

Sessions on the same folder with the same weights find what another one saved, also in other processes. A session
identifies weights by their content in memory, the daemon by their files: they may share a folder but not prefixes.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from diskprefix.errors import CacheError, InvalidRequest, ModelError, StoreUnavailable
from diskprefix.folders import expanded
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.tiered_store import open_store
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION
from diskprefix.printable import printable_only
from diskprefix.runtime.grid.cache_argument import CACHE_ARGUMENTS, cache_argument, cache_in
from diskprefix.runtime.grid.grid_cache import filled
from diskprefix.runtime.grid.grid_runtime import GridRuntime
from diskprefix.runtime.grid.rehearsal import rehearse
from diskprefix.runtime.grid.state_layout import unsupported
from diskprefix.runtime.library.library_cache import StateSpaceCache
from diskprefix.runtime.library.library_model import Ids, in_main_memory, memory_digest, stamp, unpacked, with_prefill
from diskprefix.runtime.load.fingerprint import fingerprint_of_modules
from diskprefix.runtime.memory import kv_bytes
from diskprefix.runtime.prefill import prefill
from diskprefix.runtime.runtime_options import RuntimeOptions
from diskprefix.scope import parse_scope
from diskprefix.tokens import Logits, TokenIds, floor_to_grid, text_boundaries
from diskprefix.units import parse_size
from diskprefix.values import CacheOptions, CacheReport, Prompt

log = logging.getLogger("diskprefix")

_CLOSE_TIMEOUT_S = 30.0
_PREVIEW_TOKENS = 40
_REFUSED = (*CACHE_ARGUMENTS, "assistant_model", "custom_generate", "prompt_lookup_num_tokens")
_MOVED_INPUTS = frozenset({"position_ids"})
"""Inputs that `generate` makes itself. A caller may give other values."""
_OUR_INPUTS = frozenset({*CACHE_ARGUMENTS, "input_ids", "attention_mask", "position_ids", "logits_to_keep"})
"""The arguments of the first forward for a prompt of text. Any other argument may change the numbers."""


class PrefixCacheSession:
    """A transformers model with a prefix cache on disk. For one thread; close it, or use it as a context manager.

    The returned caches are transformers' own and hold copies, which stay usable when the session is used again or
    closed. `report` is the cache's report of the last call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        cache_dir: str | Path | None = None,
        scope: str | int | None = None,
        budget: int | str | None = None,
        settings: RuntimeOptions | None = None,
    ) -> None:
        """Opens the cache for `model` and reads all weights once.

        With a `tokenizer`, prompts may be text, and its special tokens are the boundaries at which they may be cut.
        `cache_dir` (default: `DISKPREFIX_KV_CACHE_DIR`, or the daemon's default folder), `scope` (`auto:30`, `full`, a
        number of tokens, `off`) and `budget` (of the folder, in bytes, or a text such as `4GiB`) override `settings`.

        Raises `SettingsError` or `InvalidScope` for a value out of its range, `InvalidRequest` if `model` is not a
        `PreTrainedModel`, and `CacheError` if the folder cannot be used, but not if it is full or read-only.
        """
        if not isinstance(model, PreTrainedModel):
            problem = f"{type(model).__name__} is not a PreTrainedModel; of a PeftModel give get_base_model()"
            raise InvalidRequest.at("model", problem)
        if cache_dir is None and settings is None:
            cache_dir = os.environ.get("DISKPREFIX_KV_CACHE_DIR") or None
        given: dict[str, Any] = {
            "kv_cache_dir": None if cache_dir is None else expanded(cache_dir),
            "disk_prefix_cache": None if scope is None else str(parse_scope(scope, param="scope")),
            "kv_cache_budget": None if budget is None else parse_size(budget, param="budget"),
        }
        changes = {name: value for name, value in given.items() if value is not None}
        self.model = model
        self.tokenizer = tokenizer
        self.settings = dataclasses.replace(settings or RuntimeOptions(), **changes)
        self.report: CacheReport | None = None
        self._options = CacheOptions(scope=parse_scope(self.settings.disk_prefix_cache, param="scope"))
        self._special_ids = _special_ids(tokenizer)
        self._refused = 0
        self._open()

    def prefill(self, input_ids: Ids) -> tuple[Any, int]:
        """Restores or computes a prompt's state up to the last grid point before its end, and saves it.

        Returns a new cache, to be passed to the model as `cache_argument`, and how many of its tokens were restored.
        `model.generate(input_ids, **{session.cache_argument: cache})` continues from there; at least one token is left.
        The cache is empty for a prompt of one block or less. It is None for a model that is not supported.

        Raises `InvalidRequest` if `input_ids` is not one prompt, `ContextTooLong` if there is too little memory,
        `NotReady` if the system refuses memory.
        """
        token_ids, inputs = unpacked(input_ids, self.tokenizer)
        self._check(inputs, len(token_ids))
        prompt = self._prompt(token_ids)
        if not self._is_supported():
            self._pass_by(prompt)
            return None, 0
        stop = floor_to_grid(len(prompt.token_ids) - 1, self.settings.block_size)
        config, argument = self.model.config, self.cache_argument
        has_rows = bool(self._cache.layout.groups)
        cache = DynamicCache(config=config) if has_rows else StateSpaceCache(config, stop, argument)
        if not stop:
            self.report = None
            return cache, 0
        with torch.no_grad(), self._sequence(stop) as sequence:
            self._complete(sequence, _beginning(prompt, stop), is_prefix_only=True)
            return filled(cache, sequence, self.model.device), self.report.restored if self.report else 0

    def generate(self, input_ids: Ids, **kwargs: Any) -> Any:
        """Runs `model.generate(input_ids, **kwargs)` with the prompt's state restored as far as it is stored.

        Takes the same arguments and returns the same values, for one sequence. The reply is the one that transformers
        gives with `prefill_chunk_size=block_size`. transformers alone answers for a model or an argument that is not
        supported, and the log says so.

        Raises `InvalidRequest` for a batch, beams, several return sequences or assisted decoding, `ContextTooLong` if
        there is too little memory, `NotReady` if the system refuses memory.
        """
        token_ids, inputs = unpacked(input_ids, self.tokenizer)
        inputs |= kwargs
        self._check(inputs, len(token_ids))
        ids = torch.from_numpy(token_ids).to(self.model.device, torch.long).unsqueeze(0)
        if "attention_mask" in inspect.signature(type(self.model).forward).parameters:
            # Without a mask, transformers would take a padding token in the prompt for padding.
            inputs["attention_mask"] = torch.ones_like(ids)
        prompt = self._prompt(token_ids)
        if not self._is_supported():
            self._pass_by(prompt)
            return self.model.generate(ids, **inputs)
        answer = partial(self._answer, prompt, inputs.keys() & _MOVED_INPUTS)
        return with_prefill(self.model, answer).generate(ids, **inputs)

    def save(self, timeout_s: float = 600.0) -> None:
        """Waits until all state to be saved is on the disk.

        Raises `StoreUnavailable` if the folder cannot be written or `timeout_s` passes, and `CacheError` if the store
        refused something since the last `save`; the log says why.
        """
        self._require_open()
        writer = self._cache.writer
        flushed = self._cache.finish_aside(timeout_s) and writer.flush(timeout_s)
        refused, self._refused = writer.dropped - self._refused, writer.dropped
        problem = self._cache.store.problem or self._cache.store.write_stall or writer.error
        if problem is not None:
            raise StoreUnavailable(problem)
        folder = self.settings.kv_cache_dir
        if not flushed:
            raise StoreUnavailable(f"{folder}: not saved within {timeout_s:.0f} s; call save() again")
        if refused:
            raise CacheError(f"{refused} prompts were not saved in {folder}: see the log, or raise the budget")

    def close(self) -> None:
        """Saves the remaining state and releases the folder."""
        self._finalizer()

    def __enter__(self) -> PrefixCacheSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cache_argument(self) -> str:
        """The name of the cache in the model's forward: `cache` since transformers 5.24, `past_key_values` or
        `cache_params` before. Raises `ModelError` if the forward takes no cache."""
        argument = cache_argument(type(self.model).forward)
        if argument is None:
            raise ModelError(f"{type(self.model).__name__} takes no cache")
        return argument

    def stats(self) -> dict[str, Any]:
        """Returns the counts of this session and the sizes of its store, as the daemon's `/props` shows them."""
        return self._cache.stats()

    def _open(self) -> None:
        store = open_store(self.settings)
        try:
            layout, digest = _identified(self.model)
            fingerprint = fingerprint_of_modules(self.model, digest, self.settings.fingerprint)
            identity = partial(fingerprint.identity, self.settings.block_size, LAYOUT_VERSION, layout.describe())
            self._pool = PagePool(layout, block_size=self.settings.block_size, free_bytes=kv_bytes)
            self._runtime = GridRuntime(self.model, layout)
            self._seen = self._model_state()
            name = _model_name(self.model)
            self._cache = PrefixCache(self.settings, store, layout, identity, name)
        except BaseException:
            store.close()
            raise
        self._refused = 0
        # Runs at the latest when the process ends. It must not keep the session alive.
        self._finalizer = weakref.finalize(self, self._cache.close, _CLOSE_TIMEOUT_S)

    def _model_state(self) -> tuple[object, ...]:
        """Returns values that change with the model's numbers. Does not read the weights."""
        return self.model.training, stamp(self.model), fingerprint_of_modules(self.model, "")

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreUnavailable("the session is closed; make a new one")

    def _is_supported(self) -> bool:
        """Returns whether the state of the model as it is now can be cached."""
        self._require_open()
        if self._model_state() != self._seen:
            log.info("[disk-cache] the model was changed; what was saved before is not used for it")
            self._finalizer()
            self._open()
        return not self._cache.layout.unsupported

    @contextmanager
    def _sequence(self, num_tokens: int) -> Iterator[KVSequence]:
        """Yields an empty sequence with room for a prompt. Raises `ContextTooLong`, `NotReady`."""
        with closing(KVSequence(self._pool)) as sequence:
            sequence.reserve(num_tokens)
            yield sequence

    def _pass_by(self, prompt: Prompt) -> None:
        reasons = ", ".join(self._cache.layout.unsupported)
        log.warning("[disk-cache] bypassed: this model is not supported yet (%s)", reasons)
        self.report = CachedRequest(self._cache, prompt, self._options).close()

    def _complete(self, sequence: KVSequence, prompt: Prompt, *, is_prefix_only: bool = False) -> Logits | None:
        """Restores, computes and publishes the whole prompt. Returns the next-token logits, shape [vocab], or None if
        they are not needed (`is_prefix_only`) and were not computed."""
        cached = CachedRequest(self._cache, prompt, self._options, is_prefix_only=is_prefix_only)
        try:
            restored = cached.restore(sequence)
            logits, started = restored.logits, time.perf_counter()
            if logits is None and restored.num_tokens < len(prompt.token_ids):
                logits = prefill(
                    self._runtime,
                    sequence,
                    prompt.token_ids,
                    start=restored.num_tokens,
                    block_size=self.settings.block_size,
                    after_step=cached.after_step,
                )
            cached.publish(sequence, logits, time.perf_counter() - started)
        finally:
            self.report = cached.close()
        return logits

    def _answer(self, prompt: Prompt, moved: set[str], inputs: Mapping[str, Any]) -> ModelOutput | None:
        """Returns the output of the first forward in `generate`; None if the model must compute it itself."""
        input_ids = inputs["input_ids"]
        if input_ids is None or input_ids.shape[-1] != len(prompt.token_ids):
            raise InvalidRequest("generate: a session computes the whole prompt itself; use model.generate instead")
        if input_ids.shape[0] != 1:
            raise InvalidRequest("generate: one sequence at a time; num_beams and num_return_sequences must be 1")
        argument = cache_in(inputs)
        foreign = sorted(moved | _foreign(inputs, argument))
        if foreign or argument is None:
            log.warning("[disk-cache] bypassed: generate was given %s", ", ".join(foreign))
            self.report = None
            return None
        with self._sequence(len(prompt.token_ids)) as sequence:
            logits = self._complete(sequence, prompt)
            assert logits is not None, "a prompt that does not go on has next-token logits"
            cache = filled(inputs[argument], sequence, self.model.device)
        last = torch.from_numpy(logits)[None, None].to(
            self.model.device, getattr(torch, self._cache.layout.logits_dtype)
        )
        return ModelOutput({"logits": last, argument: cache})

    @staticmethod
    def _check(inputs: Mapping[str, Any], num_tokens: int) -> None:
        for name in _REFUSED:
            if inputs.get(name) is not None:
                raise InvalidRequest.at(name, "a session cannot take it; use model.generate")
        for name in ("num_beams", "num_return_sequences"):
            if (inputs.get(name) or 1) != 1:
                raise InvalidRequest.at(name, "a session answers with one sequence; use model.generate")
        mask = inputs.get("attention_mask")
        if mask is not None and not np.array_equal(in_main_memory(mask).reshape(-1), np.ones(num_tokens)):
            raise InvalidRequest.at("attention_mask", "a session takes one prompt without padding")

    def _prompt(self, token_ids: TokenIds) -> Prompt:
        """Returns the prompt with its special tokens as boundaries. If only its first tokens are special, it has no
        boundaries."""
        beginning = token_ids[:_PREVIEW_TOKENS].tolist()
        text = "" if self.tokenizer is None else str(self.tokenizer.decode(beginning))
        bos_id = getattr(self.tokenizer, "bos_token_id", None)
        boundaries = text_boundaries(token_ids, (0, 0), self._special_ids, bos_id)
        return Prompt(token_ids=token_ids, boundaries=boundaries, text=printable_only(text))


def _beginning(prompt: Prompt, end: int) -> Prompt:
    boundaries = tuple(position for position in prompt.boundaries if position <= end)
    return replace(prompt, token_ids=prompt.token_ids[:end], boundaries=boundaries)


def _foreign(inputs: Mapping[str, Any], argument: str | None) -> set[str]:
    """Returns the arguments that need the model itself: images, another kind of cache, other outputs than logits."""
    names = {name for name, value in inputs.items() if name not in _OUR_INPUTS and not _is_off(name, value)}
    is_known = argument is not None and type(inputs[argument]) is DynamicCache
    return names if names or is_known else {argument or "no cache"}


def _is_off(name: str, value: Any) -> bool:
    if name in ("use_cache", "return_dict"):
        return value is not False
    return value is None or value is False or (isinstance(value, Sequence | Mapping) and not value)


def _identified(model: PreTrainedModel) -> tuple[Layout, str]:
    """Returns the layout of the model's state and the digest of its weights, "" if nothing is cached."""
    if model.training:
        return unsupported(model, f"{type(model).__name__} is in training mode: call model.eval()"), ""
    layout = rehearse(model)
    try:
        return layout, "" if layout.unsupported else memory_digest(model)
    except ModelError as error:
        return unsupported(model, str(error)), ""


def _model_name(model: PreTrainedModel) -> str:
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Path(name).name if Path(name).is_absolute() else name


def _special_ids(tokenizer: Any) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(i for i, token in added.items() if token.special) | frozenset(tokenizer.all_special_ids)

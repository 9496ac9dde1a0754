"""The library door: a prefix-cached session around a transformers model, without the server.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from diskprefix import PrefixCacheSession

    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
    with PrefixCacheSession(model, tokenizer, scope="full") as session:
        ids = tokenizer(open("document.txt").read(), return_tensors="pt").input_ids
        cache, num_cached_tokens = session.prefill(ids)
        reply = model.generate(ids, past_key_values=cache, max_new_tokens=20)
        print(num_cached_tokens, "of", ids.shape[1], "tokens cached:", tokenizer.decode(reply[0, ids.shape[1] :]))

A session prefills on the grid, in steps of `block_size` tokens, so a prefix that is restored is what computing it again
would give, bit for bit. What it saved is found by other sessions on the same folder with the same weights, in other
processes too. The weights are identified by what they are in memory: so a session and the daemon, which reads the files
alone, may share a folder but not their prefixes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from diskprefix.cache_options import CacheOptions
from diskprefix.cache_report import CacheReport
from diskprefix.engine.prefill import prefill
from diskprefix.errors import CacheError, InvalidRequest, ModelError, StoreUnavailable
from diskprefix.kv.arena import KVArena
from diskprefix.kv.caches import ArenaCache
from diskprefix.kv.layout import LAYOUT_VERSION, Layout
from diskprefix.model.fingerprint import Fingerprint
from diskprefix.model.memory import available_bytes, kv_bytes
from diskprefix.model.rehearsal import rehearse
from diskprefix.model.threads import threads_in_identity
from diskprefix.model.weights import memory_bytes, memory_digest, stamp
from diskprefix.policy.scope import parse_scope
from diskprefix.prefix_cache.cache import PrefixCache
from diskprefix.progress import progress_bar
from diskprefix.prompt import Prompt, raw_boundaries
from diskprefix.settings import Settings, parse_size
from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds, as_token_ids, floor_to_grid

log = logging.getLogger("diskprefix")

Ids: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int] | Mapping[str, Any] | str"
"""A prompt: token ids as a list or a tensor of shape [n] or [1, n], what a tokenizer returns, or text."""

_LONG_READ_BYTES = 4 << 30
"""Weights whose reading takes long enough to show how far it is."""
_CLOSE_TIMEOUT_S = 30.0
_FOLDER_VARIABLE = "DISKPREFIX_KV_CACHE_DIR"
_PREVIEW_TOKENS = 40
_REFUSED = (
    "past_key_values",
    "cache_params",
    "state",
    "assistant_model",
    "custom_generate",
    "prompt_lookup_num_tokens",
)
_CACHES = ("past_key_values", "cache_params", "state")
_MOVED_INPUTS = frozenset({"position_ids"})
"""Inputs that `generate` makes itself and that would be others if the caller gave them."""
_OUR_INPUTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_params", "state", "logits_to_keep"}
)
"""What a forward of `generate` is given of a text prompt. Whatever else it is given may change the numbers."""


class PrefixCacheSession:
    """A transformers model with a prefix cache on disk. For one thread; close it, or use it as a context manager.

    There is one KV memory: each `prefill` and `generate` takes it over, and the cache that the call before returned is
    no longer usable then (`copy.deepcopy` keeps one). `report` says what the cache did in the last call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        cache_dir: str | Path | None = None,
        scope: str | int | None = None,
        budget: int | str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """`model` is in evaluation mode, on any device and in any dtype. With a `tokenizer`, prompts may be text, and
        they are cut at its special tokens.

        `cache_dir` (as for the daemon, `DISKPREFIX_KV_CACHE_DIR` or its default), `scope` (what of a prompt is saved:
        `auto:30`, `full`, a number of tokens, `off`) and `budget` (bytes, or a text like `4GiB`) go before what
        `settings` say. Reads all weights once. Raises `SettingsError` or `InvalidScope` for a value out of its range,
        `InvalidRequest` for a model that is none of transformers', `CacheError` if the folder cannot be used; one that
        is only full or read-only for the time being will do.
        """
        if not isinstance(model, PreTrainedModel):
            raise InvalidRequest(
                f"model: {type(model).__name__} is not a PreTrainedModel; of a PeftModel give get_base_model()",
                param="model",
            )
        if cache_dir is None and settings is None:
            cache_dir = os.environ.get(_FOLDER_VARIABLE) or None
        given: dict[str, Any] = {
            "kv_cache_dir": None if cache_dir is None else Path(cache_dir).expanduser(),
            "disk_prefix_cache": None if scope is None else str(parse_scope(scope, param="scope")),
            "kv_cache_budget": None if budget is None else parse_size(budget, param="budget"),
        }
        changes = {name: value for name, value in given.items() if value is not None}
        self.model = model
        self.tokenizer = tokenizer
        self.settings = replace(settings or Settings(), **changes)
        self.report: CacheReport | None = None
        self._options = CacheOptions(scope=parse_scope(self.settings.disk_prefix_cache, param="scope"))
        self._special_ids = _special_ids(tokenizer)
        self._refused = 0
        self._lent: ArenaCache | None = None
        self._open()

    def prefill(self, input_ids: Ids) -> tuple[Any, int]:
        """Bring a prompt's state up to the last grid point before its end, from the disk as far as it can be.

        Answers the cache, to be given to the model as `cache_argument`, and how many of its tokens were restored
        instead of computed. `model.generate(input_ids, past_key_values=cache)` goes on from there, and so does a
        forward of the tokens from `cache.get_seq_length()` on: at least one is left. The cache is empty for a prompt of
        no more than a block, and for any prompt of a model that computes prompts in one pass (the first Mamba). It is
        None, which transformers takes for an empty one, for a model that is not supported.

        Raises `InvalidRequest` for what is no prompt, `ContextTooLong` if there is too little memory.
        """
        token_ids, inputs = self._unpacked(input_ids)
        self._check(inputs, len(token_ids))
        prompt = self._prompt(token_ids)
        arena = self._take_over()
        if arena is None:
            self._pass_by(prompt)
            return None, 0
        end = floor_to_grid(len(prompt.token_ids) - 1, self.settings.block_size)
        if not end or self._cache.layout.is_one_pass:
            arena.truncate(0)
            arena.reserve(len(prompt.token_ids))
            self.report = None
            return self._lend(arena), 0
        with torch.no_grad():
            self._complete(arena, _beginning(prompt, end), goes_on=True)
        # What is being captured must not change, and the cache's new owner may do with it what he likes.
        self._cache.settle()
        return self._lend(arena), self.report.restored if self.report else 0

    def generate(self, input_ids: Ids, **kwargs: Any) -> Any:
        """`model.generate(input_ids, **kwargs)` with the prompt's state from the disk as far as it can be.

        Takes and returns what that does, for one sequence: greedy decoding and sampling, streamers, stop strings. The
        reply is what transformers gives for the prompt computed on the grid (`prefill_chunk_size=block_size`). An exact
        repeat of a prompt that was saved whole runs no forward for it. A model or an input that is not supported is
        left to transformers alone, with a line in the log.

        Raises `InvalidRequest` for a batch, beams, several return sequences or assisted decoding, `ContextTooLong` if
        there is too little memory.
        """
        token_ids, inputs = self._unpacked(input_ids)
        inputs |= kwargs
        self._check(inputs, len(token_ids))
        ids = torch.from_numpy(token_ids).to(self.model.device, torch.long).unsqueeze(0)
        if "attention_mask" in inspect.signature(type(self.model).forward).parameters:
            # Else transformers would take a padding token in the prompt for padding.
            inputs["attention_mask"] = torch.ones_like(ids)
        prompt = self._prompt(token_ids)
        arena = self._take_over()
        if arena is None:
            self._pass_by(prompt)
            return self.model.generate(ids, **inputs)
        with _first_forward(self.model, partial(self._answer, arena, prompt, inputs.keys() & _MOVED_INPUTS)):
            try:
                return self.model.generate(ids, **inputs)
            finally:
                self._cache.settle()

    def save(self, timeout_s: float = 600.0) -> None:
        """Return when all that was to be saved is on the disk.

        Raises `StoreUnavailable` if the folder cannot be written or time runs out, `CacheError` if the store refused
        something since the last `save` (no room in the budget, the disk or the write buffer; the log says which).
        """
        self._require_open()
        writer = self._cache.writer
        self._cache.settle()
        flushed = writer.flush(timeout_s)
        refused, self._refused = self._num_refused() - self._refused, self._num_refused()
        problem = self._cache.store.problem or writer.error
        if problem is not None:
            raise StoreUnavailable(problem)
        if not flushed:
            raise StoreUnavailable(
                f"{self.settings.kv_cache_dir}: not saved within {timeout_s:.0f} s; call save() again"
            )
        if refused:
            raise CacheError(
                f"{refused} prompts were not saved in {self.settings.kv_cache_dir}: see the log, or raise the budget"
            )

    def close(self) -> None:
        """Save what is left and give the folder free. The last cache that was returned is no longer usable."""
        self._expire()
        self._finalizer()

    def __enter__(self) -> PrefixCacheSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cache_argument(self) -> str:
        """How the model's forward calls its cache: `past_key_values`, or `cache_params` (state-space models)."""
        return self._cache.layout.cache_argument

    def stats(self) -> dict[str, Any]:
        """Counts of this session and sizes of its store, as the daemon's `/props` shows them."""
        return self._cache.stats()

    def _open(self) -> None:
        """Open the cache for the model as it is now."""
        store = _open_store(self.settings)
        try:
            store.use_codec(self.settings.kv_cache_codec, available_bytes(torch.device("cpu")))
            layout, digest = _identified(self.model)
            fingerprint = Fingerprint.of(self.model, digest, self.settings.fingerprint)
            if self.settings.fingerprint == "strict":
                threads = threads_in_identity(
                    self.model, layout, block_size=self.settings.block_size, identity=str(fingerprint)
                )
                fingerprint = replace(fingerprint, threads=threads)
            identity = partial(fingerprint.identity, self.settings.block_size, LAYOUT_VERSION, layout.describe())
            self._arena = None if layout.unsupported else self._new_arena(layout)
            self._seen = self._look()
            self._cache = PrefixCache(
                self.settings,
                store,
                layout,
                identity,
                _model_name(self.model),
                self._options.scope,
                device=fingerprint.device,
            )
        except BaseException:
            store.close()
            raise
        self._refused = 0
        # Runs at the latest when the process ends; it must not hold the session.
        self._finalizer = weakref.finalize(self, self._cache.close, _CLOSE_TIMEOUT_S)

    def _look(self) -> tuple[object, ...]:
        """Whatever changes the model's numbers; without reading the weights."""
        return self.model.training, stamp(self.model), torch.get_num_threads(), Fingerprint.of(self.model, "")

    def _new_arena(self, layout: Layout) -> KVArena:
        return KVArena(layout, self.model.device, partial(kv_bytes, self.model.device))

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreUnavailable("the session is closed; make a new one")

    def _take_over(self) -> KVArena | None:
        """The KV memory, which the next request may overwrite; None if the model as it is now is not supported."""
        self._require_open()
        self._expire()
        if self._look() != self._seen:
            log.info("[disk-cache] the model was changed: what was saved before belongs to another one")
            self._finalizer()
            self._open()
        if self._arena is not None and _is_tracked(self._arena):
            self._arena = self._new_arena(self._arena.layout)
        return self._arena

    def _expire(self) -> None:
        if self._lent is not None:
            self._lent.layers = _Expired()
            self._lent = None

    def _lend(self, arena: KVArena) -> Any:
        """What the model takes for its cache, over our memory where that can be taken back, else a copy."""
        cache = arena.cache.argument(self.model)
        if not isinstance(cache, ArenaCache):
            return copy.deepcopy(cache)
        if self.cache_argument == "cache_params":
            cache = _StateCache(cache.layers, lambda: arena.num_tokens)
        self._lent = copy.copy(cache)
        self._lent.layers = list(cache.layers)
        return self._lent

    def _num_refused(self) -> int:
        return self._cache.writer.dropped + self._cache.counters["refused"]

    def _pass_by(self, prompt: Prompt) -> None:
        log.warning("[disk-cache] bypassed: this model is not supported yet (%s)", self._reason)
        self.report = self._cache.begin(prompt, self._options).close()

    @property
    def _reason(self) -> str:
        return ", ".join(self._cache.layout.unsupported)

    def _complete(self, arena: KVArena, prompt: Prompt, *, goes_on: bool = False) -> torch.Tensor | None:
        """Restore, compute and publish the whole prompt; answer the next-token logits, shape [vocab].

        If it `goes_on`, they are not needed: None where all of it was restored.
        """
        self._cache.load(self._options.tenant)
        cached = self._cache.begin(prompt, self._options, goes_on=goes_on)
        try:
            arena.truncate(0)
            arena.reserve(len(prompt.token_ids))
            restored = cached.restore(arena)
            logits, started = restored.logits, time.perf_counter()
            if logits is None and restored.num_tokens < len(prompt.token_ids):
                logits = prefill(
                    self.model,
                    arena,
                    prompt.token_ids,
                    start=restored.num_tokens,
                    block_size=self.settings.block_size,
                    is_cancelled=lambda: False,
                    after_step=cached.after_step,
                )
            cached.publish(arena, logits, time.perf_counter() - started)
        finally:
            self.report = cached.close()
        return logits

    def _answer(self, arena: KVArena, prompt: Prompt, moved: set[str], inputs: dict[str, Any]) -> ModelOutput | None:
        """What the model's first forward in `generate` answers to `inputs`; None leaves it to the model."""
        found = inputs["input_ids"]
        if found is None or found.shape[-1] != len(prompt.token_ids):
            raise InvalidRequest("generate: the session prefills on its own grid; use model.generate for other ways")
        if found.shape[0] != 1:
            raise InvalidRequest("generate: one sequence at a time; num_beams and num_return_sequences must be 1")
        foreign = sorted(moved | _foreign(inputs))
        if foreign:
            log.warning("[disk-cache] bypassed: generate was given %s", ", ".join(foreign))
            self.report = None
            return None
        logits = self._complete(arena, prompt)
        assert logits is not None, "a prompt that does not go on has next-token logits"
        return ModelOutput({"logits": logits.view(1, 1, -1), self.cache_argument: self._lend(arena)})

    def _unpacked(self, input_ids: Ids) -> tuple[TokenIds, dict[str, Any]]:
        """The token ids, and whatever else a tokenizer returned with them."""
        if isinstance(input_ids, str):
            if self.tokenizer is None:
                raise InvalidRequest("input_ids: text needs a session with a tokenizer", param="input_ids")
            return _one_prompt(self.tokenizer(input_ids)["input_ids"]), {}
        if isinstance(input_ids, Mapping):
            others = {name: value for name, value in input_ids.items() if name != "input_ids"}
            return _one_prompt(input_ids["input_ids"]), others
        return _one_prompt(input_ids), {}

    @staticmethod
    def _check(inputs: Mapping[str, Any], num_tokens: int) -> None:
        """Raises `InvalidRequest` for what needs more than one sequence, or another cache."""
        for name in _REFUSED:
            if inputs.get(name) is not None:
                raise InvalidRequest(f"{name}: a session cannot take it; use model.generate", param=name)
        for name in ("num_beams", "num_return_sequences"):
            if (inputs.get(name) or 1) != 1:
                raise InvalidRequest(f"{name}: a session answers with one sequence; use model.generate", param=name)
        mask = inputs.get("attention_mask")
        if mask is not None and not np.array_equal(_in_main_memory(mask).reshape(-1), np.ones(num_tokens)):
            raise InvalidRequest("attention_mask: a session takes one prompt without padding", param="attention_mask")

    def _prompt(self, token_ids: TokenIds) -> Prompt:
        """Special tokens part it, but not the one that begins every prompt: were it the only one, nothing would be
        saved."""
        boundaries = raw_boundaries(token_ids, self._special_ids)
        bos = getattr(self.tokenizer, "bos_token_id", None)
        first = next((i for i, token_id in enumerate(token_ids.tolist()) if token_id != bos), len(token_ids))
        return Prompt(
            token_ids=token_ids,
            boundaries=boundaries if any(end > first for end in boundaries) else (),
            text=self._preview(token_ids),
        )

    def _preview(self, token_ids: TokenIds) -> str:
        if self.tokenizer is None:
            return ""
        text = str(self.tokenizer.decode(token_ids[:_PREVIEW_TOKENS].tolist()))
        return "".join(char for char in " ".join(text.split()) if char.isprintable())


class _StateCache(ArenaCache):
    """Refuses to be given to transformers' `generate`, which would have a state-space model add the whole prompt to it
    once more."""

    def __setattr__(self, name: str, value: Any) -> None:
        """What `generate` is given, it marks."""
        if name == "_is_user_defined":
            raise InvalidRequest(
                "cache_params: generate() cannot continue a state-space model's cache; call session.generate, or the "
                "model itself with the tokens from cache.get_seq_length() on",
                param="cache_params",
            )
        super().__setattr__(name, value)


class _Expired(Sequence[Any]):
    """The layers of a cache whose memory was taken over."""

    def __getitem__(self, index: object) -> Any:
        raise InvalidRequest(
            "past_key_values: this cache is no longer usable, as its session was used again or closed; call prefill "
            "again, or keep a copy.deepcopy of the cache next time",
            param="past_key_values",
        )

    def __len__(self) -> int:
        return int(self[0])


_generating: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_generating_lock = threading.Lock()


@contextmanager
def _first_forward(model: PreTrainedModel, answer: Any) -> Iterator[None]:
    """Have `answer`, which takes the arguments, answer the first forward of this thread; None leaves it to the model.

    So `generate` decodes from our state with all that it can do, whatever the model calls its cache and however the
    model's class prepares its inputs. Raises `InvalidRequest` while another session does the same with this model.
    """
    with _generating_lock:
        if model in _generating:
            raise InvalidRequest("generate: another session is generating with this model; wait for it to end")
        _generating.add(model)
    original, replaced = model.forward, vars(model).get("forward")
    thread, is_first = threading.get_ident(), True

    @functools.wraps(original)
    def forward(*args: Any, **inputs: Any) -> Any:
        nonlocal is_first
        if not is_first or args or threading.get_ident() != thread:
            return original(*args, **inputs)
        is_first = False
        output = answer(inputs)
        return original(**inputs) if output is None else output

    model.forward = forward
    try:
        yield
    finally:
        _generating.discard(model)
        if replaced is None:
            del model.forward
        else:
            model.forward = replaced


def _one_prompt(value: Any) -> TokenIds:
    """Raises `InvalidRequest` unless it is one non-empty list of token ids."""
    ids = _in_main_memory(value)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(
            f"input_ids: one prompt of at least one token id is needed, not {ids.dtype} of shape {list(ids.shape)}",
            param="input_ids",
        )
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise InvalidRequest("input_ids: there are ids that no vocabulary has", param="input_ids")
    return as_token_ids(ids)


def _in_main_memory(value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    except ValueError as error:
        raise InvalidRequest("input_ids: prompts of several lengths; a session takes one", param="input_ids") from error


def _beginning(prompt: Prompt, end: int) -> Prompt:
    boundaries = tuple(position for position in prompt.boundaries if position <= end)
    return replace(prompt, token_ids=prompt.token_ids[:end], boundaries=boundaries)


def _is_tracked(arena: KVArena) -> bool:
    """Whether the model was called outside `no_grad`: then autograd follows what is in the memory, and keeps it."""
    values = [value for layer in arena.layers for value in vars(layer).values()]
    tensors = [item for value in values for item in (value.values() if isinstance(value, dict) else [value])]
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors)


def _foreign(inputs: Mapping[str, Any]) -> set[str]:
    """The inputs of a forward that are not ours to answer: images, another kind of cache, more than logits."""
    found = {name for name, value in inputs.items() if name not in _OUR_INPUTS and not _is_off(name, value)}
    return found | {name for name in _CACHES if type(inputs.get(name)) not in (DynamicCache, type(None))}


def _is_off(name: str, value: Any) -> bool:
    if name in ("use_cache", "return_dict"):
        return value is not False
    return value is None or value is False or (isinstance(value, Sequence | Mapping) and not value)


def _open_store(settings: Settings) -> Store:
    try:
        return Store.open_for_serving(
            settings.kv_cache_dir,
            budget_bytes=settings.kv_cache_budget,
            on_corruption=settings.kv_cache_on_corruption,
            min_free_bytes=settings.kv_cache_min_free,
        )
    except StoreUnavailable as error:
        if "already open in this process" in str(error):
            raise StoreUnavailable(
                f"{settings.kv_cache_dir} is in use by another session of this process; close() that one first, or "
                "choose another cache_dir"
            ) from error
        raise


def _identified(model: PreTrainedModel) -> tuple[Layout, str]:
    """The model's layout and the digest of its weights, empty where that is not needed."""
    if model.training:
        return _unsupported(model, f"{type(model).__name__} is in training mode: call model.eval()"), ""
    layout = rehearse(model)
    try:
        return layout, "" if layout.unsupported else _digest(model)
    except ModelError as error:
        return _unsupported(model, str(error)), ""


def _unsupported(model: PreTrainedModel, reason: str) -> Layout:
    return Layout(layers=(), groups=(), vocab_size=0, logits_dtype=model.dtype, unsupported=(reason,))


def _digest(model: PreTrainedModel) -> str:
    total = memory_bytes(model)
    if total < _LONG_READ_BYTES:
        return memory_digest(model, lambda _: None)
    with progress_bar("reading the weights", total, log.info, in_bytes=True) as advance:
        return memory_digest(model, advance)


def _model_name(model: PreTrainedModel) -> str:
    """The hub id, the name of the folder, or the class."""
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Path(name).name if Path(name).is_absolute() else name


def _special_ids(tokenizer: Any) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(i for i, token in added.items() if token.special) | frozenset(tokenizer.all_special_ids)

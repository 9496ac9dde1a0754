"""Measures where a loaded model computes exactly, and makes its cache. Loads the draft model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from diskprefix.cache.cache import PrefixCache
from diskprefix.engine.draft_model import LoadedDraft
from diskprefix.errors import ModelError
from diskprefix.identity import plain
from diskprefix.kv.layout import Layout
from diskprefix.model.bits import build_of
from diskprefix.model.exact.runner import runtime_of
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.model.load.kernel_settings import computed_by
from diskprefix.model.load.loader import LoadedModel, load_model
from diskprefix.model.plan_fingerprint import PlanFingerprint
from diskprefix.model.planned import PlanRuntime
from diskprefix.model.runtime import Runtime
from diskprefix.native.library import operators
from diskprefix.progress import Report
from diskprefix.settings import Settings
from diskprefix.store.pieces import LAYOUT_VERSION
from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds


@dataclass(frozen=True)
class MeasuredModel:
    """A loaded model, its layout and its identity. `reason` says why it is not exact at every token, "" if it is."""

    loaded: LoadedModel
    layout: Layout
    runtime: Runtime
    fingerprint: Fingerprint | PlanFingerprint
    reason: str
    build: str = ""
    """What computes, if that is not in the fingerprint."""

    def cache(
        self,
        settings: Settings,
        store: Store,
        on_prompts: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        beside: PrefixCache | None = None,
    ) -> PrefixCache:
        """Returns the model's cache. The arguments are those of `PrefixCache`."""
        identity = partial(self.fingerprint.identity, settings.block_size, LAYOUT_VERSION, self.layout.describe())
        return PrefixCache(
            *(settings, store, self.layout, identity, self.loaded.name, on_prompts),
            tokenizer=os.path.abspath(self.loaded.tokenizer.name_or_path),
            # A guess is never wrong, only in vain.
            build=self.build if beside is None else "",
            beside=beside,
        )


def measured(loaded: LoadedModel, settings: Settings) -> MeasuredModel:
    """Makes a model compute exactly where it can. Raises the errors of torch when memory runs out."""
    model, digest = loaded.model, loaded.weights_digest
    layout, reason = make_exact(model, str(Fingerprint.of(model, digest, settings.fingerprint)))
    runtime, compiled = runtime_of(model, layout, settings.block_size), operators()
    if not isinstance(runtime, PlanRuntime) or compiled is None:
        # The fingerprint includes the attention that `make_exact` has installed.
        return MeasuredModel(loaded, layout, runtime, Fingerprint.of(model, digest, settings.fingerprint), reason)
    if loaded.processor is not None and settings.fingerprint == "strict":
        # The encoder is a module of transformers.
        loaded.processor.computed_by = f"{computed_by(model)} {compiled.identity}"
    fingerprint = PlanFingerprint.of(
        *(runtime.config, runtime.plan, compiled),
        weights_digest=digest,
        dtype=plain(model.dtype),
        mode=settings.fingerprint,
    )
    return MeasuredModel(loaded, layout, runtime, fingerprint, "", build_of(compiled))


def load_draft(settings: Settings, served: LoadedModel, cache: PrefixCache, progress: Report) -> LoadedDraft:
    """Loads the draft model of `settings`, with a cache in the store that `cache` uses. Raises `ModelError` if it
    cannot guess for the served model."""
    own = replace(settings, model=settings.draft_model, served_model_name=None, chat_template=None, kv_memory=None)
    # Nothing guesses for it, and it needs no layer for that.
    own = replace(own, draft_model=None, speculative="off")
    loaded = load_model(own, progress, flag="--draft-model")
    require_same_vocabulary(served, loaded)
    draft = measured(loaded, settings)
    if draft.reason:
        raise ModelError(f"--draft-model: {loaded.name} cannot guess, it is not exact at every token: {draft.reason}")
    if not draft.layout.is_sliceable:
        raise ModelError(f"--draft-model: {loaded.name} cannot guess, a recurrent layer cannot take a guess back")
    return LoadedDraft(loaded, draft.runtime, draft.cache(settings, cache.store, beside=cache))


def require_same_vocabulary(served: LoadedModel, draft: LoadedModel) -> None:
    """Raises `ModelError` if a token has different numbers in the two models."""
    of_served, of_draft = served.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    others = of_served.items() ^ of_draft.items()
    if others:
        example = min(others, key=lambda pair: pair[1])
        raise ModelError(
            f"--draft-model: {draft.name} has another vocabulary than {served.name}: {len(of_draft)} and "
            f"{len(of_served)} tokens, and token {example[1]} differs; choose a smaller model of the same family"
        )

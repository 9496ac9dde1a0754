"""Measures where a loaded model is bit-exact, and makes its cache. Loads the draft model."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import ModelError, SettingsError
from diskprefix.identity import Fingerprint
from diskprefix.native.library import REMEDY, are_missing, described, of_another_cpu, operators
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION
from diskprefix.prefixstore.store.schema import OptionValue
from diskprefix.prefixstore.store.store import Store
from diskprefix.progress import Report
from diskprefix.runtime.contract import Runtime
from diskprefix.runtime.llama.devices import is_chosen
from diskprefix.runtime.load.bits import build_of
from diskprefix.runtime.load.code_digest import computed_by
from diskprefix.runtime.load.fingerprint import fingerprint_of_modules
from diskprefix.runtime.load.loader import LoadedModel, begin_load, load_model, require_own_type
from diskprefix.runtime.load.plan_fingerprint import fingerprint_of_plan
from diskprefix.runtime.load.self_check import check
from diskprefix.runtime.plan.families.rotary import factors_in_use
from diskprefix.runtime.plan.planned import NotExact, PlanRuntime
from diskprefix.runtime.runtime_options import PARTING, RuntimeOptions
from diskprefix.tokens import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")


class LoadedDraft(NamedTuple):
    """A loaded draft model, and its cache in the store of the served model."""

    loaded: LoadedModel
    runtime: Runtime
    cache: PrefixCache


class ServableModel(Struct, frozen=True):
    """A loaded model, its layout and its identity. `reason` says why it is not exact at every token, "" if it is."""

    loaded: LoadedModel
    layout: Layout
    runtime: Runtime
    fingerprint: Fingerprint
    reason: str
    build: str = ""
    """The build that computes, if the fingerprint does not contain it."""

    def cache(
        self,
        settings: RuntimeOptions,
        store: Store,
        on_prompts: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        beside: PrefixCache | None = None,
    ) -> PrefixCache:
        """Returns the model's cache. For the arguments see `PrefixCache`."""
        return PrefixCache(
            *(settings, store, self.layout, partial(self.identity, settings), self.loaded.name, on_prompts),
            options=self.options(settings),
            tokenizer=os.path.abspath(self.loaded.tokenizer.name_or_path),
            # A wrong draft costs time, not correctness, so the build of a draft model is not recorded.
            build=self.build if beside is None else "",
            beside=beside,
        )

    def identity(self, settings: RuntimeOptions, tenant: str = "") -> str:
        """Returns the identity of the model's numbers for a tenant."""
        return self.fingerprint.identity(settings.block_size, LAYOUT_VERSION, self.layout.describe(), tenant)

    def options(self, settings: RuntimeOptions) -> dict[str, OptionValue]:
        """Returns the options that part the cache, by the names of the settings, for the record of the model."""
        given = {name: "" if (value := getattr(settings, name)) is None else str(value) for name in PARTING}
        used = {name: given[name] for name in ("kv_type", "block_size", "fingerprint")}
        used |= {"device": self.loaded.device, "dtype": self.loaded.dtype}
        if isinstance(self.runtime, PlanRuntime):
            used |= {
                "runtime": "plan",
                "rows": given["rows"],
                "weights": "auto" if self.runtime.weights.keeps_quants else "native",
                "speculative": "mtp" if self.layout.has_draft_layer else "off",
                "context": factors_in_use(self.loaded.config.get_text_config(decoder=True)),
            }
        elif self.fingerprint.named.get("engine") == "llama":
            own = json.loads(self.fingerprint.named["options"])
            used |= {"runtime": "llama", "gpu_layers": str(own["layers"]), "context": str(own.get("least_cells", ""))}
        else:
            used |= {"runtime": "grid", "kernels": given["kernels"] if operators() is None else ""}
        return {name: OptionValue(given[name], used.get(name, "")) for name in PARTING}


def load_servable(settings: RuntimeOptions, progress: Report) -> ServableModel:
    """Loads the model of `settings` for the runtime that they name or that fits, and measures where it is exact. Raises
    the errors of `servable` and `begin_load`."""
    if is_chosen(settings, progress):
        from diskprefix.runtime.llama.load_llama import load_llama

        llama = load_llama(settings, progress)
        reason = llama.loaded.reason or "llama.cpp's library computes it in steps of one grid"
        return ServableModel(llama.loaded, llama.runtime.layout, llama.runtime, llama.fingerprint, reason, llama.build)
    if settings.gpu_layers is not None:
        raise SettingsError("--gpu-layers: only llama.cpp's library gives layers to a GPU; leave it out")
    return servable(begin_load(settings, progress), settings)


def servable(loaded: LoadedModel, settings: RuntimeOptions) -> ServableModel:
    """Measures whether a model is exact at every token or only on the grid. Raises the errors of torch when memory runs
    out, and the errors of `load_model`."""
    if loaded.runtime is not None:
        try:
            return _by_plan(loaded, loaded.runtime, settings)
        except NotExact as error:
            reason = str(error)
            require_own_type(settings, reason)
        # Frees the plan's memory, which is needed now. Plans refer to themselves, and the garbage collector does not
        # run during a start.
        loaded = replace(loaded, runtime=None, reason=reason, finish=lambda: None)
        loaded.drop_packed()
        gc.collect()
        read = cache(loaded.read_modules)
        loaded = replace(loaded, model=read(), encoder=None if loaded.encoder is None else read)
    return _by_modules(loaded, settings)


def _by_plan(loaded: LoadedModel, runtime: PlanRuntime, settings: RuntimeOptions) -> ServableModel:
    """Measures a model with a plan. Raises `NotExact` if the plan does not pass its check."""
    compiled = operators()
    assert compiled is not None, "plans need them"
    fingerprint = fingerprint_of_plan(
        *(runtime.config, runtime.plans, compiled),
        weights_digest=loaded.weights_digest,
        dtype=loaded.dtype,
        mode=settings.fingerprint,
    )
    check(runtime.weights, loaded.config, runtime.layout, str(fingerprint), loaded.finish)
    log.debug("[model] kernels: %s", described())
    if settings.kernels == "auto" and (advice := of_another_cpu()):
        log.warning("[model] prompts and replies could be faster: %s", advice)
    if loaded.processor is not None and loaded.encoder is not None:
        versions = compiled.identity if settings.fingerprint == "strict" else ""
        loaded.processor.computed_by = partial(_runs_encoder, loaded.encoder, versions)
    return ServableModel(loaded, runtime.layout, runtime, fingerprint, "", build_of(compiled))


def _runs_encoder(read: Callable[[], PreTrainedModel], versions: str) -> str:
    """Reads the encoder, which consists of modules of transformers. Returns a text that identifies the kernels that
    compute it; "" if `versions`, the identity of the operators, is empty."""
    modules = read()
    return f"{computed_by(modules)} {versions}" if versions else ""


def _by_modules(loaded: LoadedModel, settings: RuntimeOptions) -> ServableModel:
    from diskprefix.runtime.grid.grid_runtime import GridRuntime
    from diskprefix.runtime.grid.rehearsal import rehearse

    assert loaded.model is not None, "the model has no plan"
    fingerprint = fingerprint_of_modules(loaded.model, loaded.weights_digest, settings.fingerprint)
    layout = rehearse(loaded.model, str(fingerprint))
    reason = "its state is not cached" if layout.unsupported else loaded.reason
    if not layout.unsupported:
        log.info("prompts are restored in steps of %d tokens: %s", settings.block_size, reason)
    if loaded.device == "cpu" and are_missing():
        log.warning("[model] replies are many times slower without the compiled operators: %s", REMEDY)
    return ServableModel(loaded, layout, GridRuntime(loaded.model, layout), fingerprint, reason)


def load_draft(settings: RuntimeOptions, served: LoadedModel, cache: PrefixCache, progress: Report) -> LoadedDraft:
    """Loads the draft model of `settings`, with a cache in the store of `cache`. Raises `ModelError` if it cannot guess
    for the served model."""
    own = dataclasses.replace(
        settings, model=settings.draft_model, served_model_name=None, chat_template=None, kv_memory=None
    )
    # The draft model has no draft model, and needs no draft layer.
    own = dataclasses.replace(own, draft_model=None, speculative="off")
    loaded = load_model(own, progress, flag="--draft-model")
    require_same_vocabulary(served, loaded)
    draft = servable(loaded, settings)
    if draft.reason:
        raise ModelError(f"--draft-model: {loaded.name} cannot guess, it is not exact at every token: {draft.reason}")
    if not draft.layout.is_sliceable:
        raise ModelError(f"--draft-model: {loaded.name} cannot guess, a recurrent layer cannot take a guess back")
    return LoadedDraft(loaded, draft.runtime, draft.cache(settings, cache.store, beside=cache))


def require_same_vocabulary(served: LoadedModel, draft: LoadedModel) -> None:
    """Raises `ModelError` if a token has different ids in the two models."""
    of_served, of_draft = served.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    others = of_served.items() ^ of_draft.items()
    if others:
        example = min(others, key=lambda pair: pair[1])
        raise ModelError(
            f"--draft-model: {draft.name} has another vocabulary than {served.name}: {len(of_draft)} and "
            f"{len(of_served)} tokens, and token {example[1]} differs; choose a smaller model of the same family"
        )

"""The models of the router, with the memory that each needs."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from diskprefix.daemon.catalogue.adviser import none_known
from diskprefix.daemon.catalogue.built_in_names import BuiltInNames
from diskprefix.daemon.catalogue.catalogue import (
    Catalogue,
    KnownModel,
    file_bytes,
    known_names,
    listed,
    needs,
    offered_by,
)
from diskprefix.daemon.ollama.ollama_models import facts_of
from diskprefix.daemon.settings import Settings
from diskprefix.errors import DiskPrefixError, ModelError, ModelNotFound
from diskprefix.printable import first_line, shown
from diskprefix.runtime.fetch.found_models import models_below
from diskprefix.runtime.fetch.recommended_sampling import sampling_defaults
from diskprefix.runtime.files.fit import Fit, ModelNeeds, fitted
from diskprefix.runtime.files.gguf.gguf_file import forget_headers
from diskprefix.thread_pool import ThreadPool
from diskprefix.units import format_size
from diskprefix.values import require_model_name

T = TypeVar("T")

log = logging.getLogger("diskprefix")

_MIN_KV_BYTES = 1 << 20
_KV_SHARE = 4
"""Without `--kv-memory`, the KV memory of each of several models takes at most this part of all memory."""


class Listing:
    """The models of a daemon: the catalogue's, or without one the model of its settings."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue | None,
        needs: Callable[[Settings], ModelNeeds | None] = needs,
    ) -> None:
        self._idle_unload_s, self._models_dir = settings.idle_unload or None, settings.models_dir
        self.only = None
        if catalogue is None:
            self.only = KnownModel(name="the model", settings=settings, source="", path=None, origin="--model")
        self._catalogue, self._needs = catalogue, needs
        self._settings = settings
        self._names_of_only: BuiltInNames | None = None
        """Decides on names that programs have built in, if the catalogue has one model."""
        self._read_names()
        self._known_needs: dict[str, ModelNeeds | DiskPrefixError | None] = {}
        """The error, if the last try to read them failed."""
        self._offers: dict[str, tuple[int, list[str], dict[str, Any]]] = {}
        """The modification time of each model's file, in seconds since 1970, the model's capabilities, and the sampling
        of a request that does not say it."""
        self.facts: defaultdict[str, dict[str, Any]] = defaultdict(lambda: facts_of(None))
        """What Ollama's API says about the files of each model."""
        self._learning = asyncio.Lock()
        self._reader = ThreadPool(1, "models")
        """A thread of its own, because the event loop waits for its own threads at its end."""

    @property
    def is_reading(self) -> bool:
        """Returns whether models are being read from the disk, which cannot be cancelled."""
        return self._learning.locked()

    def models(self) -> tuple[KnownModel, ...]:
        return self._catalogue.models() if self._catalogue is not None else (self.only,) if self.only else ()

    def find(self, name: str) -> KnownModel:
        """Returns the model with a name, or the only one for a name that programs have built in. Raises
        `ModelNotFound`."""
        assert self._catalogue is not None, "the only model needs no name"
        require_model_name(name)
        try:
            return self._catalogue.find(name)
        except ModelNotFound:
            names = self._names_of_only
            if names is None or not names.has(name, (only := self._catalogue.models()[0]).name):
                raise
            return only

    def _read_names(self) -> None:
        models = self.models()
        if self._catalogue is None or len(models) != 1:
            self._names_of_only = None
            return
        here = partial(known_names, self._settings)
        names = BuiltInNames(are_refused=self._settings.strict_model_names, models_here=here)
        names.prepare(models[0].path, models[0].name)
        self._names_of_only = names

    def idle_unload_s(self, known: KnownModel) -> float | None:
        """Returns after how many seconds without a request a model is unloaded, None for never."""
        return self._idle_unload_s if known.idle_unload_s is None else known.idle_unload_s or None

    def stays_loaded(self, known: KnownModel) -> bool:
        """Returns whether a model is loaded at the start, and again when its worker dies."""
        return known.pin or (self.only is not None and self.idle_unload_s(known) is None)

    async def read_again(self) -> None:
        """Looks for new models. Raises `SettingsError` if the list is invalid, and keeps the old one then."""
        async with self._learning:
            if self._catalogue is not None:
                await self._read(self._catalogue.read_again)
                await self._read(self._read_names)
            self._known_needs.clear()

    async def log_models(self) -> None:
        """Logs the models with the sizes of their files. Warns if --models-dir has none."""
        log.info("[models] %s", listed(await self._read(lambda: [*map(_description_of, self.models())])) or "none")
        folder = self._models_dir
        if folder is not None and not await self._read(models_below, folder):
            log.warning("[models] --models-dir %s has no .gguf file and no model's folder; %s", folder, none_known())
        if self._catalogue is not None and (file := await self._read(self._catalogue.unread_file)) is not None:
            log.warning("[models] %s is not read; give it with --models-file", file)

    async def read_needs(self, known: KnownModel) -> None:
        """Reads from the disk what a model needs, unless it is known. `fit` and `cards` read nothing."""
        async with self._learning:
            if self._catalogue is not None and not isinstance(self._known_needs.get(known.name), ModelNeeds):
                try:
                    needs: ModelNeeds | DiskPrefixError | None = await self._read(self._needs, known.settings)
                    if isinstance(needs, ModelNeeds) and known.path is not None:
                        written_at = int((await self._read(known.path.stat)).st_mtime)
                        sampling = await self._read(sampling_defaults, known.settings, known.path)
                        offered = await self._read(offered_by, known, needs)
                        self._offers[known.name] = written_at, offered, sampling.parameters
                        self.facts[known.name] = await self._read(facts_of, known.path)
                except DiskPrefixError as error:
                    needs = error
                except OSError as error:
                    needs = ModelError(f"cannot read {known.name}: {first_line(error)}")
                self._known_needs[known.name] = needs
                await self._read(forget_headers)

    async def _read(self, read: Callable[..., T], *values: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, read, *values)

    def fit(self, known: KnownModel, settings: Settings, limit_bytes: int) -> tuple[int, list[str], Settings]:
        """Returns the bytes of memory that a model needs, the lines of a table of its parts, and settings with its KV
        memory. `limit_bytes` is for all models together. Raises `ModelError`."""
        needs = self._needs_of(known)
        if needs is None:
            return limit_bytes, ["all, because it is not on this disk yet"], settings
        fit = fit_beside(needs, settings, limit_bytes)
        return fit.needed_bytes, fit.lines()[: len(fit.rows())], replace(settings, kv_memory=fit.kv_bytes)

    def cards(
        self, name: str | None, loaded: Iterable[str], limit_bytes: int, *, is_anthropic: bool, sees_all: bool
    ) -> dict[str, Any]:
        """Returns the answer of `/v1/models`, or of `/v1/models/NAME`. Raises `ModelNotFound`."""
        make = self._anthropic_card if is_anthropic else partial(self._card, sees_all=sees_all)
        if name is not None:
            return make(self.find(name), loaded, limit_bytes)
        cards = [make(known, loaded, limit_bytes) for known in self.models()]
        if not is_anthropic:
            return {"object": "list", "data": cards}
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
        return {"data": cards, "has_more": False} | ends

    def _card(
        self, known: KnownModel, loaded: Iterable[str], limit_bytes: int, *, sees_all: bool = False
    ) -> dict[str, Any]:
        created, capabilities, parameters = self._offers.get(known.name, (0, [], {}))
        card: dict[str, Any] = {"id": known.name, "object": "model", "created": created, "owned_by": "diskprefix"}
        card |= {"loaded": known.name in loaded, "aliases": list(known.aliases), "pinned": known.pin}
        try:
            needs = self._needs_of(known)
        except DiskPrefixError as error:
            return card | {"problem": error.for_caller(sees_all=sees_all).message}
        if needs is None:
            return card
        fit = fit_beside(needs, known.settings, limit_bytes)
        if capabilities:
            modalities = ["text", *["image"] * ("vision" in capabilities)]
            card["architecture"] = {"input_modalities": modalities, "output_modalities": ["text"]}
            card["capabilities"], card["default_parameters"] = capabilities, parameters
        names = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
        return card | dict.fromkeys(names, fit.context) | {"needs_bytes": fit.needed_bytes, "needs": dict(fit.rows())}

    def _anthropic_card(self, known: KnownModel, loaded: Iterable[str], limit_bytes: int) -> dict[str, Any]:
        card = self._card(known, loaded, limit_bytes)
        positions = card.get("context_length", 0)
        return {
            "id": known.name,
            "type": "model",
            "display_name": known.name,
            "created_at": datetime.fromtimestamp(card.get("created", 0), UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": positions,
            "max_tokens": positions,
        }

    def _needs_of(self, known: KnownModel) -> ModelNeeds | None:
        """Raises the error of the last try to read them."""
        needs = self._known_needs.get(known.name)
        if isinstance(needs, DiskPrefixError):
            raise needs
        return needs


def _description_of(known: KnownModel) -> str:
    try:
        size = "not fetched yet" if known.path is None else format_size(file_bytes(known.path))
    except (ModelError, OSError):
        size = "cannot be read"
    return f"{shown(known.name)} ({size}, {known.origin})"


def fit_beside(needs: ModelNeeds, settings: Settings, limit_bytes: int) -> Fit:
    """Returns what a model needs beside others. Its KV memory holds two of the longest sequences, but takes at most a
    `_KV_SHARE`th of all memory, and no more than it would alone."""
    alone, longest = fitted(needs, limit_bytes), needs.state.num_bytes(needs.state.positions)
    wanted = min(2 * longest, limit_bytes // _KV_SHARE)
    beside = fitted(needs, limit_bytes, settings.kv_memory or max(wanted, _MIN_KV_BYTES))
    if settings.kv_memory is not None or beside.is_enough:
        return beside
    return fitted(needs, limit_bytes, max(min(wanted, alone.kv_bytes), _MIN_KV_BYTES))


def merged_metrics(texts: Mapping[str, str], loaded: Mapping[str, bool]) -> bytes:
    """Returns the metrics in `texts` (by model) as one text, in which each sample has the label `model`."""
    # Few routers are asked for metrics.
    from prometheus_client import generate_latest
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Metric] = {}
    for model, text in texts.items():
        for source in text_string_to_metric_families(text):
            family = families.setdefault(source.name, Metric(source.name, source.documentation, source.type))
            family.samples += [sample._replace(labels=sample.labels | {"model": model}) for sample in source.samples]
    gauge = GaugeMetricFamily("diskprefix_model_loaded", "Whether a model is in memory.", labels=["model"])
    for model, is_in in loaded.items():
        gauge.add_metric([model], is_in)
    return generate_latest(SimpleNamespace(collect=lambda: [*families.values(), gauge]))

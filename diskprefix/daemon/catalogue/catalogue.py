"""The models known by name: from `models.toml`, `--model`, `--models-dir`, and the caches of the hub and of other
programs."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.catalogue.adviser import none_known
from diskprefix.daemon.catalogue.built_in_names import BUILT_IN, without_latest
from diskprefix.daemon.catalogue.models_file import read_models_file
from diskprefix.daemon.cli.policy_file import toml_value
from diskprefix.daemon.settings import OF_ONE_MODEL, Settings
from diskprefix.errors import ModelError, ModelNotFound, SettingsError
from diskprefix.folders import config_home
from diskprefix.native import build
from diskprefix.nearest import nearest
from diskprefix.printable import first_line, shown
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.found_models import OWNERS, found_models, models_below
from diskprefix.runtime.fetch.hub import cached_models
from diskprefix.runtime.fetch.named_model import path_of, plain_name
from diskprefix.runtime.fetch.proposals import names_meant
from diskprefix.runtime.files.checkpoint import checkpoint_files, require_weights, weight_files
from diskprefix.runtime.files.fit import ModelNeeds, needs_of_folder, needs_of_gguf
from diskprefix.runtime.files.gguf.gguf_file import model_stem, part_paths, read_tensors
from diskprefix.setting import flag_of
from diskprefix.values import MOST_NAME_CHARS, require_model_name

log = logging.getLogger("diskprefix")

_SHOWN_NAMES = 8
_MODELS_FILE = "models.toml"


class KnownModel(Struct, frozen=True, kw_only=True):
    """A model. `settings` are the daemon's, overridden by the model's own. `source` is its path or repository, `path`
    its folder or file (the first part of a split one), None if it is not on this machine.

    A model with `pin` is not unloaded for others. It is unloaded after `idle_unload_s` seconds without a request, None
    for the daemon's time.
    """

    name: str
    aliases: tuple[str, ...] = ()
    settings: Settings
    source: str
    path: Path | None
    origin: str
    """`models.toml`, `--model`, `--models-dir`, `pulled`, `embedded`, or one of `OWNERS`."""
    pin: bool = False
    idle_unload_s: float | None = None


def open_catalogue(settings: Settings) -> Catalogue | None:
    """Returns the models that a daemon with these settings serves by name, None if it serves a single model.

    Raises `SettingsError` if `models.toml` cannot be read, if two models have one name, or for a setting that fits one
    model only.
    """
    is_asked = len(settings.model_names) > 1 or settings.models_dir is not None or _models_file(settings) is not None
    return Catalogue(settings) if is_asked else None


def known_names(settings: Settings) -> Iterator[tuple[str, Path | None]]:
    """Yields the names of the models that are known besides a single served one, with their aliases: those of the
    caches of the hub and of other programs, and of `models.toml`. Each comes with its folder or the first part of its
    file, None if it has none here. Warns if `models.toml` cannot be read."""
    yield from cached_models()
    for model in found_models():
        path = next(iter(model.parts), None)
        yield from ((name, path) for name in model.names)
    if (file := _models_file(dataclasses.replace(settings, model=None))) is not None:
        try:
            tables = read_models_file(file)
        except SettingsError as error:
            log.warning("[models] the names in models.toml are not known: %s", error.message)
            return
        for table in tables:
            path = None
            with suppress(ModelError, OSError):
                path = path_of(table.model)
            yield from ((name, path) for name in (table.name, *table.aliases))


def _models_file(settings: Settings) -> Path | None:
    if settings.models_file is not None or settings.model is not None:
        return settings.models_file
    default = _usual_models_file()
    return default if default.is_file() else None


def _usual_models_file() -> Path:
    return config_home() / _MODELS_FILE


class Catalogue:
    """The known models by name. `read_again` may be called in any thread: the change is atomic."""

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError` as `open_catalogue`."""
        for name in sorted(OF_ONE_MODEL):
            if getattr(settings, name) is not None:
                raise SettingsError(f"{flag_of(name)} is for one model; with several, write it into models.toml")
        self._settings = settings
        self._models: tuple[KnownModel, ...] = ()
        self._by_name: Mapping[str, KnownModel] = {}
        self.read_again()

    def models(self) -> tuple[KnownModel, ...]:
        """Returns the models of `models.toml`, of `--model`, below `--models-dir`, and of caches, in this order."""
        return self._models

    def find(self, name: str) -> KnownModel:
        """Returns the model with a name or an alias, to which Ollama's clients may add `:latest`. Raises a
        `ModelNotFound` that names the nearest."""
        require_model_name(name)
        by_name = self._by_name
        for asked in (name, name.removesuffix(":latest"), *names_meant(name)):
            if asked in by_name:
                return by_name[asked]
        hint = f"there are {listed([model.name for model in self._models])}" if by_name else none_known()
        if near := nearest(name, by_name):
            hint = f"the nearest name is {near!r}"
        problem = f"no model is called {shown(name)!r}; {hint}"
        if by_name and name and BUILT_IN.fullmatch(alias := without_latest(name)):
            for_all = f"{problem}; an alias in the daemon's models.toml gives one of them this name"
            raise ModelNotFound(f"{problem}; {self._alias_advice(alias)}", for_all=for_all, param="model")
        raise ModelNotFound(problem, param="model")

    def unread_file(self) -> Path | None:
        """Returns the `models.toml` in --models-dir, which is not read without --models-file; None if there is none."""
        read, folder = _models_file(self._settings), self._settings.models_dir
        if folder is None or not (file := folder / _MODELS_FILE).is_file():
            return None
        return file if read is None or file.resolve() != read.resolve() else None

    def _alias_advice(self, alias: str) -> str:
        """Returns what to write into `models.toml` so that one of the models has a further name."""
        known, file = self._models[0], _models_file(self._settings)
        begin, starts = "to give one of them this name, write for example", "start the daemon again"
        if known.origin == "models.toml":
            aliases = json.dumps([*known.aliases, alias], ensure_ascii=False)
            return f"{begin} `aliases = {aliases}` below [{known.name}] in {file}, and {starts}"
        if known.path is not None and known.origin in ("--model", "--models-dir"):
            model = str(known.path.absolute())
        else:
            model = known.source if known.origin == "--model" else known.name
        table = f"{toml_value(known.name)} = {{model = {toml_value(model)}, aliases = [{toml_value(alias)}]}}"
        where = file or _usual_models_file()
        starts += f" with --models-file {where}" if file is None and self._settings.model is not None else ""
        return f"{begin} `{table}` as the first line of {where}, and {starts}"

    def read_again(self) -> None:
        """Finds added, pulled and removed models. If it raises `SettingsError`, nothing is changed.

        A model in a cache yields to another one with its name: it must not keep a daemon from starting.
        """
        models: list[KnownModel] = []
        by_name: dict[str, KnownModel] = {}
        for model in self._known_models():
            if model.origin in ("pulled", *OWNERS):
                if (other := by_name.get(model.name)) is not None:
                    what = "was pulled with" if model.origin == "pulled" else f"{model.origin} has under"
                    log.warning("[models] %s is %s, not what %s this name", shown(model.name), other.source, what)
                    continue
                model = replace(model, aliases=tuple(name for name in model.aliases if name not in by_name))
            if any(len(name) > MOST_NAME_CHARS for name in (model.name, *model.aliases)):
                log.warning("[models] %s is left out: a name has at most %d characters", model.source, MOST_NAME_CHARS)
                continue
            models.append(model)
            for name in (model.name, *model.aliases):
                other = by_name.setdefault(name, model)
                if other is not model:
                    both = " and ".join(f"{each.source} ({each.origin})" for each in (other, model))
                    raise SettingsError(
                        f"two models are called {name!r}: {both}; give one of them another name in models.toml"
                    )
        if (embedded := by_name.get(EMBEDDED.name)) is not None and embedded.path is not None:
            # A user may ask by the name of the file, which is longer.
            by_name.setdefault(model_stem(embedded.path), embedded)
        self._models, self._by_name = tuple(models), by_name

    def _known_models(self) -> Iterator[KnownModel]:
        settings, seen = self._settings, set[str]()
        file = _models_file(settings)
        for table in [] if file is None else read_models_file(file):
            seen.add(_identity(table.model))
            known = self._known(table.name, table.model, "models.toml")
            own, idle_s = dataclasses.replace(known.settings, **table.own), table.idle_unload_s
            yield replace(known, settings=own, aliases=table.aliases, pin=table.pin, idle_unload_s=idle_s)
        for asked in settings.model_names:
            yield from self._unless_seen(seen, plain_name(asked), asked, "--model")
        if settings.models_dir is not None:
            try:
                os.listdir(settings.models_dir)
            except OSError as error:
                raise SettingsError(f"--models-dir: cannot read {settings.models_dir}: {error.strerror}") from error
            for name, path in named(models_below(settings.models_dir), settings.models_dir):
                yield from self._unless_seen(seen, name, str(path), "--models-dir")
        if settings.model is not None:
            # With --model, only the named models are served.
            return
        for name, path in cached_models():
            yield from self._unless_seen(seen, name, str(path), "pulled")
        seen_with: defaultdict[str, set[str]] = defaultdict(lambda: {*seen})
        for model in found_models():
            name, *aliases = model.names
            # Models of Ollama may share a file and have parameters of their own.
            of_these = seen_with[json.dumps(model.parameters, sort_keys=True)]
            for known in self._unless_seen(of_these, name, str(model.parts[0]) if model.parts else name, model.owner):
                yield replace(known, aliases=tuple(aliases))

    def _unless_seen(self, seen: set[str], name: str, model: str, origin: str) -> Iterator[KnownModel]:
        """Yields a model unless an earlier part of the catalogue has its file or repository."""
        if _identity(model) in seen:
            return
        seen.add(_identity(model))
        try:
            known = self._known(name, model, origin)
        except SettingsError as error:
            # Such as a name that is not UTF-8. A model that was only found must not keep a daemon from starting.
            if origin == "--model":
                raise
            log.warning("[models] a model is left out: %s", error.message)
        else:
            yield known

    def _known(self, name: str, model: str, origin: str) -> KnownModel:
        settings = dataclasses.replace(
            self._settings, model=model, models_dir=None, models_file=None, served_model_name=name
        )
        return KnownModel(name=name, settings=settings, source=model, path=_path_or_none(model), origin=origin)


def listed(names: Sequence[str]) -> str:
    """Returns the first of the names, and how many more there are."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}"


def embedded(settings: Settings) -> KnownModel:
    """Returns the embedded model, which a daemon without other models serves."""
    own = dataclasses.replace(settings, model=None, models_dir=None, models_file=None)
    return KnownModel(name=EMBEDDED.name, settings=own, source=EMBEDDED.name, path=path_of(None), origin="embedded")


def _path_or_none(model: str) -> Path | None:
    # An error is reported when the model is requested.
    with suppress(ModelError):
        return path_of(model)
    return None


def _identity(model: str) -> str:
    """Returns a text that is equal for two names of the same file, folder or repository."""
    path = _path_or_none(model)
    return model if path is None else str(path.resolve())


def named(paths: list[Path], folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields models with their names: the file's, without extension and number of the part, or the folder's. The path
    in `folder` precedes equal names, and files beside a folder of the same name keep the extension."""
    short = [plain_name(str(path)) for path in paths]
    for path, name in zip(paths, short, strict=True):
        below = os.path.relpath(path.parent, folder)
        suffix = path.suffix if path.is_file() and path.with_name(name) in paths else ""
        is_alone = short.count(name) == 1 or below == "."
        yield (name if is_alone else f"{below}/{name}") + suffix, path


def needs(settings: Settings) -> ModelNeeds | None:
    """Returns the memory that the model of `settings` needs, by part; None if it is not on this machine. Reads headers
    only, and imports no torch. Raises `ModelError`."""
    path = path_of(settings.model)
    try:
        return None if path is None else _needs(path, settings).of(settings.kv_type, settings.context)
    except ModelError:
        raise
    except Exception as error:
        # Headers and configurations are foreign files: reading them may raise any error.
        raise ModelError(f"cannot read {path}: {first_line(error)}") from error


def _needs(path: Path, settings: Settings) -> ModelNeeds:
    if path.is_dir():
        return needs_of_folder(path, require_weights(path), settings.dtype)
    is_compiled = build.LIBRARY.exists() and settings.kernels != "torch"
    can_keep = is_compiled and settings.dtype in ("auto", "bfloat16")
    return needs_of_gguf(path, settings.weights if can_keep else "native", 4 if settings.dtype == "float32" else 2)


def files_of(path: Path) -> list[Path]:
    """Returns the files with the weights of a folder or a `.gguf` file. Raises `ModelError`, `OSError`."""
    return part_paths(path) if path.is_file() else checkpoint_files(path, weight_files(path))


def file_bytes(path: Path) -> int:
    """Returns the bytes of `files_of`. Raises `ModelError`, `OSError`."""
    return sum(file.stat().st_size for file in files_of(path))


def template_of(path: Path) -> str:
    """Returns a text with the chat template of a model, "" if it has none. Raises `ModelError`, `OSError`."""
    if path.is_file():
        return read_tensors([path])[0].shown("tokenizer.chat_template")
    in_file, in_config = (
        (path / name).read_text(encoding="utf-8", errors="replace") if (path / name).is_file() else ""
        for name in ("chat_template.jinja", "tokenizer_config.json")
    )
    return in_file or (in_config if '"chat_template"' in in_config else "")


def offered_by(known: KnownModel, needs: ModelNeeds) -> list[str]:
    """Returns a model's capabilities from its files, as `/v1/models` names them. Raises `ModelError`, `OSError`."""
    template = "" if known.path is None else template_of(known.path)
    if known.settings.chat_template is not None:
        template = known.settings.chat_template.read_text(encoding="utf-8", errors="replace")
    offered = {
        "completion": True,
        "chat": bool(template),
        "tool_use": "tools" in template,
        "reasoning": "reasoning_content" in template or "<think>" in template,
        "vision": needs.takes_pictures,
    }
    return [name for name, is_offered in offered.items() if is_offered]

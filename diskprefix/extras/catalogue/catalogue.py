"""The models that are known by name: from `models.toml`, `--model`, `--models-dir`, the hub's cache, and the caches of
other programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from diskprefix.errors import ModelError, ModelNotFound, SettingsError
from diskprefix.extras.catalogue.models_file import read_models_file
from diskprefix.extras.catalogue.proposals import none_known
from diskprefix.model.load.checkpoint import checkpoint_files, require_weights, weight_files
from diskprefix.model.load.embedded import EMBEDDED
from diskprefix.model.load.fit import ModelNeeds, needs_of_folder, needs_of_gguf
from diskprefix.model.load.found_models import OWNERS, found_models, models_below
from diskprefix.model.load.gguf_file import part_paths
from diskprefix.model.load.gguf_header import read_header
from diskprefix.model.load.hub import cached_models
from diskprefix.model.load.named_model import path_of, plain_name
from diskprefix.native import build
from diskprefix.nouns import MOST_NAME_CHARS, require_model_name
from diskprefix.printable import first_line, shown
from diskprefix.settings import OF_ONE_MODEL, Settings, config_home, flag_of

log = logging.getLogger("diskprefix")

_SHOWN_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model and the settings of the daemon with its own in their place. `source` is its path or repository.
    `path` is its folder or file (the first part of a split one), None if it is not on this machine.

    `pin`: it is not unloaded for others. `idle_unload_s`: the time without a request after which it is unloaded, None
    if the daemon decides.
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
    """Returns the models that a daemon with these settings serves by name; None if it serves one, as `model` says.

    Raises `SettingsError` if `models.toml` cannot be read, if two models have one name, or for a setting that fits one
    model only.
    """
    is_asked = len(settings.model_names) > 1 or settings.models_dir is not None or _models_file(settings) is not None
    return Catalogue(settings) if is_asked else None


def _models_file(settings: Settings) -> Path | None:
    if settings.models_file is not None or settings.model is not None:
        return settings.models_file
    default = config_home() / "models.toml"
    return default if default.is_file() else None


class Catalogue:
    """The known models by name. `read_again` may be called in any thread; the others then see all of it or nothing."""

    def __init__(self, settings: Settings) -> None:
        """Reads it. Raises `SettingsError` as `open_catalogue`."""
        for name in sorted(OF_ONE_MODEL):
            if getattr(settings, name) is not None:
                raise SettingsError(f"{flag_of(name)} is for one model; with several, write it into models.toml")
        self._settings = settings
        self._models: tuple[KnownModel, ...] = ()
        self._by_name: Mapping[str, KnownModel] = {}
        self.read_again()

    def models(self) -> tuple[KnownModel, ...]:
        """Returns the models: those of `models.toml` first, then by `--model`, below `--models-dir`, and pulled."""
        return self._models

    def find(self, name: str) -> KnownModel:
        """Returns the model with a name or an alias, which Ollama's clients may end with `:latest`. Raises
        `ModelNotFound`, which names the nearest."""
        require_model_name(name)
        by_name = self._by_name
        for asked in (name, name.removesuffix(":latest")):
            if asked in by_name:
                return by_name[asked]
        folded = {known.casefold(): known for known in by_name}
        near = get_close_matches(name.casefold(), folded, n=1)
        if near:
            hint = f"the nearest name is {folded[near[0]]!r}"
        elif by_name:
            hint = f"there are {listed([model.name for model in self._models])}"
        else:
            hint = none_known()
        raise ModelNotFound(f"no model is called {shown(name)!r}; {hint}", param="model")

    def read_again(self) -> None:
        """Looks again for what was added, pulled or removed. If it raises `SettingsError`, all stays as it was.

        A model that was pulled or found yields to one with its name: it must not keep a daemon from its start.
        """
        models: list[KnownModel] = []
        by_name: dict[str, KnownModel] = {}
        for model in self._found():
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
                    raise SettingsError(
                        f"two models are called {name!r}: {other.source} ({other.origin}) and {model.source} "
                        f"({model.origin}); give one of them another name in models.toml"
                    )
        self._models, self._by_name = tuple(models), by_name

    def _found(self) -> Iterator[KnownModel]:
        settings, seen = self._settings, set[str]()
        file = _models_file(settings)
        for one in [] if file is None else read_models_file(file):
            seen.add(_identity(one.model))
            made = self._known(one.name, one.model, "models.toml")
            own = replace(made.settings, **one.own)
            yield replace(made, settings=own, aliases=one.aliases, pin=one.pin, idle_unload_s=one.idle_unload_s)
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
            # Who names models with --model serves these.
            return
        for name, path in cached_models():
            yield from self._unless_seen(seen, name, str(path), "pulled")
        for model in found_models():
            name, *aliases = model.names
            for known in self._unless_seen(seen, name, str(model.parts[0]) if model.parts else name, model.owner):
                yield replace(known, aliases=tuple(aliases))

    def _unless_seen(self, seen: set[str], name: str, model: str, origin: str) -> Iterator[KnownModel]:
        """Yields a model unless a part of the catalogue before this one has the same file or repository."""
        if _identity(model) in seen:
            return
        seen.add(_identity(model))
        try:
            known = self._known(name, model, origin)
        except SettingsError as error:
            # Such as a name that is not UTF-8. What was only found must not keep a daemon from its start.
            if origin == "--model":
                raise
            log.warning("[models] a model is left out: %s", error.message)
        else:
            yield known

    def _known(self, name: str, model: str, origin: str) -> KnownModel:
        settings = replace(self._settings, model=model, models_dir=None, models_file=None, served_model_name=name)
        return KnownModel(name=name, settings=settings, source=model, path=_path_or_none(model), origin=origin)


def listed(names: Sequence[str]) -> str:
    """Returns the first of the names, and how many more there are."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}"


def embedded(settings: Settings) -> KnownModel:
    """Returns the embedded model, which a daemon without other models serves."""
    own = replace(settings, model=None, models_dir=None, models_file=None)
    return KnownModel(name=EMBEDDED.name, settings=own, source=EMBEDDED.name, path=path_of(None), origin="embedded")


def _path_or_none(model: str) -> Path | None:
    # What is wrong with it is told when it is asked for.
    with suppress(ModelError):
        return path_of(model)
    return None


def _identity(model: str) -> str:
    """Returns a text that two names of one file, folder or repository share."""
    path = _path_or_none(model)
    return model if path is None else str(path.resolve())


def named(paths: list[Path], folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields models with their names: that of the file, without extension and number of the part, or of the folder.
    Of models with the same one, those below `folder` get the path from there before it, and files beside a folder of
    that name keep the extension."""
    short = [plain_name(str(path)) for path in paths]
    for path, name in zip(paths, short, strict=True):
        below = os.path.relpath(path.parent, folder)
        suffix = path.suffix if path.is_file() and path.with_name(name) in paths else ""
        is_alone = short.count(name) == 1 or below == "."
        yield (name if is_alone else f"{below}/{name}") + suffix, path


def needs(settings: Settings) -> ModelNeeds | None:
    """Returns what the model that `settings` name needs in memory, by part; None if it is not on this machine. Reads
    headers only, and imports no torch. Raises `ModelError` if they cannot be read."""
    path = path_of(settings.model)
    try:
        return None if path is None else _needs(path, settings)
    except ModelError:
        raise
    except Exception as error:
        # Headers and configurations are foreign files, so any error may come.
        raise ModelError(f"cannot read {path}: {first_line(error)}") from error


def _needs(path: Path, settings: Settings) -> ModelNeeds:
    if path.is_dir():
        return needs_of_folder(path, require_weights(path), settings.dtype)
    is_compiled = build.LIBRARY.exists() and settings.kernels != "torch"
    can_keep = is_compiled and settings.dtype in ("auto", "bfloat16")
    return needs_of_gguf(path, settings.weights if can_keep else "native", 4 if settings.dtype == "float32" else 2)


def file_bytes(path: Path) -> int:
    """Returns the bytes of the weights of a folder or a `.gguf` file. Raises `ModelError`, `OSError`."""
    files = part_paths(path) if path.is_file() else checkpoint_files(path, weight_files(path))
    return sum(file.stat().st_size for file in files)


def template_of(path: Path) -> str:
    """Returns the text with the chat template of a model, empty if it has none. Raises `ModelError`, `OSError`."""
    if path.is_file():
        return str(read_header(path).values.get("tokenizer.chat_template") or "")
    config, file = path / "tokenizer_config.json", path / "chat_template.jinja"
    in_config = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    in_file = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return in_file or (in_config if '"chat_template"' in in_config else "")


def offered_by(known: KnownModel, needs: ModelNeeds) -> list[str]:
    """Returns the capabilities of a model by its files, as `/v1/models` names them once it is loaded. Raises
    `ModelError`, `OSError`."""
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

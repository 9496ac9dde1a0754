"""The sampling of a request that does not say it: by `--sampling`, by the model's files, and by defaults.

Each value is taken from the first that has it: `--sampling`; the parameters that Ollama keeps beside a model;
`general.sampling.*` of a `.gguf` file; `generation_config.json` of a folder; what the makers of the embedded model
recommend; `DEFAULT_SAMPLING`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.printable import first_line, shown
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.named_model import is_embedded, is_embedded_file
from diskprefix.runtime.files.checkpoint import read_config
from diskprefix.runtime.files.gguf.gguf_file import part_paths, read_tensors
from diskprefix.runtime.files.manifests import parameters_of
from diskprefix.runtime.runtime_options import SAMPLING_BOUNDS, RuntimeOptions
from diskprefix.values import MAX_STOP_CHARS, MAX_STOPS

Number: TypeAlias = int | float
Json: TypeAlias = dict[str, Any]

DEFAULT_SAMPLING: Mapping[str, Number] = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
"""Those of llama.cpp and LM Studio. Ollama differs in `top_p` (0.9) and `min_p` (0)."""
_MOST_IGNORED = 16
"""The most values that are named: a file may have a million."""
_OPTION, _OLLAMA, _FILE, _FOLDER, _MAKERS, _DEFAULT = (
    "--sampling",
    "Ollama's parameters",
    "general.sampling",
    "generation_config.json",
    "its makers",
    "default",
)
OF_OLLAMA = {"repeat_penalty" if name == "repetition_penalty" else name: name for name in SAMPLING_BOUNDS}
OF_FILES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
OF_FILES |= {name: name for name in ("top_k", "top_p", "min_p")}
_WINDOWS = {_OLLAMA: "repeat_last_n", _FILE: "penalty_last_n"}
"""The names of the number of the last tokens in which penalties look for repetitions: -1 is the whole text, 0 turns
them off."""
_WINDOW_ELSEWHERE = 64
"""That of llama.cpp and Ollama if a file says none."""
OF_FOLDERS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
"""The names in the files → those of requests."""


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """The sampling of a request that does not set its own. `values` and `sources` have the names of the fields.

    `stop` are the strings that end a reply if the request has none. `ignored` are values of the model's files that are
    not used, each with its source and the reason.
    """

    values: Mapping[str, Number]
    sources: Mapping[str, str]
    stop: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def parameters(self) -> Json:
        """The values, and the stop strings if there are any, for JSON."""
        return {**self.values, **({"stop": list(self.stop)} if self.stop else {})}

    @property
    def record(self) -> Json:
        """The parameters for JSON, each with its source, and what is ignored."""
        named = {name: {"value": value, "source": self.sources[name]} for name, value in self.parameters.items()}
        return {"values": named, "ignored": list(self.ignored)}


def sampling_line(record: Json) -> str:
    """Returns the values of a `SamplingDefaults.record` for people, those of one source together."""
    by_source: dict[str, list[str]] = {}
    for name, named in record["values"].items():
        value = named["value"]
        text = ", ".join(shown(repr(stop)) for stop in value) if isinstance(value, list) else f"{value:g}"
        by_source.setdefault(named["source"], []).append(f"{name} {text}")
    return "; ".join(f"{', '.join(values)} ({source})" for source, values in by_source.items())


class _Recommended:
    """Collects what a model's files recommend. What was noted first is kept."""

    def __init__(self) -> None:
        self.values: dict[str, Number] = {}
        self.sources: dict[str, str] = {}
        self.stop: tuple[str, ...] = ()
        self.ignored: list[str] = []

    def note(self, source: str, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Notes the `values` whose keys are in `names`, under the names of requests. Others are ignored."""
        for key, value in values.items():
            if key == _WINDOWS.get(source):
                continue
            unused = _unused_penalty(source, values, names.get(key), value)
            if key == "stop" and source == _OLLAMA:
                self._note_stop(source, value)
            elif key not in names:
                self._ignore(source, key, "not read")
            elif problem := _problem_of(names[key], value) or unused:
                self._ignore(source, key, problem)
            elif (name := names[key]) not in self.values:
                self.values[name] = type(SAMPLING_BOUNDS[name][0])(value)
                self.sources[name] = source

    def ignore_all(self, source: str, problem: str) -> None:
        self.ignored.append(f"{source}: {problem}")

    def _ignore(self, source: str, key: str, problem: str) -> None:
        if len(self.ignored) < _MOST_IGNORED:
            self.ignored.append(f"{shown(key)} of {source}: {problem}")

    def _note_stop(self, source: str, value: Any) -> None:
        kept: list[str] = []
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                self._ignore(source, "stop", f"{shown(repr(text))} is no text")
            elif len(text) > MAX_STOP_CHARS:
                self._ignore(source, "stop", f"a text of {len(text):,} characters ({MAX_STOP_CHARS:,} at most)")
            elif text:
                kept.append(text)
        if len(kept) > MAX_STOPS:
            self._ignore(source, "stop", f"{len(kept):,} texts (the first {MAX_STOPS} are used)")
        if kept:
            self.stop, self.sources["stop"] = tuple(kept[:MAX_STOPS]), source


def _problem_of(name: str, value: Any) -> str:
    """Returns why a value cannot be used, "" if it can."""
    minimum, maximum = SAMPLING_BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{shown(repr(value))} is no number"
    # JSON may have integers that exceed every float.
    if not minimum <= value <= maximum:
        return f"{shown(repr(value))} is out of range ({minimum:g} to {maximum:g})"
    return f"{value:g} is no whole number" if isinstance(minimum, int) and value != int(value) else ""


def _unused_penalty(source: str, values: Mapping[str, Any], name: str | None, value: Any) -> str:
    """Returns why a penalty is not used, "" if it is, or if it is none."""
    if source not in _WINDOWS or name is None or not name.endswith("penalty"):
        return ""
    window_name = _WINDOWS[source]
    window = values.get(window_name, _WINDOW_ELSEWHERE)
    if window == 0:
        return f"{window_name} 0 turns it off"
    if name != "repetition_penalty" or window == -1 or value == 1:
        return ""
    return f"it is for the last {shown(repr(window))} tokens ({window_name}), and would count the whole text here"


def sampling_defaults(settings: RuntimeOptions, path: Path | None) -> SamplingDefaults:
    """Returns the sampling of requests that set none, for a model whose folder or `.gguf` file is `path`, None if it is
    not on this machine. Files that cannot be read are among `ignored`: loading the model says what is wrong with
    them."""
    files = _Recommended()
    if settings.samples_as_model:
        for source, said, names in _recommendations(settings, path):
            if isinstance(said, str):
                files.ignore_all(source, said)
            else:
                files.note(source, said, names)
    own = settings.sampling_values
    values = {**DEFAULT_SAMPLING, **files.values, **own}
    sources = {**dict.fromkeys(DEFAULT_SAMPLING, _DEFAULT), **files.sources, **dict.fromkeys(own, _OPTION)}
    return SamplingDefaults(values=values, sources=sources, stop=files.stop, ignored=tuple(files.ignored))


def recommended_stop(settings: RuntimeOptions, path: Path) -> tuple[str, ...]:
    """Returns the `stop` of `sampling_defaults`, without a look at what never has one."""
    files = _Recommended()
    if settings.samples_as_model and path.is_file() and not isinstance(said := _of_ollama(settings, path), str):
        files.note(_OLLAMA, said, OF_OLLAMA)
    return files.stop


def _of_ollama(settings: RuntimeOptions, path: Path) -> dict[str, Any] | str:
    # Several models may share the file of a path. The name is then the one under which it is served.
    is_path = os.path.exists(os.path.expanduser(settings.model or ""))
    return parameters_of(path, settings.served_model_name if is_path else settings.model)


def _recommendations(
    settings: RuntimeOptions, path: Path | None
) -> Iterator[tuple[str, Mapping[str, Any] | str, Mapping[str, str]]]:
    """Yields what each source has, by its own names, or why it cannot be read; the strongest source first."""
    if path is not None and path.is_file():
        yield _OLLAMA, _of_ollama(settings, path), OF_OLLAMA
        try:
            values = read_tensors(part_paths(path))[0].values
        except (ModelError, OSError) as error:
            yield _FILE, first_line(error), OF_FILES
        else:
            prefix = f"{_FILE}."
            own = {key.removeprefix(prefix): _rounded(values[key]) for key in values if key.startswith(prefix)}
            yield _FILE, own, OF_FILES
    elif path is not None and (path / "generation_config.json").is_file():
        try:
            config = read_config(path, "generation_config.json")
        except ModelError as error:
            yield _FOLDER, first_line(error), OF_FOLDERS
        else:
            # Absent and null are the same there. Keys about anything else are `generation_config.py`'s.
            yield _FOLDER, {key: config[key] for key in OF_FOLDERS if config.get(key) is not None}, OF_FOLDERS
    if is_embedded(settings.model) or (path is not None and _is_copy_of_embedded(path)):
        yield _MAKERS, EMBEDDED.sampling, OF_FOLDERS


def _rounded(value: Any) -> Any:
    """Returns the shortest number that is this float32: 0.2 of 0.20000000298."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _is_copy_of_embedded(path: Path) -> bool:
    """Returns whether a file has the bytes of the embedded model, wherever it is and however it is named."""
    with suppress(OSError):
        if is_embedded_file(path):
            return True
        if path.is_file() and path.stat().st_size == EMBEDDED.gguf_bytes:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == EMBEDDED.gguf_sha256
    return False

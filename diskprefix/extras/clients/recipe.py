"""The settings of clients: a file of this folder for each, with places for address, model and key."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from diskprefix.errors import SettingsError

FOLDER = Path(__file__).parent
_OUTPUT_SHARE = 4
"""A reply may take so much of the positions, in clients that keep room for it."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The values that a client needs. `url` is without /v1, `context` is in tokens."""

    url: str
    model: str
    key: str
    context: int
    takes_images: bool = False

    @property
    def values(self) -> dict[str, str]:
        return {
            "url": self.url,
            "model": self.model,
            "key": self.key,
            "context": str(self.context),
            "output": str(self.context // _OUTPUT_SHARE),
            "images": json.dumps(self.takes_images),
        }


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """A file to write. A `path` with ~ begins in the home folder, another one in the current folder."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of one client."""

    name: str
    title: str
    run: str
    note: str
    environment: Mapping[str, str]
    files: tuple[RecipeFile, ...]

    def shown(self) -> str:
        """Returns it as text for people, the environment as lines for a shell."""
        parts = [f"## {self.title}"]
        if self.note:
            parts.append(self.note)
        if self.environment:
            parts.append("\n".join(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()))
        parts += [f"{file.path}:\n\n{_indented(file.text)}" for file in self.files]
        if self.run:
            parts.append(f"Then: {self.run}")
        return "\n\n".join(parts)


def names() -> list[str]:
    """Returns the names of the clients that have a recipe."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def recipe(name: str, served: Served, profile: Path | None = None) -> Recipe:
    """Returns the settings of the client `name`. Raises `SettingsError` if there is no recipe for it.

    With a `profile`, they are those of an agent that has its files in this folder in place of the home folder.
    """
    told = _recipe_of(name)
    plain = served.values | {"home": "~" if profile is None else str(profile)}
    # The quoted strings of JSON, TOML, YAML and Python have these escapes in common.
    escaped = {key: json.dumps(value)[1:-1] for key, value in plain.items()}
    # Some clients send no picture to a model whose settings do not list them.
    escaped["inputs"] = json.dumps(["text", "image"] if served.takes_images else ["text"])
    shell = {key: shlex.quote(value) for key, value in plain.items()}
    launch = {} if profile is None else told["launch"]
    environment = told.get("environment", {}) | launch.get("environment", {})
    files = tuple(
        RecipeFile(path=file["path"].replace("~", plain["home"], 1), text=Template(file["text"]).substitute(escaped))
        for file in (*told.get("files", ()), *launch.get("files", ()))
    )
    # OpenCode reads a variable after all files, so it has the text of the file there, too.
    plain["file"] = files[0].text if files else ""
    return Recipe(
        name=name,
        title=told["title"],
        run=Template(told.get("run", "")).substitute(shell),
        note=Template(told.get("note", "")).substitute(plain) if profile is None else "",
        environment={key: Template(value).substitute(plain) for key, value in environment.items()},
        files=files,
    )


@dataclass(frozen=True, kw_only=True)
class KnownAgent:
    """A client that `diskprefix launch` starts: its program, the line that installs it, and the tokens of its first
    prompt as measured, 0 if that is not known."""

    name: str
    title: str
    program: str
    install: str
    first_prompt_tokens: int


def agents() -> list[KnownAgent]:
    """Returns the clients that can be launched."""
    return [
        KnownAgent(
            name=name,
            title=told["title"],
            program=told["run"].split()[0],
            install=told["launch"]["install"],
            first_prompt_tokens=told["launch"].get("first_prompt_tokens", 0),
        )
        for name, told in ((name, _recipe_of(name)) for name in names())
        if "launch" in told
    ]


def _recipe_of(name: str) -> dict[str, Any]:
    if name not in names():
        raise SettingsError(f"there is no recipe for {name!r}; there are {', '.join(names())}")
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())

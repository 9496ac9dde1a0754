"""The settings of clients: a template for each, a `.toml` file of this folder."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from msgspec import Struct

from diskprefix.errors import SettingsError
from diskprefix.printable import escaped

FOLDER = Path(__file__).parent
_OUTPUT_SHARE = 4
"""Clients that reserve room for the reply get the context divided by this number."""
_CLAUDE_SHARE, _CLAUDE_MOST = 8, 32_000
"""The divisor for Claude Code, which reserves much more room besides, and its own limit for a reply in tokens."""


class Served(Struct, frozen=True, kw_only=True):
    """The values that a client needs. `url` is without /v1, `context` is in tokens."""

    url: str
    model: str
    key: str
    context: int
    takes_images: bool = False


class RecipeFile(Struct, frozen=True, kw_only=True):
    """A file to write. `path` begins with ~ for the home folder, or is relative to the current folder."""

    path: str
    text: str


class Recipe(Struct, frozen=True, kw_only=True):
    """The settings of one client."""

    name: str
    title: str
    run: str
    note: str
    environment: Mapping[str, str]
    files: tuple[RecipeFile, ...]

    def shown(self) -> str:
        """Returns the settings as text for a terminal, with the environment as lines for a shell."""
        parts = [f"## {self.title}"]
        if self.note:
            parts.append(self.note)
        if self.environment:
            parts.append("\n".join(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()))
        parts += [f"{file.path}:\n\n{_indented(file.text)}" for file in self.files]
        if self.run:
            parts.append(f"Then: {self.run}")
        return "\n".join(map(escaped, "\n\n".join(parts).splitlines()))


def names() -> list[str]:
    """Returns the names of the clients that have a recipe."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def shown_names() -> list[str]:
    """Returns the names by which people call the clients: an agent's is its program."""
    programs = {known.name: known.program for known in agents()}
    return sorted(programs.get(name, name) for name in names())


def client_called(name: str) -> str:
    """Returns the client with this name, or that runs this program. Raises `SettingsError` if there is none."""
    if name in names():
        return name
    for known in agents():
        if name == known.program:
            return known.name
    raise SettingsError(f"no client is called {name!r}; there are {', '.join(shown_names())}")


def recipe(name: str, served: Served, profile: Path | None = None) -> Recipe:
    """Returns the settings of the client `name`. Raises as `client_called`.

    With a `profile`, the agent has its files in that folder in place of the home folder.
    """
    table = _recipe_of(name)
    plain = {
        "url": served.url,
        "model": served.model,
        "key": served.key,
        "context": str(served.context),
        "output": str(served.context // _OUTPUT_SHARE),
        "claude_output": str(min(served.context // _CLAUDE_SHARE, _CLAUDE_MOST)),
        "images": json.dumps(served.takes_images),
        "home": "~" if profile is None else str(profile),
    }
    # JSON, TOML, YAML and Python share these escapes.
    quoted = {key: json.dumps(value)[1:-1] for key, value in plain.items()}
    # Some clients send no picture to a model whose settings do not list them.
    quoted["inputs"] = json.dumps(["text", "image"] if served.takes_images else ["text"])
    shell = {key: shlex.quote(value) for key, value in plain.items()}
    launch = {} if profile is None else table["launch"]
    environment = table.get("environment", {}) | launch.get("environment", {})
    files = tuple(
        RecipeFile(path=file["path"].replace("~", plain["home"], 1), text=Template(file["text"]).substitute(quoted))
        for file in (*table.get("files", ()), *launch.get("files", ()))
    )
    # OpenCode reads a variable after all files, so the variable has the text of the file, too.
    plain["file"] = files[0].text if files else ""
    return Recipe(
        name=name,
        title=table["title"],
        run=Template(table.get("run", "")).substitute(shell),
        note=Template(table.get("note", "")).substitute(plain) if profile is None else "",
        environment={key: Template(value).substitute(plain) for key, value in environment.items()},
        files=files,
    )


class FirstPromptSize(Struct, frozen=True, kw_only=True):
    """The measured size of an agent's first prompt: the characters of its system messages, of the user's, and of the
    definitions of its tools in JSON, and the number of tools."""

    system: int
    user: int
    tools: int
    tool_chars: int


class KnownAgent(Struct, frozen=True, kw_only=True):
    """A client that `diskprefix launch` starts. `install` is a command line. `first_prompt` is None if it was not
    measured. With the arguments `probe` it sends its first prompt and ends; without any, it cannot do this."""

    name: str
    title: str
    program: str
    install: str
    first_prompt: FirstPromptSize | None = None
    probe: tuple[str, ...] = ()


def agents() -> list[KnownAgent]:
    """Returns the clients that can be launched."""
    return [
        KnownAgent(
            name=name,
            title=table["title"],
            program=table["run"].split()[0],
            install=table["launch"]["install"],
            first_prompt=FirstPromptSize(**size) if (size := table["launch"].get("first_prompt")) else None,
            probe=tuple(table["launch"].get("probe", ())),
        )
        for name, table in ((name, _recipe_of(name)) for name in names())
        if "launch" in table
    ]


def agent_called(name: str) -> KnownAgent:
    """Returns the agent with this name or program. Raises `SettingsError`."""
    known = agents()
    for each in known:
        if name in (each.name, each.program):
            return each
    raise SettingsError(f"no agent is called {name!r}; there are {', '.join(each.program for each in known)}")


def _recipe_of(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{client_called(name)}.toml").read_text(encoding="utf-8"))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())

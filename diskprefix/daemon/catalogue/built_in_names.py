"""The names of models that programs have built in. A server of one model answers requests for them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from diskprefix.printable import shown
from diskprefix.runtime.fetch.proposals import short_name

log = logging.getLogger("diskprefix")

BUILT_IN = re.compile(
    # OpenAI's and Anthropic's, also as OpenRouter writes them: the defaults of aider, Claude Code, Cline, Codex, Goose,
    # Hermes, LangChain, llm, OpenCode and pi, and of most scripts.
    r"(?:openai/)?(?:gpt-(?:3\.5|4|5)[\w.-]*|o[134](?:-[\w.-]+)?|chatgpt-4o-latest|codex-mini-latest)"
    r"|(?:anthropic/)?claude-[\w.@-]+"
    # Qwen Code's.
    r"|coder-model|qwen3-coder-(?:plus|flash)",
    re.IGNORECASE,
)
_MOST_LOGGED = 64
"""The most names that are logged, each once."""


def without_latest(name: str) -> str:
    """Returns a name without the tag that Ollama's clients append to one without a tag."""
    return name.removesuffix(":latest")


class BuiltInNames:
    """Decides whether the only model answers to a name that is not its own. `models_here` returns the names of the
    models on this machine, each with its folder or file, None if it cannot be served. It waits for the disk."""

    def __init__(self, *, are_refused: bool, models_here: Callable[[], Iterable[tuple[str, Path | None]]]) -> None:
        self._are_refused, self._models_here = are_refused, models_here
        self._are_read = False
        self._means_served: dict[str, bool] = {}
        """Names of models on this machine, without case → whether they mean the served one."""
        self._logged: set[str] = set()

    def prepare(self, origin: Path | None, name: str) -> None:
        """Reads the names of the models on this machine before the model `name`, of the files `origin` (None: they are
        to be fetched), is served. If that fails, the failure is logged, and names that programs have built in are
        refused: one of them may be another model's."""
        try:
            served = None if origin is None else origin.resolve()
            for name, path in self._models_here():
                key = _key(name)
                is_served = path is not None and path.resolve() == served
                self._means_served[key] = is_served and self._means_served.get(key, True)
        except Exception:
            log.exception("the names of the models here cannot be read; only %s's own names are answered", name)
        else:
            self._are_read = True

    def refuses(self, name: str) -> bool:
        """Returns whether `--strict-model-names` is why a name is not answered."""
        return self._are_refused and _is_built_in(name)

    def has(self, name: str, served: str) -> bool:
        """Returns whether the model `served` answers to `name`: another name of its file on this machine, or one that
        programs have built in, and that is no model which can be fetched by it or is here. Logs each of these once."""
        if (means_served := self._means_served.get(_key(name))) is not None:
            return means_served
        if self._are_refused or not self._are_read or not _is_built_in(name) or short_name(name) is not None:
            return False
        if name not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(name)
            log.info(
                "%s answers a request for %r, a name that programs have built in (logged once for each name; "
                "--strict-model-names refuses them)",
                served,
                shown(name),
            )
        return True


def _is_built_in(name: str) -> bool:
    # The empty name is of editors and scripts in which nobody chose one.
    return not name or BUILT_IN.fullmatch(without_latest(name)) is not None


def _key(name: str) -> str:
    return without_latest(name).casefold()

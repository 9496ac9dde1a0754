"""The names of models that programs have built in. A server of one model answers requests for them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cached_property

from diskprefix.model.load.proposals import short_name
from diskprefix.printable import shown

log = logging.getLogger("diskprefix")

BUILT_IN = re.compile(
    # OpenAI's and Anthropic's, also as OpenRouter writes them: the defaults of aider, Claude Code, Cline, Codex, Goose,
    # Hermes, LangChain, llm, OpenCode and pi, and of most scripts.
    r"(?:openai/)?(?:gpt-(?:3\.5|4|5)[\w.-]*|chatgpt-4o-latest|codex-mini-latest)|(?:anthropic/)?claude-[\w.@-]+"
    # Qwen Code's.
    r"|coder-model|qwen3-coder-(?:plus|flash)"
    # Editors and scripts in which nobody chose one.
    r"|"
)
_MOST_LOGGED = 64
"""The most names that are logged, each once."""


class BuiltInNames:
    """Decides whether the only model answers to a name that is not its own. `models_here` returns the names of the
    models on this machine, which is called once."""

    def __init__(self, *, are_refused: bool, models_here: Callable[[], frozenset[str]]) -> None:
        self._are_refused, self._models_here = are_refused, models_here
        self._logged: set[str] = set()

    @cached_property
    def _known_here(self) -> frozenset[str]:
        return self._models_here()

    def prepare(self) -> None:
        """Reads the names of the models on this machine, so that no request waits for that."""
        if not self._are_refused:
            _ = self._known_here

    def has(self, name: str, served: str) -> bool:
        """Returns whether the model `served` answers to `name`: one that programs have built in, and that is no model
        which can be fetched by it or is on this machine. Logs each name once."""
        if self._are_refused or not BUILT_IN.fullmatch(name):
            return False
        if name and (short_name(name) is not None or name in self._known_here):
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

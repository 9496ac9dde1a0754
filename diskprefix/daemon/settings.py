"""The settings of the daemon, in one frozen object.

The command line merges defaults, policy file, environment and flags. A program that embeds diskprefix creates
`Settings` itself. A value outside its range raises a `SettingsError` that names the flag.
"""

# ruff: noqa: RUF009 - option makes a field

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any

from diskprefix.daemon.origins import Origins
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.store_options import MAX_BUDGET
from diskprefix.runtime.runtime_options import RuntimeOptions
from diskprefix.setting import CACHE, MODEL, SERVER, SHARED_TIER, option, settings_of

_model, _server, _cache = (partial(option, group) for group in (MODEL, SERVER, CACHE))
_GROUPS = (MODEL, SERVER, CACHE, SHARED_TIER)


@dataclass(frozen=True, kw_only=True)
class Settings(RuntimeOptions):
    """The settings of `diskprefix serve`. The field `kv_cache_dir` is the flag `--kv-cache-dir`, and so on.

    This is the only list of the settings. The command line and its help follow it.
    """

    models_dir: Path | None = _server(
        None,
        "A folder of models: each .gguf file and each folder with a config.json and weights, four folders deep.",
        is_common=True,
        kind="folder",
        unset="none",
    )
    models_file: Path | None = _server(
        None,
        "A TOML file of models with their aliases and settings.",
        kind="file",
        unset="$XDG_CONFIG_HOME/diskprefix/models.toml, if there is no --model",
    )
    chat_template_kwargs: str | None = _model(
        None,
        "Variables for the chat template, as a JSON object. Variables in a request override them.",
        metavar="JSON",
        unset="the switch that keeps thoughts of earlier turns, if the template has one",
    )
    template_date: str = _model(
        "today",
        "The day that the chat template writes, if it writes one: today, with which the prompts of the last days are "
        "computed when a day begins, or a fixed one. A conversation goes on with the day that it began with.",
        metavar="today|YYYY-MM-DD",
    )
    host: str = _server(
        "127.0.0.1", "The address to listen on. Without --api-keys, anybody who can reach it is served.", is_common=True
    )
    port: int = _server(
        8642, "The port to listen on. 0 picks a free port and logs it.", is_common=True, bounds=(0, 65535)
    )
    api_keys: Path | None = _server(
        None,
        "A file of API keys, one per line with an optional name before it. Clients must send one of them. Each key has "
        "its own cache. SIGHUP rereads the file.",
        is_common=True,
        kind="file",
        unset="no key is needed",
    )
    allowed_origins: str = _server(
        "",
        "Web pages and browser extensions that may ask for replies, by their origins: http://localhost:3000, "
        "http://localhost:*, chrome-extension://ID, moz-extension://*. With --api-keys also *. Without keys each has a "
        "cache of its own.",
        metavar="ORIGIN,…",
        unset="the daemon's own pages",
    )
    strict_model_names: bool = _server(
        False,
        "Refuse requests for models that are not served. Otherwise a server of one model also answers to the names "
        "that programs have built in: gpt-4…, gpt-5…, claude-… and the like, and the empty one.",
    )
    log_level: str = _server(
        "info",
        "debug also logs what is of use to developers: the parts of a start, and decisions of the cache.",
        choices=("info", "debug"),
    )
    max_queue: int = _server(
        64,
        "The maximum number of waiting requests; more get a 503 with Retry-After. One API key may take half of these "
        "places, then it gets a 429.",
        bounds=(1, 100_000),
    )
    prefill_compression: str = _server(
        "off",
        "Leave out the oldest exchanges of a conversation that has more than N tokens. auto: three quarters of the "
        "model's context. The reply reports it.",
        metavar="off|auto|N",
    )
    router: bool = _server(
        False,
        "Run the model in a separate process, restarted if it dies, behind a router that holds the port. The "
        "router needs about 35 MiB of memory. Several models and --idle-unload always use one.",
    )
    memory_limit: int | None = _server(
        None,
        "Memory for all models together, if there are several. Models that do not fit together take turns.",
        kind="size",
        unset="the memory that is free when the first one is loaded",
        bounds=(1024**2, MAX_BUDGET),
    )
    idle_unload: float = _server(
        0.0,
        "Unload a model that had no request for this long. The next request loads it again; its conversations are "
        "restored from disk.",
        kind="duration",
        unset="models stay until others need the memory",
        bounds=(0, 100 * 365 * 86400),
    )
    canonicalise: str = _cache(
        "report",
        "How to treat text that clients change in every request (billing-header, total-tokens, hoisted-nudges, clock, "
        "schema-keys, tool-order): off, report (name it) or on (undo the change), for all or by name.",
        metavar="[NAME=]MODE,…",
    )
    ahead: str = _cache(
        "auto",
        "While no request waits, compute what will come: a conversation in the next question's form, a new day's first "
        "prompts. At most N CPU minutes per day; auto is 240. Off on battery.",
        is_common=True,
        metavar="off|auto|N",
    )
    kv_memory_keeps: bool = True
    """State stays in `kv_memory` when its request ends. The next turn continues from it without a read from disk."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models of `model`, which may be a path with a comma."""
        if self.model is None or "," not in self.model or os.path.exists(os.path.expanduser(self.model)):
            return () if self.model is None else (self.model,)
        return tuple(name.strip() for name in self.model.split(",") if name.strip())

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of `chat_template_kwargs`. Raises `SettingsError`."""
        try:
            variables = json.loads(self.chat_template_kwargs or "{}")
        except (ValueError, RecursionError):
            variables = None
        if not isinstance(variables, dict):
            raise SettingsError("--chat-template-kwargs: is not a JSON object; write for example '{\"name\": true}'")
        return variables

    @property
    def template_day(self) -> date | None:
        """The day of `template_date`, None for today. Raises `SettingsError`."""
        if self.template_date == "today":
            return None
        try:
            return datetime.strptime(self.template_date, "%Y-%m-%d").date()
        except ValueError:
            problem = f"--template-date: {self.template_date!r} is not today or a day such as 2026-01-31"
            raise SettingsError(problem) from None

    @property
    def ahead_s(self) -> int:
        """The CPU seconds per day for work ahead of requests. Raises `SettingsError`."""
        if not re.fullmatch("off|auto|[1-9][0-9]{0,6}", self.ahead):
            raise SettingsError(f"--ahead: {self.ahead!r} is not off, auto or a number of CPU minutes per day")
        return 60 * int({"off": "0", "auto": "240"}.get(self.ahead, self.ahead))

    @property
    def origins(self) -> Origins:
        """Raises `SettingsError` for a text that is no list of origins."""
        return Origins.parse(self.allowed_origins, param="--allowed-origins")

    def require_readable(self) -> None:
        super().require_readable()
        _ = self.template_variables, self.template_day, self.ahead_s, self.origins
        threshold = str(self.prefill_compression)
        if not re.fullmatch("off|auto|[0-9]{2,9}", threshold) or (threshold.isdigit() and int(threshold) < 16):
            raise SettingsError(f"--prefill-compression: {threshold!r} is not off, auto or a number of tokens from 16")

    def require_together(self) -> None:
        super().require_together()
        if self.origins.any_page and self.api_keys is None:
            raise SettingsError("--allowed-origins: * needs --api-keys: any page that you visit would be answered")


SETTINGS = dict(sorted(settings_of(Settings).items(), key=lambda item: _GROUPS.index(item[1].group)))
"""The `Setting` of each field by its name, in the order of the help."""

PER_MODEL = frozenset(
    {
        *(
            "runtime",
            "device",
            "gpu_layers",
            "dtype",
            "weights",
            "kv_type",
            "kernels",
            "rows",
            "chat_template",
            "speculative",
            "draft_model",
        ),
        *("sampling", "chat_template_kwargs", "template_date", "prefill_compression", "kv_memory", "disk_prefix_cache"),
        *("kv_cache_ttl", "kv_cache_min_tokens", "canonicalise"),
        *("kv_cache_gate", "max_sequences", "ahead"),
    }
)
"""The settings that a model in `models.toml` may have for itself."""
OF_ONE_MODEL = frozenset({"served_model_name", "chat_template", "draft_model"})
"""The settings that fit one model only."""

"""The settings of the daemon, in one frozen object.

The command line merges defaults, policy file, environment and flags. A program that embeds diskprefix creates
`Settings` itself. A value outside its range raises a `SettingsError` that names the flag.
"""

# ruff: noqa: RUF009 - _setting makes a field

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import dataclass, field, fields
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from diskprefix.daemon.origins import Origins
from diskprefix.errors import SettingsError
from diskprefix.units import format_size, parse_size

MIN_BUDGET, MAX_BUDGET = 16 * 1024**2, 2**46
_MIN_WRITTEN = 1024**2
Kind: TypeAlias = Literal["text", "integer", "size", "duration", "switch", "file", "folder"]
"""`size` is in bytes and `duration` in seconds. People write both with a unit."""


def expanded(path: str | Path) -> Path:
    """Returns the path with a leading `~` or `~USER` expanded. Raises `SettingsError` for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {Path(path).parts[0]} names no user of this machine") from error


def policies_folder() -> Path:
    """Returns `diskprefix/presets` in an installed package, `policies` in a checkout."""
    return _carried("presets", "policies")


def units_folder() -> Path:
    """Returns `diskprefix/service_units` in an installed package, `systemd/user` in a checkout."""
    return _carried("service_units", "systemd/user")


def _carried(installed: str, in_checkout: str) -> Path:
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / installed, package.parent / in_checkout) if folder.is_dir())


def cache_home() -> Path:
    """Returns `$XDG_CACHE_HOME/diskprefix`, or `~/.cache/diskprefix`."""
    return _home("XDG_CACHE_HOME", ".cache")


def config_home() -> Path:
    """Returns `$XDG_CONFIG_HOME/diskprefix`, or `~/.config/diskprefix`."""
    return _home("XDG_CONFIG_HOME", ".config")


def state_home() -> Path:
    """Returns `$XDG_STATE_HOME/diskprefix`, or `~/.local/state/diskprefix`."""
    return _home("XDG_STATE_HOME", ".local/state")


def _home(variable: str, folder: str) -> Path:
    """Returns `diskprefix` in the folder of a variable, or in `folder` of the home folder. Raises `SettingsError` for a
    relative path, which would depend on the working directory, and for a user without a home."""
    base = os.environ.get(variable, "").strip()
    try:
        path = (Path(base) if base else Path.home() / folder) / "diskprefix"
    except RuntimeError as error:
        raise SettingsError(f"no home folder: set {variable}, or HOME, to a folder that is yours") from error
    if not path.is_absolute():
        raise SettingsError(f"{variable if base else 'HOME'}: {base or path.parents[1]} is not an absolute path")
    require_text(str(path), variable if base else "HOME")
    return path


def require_text(text: str, what: str) -> None:
    """Raises `SettingsError` for a text with bytes that are not in the encoding of file names: no library opens it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        known = sys.getfilesystemencoding().upper()
        raise SettingsError(f"{what}: {text!r} has bytes that are not {known}; give it another name") from error


def default_kv_cache_dir() -> Path:
    """Returns the folder `kv` in systemd's CacheDirectory if the service runs under it, else in `cache_home()`."""
    directory = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return (Path(directory) if directory else cache_home()) / "kv"


class Setting(Struct, frozen=True, kw_only=True):
    """Describes one field of `Settings`: its help, its kind and its range."""

    group: str
    """The heading in the help."""
    help: str
    kind: Kind
    is_common: bool = False
    """Shown by `--help`, not by `--help-all` only."""
    parts_cache: bool = False
    """It changes the identity of what is computed (`identity.Fingerprint`), for some models at least: prefixes saved
    with one value are not found with another."""
    metavar: str | None = None
    unset: str | None = None
    """The default as the help shows it, if the value is None or depends on the machine."""
    choices: tuple[str, ...] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """The smallest and the largest value."""


MODEL, SERVER, CACHE, SHARED_TIER = "Model", "Server", "Disk cache", "Shared tier"
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""The bounds of the values of `--sampling`, as in requests."""
_NEUTRAL = dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0)
_NEUTRAL |= {"top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The values that leave the model's probabilities as they are."""
_SAMPLING_WORDS = ("model", "neutral")
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
"""The model that needs no hub: its file is in a package of the Python package index."""
DEFAULT_DIR = "$XDG_CACHE_HOME/diskprefix/kv"
"""The default of `--kv-cache-dir`, as the help shows it."""


def _setting(group: str, default: Any, help: str, **attributes: Any) -> Any:
    """Returns a dataclass field with its `Setting`. A callable `default` is called for each object."""
    plain_kind: Kind = "switch" if isinstance(default, bool) else "integer" if isinstance(default, int) else "text"
    metadata = {"setting": Setting(group=group, help=help, **{"kind": plain_kind} | attributes)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_model, _server, _cache, _shared = (partial(_setting, group) for group in (MODEL, SERVER, CACHE, SHARED_TIER))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `diskprefix serve`. The field `kv_cache_dir` is the flag `--kv-cache-dir`, and so on.

    This is the only list of the settings. The command line and its help follow it.
    """

    model: str | None = _model(
        None,
        "A Hugging Face hub id (org/name, org/name:quant), a short name (qwen3.5:4b), a folder, a .gguf file, or the "
        "name of a model that Ollama, LM Studio or llama.cpp has here. Several models (separated by commas, or one "
        "--model each) are loaded when requests name them.",
        is_common=True,
        metavar="ID|PATH",
        unset=f"the embedded {EMBEDDED_NAME}",
    )
    models_dir: Path | None = _model(
        None,
        "A folder of models: each .gguf file and each folder with a config.json and weights, four folders deep.",
        is_common=True,
        kind="folder",
        unset="none",
    )
    models_file: Path | None = _model(
        None,
        "A TOML file of models with their aliases and settings.",
        kind="file",
        unset="$XDG_CONFIG_HOME/diskprefix/models.toml, if there is no --model",
    )
    device: str = _model(
        "auto",
        "cpu, cuda (AMD too), cuda:1, xpu (Intel), mps, Vulkan0 and so on. auto uses an accelerator if there is one.",
        is_common=True,
        metavar="NAME",
        parts_cache=True,
    )
    engine: str = _model(
        "auto",
        "plan (CPUs), llama (llama.cpp's library) or grid (transformers); auto takes llama if it has a GPU.",
        is_common=True,
        choices=("auto", "plan", "llama", "grid"),
        parts_cache=True,
    )
    gpu_layers: int | None = _model(
        None,
        "With --engine llama, the number of layers that the GPU computes. The CPU computes the others.",
        kind="integer",
        bounds=(0, 10_000),
        unset="as many as have room there",
        parts_cache=True,
    )
    dtype: str = _model(
        "auto",
        "The data type of the computation. auto uses the type of the weights.",
        choices=("auto", "bfloat16", "float16", "float32"),
        parts_cache=True,
    )
    weights: str = _model(
        "auto",
        "The weights in memory. auto keeps the quantization of a .gguf file, native unpacks it.",
        is_common=True,
        choices=("auto", "native"),
        parts_cache=True,
    )
    packed_weights: str = _model(
        "auto",
        "The folder where weights stay as a CPU computes with them: the next start maps them instead of packing them "
        "again. A file takes as much as the model's, and is made once, in idle time, if the disk has room. auto: "
        "$XDG_CACHE_HOME/diskprefix/weights.",
        metavar="auto|off|PATH",
    )
    kv_type: str = _model(
        "auto",
        "The data type of keys and values in memory and on disk: auto (the type of the computation) or q8 (8 bits, "
        "about half the size; three quarters for Qwen2 models, whose keys keep their type).",
        choices=("auto", "q8"),
        parts_cache=True,
    )
    kernels: str = _model(
        "auto",
        "The operators on a CPU: auto (the best compiled variant for it), a variant such as avx2, or torch.",
        metavar="auto|torch|VARIANT",
        parts_cache=True,
    )
    rows: str = _model(
        "8",
        "What the rows before a product with quantized weights become on a CPU: integers of 8 bits or 15 bits (closer, "
        "slower), with the same bits on every CPU; or bf16 (fast prompts, slower replies), which needs AMX and "
        "shares saved prefixes with such CPUs only.",
        choices=("8", "15", "bf16"),
        parts_cache=True,
    )
    served_model_name: str | None = _model(
        None, "The model's name in the API.", is_common=True, metavar="NAME", unset="the model's own"
    )
    chat_template: Path | None = _model(None, "A Jinja chat template file.", kind="file", unset="the model's own")
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
    speculative: str = _model(
        "auto",
        "Speculative decoding where it is faster; replies do not change. ngram drafts from earlier text that a reply "
        "repeats, mtp with the draft layer that some models have, auto with both.",
        is_common=True,
        choices=("off", "ngram", "mtp", "auto"),
        parts_cache=True,
    )
    draft_model: str | None = _model(
        None,
        "A smaller model with the same vocabulary that also drafts tokens. It uses part of --kv-memory.",
        metavar="ID|PATH",
        unset="none",
    )
    sampling: str = _model(
        "model",
        "How requests that do not say it are sampled. model: as the model's files say, for the rest temperature=0.8, "
        "top_p=0.95, top_k=40, min_p=0.05. neutral: by the model's own probabilities. Values go above both: "
        "temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty.",
        metavar="model|neutral|NAME=VALUE,…",
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
    max_sequences: int = _server(
        8,
        "The maximum number of replies computed at once. The first request of an API key starts even if all places are "
        "taken.",
        is_common=True,
        bounds=(1, 1024),
    )
    prefill_compression: str = _server(
        "off",
        "Leave out the oldest exchanges of a conversation that has more than N tokens. auto: three quarters of the "
        "model's context. The reply reports it.",
        metavar="off|auto|N",
    )
    kv_memory: int | None = _server(
        None,
        "Memory for the state of requests. It limits the context length. A request that does not fit beside others "
        "waits; one that can never fit gets a 400.",
        is_common=True,
        kind="size",
        unset="half of what the weights leave free",
        bounds=(1024**2, MAX_BUDGET),
    )
    context: int | None = _server(
        None,
        "The maximum number of tokens of a prompt and its reply. Models with two sets of RoPE factors, such as Phi-3.5 "
        "and Phi-4-mini, use those for short texts if it is not above their original length, or else those for long "
        "ones; what was saved with one set is not found with the other.",
        kind="integer",
        metavar="N",
        unset="all that the model takes and --kv-memory has room for; factors for long texts",
        bounds=(16, 1 << 30),
        parts_cache=True,
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
    disk_prefix_cache: str = _cache(
        "auto:30",
        "How much of each prompt is kept: off, full (all of it), auto:N (what is likely to be sent again, judged by "
        "the N most recent prompts) or N (the first N tokens). A request may choose its own scope.",
        is_common=True,
        metavar="SCOPE",
    )
    kv_cache_dir: Path = _cache(
        default_kv_cache_dir,
        "The folder of the store. It is created if it is missing.",
        is_common=True,
        kind="folder",
        metavar="DIR",
        unset=DEFAULT_DIR,
    )
    kv_cache_budget: int | None = _cache(
        None,
        "Set the maximum size of the store's file, for all daemons of the folder.",
        is_common=True,
        kind="size",
        unset="it stays; 16GiB for a new folder",
        bounds=(MIN_BUDGET, MAX_BUDGET),
    )
    kv_cache_new_budget: int = _cache(
        16 * 1024**3,
        "The budget of a folder that has none yet. Presets have their own.",
        kind="size",
        bounds=(MIN_BUDGET, MAX_BUDGET),
    )
    kv_cache_write_budget: str = _cache(
        "off",
        "The maximum written to the store's disk in 24 hours, such as 20GiB/day. As it is used up, fewer prefixes are "
        "saved that may not be needed again.",
        metavar="off|SIZE/day",
    )
    kv_cache_ttl: float = _cache(
        0.0,
        "Remove state that was not used for this long: 90s, 15m, 12h, 7d, 2w.",
        is_common=True,
        kind="duration",
        unset="nothing expires",
        bounds=(0, 100 * 365 * 86400),
    )
    kv_cache_min_tokens: int = _cache(64, "Do not save prefixes with fewer tokens than this.", bounds=(0, 2**31 - 1))
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
    record: Path | None = _cache(
        None,
        "Append hashes and lengths of each request, but no text, to this file, for diskprefix simulate.",
        is_common=True,
        kind="file",
        unset="nothing is recorded",
    )
    kv_cache_gate: str = _cache(
        "auto",
        "auto: do not save or restore where computing is faster, as measured on this machine. off: always save and "
        "restore.",
        choices=("auto", "off"),
    )
    block_size: int = _cache(
        256,
        "The number of tokens in a block and in a prefill step.",
        bounds=(16, 65536),
        parts_cache=True,
    )
    fingerprint: str = _cache(
        "strict",
        "strict: use saved state only where the model computes the same bits. portable: share it between machines with "
        "different kernels, devices and library versions.",
        choices=("strict", "portable"),
        parts_cache=True,
    )
    namespace_key_file: Path | None = _shared(
        None,
        "A file with a secret (at least 16 bytes). Machines that share the cache need the same file. The secret "
        "names blocks and signs uploads.",
        is_common=True,
        kind="file",
        unset="each store has its own secret",
    )
    remote_tier: str | None = _shared(
        None,
        "A bucket that machines share: s3://bucket/prefix, gs://…, az://…, file:///path. It needs --namespace-key-file "
        "and the extra remote. Credentials come from the provider's usual variables.",
        is_common=True,
        metavar="URL",
        unset="none",
    )
    remote_write: str = _shared(
        "seen-twice",
        "What to upload: prefixes seen at least twice, every saved prefix, or nothing.",
        choices=("seen-twice", "all", "off"),
    )

    # Without a flag: only tests and machines with little memory need other numbers.
    kv_cache_write_buffer: int = 1024**3
    """Bytes for state that waits to be written, at most half of the memory left beside `kv_memory`."""
    kv_cache_min_free: int = 256 * 1024**2
    """Bytes of the disk that the store leaves free."""
    kv_memory_keeps: bool = True
    """State stays in `kv_memory` when its request ends. The next turn continues from it without a read from disk."""
    kv_cache_interval: int = 10240
    """Tokens between two checkpoints of a model with state that cannot be cut."""
    kv_cache_cold_max: int = 10240
    """Such a model has one more checkpoint, at the last message boundary within this many tokens."""
    remote_deadline: float = 10.0
    """The most seconds that a request waits for the bucket before it computes missing blocks."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models of `model`, which may be a path with a comma."""
        if self.model is None or "," not in self.model or os.path.exists(os.path.expanduser(self.model)):
            return () if self.model is None else (self.model,)
        return tuple(name.strip() for name in self.model.split(",") if name.strip())

    @property
    def samples_as_model(self) -> bool:
        """False if nothing that the model's files say of sampling is used."""
        return "neutral" not in self._sampling_words

    @property
    def sampling_values(self) -> dict[str, float]:
        """The numbers of `sampling` by the names that requests have for them. Raises `SettingsError`."""
        words = self._sampling_words
        if {"model", "neutral"} <= words:
            raise SettingsError("--sampling: model and neutral exclude each other")
        values: dict[str, float] = dict(_NEUTRAL) if "neutral" in words else {}
        for part in self.sampling.split(","):
            name, _, text = map(str.strip, part.partition("="))
            if not part.strip() or part.strip() in words:
                continue
            if name not in SAMPLING_BOUNDS:
                known = ", ".join((*SAMPLING_BOUNDS, *_SAMPLING_WORDS))
                raise SettingsError(f"--sampling: {name!r} is not one of {known}")
            minimum, maximum = SAMPLING_BOUNDS[name]
            try:
                values[name] = type(minimum)(text)
            except ValueError:
                raise SettingsError(f"--sampling: {name}={text} is not a number; write for example {name}=1") from None
            if not minimum <= values[name] <= maximum:
                raise SettingsError(f"--sampling: {name}={text} is out of range ({minimum:g} to {maximum:g})")
        return values

    @property
    def _sampling_words(self) -> set[str]:
        return {part.strip() for part in self.sampling.split(",")} & set(_SAMPLING_WORDS)

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
    def uses_draft_layer(self) -> bool:
        """True if the layer of a model that predicts further tokens is loaded."""
        return self.speculative in ("auto", "mtp")

    @property
    def ahead_s(self) -> int:
        """The CPU seconds per day for work ahead of requests. Raises `SettingsError`."""
        if not re.fullmatch("off|auto|[1-9][0-9]{0,6}", self.ahead):
            raise SettingsError(f"--ahead: {self.ahead!r} is not off, auto or a number of CPU minutes per day")
        return 60 * int({"off": "0", "auto": "240"}.get(self.ahead, self.ahead))

    @property
    def write_budget_bytes(self) -> int:
        """The bytes of `kv_cache_write_budget` for 24 hours; 0 for no limit. Raises `SettingsError`."""
        text, flag = self.kv_cache_write_budget, "--kv-cache-write-budget"
        if text == "off":
            return 0
        size, slash, unit = (part.strip() for part in text.partition("/"))
        try:
            if not slash or unit != "day":
                raise SettingsError(flag)
            num_bytes = parse_size(size, param=flag)
        except SettingsError:
            raise SettingsError(f"{flag}: {text!r} is not off or a size a day; write for example 20GiB/day") from None
        if not _MIN_WRITTEN <= num_bytes <= MAX_BUDGET:
            bounds = f"{format_size(_MIN_WRITTEN)}/day to {format_size(MAX_BUDGET)}/day"
            raise SettingsError(f"{flag}: {text} is out of range ({bounds})")
        return num_bytes

    @property
    def origins(self) -> Origins:
        """Raises `SettingsError` for a text that is no list of origins."""
        return Origins.parse(self.allowed_origins, param="--allowed-origins")

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            flag, (minimum, maximum) = flag_of(name), setting.bounds
            if isinstance(value, str | Path):
                require_text(str(value), flag)
            if setting.choices and value not in setting.choices:
                raise SettingsError(f"{flag}: {value!r} is not one of {', '.join(setting.choices)}")
            is_number = setting.kind in ("integer", "size", "duration") and value is not None
            if is_number and not minimum <= value <= maximum:
                shown = format_size if setting.kind == "size" else str
                raise SettingsError(f"{flag}: {value} is out of range ({shown(minimum)} to {shown(maximum)})")
        _ = self.sampling_values, self.write_budget_bytes, self.template_variables, self.template_day, self.ahead_s
        _ = self.origins
        threshold = str(self.prefill_compression)
        if not re.fullmatch("off|auto|[0-9]{2,9}", threshold) or (threshold.isdigit() and int(threshold) < 16):
            raise SettingsError(f"--prefill-compression: {threshold!r} is not off, auto or a number of tokens from 16")
        if not self.packed_weights:
            raise SettingsError("--packed-weights: it is empty; give auto, off or a folder")
        self.require_together()

    def require_together(self) -> None:
        """Raises `SettingsError` for a value that needs another one, or has no effect beside it."""
        if self.draft_model is not None and self.speculative == "off":
            raise SettingsError("--draft-model: has no effect with --speculative off")
        if self.origins.any_page and self.api_keys is None:
            raise SettingsError("--allowed-origins: * needs --api-keys: any page that you visit would be answered")
        if self.remote_tier is not None and self.namespace_key_file is None:
            reason = "machines that share a bucket need one key to name and sign its objects"
            raise SettingsError(f"--remote-tier needs --namespace-key-file: {reason}")


SETTINGS: dict[str, Setting] = {field.name: field.metadata["setting"] for field in fields(Settings) if field.metadata}
"""The `Setting` of each field by its name, in the order of the help."""

PARTING = tuple(name for name, setting in SETTINGS.items() if setting.parts_cache)
"""The settings that part the cache."""
PER_MODEL = frozenset(
    {
        *(
            "engine",
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


def flag_of(name: str) -> str:
    """Returns `--kv-cache-dir` for `kv_cache_dir`."""
    return "--" + name.replace("_", "-")

"""`diskprefix serve`: flags, variables and a policy file become `Settings`, then the daemon runs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, get_args

import click

from diskprefix.cli.options import (
    DEFAULT_DIR,
    GroupedCommand,
    NonemptyOption,
    choice_option,
    option,
    policy_option,
    size_option,
    switch_option,
)
from diskprefix.errors import SettingsError
from diskprefix.policy.scope import parse_scope
from diskprefix.printable import escaped
from diskprefix.settings import CODECS, DTYPES, GATES, OnCorruption, Settings, flag_of, parse_duration, parse_size

_MODEL, _SERVER, _CACHE, _TUNING = "Model", "Server", "Disk cache", "Disk cache, rarely needed"
_SIZES = ("max_body_bytes", "kv_cache_budget", "kv_cache_min_free", "kv_cache_write_buffer")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_DEFAULTS = Settings()

_EPILOG = """\b
Examples:
  diskprefix serve
      the embedded SmolLM2-135M-Instruct on http://127.0.0.1:8642
  diskprefix serve --model ~/models/qwen --policy agent --kv-cache-budget 40GiB
      a model of your own, for agents, with more room on disk
  DISKPREFIX_PORT=9000 diskprefix serve --disk-prefix-cache full
      every flag is also a variable: DISKPREFIX_ and the flag in upper case

Which wins: a flag over a variable, a variable over the policy file, the policy file over the defaults.
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@option(
    "--model",
    group=_MODEL,
    metavar="ID|PATH",
    show_default="the embedded SmolLM2-135M-Instruct",
    help="A hub id, a folder or a .gguf file.",
)
@option("--device", group=_MODEL, metavar="NAME", default=_DEFAULTS.device, help="auto, cpu, cuda, cuda:1, mps …")
@choice_option("--dtype", DTYPES, group=_MODEL, default=_DEFAULTS.dtype, help="auto takes the weights' own.")
@option(
    "--served-model-name",
    group=_MODEL,
    metavar="NAME",
    show_default="the model's own",
    help="The name that clients use.",
)
@option(
    "--chat-template",
    group=_MODEL,
    metavar="FILE",
    type=click.Path(path_type=Path),
    show_default="the model's own",
    help="A Jinja chat template.",
)
@option(
    "--host",
    group=_SERVER,
    default=_DEFAULTS.host,
    help="Address to listen on. Without --api-keys there is no password.",
)
@option("--port", group=_SERVER, type=int, default=_DEFAULTS.port, help="0 takes a free port and logs it.")
@option(
    "--max-queue",
    group=_SERVER,
    type=int,
    default=_DEFAULTS.max_queue,
    help="Requests that may wait; more are answered 503 with Retry-After. One of --api-keys may have half of them.",
)
@size_option(
    "--max-body-bytes",
    group=_SERVER,
    default=_DEFAULTS.max_body_bytes,
    help="Largest request body; more is answered 413.",
)
@option(
    "--api-keys",
    cls=NonemptyOption,
    group=_SERVER,
    metavar="FILE",
    show_default="no key is asked for",
    help="Keys that clients must send, one on each line, with a name before it if you like. Each has a cache of its "
    "own. SIGHUP reads the file again.",
)
@choice_option("--log-level", _LOG_LEVELS, group=_SERVER, default=_DEFAULTS.log_level, help="What goes to stderr.")
@option(
    "--disk-prefix-cache",
    group=_CACHE,
    metavar="SCOPE",
    default=_DEFAULTS.disk_prefix_cache,
    help="What to keep of a prompt: off; full (all of it); auto or auto:N (what it shares with one of the N most "
    "recent requests); N (the first N tokens). A request may choose its own.",
)
@switch_option(
    "--reuse-generated",
    group=_CACHE,
    default=_DEFAULTS.reuse_generated,
    help="Keep the state of replies too, for the next turn. It is not the cold run's, bit for bit: computed token by "
    "token, it rounds otherwise. A request may choose for itself.",
)
@option(
    "--kv-cache-dir",
    group=_CACHE,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    show_default=DEFAULT_DIR,
    help="Folder of the store; it is created.",
)
@size_option(
    "--kv-cache-budget", group=_CACHE, default=_DEFAULTS.kv_cache_budget, help="The store never outgrows this."
)
@size_option(
    "--kv-cache-min-free",
    group=_CACHE,
    default=_DEFAULTS.kv_cache_min_free,
    help="Disk that is left free: the store grows no further, and what is new replaces what is old.",
)
@option(
    "--kv-cache-ttl",
    group=_CACHE,
    metavar="DURATION",
    show_default="nothing expires",
    help="What was not used for so long is removed: 90s, 15m, 12h, 7d, 2w.",
)
@option(
    "--kv-cache-min-tokens",
    group=_CACHE,
    type=int,
    default=_DEFAULTS.kv_cache_min_tokens,
    help="Shorter prefixes are not saved.",
)
@policy_option(_CACHE, lambda name, value: setting_of(name, value))
@option(
    "--record",
    group=_CACHE,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="nothing is recorded",
    help="Append each request's shape (hashes and lengths, no text) to this file, for diskprefix simulate.",
)
@option(
    "--kv-cache-interval",
    group=_TUNING,
    type=int,
    default=_DEFAULTS.kv_cache_interval,
    help="Tokens between checkpoints of state that cannot be cut.",
)
@option(
    "--kv-cache-cold-max",
    group=_TUNING,
    type=int,
    default=_DEFAULTS.kv_cache_cold_max,
    help="Highest position, in tokens, of a cold checkpoint of such state.",
)
@size_option(
    "--kv-cache-write-buffer",
    group=_TUNING,
    default=_DEFAULTS.kv_cache_write_buffer,
    help="State that may wait in memory to be written; when it is full, prompts are not saved.",
)
@choice_option(
    "--kv-cache-codec",
    CODECS,
    group=_TUNING,
    default=_DEFAULTS.kv_cache_codec,
    help="How state is stored, always without loss: raw is read fastest from memory, planes is smaller, zstd is the "
    "general one. auto measures disk and decoding when the store is new.",
)
@choice_option(
    "--kv-cache-gate",
    GATES,
    group=_TUNING,
    default=_DEFAULTS.kv_cache_gate,
    help="auto neither saves nor restores where computing would be faster, by what this machine measured; off always "
    "does.",
)
@choice_option(
    "--kv-cache-on-corruption",
    get_args(OnCorruption),
    group=_TUNING,
    default=_DEFAULTS.kv_cache_on_corruption,
    help="A damaged file: quarantine moves it aside and starts an empty store, refuse ends with an error.",
)
@option(
    "--block-size",
    group=_TUNING,
    type=int,
    default=_DEFAULTS.block_size,
    help="Step of the prefill grid in tokens; a store keeps different sizes apart.",
)
@choice_option(
    "--fingerprint",
    ("strict", "portable"),
    group=_TUNING,
    default=_DEFAULTS.fingerprint,
    help="portable shares a store between device kinds and library versions.",
)
def serve(**flags: Any) -> None:
    """Serve a model over an OpenAI-compatible API and keep its prefix cache on disk.

    The port answers /health at once; requests are served when the model is loaded. SIGTERM and Ctrl-C let the running
    request finish, write what is pending, and end with exit code 0.
    """
    settings = build_settings(flags)
    configure_logging(settings.log_level)
    from diskprefix.server.process import run

    run(settings)


def build_settings(flags: dict[str, Any]) -> Settings:
    """`Settings` from merged values by field name; None stands for the default. Raises `DiskPrefixError`."""
    values = {name: value for name, value in flags.items() if value is not None}
    for name in _SIZES:
        if name in values:
            values[name] = parse_size(values[name], param=flag_of(name))
    if "kv_cache_ttl" in values:
        values["kv_cache_ttl"] = parse_duration(values["kv_cache_ttl"], param="--kv-cache-ttl")
    if "disk_prefix_cache" in values:
        values["disk_prefix_cache"] = str(parse_scope(values["disk_prefix_cache"], param="--disk-prefix-cache"))
    for name in ("kv_cache_dir", "chat_template", "api_keys", "record"):
        if name in values:
            values[name] = Path(values[name]).expanduser()
    return Settings(**values)


def setting_of(name: str, value: object) -> Any:
    """What a policy file says of the field `name`, as its flag would take it. Raises `DiskPrefixError`."""
    flag = next(parameter for parameter in serve.params if parameter.name == name)
    try:
        converted = flag.process_value(click.Context(serve), str(value))
    except click.BadParameter as error:
        raise SettingsError(error.message.rstrip("."), param=flag_of(name)) from error
    # Its range.
    build_settings({name: converted})
    return converted


class _SafeFormatter(logging.Formatter):
    """One line for a message, whatever text of a client is in it; a traceback keeps its lines and nothing else."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


def configure_logging(level: str) -> None:
    """To stderr: coloured on a terminal, plain lines elsewhere. Libraries are heard from WARNING on."""
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False, highlighter=None)
        handler.setFormatter(_SafeFormatter("%(message)s", datefmt="[%X]"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_SafeFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diskprefix").setLevel(level.upper())

"""The settings of the daemon, in one frozen object.

The command line merges the defaults, a policy file (TOML), the environment and the flags. A program that embeds
diskprefix builds `Settings` itself. A value outside its range raises a `SettingsError` that names the flag.
"""

# ruff: noqa: RUF009 - _setting makes a field

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from diskprefix.errors import SettingsError
from diskprefix.units import format_size

MIN_BUDGET, MAX_BUDGET = 16 * 1024**2, 2**50
OnCorruption: TypeAlias = Literal["quarantine", "refuse"]
Kind: TypeAlias = Literal["text", "integer", "size", "duration", "switch", "file", "folder"]
"""`size` is in bytes and `duration` in seconds; people write both with a unit."""


def cache_home() -> Path:
    """Returns `$XDG_CACHE_HOME/diskprefix`, or `~/.cache/diskprefix`."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "diskprefix"


def default_kv_cache_dir() -> Path:
    """Returns the folder `kv` in systemd's CacheDirectory if the service runs under it, else in `cache_home()`."""
    directory = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return (Path(directory) if directory else cache_home()) / "kv"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one field of `Settings` is given: what the help says of it, and which values it takes."""

    group: str
    """The heading under which the help shows it."""
    help: str
    kind: Kind
    metavar: str | None = None
    unset: str | None = None
    """What the help shows as the default if the default is None or depends on the machine."""
    choices: tuple[str, ...] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """The least and the largest value."""


MODEL, SERVER, CACHE, TUNING = "Model", "Server", "Disk cache", "Disk cache, rarely needed"
SHARED_TIER = "Shared tier"
CODECS = ("planes", "raw")
DEFAULT_DIR = "$XDG_CACHE_HOME/diskprefix/kv"
"""The default of `--kv-cache-dir`, as the help shows it."""


def _setting(group: str, default: Any, help: str, **attributes: Any) -> Any:
    """A field of `Settings` with the `Setting` that describes it. A callable `default` is called for each object."""
    plain_kind: Kind = "switch" if isinstance(default, bool) else "integer" if isinstance(default, int) else "text"
    metadata = {"setting": Setting(group=group, help=help, **{"kind": plain_kind} | attributes)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_model, _server, _cache, _tuning, _shared = (
    partial(_setting, group) for group in (MODEL, SERVER, CACHE, TUNING, SHARED_TIER)
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that `diskprefix serve` can be told. The field `kv_cache_dir` is the flag `--kv-cache-dir`, and so on.

    This is the one list of the settings: the command line, its help and the table in `cli/README.md` follow it.
    """

    model: str | None = _model(
        None,
        "A Hugging Face hub id, a folder or a .gguf file.",
        metavar="ID|PATH",
        unset="the embedded SmolLM2-135M-Instruct",
    )
    device: str = _model(
        "auto", "cpu, cuda, cuda:1, mps, and so on. auto takes an accelerator if there is one.", metavar="NAME"
    )
    dtype: str = _model(
        "auto",
        "The type in which the model computes. auto takes the type of the weights.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    kernels: str = _model(
        "auto",
        "Which kernels compute attention and quantised weights. auto takes the best that are compiled for this CPU, or "
        "else those of torch.",
        choices=("auto", "torch", "amx", "avx512_bf16", "avx512", "avx2", "baseline"),
    )
    weights: str = _model(
        "auto",
        "The form in which weights are kept in memory. native is that of the files. int8 and int4 quantise matrices, "
        "once; decoding is faster, and the model answers a little differently. auto keeps the quants of a .gguf file "
        "where a compiled kernel takes them: the same weights, computed faster.",
        choices=("auto", "native", "int8", "int4"),
    )
    served_model_name: str | None = _model(
        None, "The name that clients use for the model.", metavar="NAME", unset="the model's own"
    )
    chat_template: Path | None = _model(
        None, "A Jinja file to use as the chat template.", kind="file", unset="the model's own"
    )
    host: str = _server("127.0.0.1", "The address to listen on. Without --api-keys everybody who reaches it is served.")
    port: int = _server(8642, "The port to listen on. 0 takes a free port and logs its number.", bounds=(0, 65535))
    allowed_hosts: str | None = _server(
        None,
        "More names by which clients may call this server, separated by commas; * for any name. A web page whose own "
        "name leads to this machine is refused by its name.",
        metavar="NAME,…",
        unset="its address; beyond the loopback address all addresses, names without a dot and, with --api-keys, all",
    )
    max_queue: int = _server(
        64,
        "The number of requests that may wait. More get a 503 with Retry-After. One API key may have half of them.",
        bounds=(1, 100_000),
    )
    max_body_bytes: int = _server(
        32 * 1024**2, "The largest request body. A larger one gets a 413.", kind="size", bounds=(1024, 2**40)
    )
    max_connections: int = _server(
        256,
        "The number of connections that may be open, those without a request included. More get a 503 if all of them "
        "are in requests.",
        bounds=(1, 100_000),
    )
    api_keys: Path | None = _server(
        None,
        "A file with the keys that clients must send, one on each line, with an optional name before it. Each key has "
        "a cache of its own. SIGHUP reads the file again.",
        kind="file",
        unset="no key is asked for",
    )
    standby: bool = _server(
        False,
        "Keep a second process that has imported everything. It takes the place of the first when that dies. It takes "
        "about 250 MiB of memory.",
    )
    log_level: str = _server("info", "What is logged to stderr.", choices=("debug", "info", "warning", "error"))
    log_format: str = _server(
        "text", "How it is logged: a line of text, or a JSON object on a line of its own.", choices=("text", "json")
    )
    log_prompts: bool = _server(
        False, "Log the prompt of each request, with its line. The log then holds what people wrote."
    )
    otlp_traces_endpoint: str | None = _server(
        None,
        "Send a trace of each request, with a span for each stage, to this OTLP/HTTP collector, for example "
        "http://localhost:4318/v1/traces. It needs the extra otel.",
        metavar="URL",
        unset="no traces",
    )
    max_sequences: int = _server(
        8,
        "The number of requests that are computed together. More wait. Each of the n replies to a request counts. A "
        "request whose API key has no other running does not wait.",
        bounds=(1, 1024),
    )
    inter_token_latency: float = _server(
        0.05,
        "How long a reply may wait for its next token because a prompt of another request is computed, where the model "
        "is fast enough: such prompts are computed in smaller steps, so their first token comes later. 0 lets replies "
        "wait.",
        kind="duration",
        bounds=(0, 60),
    )
    speculative: str = _server(
        "off",
        "ngram guesses the next tokens where a reply repeats earlier text, as edits of code do, and computes several "
        "in one step. Replies are the same, token by token. Where guesses do not make it faster, none are computed.",
        choices=("off", "ngram"),
    )
    draft_model: str | None = _server(
        None,
        "A smaller model with the same vocabulary: a Hugging Face hub id, a folder or a .gguf file. It guesses the "
        "next tokens, and several are computed in one step. Replies are the same, token by token. Where guesses do not "
        "make it faster, none are computed.",
        metavar="ID|PATH",
        unset="none",
    )
    prefill_compression: str = _server(
        "off",
        "auto leaves the oldest exchanges of a conversation out that has more than --prefill-threshold tokens. The "
        "reply says so.",
        choices=("off", "auto"),
    )
    prefill_threshold: int | None = _server(
        None,
        "Tokens of a prompt above which --prefill-compression leaves some out, until half as many remain.",
        kind="integer",
        metavar="N",
        unset="three quarters of the model's positions",
        bounds=(16, 2**31 - 1),
    )
    kv_memory: int | None = _server(
        None,
        "Memory for the state of requests that run, and of those that ended. A request that does not fit waits; one "
        "that never fits gets a 400.",
        kind="size",
        unset="half of what is free once the model is loaded",
        bounds=(1024**2, MAX_BUDGET),
    )
    kv_memory_entries: int = _server(
        8,
        "The number of requests whose state stays in memory when they end. The next turn goes on from it without "
        "reading the disk. 0 keeps none.",
        bounds=(0, 1024),
    )
    disk_prefix_cache: str = _cache(
        "auto:30",
        "How much of a prompt is kept: off (nothing), full (all of it), auto or auto:N (what is likely to come again, "
        "from the N most recent prompts) or N (the first N tokens). A request may choose its own.",
        metavar="SCOPE",
    )
    reuse_generated: bool = _cache(
        False,
        "Keep the state of replies too, for the next turn, where a model is not exact at every token. Such a hit is "
        "not bit for bit the cold run. Other models keep replies exactly, by the scope alone. A request may choose its "
        "own.",
    )
    kv_cache_dir: Path = _cache(
        default_kv_cache_dir, "The folder of the store. It is created.", kind="folder", metavar="DIR", unset=DEFAULT_DIR
    )
    kv_cache_budget: int = _cache(
        4 * 1024**3,
        "The largest size of the store's file. When it is reached, the least useful blocks are evicted.",
        kind="size",
        bounds=(MIN_BUDGET, MAX_BUDGET),
    )
    kv_cache_min_free: int = _cache(
        1024**3,
        "Disk space to leave free. The store does not grow into it: new blocks replace old ones.",
        kind="size",
        bounds=(0, MAX_BUDGET),
    )
    kv_cache_ttl: float = _cache(
        0.0,
        "Remove what was not used for this long: 90s, 15m, 12h, 7d, 2w.",
        kind="duration",
        unset="nothing expires",
        bounds=(0, 100 * 365 * 86400),
    )
    kv_cache_min_tokens: int = _cache(512, "Prefixes with fewer tokens are not saved.", bounds=(0, 2**31 - 1))
    normalise: str = _cache(
        "report",
        "What clients change in each request, and the cache then does not find again: billing-header, clock, "
        "schema-keys, tool-order. Each is off, report (say what broke a prefix, change nothing) or on (undo the "
        "change); a mode alone is that of all others.",
        metavar="NAME=MODE,...",
    )
    record: Path | None = _cache(
        None,
        "Append the shape of each request (hashes and lengths, no text) to this file, for diskprefix simulate.",
        kind="file",
        unset="nothing is recorded",
    )
    namespace_key_file: Path | None = _shared(
        None,
        "A file with a secret of at least 16 bytes that all machines share who share what they computed. It names "
        "blocks, and signs what is put into --remote-tier. A store keeps the key that it was created with.",
        kind="file",
        unset="each store has a secret of its own",
    )
    remote_tier: str | None = _shared(
        None,
        "A bucket that machines share: s3://bucket/prefix, gs://…, az://…, or a folder as file:///path. What another "
        "machine left there is fetched. Keys, region and endpoint come from the environment, as each provider's own "
        "tools read them. It needs --namespace-key-file and the extra remote.",
        metavar="URL",
        unset="none",
    )
    remote_write: str = _shared(
        "seen-twice",
        "What is left in --remote-tier: what came for the second time, all that is saved, or nothing.",
        choices=("seen-twice", "all", "off"),
    )
    remote_deadline: float = _shared(
        10.0,
        "The longest time that a request waits for --remote-tier. What has not come by then is computed.",
        kind="duration",
        bounds=(0.01, 3600),
    )
    kv_cache_interval: int = _tuning(
        10240,
        "For models with state that exists at one position only: the number of tokens between two checkpoints.",
        bounds=(1, 2**31 - 1),
    )
    kv_cache_cold_max: int = _tuning(
        10240,
        "For such models: another checkpoint is kept at the last message boundary at or below this many tokens.",
        bounds=(0, 2**31 - 1),
    )
    kv_cache_write_buffer: int = _tuning(
        1024**3,
        "The amount of state that may wait in memory for the disk, at least one block. A longer prompt is saved in "
        "parts, as the disk takes them.",
        kind="size",
        bounds=(0, MAX_BUDGET),
    )
    kv_cache_codec: str = _tuning(
        "planes",
        "How state is stored, always without loss. planes is the smallest, and nearly as fast as raw with the compiled "
        "operators; without them raw is faster.",
        choices=CODECS,
    )
    kv_cache_gate: str = _tuning(
        "auto",
        "auto neither saves nor restores what is faster to compute on this machine, by measured times. off always "
        "saves and restores.",
        choices=("auto", "off"),
    )
    kv_cache_on_corruption: OnCorruption = _tuning(
        "quarantine",
        "What to do with a damaged file: quarantine moves it aside and starts an empty store, refuse ends with an "
        "error.",
        choices=get_args(OnCorruption),
    )
    block_size: int = _tuning(
        256,
        "The number of tokens in a block and in a step of prefill. Prefixes with different block sizes are not shared.",
        bounds=(16, 65536),
    )
    fingerprint: str = _tuning(
        "strict",
        "portable shares a store between kinds of devices and versions of libraries. strict does not.",
        choices=("strict", "portable"),
    )

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        """The names of `allowed_hosts`."""
        return tuple(name.strip() for name in (self.allowed_hosts or "").split(",") if name.strip())

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            flag, (least, most) = flag_of(name), setting.bounds
            if setting.choices and value not in setting.choices:
                raise SettingsError(f"{flag}: {value!r} is not one of {', '.join(setting.choices)}")
            is_number = setting.kind in ("integer", "size", "duration") and value is not None
            if is_number and not least <= value <= most:
                shown = format_size if setting.kind == "size" else str
                raise SettingsError(f"{flag}: {value} is out of range ({shown(least)} to {shown(most)})")
        if self.remote_tier is not None and self.namespace_key_file is None:
            raise SettingsError(
                "--remote-tier needs --namespace-key-file: machines that share a bucket name and sign what lies there "
                "with one key"
            )


SETTINGS: dict[str, Setting] = {field.name: field.metadata["setting"] for field in fields(Settings)}
"""The `Setting` of each field by its name, in the order of the help."""


def flag_of(name: str) -> str:
    """Returns `--kv-cache-dir` for `kv_cache_dir`."""
    return "--" + name.replace("_", "-")

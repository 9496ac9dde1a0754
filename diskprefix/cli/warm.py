"""`diskprefix warm`: prefill prompts ahead of time, so that the first request for them is a hit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from diskprefix.cli.options import (
    Decorated,
    GroupedCommand,
    build_settings,
    nonempty,
    option,
    policy_option,
    setting_option,
    variable_of,
)
from diskprefix.cli.serve import configure_logging
from diskprefix.cli.tooling import counted, plain, print_json, status
from diskprefix.cli.warm_input import WarmItem, read_items
from diskprefix.cli.warm_target import Answer, InProcess, OverHttp, Target
from diskprefix.errors import DiskPrefixError, InvalidRequest, NotReady, SettingsError
from diskprefix.policy.scope import parse_scope
from diskprefix.printable import printable_only, shown
from diskprefix.settings import CACHE, SERVER, SETTINGS, Settings

if TYPE_CHECKING:
    from rich.status import Status

_ALONE, _WARM, _DAEMON = "With --alone: ", "Warm", "A running daemon"
_NOT_OF_WARM = {"disk_prefix_cache", "reuse_generated", "record"}
"""Settings without a meaning here, where --scope says what is kept of each prompt and nobody else sends requests."""
_OF_SERVE = [name for name, setting in SETTINGS.items() if setting.group != SERVER and name not in _NOT_OF_WARM]
_DEFAULT_URL = f"http://{Settings.host}:{Settings.port}"
_FAILED = 1
"""Exit code."""
_PATIENCE_S = 600.0
"""How long a prompt is sent again while the queue is full, and how long a write is waited for."""
_LONGEST_PAUSE_S = 10.0
_POLL_S = 0.05
_FORBIDDEN = (401, 403)
_KEPT = ("queued", "stored")

_EPILOG = """\b
Examples:
  diskprefix warm system-prompt.txt                    a raw prompt, as /v1/completions takes it
  diskprefix warm conversation.json                    a list of messages, or a request body
  diskprefix warm yesterday.jsonl                      one request body or list of messages on each line
  diskprefix warm --alone --model ~/models/qwen *.json without a daemon: the model is loaded here

Exit codes: 0 done; 1 a prompt failed, or no daemon answers; 2 wrong usage; with --alone also 3 the model cannot be
loaded, 4 the store cannot be used.
"""


def _alone_options(command: Decorated) -> Decorated:
    """The settings of a daemon, under headings that say that they go with --alone."""
    command = policy_option(_ALONE + CACHE)(command)
    for name in reversed(_OF_SERVE):
        command = setting_option(name, group=_ALONE + SETTINGS[name].group)(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """The outcome of one prompt.

    `saved` is that of the response. `reason` says why the prompt was not saved, `error` why it was not computed.
    `seconds` is the time that computing it took.
    """

    where: str
    prompt_tokens: int = 0
    restored: int = 0
    saved: str = "none"
    reason: str | None = None
    seconds: float = 0.0
    error: str | None = None


@click.command(cls=GroupedCommand, short_help="Prefill and save prompts ahead of time.", epilog=_EPILOG)
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
@option(
    "--scope",
    group=_WARM,
    metavar="SCOPE",
    default="full",
    help="How much of each prompt is kept: full, auto:N or N. What the body says does not count.",
)
@option("--json", group=_WARM, is_flag=True, help="Print JSON for scripts, and nothing else.")
@option(
    "--url",
    group=_DAEMON,
    metavar="URL",
    default=_DEFAULT_URL,
    envvar=variable_of("--url"),
    help="The address of the daemon. The variable is DISKPREFIX_URL.",
)
@option(
    "--api-key",
    group=_DAEMON,
    metavar="KEY",
    envvar=variable_of("--api-key"),
    show_default="none is sent",
    callback=nonempty,
    help="The key to send to a daemon with --api-keys. The prompts are saved for this key. Give it in the variable "
    "DISKPREFIX_API_KEY, where the list of processes does not show it.",
)
@option("--alone", group=_DAEMON, is_flag=True, help="Load the model here instead of asking a daemon.")
@_alone_options
@click.pass_context
def warm(
    context: click.Context,
    /,
    files: tuple[str, ...],
    scope: str,
    json: bool,
    url: str,
    api_key: str | None,
    alone: bool,
    **flags: Any,
) -> int:
    """Compute prompts and keep their state on disk before anybody sends them.

    Each FILE is a text, a JSON list of messages, a JSON request body, or a .jsonl file with one of the latter two on
    each line. The name - is standard input. The prompts are sent to a running daemon. With --alone they are computed in
    this process, in the folder that a daemon with the same options uses, and one may be running beside it. A prompt
    that is saved already is only read.

    Fields of a body that do not change the prompt are dropped: model, response_format, everything about the reply
    (max_tokens, stream, n, stop, logprobs, sampling and so on), and scope, window and save of prefix_cache.

    The command returns when everything is on disk. It names a prompt that fails by file and line, and goes on.
    """
    _refuse_what_is_not_used(context, alone)
    kept = parse_scope(scope, param="--scope")
    if kept.kind == "off":
        raise SettingsError("--scope: off keeps nothing, so there is nothing to warm", param="--scope")
    configure_logging("warning")
    target: Target = InProcess(_settings(flags)) if alone else OverHttp(url, api_key)
    items = list(_read(files))
    try:
        with status("starting") as shown_status:
            show = _Show(json, shown_status)
            target.wait_ready(show.say)
            warming = _Warming(target, str(kept), show)
            for number, item in enumerate(items, start=1):
                show.at(number, len(items), item)
                warming.add(item)
    finally:
        target.close()
    warming.report(as_json=json)
    return _FAILED if warming.has_failed else 0


def _refuse_what_is_not_used(context: click.Context, alone: bool) -> None:
    """Raises `UsageError` for an option of a daemon with --alone, and the other way round."""
    for parameter in context.command.params:
        group = getattr(parameter, "group", "")
        is_given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if is_given and not alone and group.startswith(_ALONE):
            raise click.UsageError(
                f"{parameter.opts[0]} goes with --alone; a running daemon has its own settings", context
            )
        if is_given and alone and parameter.name in ("url", "api_key"):
            raise click.UsageError(f"{parameter.opts[0]} is for a running daemon; it does not go with --alone", context)


def _settings(flags: dict[str, Any]) -> Settings:
    # The bodies come from this process, so their size needs no limit.
    return replace(build_settings(flags), max_body_bytes=2**40)


@dataclass(frozen=True)
class _Unread:
    """A file that could not be read, and why."""

    where: str
    error: str


def _read(files: Sequence[str]) -> Iterator[WarmItem | _Unread]:
    for name in files:
        try:
            yield from read_items(name)
        except DiskPrefixError as error:
            yield _Unread(name, error.message)
        except OSError as error:
            yield _Unread(name, error.strerror or str(error))


class _Warming:
    """Sends the prompts one after the other, and counts."""

    def __init__(self, target: Target, scope: str, show: _Show) -> None:
        self._target = target
        self._scope = scope
        self._show = show
        self._done: list[Warmed] = []
        self._started = time.monotonic()
        self._before = self._state()
        self._after = self._before

    @property
    def has_failed(self) -> bool:
        return bool(self._lost) or any(warmed.error for warmed in self._done)

    def add(self, item: WarmItem | _Unread) -> None:
        """Compute one prompt, and wait until it is on disk: the daemon drops what its write buffer cannot hold."""
        warmed = self._warm(item)
        self._done.append(warmed)
        self._show.done(warmed)
        self._settle()

    def _warm(self, item: WarmItem | _Unread) -> Warmed:
        if isinstance(item, _Unread):
            return Warmed(where=item.where, error=item.error)
        started = time.monotonic()
        try:
            path, body = item.request(self._scope)
            answer = self._ask(path, body)
        except InvalidRequest as error:
            return Warmed(where=item.where, error=error.message)
        if answer.status == 401:
            raise SettingsError(f"--api-key: {answer.message}", param="--api-key")
        if answer.status != 200:
            return Warmed(where=item.where, error=answer.message)
        cache = answer.body["prefix_cache"]
        is_kept = cache["saved"] in _KEPT
        return Warmed(
            where=item.where,
            prompt_tokens=answer.body["usage"]["prompt_tokens"],
            restored=cache["restored"],
            saved=cache["saved"],
            reason=None if is_kept else cache["boundary_reason"],
            seconds=round(time.monotonic() - started, 3),
        )

    def _ask(self, path: str, body: object) -> Answer:
        """Send a request, again and again while the queue is full."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._target.call("POST", path, body)
            if answer.status not in (429, 503) or time.monotonic() > deadline:
                return answer
            self._show.say(answer.message)
            wanted = answer.headers.get("retry-after", "")
            time.sleep(min(float(wanted) if wanted.isdecimal() else 1.0, _LONGEST_PAUSE_S))

    def _settle(self) -> None:
        """Wait until what waits to be written now is written. Other clients may keep the daemon writing for ever."""
        first = self._after = self._state()
        deadline = time.monotonic() + _PATIENCE_S
        while self._after is not None and first is not None and self._after["pending_bytes"]:
            if self._after["saved_bytes"] - first["saved_bytes"] >= first["pending_bytes"]:
                return
            if time.monotonic() > deadline:
                raise NotReady(
                    f"the daemon has not written what was pending within {_PATIENCE_S:.0f} s; its log may say why"
                )
            self._show.say("writing")
            time.sleep(_POLL_S)
            self._after = self._state()

    def _state(self) -> dict[str, Any] | None:
        """The counts of the cache, or None where the key may not read them."""
        answer = self._target.call("GET", "/props")
        if answer.status in _FORBIDDEN:
            return None
        if answer.status != 200:
            raise NotReady(f"the daemon does not say what it has written: {answer.message}")
        state: dict[str, Any] = answer.body["full_cache"]["state"]
        return state

    def _counted(self, name: str) -> int:
        """How much a count of the daemon has grown since the start."""
        if self._before is None or self._after is None:
            return 0
        return int(self._after[name] - self._before[name])

    @property
    def _lost(self) -> int:
        return self._counted("dropped")

    def report(self, *, as_json: bool) -> None:
        """Print a summary and warnings, or everything as JSON."""
        done = [warmed for warmed in self._done if warmed.error is None]
        total = {
            "prompts": len(self._done),
            "failed": len(self._done) - len(done),
            "not_saved": sum(warmed.saved not in _KEPT for warmed in done),
            "prompt_tokens": sum(warmed.prompt_tokens for warmed in done),
            "restored_tokens": sum(warmed.restored for warmed in done),
            "dropped": self._lost,
            "evicted_blocks": self._counted("evicted_blocks"),
            "on_disk": self._after is not None and not self._after["error"],
            "seconds": round(time.monotonic() - self._started, 3),
        }
        if as_json:
            print_json({"total": total, "prompts": [asdict(warmed) for warmed in self._done]})
            return
        click.echo(_summary(total))
        for line in self._warnings(total):
            click.echo(f"warning: {line}", err=True)

    def _warnings(self, total: dict[str, Any]) -> Iterator[str]:
        if self._after is None:
            yield "only the key named admin may ask whether everything is on disk; the daemon writes within seconds"
        elif self._after["error"]:
            yield f"nothing is kept on disk: {shown(str(self._after['error']))}"
        if total["dropped"]:
            yield f"{counted(total['dropped'], 'prompt')} did not fit into the cache meanwhile; see the daemon's log"
        if total["evicted_blocks"]:
            blocks = counted(total["evicted_blocks"], "block")
            yield f"{blocks} had to be evicted meanwhile; --kv-cache-budget is too small for everything"


def _summary(total: dict[str, Any]) -> str:
    tokens, restored = total["prompt_tokens"], total["restored_tokens"]
    parts = [
        f"{counted(total['prompts'] - total['failed'], 'prompt')} of {counted(tokens, 'token')}",
        f"{restored:,} restored and {tokens - restored:,} computed in {total['seconds']:.1f} s",
        *([f"{total['not_saved']} not saved"] if total["not_saved"] else []),
        *([f"{total['failed']} failed"] if total["failed"] else []),
    ]
    return ", ".join(parts)


class _Show:
    """What people see meanwhile: a line for each prompt, and on a terminal what is being done."""

    def __init__(self, is_quiet: bool, status: Status | None) -> None:
        self._is_quiet = is_quiet
        self._status = status
        self._prompt = ""
        self._tokens = self._restored = 0

    def at(self, number: int, total: int, item: WarmItem | _Unread) -> None:
        so_far = f"{counted(self._tokens, 'token')} until now, {self._restored:,} restored"
        self._prompt = f"{number} of {total} ({so_far}): {item.where}"
        self._update(self._prompt)

    def say(self, line: str) -> None:
        """Show what is waited for."""
        self._update(f"{self._prompt}: {line}" if self._prompt else line)

    def done(self, warmed: Warmed) -> None:
        self._tokens += warmed.prompt_tokens
        self._restored += warmed.restored
        if self._status is not None:
            # The line is printed to the terminal that shows the status.
            self._status.stop()
        where = printable_only(warmed.where)
        if warmed.error is not None:
            click.echo(f"error: {where}: {warmed.error}", err=True)
        elif not self._is_quiet:
            click.echo(f"{where}: {_described(warmed)}")
        if self._status is not None:
            self._status.start()

    def _update(self, line: str) -> None:
        if self._status is not None:
            self._status.update(plain(line))


def _described(warmed: Warmed) -> str:
    saved = {"queued": "saved", "stored": "saved before", "dropped": "not saved: no room"}.get(warmed.saved)
    saved = saved or f"not saved: {warmed.reason or 'nothing to keep'}".replace("_", " ")
    tokens = counted(warmed.prompt_tokens, "token")
    return f"{tokens}, {warmed.restored:,} restored, {saved}, {warmed.seconds:.1f} s"

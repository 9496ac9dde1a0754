"""`diskprefix ps` and `diskprefix stop`: show and free the memory of this user's daemons."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from diskprefix.daemon.cli.options import api_key_option, nonempty
from diskprefix.daemon.server.process.token_file import own_daemons
from diskprefix.desk.shared.daemon_call import process_of, running_daemon, state_of
from diskprefix.desk.shared.daemon_choice import shared_daemon
from diskprefix.desk.shared.own_daemon import none_runs, own_urls, url_option
from diskprefix.desk.shared.tooling import json_option, plain, print_json, print_table, say, status
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.printable import printable_only, shown
from diskprefix.runtime.fetch.proposals import names_meant
from diskprefix.runtime.fetch.recommended_sampling import sampling_line
from diskprefix.units import ago, counted, format_duration, format_size

PAUSED = {
    "off": "--ahead is off",
    "battery": "not on battery",
    "budget": "the budget of --ahead is used up",
    "other programs": "other programs want the CPUs",
}
"""Why nothing is computed ahead, for people."""
_PROC = Path("/proc")


@click.command(short_help="Show what is in memory, and what is being computed.")
@url_option()
@api_key_option("The key named admin, for a daemon with --api-keys.")
@json_option
def ps(url: str | None, api_key: str | None, as_json: bool) -> None:
    """Show the models that all daemons of this user, or the one at --url, have in memory: the memory that each needs
    and what is in it, when it was loaded, how requests that do not say it are sampled, and its requests. A prompt that
    is being computed is shown with the time left.

    \b
    diskprefix ps
    diskprefix ps --json
    diskprefix ps --url http://192.168.1.5:8642 --api-key "$KEY"

    \b
    Exit codes: 0 done, also if no daemon of yours runs; 1 the daemon at --url does not answer; 2 wrong usage, or the
    key is refused.
    """
    urls = own_urls() if url is None else [url]
    rows = _rows(urls, api_key)
    if as_json:
        print_json({"models": rows})
        return
    if not urls:
        say(none_runs())
    titles = ("model", "memory", "context", "loaded", "requests", "daemon")
    print_table(titles, map(_cells, rows), right=("memory", "context", "requests"), wrapped=())
    for row in rows:
        if row["memory"]:
            parts = ", ".join(f"{what} {format_size(num_bytes)}" for what, num_bytes in row["memory"].items())
            click.echo(printable_only(f"{row['model']}: {parts}"))
        if row["sampling"]:
            click.echo(printable_only(f"{row['model']}: replies with {sampling_line(row['sampling'])}"))
        if row["cache_error"]:
            click.echo(printable_only(f"{row['model']}: prompts are not saved, or not all: {row['cache_error']}"))
    for row in rows:
        for running in row["running"]:
            click.echo(printable_only(_progress(running)))
        if (ahead := row["ahead"]) and (ahead["tokens"] or ahead["waiting"]):
            click.echo(printable_only(f"{row['model']}: {_ahead_line(ahead)}"))
            for asked in ahead.get("asked", ()):
                of_all = f"{asked['ready']:,} of {asked['tokens']:,} tokens" if asked["tokens"] else "not begun"
                of_all += "" if asked["waits"] else ", and it waits no longer: others of its client came after it"
                click.echo(printable_only(f"{row['model']}: for {asked['label']}: {of_all}"))


def _rows(urls: list[str], api_key: str | None) -> list[dict[str, Any]]:
    """Returns the rows of all daemons. An error of one of several daemons is printed, and hides no other daemon. The
    error of an only daemon is raised."""
    rows: list[dict[str, Any]] = []
    for url in urls:
        try:
            rows += _in_memory(url, api_key)
        except DiskPrefixError as error:
            if len(urls) == 1:
                raise
            say(f"{url}: {error.message}")
    return rows


def _in_memory(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Returns a row for each model that a daemon has or loads, or a row without a model. Raises `NotReady` if no daemon
    answers, and `SettingsError` if it refuses the key."""
    call = running_daemon(url, api_key)
    health = state_of(call, url)
    if health["status"] == "loading":
        return [_row(url, {"model": health.get("model") or "…", "phase": "loading"})]
    answer = call("GET", "/props", None)
    if answer.status in (401, 403):
        raise SettingsError(f"--api-key: {answer.message}")
    if answer.status != 200:
        # The daemon has unloaded its only model.
        return [_row(url, {"phase": "unloaded"})]
    if "models" not in answer.body:
        return [_row(url, {"phase": "ready"}, answer.body)]
    rows = []
    for slot in answer.body["models"]:
        # A worker that loads would not answer.
        own = call("GET", f"/props?model={quote(slot['model'], safe='')}", None) if slot["phase"] == "ready" else None
        rows.append(_row(url, slot, own.body if own is not None and own.status == 200 else None))
    return rows or [_row(url, {"phase": "unloaded"})]


def _row(url: str | None, slot: dict[str, Any], props: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a row from what the router (`slot`) and the model's process (`props`) say."""
    model, running = (props["model"], props["running"]) if props else ({}, [])
    return {
        "model": model.get("name", slot.get("model")),
        "state": slot["phase"],
        "memory_bytes": model.get("needs_bytes", slot.get("needed_bytes")),
        "memory": model.get("needs", {}),
        "context": model.get("max_positions"),
        "loaded_at": model.get("loaded_at"),
        "requests": len(running) if props else slot.get("num_active", 0),
        "running": running,
        "ahead": props.get("ahead") if props else None,
        "sampling": props.get("sampling") if props else None,
        "cache_error": props["full_cache"]["state"]["error"] if props else None,
        "url": url,
    }


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        plain(row["model"] or "no model"),
        format_size(row["memory_bytes"]) if row["memory_bytes"] else "",
        f"{row['context']:,}" if row["context"] else "",
        ago(row["loaded_at"]) if row["loaded_at"] else row["state"],
        str(row["requests"]),
        plain(row["url"]),
    )


def _progress(running: dict[str, Any]) -> str:
    """Returns a line about a request that is being answered."""
    line = f"{running['model']}: {running['computed_tokens']:,} of {running['prompt_tokens']:,} tokens of the prompt"
    if running["reply_tokens"]:
        line += f", {running['reply_tokens']:,} of the reply"
    if running["tokens_per_s"]:
        line += f", {running['tokens_per_s']:.0f} tokens/s"
    left_s = running["seconds_left"]
    return line if left_s is None else f"{line}, {format_duration(left_s)} left"


def _ahead_line(ahead: dict[str, Any]) -> str:
    """Returns a line about the work ahead of requests."""
    line = f"{ahead['tokens']:,} tokens of prompts that are likely to come were computed in idle time"
    if ahead["waiting"]:
        line = f"in idle time, {counted(ahead['waiting'], 'prompt')} that may come next will be computed"
        line += f" ({ahead['tokens']:,} tokens are)" if ahead["tokens"] else ""
    return f"{line} ({PAUSED[ahead['paused']]})" if ahead["paused"] in PAUSED else line


@click.command(short_help="Unload a model, or end the daemon.")
@click.argument("model", required=False, callback=nonempty)
@url_option()
@api_key_option("The key named admin, for a daemon with --api-keys.")
@json_option
def stop(model: str | None, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Unload MODEL from a daemon with several models or with --idle-unload; the next request loads it again. Without
    MODEL, end this user's daemon.

    Before a daemon frees its memory, it saves the state that is not yet on disk. A daemon that an agent or a
    conversation uses is not ended. If there are several daemons, name one with --url.

    \b
    diskprefix stop
    diskprefix stop qwen3.5:4b
    diskprefix stop --url http://127.0.0.1:8643

    \b
    Exit codes: 0 done; 1 no daemon answers; 2 wrong usage, no such model in memory, or the daemon is in use.
    """
    urls = own_urls() if url is None else [url]
    if not urls:
        raise NotReady(none_runs())
    if model is not None:
        done = _unload(urls, model, api_key)
    elif len(urls) > 1:
        raise SettingsError(f"you have several daemons; name one with --url: {', '.join(urls)}")
    else:
        done = {"url": urls[0], "status": _end(urls[0])}
    if as_json:
        print_json(done)
    else:
        click.echo(printable_only(f"{done.get('model', 'the daemon')} at {done['url']}: {done['status']}"))


def _unload(urls: list[str], model: str, api_key: str | None) -> dict[str, str]:
    """Unloads a model. Raises `SettingsError` if no daemon has it in memory, or if it cannot be unloaded."""
    names = {row["model"]: row["url"] for row in _rows(urls, api_key) if row["model"] is not None}
    name = next((name for name in (model, *names_meant(model)) if name in names), None)
    if name is None:
        loaded = ", ".join(map(shown, names)) or "none"
        raise SettingsError(f"{shown(model)} is not in memory; the models there are: {loaded}")
    answer = running_daemon(names[name], api_key)("POST", f"/models/{quote(name)}/unload", None)
    if answer.status == 404:
        only = f"the daemon at {names[name]} has no other model than {shown(name)}, so it keeps it in memory"
        unload = "`serve --idle-unload 30m` unloads it when it is idle"
        raise SettingsError(f"{only}; `diskprefix stop --url {names[name]}` ends the daemon, and {unload}")
    if answer.status != 200:
        problem = f"the daemon at {names[name]} cannot unload {shown(name)} ({answer.message})"
        raise SettingsError(f"{problem}; end it: diskprefix stop --url {names[name]}")
    return {"model": name, "url": names[name], "status": answer.body["status"]}


def _end(url: str) -> str:
    """Ends a daemon of this user. Returns the status to show. Raises `NotReady` and `SettingsError`."""
    if (pid := process_of(url)) is None:
        raise SettingsError(f"the daemon at {url} is not yours: only its user can end it")
    for daemon in shared_daemon().all():
        if daemon.url() == own_daemons().get(pid, url):
            with daemon.mutex():
                if daemon.end_unused():
                    raise SettingsError(f"an agent or a conversation uses the daemon at {url}; end that first")
            return "ended"
    is_service = False
    with suppress(OSError):
        is_service = "/diskprefix.service" in (_PROC / str(pid) / "cgroup").read_text(encoding="ascii")
    waiting = status("the daemon is finishing its requests, and saving what is only in memory …")
    # A daemon still saves after it has stopped listening.
    with suppress(ProcessLookupError), waiting, open(os.pidfd_open(pid)) as process:
        os.kill(pid, signal.SIGTERM)
        select.select([process], [], [])
    return "ended; its service starts it again for the next request" if is_service else "ended"

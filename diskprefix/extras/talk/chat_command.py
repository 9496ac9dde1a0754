"""`diskprefix chat`: a conversation with the model of a running daemon, in a terminal."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from diskprefix.cli.options import api_key_option, option, url_option
from diskprefix.cli.tooling import status
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.extras.daemon_call import Stream, running_daemon, streaming_daemon, wait_ready
from diskprefix.extras.open_page import open_page
from diskprefix.printable import printable_only, shown
from diskprefix.units import counted, format_duration

_EPILOG = """\b
Examples:
  diskprefix chat
  diskprefix chat --browser                 the same as a page in a browser
  diskprefix chat --system notes.txt        with instructions or a document that every prompt begins with
  echo "Name three rivers." | diskprefix chat

In a conversation: /again answers the last message again, /new begins anew, Ctrl+C stops a reply, Ctrl+D ends. Kill the
daemon, start it again, and go on: the next reply says what was restored.

Exit codes: 0 done; 1 no daemon answers, or a reply failed; 2 wrong usage.
"""
_WAITING = "waiting for the daemon"
_PATH = "/v1/chat/completions"


@dataclass
class Talk:
    """A conversation. `begin` are its first messages, `fields` are in each request."""

    stream: Stream
    fields: dict[str, Any]
    begin: list[dict[str, str]]
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self) -> None:
        """Writes the reply to the last message, and what the cache did. Raises `DiskPrefixError`; then, and if it is
        interrupted, what came is kept as the reply."""
        body = {
            "messages": [*self.begin, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "prefix_cache": {"scope": "full"},
            **{name: value for name, value in self.fields.items() if value is not None},
        }
        said: list[str] = []
        is_thinking, is_cut, done = False, False, None
        try:
            with self.stream(_PATH, body) as events:
                for event in events:
                    if "error" in event:
                        raise NotReady(shown(event["error"].get("message", "the reply failed"), 1000))
                    for choice in event.get("choices", ()):
                        delta = choice.get("delta", {})
                        is_cut = choice.get("finish_reason") == "length"
                        if thought := delta.get("reasoning_content"):
                            is_thinking = True
                            _write(click.style(_shown(thought), dim=True))
                        if text := delta.get("content"):
                            _write("\n" if is_thinking else "")
                            is_thinking = False
                            said.append(text)
                            _write(_shown(text))
                    done = event if "prefix_cache" in event else done
        finally:
            click.echo()
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
        if done is not None:
            cut = " · cut short: see --max-tokens" if is_cut else ""
            click.secho(_figures(done) + cut, dim=True, err=True)

    def take_again(self) -> None:
        """Forgets the last reply."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()


@click.command(short_help="Talk to the model of a running daemon.", epilog=_EPILOG)
@option("--model", metavar="NAME", help="The model, if the daemon has several.")
@option(
    "--system",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with instructions or a document that every prompt begins with.",
)
@option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=1024,
    help="The most tokens of a reply. Small models may find no end.",
)
@option(
    "--temperature",
    type=click.FloatRange(0, 2),
    show_default="the daemon's",
    help="How freely the model chooses its words; 0: always the likeliest.",
)
@click.option("--browser", is_flag=True, help="Open the chat page in a browser; all else is chosen there.")
@url_option()
@api_key_option("The key to send.", otherwise="the key that agents of this user send")
def chat(system: Path | None, browser: bool, url: str, api_key: str | None, **fields: Any) -> None:
    """Talk to the model of a running daemon.

    Below each reply stands what the cache did: how many tokens of the prompt were restored, and when the first token
    came. `--browser` opens the same as a page.
    """
    if browser:
        for name in ("system", *fields):
            if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise SettingsError(f"--browser: --{name.replace('_', '-')} is set on the page; leave it out")
        open_page(url, api_key, "chat")
        return
    try:
        begin = [] if system is None else [{"role": "system", "content": system.read_text(encoding="utf-8")}]
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--system: {system} cannot be read as text: {error}") from error
    with status(_WAITING) as say:
        wait_ready(running_daemon(url, api_key), url, say)
    talk = Talk(streaming_daemon(url, api_key), fields, begin)
    if not sys.stdin.isatty():
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
        if not text.strip():
            raise SettingsError("standard input is empty; write a message there, or run this in a terminal")
        talk.messages.append({"role": "user", "content": text})
        talk.answer()
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys, for `input`)
    while _one_turn(talk, url, api_key):
        pass


def _one_turn(talk: Talk, url: str, api_key: str | None) -> bool:
    """Reads a message and answers it. Returns False at the end of the conversation."""
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return False
    except UnicodeDecodeError:
        click.secho("that was no text in the encoding of this terminal", fg="red", err=True)
        return True
    if text == "/new":
        talk.messages.clear()
    elif text == "/again":
        talk.take_again()
    elif text:
        if talk.messages and talk.messages[-1]["role"] == "user":
            talk.messages.pop()
        talk.messages.append({"role": "user", "content": text})
    if not text or not talk.messages:
        return True
    try:
        talk.answer()
    except KeyboardInterrupt:
        click.secho("stopped", dim=True, err=True)
    except DiskPrefixError as error:
        click.secho(shown(error.message, 1000), fg="red", err=True)
        _wait(url, api_key)
    return True


def _wait(url: str, api_key: str | None) -> None:
    """Waits for a daemon that went away. Ctrl+C ends the wait."""
    call = running_daemon(url, api_key)
    with suppress(KeyboardInterrupt), status(_WAITING) as say:
        while True:
            try:
                wait_ready(call, url, say)
                break
            except NotReady as error:
                say(error.message)
                time.sleep(0.5)
        click.secho("the daemon is ready; /again sends the message again", dim=True, err=True)


def _shown(text: str) -> str:
    """Returns a piece of a reply without what would steer the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _write(text: str) -> None:
    click.echo(text, nl=False)


def _figures(done: dict[str, Any]) -> str:
    cache, timings, all_tokens = done["prefix_cache"], done["timings"], done["usage"]["prompt_tokens"]
    restored = cache["restored"]
    what = f"{restored:,} of {counted(all_tokens, 'token')} restored from {cache.get('source')}" if restored else ""
    what = what or f"{counted(all_tokens, 'token')} computed, none restored ({cache.get('miss_reason')})"
    speed = f" · {rate:.1f} tokens/s" if (rate := timings["decode_tokens_per_s"]) else ""
    return printable_only(f"{what} · first token after {format_duration(timings['ttft_ms'] / 1e3)}{speed}")

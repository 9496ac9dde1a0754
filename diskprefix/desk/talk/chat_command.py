"""`diskprefix chat`: a conversation with the model of a running daemon, in a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from click.core import ParameterSource
from msgspec import Struct, field

from diskprefix.daemon.cli.options import api_key_option, option
from diskprefix.desk.shared.daemon_call import ConnectionBroken, running_daemon, state_of, streaming_daemon, wait_ready
from diskprefix.desk.shared.open_page import open_page
from diskprefix.desk.shared.own_daemon import daemon_url, url_option
from diskprefix.desk.shared.tooling import status
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.printable import printable_only, shown
from diskprefix.units import counted, format_duration
from diskprefix.values import words_of

if TYPE_CHECKING:
    from diskprefix.desk.shared.recipes.recipe import Served
    from diskprefix.desk.talk.wrapped_text import WrappedText

_EPILOG = """\b
Examples:
  diskprefix chat
  diskprefix chat --browser                 opens the chat page in a browser
  diskprefix chat --system notes.txt        with instructions or a document that every prompt begins with
  echo "Name three rivers." | diskprefix chat

In a conversation, /help lists the commands. Kill the daemon, start it again, and go on: the reply says how much
was restored.

Exit codes: 0 done; 1 no daemon answers, or a reply failed; 2 wrong usage.
"""
_COMMANDS = {
    "/again": "answers the last message again",
    "/new": "begins a new conversation",
    "/help": "lists the commands",
    "/bye": "ends, as Ctrl+D does; Ctrl+C stops a reply",
}
_WAITING = "waiting for the daemon"
_POLL_S = 0.5
_PATH = "/v1/chat/completions"


Restart: TypeAlias = "Callable[[str], Served | None]"
"""Starts a daemon in place of one that has ended, by its URL, and returns its model; None if it has not ended."""


class Talk(Struct):
    """A conversation. Each request has the system messages, the `messages` and the `fields`. Without `restart`, it
    waits for a lost daemon at the same `url`."""

    url: str
    api_key: str | None
    fields: dict[str, Any]
    system: list[dict[str, str]]
    restart: Restart | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self) -> None:
        """Prints the reply to the last message, and the work of the cache. Raises `DiskPrefixError`. The part of the
        reply that was received before an error or an interrupt is kept as the reply."""
        body = {
            "messages": [*self.system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "prefix_cache": {"scope": "full"},
            **{name: value for name, value in self.fields.items() if value is not None},
        }
        reply: list[str] = []
        thoughts, text_of_reply = _output(dim=True), _output()
        is_thinking, is_cut, done = False, False, None
        try:
            with streaming_daemon(self.url, self.api_key)(_PATH, body) as events:
                for event in events:
                    if "error" in event:
                        raise NotReady(shown(event["error"].get("message", "the reply failed"), 1000))
                    for choice in event.get("choices", ()):
                        delta = choice.get("delta", {})
                        is_cut = choice.get("finish_reason") == "length"
                        if thought := delta.get("reasoning_content"):
                            is_thinking = True
                            thoughts.add(_without_controls(thought))
                        if text := delta.get("content"):
                            thoughts.end()
                            text_of_reply.add("\n" * is_thinking + _without_controls(text))
                            is_thinking = False
                            reply.append(text)
                    done = event if "prefix_cache" in event else done
        except ConnectionBroken as error:
            raise NotReady(_broken_off(sum(map(len, reply)))) from error
        finally:
            thoughts.end()
            text_of_reply.end()
            click.echo()
            if reply:
                self.messages.append({"role": "assistant", "content": "".join(reply)})
        if done is not None:
            cut = " · cut short: see --max-tokens" if is_cut else ""
            click.secho(_figures(done) + cut, dim=True, err=True)

    def answer_again(self, error: NotReady) -> None:
        """Answers the last message after an `error` of `answer`, once a lost daemon is there again. Raises as `answer`
        and `restart`, and the error itself if the daemon is not lost or a reply had begun, which stays."""
        has_begun = self.messages[-1]["role"] == "assistant"
        if has_begun or self._is_ready():
            raise error
        if self.restart is None:
            click.secho(shown(error.message, 1000), fg="red", err=True)
            self._wait()
        elif (served := self.restart(self.url)) is not None:
            self.url, self.fields["model"] = served.url, served.model
        else:
            raise error
        self.answer()

    def _is_ready(self) -> bool:
        with suppress(NotReady):
            return bool(state_of(running_daemon(self.url, self.api_key), self.url)["status"] != "loading")
        return False

    def _wait(self) -> None:
        call = running_daemon(self.url, self.api_key)
        with status(f"{_WAITING}; Ctrl+C ends the wait") as say:
            while True:
                # The caller has just printed why there is no daemon.
                with suppress(NotReady):
                    return wait_ready(call, self.url, say)
                time.sleep(_POLL_S)

    def drop_last(self, role: str) -> None:
        """Drops the last message if it has this role."""
        if self.messages and self.messages[-1]["role"] == role:
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
    help="The maximum number of tokens in a reply. Small models may not stop by themselves.",
)
@option(
    "--temperature",
    type=click.FloatRange(0, 2),
    show_default="the daemon's",
    help="How freely the model chooses its words; 0: always the most likely ones.",
)
@click.option("--browser", is_flag=True, help="Open the chat page in a browser; everything else is set there.")
@url_option()
@api_key_option("The key to send.", otherwise="the key that this user's agents send")
def chat(browser: bool, url: str | None, api_key: str | None, **options: Any) -> None:
    """Talk to the model of a running daemon.

    A line below each reply shows how many tokens of the prompt were restored, and the time to the first token.
    `--browser` opens the chat page instead.
    """
    if browser:
        for name in options:
            if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise SettingsError(f"--browser: --{name.replace('_', '-')} is set on the page; leave it out")
        open_page(daemon_url(url), api_key, "chat")
        return
    url = daemon_url(url)
    with status(_WAITING) as say:
        wait_ready(running_daemon(url, api_key), url, say)
    converse(url, api_key, "", **options)


def with_piped(prompt: str) -> str:
    """Returns standard input, if that is no terminal, followed by `prompt`. Raises `SettingsError` if both are
    empty."""
    if sys.stdin.isatty():
        return prompt
    prompt = " ".join(filter(None, (sys.stdin.buffer.read().decode("utf-8", "replace"), prompt)))
    if not prompt.strip():
        raise SettingsError("standard input is empty; write a message there, or run this in a terminal")
    return prompt


def converse(
    url: str,
    api_key: str | None,
    prompt: str,
    *,
    system: Path | None,
    restart: Restart | None = None,
    **fields: Any,
) -> None:
    """Answers standard input and `prompt`, or holds a conversation at a terminal. `restart` and `fields` are those of
    `Talk`. Raises `DiskPrefixError` if there is nothing to answer, or no answer."""
    try:
        messages = [] if system is None else [{"role": "system", "content": system.read_text(encoding="utf-8")}]
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--system: {system} cannot be read as text: {error}") from error
    talk = Talk(url, api_key, fields, messages, restart)
    if prompt := with_piped(prompt):
        talk.messages.append({"role": "user", "content": prompt})
        talk.answer()
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys, for `input`)
    click.secho("/help lists the commands", dim=True, err=True)
    while _one_turn(talk):
        pass


def _one_turn(talk: Talk) -> bool:
    """Reads a message or a command, and answers it. Returns False at the end of the conversation."""
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return False
    except UnicodeDecodeError:
        click.secho("this is not text in the encoding of this terminal", fg="red", err=True)
        return True
    word = text.partition(" ")[0]
    if text == "/bye":
        return False
    # A path has more slashes.
    if word.rfind("/") == 0 and text not in _COMMANDS.keys() - {"/help"}:
        if text != "/help":
            click.echo(f"there is no command {shown(word)}", err=True)
        click.echo("\n".join(f"{name:<8} {help_}" for name, help_ in _COMMANDS.items()), err=True)
        return True
    if text == "/new":
        talk.messages.clear()
    elif text == "/again":
        talk.drop_last("assistant")
    elif text:
        talk.drop_last("user")
        talk.messages.append({"role": "user", "content": text})
    if not text or not talk.messages:
        return True
    try:
        try:
            talk.answer()
        except NotReady as error:
            talk.answer_again(error)
    except KeyboardInterrupt:
        click.secho("stopped", dim=True, err=True)
    except DiskPrefixError as error:
        click.secho(shown(error.message, 1000), fg="red", err=True)
        click.secho("/again sends the message again", dim=True, err=True)
    return True


def _without_controls(text: str) -> str:
    """Returns a piece of a reply without characters that would control the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _output(*, dim: bool = False) -> WrappedText | _Raw:
    """Returns an output for the pieces of a reply: wrapped at words in a terminal, unchanged elsewhere."""
    write = partial(click.secho, dim=True, nl=False) if dim else partial(click.echo, nl=False)
    if not sys.stdout.isatty():
        return _Raw(write)
    # The help needs no rich.
    from diskprefix.desk.talk.wrapped_text import WrappedText

    return WrappedText(lambda: shutil.get_terminal_size().columns, write)


class _Raw(Struct):
    """Prints pieces as they are."""

    add: Callable[[str], None]

    def end(self) -> None:
        """Nothing is held back."""


def _broken_off(num_chars: int) -> str:
    where = f"after {counted(num_chars, 'character')} of the reply" if num_chars else "before the reply began"
    return f"the connection broke {where}; try again"


def _figures(done: dict[str, Any]) -> str:
    """Returns the work of the cache and the speed in the last event of a reply, as a line."""
    cache, timings, tokens = done["prefix_cache"], done["timings"], counted(done["usage"]["prompt_tokens"], "token")
    restored = f"{tokens} computed, none restored ({words_of(str(cache.get('miss_reason')))})"
    if cache["restored"]:
        restored = f"{cache['restored']:,} of {tokens} restored from {cache.get('source')}"
    speed = f" · {rate:.1f} tokens/s" if (rate := timings["decode_tokens_per_s"]) else ""
    return printable_only(f"{restored} · first token after {format_duration(timings['ttft_ms'] / 1e3)}{speed}")

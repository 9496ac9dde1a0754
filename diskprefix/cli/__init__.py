"""The `diskprefix` command. A subcommand is imported when it is called, so that `inspect` does not wait for torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn

import click

from diskprefix import hooks
from diskprefix.errors import DiskPrefixError, LoadInterrupted
from diskprefix.printable import printable_only

COMMANDS = {
    "serve": "serve_command",
    "completion": "about",
}
"""The module of each command of the core, which is the first and the last. The function has the command's name."""

_USAGE_EXIT_CODE, _SYSTEM_EXIT_CODE, _INTERRUPTED_EXIT_CODE, _BROKEN_PIPE_EXIT_CODE = 2, 4, 130, 141
"""The last two are what a shell reports for a process that SIGINT or SIGPIPE killed."""


def command_names() -> list[str]:
    """Returns the names of all commands, in the order in which people need them."""
    first, *last = COMMANDS
    return [first, *hooks.commands(), *last]


class LazyGroup(click.Group):
    """A group that imports a subcommand when its help or its call needs it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return command_names()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], command_names(), n=1)
            if not near:
                raise
            said = error.format_message().rstrip(".")
            raise click.UsageError(f"{said}; did you mean {near[0]}?", error.ctx) from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name in COMMANDS:
            return hooks.command(f"diskprefix.cli.{COMMANDS[cmd_name]}:{cmd_name}")
        place = hooks.commands().get(cmd_name)
        return None if place is None else hooks.command(place)


def _show_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from diskprefix.cli.about import version_text

        click.echo(version_text())
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show versions."
)
def cli() -> None:
    """Serve a language model with its prefix (KV) cache on disk.

    If the beginning of a prompt was computed before, it is restored from disk, bit for bit. This also works after a
    restart.

    \b
    Examples:
      diskprefix serve                          serve the embedded SmolLM2-135M-Instruct
      diskprefix serve --model ~/models/qwen    serve a folder, a hub id or a .gguf file
      diskprefix run qwen3.5:4b                 fetch a model, and talk to it
      diskprefix launch claude                  start Claude Code with a daemon
      diskprefix clients codex                  print the settings with which Codex uses the daemon
      diskprefix inspect                        list the saved prompts
      diskprefix purge --older-than 7d          remove prompts that were not used for a week
      diskprefix simulate day.jsonl             show the effect of other settings
    """


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command and exits: the console script. Prints an error as one line on stderr, never as a traceback."""
    sys.exit(_run(None if args is None else list(args)))


def _run(args: list[str] | None) -> int:
    try:
        result: Any = cli.main(args, prog_name="diskprefix", standalone_mode=False)
    except SystemExit as end:
        # Only click exits with 1: nobody reads the output. Here that code has another meaning.
        if end.code == 1:
            return _BROKEN_PIPE_EXIT_CODE
        raise
    except LoadInterrupted as error:
        _end_at_once(_fail(error.message, error.exit_code))
    except DiskPrefixError as error:
        return _fail(error.message, error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        return _fail(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", _INTERRUPTED_EXIT_CODE)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "diskprefix":
            raise
        return _fail(
            f"{error.name} is not installed; everything that is needed comes with: pip install diskprefix",
            _USAGE_EXIT_CODE,
        )
    except OSError as error:
        # The error of a file that is open already, such as the output, names no file.
        what = error.filename or "cannot write the output"
        if not error.filename:
            _drop_output()
        return _fail(f"{what}: {error.strerror or error}", _SYSTEM_EXIT_CODE)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Has what standard output still holds written nowhere: Python writes it at its end, and exits with 120 if that
    fails."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _end_at_once(exit_code: int) -> NoReturn:
    """Ends without Python's wait for threads: one that loads a model cannot be stopped."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _fail(message: str, exit_code: int) -> int:
    click.echo(f"error: {printable_only(message)}", err=True)
    return exit_code

"""The `diskprefix` command. A subcommand is imported when it is called, so that `inspect` does not wait for torch."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from diskprefix.daemon import rooms
from diskprefix.daemon.cli.process_start import begin
from diskprefix.errors import DiskPrefixError
from diskprefix.nearest import nearest
from diskprefix.printable import printable_only

_CFFI = "LMDB_FORCE_CFFI"
"""With this variable, the Python package lmdb asks for packages that a store does not need."""
_USAGE_EXIT_CODE, _SYSTEM_EXIT_CODE, _INTERRUPTED_EXIT_CODE, _BROKEN_PIPE_EXIT_CODE = 2, 4, 130, 141
"""The last two are a shell's codes for a process that SIGINT or SIGPIPE killed."""


_FIRST = {"serve": "diskprefix.daemon.cli.serve_command:serve"}
_LAST = {"completion": "diskprefix.daemon.cli.about:completion"}
"""The daemon's own commands, which do not wait for a search: where they stand in the help."""


def commands() -> dict[str, str]:
    """Returns the module and function of each command, in the order in which people need them."""
    return _FIRST | rooms.commands() | _LAST


class LazyGroup(click.Group):
    """A group that imports a subcommand when its help or its call needs it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(commands())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not (near := nearest(args[0], commands())):
                raise
            problem = error.format_message().rstrip(".")
            raise click.UsageError(f"{problem}; did you mean {near}?", error.ctx) from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        target = (_FIRST | _LAST).get(cmd_name) or rooms.commands().get(cmd_name)
        if target is None:
            return None
        # Modules stay: searching them for garbage takes a tenth of the time.
        gc.disable()
        command: click.Command = rooms.loaded(target)
        gc.freeze()
        gc.enable()
        return command


def _show_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from diskprefix.daemon.cli.about import version_text

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
      diskprefix run qwen3.5:4b                 fetch a model and talk to it
      diskprefix launch claude                  start Claude Code with a daemon
      diskprefix clients codex                  print the settings that make Codex use the daemon
      diskprefix inspect                        list the saved prompts
      diskprefix purge --older-than 7d          remove prompts not used for a week
      diskprefix simulate day.jsonl             show the effect of other settings
    """


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command and exits: the console script. Prints an error as one line on stderr, never as a traceback."""
    begin()
    sys.exit(_run(None if args is None else list(args)))


def _run(args: list[str] | None) -> int:
    if any(name.startswith("DISKPREFIX_") for name in os.environ):
        from diskprefix.daemon.cli.options import misspelt_variables

        for line in misspelt_variables():
            click.echo(f"warning: {printable_only(line)}", err=True)
    try:
        result: Any = cli.main(args, prog_name="diskprefix", standalone_mode=False)
    except SystemExit as end:
        # click exits with 1 if nobody reads the output. Here that code has another meaning.
        if end.code == 1:
            return _BROKEN_PIPE_EXIT_CODE
        raise
    except DiskPrefixError as error:
        return _fail(error.message, error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context else ""
        return _fail(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", _INTERRUPTED_EXIT_CODE)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "diskprefix":
            raise
        from diskprefix.runtime.imports import INSTALL, PACKAGES

        package = error.name.partition(".")[0]
        if package in ("cffi", "lmdb_cffi") and os.environ.get(_CFFI):
            return _fail(f"{_CFFI} is set, for which {package} is not installed; unset it", _USAGE_EXIT_CODE)
        todo = INSTALL if package in PACKAGES else f"{shlex.quote(sys.executable)} -m pip install {package}"
        return _fail(f"{error.name} is not installed: {todo}", _USAGE_EXIT_CODE)
    except OSError as error:
        # An error without a file's name comes from an open file: the output.
        if not error.filename:
            _drop_output()
        return _fail(f"{error.filename or 'cannot write the output'}: {error.strerror or error}", _SYSTEM_EXIT_CODE)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Redirects buffered output to nowhere: Python would write it at exit, and exit with 120 if that fails."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _fail(message: str, exit_code: int) -> int:
    click.echo(f"error: {printable_only(message)}", err=True)
    return exit_code

"""`diskprefix completion SHELL`: print what makes a shell complete commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from diskprefix.errors import SettingsError

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_DISKPREFIX_COMPLETE"


@click.command(short_help="Print the completion for a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and values when Tab is pressed.

    \b
    diskprefix completion bash > ~/.local/share/bash-completion/completions/diskprefix
    diskprefix completion zsh > ~/.zfunc/_diskprefix      (with fpath+=~/.zfunc before compinit in ~/.zshrc)
    diskprefix completion fish > ~/.config/fish/completions/diskprefix.fish

    \b
    Exit codes: 0 done; 2 wrong usage.
    """
    found = get_completion_class(shell)
    command = context.find_root().command
    if found is None:
        raise SettingsError(f"{shell} is not a shell that completes")
    # click's class for bash asks the installed bash for its version; the text does not depend on it.
    complete = found(command, {}, "diskprefix", _VARIABLE)
    click.echo(complete.source_template % complete.source_vars())

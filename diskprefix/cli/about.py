"""`diskprefix --version` and `diskprefix completion SHELL`. Imports nothing that takes long."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click
from click.shell_completion import get_completion_class

from diskprefix.errors import SettingsError
from diskprefix.native import build
from diskprefix.store.schema import FORMAT_VERSION
from diskprefix.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "lmdb")


def version_text() -> str:
    """Returns a few lines for people, who paste them into a report."""
    packages = ", ".join(f"{name} {_installed(name)}" for name in _PACKAGES)
    return "\n".join(
        [
            f"diskprefix {__version__}",
            f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
            packages,
            f"kernels: {_kernels()}; store format {FORMAT_VERSION}",
        ]
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _kernels() -> str:
    if not build.LIBRARY.exists():
        return "not compiled: models are exact on the grid only"
    return "compiled" if build.is_current() else "compiled for another version: models are exact on the grid only"


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

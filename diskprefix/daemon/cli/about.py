"""`diskprefix --version` and `diskprefix completion SHELL`. Importing it is quick."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from diskprefix.native import build
from diskprefix.prefixstore.store.schema import FORMAT_VERSION
from diskprefix.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "lmdb")


def version_text() -> str:
    """Returns a few lines for people, who paste them into a report."""
    packages = ", ".join(f"{name} {_installed(name)}" for name in _PACKAGES)
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    kernels = f"kernels: {_kernels()}; store format {FORMAT_VERSION}"
    return "\n".join([f"diskprefix {__version__}", system, packages, kernels])


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _kernels() -> str:
    if not build.LIBRARY.exists():
        return "not compiled: models are exact on the grid only"
    return "compiled" if build.is_current() else "compiled for another version: models are exact on the grid only"


SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_VARIABLE = "_DISKPREFIX_COMPLETE"


@click.command(short_help="Print the completion for a shell.")
@click.argument("shell", type=click.Choice(list(SHELLS)))
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
    # Not `source`: click's class for bash asks the installed bash for its version, which the text does not depend on.
    complete = SHELLS[shell](context.find_root().command, {}, "diskprefix", _VARIABLE)
    click.echo(complete.source_template % complete.source_vars())

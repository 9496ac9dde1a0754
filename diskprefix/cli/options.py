"""Options that have an environment variable each, in groups of the help, and may be set by a policy file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from diskprefix.settings import find_policy, read_policy

DEFAULT_DIR = "$XDG_CACHE_HOME/diskprefix/kv"
"""The default of `--kv-cache-dir`, for people."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def variable_of(flag: str) -> str:
    """`--kv-cache-dir` → `DISKPREFIX_KV_CACHE_DIR`."""
    return "DISKPREFIX_" + flag.removeprefix("--").replace("-", "_").upper()


class GroupedOption(click.Option):
    """An option that knows the heading under which the help shows it."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Names the variable where the value came from there: the flag was not given."""
        source = ctx.get_parameter_source(self.name) if ctx and self.name else None
        return f"'{self.envvar}'" if source is ParameterSource.ENVIRONMENT else super().get_error_hint(ctx)


class NonemptyOption(GroupedOption):
    """An option whose absence means much: an empty value, in its variable too, is refused and not taken for none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, callback=nonempty, **kwargs)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:  # noqa: ARG002 - click's signature
        return os.environ.get(str(self.envvar))


def nonempty(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Callback of an option or an argument of text. Raises `BadParameter` for an empty one."""
    if value == "":
        raise click.BadParameter("it is empty; give a value, or leave it out")
    return value


class GroupedCommand(click.Command):
    """A command whose help shows its options under their headings, in the order of their first option."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=32)


def option(flag: str, *, group: str, help: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """`click.option` with its variable `DISKPREFIX_…` and its heading in the help."""
    attributes = {"cls": GroupedOption, "show_default": True, "envvar": variable_of(flag), **attributes}
    return click.option(flag, group=group, help=help, **attributes)


def policy_option(group: str, convert: Callable[[str, Any], Any]) -> Callable[[Decorated], Decorated]:
    """`--policy`: what the file says becomes the defaults, so that variables and flags still override it. `convert` as
    `read_policy` takes it."""

    def apply(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            ctx.default_map = {**(ctx.default_map or {}), **read_policy(find_policy(value), convert)}
        return value

    return option(
        "--policy",
        group=group,
        metavar="NAME|FILE",
        help="A preset (agent, chat, rag, batch, shared-server) or a .toml file; keys are the flags' names.",
        is_eager=True,
        expose_value=False,
        callback=apply,
    )


def size_option(flag: str, *, group: str, help: str, default: int) -> Callable[[Decorated], Decorated]:
    """An amount of bytes, handed on as text: `settings.parse_size` reads it, as it does in a policy file."""
    return option(flag, group=group, help=help, default=_size_text(default), metavar="SIZE", type=str)


def _size_text(num_bytes: int) -> str:
    """`4GiB`: the largest unit of which it is a whole number, so that `parse_size` gives it back."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = max(power for power in range(len(units)) if num_bytes % 1024**power == 0)
    return f"{num_bytes // 1024**power}{units[power]}"


def choice_option(
    flag: str, choices: Sequence[str], *, group: str, help: str, default: str
) -> Callable[[Decorated], Decorated]:
    """One of a few words."""
    return option(flag, group=group, help=help, default=default, type=click.Choice(choices, case_sensitive=False))


def switch_option(flag: str, *, group: str, help: str, default: bool) -> Callable[[Decorated], Decorated]:
    """On or off: `--reuse-generated`, `--no-reuse-generated`. Its variable takes words (on, off, true, 0 …), a policy
    file TOML's true and false."""
    both = f"{flag}/--no-{flag.removeprefix('--')}"
    return option(both, group=group, help=help, default=default, envvar=variable_of(flag))

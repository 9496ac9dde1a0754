"""Options of the commands. A field of `Settings` has an option, an environment variable and a key of policy files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from diskprefix.daemon.chat.canonicalisers import Canonicalisers
from diskprefix.daemon.cli.policy_file import find_policy, read_policy
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.errors import SettingsError
from diskprefix.native.library import require_kernels
from diskprefix.nearest import meant, nearest
from diskprefix.runtime.fetch.proposals import meant_name
from diskprefix.setting import flag_of, parsed
from diskprefix.units import whole_size

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# With a folder, because the default one needs a home folder, which not every command does.
_DEFAULTS = Settings(kv_cache_dir=Path())


class PathType(click.Path):
    """A path that is not empty. pathlib would take an empty path for the current folder."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(path_type=Path, **attributes)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return super().convert(value, param, ctx)


_POLICY, _SHOWS_ALL = "diskprefix.policy", "diskprefix.help-all"
"""The keys of --policy and --help-all in a context's `meta`."""
_PREFIX = "DISKPREFIX_"
_EMPTY = "it is empty; give a value, or leave it out"
_CLICK_TYPES: Mapping[str, Any] = {
    "integer": int,
    "file": PathType(dir_okay=False),
    "folder": PathType(file_okay=False),
}
"""The types of some kinds. Sizes and durations stay text: `build_settings` reads them, also from policy files."""
_METAVARS = {"size": "SIZE", "duration": "DURATION", "file": "FILE"}


def variable_of(flag: str) -> str:
    """Returns `DISKPREFIX_KV_CACHE_DIR` for `--kv-cache-dir`."""
    return _PREFIX + flag.removeprefix("--").replace("-", "_").upper()


_OTHER_FLAGS = ("--api-key", "--policy", "--url")
"""The flags with variables that are no settings of `serve`."""


def misspelt_variables() -> list[str]:
    """Returns a line for each variable of the environment that nothing reads and that is like one of an option."""
    flags = (*_OTHER_FLAGS, *map(flag_of, SETTINGS))
    known = {variable_of(flag).removeprefix(_PREFIX): flag for flag in flags}
    others = {name for name in os.environ if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in known}
    # Those of our tests end up here, too.
    of_users = sorted(name for name in others if not name.startswith(f"{_PREFIX}TEST"))
    near = {name: nearest(name.removeprefix(_PREFIX), known) for name in of_users}
    return [f"{name} is no option{meant(name, [_PREFIX + like])}" for name, like in near.items() if like is not None]


class GroupedOption(click.Option):
    """An option under a heading in the help. Only `--help-all` shows options that are not common."""

    def __init__(self, *args: Any, group: str = "Options", is_common: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group, self.is_common = group, is_common

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Returns the environment variable if the value came from it, else the flag."""
        source = ctx.get_parameter_source(self.name) if ctx and self.name else None
        return f"'{self.envvar}'" if source is ParameterSource.ENVIRONMENT else super().get_error_hint(ctx)


class NonemptyOption(GroupedOption):
    """An option that does not treat an empty variable as unset."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:  # noqa: ARG002 - click's signature
        return os.environ.get(str(self.envvar))


class JoinedOption(GroupedOption):
    """An option that may be given several times; the values are joined with commas."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        # Only the parser collects them: variables and policy files have one text.
        self.multiple = True
        super().add_to_parser(parser, ctx)
        self.multiple = False

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        joined: dict[str, Any] = {
            name: ",".join(value) if isinstance(value, list) else value for name, value in opts.items()
        }
        return super().consume_value(ctx, joined)


def nonempty(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Returns the value or values of a text option. Raises `BadParameter` for an empty text."""
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise click.BadParameter(_EMPTY)
    return value


def _show_all_help(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings: the common ones with `--help`, all with `--help-all`."""

    _help_all = GroupedOption(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all_help,
        help="Show all options and exit.",
    )

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), self._help_all]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not (ctx.meta.get(_SHOWS_ALL) or getattr(parameter, "is_common", True)):
                continue
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=32)


def option(flag: str, *, help: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """Returns `click.option` with its default in the help, under the heading `group` if that is given."""
    return click.option(flag, help=help, **{"cls": GroupedOption, "show_default": True, **attributes})


def api_key_option(help: str, *, otherwise: str = "none") -> Callable[[Decorated], Decorated]:
    """Returns the option `--api-key`. `otherwise` is its default in the help."""
    return option(
        "--api-key",
        metavar="KEY",
        envvar=variable_of("--api-key"),
        callback=nonempty,
        show_default=otherwise,
        show_envvar=True,
        help=help,
    )


def setting_option(name: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """Returns the option of a field of `Settings`, with its environment variable. `attributes` override the field's."""
    setting, default, flag = SETTINGS[name], getattr(_DEFAULTS, name), flag_of(name)
    shown = f"{setting.help} (*)" if setting.parts_cache else setting.help
    own: dict[str, Any] = {"help": shown, "envvar": variable_of(flag)}
    own["metavar"] = setting.metavar or _METAVARS.get(setting.kind)
    choice = click.Choice(setting.choices, case_sensitive=False) if setting.choices else None
    own["type"] = choice or _CLICK_TYPES.get(setting.kind)
    # Without keys everybody is served: an empty value must not mean that.
    own["cls"] = {"api_keys": NonemptyOption, "model": JoinedOption}.get(name, GroupedOption)
    if setting.unset:
        own["show_default"] = setting.unset
    elif setting.kind == "duration":
        own["default"] = f"{default:g}s"
    else:
        own["default"] = whole_size(default) if setting.kind == "size" else default
    declaration = f"{flag}/--no-{flag.removeprefix('--')}" if setting.kind == "switch" else flag
    return option(declaration, **own | attributes)


def setting_options(names: Iterable[str], before_group: str = "") -> Callable[[Decorated], Decorated]:
    """Returns the `setting_option` of each of `names`, in order. Each heading begins with `before_group`."""

    def apply(command: Decorated) -> Decorated:
        for name in reversed(list(names)):
            setting = SETTINGS[name]
            command = setting_option(name, group=before_group + setting.group, is_common=setting.is_common)(command)
        return command

    return apply


def policy_option(group: str) -> Callable[[Decorated], Decorated]:
    """Returns the option `--policy`. The file's values become defaults, so variables and flags override them."""

    def apply(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            ctx.default_map = {**(ctx.default_map or {}), **policy_values(value)}
            ctx.meta[_POLICY] = value
        return value

    return option(
        "--policy",
        group=group,
        metavar="NAME|FILE",
        envvar=variable_of("--policy"),
        help="A preset (agent, chat, rag, batch, shared-server) or a .toml file. Its keys are the names of the flags.",
        is_eager=True,
        expose_value=False,
        callback=apply,
    )


def policy_of(context: click.Context) -> str | None:
    """Returns the value of --policy, None if it is not given."""
    return cast("str | None", context.meta.get(_POLICY))


def policy_values(name_or_path: str) -> dict[str, Any]:
    """Returns the checked values of a preset or a policy file by field name. Raises `SettingsError` naming the line."""
    return read_policy(find_policy(name_or_path), policy_value)


def policy_value(name: str, value: object) -> Any:
    """Returns `value` as the flag of the field `name` converts it. Raises `DiskPrefixError`."""
    command = setting_option(name)(click.Command(name))
    try:
        converted = command.params[0].process_value(click.Context(command), str(value))
    except click.BadParameter as error:
        raise SettingsError(error.message.rstrip(".")) from error
    values = {name: converted} if converted is None else {name: _parsed(name, converted)}
    settings = _OneValue(**{"kv_cache_dir": Path()} | values)
    require_kernels(settings.kernels, settings.rows)
    return converted


class _OneValue(Settings):
    """Settings of which one value is checked, whatever the others will be."""

    def require_together(self) -> None:
        """Accepts any value: what it needs may follow."""


def build_settings(flags: Mapping[str, Any]) -> Settings:
    """Returns `Settings` from merged values by field name; None stands for the default. Raises `DiskPrefixError`."""
    settings = Settings(**{name: _parsed(name, value) for name, value in flags.items() if value is not None})
    require_kernels(settings.kernels, settings.rows)
    return settings


def _parsed(name: str, value: Any) -> Any:
    if name == "prefill_compression":
        return str(value).lower()
    if name == "canonicalise":
        Canonicalisers.parse(value, param=flag_of(name))
    if name in ("model", "draft_model"):
        return ",".join(map(meant_name, value.split(",")))
    return parsed(name, SETTINGS[name], value)

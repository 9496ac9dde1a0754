"""`diskprefix serve`: flags, variables and a policy file become `Settings`, then the daemon runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from diskprefix.daemon import app
from diskprefix.daemon.cli.logs import configure_logging
from diskprefix.daemon.cli.options import (
    GroupedCommand,
    build_settings,
    option,
    policy_of,
    policy_option,
    setting_options,
    variable_of,
)
from diskprefix.daemon.cli.policy_file import toml_value
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.setting import CACHE, flag_of
from diskprefix.units import whole_size

_COLUMN = 44
_EPILOG = """\b
Examples:
  diskprefix serve
      the embedded SmolLM2-135M-Instruct on http://127.0.0.1:8642
  diskprefix serve --model ~/models/qwen --policy agent --kv-cache-budget 40GiB
      a model of your own, for agents, with more room on disk
  DISKPREFIX_PORT=9000 diskprefix serve --disk-prefix-cache full
      every flag is also an environment variable: DISKPREFIX_ and its name in upper case

(*) parts the cache: prefixes saved with one value are not found with another. A flag overrides its variable, a variable
overrides the policy file, and the policy file overrides the defaults.

Exit codes: 0 ended by a signal; 2 wrong usage, or an address that cannot be used; 3 the model cannot be loaded; 4 the
store cannot be used; 5 the accelerator failed, and only a new process can use it again.
"""


@click.command(cls=GroupedCommand, short_help="Serve a model, with its prefix cache on disk.", epilog=_EPILOG)
@setting_options(SETTINGS)
@policy_option(CACHE)
@option("--print-config", is_flag=True, help="Print every setting with its value and source, and exit.")
@click.pass_context
def serve(context: click.Context, /, print_config: bool, **flags: Any) -> None:
    """Serve a model over an OpenAI-compatible API and keep its prefix cache on disk.

    The port answers /health at once. Requests are served when the model is loaded. On SIGTERM and Ctrl-C the daemon
    gives running requests 5 seconds to finish, writes pending state, and exits.
    """
    settings = build_settings(flags)
    if print_config:
        click.echo(config_text(context, settings))
        return
    configure_logging(settings.log_level)
    app.serve(settings)


def config_text(context: click.Context, settings: Settings) -> str:
    """Returns the settings in TOML, which `--policy` reads again. Settings without a value are commented out.

    `context` belongs to the command whose flags became `settings`.
    """
    return "\n".join(_line(context, name, getattr(settings, name)) for name in SETTINGS)


def policy_text(settings: Settings) -> str:
    """Returns the settings that are not defaults as a policy file, with absolute paths."""
    models = [str(Path(name).absolute()) if Path(name).exists() else name for name in settings.model_names]
    values = {name: getattr(replace(settings, model=",".join(models) or None), name) for name in SETTINGS}
    return "".join(
        f"{_assignment(name, value.absolute() if isinstance(value, Path) else value)}\n"
        for name, value in values.items()
        if value != getattr(Settings(), name)
    )


def _line(context: click.Context, name: str, value: Any) -> str:
    return f"{_assignment(name, value):<{_COLUMN}} # {_source(context, name)}"


def _assignment(name: str, value: Any) -> str:
    shown = whole_size(value) if SETTINGS[name].kind == "size" and value else value
    return f"# {name} =" if value is None else f"{name} = {toml_value(shown)}"


def _source(context: click.Context, name: str) -> str:
    flag = flag_of(name)
    match context.get_parameter_source(name):
        case ParameterSource.COMMANDLINE:
            return f"the flag {flag}"
        case ParameterSource.ENVIRONMENT:
            return f"the variable {variable_of(flag)}"
        case ParameterSource.DEFAULT_MAP:
            return f"the policy {policy_of(context)}"
    unset = SETTINGS[name].unset
    return f"default: {unset}" if unset else "default"

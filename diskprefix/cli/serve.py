"""`diskprefix serve`: flags, variables and a policy file become `Settings`, then the daemon runs."""

from __future__ import annotations

from typing import Any

import click

from diskprefix import app
from diskprefix.cli.logs import configure_logging
from diskprefix.cli.options import GroupedCommand, build_settings, option, policy_option, setting_options
from diskprefix.settings import CACHE, SETTINGS

_EPILOG = """\b
Examples:
  diskprefix serve
      the embedded SmolLM2-135M-Instruct on http://127.0.0.1:8642
  diskprefix serve --model ~/models/qwen --policy agent --kv-cache-budget 40GiB
      a model of your own, for agents, with more room on disk
  DISKPREFIX_PORT=9000 diskprefix serve --disk-prefix-cache full
      every flag is also an environment variable: DISKPREFIX_ and its name in upper case

A flag overrides its variable, a variable overrides the policy file, and the policy file overrides the defaults.

Exit codes: 0 ended by a signal; 2 wrong usage, or an address that cannot be used; 3 the model cannot be loaded; 4 the
store cannot be used; 5 the accelerator failed, and only a new process can use it again.
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@setting_options(SETTINGS)
@policy_option(CACHE)
@option("--print-config", is_flag=True, help="Print every setting, its value and where that came from, and end.")
@click.pass_context
def serve(context: click.Context, /, print_config: bool, **flags: Any) -> None:
    """Serve a model over an OpenAI-compatible API and keep its prefix cache on disk.

    The port answers /health at once. Requests are served when the model is loaded. On SIGTERM and Ctrl-C the daemon
    finishes the running request, writes what is pending, and ends.
    """
    settings = build_settings(flags)
    if print_config:
        from diskprefix.cli.print_config import config_text

        click.echo(config_text(context, settings))
        return
    configure_logging(settings.log_level, settings.log_format)
    app.serve(settings)

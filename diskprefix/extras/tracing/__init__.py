"""Traces of requests for OpenTelemetry: `--otlp-traces-endpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskprefix.hooks import Tracer
    from diskprefix.settings import Settings


def open_tracer(settings: Settings) -> Tracer | None:
    """Returns what sends traces to the collector of `--otlp-traces-endpoint`, None without it.

    Raises `SettingsError`.
    """
    if settings.otlp_traces_endpoint is None:
        return None
    from diskprefix.extras.tracing.tracing import Tracing

    return Tracing(settings.otlp_traces_endpoint)

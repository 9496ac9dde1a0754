"""Traces of requests for OpenTelemetry (`--otlp-traces-endpoint`, the extra `otel`): a span for each stage.

Spans are made from times that are measured anyway, after the fact: nothing is opened or closed while tokens are
computed. They say how many tokens, never which.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diskprefix.errors import SettingsError
from diskprefix.nouns import Stage
from diskprefix.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_EXPORT_TIMEOUT_S = 5.0
_FLUSH_MS = 3000


class Tracing:
    """Makes traces and sends them, in a thread of the library, to an OTLP/HTTP collector."""

    def __init__(self, endpoint: str, processor: SpanProcessor | None = None) -> None:
        """`processor` takes the spans in place of what sends them. Raises `SettingsError` without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SettingsError(
                "--otlp-traces-endpoint needs OpenTelemetry; install the extra: pip install 'diskprefix[otel]'"
            ) from error
        if not endpoint.startswith(("http://", "https://")):
            raise SettingsError(f"--otlp-traces-endpoint: {endpoint!r} is not an http:// or https:// URL")
        resource = Resource.create({"service.name": "diskprefix", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        if processor is None:
            processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("diskprefix", __version__)

    def begin(self, name: str, headers: Mapping[str, str]) -> SpanTrace:
        """Begins the trace of a request, or goes on with the client's (W3C's `traceparent`)."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        context = TraceContextTextMapPropagator().extract(carrier)
        return SpanTrace(self._tracer, self._tracer.start_span(name, context, kind=SpanKind.SERVER))

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class SpanTrace:
    """The span of one request and those of its stages. For any thread; a stage may end after the request."""

    def __init__(self, tracer: Any, span: Any) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer, self._span = tracer, span
        self._context = set_span_in_context(span)
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def add(self, stage: Stage) -> None:
        attributes = {f"diskprefix.{name}": value for name, value in stage.facts.items()}
        began, ended = (int(seconds * 1e9) + self._offset_ns for seconds in (stage.began, stage.ended))
        self._tracer.start_span(stage.name, self._context, attributes=attributes, start_time=began).end(ended)

    def end(self, facts: Mapping[str, Any]) -> None:
        """`facts` are what a line of the log in JSON says of the request."""
        from opentelemetry.trace import StatusCode

        attributes: dict[str, Any] = {
            "http.request.method": facts["method"],
            "http.route": facts["route"],
            "http.response.status_code": facts["status"],
            "diskprefix.request.id": facts["id"],
            "diskprefix.outcome": facts["outcome"],
        }
        if (usage := facts.get("usage")) is not None:
            cache = facts["prefix_cache"]
            attributes |= {
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens": cache["restored"],
                "diskprefix.cache": cache.get("miss_reason") or cache["source"],
            }
        self._span.set_attributes(attributes)
        if facts["outcome"] == "failed":
            self._span.set_status(StatusCode.ERROR, facts.get("error"))
        self._span.end()

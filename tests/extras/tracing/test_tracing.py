"""Traces: a span for each stage of a request, in the client's trace, sent to a collector."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diskprefix.errors import SettingsError
from diskprefix.extras.tracing import tracing
from diskprefix.extras.tracing.tracing import Tracing
from diskprefix.nouns import Stage
from diskprefix.server.access_log import _facts
from diskprefix.server.log_context import LogContext
from tests.server.daemon_process import wait_until
from tests.server.scripted import ScriptedEngine, done, real_app, scripted_app

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three rivers and tell me where each begins. " * 3}],
    "max_tokens": 4,
    "temperature": 0,
}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ("template", "queue", "match", "restore", "prefill", "decode", "save")


@dataclass
class Collector:
    """An OTLP/HTTP receiver. `spans` are those that came, as protobuf has them."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)

    @property
    def spans(self) -> list[Any]:
        batches = [ExportTraceServiceRequest.FromString(body) for body in list(self.bodies)]
        return [
            span
            for batch in batches
            for resource in batch.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            found.bodies.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    found.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_real_request_has_a_span_for_each_stage_in_the_trace_of_its_client(
    chat_model: Path, tmp_path: Path, collector: Collector
) -> None:
    changes: dict[str, Any] = {
        "kv_cache_gate": "off",
        "disk_prefix_cache": "full",
        "kv_memory_entries": 0,
        "device": "cpu",
        "otlp_traces_endpoint": collector.url,
    }
    with real_app(chat_model, tmp_path / "kv", **changes) as server, server.client() as client:
        client.post(CHAT, json=BODY).raise_for_status()
        assert server.engine.cache.writer.flush(30)
        second = client.post(CHAT, json=BODY, headers={"traceparent": PARENT}).json()
        client.get("/health")
    roots = {span.name: span for span in collector.spans if span.trace_id.hex() == PARENT.split("-")[1]}
    [cold] = [span for span in collector.spans if span.name == f"POST {CHAT}" and not span.parent_span_id]
    cold_stages = {span.name for span in collector.spans if span.parent_span_id == cold.span_id}
    assert cold_stages == set(STAGES) - {"restore"}
    root = roots.pop(f"POST {CHAT}")
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    assert attributes(root)["http.response.status_code"] == 200
    assert attributes(root)["gen_ai.usage.cache_read.input_tokens"] == second["prefix_cache"]["restored"] > 0
    assert roots.keys() >= {"template", "queue", "match", "restore", "decode"}
    assert all(span.parent_span_id == root.span_id for span in roots.values())
    in_order = [roots[name] for name in STAGES if name in roots and name != "save"]
    assert [span.start_time_unix_nano for span in in_order] == sorted(span.start_time_unix_nano for span in in_order)
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in in_order)
    assert in_order[0].start_time_unix_nano >= root.start_time_unix_nano
    assert in_order[-1].end_time_unix_nano <= root.end_time_unix_nano
    restored_ms = (roots["restore"].end_time_unix_nano - roots["restore"].start_time_unix_nano) / 1e6
    assert restored_ms == pytest.approx(second["timings"]["restore_ms"], abs=0.02)
    assert attributes(roots["restore"])["diskprefix.source"] == second["prefix_cache"]["source"]
    assert len(collector.spans) == len({span.span_id for span in collector.spans})
    assert not any("rivers" in str(span) for span in collector.spans), "no text of a prompt"
    assert not any("/health" in span.name for span in collector.spans)


def facts_of(record: LogContext) -> dict[str, Any]:
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/messages"}
    return _facts(scope, record, "/v1/messages", 0.1)


def finished(*, headers: dict[str, str], record: LogContext) -> Any:
    """The one span of a request without stages, as the SDK's exporter in memory has it."""
    exporter = InMemorySpanExporter()
    traces = Tracing("http://localhost", SimpleSpanProcessor(exporter))
    trace = traces.begin("POST /v1/messages", headers)
    trace.end(facts_of(record))
    [span] = exporter.get_finished_spans()
    assert trace.trace_id == f"{span.context.trace_id:032x}"
    traces.close()
    return span


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": PARENT.replace("0af", "xyz")}])
def test_without_a_trace_of_the_client_a_request_begins_one(headers: dict[str, str]) -> None:
    span = finished(headers=headers, record=LogContext(status=200, wants_reply=True, done=done(cached_tokens=4)))
    assert span.parent is None
    assert span.status.is_ok or span.status.is_unset
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 4


def test_a_request_that_failed_is_an_error_and_one_that_its_client_left_is_none() -> None:
    failed = finished(headers={}, record=LogContext(status=500, wants_reply=True, error="no memory"))
    assert (failed.status.is_ok, failed.status.description) == (False, "no memory")
    left = finished(headers={}, record=LogContext(status=499, wants_reply=True))
    assert left.status.is_unset
    assert left.attributes["diskprefix.outcome"] == "cancelled"


def test_a_stage_that_ends_after_the_request_is_in_its_trace() -> None:
    exporter = InMemorySpanExporter()
    traces = Tracing("http://localhost", SimpleSpanProcessor(exporter))
    trace = traces.begin("POST /v1/messages", {})
    trace.end(facts_of(LogContext(status=200, wants_reply=True)))
    began = time.perf_counter()
    trace.add(Stage("save", began, began + 0.25, {"bytes": 7}))
    spans: Any = exporter.get_finished_spans()
    root, save = spans
    assert save.parent.span_id == root.context.span_id
    assert save.end_time - save.start_time == pytest.approx(0.25e9, abs=10)
    assert abs(save.start_time - time.time_ns()) < 60e9
    assert dict(save.attributes) == {"diskprefix.bytes": 7}
    traces.close()


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(SettingsError, match="--otlp-traces-endpoint: 'localhost:4318' is not an http"):
        Tracing("localhost:4318")


def test_without_the_extra_the_setting_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"pip install 'diskprefix\[otel\]'"):
        Tracing("http://localhost:4318/v1/traces")


def test_without_the_setting_nothing_of_opentelemetry_is_imported_or_done(chat_model: Path) -> None:
    engine = ScriptedEngine()
    with scripted_app(chat_model, engine) as server, server.client() as client:
        assert client.post(CHAT, json=BODY, headers={"traceparent": PARENT}).status_code == 200
        assert server.daemon.tracer is None
    assert [request.on_stage for request in engine.requests] == [None]


def test_a_log_line_in_json_names_the_trace(
    chat_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = "http://127.0.0.1:9/v1/traces"
    monkeypatch.setattr(tracing, "_FLUSH_MS", 10)
    monkeypatch.setattr(tracing, "_EXPORT_TIMEOUT_S", 0.1)
    with (
        scripted_app(chat_model, ScriptedEngine(), otlp_traces_endpoint=endpoint, log_prompts=True) as server,
        caplog.at_level("INFO", "diskprefix"),
        server.client() as client,
    ):
        client.post(CHAT, json=BODY, headers={"traceparent": PARENT})
        wait_until(lambda: [one for one in caplog.records if hasattr(one, "request")], "its line")
    facts = next(one for one in caplog.records if hasattr(one, "request")).request
    assert facts["trace_id"] == PARENT.split("-")[1]
    assert "Name three rivers" in facts["prompt"]
    assert facts["prefix_cache"]["restored"] == 0
    assert (facts["status"], facts["outcome"], facts["route"]) == (200, "completed", CHAT)
    assert json.dumps(facts)


def test_without_log_prompts_no_line_holds_what_people_wrote(
    chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_app(chat_model) as server, caplog.at_level("DEBUG"), server.client() as client:
        client.post(CHAT, json=BODY)
        wait_until(lambda: [one for one in caplog.records if hasattr(one, "request")], "its line")
    assert not any("rivers" in f"{vars(one)} {one.getMessage()}" for one in caplog.records)

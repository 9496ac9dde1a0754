"""The real daemon over HTTP: nonsense and extreme values get a clear answer, it keeps serving, and what it says of
itself, its model and its last requests holds."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import signal
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from diskprefix.daemon.api.fields import SamplingFields, sampling_params, with_sampling
from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.engine.request import Timings
from diskprefix.daemon.server.keys import Caller
from diskprefix.daemon.server.log_context import LogContext
from diskprefix.daemon.server.recent import MAX_FAILURES, MAX_REPLIES, RecentRequests
from diskprefix.daemon.settings import Settings
from diskprefix.runtime.runtime_options import SAMPLING_BOUNDS
from tests.daemon.server.chat_model import POSITIONS, VOCAB_SIZE
from tests.daemon.server.daemon_process import DaemonProcess, wait_until
from tests.daemon.server.scripted import ScriptedEngine, done, scripted_app

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client
        # Whatever a test has sent: the daemon must still answer a plain request.
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_signal_has_the_pages_of_a_busy_daemon_checked(client: httpx.Client, daemon: DaemonProcess) -> None:
    with client.stream("POST", CHAT, json=HELLO | {"max_tokens": 40, "stream": True}) as stream:
        daemon.process.send_signal(signal.SIGUSR2)
        stream.read()
    daemon.wait_for_line(r"\[engine\] KV pages: .* in use by . sequence.*, .* kept, all counts right")
    assert not any("ERROR" in line for line in daemon.lines)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in answer.text
    return error


def metrics_of(client: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        sample.name + "".join(f"|{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_reply_that_does_not_fit_ends_where_the_positions_end(client: httpx.Client) -> None:
    body = {"prompt": [5] * (POSITIONS - 3), "logit_bias": {"2": -100}, "temperature": 0}
    for fields, clamped in (({"max_tokens": 32_000}, 3), ({"max_tokens": 4}, 3), ({"max_tokens": 3}, None), ({}, 3)):
        answer = client.post(COMPLETIONS, json=body | fields).json()
        assert answer["usage"]["total_tokens"] == POSITIONS
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["timings"].get("max_tokens_clamped") == clamped
    for field in ("max_tokens", "max_completion_tokens"):
        chat = {"messages": HELLO["messages"], field: POSITIONS, "stop": ["a", "e", " "]}
        answer = client.post(CHAT, json=chat).json()
        assert answer["timings"]["max_tokens_clamped"] == POSITIONS - answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/another", 404, "model_not_found"),
    ],
)
def test_wrong_routes_and_methods_have_openais_body(
    client: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    assert answer.headers.get("allow") == ("GET, HEAD" if status == 405 else None)


def test_a_model_that_is_not_served_is_a_404_that_names_the_served_one(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=HELLO | {"model": "another"})
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "model"
    assert "'tiny-chat'" in error_of(answer)["message"]
    assert client.post(CHAT, json=HELLO | {"model": "tiny-chat"}).json()["model"] == "tiny-chat"


def test_a_response_has_exactly_the_documented_fields(client: httpx.Client) -> None:
    """Those of its API are read by `test_specifications.py`; these are ours."""
    answer = client.post(CHAT, json=HELLO).json()
    assert answer["prefix_cache"].keys() == {"scope", "restored", "miss_reason", "boundary", "boundary_reason", "saved"}
    assert answer["timings"].keys() == {
        "queue_ms", "lookup_ms", "restore_ms", "prefill_ms", "others_ms", "ttft_ms", "decode_ms",
        "decode_tokens_per_s",
    }  # fmt: skip
    assert all(value == round(value, 2) for value in answer["timings"].values())


def test_timings_show_the_wait_for_other_requests() -> None:
    late = Timings(queue_ms=1, lookup_ms=2, restore_ms=3, prefill_ms=4, ttft_ms=17, decode_ms=0, decode_tokens_per_s=0)
    assert (late.others_ms, replace(late, ttft_ms=5).others_ms) == (7, 0)


def test_health_and_props_tell_policy_counts_settings_and_start_up(client: httpx.Client) -> None:
    health = client.get("/health").json()
    assert (health["status"], health["model"], health["cache"]["state"]) == ("ok", "tiny-chat", "ok")
    before = client.get("/props").json()
    assert client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": "count me " * 9}]}).is_success
    after = client.get("/props").json()
    assert before["full_cache"]["state"]["scope"] == "full"
    assert before["settings"]["block_size"] == 16
    assert before["model"]["max_positions"] == POSITIONS
    assert before["model"]["identity"]["weights_digest"]
    assert before["settings"]["kv_cache_min_tokens"] == 16
    assert before["startup_s"]["total"] >= before["startup_s"]["server"] > 0
    misses = [sum(state["full_cache"]["state"]["misses"].values()) for state in (before, after)]
    assert misses[1] == misses[0] + 1
    assert after["running"] == []


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    """`test_metrics.py` has what follows from the figures of a response."""
    body = HELLO | {"messages": [{"role": "user", "content": "metrics are counted " * 90}]}
    assert client.post(CHAT, json=body).is_success
    before = metrics_of(client)
    answer = client.post(CHAT, json=body).json()
    after = metrics_of(client)

    def grown(name: str) -> float:
        return after[name] - before[name]

    usage, restored, source = answer["usage"], answer["prefix_cache"]["restored"], answer["prefix_cache"]["source"]
    assert grown("diskprefix_http_requests_total|/v1/chat/completions|200") == 1
    assert grown(f"diskprefix_prompt_tokens_total|{source}") == restored > 0
    assert grown("diskprefix_generation_tokens_total") == usage["completion_tokens"]
    assert grown("diskprefix_inter_token_seconds_count") == usage["completion_tokens"] - 1
    assert grown("diskprefix_inter_token_seconds_sum") == pytest.approx(answer["timings"]["decode_ms"] / 1e3, abs=1e-5)
    steps = grown("diskprefix_step_seconds_count")
    assert steps == grown("diskprefix_step_rows_count") >= usage["completion_tokens"] - 1
    assert grown("diskprefix_step_rows_sum") >= usage["completion_tokens"] - 1
    assert after["diskprefix_ready"] == 1
    assert after["diskprefix_store_budget_bytes"] == 64 * 1024**2


def test_openapi_is_complete(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()
    schemas = schema["components"]["schemas"]
    referred = {part.partition('"')[0] for part in json.dumps(schema).split("#/components/schemas/")[1:]}
    assert referred <= schemas.keys()
    assert {"ChatRequest", "CompletionRequest"} <= referred
    for name in ("ChatRequest", "CompletionRequest", "PrefixCacheOptions"):
        undescribed = [field for field, about in schemas[name]["properties"].items() if "description" not in about]
        assert undescribed == []
    for path in (CHAT, COMPLETIONS):
        operation = schema["paths"][path]["post"]
        assert {"200", "400", "404", "413", "415", "500", "503"} <= operation["responses"].keys()
        assert operation["requestBody"]["required"]
    operations = [operation for methods in schema["paths"].values() for operation in methods.values()]
    assert not any("422" in operation["responses"] for operation in operations), "a wrong query is a 400"
    for operation in operations:
        assert {"403", "500", "503"} <= operation["responses"].keys(), "what is answered before a route is called"
    with_token = [path for path, methods in schema["paths"].items() if "401" in str(methods)]
    own = ("/dashboard/", "/props", "/page-token")
    assert {path for path in schema["paths"] if path.startswith(own)} == {*with_token}


def test_the_docs_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    answer = client.get("/docs")
    page = answer.text
    assert answer.headers["x-frame-options"] == "DENY", "nor are they shown by a page from elsewhere"
    policy = answer.headers["content-security-policy"]
    assert all(part in policy for part in ("default-src 'none'", "frame-ancestors 'none'"))
    [style] = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
    assert not re.search("<(?:script|link|img)|src=|url[(]", page)
    links = re.findall('href="([^"]+)"', page)
    assert {link for link in links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in links if link.startswith("#")} <= {*re.findall('id="([^"]+)"', page)}


def test_the_docs_have_every_route_and_every_field_in_words(client: httpx.Client) -> None:
    document, page = client.get("/openapi.json").json(), client.get("/docs").text
    section_of = dict(re.findall('<section id="([^"]+)">(.*?)</section>', page, re.DOTALL))
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            section = section_of.pop(operation["operationId"])
            assert f"<h2>{method.upper()} {path}</h2>" in section
            assert all(f"<code>{parameter['name']}</code>" in section for parameter in operation.get("parameters", ()))
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                section_of.setdefault(body, "")
                section_of[body] += section
                [example] = re.findall("<pre>curl \\S+ -d '(.*)'</pre>", section) or [f"no example of {path}"]
                assert json.loads(unescape(example)) == schemas[body]["example"]
    assert {*section_of} == {*schemas}
    for name, schema in schemas.items():
        assert all(f"<code>{field}</code>" in section_of[name] for field in schema.get("properties", ()))
    assert "`" not in re.sub("<pre>.*?</pre>", "", page, flags=re.DOTALL)


def test_a_parameter_is_described_and_a_wrong_one_is_refused_by_its_name(client: httpx.Client) -> None:
    items = client.get("/openapi.json").json()["paths"]["/v1/responses/{response_id}/input_items"]["get"]
    assert {(parameter["name"], parameter["in"]) for parameter in items["parameters"]} == {
        ("response_id", "path"), ("x-cache-salt", "header"), ("limit", "query"), ("order", "query"), ("after", "query"),
    }  # fmt: skip
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("limit=", "limit")):
        answer = client.get(f"/v1/responses/resp_1/input_items?{query}")
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    long = client.get("/v1/responses/resp_1?x-cache-salt=", headers={"x-cache-salt": "x" * 257})
    assert (long.status_code, error_of(long)["param"]) == (400, "x-cache-salt")
    assert client.get("/v1/responses/resp_1?x-cache-salt=").status_code == 404, "the query has no salt"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"prefix_cache": {"x\n2026-01-01 ERROR forged \x1b[31m" + "y" * 500: 1}}),
        (CHAT, {"logit_bias": {"5\n2026-01-01 ERROR forged \x1b[31m" + "y" * 500: 1000}}),
        (CHAT, {"temperature": "\n2026-01-01 ERROR forged \x9b31m\u2028" + "y" * 500}),
        (CHAT, {"model": "\n2026-01-01 ERROR forged \x1b[31m" + "y" * 5000}),
        (CHAT, {"prefix_cache": {"scope": "\n2026-01-01 ERROR forged \x1b[31m" + "y" * 500}}),
        (COMPLETIONS, {"prompt": {"\n2026-01-01 ERROR forged \x1b[31m" + "y" * 500: 1}}),
        ("/v1/%0A2026-01-01%20ERROR%20forged%1B%5B31m" + "y" * 500, {}),
    ],
)
def test_a_clients_text_is_logged_short_on_one_line(
    client: httpx.Client, daemon: DaemonProcess, path: str, fields: dict[str, Any]
) -> None:
    logged = len(daemon.lines)
    answer = client.post(path, json=HELLO | fields)
    assert answer.status_code in (400, 404)
    error = error_of(answer)
    for text in (error["message"], error["param"] or ""):
        assert text.isprintable()
        assert len(text) < 400
    wait_until(lambda: any(f" {answer.status_code}" in line for line in daemon.lines[logged:]), "it is logged")
    for line in daemon.lines[logged:]:
        assert line.isprintable()
        assert not line.startswith("2026-01-01 ERROR")
        assert len(line) < 700


def test_each_request_is_one_log_line_with_its_figures(client: httpx.Client, daemon: DaemonProcess) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "log this line, please"}]}
    prompt_tokens = client.post(CHAT, json=body).json()["usage"]["prompt_tokens"]
    daemon.wait_for_line(rf"POST {CHAT} 200 · prompt {prompt_tokens} tokens · restored \d+ \(\w+\) · reply \d")


def card_of(chat_model: Path, **changes: Any) -> dict[str, Any]:
    engine = ScriptedEngine()
    with scripted_app(chat_model, engine) as server, server.client() as client:
        for name, value in changes.items():
            setattr(engine, name, value)
        [card] = client.get("/v1/models").json()["data"]
        assert client.get(f"/v1/models/{card['id']}").json() == card
        return dict(card)


def test_the_context_length_of_a_model_has_the_names_that_clients_look_for(chat_model: Path) -> None:
    card = card_of(chat_model, model_positions=4 * POSITIONS)
    names = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
    assert {card[name] for name in names} == {POSITIONS}
    assert card["meta"] == {"n_ctx_train": 4 * POSITIONS, "n_ctx": POSITIONS, "n_vocab": VOCAB_SIZE}


@pytest.mark.parametrize(
    ("changes", "capabilities", "modalities"),
    [
        ({}, {"completion", "chat", "tool_use"}, ["text"]),
        ({"tokenizer": SimpleNamespace(chat_template=None)}, {"completion"}, ["text"]),
        ({"tokenizer": SimpleNamespace(chat_template="{{ messages }}")}, {"completion", "chat"}, ["text"]),
        (
            {"processor": SimpleNamespace(problem=None)},
            {"completion", "chat", "tool_use", "vision"},
            ["text", "image"],
        ),
    ],
)
def test_capabilities_are_those_of_the_template_and_the_processor(
    chat_model: Path, changes: dict[str, Any], capabilities: set[str], modalities: list[str]
) -> None:
    card = card_of(chat_model, **changes)
    assert set(card["capabilities"]) == capabilities
    assert card["architecture"]["input_modalities"] == modalities
    assert ("tools" in card["supported_parameters"]) is ("tool_use" in capabilities)


def test_a_name_that_no_model_can_have_is_refused_and_not_repeated(chat_model: Path) -> None:
    with scripted_app(chat_model, ScriptedEngine()) as server, server.client() as client:
        asked = {"model": "x" * 10_000_000, "messages": [{"role": "user", "content": "Hi"}]}
        for answer in (client.post("/v1/chat/completions", json=asked), client.get(f"/v1/models/{'x' * 201}")):
            assert answer.status_code == 404
            assert "characters; 200 are the most" in answer.json()["error"]["message"]
            assert "xxx" not in answer.text


@pytest.mark.cases(2)
@pytest.mark.parametrize("penalty", [0.01, 100])
@pytest.mark.parametrize("temperature", [1e-5, 2])
def test_the_ends_of_all_ranges_together_are_served(client: httpx.Client, penalty: float, temperature: float) -> None:
    ends: dict[str, Any] = {
        "repetition_penalty": penalty,
        "temperature": temperature,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "min_p": 5e-324,
        "top_p": 5e-324,
        "top_k": 2**31 - 1,
        "logit_bias": {str(token): -100 if token % 2 else 100 for token in range(512)},
        "stop": ["x" * 1024] * 16,
        "seed": -(2**63),
        "n": 4,
        "max_tokens": 2,
    }
    odd: list[dict[str, Any]] = [
        {"stop": ["\u0000", "🦀"]},
        {"logprobs": True, "top_logprobs": 20},
        {"n": 16, "seed": 2**63 - 1},
    ]
    odd += [{"messages": [{"role": "user", "content": text}]} for text in ("", "\u0000🦀\ufffe")]
    for fields in [ends, *odd, *({name: ends[name] for name in ends if name != left_out} for left_out in ends)]:
        answer = client.post(CHAT, json=HELLO | fields)
        assert answer.status_code == 200, (fields, answer.text)


def test_more_alternatives_than_tokens_are_as_many_as_there_are() -> None:
    assert sampling_params(SamplingFields(), 8, logprobs=20).logprobs == 8


def test_the_servers_sampling_is_a_bounded_default() -> None:
    defaults = Settings(sampling="temperature=0.5,top_k=7").sampling_values
    body = with_sampling(ChatRequest.model_validate({"messages": HELLO["messages"], "temperature": 1.5}), defaults)
    params = sampling_params(body, 10)
    assert (params.temperature, params.top_k, params.top_p) == (1.5, 7, 1.0)
    untouched = ChatRequest.model_validate({"messages": HELLO["messages"]})
    assert with_sampling(untouched, {}) is untouched
    for name, ends in SAMPLING_BOUNDS.items():
        for end in ends:
            SamplingFields.model_validate({name: Settings(sampling=f"{name}={end}").sampling_values[name]})


def answered(id_: str = "chatcmpl-1") -> LogContext:
    return LogContext(status=200, done=done(cached_tokens=8), generation_id=id_, caller=Caller(name="alice"))


def test_failures_are_remembered_and_questions_about_the_daemon_are_not() -> None:
    recent = RecentRequests()
    recent.note(LogContext(status=400, error="top_p: too large"), "POST", CHAT, 0.1)
    recent.note(LogContext(status=404, error="no such route"), "GET", "other", 0.1)
    recent.note(LogContext(status=200), "POST", "/tokenize", 0.1)
    recent.note(LogContext(status=200, error="the client reads too slowly"), "POST", CHAT, 0.1)
    assert [ended.error for ended in recent.since(0)] == ["top_p: too large", "the client reads too slowly"]


def test_many_failures_push_no_reply_out_and_the_oldest_go_first() -> None:
    recent = RecentRequests()
    recent.note(answered("first"), "POST", CHAT, 0.1)
    for _ in range(MAX_FAILURES + 5):
        recent.note(LogContext(status=429, error="full"), "POST", CHAT, 0.1)
    ended_requests = recent.since(0)
    assert (len(ended_requests), ended_requests[0].id) == (MAX_FAILURES + 1, "first")
    assert [ended.number for ended in recent.since(recent.count - 2)] == [recent.count - 1, recent.count]
    for _ in range(MAX_REPLIES):
        recent.note(answered("later"), "POST", CHAT, 0.1)
    assert "first" not in {ended.id for ended in recent.since(0)}

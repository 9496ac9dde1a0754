"""The real daemon over HTTP: nonsense gets a clear answer, it keeps serving, and what it says of itself holds."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diskprefix.engine.request import Timings
from tests.server.chat_model import POSITIONS, VOCAB_SIZE
from tests.server.daemon_process import DaemonProcess, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
JSON = {"content-type": "application/json"}


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client
        # Whatever a test has sent: the daemon must still answer a plain request.
        assert client.post(CHAT, json=HELLO).status_code == 200


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


def test_a_client_that_waits_for_100_continue_is_refused_before_it_sends_anything(daemon: DaemonProcess) -> None:
    port = int(daemon.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 99000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_context_that_is_too_long_is_a_400_with_both_figures(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": "rivers " * POSITIONS}]})
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert re.search(rf"prompt is too long: \d+ tokens > {POSITIONS}, the positions", error["message"])
    answer = client.post(COMPLETIONS, json={"prompt": [5] * POSITIONS})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")


def test_a_reply_that_does_not_fit_ends_where_the_positions_end(client: httpx.Client) -> None:
    body = {"prompt": [5] * (POSITIONS - 3), "logit_bias": {"2": -100}, "temperature": 0}
    for fields, clamped in (({"max_tokens": 32_000}, 3), ({"max_tokens": 4}, 3), ({"max_tokens": 3}, None), ({}, 3)):
        answer = client.post(COMPLETIONS, json=body | fields).json()
        assert answer["usage"]["total_tokens"] == POSITIONS
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["timings"].get("max_tokens_clamped") == clamped


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
    ],
)
def test_wrong_routes_and_methods_have_openais_body(
    client: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["code"] == code


def test_a_model_that_is_not_served_is_a_404_that_names_the_served_one(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=HELLO | {"model": "gpt-4"})
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "model"
    assert "'tiny-chat'" in error_of(answer)["message"]
    assert client.post(CHAT, json=HELLO | {"model": "tiny-chat"}).json()["model"] == "tiny-chat"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "n": 3},
        {"seed": 2**63 - 1, "n": 16},
        {"logit_bias": {str(i): -100 for i in range(VOCAB_SIZE)}},
        {"stop": ["a", "b", "\u0000", "🦀"]},
        {"logprobs": True, "top_logprobs": 20},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": "\u0000🦀\ufffe"}]},
    ],
)
def test_extremes_that_are_allowed_are_served(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post(CHAT, json=HELLO | {"temperature": 1, "max_tokens": 4} | fields)
    assert answer.status_code == 200, answer.text


def test_a_response_has_exactly_the_documented_fields(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=HELLO).json()
    assert answer.keys() == {
        "id", "object", "created", "model", "system_fingerprint", "choices", "usage", "prefix_cache", "timings"
    }  # fmt: skip
    assert answer["prefix_cache"].keys() == {"scope", "restored", "miss_reason", "boundary", "boundary_reason", "saved"}
    assert answer["timings"].keys() == {
        "queue_ms", "lookup_ms", "restore_ms", "prefill_ms", "others_ms", "ttft_ms", "decode_ms",
        "decode_tokens_per_s",
    }  # fmt: skip
    assert all(value == round(value, 2) for value in answer["timings"].values())


def test_what_a_first_token_waited_for_others_is_told() -> None:
    late = Timings(queue_ms=1, lookup_ms=2, restore_ms=3, prefill_ms=4, ttft_ms=17, decode_ms=0, decode_tokens_per_s=0)
    assert (late.others_ms, replace(late, ttft_ms=5).others_ms) == (7, 0)


def test_a_scope_of_the_request_is_the_scope_of_the_reply(client: httpx.Client) -> None:
    for scope, canonical in (("off", "off"), ("AUTO:8", "auto:8"), (100, "100"), ("auto", "auto:30")):
        answer = client.post(CHAT, json=HELLO | {"prefix_cache": {"scope": scope}}).json()
        assert answer["prefix_cache"]["scope"] == canonical
    assert client.post(CHAT, json=HELLO).json()["prefix_cache"]["scope"] == "full"


def test_logprobs_of_completions_add_up_to_the_text(client: httpx.Client) -> None:
    body = {"prompt": "Name three rivers", "max_tokens": 12, "temperature": 0, "logprobs": 2, "logit_bias": {"2": -100}}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 12
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(top) <= 2 for top in logprobs["top_logprobs"])


def test_props_tell_policy_counts_settings_and_start_up(client: httpx.Client) -> None:
    before = client.get("/props").json()
    assert client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": "count me " * 9}]}).is_success
    after = client.get("/props").json()
    assert before["full_cache"]["state"]["scope"] == "full"
    assert before["settings"]["block_size"] == 16
    assert before["model"]["max_positions"] == POSITIONS
    assert before["model"]["identity"]["weights_digest"]
    assert before["settings"]["kv_cache_min_tokens"] == 16
    assert before["startup_s"]["total"] >= before["startup_s"]["imports"] > 0
    misses = [sum(state["full_cache"]["state"]["misses"].values()) for state in (before, after)]
    assert misses[1] == misses[0] + 1


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "metrics are counted " * 90}]}
    assert client.post(CHAT, json=body).is_success
    before = metrics_of(client)
    answer = client.post(CHAT, json=body).json()
    after = metrics_of(client)

    def grown(name: str) -> float:
        return after[name] - before[name]

    usage, restored, source = answer["usage"], answer["prefix_cache"]["restored"], answer["prefix_cache"]["source"]
    assert grown("diskprefix_http_requests_total|/v1/chat/completions|200") == 1
    assert grown("diskprefix_requests_total|completed") == 1
    assert grown(f"diskprefix_prompt_tokens_total|{source}") == restored > 0
    assert grown("diskprefix_prompt_tokens_total|computed") == usage["prompt_tokens"] - restored
    assert grown("diskprefix_generation_tokens_total") == usage["completion_tokens"]
    first_token = "diskprefix_time_to_first_token_seconds"
    assert grown(f"{first_token}_count|hit") == 1
    assert grown(f"{first_token}_sum|hit") == pytest.approx(answer["timings"]["ttft_ms"] / 1e3, abs=1e-5)
    assert grown("diskprefix_inter_token_seconds_count") == usage["completion_tokens"] - 1
    assert grown("diskprefix_inter_token_seconds_sum") == pytest.approx(answer["timings"]["decode_ms"] / 1e3, abs=1e-5)
    assert (
        grown("diskprefix_step_seconds_count") == grown("diskprefix_step_rows_count") >= usage["completion_tokens"] - 1
    )
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
    assert {path for path in schema["paths"] if path.startswith(("/dashboard/", "/props"))} == {*with_token}


def test_the_docs_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs").text
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert any(path.endswith(".js") for path in loaded)
    assert any(path.endswith(".css") for path in loaded)
    for path in loaded:
        assert path.startswith("/")
        assert client.get(path).status_code == 200
    assert "://" not in page.replace("http://127.0.0.1", "")
    assert '"validatorUrl": null' in page


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
def test_what_a_client_writes_stays_on_one_line_and_short(
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


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_may_ask_for_more_than_fits_by_either_name(client: httpx.Client, field: str) -> None:
    answer = client.post(CHAT, json={"messages": HELLO["messages"], field: POSITIONS, "stop": ["a", "e", " "]}).json()
    assert answer["timings"]["max_tokens_clamped"] == POSITIONS - answer["usage"]["prompt_tokens"]


def test_health_says_ok(client: httpx.Client) -> None:
    health = client.get("/health").json()
    assert (health["status"], health["model"], health["cache"]["state"]) == ("ok", "tiny-chat", "ok")


def test_each_request_is_one_log_line_with_its_figures(client: httpx.Client, daemon: DaemonProcess) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "log this line, please"}]}
    prompt_tokens = client.post(CHAT, json=body).json()["usage"]["prompt_tokens"]
    daemon.wait_for_line(rf"POST /v1/chat/completions 200 · prompt {prompt_tokens} · restored \d+ \(\w+\) · reply \d")

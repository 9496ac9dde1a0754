"""Extreme values of every sampling field, sent to a real daemon: no request fails, and the next one is served."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from diskprefix.api.fields import SamplingFields, sampling_params, with_sampling
from diskprefix.api.openai_chat import ChatRequest
from diskprefix.server.daemon import Daemon
from diskprefix.settings import _SAMPLING, Settings
from tests.server.daemon_process import DaemonProcess
from tests.server.scripted import ScriptedEngine

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello hello"},
}
NUMBERS = [0, -1, 1e-45, 5e-324, 1e-40, 1e-7, 2.5, 101, 1e39, 1e308, 10**400, float("nan"), float("inf")]
FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "n",
)


def send(client: httpx.Client, route: str, **fields: Any) -> httpx.Response:
    body = json.dumps(ROUTES[route] | {"max_tokens": 2, "seed": 1} | fields)
    return client.post(route, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("field", FIELDS)
def test_a_request_with_an_extreme_number_is_served_or_refused_by_the_fields_name(
    daemon: DaemonProcess, field: str
) -> None:
    with daemon.client() as client:
        for number in NUMBERS:
            answer = send(client, "/v1/completions", **{field: number})
            assert answer.status_code in (200, 400), (number, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["param"] in (field, None), (number, answer.text)
        assert send(client, "/v1/completions").status_code == 200


@pytest.mark.parametrize("bias", [1e-45, 1e39, 1e308, 101, float("nan"), float("inf")])
def test_a_request_with_an_extreme_bias_is_served_or_refused_by_the_tokens_path(
    daemon: DaemonProcess, bias: float
) -> None:
    with daemon.client() as client:
        answer = send(client, "/v1/completions", logit_bias={"5": bias})
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] in ("logit_bias.5", None), answer.text
        assert send(client, "/v1/completions").status_code == 200


@pytest.mark.parametrize("penalty", [0.01, 100])
@pytest.mark.parametrize("temperature", [1e-5, 2])
def test_the_ends_of_all_ranges_together_are_served(daemon: DaemonProcess, penalty: float, temperature: float) -> None:
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
    with daemon.client() as client:
        for left_out in [None, *ends]:
            fields = {name: value for name, value in ends.items() if name != left_out}
            answer = send(client, "/v1/chat/completions", **fields)
            assert answer.status_code == 200, (left_out, answer.text)


def test_more_alternatives_than_tokens_are_as_many_as_there_are() -> None:
    assert sampling_params(SamplingFields(), 8, logprobs=20).logprobs == 8


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (Settings(), {"temperature": 0.2, "top_p": 0.9}),
        (Settings(model="SmolLM2-135M-Instruct", sampling="temperature=1"), {"temperature": 1.0, "top_p": 0.9}),
        (Settings(model="org/name"), {}),
        (Settings(model="org/name", sampling="top_k=7"), {"top_k": 7}),
    ],
)
def test_the_embedded_model_is_sampled_as_its_makers_recommend_unless_the_server_says_otherwise(
    settings: Settings, found: dict[str, float]
) -> None:
    assert Daemon(settings, ScriptedEngine().load).sampling == found


def test_the_servers_sampling_is_that_of_requests_that_say_none_and_has_their_bounds() -> None:
    defaults = Settings(sampling="temperature=0.5,top_k=7").sampling_values
    body = with_sampling(ChatRequest.model_validate({**ROUTES["/v1/chat/completions"], "temperature": 1.5}), defaults)
    params = sampling_params(body, 10)
    assert (params.temperature, params.top_k, params.top_p) == (1.5, 7, 1.0)
    untouched = ChatRequest.model_validate(ROUTES["/v1/chat/completions"])
    assert with_sampling(untouched, {}) is untouched
    for name, ends in _SAMPLING.items():
        for end in ends:
            SamplingFields.model_validate({name: Settings(sampling=f"{name}={end}").sampling_values[name]})

"""`echo` on /v1/completions: the prompt with the log probabilities of its tokens, as lm-eval's `local-completions` asks
for them, against transformers' own logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from diskprefix.daemon.engine import active_requests
from diskprefix.daemon.server import engine_request
from tests.daemon.server.daemon_process import reply_to
from tests.daemon.server.scripted import AppServer, real_app

PATH = "/v1/completions"
TEXT = "Name three rivers and tell me where each of them begins and where it ends. " * 12


@pytest.fixture(scope="module", params=["auto", "torch"])
def server(
    request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AppServer]:
    """With a plan, and on the grid."""
    folder = tmp_path_factory.mktemp("kv")
    with real_app(chat_model, folder, kv_cache_gate="off", kernels=request.param) as running:
        yield running


@pytest.fixture
def client(server: AppServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def asked(client: httpx.Client, prompt: Any, **fields: Any) -> Any:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0} | fields
    return client.post(PATH, json=body).raise_for_status().json()


def expected(model: Path, token_ids: list[int]) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def tokens_of(client: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = client.post("/tokenize", json={"content": text}).json()["tokens"]
    return tokens


def test_the_prompts_tokens_have_the_log_probabilities_of_the_model(client: httpx.Client, chat_model: Path) -> None:
    token_ids = tokens_of(client, TEXT)
    assert len(token_ids) > 2 * active_requests._SCORED_ROWS
    [choice] = asked(client, TEXT)["choices"]
    logprobs = choice["logprobs"]
    right = expected(chat_model, token_ids)
    assert choice["text"].startswith(TEXT)
    assert len(logprobs["tokens"]) == len(token_ids) + 1
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for position in range(1, len(token_ids)):
        wanted = right[position - 1]
        assert logprobs["token_logprobs"][position] == pytest.approx(float(wanted[token_ids[position]]), abs=2e-5)
        assert max(logprobs["top_logprobs"][position].values()) == pytest.approx(float(wanted.max()), abs=2e-5)
    assert logprobs["text_offset"][-1] == len(TEXT)
    assert "".join(logprobs["tokens"][:-1]) == TEXT


def test_echoed_log_probabilities_do_not_depend_on_the_batch(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asked(client, TEXT)["choices"][0]["logprobs"]
    stored = {"prompt": TEXT, "max_tokens": 1, "prefix_cache": {"scope": "full"}}
    client.post(PATH, json=stored).raise_for_status()
    assert client.post(PATH, json=stored).json()["prefix_cache"]["restored"] > 0
    assert asked(client, TEXT)["choices"][0]["logprobs"] == first
    both = asked(client, [TEXT, TEXT])["choices"]
    assert [choice["logprobs"] for choice in both] == [first, first]
    monkeypatch.setattr(active_requests, "_SCORED_ROWS", 7)
    assert asked(client, TEXT)["choices"][0]["logprobs"] == first
    assert asked(client, TEXT)["prefix_cache"]["restored"] == 0


def test_the_reply_is_that_without_echo(client: httpx.Client, server: AppServer) -> None:
    plain = reply_to(client, {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "logprobs": 2}, PATH)["choices"][0]
    [echoed] = asked(client, TEXT, max_tokens=8, logprobs=2)["choices"]
    assert echoed["text"] == TEXT + plain["text"]
    # On the grid, the product of many rows with the vocabulary adds up in another order than that of one.
    rounding = 0 if server.engine.cache.layout.exact_at == "token" else 1e-5
    logprobs = echoed["logprobs"]["token_logprobs"][-8:]
    assert logprobs == pytest.approx(plain["logprobs"]["token_logprobs"], abs=rounding, rel=0)
    only_text = asked(client, TEXT, max_tokens=8, logprobs=None)["choices"][0]
    assert (only_text["text"], only_text["logprobs"]) == (echoed["text"], None)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_as_lm_eval_asks_and_reads(client: httpx.Client, chat_model: Path, max_tokens: int) -> None:
    """`parse_logprobs` of lm-eval 0.4: prompts as token ids, and the sum over the continuation."""
    contexts = ["Name three rivers", "def add(a, b):"]
    continuations = [" and tell me", "\n    return a + b"]
    prompts = [
        tokens_of(client, context + continuation) for context, continuation in zip(contexts, continuations, strict=True)
    ]
    lengths = [len(tokens_of(client, context)) for context in contexts]
    reply = asked(client, prompts, max_tokens=max_tokens, seed=1234)
    for choice, prompt, length in zip(
        sorted(reply["choices"], key=lambda choice: int(choice["index"])), prompts, lengths, strict=True
    ):
        end = len(prompt)
        right = expected(chat_model, prompt)
        wanted = sum(float(right[position - 1][prompt[position]]) for position in range(length, end))
        assert sum(choice["logprobs"]["token_logprobs"][length:end]) == pytest.approx(wanted, abs=1e-4)
        assert len(choice["logprobs"]["token_logprobs"]) == end + max_tokens
        assert choice["text"].startswith(client.post("/detokenize", json={"tokens": prompt}).json()["content"])


def test_a_prompt_of_one_token_has_no_probability(client: httpx.Client) -> None:
    [choice] = asked(client, [5], max_tokens=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stream": True}, "stream"), ({"suffix": "x"}, "suffix"), ({"n": 2}, "n"), ({"logprobs": 20}, "prompt")],
)
def test_fields_that_exclude_echo_are_a_400(
    client: httpx.Client, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_request, "MAX_LOGPROBS", 400)
    answer = client.post(PATH, json={"prompt": TEXT, "echo": True, "max_tokens": 1} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

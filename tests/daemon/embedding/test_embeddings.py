"""Embeddings of the served decoder, against transformers' own hidden states of the same model."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.embedding import embeddings
from diskprefix.daemon.embedding.model_purpose import Purpose, read_purpose
from diskprefix.daemon.settings import Settings
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from tests.agent_bodies import words
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import wait_until
from tests.daemon.server.scripted import AppServer, ScriptedEngine, real_app, say_hello, scripted_app
from tests.runtime.plan.tiny import write_gguf

INSTRUCTION = words(1, 60)
TEXTS = [f"{INSTRUCTION}\n{words(seed, 5 * seed + 1)}" for seed in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen3-Embedding is published: names of weights without the model's, and modules of sentence-transformers."""
    from safetensors.torch import load_file, save_file

    folder = write_chat_model(tmp_path_factory.mktemp("models") / "embedder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    named = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    write_modules(folder, "Transformer", "Pooling", "Normalize")
    write_pooling(folder, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False, include_prompt=True)
    return folder


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    with real_app(folder, tmp_path_factory.mktemp("kv"), kv_cache_gate="off") as server:
        yield server


def write_modules(folder: Path, *names: str) -> None:
    types = [{"type": f"sentence_transformers.models.{name}", "path": f"{i}_{name}"} for i, name in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(types))


def write_pooling(folder: Path, **config: Any) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def embed(client: httpx.Client, given: Any, **body: Any) -> Any:
    return client.post("/v1/embeddings", json={"input": given, **body}).raise_for_status().json()


def vectors(client: httpx.Client, given: Any, **body: Any) -> list[bytes]:
    data = embed(client, given, encoding_format="base64", **body)["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [base64.b64decode(one["embedding"]) for one in data]


@pytest.fixture(scope="module")
def hidden_states(folder: Path) -> list[torch.Tensor]:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]


def unit(vector: torch.Tensor) -> Any:
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def test_vectors_are_transformers_own_but_for_rounding(client: httpx.Client, hidden_states: list[torch.Tensor]) -> None:
    """Products and attention add up in another order than transformers', in float32: a few units of 2**-24 a layer."""
    reply = embed(client, TEXTS)
    for one, hidden in zip(reply["data"], hidden_states, strict=True):
        np.testing.assert_allclose(one["embedding"], unit(hidden[-1]), rtol=0, atol=2e-6)
    total = sum(len(hidden) for hidden in hidden_states)
    assert reply["object"] == "list"
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == total


def test_a_vector_has_the_same_bits_cold_from_the_cache_and_in_company(client: httpx.Client) -> None:
    cold = [vectors(client, text, prefix_cache={"scope": "off"})[0] for text in TEXTS]
    together = vectors(client, TEXTS, prefix_cache={"scope": "full"})
    assert together == cold
    again = embed(client, TEXTS[-1], prefix_cache={"scope": "full"})["usage"]
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]
    assert vectors(client, TEXTS[::-1]) == cold[::-1]
    tokens = [client.post("/tokenize", json={"content": text}).json()["tokens"] for text in TEXTS[:2]]
    assert vectors(client, tokens) == cold[:2]
    assert vectors(client, tokens[0]) == cold[:1]


def test_a_vector_has_the_same_bits_from_the_disk_after_a_restart(folder: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with real_app(folder, tmp_path / "kv", kv_cache_gate="off") as server, server.client() as client:
            reply = embed(client, TEXTS[-1], encoding_format="base64", prefix_cache={"scope": "full"})
            found.append((reply["data"][0]["embedding"], reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0))
    assert found == [(found[0][0], False), (found[0][0], True)]


def test_an_engine_that_shows_no_hidden_states_names_the_one_that_does(
    daemon: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(daemon.engine.runtime), "has_hidden", False)
    with daemon.client() as client:
        answer = client.post("/v1/embeddings", json={"input": "a text"})
    assert answer.status_code == 400
    assert "; with --runtime plan it does" in answer.json()["error"]["message"]


def test_a_mean_is_that_of_all_tokens_with_the_same_bits_in_company(
    folder: Path, tmp_path: Path, hidden_states: list[torch.Tensor]
) -> None:
    averaging = Path(shutil.copytree(folder, tmp_path / "averaging"))
    write_pooling(averaging, pooling_mode_lasttoken=False, pooling_mode_mean_tokens=True, include_prompt=True)
    with real_app(averaging, tmp_path / "kv") as server, server.client() as client:
        together = vectors(client, TEXTS)
        assert vectors(client, TEXTS[2]) == [together[2]]
    for found, hidden in zip(together, hidden_states, strict=True):
        np.testing.assert_allclose(np.frombuffer(found, "<f4"), unit(hidden.mean(0)), rtol=0, atol=2e-6)


def test_fewer_dimensions_are_the_beginning_at_length_one_and_null_stands_for_the_default(
    client: httpx.Client,
) -> None:
    [whole], [short] = vectors(client, TEXTS[0]), vectors(client, TEXTS[0], dimensions=8)
    nothing = {"encoding_format": None, "dimensions": None, "model": None, "prefix_cache": None}
    assert embed(client, TEXTS[0], **nothing)["data"] == embed(client, TEXTS[0])["data"]
    beginning = np.frombuffer(whole, "<f4")[:8]
    np.testing.assert_allclose(np.frombuffer(short, "<f4"), beginning / np.linalg.norm(beginning), rtol=1e-6)


def test_the_texts_for_an_embedding_model_in_a_gguf_file_end_and_are_pooled_as_the_file_says(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "embedder.gguf", pooling=3)
    with real_app(file, tmp_path / "kv") as server, server.client() as client:
        tokens = client.post("/tokenize", json={"content": "rivers"}).json()["tokens"]
        assert vectors(client, "rivers") == vectors(client, [*tokens, 2]) != vectors(client, tokens)
    for number, pooling in ((0, "last"), (1, "mean"), (3, "last")):
        found = read_purpose(write_gguf(tmp_path / f"{number}.gguf", pooling=number))
        assert (found.pooling, found.end_id, found.problem) == (pooling, 2, None)
    assert read_purpose(write_gguf(tmp_path / "rank.gguf", pooling=4)).problem == "its file asks for pooling of type 4"


POOLING = ("Transformer", "Pooling")


@pytest.mark.parametrize(
    ("modules", "config", "pooling", "problem"),
    [
        (POOLING, {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last", None),
        (POOLING, {"pooling_mode_mean_tokens": True}, "mean", None),
        (POOLING, {"pooling_mode": "lasttoken"}, "last", None),
        (("Transformer",), {}, "last", None),
        (POOLING, {"pooling_mode_cls_token": True}, "", "cls_token"),
        (POOLING, {"pooling_mode": ["mean", "max"]}, "", "mean and max"),
        (POOLING, {}, "", "no pooling"),
        ((*POOLING, "Dense"), {"pooling_mode": "mean"}, "", "Dense"),
        (("Transformer", "LogitScore"), {}, "", "LogitScore"),
    ],
)
def test_the_pooling_is_that_of_sentence_transformers_and_another_is_refused(
    modules: tuple[str, ...], config: dict[str, Any], pooling: str, problem: str | None, tmp_path: Path
) -> None:
    write_modules(tmp_path, *modules)
    write_pooling(tmp_path, **config)
    found = read_purpose(tmp_path)
    if problem is None:
        found.require()
        assert found.pooling == pooling
    else:
        with pytest.raises(InvalidRequest, match=problem):
            found.require()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("modules.json", content) for content in ("[{", "{}", "[" * 100_000)),
        ("1_Pooling/config.json", "[]"),
        ("1_Pooling/config.json", None),
    ],
)
def test_a_damaged_file_is_never_taken_for_the_last_token(name: str, content: str | None, tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling")
    write_pooling(tmp_path, pooling_mode="mean")
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert read_purpose(tmp_path).problem is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", 5]}, "input.1"),
        ({"input": [1, 99999]}, "input.1"),
        ({"input": [[1], [2, 99999]]}, "input.1.1"),
        ({"input": ["a", "word " * 9000]}, "input.1"),
        ({"input": [[1, 2, 3], [1, 2], [3]]}, "input.2"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_bad_bodies_are_refused_with_the_path(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str
) -> None:
    if param == "input.2":
        # All together have too many tokens, and none is computed.
        monkeypatch.setattr(embeddings, "MAX_TOKENS", 5)
        assert embed(client, body["input"][:2])["usage"]["total_tokens"] == 5
    reply = client.post("/v1/embeddings", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_many_requests_at_once_take_a_place_each_and_fail_nobody(chat_model: Path) -> None:
    """At the default limits: 64 requests may wait, and here 256 inputs do."""
    released, num_requests, num_inputs = threading.Event(), 16, 16

    def wait(*given: Any) -> None:
        assert released.wait(60)
        say_hello(*given)

    engine = ScriptedEngine(wait)
    engine.max_sequences = limit = Settings().max_sequences
    with (
        ThreadPoolExecutor(num_requests + 1) as threads,
        scripted_app(chat_model, engine, max_sequences=limit) as server,
        server.client() as client,
    ):
        inputs = [f"Input {number}" for number in range(num_inputs)]
        sent = [threads.submit(client.post, "/v1/embeddings", json={"input": inputs}) for _ in range(num_requests)]
        inbox = server.daemon.inbox
        waiting = num_requests * limit - 1
        try:
            wait_until(lambda: inbox.queue_depth == waiting, "all have given the engine what it runs at a time")
            assert server.daemon.in_flight.num == num_requests
            sent.append(threads.submit(client.post, "/v1/completions", json={"prompt": "Hello"}))
            wait_until(lambda: inbox.queue_depth == waiting + 1, "another request is queued beside them")
        finally:
            released.set()
        assert [one.result().status_code for one in sent] == [200] * (num_requests + 1)
        wait_until(lambda: not server.daemon.in_flight.num, "all places are free")


def test_a_model_that_shows_no_hidden_states_is_refused_before_the_queue(chat_model: Path) -> None:
    engine = ScriptedEngine()
    engine.runtime.has_hidden = False
    with scripted_app(chat_model, engine) as server, server.client() as client:
        reply = client.post("/v1/embeddings", json={"input": "a"})
    assert (reply.status_code, reply.json()["error"]["param"], engine.requests) == (400, "model", [])


def figure(client: httpx.Client, name: str) -> float:
    [line] = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_the_inputs_are_counted_and_logged_as_one_request(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        'diskprefix_requests_total{outcome="completed"}',
        'diskprefix_time_to_first_token_seconds_count{cache="short"}',
        "diskprefix_prefill_seconds_count",
        'diskprefix_prompt_tokens_total{source="computed"}',
    ]
    before = [figure(client, name) for name in names]
    with caplog.at_level("INFO", "diskprefix"):
        total = embed(client, TEXTS, prefix_cache={"scope": "off"})["usage"]["prompt_tokens"]
        # It is logged when the response is sent.
        wait_until(lambda: "POST /v1/embeddings" in caplog.text, "the line of the request")
    [line] = [record.message for record in caplog.records if "POST /v1/embeddings" in record.message]
    assert f" 200 · prompt {total} tokens · restored " in line
    added = [figure(client, name) - number for name, number in zip(names, before, strict=True)]
    assert added == [1, 0, 0, total]


@pytest.mark.parametrize("ends", ["by the tokenizer", "by the file"])
def test_a_cut_text_keeps_the_tokens_that_begin_and_end_every_text(chat_model: Path, ends: str) -> None:
    tokenizer = read_tokenizer(chat_model, None)
    whole = tokenizer.encode("Name three rivers. " * 100, add_special_tokens=False)
    if ends == "by the tokenizer":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A <|im_end|>", pair="$A $B", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
        )
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=64)
    engine = SimpleNamespace(max_positions=64)
    serving: Any = SimpleNamespace(renderer=renderer, engine=engine)
    purpose = Purpose("last", end_id=2 if ends == "by the file" else None)
    text = "Name three rivers. " * 100_000
    with pytest.raises(ContextTooLong):
        embeddings._prompt(serving, purpose, text, "input", special_tokens=False)
    cut = embeddings._prompt(serving, purpose, text, "input", special_tokens=False, at_most=63).token_ids.tolist()
    assert cut == ([1, *whole[:61], 2] if ends == "by the tokenizer" else [*whole[:62], 2])

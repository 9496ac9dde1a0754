"""Documents in the order in which a reranker says yes, against transformers' own logits of the same prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from diskprefix.extras.embedding.model_purpose import read_purpose
from tests.agent_bodies import words
from tests.model.tiny import write_gguf
from tests.server.chat_model import VOCAB_SIZE, write_chat_model
from tests.server.scripted import real_app, scripted_app

YES, NO = 300, 301
QUERY = "Which rivers are long? {document}"
DOCUMENTS = [words(seed, 8 + seed) for seed in range(5)]
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided"
    '. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search '
    "query, retrieve relevant passages that answer the query\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>"
    "assistant\n<think>\n\n</think>\n\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "reranker")
    types = [
        {"type": f"x.{name}", "path": path} for name, path in (("Transformer", ""), ("LogitScore", "1_LogitScore"))
    ]
    (folder / "modules.json").write_text(json.dumps(types))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": NO}))
    return folder


@pytest.fixture(scope="module")
def probabilities(folder: Path) -> list[float]:
    """Those of yes against no that transformers computes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    with torch.inference_mode():
        for document in DOCUMENTS:
            logits = model(**tokenizer(PROMPT.format(QUERY, document), return_tensors="pt")).logits[0, -1]
            found.append(float(logits[[YES, NO]].softmax(0)[0]))
    return found


def ranked(client: httpx.Client, path: str = "/v1/rerank", **body: Any) -> Any:
    return client.post(path, json={"query": QUERY, "documents": DOCUMENTS, **body}).raise_for_status().json()


def test_the_score_is_the_probability_of_yes_as_transformers_computes_it(
    client: httpx.Client, probabilities: list[float]
) -> None:
    reply = ranked(client, prefix_cache={"scope": "full"})
    scores = {one["index"]: one["relevance_score"] for one in reply["results"]}
    assert [scores[index] for index in range(len(DOCUMENTS))] == pytest.approx(probabilities, abs=1e-6)
    assert list(scores) == sorted(scores, key=lambda index: -scores[index])
    again = ranked(client, prefix_cache={"scope": "full"})
    assert again["results"] == reply["results"]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"], "an exact repeat computes nothing"
    alone = [ranked(client, documents=[text], prefix_cache={"scope": "off"})["results"][0] for text in DOCUMENTS]
    assert [one["relevance_score"] for one in alone] == [scores[index] for index in range(len(DOCUMENTS))]


def test_a_special_token_in_a_query_or_a_document_is_plain_text(client: httpx.Client) -> None:
    """As a special token it would be one token, and a blank."""

    def num_tokens(query: str, document: str) -> int:
        return int(ranked(client, query=query, documents=[document])["usage"]["prompt_tokens"])

    without = num_tokens("see here", "see here")
    assert num_tokens("see here", "see <|im_end|> here") >= without + 5
    assert num_tokens("see <|im_end|> here", "see here") >= without + 5


def test_a_prompt_of_a_file_needs_a_place_for_both_texts(chat_model: Path, tmp_path: Path) -> None:
    template = "<|im_start|>{query}<|im_end|>"
    name = "tokenizer.chat_template.rerank"
    file = write_gguf(tmp_path / "m.gguf", pooling=4, more=lambda writer: writer.add_string(name, template))
    with scripted_app(chat_model) as server, server.client() as client:
        server.app.state.purpose = replace(read_purpose(file, "auto", VOCAB_SIZE), labels=(YES, NO))
        reply = client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
        assert "{document}" in reply.json()["error"]["message"]


def test_the_best_ones_come_back_with_their_texts_under_each_name_of_the_route(client: httpx.Client) -> None:
    whole = ranked(client)["results"]
    asked = {"documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": True}
    assert ranked(client, top_n=None, return_documents=None)["results"] == whole
    for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"):
        found = ranked(client, path, **asked)["results"]
        assert found == [one | {"document": {"text": DOCUMENTS[one["index"]]}} for one in whole[:2]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", 5]}, "documents.1"),
        ({"query": "a", "documents": ["b", {"txt": "c"}]}, "documents.1.text"),
        ({"query": "a", "documents": ["b", "word " * 9000]}, "documents.1"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
def test_bad_bodies_are_refused_with_the_path(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = client.post("/v1/rerank", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_reranker_makes_no_embeddings_and_other_models_do_not_rank(
    client: httpx.Client, chat_model: Path, tmp_path: Path
) -> None:
    refused = [client.post("/v1/embeddings", json={"input": "a"})]
    with real_app(chat_model, tmp_path / "kv") as server, server.client() as other:
        refused.append(other.post("/v1/rerank", json={"query": "a", "documents": ["b"]}))
        assert other.post("/v1/embeddings", json={"input": "a"}).status_code == 200
    errors = [reply.json()["error"] for reply in refused]
    assert [error["param"] for error in errors] == ["model", "model"]
    assert "/v1/rerank" in errors[0]["message"]
    assert "--pooling rank" in errors[1]["message"]

"""The official `openai` client against the real daemon, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.daemon_process import DaemonProcess

MODEL = "tiny-chat"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name three rivers and tell me where each of them begins."},
]
NO_END = {"2": -100}
"""Keeps the end-of-reply token away, so that a random model speaks as long as it may."""
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0, logit_bias=NO_END
    )
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens is not None
    assert reply.model_extra is not None
    assert reply.model_extra["prefix_cache"]["scope"] == "full"


def test_a_stream_says_what_the_whole_reply_says(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**fields, logit_bias=NO_END)
    texts = ["", ""]
    chunks = list(
        client.chat.completions.create(**fields, logit_bias=NO_END, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["prefix_cache"]["restored"] == chunks[-1].usage.prompt_tokens
    assert chunks[-1].model_extra["timings"]["ttft_ms"] > 0


def test_logprobs(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, logit_bias=NO_END
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    assert all(len(token.top_logprobs) == 2 for token in content)


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_several_prompts_are_those_of_each_alone(client: OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": MODEL, "n": 2, "seed": 3, "max_tokens": 4, "logit_bias": NO_END}
    prompts: Any = ["Name three rivers", [5, 6, 7], "And three lakes"]
    alone = [client.completions.create(prompt=prompt, **fields) for prompt in prompts]
    wanted = [choice.text for reply in alone for choice in reply.choices]
    texts = [""] * len(wanted)
    if stream:
        options: Any = {"include_usage": True}
        chunks = list(client.completions.create(prompt=prompts, stream=True, stream_options=options, **fields))
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.text
        usage = chunks[-1].usage
    else:
        reply = client.completions.create(prompt=prompts, **fields)
        assert [choice.index for choice in reply.choices] == list(range(6))
        texts, usage = [choice.text for choice in reply.choices], reply.usage
    assert texts == wanted
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage is not None)


def test_a_completion_has_16_tokens_unless_the_client_says_another_number_or_none(client: OpenAI) -> None:
    def reply(**fields: Any) -> Any:
        return client.completions.create(model=MODEL, prompt=["a", "b"], logit_bias=NO_END, **fields)

    assert reply().usage.completion_tokens == 32
    none = reply(max_tokens=0, n=2)
    assert none.usage.completion_tokens == 0
    assert [(choice.text, choice.finish_reason) for choice in none.choices] == [("", "length")] * 4
    chunks = list(reply(max_tokens=0, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == ["length", "length"]


@pytest.mark.parametrize("num_alternatives", [0, 2])
def test_the_log_probabilities_of_a_completion_have_the_token_itself(client: OpenAI, num_alternatives: int) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="a", max_tokens=8, logprobs=num_alternatives, seed=1, logit_bias=NO_END
    )
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob
        assert num_alternatives <= len(top) <= num_alternatives + 1


@pytest.mark.parametrize("prompt", ["Name three rivers", ["Name three rivers"], [5, 6, 7]])
def test_completions(client: OpenAI, prompt: Any) -> None:
    reply = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0, logit_bias=NO_END)
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, logit_bias=NO_END, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply.choices[0].text
    assert reply.object == "text_completion"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 6


def test_progress_is_told_while_the_prompt_is_computed(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name three rivers. " * 150}]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_progress": True},
    )
    chunks = list(stream)
    extras = [chunk.model_extra or {} for chunk in chunks]
    told = [extra["prompt_progress"] for extra in extras if "prompt_progress" in extra]
    assert chunks[-1].usage is not None
    assert {progress["total"] for progress in told} == {chunks[-1].usage.prompt_tokens}
    assert [progress["processed"] for progress in told] == sorted({progress["processed"] for progress in told})
    assert (told[0]["processed"], told[-1]["processed"]) == (told[0]["cache"], told[-1]["total"])


def test_what_the_client_knows_of_prompt_caching_is_understood(client: OpenAI) -> None:
    messages: list[Any] = [message | {"cache_control": {"type": "ephemeral"}} for message in MESSAGES]
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "prompt_cache_key": "rivers"}
    reply = client.chat.completions.create(messages=messages, prompt_cache_retention="24h", **fields)
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert reply.usage is not None
    assert plain.usage is not None
    assert reply.usage.prompt_tokens == plain.usage.prompt_tokens
    retention: Any = "48h"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=messages, prompt_cache_retention=retention, **fields)
    assert caught.value.param == "prompt_cache_retention"


def test_a_bad_request_is_a_bad_request_error_with_its_param(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body={"prefix_cache": {"scope": "sometimes"}}
        )
    assert caught.value.param == "prefix_cache.scope"
    assert caught.value.code == "invalid_scope"
    assert caught.value.type == "invalid_request_error"


def test_a_bad_request_for_a_stream_is_raised_at_once(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES * 500, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_the_async_client_streams_several_conversations_at_once(daemon: DaemonProcess) -> None:
    async def ask(client: AsyncOpenAI, question: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=6, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> tuple[list[str], list[str]]:
        questions = [f"Question number {i}" for i in range(4)]
        async with AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, question) for question in questions))
            one_by_one = [await ask(client, question) for question in questions]
        return list(together), one_by_one

    together, one_by_one = asyncio.run(ask_all())
    assert together == one_by_one

"""Reads streams with a client of Python and prints each message as a line of JSON, `{"error": TEXT}` if it fails.

    python read_stream.py CLIENT PATH URL COUNT

It runs where the client is installed, which need not be where diskprefix is. A message is all that the client made of
the stream; only names that it invents itself are left out.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

Ask = Callable[[], Any]
"""Sends one request. Returns what the client made of the stream; anything that JSON holds."""
READERS: dict[tuple[str, str], Callable[[str, ExitStack], Ask]] = {}
"""Make an `Ask` of a server's URL, by the client's name and the route. What is to be closed goes to the stack."""
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, INFILL = "/v1/messages", "/api/chat", "/api/generate", "/infill"
MODEL, TEXT, KEY = "model", "Name three rivers.", "none"
QUESTION: Any = [{"role": "user", "content": TEXT}]


def reads(client: str, *paths: str) -> Callable[[Callable[..., Ask]], Callable[..., Ask]]:
    """Returns a decorator that adds a reader. One of several routes is called with the path as a third argument."""

    def add(make: Callable[..., Ask]) -> Callable[..., Ask]:
        for path in paths:
            READERS[client, path] = make if len(paths) == 1 else functools.partial(make, path=path)
        return make

    return add


def joined(chunks: Iterable[Any], *texts: Callable[[Any], str | None]) -> dict[str, Any]:
    """Returns all chunks of pydantic, and the text of each kind in them."""
    read = list(chunks)
    return {
        "texts": ["".join(text(chunk) or "" for chunk in read) for text in texts],
        "chunks": [chunk.model_dump(mode="json") for chunk in read],
    }


def _openai(url: str, opened: ExitStack) -> Any:
    from openai import OpenAI

    return opened.enter_context(OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0))


@reads("openai", CHAT)
def openai_chat(url: str, opened: ExitStack) -> Ask:
    client = _openai(url, opened)

    def ask() -> Any:
        with client.chat.completions.stream(model=MODEL, messages=QUESTION) as stream:
            events = [event.type for event in stream]
            return {"events": events, "message": stream.get_final_completion().model_dump(mode="json")}

    return ask


@reads("openai", COMPLETIONS)
def openai_completions(url: str, opened: ExitStack) -> Ask:
    create = _openai(url, opened).completions.create
    return lambda: joined(
        create(model=MODEL, prompt=TEXT, stream=True),
        lambda chunk: "".join(choice.text for choice in chunk.choices),
    )


@reads("openai", RESPONSES)
def openai_responses(url: str, opened: ExitStack) -> Ask:
    client = _openai(url, opened)

    def ask() -> Any:
        with client.responses.stream(model=MODEL, input=TEXT) as stream:
            events = [event.type for event in stream]
            return {"events": events, "message": stream.get_final_response().model_dump(mode="json")}

    return ask


@reads("anthropic", MESSAGES)
def anthropic_messages(url: str, opened: ExitStack) -> Ask:
    from anthropic import Anthropic

    client = opened.enter_context(Anthropic(base_url=url, api_key=KEY, max_retries=0))

    def ask() -> Any:
        with client.messages.stream(model=MODEL, max_tokens=1000, messages=QUESTION) as stream:
            events = [event.type for event in stream]
            return {"events": events, "message": stream.get_final_message().model_dump(mode="json")}

    return ask


@reads("ollama", OLLAMA_CHAT)
def ollama_chat(url: str, opened: ExitStack) -> Ask:
    from ollama import Client

    client = opened.enter_context(Client(url))
    return lambda: joined(
        client.chat(MODEL, QUESTION, stream=True),
        lambda chunk: chunk.message.content,
        lambda chunk: chunk.message.thinking,
    )


@reads("ollama", OLLAMA_GENERATE)
def ollama_generate(url: str, opened: ExitStack) -> Ask:
    from ollama import Client

    client = opened.enter_context(Client(url))
    return lambda: joined(
        client.generate(MODEL, TEXT, stream=True), lambda chunk: chunk.response, lambda chunk: chunk.thinking
    )


@reads("langchain", CHAT, RESPONSES, MESSAGES)
def langchain(url: str, _opened: ExitStack, path: str) -> Ask:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    model: Any
    if path == MESSAGES:
        model = ChatAnthropic(base_url=url, api_key=KEY, model_name=MODEL, max_retries=0)
    else:
        responses = path == RESPONSES
        model = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_retries=0, use_responses_api=responses)

    def ask() -> Any:
        chunks = list(model.stream(TEXT))
        message = functools.reduce(operator.add, chunks).model_dump(mode="json")
        return {"chunks": len(chunks), "message": {key: value for key, value in message.items() if key != "id"}}

    return ask


@reads("litellm", CHAT, MESSAGES, OLLAMA_CHAT)
def litellm(url: str, _opened: ExitStack, path: str) -> Ask:
    # Otherwise it waits for a list of prices, which it would fetch.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    provider, base = {CHAT: ("openai", f"{url}/v1"), MESSAGES: ("anthropic", url), OLLAMA_CHAT: ("ollama_chat", url)}[
        path
    ]

    def ask() -> Any:
        chunks = list(
            litellm.completion(
                model=f"{provider}/{MODEL}", messages=QUESTION, api_base=base, api_key=KEY, stream=True, num_retries=0
            )
        )
        deltas = [choice.delta.model_dump(mode="json") for chunk in chunks for choice in chunk.choices]
        texts = ["".join(delta.get(kind) or "" for delta in deltas) for kind in ("content", "reasoning_content")]
        return {"texts": texts, "deltas": [_without_ids(delta) for delta in deltas]}

    return ask


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(item) for key, item in value.items() if key != "id"}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


@reads("pydantic-ai", CHAT, RESPONSES)
def pydantic_ai(url: str, _opened: ExitStack, path: str) -> Ask:
    from openai import AsyncOpenAI
    from pydantic_ai.direct import model_request_stream
    from pydantic_ai.messages import ModelRequest
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_core import to_jsonable_python

    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0))
    model = {CHAT: OpenAIChatModel, RESPONSES: OpenAIResponsesModel}[path](MODEL, provider=provider)
    loop = asyncio.new_event_loop()

    async def read() -> Any:
        async with model_request_stream(model, [ModelRequest.user_text_prompt(TEXT)]) as stream:
            events = [event.event_kind async for event in stream]
            response = stream.get()
        return {
            "events": events,
            "message": to_jsonable_python([response.parts, response.usage, response.finish_reason]),
        }

    return lambda: loop.run_until_complete(read())


@reads("httpx-sse", CHAT, COMPLETIONS, RESPONSES, MESSAGES, INFILL)
def httpx_sse(url: str, opened: ExitStack, path: str) -> Ask:
    import httpx
    from httpx_sse import connect_sse

    client = opened.enter_context(httpx.Client(base_url=url))

    def ask() -> Any:
        with connect_sse(client, "POST", path, json={}) as source:
            return [(event.event, event.data) for event in source.iter_sse()]

    return ask


@reads("diskprefix", CHAT)
def own(url: str, _opened: ExitStack) -> Ask:
    """The client of the command line, such as `diskprefix chat`."""
    from diskprefix.desk.shared.daemon_call import streaming_daemon

    stream = streaming_daemon(url, KEY)

    def ask() -> Any:
        with stream(CHAT, {}) as events:
            chunks = list(events)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        return {"text": "".join(delta.get("content") or "" for delta in deltas), "chunks": chunks}

    return ask


def said(ask: Ask) -> str:
    try:
        message = ask()
    except Exception as error:  # noqa: BLE001 - any error of a client is a result
        message = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(message, ensure_ascii=False, sort_keys=True)


def main(client: str, path: str, url: str, count: str) -> None:
    # Some clients print advice to standard output.
    lines, sys.stdout = sys.stdout, sys.stderr
    with ExitStack() as opened:
        ask = READERS[client, path](url, opened)
        for _ in range(int(count)):
            print(said(ask), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

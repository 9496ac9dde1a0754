"""Multimodal models behind the real application: text and images are cached, the rest is refused."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.chat import content as server_content
from diskprefix.daemon.chat.messages import Message
from diskprefix.daemon.engine import inbox
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.runtime.files.chat_template import render_template
from diskprefix.runtime.pictures import picture_reader
from diskprefix.runtime.pictures.picture_reader import PictureReader
from tests.daemon.chat.test_data_uri import FORMS
from tests.daemon.server.daemon_process import reply_to
from tests.daemon.server.picture_models import (
    VISION_MODELS,
    image_bytes,
    image_part,
    text_part,
    write_llava,
    write_qwen2_5_vl,
)
from tests.daemon.server.scripted import AppServer, real_app, scripted_app

CHAT = "/v1/chat/completions"
QUESTION = "Name three rivers and tell me where each of them begins and where it ends. "
SPECIAL = (0, 1, 2)
REPLY = 6
Serve = Callable[[str], AppServer]


@pytest.fixture(scope="module")
def serve(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with ExitStack() as running:

        @cache
        def started(name: str) -> AppServer:
            if name == "text":
                return running.enter_context(scripted_app(chat_model))
            model = VISION_MODELS[name](tmp_path_factory.mktemp("models") / "model")
            folder = tmp_path_factory.mktemp("kv")
            return running.enter_context(real_app(model, folder, max_queue=4, max_sequences=5))

        yield started


@pytest.fixture(params=VISION_MODELS)
def vision(request: pytest.FixtureRequest, serve: Serve) -> AppServer:
    return serve(request.param)


@pytest.fixture
def llava(serve: Serve) -> AppServer:
    return serve("llava")


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": REPLY,
        "temperature": 0,
        "logprobs": True,
        # Without the tokens that would end a reply.
        "logit_bias": {str(token): -100 for token in SPECIAL},
        "prefix_cache": {"scope": "full"},
    } | fields


def ask(server: AppServer, sent: dict[str, Any]) -> dict[str, Any]:
    with server.client() as client:
        return reply_to(client, sent)


def refusal(server: AppServer, *parts: Any) -> dict[str, Any]:
    with server.client() as client:
        answer = client.post(CHAT, json=body(*parts))
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "\n" not in error["message"]
    return error


def logprobs_of(reply: dict[str, Any]) -> list[tuple[str, float]]:
    return [(item["token"], item["logprob"]) for item in reply["choices"][0]["logprobs"]["content"]]


def tokens_of(reply: dict[str, Any]) -> list[str]:
    return [token for token, _ in logprobs_of(reply)]


def generated(server: AppServer, conversation: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Returns the tokens of the model's own processor and `generate`, and the length of the prompt."""
    engine = server.engine
    processor = engine.processor._processor
    text = render_template(engine.tokenizer.get_chat_template(), conversation, add_generation_prompt=True)
    images = [part["image"] for message in conversation for part in message["content"] if "image" in part]
    inputs = processor(text=text, images=[images] if images else None, return_tensors="pt")
    bad = [[token] for token in SPECIAL]
    with torch.inference_mode():
        model = AutoModelForImageTextToText.from_pretrained(engine.origin, dtype=engine.dtype)
        ids = model.generate(**inputs, max_new_tokens=REPLY, do_sample=False, bad_words_ids=bad)[0]
    num_tokens = inputs["input_ids"].shape[1]
    return [engine.tokenizer.decode([token]) for token in ids[num_tokens:].tolist()], num_tokens


def stored_by(server: AppServer) -> tuple[int, int, int]:
    cache = server.engine.cache
    cache.finish_aside()
    assert cache.writer.flush(30)
    stats = cache.stats()
    return stats["entries"], stats["blocks"], stats["prompts"]


def chat_with(uri: str) -> tuple[str, Any]:
    return CHAT, {"messages": [{"role": "user", "content": [text_part("Look: "), url_part(uri)]}], "max_tokens": 1}


def chat_with_text(uri: str) -> tuple[str, Any]:
    part = {"type": "image_url", "image_url": uri}
    return CHAT, {"messages": [{"role": "user", "content": [text_part("Look: "), part]}], "max_tokens": 1}


def responses_with(uri: Any) -> tuple[str, Any]:
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": uri}]
    return "/v1/responses", {"input": [{"role": "user", "content": parts}], "store": False, "max_output_tokens": 16}


def responses_with_object(uri: str) -> tuple[str, Any]:
    return responses_with({"url": uri})


def messages_with(uri: str) -> tuple[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": uri.partition("base64,")[2]}
    content = [text_part("Look: "), {"type": "image", "source": source}]
    return "/v1/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def messages_with_uri(uri: str) -> tuple[str, Any]:
    path, sent = messages_with(uri)
    sent["messages"][0]["content"][1]["source"]["data"] = uri
    return path, sent


def ollama_with(uri: str) -> tuple[str, Any]:
    said = {"role": "user", "content": "Look: ", "images": [uri.partition("base64,")[2]]}
    return "/api/chat", {"messages": [said], "stream": False, "options": {"num_predict": 1}}


def ollama_with_uri(uri: str) -> tuple[str, Any]:
    return "/api/generate", {"prompt": "Look: ", "images": [uri], "stream": False, "options": {"num_predict": 1}}


DOORS = (
    *(chat_with, chat_with_text, responses_with, responses_with_object, messages_with, messages_with_uri),
    *(ollama_with, ollama_with_uri),
)


@pytest.mark.cases(2)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_form_of_base64_is_the_same_picture_at_every_door(
    llava: AppServer, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    assert llava.daemon.serving is not None
    inbox_of_app = llava.daemon.serving.inbox
    submit = inbox_of_app.submit

    def submitted(request: Any, *rest: Any) -> Any:
        prompts.append(request.prompt.token_ids.tolist())
        return submit(request, *rest)

    monkeypatch.setattr(inbox_of_app, "submit", submitted)
    with llava.client() as client:
        for form in FORMS.values():
            for before in ("", " "):
                data = base64.b64encode(image_bytes()).decode()
                path, sent = door(f"{before}data:image/png;base64,{form(data)}")
                answer = client.post(path, json=sent)
                assert answer.status_code == 200, answer.text
    assert len(prompts) == 2 * len(FORMS)
    assert min(prompts[0]) < 0
    assert all(prompt == prompts[0] for prompt in prompts)
    with llava.client() as client:
        path, sent = door("data:image/png;base64,a*b=")
        refused = client.post(path, json=sent)
    assert refused.status_code == 400
    assert "letters that base64 has not (*)" in refused.text


@pytest.mark.cases(2)
def test_a_vision_model_caches_text_requests(vision: AppServer) -> None:
    text = QUESTION * 4
    for said in (text, text + "And where is each of them deepest? "):
        sent = body(said)
        first, again, cold = (
            ask(vision, sent),
            ask(vision, sent),
            ask(vision, sent | {"prefix_cache": {"scope": "off"}}),
        )
        expected, num_tokens = generated(vision, [{"role": "user", "content": [text_part(said)]}])
        assert first["usage"]["prompt_tokens"] == num_tokens
        assert tokens_of(first) == expected
        assert again["prefix_cache"]["restored"] == num_tokens
        assert logprobs_of(again) == logprobs_of(first) == logprobs_of(cold)
        assert (first["prefix_cache"]["restored"] >= 16) == (said != text)


COLORS = ((220, 20, 20), (20, 20, 220))
OFF: dict[str, Any] = {"prefix_cache": {"scope": "off"}}
Given: TypeAlias = list[dict[str, Any]]


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def turn(messages: Given, **fields: Any) -> dict[str, Any]:
    return body("", **fields) | {"messages": messages}


ANSWERED = {"role": "assistant", "content": "It shows the mouth of a river."}


def goes_on(messages: Given, *parts: Any) -> Given:
    return [*messages, ANSWERED, said(*parts)]


def pictures_of(reply: dict[str, Any]) -> tuple[int, int]:
    """The pictures whose rows were encoded for a reply, and those whose rows came from the store."""
    return reply["timings"].get("images_encoded", 0), reply["timings"].get("images_restored", 0)


@pytest.mark.cases(2)
def test_a_prompt_with_images_has_the_tokens_and_the_reply_of_generate(vision: AppServer) -> None:
    red, blue = image_bytes(COLORS[0]), image_bytes(COLORS[1], (30, 50), "JPEG")
    sent = body(image_part(red), text_part(QUESTION), image_part(blue, "jpeg"), text_part("Compare."), n=2)
    reply = ask(vision, sent)
    first, second = (Image.open(io.BytesIO(content)).convert("RGB") for content in (red, blue))
    content = [{"type": "image", "image": first}, text_part(QUESTION), {"type": "image", "image": second}]
    expected, num_tokens = generated(vision, [{"role": "user", "content": [*content, text_part("Compare.")]}])
    assert tokens_of(reply) == expected
    assert [choice["message"] for choice in reply["choices"]] == [reply["choices"][0]["message"]] * 2
    assert reply["usage"]["prompt_tokens"] == num_tokens


@pytest.mark.cases(2)
def test_images_are_restored_bit_for_bit_and_encoded_once(vision: AppServer) -> None:
    """The first turn, the same again, the next one with another image, and all of it without the cache."""
    messages = [said(text_part("once "), image_part(image_bytes((1, 2, 3))), text_part(QUESTION))]
    first, again = ask(vision, turn(messages)), ask(vision, turn(messages))
    assert (pictures_of(first), pictures_of(again)) == ((1, 0), (0, 0))
    assert again["prefix_cache"]["restored"] == again["usage"]["prompt_tokens"]
    messages = goes_on(messages, image_part(image_bytes((3, 2, 1))), text_part("And this?"))
    second = ask(vision, turn(messages))
    assert pictures_of(second) == (1, 0)
    assert second["prefix_cache"]["restored"] >= first["usage"]["prompt_tokens"]
    cold = ask(vision, turn(messages, **OFF))
    assert pictures_of(cold) == (2, 0)
    assert logprobs_of(again) == logprobs_of(first)
    assert logprobs_of(cold) == logprobs_of(second)
    assert first["timings"]["image_tokens"] < second["timings"]["image_tokens"]


def test_after_a_restart_pixels_are_not_even_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prepared = write_qwen2_5_vl(tmp_path / "model"), [0]
    prepare = PictureReader._prepare

    def counted(*given: Any) -> Any:
        prepared[0] += 1
        return prepare(*given)

    monkeypatch.setattr(PictureReader, "_prepare", counted)
    messages = [said(image_part(image_bytes((9, 9, 9), (60, 60))), text_part(QUESTION))]
    with real_app(model, tmp_path / "kv") as server:
        first = ask(server, turn(messages))
        stored_by(server)
    assert prepared == [1]
    with real_app(model, tmp_path / "kv") as server:
        again = ask(server, turn(messages))
        assert again["prefix_cache"]["restored"] == again["usage"]["prompt_tokens"]
        assert logprobs_of(again) == logprobs_of(first)
        # Behind other text only the encoder's rows are of use.
        elsewhere = [
            said(text_part("Look at this. "), image_part(image_bytes((9, 9, 9), (60, 60))), text_part("Well?"))
        ]
        restored = ask(server, turn(elsewhere))
        assert pictures_of(restored) == (0, 1)
        assert prepared == [1]
        cold = ask(server, turn(elsewhere, **OFF))
        assert logprobs_of(cold) == logprobs_of(restored)
        assert prepared == [2]


@pytest.mark.cases(2)
def test_another_image_of_the_same_size_is_a_miss_from_there_on(vision: AppServer) -> None:
    images = [image_part(image_bytes(color, (44, 33))) for color in COLORS]
    first, second = (ask(vision, body(image, text_part(QUESTION))) for image in images)
    assert second["prefix_cache"]["restored"] < first["usage"]["prompt_tokens"] - len(QUESTION.split())
    assert second["prefix_cache"].get("miss_reason", "image") == "image"
    assert pictures_of(second) == (1, 0)
    assert logprobs_of(first) != logprobs_of(second), "the image matters"
    before = {"role": "system", "content": "The same words stand before images that are not the same one."}
    first, second = (ask(vision, turn([before, said(image, text_part("Well?"))])) for image in images)
    assert (pictures_of(first), pictures_of(second)) == ((0, 1), (0, 1))
    assert (
        16 <= second["prefix_cache"]["restored"] < first["usage"]["prompt_tokens"] - second["timings"]["image_tokens"]
    )


@pytest.mark.cases(2)
def test_text_after_an_image_is_what_it_was_before(vision: AppServer) -> None:
    text = QUESTION * 5 + "after"
    cold = body(text, **OFF)
    before = ask(vision, cold)
    ask(vision, body(text))
    ask(vision, body(image_part(image_bytes(size=(60, 60))), text_part(QUESTION)))
    assert logprobs_of(ask(vision, cold)) == logprobs_of(before)
    hit = ask(vision, body(text))
    assert hit["prefix_cache"]["restored"] == hit["usage"]["prompt_tokens"]
    assert logprobs_of(hit) == logprobs_of(before)


@pytest.mark.cases(1)
def test_conversations_at_once_have_the_bits_that_each_has_alone(vision: AppServer) -> None:
    """Two requests with images, which share one, and three of text, one with the placeholder as text."""
    mark = vision.engine.processor.mark
    shared = image_part(image_bytes((50, 60, 70), (48, 36)))
    asked = [
        body(shared, text_part(QUESTION + "first")),
        body(text_part("x " * 30), shared, image_part(image_bytes((70, 60, 50))), text_part("second")),
        *(body(f"{QUESTION}{word}") for word in ("third", "fourth", f"a {mark} in a text")),
    ]
    with ThreadPoolExecutor(5) as clients:
        together = list(clients.map(partial(ask, vision), asked))
    assert sum(pictures_of(reply)[0] for reply in together) == 2
    for sent, reply in zip(asked, together, strict=True):
        assert logprobs_of(ask(vision, sent | OFF)) == logprobs_of(reply)


def test_a_stop_does_not_wait_until_a_picture_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    with real_app(write_llava(tmp_path / "model"), tmp_path / "kv") as server, ThreadPoolExecutor(1) as clients:
        layer = next(server.engine.encoder.slices())

        def encode(*_: Any) -> None:
            while True:
                begun.set()
                for pause in [*layer._forward_pre_hooks.values()]:
                    pause(layer, ())

        monkeypatch.setattr(server.engine.encoder, "encode", encode)
        asked = clients.submit(ask, server, body(IMAGE))
        assert begun.wait(30)
        assert not server.daemon.inbox.stop(0.01)
        assert asked.exception(30) is not None


IMAGE = image_part(image_bytes())
VIDEO: dict[str, Any] = {"type": "video_url", "video_url": {"url": "x"}}
FILE: dict[str, Any] = {"type": "file", "file": {"file_id": "x"}}
SOUND: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
SEE = text_part("see:")
NO_IMAGE = "not an image that can be read"


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("model", "part", "words"),
    [
        ("llava", SOUND, "this model takes text and images, no audio (got audio)"),
        ("llava", FILE, "no files; send its pages or frames as images (got file)"),
        ("llava", VIDEO, "no videos"),
        ("text", IMAGE, "this model takes text only (got image)"),
        ("text", SOUND, "this model takes text only (got audio)"),
        ("text", VIDEO, "this model takes text only (got video_url)"),
        ("text", FILE, "this model takes text only (got file)"),
    ],
)
def test_unsupported_content_is_refused_by_name(serve: Serve, model: str, part: Any, words: str) -> None:
    error = refusal(serve(model), SEE, part)
    assert (error["param"], error["code"]) == ("messages.0.content.1", "unsupported_content")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        *(
            (url_part(url), "image_url.url", "URLs are not fetched; send the image itself")
            for url in (
                "https://example.org/cat.png",
                "HTTP://example.org/cat.png",
                "file:///etc/passwd",
                "/etc/passwd",
            )
        ),
        (url_part("data:image/png,abc"), "image_url.url", "must be a data: URI in base64"),
        (url_part("data:image/png;base64"), "image_url.url", "must be a data: URI in base64"),
        (url_part("data:image/png;base64,a*b="), "image_url.url", "not valid base64"),
        (url_part("data:image/png;base64,abcde"), "image_url.url", "not valid base64"),
        (url_part("data:image/png;base64,"), "image_url.url", NO_IMAGE),
        (image_part(b"swordfish" * 40), "image_url.url", NO_IMAGE),
        (image_part(image_bytes()[:60]), "image_url.url", "cannot be decoded: "),
    ],
)
def test_unreadable_images_are_a_400_that_does_not_repeat_them(
    llava: AppServer, part: Any, param: str, words: str
) -> None:
    """`test_picture_reader.py` has what may be wrong inside of images."""
    error = refusal(llava, SEE, part)
    assert error["param"] == f"messages.0.content.1.{param}"
    assert words in error["message"]
    assert base64.b64encode(b"swordfish").decode() not in str(error)


def test_the_number_of_images_and_their_pixels_together_are_limited(
    llava: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_reader, "MAX_REQUEST_PIXELS", 40 * 30 * 2)
    ask(llava, body(IMAGE, IMAGE))
    assert refusal(llava, IMAGE, IMAGE, IMAGE)["param"] == "messages.0.content.2.image_url.url"
    monkeypatch.setattr(server_content, "_MAX_IMAGES", 2)
    error = refusal(llava, IMAGE, IMAGE, IMAGE)
    assert error["param"] == "messages.0.content.2"
    assert "at most 2 images" in error["message"]


STRIP = image_part(image_bytes(size=(1, 300)))
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def truncated(kind: str, seed: int = 3) -> bytes:
    """Pixels that no format makes small, so that the cut is not in the header."""
    content, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()[: len(content.getvalue()) * 2 // 3]


@pytest.mark.parametrize(
    "bad",
    [
        url_part("https://example.org/cat.png"),
        url_part("data:image/png;base64,a*b="),
        STRIP,
        *(pytest.param(image_part(truncated(kind)), id=f"truncated {kind}") for kind in FORMATS),
        pytest.param(image_part(image_bytes().replace(b"IDAT", b"JDAT")), id="no pixels"),
    ],
)
def test_an_image_of_an_earlier_turn_that_cannot_be_read_becomes_a_note(llava: AppServer, bad: Any) -> None:
    messages = goes_on([said(SEE, bad)], IMAGE, text_part("And this?"))
    reply = ask(llava, turn(messages))
    assert (pictures_of(ask(llava, turn(messages, **OFF))), reply["prefix_cache"]["left_out"]) == (
        (1, 0),
        [{"type": "image", "count": 1, "first": "messages.0.content.1", "last": "messages.0.content.1"}],
    )
    note = text_part("[picture left out: it cannot be read, or there are too many]")
    noted = ask(llava, turn(goes_on([said(SEE, note)], IMAGE, text_part("And this?")), **OFF))
    assert logprobs_of(noted) == logprobs_of(reply)
    assert refusal(llava, SEE, bad)["param"].startswith("messages.0.content.1")


RESULTS: list[tuple[str, dict[str, Any], list[Any]]] = [
    (
        "/v1/messages",
        {"messages": "", "max_tokens": 1},
        [
            said(SEE),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
            said(
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}],
                }
            ),
        ],
    ),
    (
        "/v1/responses",
        {"input": "", "max_output_tokens": 16, "store": False},
        [
            {"role": "user", "content": "see:"},
            {"type": "computer_call", "call_id": "1", "actions": []},
            {
                "type": "computer_call_output",
                "call_id": "1",
                "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,a*b="},
            },
        ],
    ),
]
RESULTS.append((*RESULTS[1][:2], [*RESULTS[1][2][:2], deepcopy(RESULTS[1][2][2])]))
RESULTS[2][2][2]["output"]["image_url"] = "data:image/png;base64," + base64.b64encode(truncated("PNG")).decode()


def test_a_picture_of_a_history_is_decoded_for_its_first_prompt_only(
    llava: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, decode = list[bytes](), picture_reader._decode

    def counted(content: bytes, *others: Any) -> Any:
        decoded.append(content)
        return decode(content, *others)

    monkeypatch.setattr(picture_reader, "_decode", counted)
    bad, good, other = truncated("PNG", 5), image_bytes((9, 8, 7)), image_bytes((7, 8, 9))
    history = [said(SEE, image_part(bad), image_part(good))]
    for count in (1, 0, 0):
        messages = goes_on(history, image_part(other), text_part(f"{count}?"))
        named = ask(llava, turn(messages, max_tokens=1))["prefix_cache"]["left_out"]
        assert [each["count"] for each in named] == [1]
        assert decoded.count(bad) == count
        # The engine decodes it, too.
        assert decoded.count(good) <= 2 * count
        decoded.clear()


@pytest.mark.parametrize(("path", "body", "history"), RESULTS)
def test_an_image_in_a_result_that_cannot_be_read_is_not_refused(
    llava: AppServer, path: str, body: dict[str, Any], history: list[Any]
) -> None:
    field = next(iter(body))
    with llava.client() as client:
        for messages in (history, [*history, {"role": "user", "content": "Go on."}]):
            answer = client.post(path, json=body | {field: messages})
            assert answer.status_code == 200, answer.text
            [named] = answer.json()["prefix_cache"]["left_out"]
            assert (named["type"], named["count"]) == ("image", 1)


def test_the_oldest_images_are_left_out_if_there_are_too_many(
    llava: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of a quarter of the limit, so that few turns change the prompt at its beginning."""
    turns = [[said(image_part(image_bytes((number, 1, 1))), text_part(f"{number}?"))] for number in range(11)]
    monkeypatch.setattr(server_content, "_MAX_IMAGES", 8)

    def left_out(num_images: int) -> int:
        between = [message for asked in turns[:num_images] for message in (*asked, ANSWERED)][:-1]
        named = ask(llava, turn(between, max_tokens=1))["prefix_cache"].get("left_out", [])
        assert all(each["first"] == "messages.0.content.0" for each in named)
        return sum(each["count"] for each in named)

    assert [left_out(num_images) for num_images in (8, 9, 10, 11)] == [0, 2, 2, 4]
    monkeypatch.setattr(picture_reader, "MAX_REQUEST_PIXELS", 40 * 30 * 2)
    assert left_out(3) == 1


def test_a_prompt_whose_images_exceed_the_positions_is_refused(llava: AppServer) -> None:
    error = refusal(llava, IMAGE, text_part(QUESTION * 200))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_an_error_of_the_models_image_code_is_a_400(llava: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("shapes cannot be\nmultiplied")

    with monkeypatch.context() as patch:
        patch.setattr(llava.engine.encoder._model.model, "get_image_features", fail)
        error = refusal(llava, SEE, image_part(image_bytes((1, 9, 9))))
    assert (error["param"], error["code"]) == ("messages.0.content.1.image_url.url", "unsupported_content")
    assert error["message"].endswith("the model's own code fails over it: shapes cannot be")
    ask(llava, body(IMAGE))


def test_images_beyond_what_may_wait_are_a_503_that_says_when_to_come_back(
    llava: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_QUEUED_PICTURE_BYTES", 10)
    with llava.client() as client:
        answer = client.post(CHAT, json=body(IMAGE))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
    assert int(answer.headers["Retry-After"]) >= 1
    ask(llava, body("text goes on"))


def test_text_does_not_wait_for_images_that_are_decoded(llava: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests with images than the machine has threads to spare, and each of them stands still."""
    arrived, go_on, at_once, most = threading.Event(), threading.Event(), [0], [0]
    prepare = PictureReader._prepare

    def slow(*args: Any) -> Any:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        arrived.set()
        assert go_on.wait(30)
        at_once[0] -= 1
        return prepare(*args)

    monkeypatch.setattr(PictureReader, "_prepare", slow)
    monkeypatch.setattr(asyncio.BaseEventLoop, "run_in_executor", one_thread(asyncio.BaseEventLoop.run_in_executor))
    with ThreadPoolExecutor(3) as clients:
        images = [image_part(image_bytes((number, 99, 99))) for number in range(3)]
        waiting = [clients.submit(ask, llava, body(image)) for image in images]
        try:
            assert arrived.wait(30)
            assert ask(llava, body("hello"))["usage"]["prompt_tokens"] > 0
        finally:
            go_on.set()
        assert [pictures_of(reply.result()) for reply in waiting] == [(1, 0)] * 3
    assert most == [1]


def one_thread(run: Any) -> Any:
    only = ThreadPoolExecutor(1)

    def run_in_executor(self: Any, executor: Any, work: Any, *args: Any) -> Any:
        return run(self, executor or only, work, *args)

    return run_in_executor


def test_the_body_of_a_request_is_gone_while_its_reply_is_made(
    llava: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    sample = Sampler.sample
    # Of other tests in this process.
    others = [each for each in gc.get_objects() if type(each) in (ChatRequest, Message)]
    known = set(map(id, others))

    looked, said = list[bool](), list[str]()

    def look(self: Sampler, *given: Any) -> int:
        if not looked:
            looked.append(True)
            # The event loop has passed the request on when it answers another one.
            with llava.client() as client:
                client.get("/health")
            gc.collect()
            alive = [each for each in gc.get_objects() if type(each) in (ChatRequest, Message)]
            held[:] = [each for each in alive if id(each) not in known]
            del alive
            said.append(holders(held[0]) if held else "")
        return sample(self, *given)

    monkeypatch.setattr(Sampler, "sample", look)
    ask(llava, body(IMAGE, text_part("see")))
    assert looked
    assert held == [], said


def holders(kept: Any, depth: int = 4) -> str:
    """Returns what refers to an object, and what refers to that: types, and the places of frames."""
    lines, level = list[str](), [kept]
    for _ in range(depth):
        level = [
            holder
            for holder in gc.get_referrers(*level)
            if holder is not level and getattr(holder, "f_code", None) is not holders.__code__
        ][:20]
        lines.append(
            ", ".join(str(holder)[:160] if hasattr(holder, "f_code") else str(type(holder)) for holder in level)
        )
    return "; held by ".join(lines)


def test_without_a_processor_a_model_is_served_for_text(tmp_path: Path) -> None:
    folder = write_llava(tmp_path / "llava")
    (folder / "processor_config.json").unlink()
    with real_app(folder, tmp_path / "kv") as server:
        assert ask(server, body("hello"))["usage"]["prompt_tokens"] > 0
        error = refusal(server, IMAGE)
        assert error["code"] == "unsupported_content"
        assert "this model is served for text only (its processor cannot be used" in error["message"]

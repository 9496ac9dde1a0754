"""Request bodies in a file ask for what they would ask of the daemon."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix.api.openai_chat import ChatRequest
from diskprefix.chat.renderer import PromptRenderer
from diskprefix.errors import InvalidRequest
from diskprefix.extras.request_bodies import DEFAULT, parse_body
from diskprefix.nouns import SHARED, Scope
from diskprefix.tenant_ids import group_of
from tests.server.chat_model import POSITIONS, VOCAB_SIZE, write_tokenizer

CHAT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rivers?"}]
}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return PromptRenderer(tokenizer, vocab_size=VOCAB_SIZE, max_positions=POSITIONS)


def test_a_chat_is_the_prompt_that_the_server_renders(renderer: PromptRenderer) -> None:
    conversation = ChatRequest.model_validate(CHAT).conversation
    prompt, rendered = parse_body(CHAT).prompt(renderer), renderer.replay(conversation, None).prompt
    assert prompt.token_ids.tolist() == rendered.token_ids.tolist()
    assert prompt.boundaries == rendered.boundaries
    assert prompt.system_end == rendered.system_end > 0


def test_what_is_not_asked_for_is_left_to_the_daemon() -> None:
    options = parse_body(CHAT | {"prefix_cache": {}}).options
    asked = (options.scope, options.group, options.save, options.ttl_s, options.tenant)
    assert asked == (DEFAULT, b"", True, None, SHARED)


def test_what_is_asked_of_the_cache_is_read() -> None:
    asked = {"scope": "full", "save": False, "ttl": "2m", "salt": "mine"}
    options = parse_body(CHAT | {"prefix_cache": asked, "prompt_cache_key": "a"}).options
    assert (options.scope, options.save, options.ttl_s) == (Scope("full"), False, 120.0)
    assert (options.group, options.tenant) == (group_of("a"), SHARED.with_salt("mine"))
    assert parse_body(CHAT | {"prompt_cache_retention": "24h"}).options.ttl_s == 86400.0
    assert parse_body(CHAT | {"prefix_cache": {"window": 7}}).options.scope == Scope("auto", 7)


def test_a_raw_prompt_may_be_text_or_token_ids(renderer: PromptRenderer) -> None:
    assert parse_body({"prompt": [5, 6, 7]}).prompt(renderer).token_ids.tolist() == [5, 6, 7]
    assert len(parse_body({"prompt": "Name three rivers."}).prompt(renderer).token_ids) > 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT | {"prefix_cache": {"scope": "most"}}, "prefix_cache.scope"),
        (CHAT | {"prefix_cache": {"wide": 1}}, "prefix_cache.wide"),
        ({"prompt": [VOCAB_SIZE]}, "prompt.0"),
        ({"model": "m"}, "prompt"),
    ],
)
def test_what_the_daemon_refuses_is_refused(renderer: PromptRenderer, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_body(body).prompt(renderer)
    assert raised.value.param == param

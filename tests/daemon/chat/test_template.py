"""Rendering a conversation into a prompt with its safe boundaries."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.compression.compression import fit
from diskprefix.daemon.json_values import MAX_PARTS
from diskprefix.daemon.server.body import parse_json
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.prefixstore.cache.policy.seen import Earlier, SeenPrompt, Sighting
from diskprefix.prefixstore.cache.policy.select import Rules, select
from diskprefix.runtime.files.chat_template import render_template
from diskprefix.scope import parse_scope
from diskprefix.tokens import common_prefix_length
from diskprefix.values import Prompt
from tests.daemon.chat.rendering import rendered, renderer_of, tokenizer_with
from tests.daemon.server.chat_model import CHAT_TEMPLATE, VOCAB_SIZE

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Oslo"}}}


@pytest.fixture
def renderer(tokenizer: Any) -> PromptRenderer:
    return renderer_of(tokenizer)


def conversation_of(*messages: tuple[str, Any], **fields: Any) -> Conversation:
    listed = [{"role": role, "content": content} for role, content in messages]
    return parse_json(json.dumps({"messages": listed} | fields).encode(), ChatRequest).conversation


def calling(arguments: Any, num_calls: int = 1, name: str = "get_weather") -> Conversation:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [{"role": "user", "content": "weather?"}, {"role": "assistant", "tool_calls": [call] * num_calls}]
    return ChatRequest.model_validate({"messages": messages}).conversation


def text_of(tokenizer: Any, prompt: Prompt, end: int | None = None) -> str:
    return str(tokenizer.decode(prompt.token_ids[:end].tolist()))


def test_developer_becomes_system_unless_the_template_knows_it(
    renderer: PromptRenderer, tokenizer: Any, tmp_path: Path
) -> None:
    body = conversation_of(("developer", "Be brief."), ("user", "hello"))
    assert "<|im_start|>system\nBe brief." in text_of(tokenizer, rendered(renderer, body))
    knowing = tokenizer_with(tmp_path, CHAT_TEMPLATE + "{# developer #}")
    assert "<|im_start|>developer\nBe brief." in text_of(knowing, rendered(renderer_of(knowing), body))


@pytest.mark.parametrize("does", ["{{ raise_exception('Invalid message role') }}", "{% continue %}"])
def test_developer_becomes_system_if_refused_or_dropped(does: str, tmp_path: Path) -> None:
    loop = "{%- for message in messages %}"
    assert CHAT_TEMPLATE.count(loop) == 1
    refusing = CHAT_TEMPLATE.replace(loop, f"{loop}{{% if message.role == 'developer' %}}{does}{{% endif %}}")
    tokenizer = tokenizer_with(tmp_path, refusing)
    prompt = rendered(renderer_of(tokenizer), conversation_of(("developer", "Be brief."), ("user", "hello")))
    assert "<|im_start|>system\nBe brief." in text_of(tokenizer, prompt)


@pytest.mark.parametrize("roles", ["system system user", "system user system user", "developer developer user"])
def test_no_system_message_takes_the_place_of_another(roles: str, tmp_path: Path) -> None:
    last_wins = (
        "{% set rules = namespace(text='') %}{% for message in messages if message.role == 'system' %}"
        "{% set rules.text = message.content %}{% endfor %}{{ rules.text }}<|im_end|>"
        "{% for message in messages if message.role != 'system' %}{{ message.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = tokenizer_with(tmp_path, last_wins)
    said = conversation_of(*((role, f"text {k}") for k, role in enumerate(roles.split())))
    text = text_of(tokenizer, rendered(renderer_of(tokenizer), said))
    assert [k for k in range(len(roles.split())) if f"text {k}" not in text] == []


@pytest.mark.parametrize("num_calls", [1, 4])
def test_arguments_with_too_many_values_are_refused_before_they_are_parsed(
    renderer: PromptRenderer, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    body = calling("[" + ",".join(["[]"] * (MAX_PARTS // num_calls)) + "]", num_calls)
    monkeypatch.setattr("diskprefix.daemon.chat.template_input.json.loads", pytest.fail)
    with pytest.raises(InvalidRequest, match=r"^messages: the arguments of calls.* objects, lists and texts") as caught:
        rendered(renderer, body)
    assert caught.value.code == "body_too_complex"


def test_arguments_with_much_punctuation_in_their_texts_are_parsed(renderer: PromptRenderer) -> None:
    city = "[" * (MAX_PARTS + 1)
    assert f"get_weather city={city}" in renderer.text_of(calling(json.dumps({"city": city})))


def test_non_json_arguments_work_with_iterating_templates(tokenizer: Any) -> None:
    renderer = renderer_of(tokenizer)
    renderer.warm_up()
    prompt = rendered(renderer, calling('{"city": "Os'))
    assert '<call>get_weather arguments={"city": "Os</call>' in text_of(tokenizer, prompt)


KNOWING = (
    "{{ messages[0].content }}{% if enable_thinking is defined %} enable_thinking={{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %} effort={{ reasoning_effort }}{% endif %}"
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"reasoning_effort": "low"}, " effort=low"),
        ({"reasoning_effort": "none"}, " enable_thinking=False effort=none"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, " effort=high"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            " enable_thinking=True effort=none",
        ),
    ],
)
def test_how_much_to_think_is_told_to_a_template_that_knows_it(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    tokenizer = tokenizer_with(tmp_path, KNOWING)
    prompt = rendered(renderer_of(tokenizer), conversation_of(("user", "hello"), **fields))
    assert text_of(tokenizer, prompt) == f"hello{said}"


@pytest.mark.parametrize("text", ["The answer", "The answer ", "<|im_end|> is", "a\n\n"])
def test_a_reply_that_was_begun_is_the_end_of_the_prompt(renderer: PromptRenderer, tokenizer: Any, text: str) -> None:
    prompt = rendered(renderer, conversation_of(("user", "hello"), ("assistant", text)))
    assert text_of(tokenizer, prompt).endswith(f"<|im_start|>assistant\n{text}")
    begun = text_of(tokenizer, rendered(renderer, conversation_of(("user", "hello"))))
    assert text_of(tokenizer, prompt) == begun + text
    assert max(prompt.boundaries) == len(tokenizer.encode(begun.removesuffix("<|im_start|>assistant\n"))) + 1


def test_the_prompt_may_end_without_the_start_of_a_reply(renderer: PromptRenderer, tokenizer: Any) -> None:
    prompt = rendered(renderer, conversation_of(("user", "hello"), add_generation_prompt=False))
    assert text_of(tokenizer, prompt).endswith("hello<|im_end|>\n")


HELLO = conversation_of(("user", "hello"))
SET_BY_THE_DAEMON = ("tokenize", "messages", "tools", "chat_template", "add_generation_prompt")


@pytest.mark.parametrize(
    ("template", "conversation", "words", "param"),
    [
        (CHAT_TEMPLATE, calling("no json"), "template", "messages"),
        (None, HELLO, r"/v1/completions.*--chat-template", "messages"),
        ("{% if messages|length > 1 %}{{ messages[1].content }}{% endif %}", HELLO, "no tokens", "messages"),
        (
            "{{ raise_exception('refused: ' + messages[0].content) }}",
            conversation_of(("user", "\x1b[31m" + "x" * 5000)),
            r"refused: \S*31mx+",
            "messages",
        ),
        *(
            (
                CHAT_TEMPLATE,
                conversation_of(("user", "hello"), chat_template_kwargs={name: True}),
                name,
                f"chat_template_kwargs.{name}",
            )
            for name in SET_BY_THE_DAEMON
        ),
    ],
)
def test_a_failed_rendering_is_a_400_in_one_printable_line(
    tmp_path: Path, template: str | None, conversation: Conversation, words: str, param: str
) -> None:
    renderer = renderer_of(tokenizer_with(tmp_path, template))
    with pytest.raises(InvalidRequest, match=words) as caught:
        rendered(renderer, conversation)
    assert caught.value.param == param
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "text",
    [
        "{{ message.content[0].text }}",
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
    ],
    ids=["refuses-texts", "drops-texts"],
)
def test_a_text_model_whose_template_reads_only_parts_gets_parts(text: str, tmp_path: Path) -> None:
    """As MiniMax-M1's: "'str object' has no attribute 'text'"."""
    turn = f"<|im_start|>{{{{ message.role }}}}\n{text}<|im_end|>\n"
    renderer = renderer_of(tokenizer_with(tmp_path, f"{{% for message in messages %}}{turn}{{% endfor %}}"))
    renderer.warm_up()
    body = conversation_of(("system", "Be brief."), ("user", "hello"), ("assistant", "Hi."), ("user", "And you?"))
    said = "".join(f"<|im_start|>{m.role}\n{m.texts[0].text}<|im_end|>\n" for m in body.messages)
    assert renderer.text_of(body) == said


def test_a_template_that_ignores_tools_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    renderer = renderer_of(tokenizer_with(tmp_path, template))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rendered(renderer, conversation_of(("user", "hello"), tools=[TOOL]))
    assert caplog.text.count("its template leaves them out") == 1


def test_the_preview_shows_the_beginning_and_the_newest_question(renderer: PromptRenderer) -> None:
    long = "You are  a careful\nassistant. " * 50
    prompt = rendered(
        renderer, conversation_of(("system", long), ("user", "first"), ("assistant", "ok"), ("user", "Rivers? " * 99))
    )
    assert prompt.text.startswith("You are a careful assistant. You are")
    assert " … Rivers? Rivers?" in prompt.text
    assert len(prompt.text) < 240
    assert "\n" not in prompt.text


def test_token_ids_are_taken_as_they_are(renderer: PromptRenderer) -> None:
    prompt = renderer.completion([5, 2, 7])
    assert prompt.token_ids.tolist() == [5, 2, 7]
    assert prompt.boundaries == (2,)


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 2**40])
def test_a_token_id_outside_the_vocabulary_is_refused(renderer: PromptRenderer, bad: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        renderer.completion([5, bad])
    assert caught.value.param == "prompt.1"


@pytest.mark.parametrize("prompt", ["word " * 100, "word " * 100_000, [5] * 64, [5] * 100_000])
def test_a_prompt_beyond_the_positions_is_refused(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(ContextTooLong, match=r"prompt is too long: .*\d+ tokens > 64, ") as caught:
        renderer_of(tokenizer, max_positions=64).completion(prompt)
    assert caught.value.param == "prompt"


def test_a_text_of_megabytes_is_refused_without_encoding_all_of_it(tokenizer: Any) -> None:
    encoded_chars = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, **options: Any) -> Any:
            encoded_chars.append(len(text))
            return tokenizer.encode(text, **options)

    longest = max(map(len, tokenizer.get_vocab()))
    for compress in (None, partial(fit, 32)):
        renderer = renderer_of(Counting(), max_positions=64, compress=compress)
        for text in ("word " * 1_000_000, " " * longest * 64 * 32):
            with pytest.raises(ContextTooLong, match="at least"):
                rendered(renderer, conversation_of(("user", text), ("assistant", text), ("user", text)))
    assert sum(encoded_chars) < 1_000


def test_a_long_text_of_few_tokens_is_not_refused(tokenizer: Any) -> None:
    """The beginning of a text decides only where it leaves no doubt."""

    class Coarse:
        split_special_tokens = True

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, **_: Any) -> Any:
            return [5] * (len(text) // 100)

        def get_vocab(self) -> dict[str, int]:
            return {"x" * 100: 5}

        def backend_for(self, _texts: list[str]) -> Any:
            return self

        def encode_batch(self, texts: list[str], **_: Any) -> Any:
            numbers = [len(text) // 100 for text in texts]
            return [SimpleNamespace(ids=[5] * n, offsets=[(0, 1)] * n, special_tokens_mask=[0] * n) for n in numbers]

    prompt = renderer_of(Coarse(), max_positions=64).completion("x" * 6300)
    assert len(prompt.token_ids) == 63


@pytest.fixture(scope="module")
def tokenizer_with_bos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As of Llama, Gemma and Mistral: it puts <|im_start|>, its BOS, before every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(tmp_path_factory.mktemp("bos"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize("as_ids", [False, True])
def test_auto_keeps_plain_text_of_a_tokenizer_that_adds_a_bos(tokenizer_with_bos: Any, as_ids: bool) -> None:
    renderer = renderer_of(tokenizer_with_bos)
    texts = ["Name three rivers and tell me where each begins. " * 9 + end for end in ("The Rhine", "A lake")]
    prompts: Any = [tokenizer_with_bos.encode(text) for text in texts] if as_ids else texts
    first, second = (renderer.completion(prompt) for prompt in prompts)
    assert first.token_ids[0] == second.token_ids[0] == 1
    assert second.boundaries == ()
    auto = parse_scope("auto", param="scope")
    rules = Rules(block_size=16, min_tokens=16, cold_max=1024, interval=1024)
    earlier = Earlier(
        SeenPrompt((), first.token_ids.tobytes()), common_prefix_length(first.token_ids, second.token_ids)
    )
    kept = select(auto, second, rules, Sighting(recent=(earlier,), stays_s=60.0, seen_share=1.0))
    assert kept.reason == "shared_prefix"
    assert kept.aligned > 64


@pytest.mark.parametrize("text", ["<|im_start|>Name three", "Name three"])
def test_a_bos_that_begins_a_text_is_no_boundary_of_it(tokenizer: Any, tokenizer_with_bos: Any, text: str) -> None:
    for each in (tokenizer, tokenizer_with_bos):
        assert renderer_of(each).completion(text).boundaries == ()


def test_a_text_that_the_tokenizer_drops_is_a_400(tmp_path: Path) -> None:
    from tokenizers.normalizers import Strip

    tokenizer = tokenizer_with(tmp_path, None)
    tokenizer.backend_tokenizer.normalizer = Strip()
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        renderer_of(tokenizer).completion("  ")
    assert caught.value.param == "prompt"


def test_a_preview_holds_nothing_that_a_terminal_acts_on(renderer: PromptRenderer) -> None:
    nasty = "hi \x1b]0;pwned\x07\x1b[2J\x9b31m\u202e there 🦀"
    chat = rendered(renderer, conversation_of(("system", nasty), ("user", nasty)))
    text = renderer.completion(nasty * 50)
    ids = renderer.completion(text.token_ids.tolist())
    for prompt in (chat, text, ids):
        assert prompt.text.isprintable()
        assert prompt.text.startswith("hi ]0;pwned[2J31m there 🦀")


def test_the_templates_markers_are_found_out_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    applied = []

    def counting(template: str, messages: Any, **options: Any) -> str:
        applied.append(messages)
        return render_template(template, messages, **options)

    monkeypatch.setattr("diskprefix.daemon.chat.template.render_template", counting)
    renderer = renderer_of(tokenizer)
    renderer.warm_up()
    tried = len(applied)
    assert tried > 2
    for _ in range(3):
        rendered(renderer, conversation_of(("user", "hello")))
    assert len(applied) - tried == 3 * 3  # the prompt, the end of its system part, and of its question


@pytest.mark.parametrize(
    "expression",
    [
        *("'x' * 2**31", "2**31 * 'x'", "[1] * 2**31", "2 ** 10000000", "(2 ** 8000000) * (2 ** 8000000) * 2"),
        "range(10**5)|list",
    ],
)
def test_an_expression_that_takes_all_memory_is_refused(expression: str, tmp_path: Path) -> None:
    template = f"{{% if messages[0].content == 'boom' %}}{{{{ ({expression})|string|length }}}}{{% endif %}}x"
    renderer = renderer_of(tokenizer_with(tmp_path, template))
    rendered(renderer, conversation_of(("user", "quiet")))
    with pytest.raises(InvalidRequest, match="the chat template refuses the messages: "):
        rendered(renderer, conversation_of(("user", "boom")))


def test_templates_multiply_as_before(tmp_path: Path) -> None:
    template = "{{ 'ab' * 3 }}{{ 2 * 3 }}{{ 1.5 * 2 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 2 ** 0.5 }}{{ '%5d' % 7 }}"
    expected = "ababab63.010240.51.4142135623730951    7"
    tokenizer = tokenizer_with(tmp_path, template)
    assert text_of(tokenizer, rendered(renderer_of(tokenizer), conversation_of(("user", "x")))) == expected

"""Conversations for templates in which user and assistant must alternate: all are served, none that was is changed."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.chat import renderer as renderer_module
from diskprefix.daemon.chat.alternation import alternate, alternation_of
from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.messages import Conversation, TextPart
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.server.body import parse_json
from diskprefix.errors import InvalidRequest
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from tests.daemon.chat.families.alternating import ALTERNATING
from tests.daemon.chat.families.families import FAMILIES, folder
from tests.daemon.chat.families.families import renderer_of as family_renderer
from tests.daemon.chat.rendering import rendered, renderer_of
from tests.daemon.chat.turns import Model
from tests.daemon.server.chat_model import write_tokenizer

ROWS = ("UU", "SUU", "UCRU", "UCU", "UAAU", "AU", "SAU", "SSUU", "USU", "UCRSU", "UCCRR", "UCRRU", "UCRUAU", "UACRAU")
"""Roles of messages: user, assistant, a call of the assistant, a tool's result, system."""
ROLES = dict.fromkeys("Uz", "user") | dict.fromkeys("Aat", "assistant") | dict.fromkeys("R", "tool")
ROLES |= {"S": "system", "D": "developer"}
WITHOUT_WORDS = ("UaU", "aU", "UaaU", "UACRaU", "UCRa", "UCaRU", "UtU", "UCRtU", "zU", "UzAU", "UAz", "Uaz", "UCRz")
"""And with lower case letters messages without words: of the assistant, with a thought alone, and of the user."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def message(kind: str, index: int, call_id: str) -> dict[str, Any]:
    if kind == "C":
        function = {"name": "look", "arguments": "{}"}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}
    said: dict[str, Any] = {"role": ROLES[kind], "content": "" if kind.islower() else f"{kind}{index}."}
    if kind == "t":
        return said | {"content": None, "reasoning_content": "A thought."}
    return said | ({"tool_call_id": call_id} if kind == "R" else {})


def conversation(kinds: str, *, ending: bool = False, **fields: Any) -> Conversation:
    ids = itertools.accumulate((int(kind == "C") for kind in kinds), initial=0)
    said = [message(kind, k, f"abcdefg{at:02d}") for k, (kind, at) in enumerate(zip(kinds, [*ids][1:], strict=True))]
    body = {"messages": said, "add_generation_prompt": ending} | fields
    return parse_json(json.dumps(body).encode(), ChatRequest).conversation


def text_of(renderer: PromptRenderer, said: Conversation) -> str:
    """The rendered text; "" if it is refused."""
    try:
        return renderer.text_of(said)
    except InvalidRequest:
        return ""


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that makes the renderer of a template, each once."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)

    @cache
    def made(template: str) -> PromptRenderer:
        return renderer_of(read_tokenizer(folder, template))

    return made


def as_before(monkeypatch: pytest.MonkeyPatch, renderer: PromptRenderer, said: Conversation) -> str:
    """The text without any change to the order of turns."""

    def unchanged(_: Any, draft: PromptDraft) -> PromptDraft:
        return draft

    with monkeypatch.context() as patch:
        patch.setattr(renderer_module, "alternate", unchanged)
        return text_of(renderer, said)


def sequences(longest: int) -> list[str]:
    return ["".join(kinds) for length in range(1, longest + 1) for kinds in itertools.product("UACR", repeat=length)]


def longer(seed: int, count: int) -> list[str]:
    chosen = random.Random(seed)
    return ["".join(chosen.choices("UACR", k=chosen.randint(5, 9))) for _ in range(count)]


def real_templates() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((folder() / "templates").iterdir())}


REAL_ALTERNATING = {
    "Mistral-Small-3.2-24B-Instruct-2506",
    "command-r",
    "google-gemma-2-2b-it",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407",
}


@pytest.mark.slow
def test_the_real_templates_that_demand_alternation_are_found_and_no_other(with_template: Any) -> None:
    names = {
        name
        for name, template in real_templates().items()
        if with_template(template)._template.learned(alternation_of, None) is not None
    }
    assert names == REAL_ALTERNATING


@pytest.mark.slow
def test_real_templates_accept_any_order_and_keep_accepted_ones(
    with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, template in real_templates().items():
        renderer = with_template(template)
        for row in ROWS + WITHOUT_WORDS:
            said = conversation(row, ending=True)
            before, now = as_before(monkeypatch, renderer, said), text_of(renderer, said)
            assert before in ("", now), (name, row)
            assert now or name not in REAL_ALTERNATING, (name, row)


@pytest.mark.parametrize("row", ["DU", "DDU", "DUU", "SSU", "SUSU", "SUDU", "SUASU", "SUADUSU"])
def test_no_real_template_loses_what_a_system_or_developer_message_says(row: str, with_template: Any) -> None:
    for name, template in real_templates().items():
        renderer = with_template(template)
        if text_of(renderer, conversation("U", ending=True)):
            text = text_of(renderer, conversation(row, ending=True))
            assert [k for k, kind in enumerate(row) if f"{kind}{k}." not in text] == [], name


def alternating_templates() -> dict[str, str]:
    real = {name: template for name, template in real_templates().items() if name in REAL_ALTERNATING}
    return ALTERNATING | real


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", sorted({*ALTERNATING, *REAL_ALTERNATING}))
def test_any_order_of_messages_keeps_all_words_in_order(
    name: str, with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = with_template(alternating_templates()[name])
    num_as_before = 0
    for kinds in [*sequences(4), *WITHOUT_WORDS, *longer(1, 60)]:
        said = conversation(kinds)
        now, before = text_of(renderer, said), as_before(monkeypatch, renderer, said)
        assert now, kinds
        assert before in ("", now), kinds
        num_as_before += before == now
        words = [f"{kind}{k}." for k, kind in enumerate(kinds) if kind in "UARSD"]
        # Of command-r's template, results in the place of a reply were left out before, too.
        if not (name == "command-r" and "R" in kinds):
            assert [word for word in words if word not in now] == [], kinds
            assert sorted(words, key=now.index) == words, kinds
    assert 5 < num_as_before < 200


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", sorted({*ALTERNATING, *REAL_ALTERNATING}))
def test_an_added_message_keeps_the_rendered_beginning(name: str, with_template: Any) -> None:
    renderer = with_template(alternating_templates()[name])
    for kinds in [*sequences(4), *WITHOUT_WORDS, *longer(2, 60)]:
        earlier, later = text_of(renderer, conversation(kinds[:-1])) if kinds[1:] else "", ""
        later = text_of(renderer, conversation(kinds))
        if kinds[-2:-1] in ("U", "R"):
            # The newest message of the user, and a result that becomes one, may go on with what is added.
            last = f"{kinds[-2]}{len(kinds) - 2}."
            earlier = earlier[: earlier.find(last) + len(last)]
        elif kinds[-2:-1] == "z":
            earlier = text_of(renderer, conversation(kinds[:-2])) if kinds[2:] else ""
            earlier = earlier if kinds[-3:-2] != "U" else ""
        assert later.startswith(earlier), kinds


def test_neighbours_of_the_user_are_one_message_with_a_blank_line_between(with_template: Any) -> None:
    renderer = with_template(ALTERNATING["without-calls"])
    assert "<|im_start|>user\nU0.\n\nU1.<|im_end|>" in text_of(renderer, conversation("UU"))


def test_the_users_text_follows_the_result_and_its_id(with_template: Any) -> None:
    text = text_of(with_template(ALTERNATING["without-calls"]), conversation("UCRU"))
    assert "<call>lookabcdefg01</call>" in text
    assert "R2.abcdefg01<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nU3.<|im_end|>" in text
    text = text_of(with_template(ALTERNATING["all"]), conversation("UCRU"))
    assert "<|im_start|>user\nR2.\n\nU3.<|im_end|>" in text


def test_an_empty_message_gets_words_only_if_refused(with_template: Any) -> None:
    text = text_of(with_template(ALTERNATING["no-empty"]), conversation("Utz"))
    assert "<|im_start|>assistant\nOK.<|im_end|>\n<|im_start|>user\nOK.<|im_end|>" in text
    text = text_of(with_template(ALTERNATING["no-empty-reply"]), conversation("Uaz"))
    assert "<|im_start|>assistant\nOK.<|im_end|>\n<|im_start|>user\n<|im_end|>" in text
    text = text_of(with_template(ALTERNATING["no-empty-reply-but-thoughts"]), conversation("UtUaU"))
    assert [part.partition("<|im_end|>")[0] for part in text.split("assistant\n")[1:]] == ["", "OK."]


def test_a_system_message_that_a_template_refuses_is_the_users(with_template: Any) -> None:
    text = text_of(with_template(ALTERNATING["no-system"]), conversation("SSUU"))
    assert "<|im_start|>user\nS0.\n\nS1.\n\nU2.\n\nU3.<|im_end|>" in text


def marked(kinds: str, at: int, beside: bool = False) -> Conversation:
    said = [message(kind, k, "abcdefg01") for k, kind in enumerate(kinds)]
    marked_part = {"type": "text", "text": said[at]["content"], "cache_control": {"type": "ephemeral"}}
    said[at]["content"] = [marked_part, {"type": "text", "text": "more"}] if beside else [marked_part]
    return parse_json(json.dumps({"messages": said}).encode(), ChatRequest).conversation


@pytest.mark.parametrize(("kinds", "at"), [("UU", 0), ("SUU", 1), ("UCRU", 0), ("UAUUU", 3), ("UCRU", 2), ("UCUU", 2)])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", sorted(ALTERNATING))
def test_a_mark_in_a_merged_turn_stands_behind_its_own_words(
    name: str, kinds: str, at: int, beside: bool, with_template: Any
) -> None:
    renderer = with_template(ALTERNATING[name])
    prompt = rendered(renderer, marked(kinds, at, beside))
    [mark] = prompt.marks
    decoded = renderer.detokenize(prompt.token_ids[: mark.position].tolist())
    assert f"{kinds[at]}{at}" in decoded
    assert not any(f"{kind}{k}" in decoded for k, kind in enumerate(kinds) if k > at and kind != "C")
    assert "more" not in decoded


@pytest.mark.parametrize("name", sorted(ALTERNATING))
@pytest.mark.parametrize("added", ["U", "UU", "RU", "AU", "AAU"])
def test_a_recorded_reply_is_replayed_among_merged_turns(name: str, added: str, with_template: Any) -> None:
    renderer = with_template(ALTERNATING[name])
    model = Model(renderer._tokenizer, renderer)
    for first in ("UU", "UCRU", "AU", "UAAU"):
        model.asked(conversation(first, ending=True))
        model.reply("A reply.")
        said = conversation(f"{first}A{added}", ending=True)
        messages = [*said.messages]
        messages[len(first)] = replace(messages[len(first)], content=(TextPart("A reply.", ""),))
        later = model.asked(replace(said, messages=messages))
        assert later.replayed == 1, first


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in ("mistral-nemo", "gemma-2")])
def test_real_tokenizers_give_the_earlier_turns_the_same_tokens(family: Any) -> None:
    renderer = family_renderer(family)
    for kinds in ("UCRUAU", "UUAUUAU", "UCUAU", "UAAU"):
        asked = [kinds[:end] for end, kind in enumerate(kinds, start=1) if kind == "U" and kinds[end : end + 1] != "U"]
        prompts = [rendered(renderer, conversation(part, ending=True)) for part in asked]
        for earlier, later in pairwise(prompts):
            end = earlier.boundaries[-1]
            assert later.token_ids[:end].tolist() == earlier.token_ids[:end].tolist(), kinds


def test_the_form_is_found_once(with_template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = with_template(ALTERNATING["without-calls"])
    text_of(renderer, conversation("UU"))
    template = renderer._template
    monkeypatch.setattr(template, "_writer", pytest.fail)
    assert alternate(template, PromptDraft(conversation=conversation("UU"))).conversation.messages[1:] == []

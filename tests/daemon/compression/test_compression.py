"""Conversations that have become too long go on without their aged exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import CacheMark, Conversation, Message, NewTool, TextPart, ToolCall
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.compression.compression import PLACEHOLDER, fit, open_compression, shortened
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.cache.policy.seen import Sighting
from diskprefix.prefixstore.cache.policy.select import Rules, select
from diskprefix.values import LeftOut, Prompt, Scope
from tests.agent_bodies import words
from tests.daemon.chat.rendering import rendered, tokenizer_with
from tests.daemon.server.chat_model import POSITIONS, VOCAB_SIZE


def count(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def message(role: Any, index: int, num_words: int, **fields: Any) -> Message:
    return Message(role=role, content=[TextPart(f"m{index} " * num_words, "")], path=f"messages.{index}", **fields)


def conversation_of(roles: str, num_words: int = 84) -> Conversation:
    """Messages that count 100 tokens each: s(ystem), u(ser), a(ssistant), c(all) and r(esult)."""
    names = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "r": "tool"}
    return Conversation(
        messages=[
            message(
                names[role],
                index,
                num_words - (17 if role == "c" else 0),
                tool_calls=[ToolCall(f"id{index}", "f", {})] if role == "c" else (),
            )
            for index, role in enumerate(roles)
        ]
    )


def left_of(conversation: Conversation, threshold: int) -> list[str]:
    """The messages that are left of a conversation: indices of messages, and - for the placeholder."""
    kept, _ = shortened(conversation, threshold, count)
    return ["-" if m.content[0] == TextPart(PLACEHOLDER, m.path) else m.path.rpartition(".")[2] for m in kept.messages]


@pytest.mark.parametrize(
    ("roles", "threshold", "left"),
    [
        ("suauau", 600, "0 1 2 3 4 5"),
        ("suauauau", 700, "0 1 - 7"),
        ("suauauau", 799, "0 1 - 7"),
        ("suauauauau", 1000, "0 1 2 3 4 5 6 7 8 9"),
        ("suauauauau", 900, "0 1 - 9"),
        ("sucrcrcrcr", 900, "0 1 8 9"),
        ("sucrcrcrcrcrcr", 1000, "0 1 10 11 12 13"),
        ("suaucrcrcrcr", 1000, "0 1 - 3 10 11"),
        ("suuauuau", 700, "0 1 2 - 7"),
        ("susaucrsu", 700, "0 1 2 - 8"),
        ("sucrr" + "cr" * 4, 1000, "0 1 9 10 11 12"),
        ("ua" * 6 + "u", 1100, "0 - 10 11 12"),
        ("su", 100, "0 1"),
        ("suuuuuu", 100, "0 1 2 3 4 5 6"),
        ("sucr", 100, "0 1 2 3"),
    ],
)
def test_the_oldest_exchanges_are_left_out_until_half_of_the_threshold_remains(
    roles: str, threshold: int, left: str
) -> None:
    assert left_of(conversation_of(roles), threshold) == left.split()


def test_marks_of_what_is_left_out_are_gone_and_the_reply_is_told_what_was() -> None:
    sent = conversation_of("suauauau")
    marked = [replace(m, mark=CacheMark()) if i in (2, 7) else m for i, m in enumerate(sent.messages)]
    kept, left_out = shortened(replace(sent, messages=marked), 700, count)
    assert [m.path for m in kept.messages if m.mark] == ["messages.7"]
    assert left_out == LeftOut("message", 5, "messages.2", "messages.6")
    assert shortened(sent, 800, count)[1] is None


def test_tools_and_reasoning_count() -> None:
    sent = conversation_of("suauau")
    tools = [{"type": "function", "function": {"name": "f", "description": "word " * 500}}]
    assert shortened(sent, 700, count)[1] is None
    assert shortened(replace(sent, tools=tools), 700, count)[1] is not None
    thought = [replace(m, reasoning="word " * 500) if i == 4 else m for i, m in enumerate(sent.messages)]
    assert shortened(replace(sent, messages=thought), 700, count)[1] is not None


exchanges = st.sampled_from(["a", "cr", "crr", "au", "auu", "crsu", "cru"])
conversations = st.builds(
    lambda head, rest, sizes: (head + "".join(rest) + "u", sizes),
    st.sampled_from(["u", "su", "suu", "usu"]),
    st.lists(exchanges, min_size=1, max_size=30),
    st.lists(st.integers(1, 300), min_size=140, max_size=140),
)


def requests_of(roles: str, sizes: Sequence[int]) -> list[Conversation]:
    whole = conversation_of(roles).messages
    sized = [replace(m, content=[TextPart("x " * n, "")]) for m, n in zip(whole, sizes, strict=False)]
    ends = [
        end for end in range(1, len(roles) + 1) if roles[end - 1] in "ur" and roles[end : end + 1] in ("a", "c", "")
    ]
    return [Conversation(messages=sized[:end]) for end in ends]


@given(conversations, st.integers(200, 3000))
def test_compression_keeps_its_earlier_choices_from_turn_to_turn(drawn: tuple[str, list[int]], threshold: int) -> None:
    sent = requests_of(*drawn)
    answers = [shortened(conversation, threshold, count) for conversation in sent]
    for (kept, left_out), (later, later_left_out) in pairwise(answers):
        was, now = (one.count if one else 0 for one in (left_out, later_left_out))
        assert now >= was
        if now == was:
            assert list(later.messages[: len(kept.messages)]) == list(kept.messages)
    for conversation, (shorter, _) in zip(sent, answers, strict=True):
        messages, stay = conversation.messages, shorter.messages
        roles = [m.role for m in messages]
        head = roles.index("assistant") if "assistant" in roles else len(roles)
        assert list(stay[:head]) == list(messages[:head])
        assert stay[-1] is messages[-1]
        for before, after in pairwise([m.role for m in stay]):
            assert after != "tool" or before in ("assistant", "tool")
        results, sent_results = (sum(m.role == "tool" for m in listed) for listed in (stay, messages))
        assert (results == 0) == (not any(m.tool_calls for m in stay))
        assert results <= sent_results


@pytest.fixture(scope="module")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], PromptRenderer]:
    tokenizer = tokenizer_with(tmp_path_factory.mktemp("tokenizer"))

    def make(limit: int | None) -> PromptRenderer:
        compress = None if limit is None else partial(fit, limit)
        return PromptRenderer(tokenizer, vocab_size=VOCAB_SIZE, max_positions=POSITIONS, compress=compress)

    return make


def session(num_calls: int) -> list[Conversation]:
    messages: list[Message] = [
        Message(role="system", content=[TextPart(words(1, 30), "")], path="messages.0"),
        Message(role="user", content=[TextPart(words(2, 10), "")], path="messages.1"),
    ]
    sent = []
    for number in range(num_calls):
        sent.append(Conversation(messages=list(messages)))
        path = f"messages.{len(messages)}"
        call = ToolCall(f"id{number}", "Read", {"path": words(number, 2)})
        messages.append(Message(role="assistant", tool_calls=[call], path=path))
        messages.append(
            Message(role="tool", tool_call_id=call.id, content=[TextPart(words(3 + number, 20), "")], path=path)
        )
    return sent


def test_below_the_threshold_every_byte_is_as_without_compression(
    renderer_of: Callable[[int | None], PromptRenderer],
) -> None:
    conversation = session(8)[-1]
    plain = rendered(renderer_of(None), conversation)
    num_tokens = len(plain.token_ids)
    for limit, is_same in ((num_tokens, True), (num_tokens - 1, False)):
        prompt = rendered(renderer_of(limit), conversation)
        assert (prompt.token_ids.tolist() == plain.token_ids.tolist()) == is_same
        assert prompt.rewriting.is_shortened != is_same
        assert bool(prompt.rewriting.left_out) != is_same


def test_the_text_that_the_template_writes_is_that_of_the_prompt(
    renderer_of: Callable[[int | None], PromptRenderer],
) -> None:
    renderer, conversation = renderer_of(600), session(30)[-1]
    text = renderer.text_of(conversation)
    assert (
        len(renderer.tokenize(text, add_special_tokens=False)) == len(rendered(renderer, conversation).token_ids) < 600
    )


def kept_of(prompt: Prompt, scope: Scope) -> tuple[int, str]:
    rules = Rules(block_size=16, min_tokens=16, cold_max=100, interval=100, state="token")
    chosen = select(scope, prompt, rules, Sighting())
    return chosen.kept, chosen.reason


def test_auto_and_n_step_aside_for_a_prompt_with_messages_left_out_and_full_keeps_it(
    renderer_of: Callable[[int | None], PromptRenderer],
) -> None:
    conversation = session(30)[-1]
    prompt = rendered(renderer_of(600), conversation)
    whole = replace(prompt, rewriting=replace(prompt.rewriting, is_shortened=False))
    for scope in (Scope("auto", 30), Scope("tokens", 100)):
        assert kept_of(prompt, scope) == (0, "left_out")
        assert kept_of(whole, scope)[0] > 0
    assert kept_of(prompt, Scope("full")) == kept_of(whole, Scope("full")) == (len(prompt.token_ids), "full")
    marked = [replace(m, mark=CacheMark()) if m.role == "user" else m for m in conversation.messages]
    assert kept_of(rendered(renderer_of(600), replace(conversation, messages=marked)), Scope("auto", 30))[1] == "marks"


def test_a_tool_that_came_with_a_message_that_is_left_out_is_offered_from_the_beginning(
    renderer_of: Callable[[int | None], PromptRenderer],
) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "description": "Acts.", "parameters": {"type": "object"}}}
        for name in ("first", "early", "newest")
    ]
    asked, named = conversation_of("su" + "au" * 5), {3: (NewTool("early"),), 11: (NewTool("newest"),)}
    messages = [replace(each, new_tools=named.get(index, ())) for index, each in enumerate(asked.messages)]
    asked = replace(asked, messages=messages, tools=tools, late=frozenset({"early", "newest"}))
    written = renderer_of(1000).text_of(asked)
    assert "m3 " not in written
    assert [written.count(f'"name": "{name}"') for name in ("first", "early", "newest")] == [1, 1, 1]
    assert written.index('"early"') < written.index("m1 ") < written.index('"newest"')


def test_the_threshold_is_the_models_and_at_most_what_is_served() -> None:
    def threshold(wanted: str, served: int) -> int:
        compress: Any = open_compression(Settings(prefill_compression=wanted), 32768, served)
        return int(compress.args[0])

    assert open_compression(Settings(), 1024, 1024) is None
    assert [threshold("auto", served) for served in (32768, 30000, 20480)] == [24576, 22500, 15360]
    assert [threshold("30000", served) for served in (32768, 20480)] == [30000, 15360]
    with pytest.raises(SettingsError, match="40000 is not below the model's context of 32768 tokens"):
        threshold("40000", 20480)

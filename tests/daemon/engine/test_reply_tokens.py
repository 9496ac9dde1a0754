"""The tokens of a reply: how they are forced where a thought must end, and become text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models

from diskprefix.daemon.engine import detokenize
from diskprefix.daemon.engine.detokenize import TextStream, special_tokens
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import Constraint, FreeText, GenerateRequest, TokenLogprob
from diskprefix.daemon.engine.thought_limit import ThoughtBudget, ThoughtLimit
from diskprefix.runtime.files.folder_tokenizer import tokenizer_of_transformers
from diskprefix.runtime.files.tokenizer import Tokenizer as OurTokenizer
from tests.daemon.engine.driving import load, request, run_request, run_together, said, tokens, tokens_of
from tests.runtime.plan.tiny import SPECIAL_TOKENS, tokenizer

# Forced at the end of a thought.

PROMPT = tokens(200, 3)
LIMIT = 9
CLOSING = (40, 41, 42)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = load(folder, tmp_path_factory.mktemp("kv"))
    yield engine
    engine.close()


def watch_for(end: str) -> Callable[[], Callable[[str], bool]]:
    """Returns what makes watches of replies that are one thought up to `end`."""

    def new_watch() -> Callable[[str], bool]:
        seen = ""

        def see(text: str) -> bool:
            nonlocal seen
            seen += text
            return end not in seen

        return see

    return new_watch


def limited(engine: Engine, one: GenerateRequest, limit: int = LIMIT) -> GenerateRequest:
    end = engine.tokenizer.decode(CLOSING)
    return replace(one, thought_budget=ThoughtBudget(max_tokens=limit, closing=CLOSING, new_watch=watch_for(end)))


def test_a_thought_has_as_many_tokens_as_its_budget_and_the_reply_goes_on_behind_it(engine: Engine) -> None:
    free = tokens_of(run_request(engine, request(PROMPT, max_tokens=24)))
    for _ in range(2):  # computed, and restored
        ended = tokens_of(run_request(engine, limited(engine, request(PROMPT, max_tokens=24))))
        assert ended[:LIMIT] == [*free[: LIMIT - 3], *CLOSING]
    behind = np.concatenate([PROMPT, np.array(ended[:LIMIT], np.int32)])
    assert ended[LIMIT:] == tokens_of(run_request(engine, request(behind, max_tokens=24 - LIMIT)))


def test_each_choice_has_the_budget_and_one_of_less_than_the_tag_leaves_the_tag(engine: Engine) -> None:
    one = request(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=16)
    (client,) = run_together(engine, [limited(engine, one)])
    replies = [client.tokens_of(choice) for choice in range(3)]
    assert all(reply[LIMIT - 3 : LIMIT] == list(CLOSING) for reply in replies)
    assert len({tuple(reply[: LIMIT - 3]) for reply in replies}) == 3
    (client,) = run_together(engine, [limited(engine, one, limit=1)])
    assert [client.tokens_of(choice)[:3] for choice in range(3)] == [list(CLOSING)] * 3
    assert client.tokens.count(CLOSING[1]) == 1


def test_guesses_change_nothing(engine: Engine, folder: Path, tmp_path: Path) -> None:
    repeated = np.tile(tokens(40, 1), 5)
    one = limited(engine, request(repeated, max_tokens=40, logit_bias={}))
    guessing = load(folder, tmp_path, speculative="ngram")
    (client,), (plain,) = run_together(guessing, [one]), run_together(engine, [one])
    guessing.close()
    assert said(client) == said(plain)
    assert client.done.timings.accepted_tokens


def test_what_is_constrained_begins_behind_the_ended_thought(engine: Engine) -> None:
    end = engine.tokenizer.decode(CLOSING)
    constraint = Constraint(kind="lark", source="start: /[ab]{4}/", before=FreeText(end=end))
    one = limited(engine, request(PROMPT, max_tokens=24, logit_bias={}, constraint=constraint))
    reply = tokens_of(run_request(engine, one))
    assert reply[LIMIT - 3 : LIMIT] == list(CLOSING)
    answer = engine.tokenizer.decode(reply[LIMIT:])
    assert len(answer) >= 4
    assert set(answer[:4]) <= {"a", "b"}


def test_a_reply_that_ends_inside_its_thought_closes_it_and_goes_on_once(engine: Engine) -> None:
    free = tokens_of(run_request(engine, request(PROMPT, max_tokens=9)))
    at, ends = free.index(free[-1]), {free[-1]}
    budget = ThoughtBudget(max_tokens=None, closing=CLOSING, new_watch=watch_for("never"), end_ids=ends)
    for _ in range(2):  # computed, and restored
        one = replace(request(PROMPT, max_tokens=20), thought_budget=budget)
        reply = tokens_of(run_request(engine, one))
        assert reply[: at + 3] == [*free[:at], *CLOSING]
    behind = np.concatenate([PROMPT, np.array(reply[: at + 3], np.int32)])
    assert reply[at + 3 :] == tokens_of(run_request(engine, request(behind, max_tokens=20 - at - 3)))


@pytest.mark.parametrize(
    ("texts", "opened", "taken"),
    [
        (["<t>", "hm"], False, [7, 9]),
        (["hm"], True, [7, 9]),
        ([], True, [7, 9]),
        (["<t>", "hm", "</t>"], False, [9, 9]),
        (["an answer"], False, [9, 9]),
    ],
)
def test_an_end_stands_for_the_closing_tag_inside_a_thought_alone(
    texts: list[str], opened: bool, taken: list[int]
) -> None:
    def new_watch() -> Callable[[str], bool]:
        seen = "<t>" if opened else ""

        def see(text: str) -> bool:
            nonlocal seen
            seen += text
            return seen.rpartition("<t>")[1] != "" and "</t>" not in seen.rpartition("<t>")[2]

        return see

    limit = ThoughtLimit(ThoughtBudget(max_tokens=None, closing=(7,), new_watch=new_watch, end_ids={9}))
    for text in texts:
        assert limit.in_place_of(3) == 3
        limit.record_text(text)
    found = [limit.in_place_of(9)]
    limit.record_text("")
    assert [*found, limit.in_place_of(9)] == taken


def test_a_second_thought_has_what_the_first_one_left() -> None:
    budget = ThoughtBudget(max_tokens=4, closing=(7,), new_watch=lambda: lambda text: text.startswith("t"))
    limit = ThoughtLimit(budget)
    forced = []
    for text in ["t1", "t2", "an answer", "t3", "t4", "t5", "more", "t6", "t7"]:
        forced.append(limit.in_place_of(3))
        limit.record_text(text)
    # The 7 before `t4` ends the thought; nothing is forced again until something else has come.
    assert forced == [3, 3, 3, 3, 7, 3, 3, 3, 7]


def test_a_thought_that_the_prompt_opened_is_ended_at_once_where_nothing_is_left() -> None:
    limit = ThoughtLimit(ThoughtBudget(max_tokens=1, closing=(7, 8), new_watch=lambda: lambda _text: True))
    assert limit.in_place_of(3) == 7
    limit.record_text("</")
    assert limit.in_place_of(3) == 8


# Text.

_tokenizer: Any = tokenizer_of_transformers(tokenizer())


def ids(text: str) -> list[int]:
    encoded: list[int] = _tokenizer.encode(text, add_special_tokens=False)
    return encoded


def stream(text: str, *stop: str) -> tuple[str, str | None]:
    """The text of a reply that stops where a stop string is complete, and that string."""
    out = TextStream(_tokenizer, stop, ())
    pieces = []
    for token in ids(text):
        pieces.append(out.push(token))
        if out.stopped_by:
            return "".join(pieces), out.stopped_by
    return "".join(pieces) + out.finish(), None


@given(st.text(alphabet="ab é€😀\n", max_size=20))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    assert stream(text) == (text, None)


def test_a_character_of_several_tokens_is_never_shown_in_part() -> None:
    out = TextStream(_tokenizer, (), ())
    tokens = ids("😀")
    assert len(tokens) == 4
    assert [out.push(token) for token in tokens] == ["", "", "", "😀"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), ("one ", "END")),
        ("one EN two", ("END",), ("one EN two", None)),
        ("one EN", ("END",), ("one EN", None)),
        ("a, b\n\nc", ("\n\n", ","), ("a", ",")),
        ("aab", ("ab",), ("a", "ab")),
        ("ENEND", ("END",), ("EN", "END")),
        ("stop", ("stop",), ("", "stop")),
    ],
)
def test_stop_strings_end_the_text_before_them(
    text: str, stop: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    assert stream(text, *stop) == expected


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_stopping_equals_cutting_the_whole_text(text: str, stops: list[str]) -> None:
    """Token by token the earliest complete stop string wins; its text never appears."""
    shown, stopped = stream(text, *stops)
    assert (stopped is not None) == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)


def data_of(tokenizer: Any, tokens: list[int]) -> bytes:
    """The bytes of the tokens of a reply, as its log probabilities have them."""
    out = TextStream(tokenizer, (), ())
    items = [(TokenLogprob(token, b"", -1.0, (TokenLogprob(token, b"", -2.0),)),) for token in tokens]
    found = [out.event(0, token, item, None)[0].logprobs[0] for token, item in zip(tokens, items, strict=True)]
    assert [one.top[0].data for one in found] == [one.data for one in found]
    return b"".join(one.data for one in found)


@given(st.text(alphabet="ab é€😀\n�", max_size=20))
def test_the_bytes_of_tokens_join_to_the_text(text: str) -> None:
    """Tokens that are a part of a character had none."""
    assert data_of(_tokenizer, ids(text)) == text.encode()


def test_only_special_tokens_that_are_not_hidden_have_text() -> None:
    special = special_tokens(_tokenizer)
    assert set(special) == set(SPECIAL_TOKENS)
    out = TextStream(_tokenizer, (), {special["<|im_end|>"]})
    pieces = [out.push(token) for token in ids("a<|im_end|>b<|im_start|>c")]
    assert pieces == ["a", "", "b", "<|im_start|>", "c"]
    assert out.finish() == ""


def test_a_stop_string_is_found_in_special_tokens_that_are_shown() -> None:
    assert stream("a<|im_start|>b", "<|im_start|>b") == ("a", "<|im_start|>b")


_WORDS = ["▁a", "b", "▁", "▁the", "日", "é", "🦀"]


def byte_fallback() -> Any:
    """A tokenizer as SentencePiece models have it: words, and bytes for all else."""
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    backend = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(vocab)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return OurTokenizer(backend, {})


def streamed(*pieces: str | int, stop: tuple[str, ...] = ()) -> str:
    """The text of words (as in the vocabulary) and bytes."""
    out = TextStream(_byte_fallback, stop, ())
    return "".join(out.push(token) for token in fallback_ids(*pieces)) + out.finish()


def fallback_ids(*pieces: str | int) -> list[int]:
    return [1 + piece if isinstance(piece, int) else 257 + _WORDS.index(piece) for piece in pieces]


_byte_fallback = byte_fallback()
_SUN = tuple("日".encode())


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("▁the", *_SUN, *_SUN, "▁a", *_SUN), "the日日 a日"),
        ((*_SUN, 0xFF, "▁the", "▁a"), "日� the a"),
        ((*_SUN, 0xFF, *_SUN[:2], "b", *_SUN), "日���b日"),
        ((*_SUN, 0xFF), "日�"),
        (("▁a", *_SUN, _SUN[0], "▁the", _SUN[0], "日"), "a日� the�日"),
        ((0xFF, "▁the", "▁the"), "� the the"),
    ],
)
def test_bytes_that_make_no_character_do_not_end_the_reply(pieces: tuple[str | int, ...], text: str) -> None:
    assert streamed(*pieces) == text
    assert data_of(_byte_fallback, fallback_ids(*pieces)).decode("utf-8", "replace") == text.replace("��b", "�b")


@pytest.mark.parametrize("word", ["b", "▁the"])
@pytest.mark.parametrize("num", [16, 17, 19, 40])
def test_many_bytes_that_make_no_character_are_shown_before_the_next_one(num: int, word: str) -> None:
    text = "b" + "�" * num + word.replace("▁", " ")
    assert streamed("b", *[0xFF] * num, word) == text
    assert streamed("b", *[0xFF] * num, *_SUN, word).endswith(word.replace("▁", " "))


@pytest.mark.parametrize("num", [1, 5, 6, 16, 17, 29])
def test_the_character_that_stands_for_broken_bytes_is_shown_as_it_is(num: int) -> None:
    assert stream("a" + "�" * num + "日b") == ("a" + "�" * num + "日b", None)
    bytes_of = tuple("�".encode())
    assert streamed("b", *bytes_of * num, "▁the") == "b" + "�" * num + " the"


def test_broken_bytes_are_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_decoded = [0]

    class Stream:
        """Decodes what it has not shown."""

        def __init__(self, ids: tuple[int, ...] = (), **_: bool) -> None:
            self.ids = list(ids)

        def step(self, _: object, token: int) -> None:
            self.ids.append(token)
            num_decoded[0] += len(self.ids)

    def decode(ids: list[int], **_: bool) -> str:
        num_decoded[0] += len(ids)
        return "�" * len(ids)

    monkeypatch.setattr(detokenize, "DecodeStream", Stream)
    out = TextStream(SimpleNamespace(backend_with=lambda _: SimpleNamespace(decode=decode)), (), ())
    counts = []
    for _ in range(2):
        for _ in range(1000):
            out.push(1 + 0xFF)
        counts.append(num_decoded[0])
    assert counts[1] < 3 * counts[0]


class CountedText(str):
    """Counts how often a character of it is looked at, and how much of it is copied."""

    looked_at = 0

    def __getitem__(self, place: Any) -> str:
        part = super().__getitem__(place)
        CountedText.looked_at += max(1, len(part))
        return part


def test_a_stop_string_that_is_held_is_not_compared_again_for_each_token() -> None:
    CountedText.looked_at = 0
    stops = ("a" * 1000 + "x", *(CountedText("a" * num + "b" + "c" * 900) for num in range(1, 16)))
    out = TextStream(_tokenizer, stops, ())
    for token in ids("a" * 500):
        out.push(token)
    assert CountedText.looked_at < 500 * len(stops) * 8


def test_a_stop_string_is_found_after_broken_bytes() -> None:
    assert streamed(*_SUN, 0xFF, "▁the", stop=(" the",)) == "日�"


@given(st.lists(st.one_of(st.sampled_from(_WORDS), st.integers(0, 255)), max_size=40))
def test_whatever_bytes_come_the_words_are_kept(pieces: list[str | int]) -> None:
    text = streamed("b", *pieces)
    at = 0
    for piece in pieces:
        if isinstance(piece, str):
            word = piece.replace("▁", " ")
            at = text.index(word, at) + len(word)
